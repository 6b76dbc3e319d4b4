"""Write the files of torch.distributed.checkpoint as torch.save does, but straight from the tensors' memory."""

from __future__ import annotations

import itertools
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ... import _torch
from .._state.leaves import Box, TensorRange, check_tiles, range_to_boxes, share_range, split_range
from .manifest import METADATA
from .remote import AnyPath
from .untrusted import checksum

# --- Which boxes of every stored tensor this rank writes, as a plan of torch.distributed.checkpoint ---


def iter_boxes(part: TensorRange, begin: int, end: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield elements ``begin`` to ``end`` of a range as boxes of the tensor, with views of the memory for them."""
    start, sizes = part.box or Box((0,) * len(part.shape), part.shape)
    back = [part.order.index(d) for d in range(len(part.order))]
    at = begin - part.begin
    for box in range_to_boxes([sizes[d] for d in part.order], begin, end):
        view = part.data[at : at + box.numel].view(box.sizes).permute(back)
        offsets = tuple(first + box.offsets[d] for first, d in zip(start, back, strict=True))
        yield Box(offsets, tuple(box.sizes[d] for d in back)), view
        at += box.numel


def check_chunks(tensor: dcp.TensorStorageMetadata) -> None:
    """Check that the chunks of a stored tensor tile it. Raises ValueError otherwise."""
    check_tiles(tensor.size, (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks))


def make_chunk(box: Box) -> dcp.ChunkStorageMetadata:
    """Return a box as torch.distributed.checkpoint describes it."""
    return dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class RangeSavePlanner:
    """A planner of the writes of this rank's share of some ranges: one of the ranks that hold an element writes it."""

    def __init__(self, parts: Iterable[TensorRange]) -> None:
        written: dict[tuple[int, tuple[str, ...] | None], list[int]] = {}  # by the number of holders, and their axes
        self._memory: Tensor | None = None
        self._items: dict[dcp.MetadataIndex, tuple[WriteItem, Tensor]] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        for part in parts:
            if part.aliases:
                self._aliases[part.name] = part.aliases
            size, end = part.data.dtype.itemsize, part.begin + len(part.data)
            shares = written.setdefault((part.holders, part.axes), [0] * part.holders)
            for low, high in share_range(shares, part.begin, end, size, part.holder):
                for at in split_range(low, high, size):
                    for box, view in iter_boxes(part, *at):
                        self._add(part, box, view)

    def _add(self, part: TensorRange, box: Box, view: Tensor) -> None:
        chunk = make_chunk(box)
        index = dcp.MetadataIndex(part.name, chunk.offsets)
        data = TensorWriteData(chunk, dcp.TensorProperties(dtype=view.dtype), torch.Size(part.shape))
        self._items[index] = WriteItem(index, WriteItemType.SHARD, tensor_data=data), view

    def stage(self) -> None:
        """Copy the tensors to memory of the host, so that later changes to them are not saved.

        The next save uses the memory again: to allocate it costs more than the copy.
        """
        nbytes = sum(_align(view.nbytes) for _, view in self._items.values())
        devices = {view.device for _, view in self._items.values() if view.device.type != "cpu"}
        memory = _staging_memory.pop() if _staging_memory else None
        if memory is None or len(memory) < nbytes or (devices and not memory.is_pinned()):
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bool(devices))  # pinned for copies from a device
        at = 0
        for index, (item, view) in self._items.items():
            staged = memory[at : at + view.nbytes].view(view.dtype).view(view.shape)
            at += _align(view.nbytes)
            self._items[index] = item, staged.copy_(view, non_blocking=True)
        self._memory = memory
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    def release(self) -> None:
        """Drop the tensors, and leave the staging memory to the next save."""
        self._items.clear()
        if self._memory is not None:
            _staging_memory[:] = [self._memory]

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes; its ``planner_data`` has the other names of tensors."""
        return SavePlan([item for item, _ in self._items.values()], planner_data=self._aliases)

    def resolve_data(self, item: WriteItem) -> Tensor:
        """Return the values of an item of the plan."""
        return self._items[item.index][1]


def join_plans(plans: list[SavePlan]) -> tuple[dcp.Metadata, dict[str, tuple[str, ...]]]:
    """Return the metadata of what all ranks write, checked, and the other names of tensors."""
    aliases = {name: others for plan in plans for name, others in plan.planner_data.items()}
    _, metadata = create_default_global_save_plan(plans)
    stored: Any = metadata.state_dict_metadata
    name = ""
    try:
        for name in stored:
            check_chunks(stored[name])
    except ValueError as error:
        raise ValueError(f"'{name}', of all ranks: {error}") from error
    for name, others in aliases.items():
        stored |= dict.fromkeys(others, stored[name])
    metadata.planner_data = {name: (name,) for name in stored}
    return metadata, aliases


_staging_memory: list[Tensor] = []
"""The staging memory of a save that has ended, if there is one."""


def _align(nbytes: int) -> int:
    return nbytes + -nbytes % 16


# --- The files of a plan ---

BUFFER_BYTES = 1 << 17
PIECE_BYTES = 1 << 19
"""The bytes that are added to the checksum and then written: the second read finds them in the cache."""


class CheckpointWriter:
    """A writer of one file on each rank, whose name has a suffix.

    After `write_items`, each rank has the checksums of its file's tensors in ``checksums``, by file and offset. After
    `write_metadata`, the first rank has the sizes of all files in ``sizes``.
    """

    def __init__(self, path: AnyPath, rank: int, suffix: str = "") -> None:
        self.path = path
        self.name = f"__{rank}_0{suffix}.distcp"
        self.sizes: dict[str, int] = {}
        self.checksums: dict[str, dict[int, int]] = {}

    def write_items(self, plan: SavePlan, planner: RangeSavePlanner) -> list[WriteResult]:
        """Write the items to this rank's file, flush it, and return where each item is."""
        results: list[WriteResult] = []
        tensors = map(planner.resolve_data, plan.items)
        at, checksums = 0, self.checksums.setdefault(self.name, {})
        with (self.path / self.name).open("wb", buffering=BUFFER_BYTES) as file:
            for item, tensor in zip(plan.items, _iter_on_host(tensors), strict=True):
                length, checksums[at] = write_record(file, tensor)
                results.append(WriteResult(item.index, length, _torch.make_storage_info(self.name, at, length)))
                at += length
            if isinstance(self.path, Path):
                file.flush()
                os.fsync(file.fileno())
        return results

    def write_metadata(self, plans: list[SavePlan], results: list[list[WriteResult]]) -> None:
        """Write the metadata file, which also has the other names of tied parameters. `StagingDirectory.commit` flushes it."""
        metadata, aliases = join_plans(plans)
        storage: dict[dcp.MetadataIndex, Any] = {}
        for result in itertools.chain.from_iterable(results):
            info: Any = result.storage_data
            self.sizes[info.relative_path] = max(self.sizes.get(info.relative_path, 0), info.offset + info.length)
            for name in (result.index.fqn, *aliases.get(result.index.fqn, ())):
                storage[dcp.MetadataIndex(name, result.index.offset, result.index.index)] = info
        metadata.storage_data = storage
        metadata.storage_meta = dcp.StorageMeta(save_id=str(uuid.uuid4()))  # no path, whose class not every Python has
        with (self.path / METADATA).open("wb") as file:
            pickle.dump(metadata, file)


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
