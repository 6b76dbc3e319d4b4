"""What torch.distributed.checkpoint is asked to write and read: the boxes of this rank's parts of every stored tensor."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
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

from .._state.boxes import Box, boxes, check_tiles, cut, share
from .._state.leaves import Part

__all__ = ["Reads", "Writes"]


def boxed(part: Part, begin: int, end: int) -> list[tuple[Box, Tensor]]:
    """Some of a part's range, as boxes of the tensor with views of the memory for them."""
    shape = [part.shape[d] for d in part.order]
    back = [part.order.index(d) for d in range(len(part.order))]
    out: list[tuple[Box, Tensor]] = []
    at = begin - part.begin
    for box in boxes(shape, begin, end):
        view = part.data[at : at + box.numel].view(box.sizes).permute(back)
        out.append((Box(tuple(box.offsets[d] for d in back), tuple(box.sizes[d] for d in back)), view))
        at += box.numel
    return out


class Writes(SavePlanner):
    """Writes this rank's share of some parts, every element by one of those ranks that hold it."""

    def __init__(self, parts: Iterable[Part]) -> None:
        shares = share()
        self._room: Tensor | None = None
        self._items: dict[MetadataIndex, tuple[WriteItem, Tensor]] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        for part in parts:
            if part.aliases:
                self._aliases[part.name] = part.aliases
            size = part.data.dtype.itemsize
            for low, high in shares(part.begin, part.begin + len(part.data), size, part.holder, part.holders):
                for begin, end in cut(low, high, size):
                    for box, view in boxed(part, begin, end):
                        self._add(part, box, view)

    def _add(self, part: Part, box: Box, view: Tensor) -> None:
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        index = MetadataIndex(part.name, chunk.offsets)
        data = TensorWriteData(chunk, TensorProperties(dtype=view.dtype), torch.Size(part.shape))
        self._items[index] = WriteItem(index, WriteItemType.SHARD, tensor_data=data), view

    def stage(self) -> None:
        """Copy what is to be written to memory of the host, where nothing that follows changes it.

        The memory is kept for the next time: new memory costs more than the copy.
        """
        room = _room(sum(_aligned(view.nbytes) for _, view in self._items.values()), self._devices())
        at = 0
        for index, (item, view) in self._items.items():
            staged = room[at : at + view.nbytes].view(view.dtype).view(view.shape)
            at += _aligned(view.nbytes)
            self._items[index] = item, staged.copy_(view, non_blocking=True)
        self._room = room
        for device in self._devices():
            torch.get_device_module(device).synchronize(device)

    def ended(self) -> None:
        """Nothing of it is written any more."""
        self._items.clear()
        if self._room is not None:
            _staging[:] = [self._room]

    def _devices(self) -> set[torch.device]:
        return {view.device for _, view in self._items.values() if view.device.type != "cpu"}

    # What torch.distributed.checkpoint calls.

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


def _check_written(name: str, tensor: TensorStorageMetadata) -> None:
    """Check that what all ranks write of a tensor tiles it."""
    try:
        check_tiles(tensor.size, (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks))
    except ValueError as error:
        raise ValueError(f"'{name}', of all ranks: {error}") from error


_staging: list[Tensor] = []
"""Memory of a save that has ended, if it was staged."""


def _room(nbytes: int, devices: set[torch.device]) -> Tensor:
    """So many bytes of the host, pinned if they come from a device, of which nobody else knows."""
    room = _staging.pop() if _staging else None
    if room is None or len(room) < nbytes or (devices and not room.is_pinned()):
        room = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bool(devices))
    return room


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % 16


class Reads(LoadPlanner):
    """Reads some parts: of each stored tensor those of its boxes that overlap with them."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._views: dict[str, list[Tensor]] = defaultdict(list)
        for part in parts:
            for box, view in boxed(part, part.begin, part.begin + len(part.data)):
                self._chunks[part.name].append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
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
        raise AssertionError("tensors alone are read")

    def resolve_bytes(self, read_item: Any) -> io.BytesIO:
        raise AssertionError("tensors alone are read")

    def resolve_tensor(self, read_item: Any) -> Tensor:
        view = self._views[read_item.dest_index.fqn][read_item.dest_index.index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        pass
