"""load: read a checkpoint as a state of any spec; each rank reads what its slices overlap with."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .. import _torch
from .._core.checks import bind_spec
from .._core.spec import PartitionSpec
from .._spec.local import describe_pieces
from .._torch.phases import LOGGER, phase
from ._errors import CheckpointError, DamagedError
from ._files.manifest import MANIFEST, METADATA, read_manifest, read_metadata
from ._files.remote import AnyPath, open_path
from ._files.untrusted import checksum, find_record, open_regular, read_regular
from ._files.writer import PIECE_BYTES, check_chunks, iter_boxes, make_chunk
from ._optimizer_state_dict import clean_name
from ._ranks import TIMEOUT, Ranks, connect_ranks
from ._state.json_tree import check_rank_count, iter_plain_values, select_part, tree_from_json
from ._state.leaves import (
    Box,
    OwnedLeaf,
    ScalarLeaf,
    SliceLeaf,
    StoredLeaf,
    TensorLeaf,
    TensorRange,
    ValueLeaf,
    is_uniform,
    leaf_names,
)
from ._state.tree import Node, build_state, describe, iter_leaves, make_container_node, parameter_slice

_OTHER_BLOCKS = (
    "blocks of a codec follow the memory order of each piece over local axes: was it saved with others? Load it as it was "
    "saved, and save what fs.optim.decode_state returns, which loads with any"
)


def load(
    path: str | os.PathLike[str],
    spec: PartitionSpec,
    *,
    only: str | None = None,
    like: Any = None,
    check: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """Return the state that `save` wrote to a directory, sharded by this spec. Nothing in the files is run.

    The policy, the mesh, `P` and the number of ranks may differ from those of the save. Each rank reads what overlaps with its
    slices. Checkpoints of FSDP1, FSDP2 and DDP by torch.distributed.checkpoint are read by the names of their parameters:
    ``only="model"`` returns the shards of what was saved as ``{"model": state_dict}``. See ``checkpoints.md``.

    Args:
        path: The directory of the checkpoint, the same one on all ranks, or a copy of it.
        spec: A bound spec, all ranks of whose mesh call this.
        only: The path of a part of the state to read, such as ``"params"`` or ``"opt.ema"``.
        like: A state with the structure, shapes and dtypes of the result; tensors may be on the meta device. It is needed for
            containers of other classes and for optimizer states that other programs wrote.
        check: Whether to compare the checksums of the records that are read.
        timeout: The seconds that ranks wait for a lost rank.

    Returns:
        The state, or the part of it. Tensors are on the mesh's device if they were on an accelerator, else on the host.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: Naming the parameter, for one that only the checkpoint or the spec has, or of another shape or dtype.
        CheckpointError: Naming tensor and file, for damage. Every rank raises the errors of all.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        >>> one, two = fs.policies.whole()(model), fs.by_path({"1": fs.P("shard")})(model)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.save(f"{directory}/step3", fs.shard(model, one), one).wait()
        ...     print(sorted(fs.checkpoint.load(path, two)))
        ['', '1']
    """
    spec = bind_spec(spec)
    if only is not None and not isinstance(only, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"checkpoint.load: only: expected the path of a part of the state, as 'params', got {only!r}")
    path = os.fsdecode(path)
    ranks = connect_ranks(spec, "checkpoint.load", timeout, only=only)
    loader, found = ranks.run_and_exchange(
        lambda: _Loader(open_path(path), spec, ranks, only, like, check=check),
        "checkpoint.load",
        lambda loader: (loader.identity, path),
    )
    if other := next((rank for rank, (identity, _) in enumerate(found) if identity != found[0][0]), 0):
        raise ValueError(
            f"checkpoint.load: expected one checkpoint and names of one like= on all ranks, got on rank 0 {found[0][1]!r}, on "
            f"rank {other} {found[other][1]!r}, with other contents or names; latest(directory, spec) gives all ranks one path"
        )
    state = ranks.run(loader.read, "checkpoint.load")
    LOGGER.info("checkpoint.load: %s is read", path)
    return state


class _Loader:
    def __init__(
        self, directory: AnyPath, spec: PartitionSpec, ranks: Ranks, only: str | None, like: Any, *, check: bool
    ) -> None:
        self._spec, self._ranks = spec, ranks
        manifest = read_manifest(directory)  # also checks the metadata's checksum
        self._stored = _StoredTensors(directory, read_metadata(directory), manifest.records if manifest else {}, check)
        path = tuple(only.split(".")) if only else ()
        saved: dict[str, Any] = {}
        if manifest:
            with _explain_bad_tree(directory):
                saved = dict(iter_plain_values(manifest.state, ranks.rank))
        self._is_template = like is not None
        if like is not None:
            self._node, _ = describe(like, spec, path, is_template=True)
        elif manifest:
            with _explain_bad_tree(directory):
                self._node = tree_from_json(select_part(manifest.state, only or ""), spec, ranks.rank, ranks.size, path)
        else:
            children: dict[str, Node] = {unit.key: parameter_slice(unit, path) for unit in spec}  # another program's state_dict
            self._node = make_container_node(children, is_complete=True)
        leaves = list(iter_leaves(self._node))
        self._leaves = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, ValueLeaf)}
        self._values = [_find_value(leaf, saved) if isinstance(leaf, ValueLeaf) else None for leaf in leaves]
        for leaf in self._leaves.values():
            self._check(leaf)
        names = json.dumps([name for leaf in leaves for name in leaf_names(leaf)])
        contents = manifest.metadata if manifest else (str(directory), checksum(read_regular(directory / METADATA)))
        self.identity = contents, checksum(names.encode())
        """What is equal on all ranks: the checkpoint, by the unique number that is in its metadata, and the leaves to read."""

    def _check(self, leaf: StoredLeaf) -> None:
        match leaf:
            case TensorLeaf():
                shape = self._stored.check_tensor([leaf.name], None if leaf.is_per_rank else leaf.shape, leaf.dtype)
                if leaf.is_per_rank:
                    if shape[1:] != leaf.shape or not shape:
                        raise ValueError(
                            f"tensor '{leaf.name}' is each rank's own: expected [ranks, {str([*leaf.shape])[1:]} in the "
                            f"checkpoint, got {[*shape]}: was another state saved?"
                        )
                    check_rank_count(leaf.name, shape[0], self._ranks.size)
            case OwnedLeaf():
                self._stored.check_tensor(leaf.names, leaf.global_shape(self._spec), leaf.dtype)
            case SliceLeaf():
                sizes = dict(self._spec.bound_mesh.sizes)
                why = _OTHER_BLOCKS if leaf.block > 1 else ""
                for param, names in zip(leaf.params, leaf.names, strict=True):
                    shape, hint = leaf.stored_shape(param, sizes), describe_pieces(param, sizes)
                    self._stored.check_tensor(names, shape, leaf.dtype, hint, why)
            case ScalarLeaf():
                for names in leaf.names:
                    self._stored.check_tensor(names, (), leaf.dtype)

    def read(self) -> Any:
        with torch.no_grad(), phase("checkpoint read"):
            encoded = [i for i, leaf in self._leaves.items() if isinstance(leaf, SliceLeaf) and leaf.is_encoded]
            for numbers in ([i for i in self._leaves if i not in encoded], *([i] for i in encoded)):  # these alone: for memory
                memory = {i: self._allocate(self._leaves[i]) for i in numbers}
                self._stored.read([part for i in numbers for part in self._iter_ranges(self._leaves[i], memory[i])])
                for i in numbers:
                    self._values[i] = self._to_state(self._leaves[i], memory.pop(i))
        with nullcontext() if self._is_template else _explain_bad_tree(self._stored.directory):
            return build_state(self._node, iter(self._values))

    def _allocate(self, leaf: StoredLeaf) -> Tensor:
        match leaf:
            case SliceLeaf():
                return leaf.allocate(self._spec)
            case OwnedLeaf():
                return leaf.allocate()
            case ScalarLeaf():
                return torch.empty(len(leaf.names), dtype=leaf.dtype, device="cpu")
            case TensorLeaf():
                try:
                    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
                except RuntimeError as error:
                    text = f"tensor '{leaf.name}': expected to have memory for {[*leaf.shape]} {leaf.dtype}"
                    raise CheckpointError(text) from error

    def _iter_ranges(self, leaf: StoredLeaf, memory: Tensor) -> Iterator[TensorRange]:
        for part in leaf.ranges(memory, self._spec, self._ranks.rank, self._ranks.size):
            key = self._stored.find_key([part.name, *part.aliases])
            assert key is not None
            yield part._replace(name=key)

    def _to_state(self, leaf: StoredLeaf, memory: Tensor) -> Tensor:
        if isinstance(leaf, SliceLeaf):
            return leaf.to_state(memory, self._spec)
        if isinstance(leaf, ScalarLeaf):
            if not is_uniform(memory):
                raise ValueError(
                    f"unit '{leaf.unit.key}': expected one '{leaf.names[0][0]}' for all of its parameters, got "
                    f"{memory.unique().tolist()[:4]}; choose units whose parameters have taken as many steps"
                )
            memory = memory[0].clone()
        device = self._spec.bound_mesh.device
        return memory.to(device) if leaf.is_accelerated and device else memory


def _find_value(leaf: ValueLeaf, saved: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for own, *aliases in leaf.names or ((leaf.name,),):
        found = [saved[name] for name in (own, *aliases) if name in saved]
        if not found:
            raise ValueError(f"state '{own}' is no plain value in the checkpoint: expected like= without it")
        values[own] = found[0]
    (first, value), *others = values.items()
    for own, other in others:
        if repr(other) != repr(value):
            raise ValueError(
                f"state '{own}': expected the same as '{first}', which is in one unit with it, {value!r}, got {other!r}; "
                "choose units whose parameters have the same"
            )
    return value


# --- The tensors in the files of a checkpoint: find them by name, check them, and read ranges of them ---


@dataclass(frozen=True)
class _StoredTensors:
    """The tensors of a checkpoint, by their keys: their names, perhaps with the prefixes of wrappers."""

    directory: AnyPath
    metadata: Metadata
    checksums: Mapping[str, Mapping[str, int]]
    """Those of the records, as in `Manifest`."""
    check: bool
    _checked: set[str] = field(default_factory=set)

    def find_key(self, names: Sequence[str]) -> str | None:
        every = self.metadata.state_dict_metadata
        return next((key for name in names for key in (name, self._keys.get(name)) if key is not None and key in every), None)

    @cached_property
    def _keys(self) -> dict[str, str]:
        out: dict[str, str] = {}
        for key in self.metadata.state_dict_metadata:
            out[clean_name(key)] = "" if clean_name(key) in out else key
        return {name: key for name, key in out.items() if key}

    def check_tensor(
        self, names: Sequence[str], shape: Sequence[int] | None, dtype: torch.dtype, hint: str = "", why: str = ""
    ) -> tuple[int, ...]:
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
        is_encoded = self.find_key([f"{name}.codes"]) is not None
        if is_encoded or (part in ("codes", "scales") and self.find_key([slot]) is not None):
            tensor, form, function = (name, "a", "decode_state") if is_encoded else (slot, "no", "encode_state")
            raise ValueError(
                f"tensor '{tensor}' is in {form} codec in the checkpoint: expected a like= whose state is encoded for the same "
                f"parameters (at_least= of quantized_state), or no like=; fs.optim.{function} converts the state"
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

    def read(self, parts: Sequence[TensorRange]) -> None:
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
                    self._read_chunk(file, offset, length, items, expected)

    def _read_chunk(
        self, file: BinaryIO, offset: int, length: int, items: list[tuple[ReadItem, Tensor]], expected: int | None
    ) -> None:
        """Read the parts of one chunk, a tensor in a file, that some items ask for; ``expected`` is its checksum, if known."""
        if offset + length > file.seek(0, os.SEEK_END):
            raise DamagedError("it was cut short")
        found = find_record(file, offset, length, check=self.check and expected is None)
        shape = tuple(found.like.shape)
        for item, _ in items:
            tensor: Any = self.metadata.state_dict_metadata[item.storage_index.fqn]
            wanted = tuple(tensor.chunks[item.storage_index.index].sizes), tensor.properties.dtype
            if (shape, found.like.dtype) != wanted:
                raise DamagedError(f"expected {[*wanted[0]]} {wanted[1]} there, got {[*shape]} {found.like.dtype}")
        first, target = items[0]
        is_dense = found.like.is_contiguous() and target.is_contiguous() and target.device.type == "cpu"
        is_direct = len(items) == 1 and tuple(first.lengths) == shape and is_dense
        memory = target if is_direct else torch.empty(found.end - found.offset, dtype=torch.uint8)
        crc32 = _read_into(file, offset, found.offset, 0)
        crc32 = _read_into(file, offset + found.offset, _torch.host_bytes(memory), crc32)
        if self.check and expected not in (None, _read_into(file, offset + found.end, length - found.end, crc32)):
            raise DamagedError("its checksum is not that in 'funshard.json': expected the file of this save, is it another's?")
        if is_direct:
            return
        values = memory.view(found.like.dtype).as_strided(shape, found.like.stride())
        for item, target in items:
            part = values
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            target.copy_(part)


@contextmanager
def _explain_bad_tree(directory: AnyPath) -> Generator[None]:
    """Raise CheckpointError for a tree in the manifest that `tree_to_json` did not write, as only other programs do."""
    try:
        yield
    except (DamagedError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{directory}: the state in its file '{MANIFEST}' is damaged: {type(error).__name__}: {error}"
        ) from error


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


def _read_into(file: BinaryIO, offset: int, memory: memoryview | int, crc32: int) -> int:
    """Read bytes of a file into memory, or so many to nowhere, and return the checksum of these after those before."""
    raw = memoryview(bytearray(memory)) if isinstance(memory, int) else memory
    file.seek(offset)
    at = 0
    while at < len(raw) and (read := file.readinto(raw[at : at + PIECE_BYTES])):  # pyright: ignore[reportAttributeAccessIssue]
        crc32 = checksum(raw[at : at + read], crc32)
        at += read
    if at < len(raw):
        raise DamagedError("it was cut short")
    return crc32


@contextmanager
def _explain_damage(tensor: str, file: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"tensor '{tensor}': file '{file}' of the checkpoint is missing") from error
    except (DamagedError, OSError) as error:
        raise CheckpointError(f"tensor '{tensor}' in file '{file}' of the checkpoint is damaged: {error}") from error
