"""Planners for torch.distributed.checkpoint: which boxes of every stored tensor this rank writes and reads."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .._state.leaves import Box, RangeSharer, TensorRange, check_tiles, range_to_boxes, split_range

__all__ = ["RangeLoadPlanner", "RangeSavePlanner", "check_chunks", "iter_boxes"]


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


def check_chunks(tensor: TensorStorageMetadata) -> None:
    """Check that the chunks of a stored tensor tile it. Raises ValueError otherwise."""
    check_tiles(tensor.size, (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks))


def _check_written(name: str, tensor: TensorStorageMetadata) -> None:
    """Check that the chunks that all ranks write of a tensor tile it."""
    try:
        check_chunks(tensor)
    except ValueError as error:
        raise ValueError(f"'{name}', of all ranks: {error}") from error


def _make_chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class RangeSavePlanner(SavePlanner):
    """A planner of the writes of this rank's share of some ranges: one of the ranks that hold an element writes it."""

    def __init__(self, parts: Iterable[TensorRange]) -> None:
        sharer = RangeSharer()
        self._memory: Tensor | None = None
        self._items: dict[MetadataIndex, tuple[WriteItem, Tensor]] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        for part in parts:
            if part.aliases:
                self._aliases[part.name] = part.aliases
            size = part.data.dtype.itemsize
            end = part.begin + len(part.data)
            for low, high in sharer.share(part.begin, end, size, part.holder, part.holders, part.axes):
                for at in split_range(low, high, size):
                    for box, view in iter_boxes(part, *at):
                        self._add(part, box, view)

    def _add(self, part: TensorRange, box: Box, view: Tensor) -> None:
        """Add a box of a range as a chunk to write."""
        chunk = _make_chunk(box)
        index = MetadataIndex(part.name, chunk.offsets)
        data = TensorWriteData(chunk, TensorProperties(dtype=view.dtype), torch.Size(part.shape))
        self._items[index] = WriteItem(index, WriteItemType.SHARD, tensor_data=data), view

    def stage(self) -> None:
        """Copy the tensors to memory of the host, so that later changes to them are not saved.

        The next save uses the memory again: to allocate it costs more than the copy.
        """
        memory = _allocate_staging(sum(_align(view.nbytes) for _, view in self._items.values()), self._devices())
        at = 0
        for index, (item, view) in self._items.items():
            staged = memory[at : at + view.nbytes].view(view.dtype).view(view.shape)
            at += _align(view.nbytes)
            self._items[index] = item, staged.copy_(view, non_blocking=True)
        self._memory = memory
        for device in self._devices():
            torch.get_device_module(device).synchronize(device)

    def release(self) -> None:
        """Drop the tensors, and leave the staging memory to the next save."""
        self._items.clear()
        if self._memory is not None:
            _staging_memory[:] = [self._memory]

    def _devices(self) -> set[torch.device]:
        """Return the accelerators with tensors to write."""
        return {view.device for _, view in self._items.values() if view.device.type != "cpu"}

    # The methods that torch.distributed.checkpoint calls.

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for item, _ in self._items.values()], planner_data=self._aliases)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        aliases = {name: others for plan in all_plans for name, others in plan.planner_data.items()}
        plans, metadata = create_default_global_save_plan(all_plans)
        stored: Any = metadata.state_dict_metadata
        for name, tensor in stored.items():
            _check_written(name, tensor)
        for name, others in aliases.items():
            stored |= dict.fromkeys(others, stored[name])
        metadata.planner_data = {name: (name,) for name in stored}
        return [dataclasses.replace(plan, planner_data=aliases) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._items[write_item.index][1]


_staging_memory: list[Tensor] = []
"""The staging memory of a save that has ended, if there is one."""


def _allocate_staging(nbytes: int, devices: set[torch.device]) -> Tensor:
    """Return host memory of at least so many bytes that nothing else uses, pinned for copies from a device."""
    memory = _staging_memory.pop() if _staging_memory else None
    if memory is None or len(memory) < nbytes or (devices and not memory.is_pinned()):
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bool(devices))
    return memory


def _align(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 16."""
    return nbytes + -nbytes % 16


class RangeLoadPlanner(LoadPlanner):
    """A planner of the reads of some ranges: of each stored tensor, the chunks that overlap with them."""

    def __init__(self, parts: Sequence[TensorRange]) -> None:
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._views: dict[str, list[Tensor]] = defaultdict(list)
        for part in parts:
            for box, view in iter_boxes(part, part.begin, part.begin + len(part.data)):
                self._chunks[part.name].append(_make_chunk(box))
                self._views[part.name].append(view)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, chunks in self._chunks.items():
            stored: Any = self._metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise AssertionError("expected reads of tensors, got one of bytes")

    def resolve_bytes(self, read_item: Any) -> io.BytesIO:
        raise AssertionError("expected reads of tensors, got one of bytes")

    def resolve_tensor(self, read_item: Any) -> Tensor:
        view = self._views[read_item.dest_index.fqn][read_item.dest_index.index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        pass
