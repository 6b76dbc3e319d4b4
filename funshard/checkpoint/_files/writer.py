"""Write the files of torch.distributed.checkpoint as torch.save does, but straight from the tensors' memory."""

from __future__ import annotations

import os
import pickle
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from ... import _torch
from .._state.leaves import Box, TensorRange, check_tiles, share_range, split_range
from .remote import AnyPath
from .untrusted import checksum

BUFFER_BYTES = 1 << 17
PIECE_BYTES = 1 << 19
"""The bytes that are added to the checksum and then written: the second read finds them in the cache."""


def make_chunk(box: Box) -> dcp.ChunkStorageMetadata:
    """Return a box as torch.distributed.checkpoint describes it."""
    return dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class WrittenBox(NamedTuple):
    """A box of a stored tensor, and the place of its record."""

    names: tuple[str, ...]
    """The tensor's name, and its other names."""
    shape: tuple[int, ...]
    """The tensor's."""
    dtype: torch.dtype
    box: Box
    file: str
    offset: int
    length: int
    checksum: int


class RangeWriter:
    """A writer of this rank's share of some ranges: one of the ranks that hold an element writes it."""

    def __init__(self, parts: Iterable[TensorRange]) -> None:
        written: dict[tuple[int, tuple[str, ...] | None], list[int]] = {}  # by the number of holders, and their axes
        self._memory: Tensor | None = None
        self.boxes: list[tuple[TensorRange, Box, Tensor]] = []
        """The boxes with the ranges that they are of, and their elements."""
        for part in parts:
            size = part.data.dtype.itemsize
            shares = written.setdefault((part.holders, part.axes), [0] * part.holders)
            for low, high in share_range(shares, part.begin, part.end, size, part.holder):
                for at in split_range(low, high, size):
                    self.boxes += [(part, box, view) for box, view in part.iter_boxes(*at)]

    def stage(self) -> None:
        """Copy the tensors to memory of the host, so that later changes to them are not saved.

        The next save uses the memory again: to allocate it costs more than the copy.
        """
        nbytes = sum(_align(view.nbytes) for *_, view in self.boxes)
        devices = {view.device for *_, view in self.boxes if view.device.type != "cpu"}
        memory = _staging_memory.pop() if _staging_memory else None
        if memory is None or len(memory) < nbytes or (devices and not memory.is_pinned()):
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bool(devices))  # pinned for copies from a device
        at = 0
        for i, (part, box, view) in enumerate(self.boxes):
            staged = memory[at : at + view.nbytes].view(view.dtype).view(view.shape)
            at += _align(view.nbytes)
            self.boxes[i] = part, box, staged.copy_(view, non_blocking=True)
        self._memory = memory
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    def release(self) -> None:
        """Drop the tensors, and leave the staging memory to the next save."""
        self.boxes.clear()
        if self._memory is not None:
            _staging_memory[:] = [self._memory]

    def write(self, path: AnyPath) -> list[WrittenBox]:
        """Write the boxes to a file, flush it, and return where each is."""
        out: list[WrittenBox] = []
        at = 0
        with path.open("wb", buffering=BUFFER_BYTES) as file:
            for (part, box, _), tensor in zip(self.boxes, _iter_on_host(view for *_, view in self.boxes), strict=True):
                length, crc32 = write_record(file, tensor)
                out.append(WrittenBox(part.names, part.shape, tensor.dtype, box, path.name, at, length, crc32))
                at += length
            if isinstance(path, Path):
                file.flush()
                os.fsync(file.fileno())
        return out


_staging_memory: list[Tensor] = []
"""The staging memory of a save that has ended, if there is one."""


def _align(nbytes: int) -> int:
    return nbytes + -nbytes % 16


def _iter_on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor on the host. The copy of one from a device runs while the caller writes the one before."""
    before: Tensor | None = None
    for tensor in tensors:
        host, copy = tensor, None
        if _torch.is_accelerator(tensor.device):
            host = _torch.allocate_like(tensor, torch.device("cpu"))
            copy = _torch.AsyncCopy(tensor, host)
        if before is not None:
            yield before
        if copy is not None:
            _torch.synchronize_copies(tensor.device)
        before = host
    if before is not None:
        yield before


def make_metadata(boxes: Sequence[WrittenBox]) -> dcp.Metadata:
    """Return torch's metadata of what all ranks have written. Raises ValueError if a tensor's boxes do not tile it."""
    tensors: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    by_name: dict[str, list[WrittenBox]] = defaultdict(list)
    for box in boxes:
        by_name[box.names[0]].append(box)
    for name, written in by_name.items():
        first = written[0]
        try:
            check_tiles(first.shape, [box.box for box in written])
        except ValueError as error:
            raise ValueError(f"'{name}', of all ranks: {error}") from error
        chunks = [make_chunk(box.box) for box in written]
        for alias in first.names:
            tensors[alias] = dcp.TensorStorageMetadata(dcp.TensorProperties(first.dtype), torch.Size(first.shape), chunks)
            for box, chunk in zip(written, chunks, strict=True):
                storage[dcp.MetadataIndex(alias, chunk.offsets)] = _torch.make_storage_info(box.file, box.offset, box.length)
    names = {name: (name,) for name in tensors}
    save_id = dcp.StorageMeta(save_id=str(uuid.uuid4()))  # no path, whose class not every Python has
    return dcp.Metadata(tensors, planner_data=names, storage_data=storage, storage_meta=save_id)


def pack_metadata(boxes: Sequence[WrittenBox]) -> tuple[bytes, dict[str, int], dict[str, dict[int, int]]]:
    """Return the content of torch's metadata file, the sizes of the data files, and the checksums of their records."""
    sizes: dict[str, int] = {}
    checksums: dict[str, dict[int, int]] = defaultdict(dict)
    for box in boxes:
        sizes[box.file] = max(sizes.get(box.file, 0), box.offset + box.length)
        checksums[box.file][box.offset] = box.checksum
    return pickle.dumps(make_metadata(boxes)), sizes, checksums


# --- A record: what torch.save writes of a tensor, about 1,500 bytes around the elements ---


class _RecordFile:
    """A file as torch.save sees it, which keeps the number and the checksum of the bytes of a record."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = self.crc32 = 0

    def write(self, raw: memoryview) -> int:
        for begin in range(0, len(raw), PIECE_BYTES):
            piece = raw[begin : begin + PIECE_BYTES]
            self.crc32 = checksum(piece, self.crc32)
            self._file.write(piece)
        self.nbytes += len(raw)
        return len(raw)


def write_record(file: BinaryIO, tensor: Tensor) -> tuple[int, int]:
    """Write a tensor of the host as torch.save does, and return the number of bytes and their checksum.

    torch.save writes a whole storage: so it is given one that has the elements alone, in the memory where they are.
    """
    dense = tensor.contiguous()
    record = _RecordFile(file)
    raw = _torch.host_bytes(dense)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    alone = flat.view(dense.dtype).view(dense.shape) if raw else torch.empty(dense.shape, dtype=dense.dtype)
    _torch.save_unchecked(alone, record)
    return record.nbytes, record.crc32
