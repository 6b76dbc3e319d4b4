"""LAWS of saved pieces: the boxes of all ranks tile every tensor once, and any other ranks find their slices in them."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from depth import depth
from hypothesis import given, settings
from strategies import integers_like, meshes, modules, policies
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import funshard as fs
from funshard import _torch
from funshard.checkpoint import _leaves as box_file
from funshard.checkpoint._checkpoint import share_boxes
from funshard.checkpoint._directory import PIECE_BYTES, checksum
from funshard.checkpoint._leaves import Box, TensorRange, check_tiles, range_to_boxes, slice_leaf
from funshard.checkpoint._tree import Description
from funshard.collectives import ProcessAxis

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
State = dict[str, Any]


@given(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.data())
def test_boxes_that_do_not_tile_are_told(shape: tuple[int, ...], data: st.DataObject) -> None:
    """As counting each element does: ranges that follow each other tile, and with another box among them they do not."""
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    found = [box for begin, end in itertools.pairwise(cuts) for box in range_to_boxes(shape, begin, end)]
    found = data.draw(st.permutations(found or range_to_boxes(shape, 0, 0)))
    check_tiles(shape, found)
    begins, sizes = (data.draw(st.tuples(*(st.integers(0, n) for n in shape))) for _ in range(2))
    changed = [*found, Box(begins, sizes)]
    if data.draw(st.booleans()):
        changed.pop(data.draw(st.integers(0, len(found) - 1)))
    times, is_inside = torch.zeros(shape, dtype=torch.int64), True
    for offsets, sizes in changed:
        is_inside &= all(begin + size <= n for begin, size, n in zip(offsets, sizes, shape, strict=True))
        times[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))] += 1
    if is_inside and times.eq(1).all():
        check_tiles(shape, changed)
    else:
        with pytest.raises(ValueError, match=r"is not inside of|elements in its pieces, got|its pieces overlap"):
            check_tiles(shape, changed)


def everyone(spec: fs.PartitionSpec, sizes: dict[str, int]) -> list[fs.PartitionSpec]:
    """The spec as each rank of a mesh of these sizes has it, without process groups."""
    every = itertools.product(*(range(n) for n in sizes.values()))
    return [spec.on({name: ProcessAxis(n, r) for (name, n), r in zip(sizes.items(), at, strict=True)}) for at in every]


def parts_of(state: State, spec: fs.PartitionSpec) -> list[tuple[TensorRange, Tensor]]:
    found = Description(state, spec)
    return [p for leaf, x in zip(found.leaves, found.values, strict=True) for p in leaf.divide(x)]  # pyright: ignore[reportAttributeAccessIssue]


def saved(states: list[State], specs: list[fs.PartitionSpec]) -> tuple[Metadata, dict[MetadataIndex, Tensor]]:
    """What all ranks write, without files: the description, and every box by its index."""
    boxes = [found for x, spec in zip(states, specs, strict=True) for found in share_boxes(parts_of(x, spec))]
    written = [
        box_file.StoredTensor(part.names, view.dtype, part.shape, {box: box_file.RecordPlace("", 0, 0)})
        for part, box, view in boxes
    ]
    stored: dict[MetadataIndex, Tensor] = {}
    for part, box, view in boxes:
        index = MetadataIndex(part.names[0], box.offsets)
        assert index not in stored, "written twice"
        stored[index] = view
    return pickle.loads(box_file.pack_index(written)[0]), stored


def check_saved(metadata: Metadata, stored: dict[MetadataIndex, Tensor], full: dict[str, Tensor]) -> None:
    """Every tensor is there, of its shape and dtype, every element once, and as it was."""
    for name, expected in full.items():
        described: Any = metadata.state_dict_metadata[name]
        assert (described.size, described.properties.dtype) == (expected.shape, expected.dtype)
        times, values = torch.zeros(expected.shape, dtype=torch.int64), torch.zeros_like(expected)
        for chunk in described.chunks:
            at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            times[at] += 1
            values[at] = stored[MetadataIndex(name, chunk.offsets)]
        assert times.eq(1).all(), name
        assert values.equal(expected), name
        assert described.chunks, "no reader would see it"


def read(spec: fs.PartitionSpec, metadata: Metadata, stored: dict[MetadataIndex, Tensor]) -> fs.Params:
    """What one rank reads of the parameters."""
    memory = {unit.key: slice_leaf(tuple((p.name,) for p in unit.params), unit.dtype, unit, spec).allocate() for unit in spec}
    for part, data in parts_of(memory, spec):
        tensor: Any = metadata.state_dict_metadata[part.names[0]]
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
        for box, at, target in box_file.plan_reads(part, data, boxes):
            target.copy_(stored[MetadataIndex(part.names[0], torch.Size(box.offsets))][at])
    return memory


def check_read_by_others(
    full: dict[str, Tensor], specs: list[fs.PartitionSpec], others: list[fs.PartitionSpec], box_bytes: int
) -> None:
    """What the ranks of ``specs`` write tiles ``full`` once, and those of ``others`` read their slices from it, bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_file, "MAX_BOX_BYTES", box_bytes)
        metadata, stored = saved([dict(fs.shard(full, spec, rank=r)) for r, spec in enumerate(specs)], specs)
        check_saved(metadata, stored, full)
        for rank, spec in enumerate(others):
            found, expected = read(spec, metadata, stored), fs.shard(full, spec, rank=rank)
            assert found.keys() == expected.keys()
            assert all(found[key].equal(expected[key]) for key in expected)


@settings(max_examples=depth(12, 300))
@given(modules(frozen=True), st.data())
def test_any_ranks_read_what_any_ranks_wrote(model: nn.Module, data: st.DataObject) -> None:
    """N ranks' boxes tile every tensor once, and M ranks of another policy read their slices from them, bit for bit."""
    full = integers_like(model)
    if not full:
        return
    chosen = [data.draw(policies(model)) for _ in range(2)]
    specs, others = (
        everyone(policy(model), dict(data.draw(meshes(max_size=depth(8, 64)))) or {"shard": 1}) for policy in chosen
    )
    check_read_by_others(full, specs, others, 24)


def test_units_that_are_split_over_different_axes() -> None:
    """Ranks that hold the same slice of one unit, and slices of other lengths of the next, agree on who writes the third."""
    model = nn.ModuleList(nn.ParameterList([torch.zeros(n)]) for n in (4, 3, 4))
    policy = fs.by_path({str(i): fs.P(axis, align=1) for i, axis in enumerate("aba")})
    specs, full = everyone(policy(model), {"a": 2, "b": 2}), integers_like(model)
    metadata, stored = saved([dict(fs.shard(full, spec, rank=r)) for r, spec in enumerate(specs)], specs)
    check_saved(metadata, stored, full)


# --- What is written of a tensor is what torch.save writes of it, byte for byte, and every reader of torch has it back. ---

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64),
)
TENSORS: dict[str, Tensor] = {
    **{str(dtype): (torch.arange(12).view(4, 3) % 5).to(dtype) for dtype in DTYPES},
    "number": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(20).view(5, 4).t(),
    "channels_last": torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    "every second": torch.arange(10)[::2],
    "columns": torch.randn(8, 8)[:, 2:4],
    "rows": torch.randn(8, 8)[2:4],
    "one of many": torch.randn(3, 1)[1:2],
    "in pieces": torch.randn(PIECE_BYTES // 4 * 2 + 3),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_it(tmp_path: Path, name: str) -> None:
    """Into memory, or mapped; the elements are where the record says, at a multiple of 64 bytes, and nothing else is."""
    tensor = TENSORS[name]
    with (tmp_path / "x").open("wb") as file:
        nbytes, offset, crc32 = box_file.write_record(file, tensor)
    raw, dense = (tmp_path / "x").read_bytes(), tensor.contiguous()
    elements = bytes(_torch.host_bytes(dense))
    assert (nbytes, crc32) == (len(raw), checksum(elements))
    for mmap in (False, True):
        found = torch.load(tmp_path / "x", weights_only=True, mmap=mmap)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found).equal(bits(tensor))
        assert found.untyped_storage().nbytes() == tensor.nbytes
    assert raw[offset : offset + tensor.nbytes] == elements
    assert offset % 64 == 0 or not tensor.numel()
