"""Which boxes of every stored tensor this rank writes, as a plan of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from .._state.leaves import Box, RangeSharer, TensorRange, check_tiles, range_to_boxes, split_range

__all__ = ["RangeSavePlanner", "check_chunks", "iter_boxes", "join_plans", "make_chunk"]


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
    check_tiles(tensor.size, (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks))


def make_chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class RangeSavePlanner:
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
        chunk = make_chunk(box)
        index = MetadataIndex(part.name, chunk.offsets)
        data = TensorWriteData(chunk, TensorProperties(dtype=view.dtype), torch.Size(part.shape))
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
        return self._items[item.index][1]


def _check_written(name: str, tensor: TensorStorageMetadata) -> None:
    """Check that the chunks that all ranks write of a tensor tile it."""
    try:
        check_chunks(tensor)
    except ValueError as error:
        raise ValueError(f"'{name}', of all ranks: {error}") from error


def join_plans(plans: list[SavePlan]) -> tuple[Metadata, dict[str, tuple[str, ...]]]:
    """Return the metadata of what all ranks write, checked, and the other names of tensors."""
    aliases = {name: others for plan in plans for name, others in plan.planner_data.items()}
    _, metadata = create_default_global_save_plan(plans)
    stored: Any = metadata.state_dict_metadata
    for name, tensor in stored.items():
        _check_written(name, tensor)
    for name, others in aliases.items():
        stored |= dict.fromkeys(others, stored[name])
    metadata.planner_data = {name: (name,) for name in stored}
    return metadata, aliases


_staging_memory: list[Tensor] = []
"""The staging memory of a save that has ended, if there is one."""


def _align(nbytes: int) -> int:
    return nbytes + -nbytes % 16
