"""Read the files of torch.distributed.checkpoint, checked, without running anything in them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ... import _torch
from .._errors import CheckpointError, DamagedError
from .._rekey import clean_name
from .._state.leaves import Box, TensorLeaf, TensorRange
from .untrusted import Record, checksum, open_regular, read_record
from .writer import check_chunks, iter_boxes, make_chunk

__all__ = ["StoredTensors", "plan_reads"]


def plan_reads(parts: Sequence[TensorRange], metadata: Metadata) -> Iterator[tuple[ReadItem, Tensor]]:
    """Yield the parts of stored chunks that overlap with some ranges, and the view of the ranges' memory for each."""
    boxes: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
    for part in parts:
        boxes[part.name] += iter_boxes(part, part.begin, part.begin + len(part.data))
    for name, pairs in boxes.items():
        stored: Any = metadata.state_dict_metadata[name]
        for item in create_read_items_for_chunk_list(name, stored, [make_chunk(box) for box, _ in pairs]):
            view = pairs[item.dest_index.index or 0][1]
            for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                view = view.narrow(dim, start, length)
            yield item, view


def _read_into(memory: Tensor, file: BinaryIO, offset: int, found: Record, *, check: bool) -> None:
    if not found.nbytes:
        return
    raw = _torch.host_bytes(memory)
    file.seek(offset + found.offset)
    at = 0
    while at < len(raw) and (read := file.readinto(raw[at:])):  # pyright: ignore[reportAttributeAccessIssue]
        at += read
    if at < len(raw):
        raise DamagedError("it was cut short")
    if check and checksum(raw) != found.crc32:
        raise DamagedError("its checksum is not what was written")


def _has_layout(target: Tensor, found: Record) -> bool:
    is_same = target.dtype == found.dtype and target.nbytes == found.nbytes
    return is_same and target.is_contiguous() and target.device.type == "cpu"


def _read_exactly(file: BinaryIO, offset: int, size: int) -> bytes:
    """Read ``size`` bytes at an offset; raise DamagedError if the file ends before."""
    file.seek(offset)
    raw = b""
    while len(raw) < size and (more := file.read(size - len(raw))):
        raw += more
    if len(raw) < size:
        raise DamagedError("it was cut short")
    return raw


@contextmanager
def _explain_damage(tensor: str, file: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"tensor '{tensor}': file '{file}' of the checkpoint is missing") from error
    except (DamagedError, OSError) as error:
        raise CheckpointError(f"tensor '{tensor}' in file '{file}' of the checkpoint is damaged: {error}") from error


# --- The tensors in the files of a checkpoint: find them by name, check them, and read ranges of them ---


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint, by their keys: their names, perhaps with the prefixes of wrappers."""

    directory: Path
    metadata: Metadata
    checksums: Mapping[str, Mapping[str, int]]
    """Those of the manifest, as in `Manifest`."""
    _checked: set[str] = field(default_factory=set)

    def find_key(self, names: Sequence[str]) -> str | None:
        """Return the key of the first of these names that the checkpoint has, or None."""
        every = self.metadata.state_dict_metadata
        return next((key for name in names for key in (name, self._keys.get(name)) if key is not None and key in every), None)

    @cached_property
    def _keys(self) -> dict[str, str]:
        """The keys by their clean names, if only one key has that name."""
        out: dict[str, str] = {}
        for key in self.metadata.state_dict_metadata:
            out[clean_name(key)] = "" if clean_name(key) in out else key
        return {name: key for name, key in out.items() if key}

    def check_tensor(
        self, names: Sequence[str], shape: Sequence[int] | None, dtype: torch.dtype, hint: str = "", why: str = ""
    ) -> tuple[int, ...]:
        """Return the shape of a stored tensor. Raises ValueError, with ``why`` and a hint, if it is missing or does not fit."""
        key = self.find_key(names)
        tensor = None if key is None else self.metadata.state_dict_metadata[key]
        if key is None or not isinstance(tensor, TensorStorageMetadata):
            others = sorted(self.metadata.state_dict_metadata)[:3]
            self._check_form(names[0])
            raise ValueError(
                f"tensor '{names[0]}' is not in the checkpoint: expected {list(shape or ())} {dtype}, got none; the checkpoint "
                f"has {others} and so on: "
                + (why or "was another model saved, or has a checkpoint of funshard lost its funshard.json?")
            )
        if (shape is not None and tuple(tensor.size) != tuple(shape)) or tensor.properties.dtype != dtype:
            raise ValueError(
                f"tensor '{names[0]}': expected {list(shape or ())} {dtype}, got {list(tensor.size)} {tensor.properties.dtype} "
                f"in the checkpoint: {why or 'was another model saved?'}{hint}"
            )
        self._check_chunks(key, tensor)
        return tuple(tensor.size)

    def _check_form(self, name: str) -> None:
        """Raise ValueError if the checkpoint has a missing tensor in another form: in a codec, or in its own dtype."""
        slot, _, part = name.rpartition(".")
        if self.find_key([f"{name}.codes"]) is not None:
            raise ValueError(
                f"tensor '{name}' is in a codec in the checkpoint: expected a like= whose state is encoded for the same "
                "parameters (at_least= of quantized_state), or no like=; fs.optim.decode_state converts the state"
            )
        if part in ("codes", "scales") and self.find_key([slot]) is not None:
            raise ValueError(
                f"tensor '{slot}' is in no codec in the checkpoint: expected a like= whose state is not encoded for the same "
                "parameters (at_least= of quantized_state), or no like=; fs.optim.encode_state converts the state"
            )

    def _check_chunks(self, key: str, tensor: TensorStorageMetadata) -> None:
        """Check, once, that a tensor's chunks tile it and that each is in a file. Raises CheckpointError otherwise."""
        if key in self._checked:
            return
        try:
            check_chunks(tensor)
        except ValueError as error:
            raise CheckpointError(f"tensor '{key}' of the checkpoint is damaged: {error}") from error
        storage: Any = self.metadata.storage_data
        for chunk in tensor.chunks:
            if MetadataIndex(key, chunk.offsets) not in storage:
                raise CheckpointError(
                    f"tensor '{key}' of the checkpoint is damaged: its piece at {[*chunk.offsets]} is in none of the files"
                )
        self._checked.add(key)

    def check_leaf(self, leaf: TensorLeaf) -> tuple[int, ...]:
        """Return the stored shape of a leaf, which has a row for each rank that saved it if it is each rank's own."""
        shape = self.check_tensor([leaf.name], None if leaf.is_per_rank else leaf.shape, leaf.dtype)
        if leaf.is_per_rank and (not shape or shape[1:] != leaf.shape):
            raise ValueError(
                f"tensor '{leaf.name}' is each rank's own: expected [ranks, {str([*leaf.shape])[1:]} in the checkpoint, got "
                f"{[*shape]}: was another state saved?"
            )
        return shape

    def read(self, parts: Sequence[TensorRange], *, check: bool) -> None:
        """Read ranges of these tensors into their memory, in file order. Raises CheckpointError for damage."""
        wanted: dict[tuple[str, int, int], list[tuple[ReadItem, Tensor]]] = defaultdict(list)
        storage: Any = self.metadata.storage_data
        for item, target in plan_reads(parts, self.metadata):
            info = storage[item.storage_index]
            wanted[info.relative_path, info.offset, info.length].append((item, target))
        file, opened = None, ""
        with ExitStack() as stack:
            for (name, offset, length), items in sorted(wanted.items(), key=lambda pair: pair[0]):
                with _explain_damage(items[0][0].storage_index.fqn, name):
                    if file is None or name != opened:  # one open file at a time
                        stack.close()
                        file, opened = stack.enter_context(open_regular(self.directory / name)), name
                    expected = self.checksums.get(name, {}).get(str(offset))
                    self._read_chunk(file, offset, length, items, expected, check=check)

    def _read_chunk(
        self,
        file: BinaryIO,
        offset: int,
        length: int,
        items: list[tuple[ReadItem, Tensor]],
        expected: int | None,
        *,
        check: bool,
    ) -> None:
        """Read the parts of one chunk, a tensor in a file, that some items ask for; ``expected`` is its checksum, if known."""
        if offset + length > os.fstat(file.fileno()).st_size:
            raise DamagedError("it was cut short")
        found = read_record(lambda at, size: _read_exactly(file, offset + at, size), length, check_other_members=check)
        if expected is not None and found.crc32 != expected:
            raise DamagedError("its checksum is not that in 'funshard.json': expected the file of this save, is it another's?")
        for item, _ in items:
            self._check_chunk(found, item.storage_index)
        dense = torch.empty_strided(found.shape, found.stride, device="meta").is_contiguous()
        for item, target in items:
            if dense and tuple(item.lengths) == found.shape and _has_layout(target, found):  # most items: no buffer in between
                _read_into(target, file, offset, found, check=check)
                continue
            raw = torch.empty(found.nbytes, dtype=torch.uint8)
            _read_into(raw, file, offset, found, check=check)
            part = raw.view(found.dtype).as_strided(found.shape, found.stride, found.start)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            target.copy_(part)

    def _check_chunk(self, found: Record, index: MetadataIndex) -> None:
        tensor: Any = self.metadata.state_dict_metadata[index.fqn]
        expected = tuple(tensor.chunks[index.index].sizes), tensor.properties.dtype
        if (found.shape, found.dtype) != expected:
            raise DamagedError(f"expected {[*expected[0]]} {expected[1]} there, got {[*found.shape]} {found.dtype}")
