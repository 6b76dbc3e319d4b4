"""Which ranks own whole matrices, and the way there and back: from the spec alone, an inverse pair, linear."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from depth import depth, each
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import Pool
from test_by_matrix import MESHES, MODEL, PARAMS, WANTED, matrices_on, spec_on
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard._spec.tree import Param
from funshard._units.layout import Piece, index, ordered, pieces
from funshard.collectives import Group
from funshard.optim._owners import Matrix
from funshard.optim._ways import Way, back, there
from funshard.testing import spmd

At = tuple[int, ...]

# --- the ways of all ranks, walked in one process ---

SHAPES = [(), (3,), (1, 5), (4, 1), (1, 1), (2, 3), (5, 2), (3, 3), (2, 3, 2), (4, 2, 3, 1), (7, 11), (0, 3)]


class Node(nn.Module):
    """Parameters of any shapes, dtypes and memory orders."""

    def __init__(self, params: list[tuple[tuple[int, ...], torch.dtype, bool]]) -> None:
        super().__init__()
        for i, (shape, dtype, turned) in enumerate(params):
            tensor = torch.zeros(shape[::-1] if turned else shape, dtype=dtype)
            tensor = tensor.permute([*range(len(shape))][::-1]) if turned else tensor
            self.register_parameter(f"w{i}", nn.Parameter(tensor, requires_grad=dtype.is_floating_point))


@st.composite
def sharded(draw: st.DrawFn) -> fs.PartitionSpec:
    """A spec of units that are split over any axes of a mesh, whose groups have the names of their axes."""
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.int32])
    param = st.tuples(st.sampled_from(SHAPES), dtypes, st.booleans())
    model = nn.ModuleList([Node(some) for some in draw(st.lists(st.lists(param, max_size=5), min_size=1, max_size=4))])
    owners = [module for module in model if [*module.parameters()]]
    assume(owners)
    if len(owners) > 1 and draw(st.booleans()):
        owners[-1].register_parameter("tied", next(owners[0].parameters()))
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 8]), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 64))
    names = [f"axis{i}" for i in range(len(sizes))]
    axes = st.permutations(names).flatmap(lambda some: st.integers(0, len(some)).map(lambda n: tuple(some[:n])))
    p = st.builds(P, axes, align=st.sampled_from([None, 1, 4]))
    policy = fs.by_path({str(i): draw(p) for i in range(len(model)) if [*model[i].parameters()]}, draw(p))
    return policy(model).on({name: Group(size, 0, name) for name, size in zip(names, sizes, strict=True)})


def seen(name: str, param: Param) -> bool | tuple[int, ...]:
    """Stacks as batches, and convolutions as matrices where their memory allows it."""
    return (len(param.shape) == 4 and not param.permuted and (param.shape[0], -1)) or len(param.shape) > 1


def walk(ways: Mapping[At, Way], spec: fs.PartitionSpec, parts: Mapping[At, list[Tensor]]) -> tuple[dict[At, list[Tensor]], int]:
    """What becomes of every rank's parts, and how many elements went from one rank to another."""
    names, moved = spec.bound_mesh.names, 0
    assert all([len(x) for x in parts[at]] == [*way.begin] for at, way in ways.items())
    flat = {at: torch.cat(some) for at, some in parts.items()}
    assert len({len(way.hops) for way in ways.values()}) == 1
    for hops in zip(*(way.hops for way in ways.values()), strict=True):
        now = dict(zip(ways, hops, strict=True))
        for at, hop in now.items():
            held = flat[at].split([*hop.sizes])
            flat[at] = torch.cat([flat[at][:0], *(held[i] for i in hop.order)])
        assert len({hop.group for hop in hops}) == 1
        if hops[0].group:
            axis = names.index(hops[0].group)
            sent = {at: flat[at].split([*hop.send]) for at, hop in now.items()}
            for at, hop in now.items():
                others = [(*at[:axis], j, *at[axis + 1 :]) for j in range(len(hop.receive))]
                arrived = [sent[other][at[axis]] for other in others]
                assert [len(x) for x in arrived] == [*hop.receive]
                moved += sum(len(x) for other, x in zip(others, arrived, strict=True) if other != at)
                flat[at] = torch.cat(arrived)
    return {at: [*flat[at].split([*way.end])] for at, way in ways.items()}, moved


def piece_of(matrix: Matrix, spec: fs.PartitionSpec, at: At) -> Piece:
    return next(piece for piece in pieces(matrix.unit, spec, at) if piece.param.name == matrix.name)


@settings(max_examples=depth(40, 2000))
@given(sharded())
def test_the_ways_of_all_ranks_fit(spec: fs.PartitionSpec) -> None:
    """Every rank gets what the others send it; matrices arrive whole at their owners, and slices at all replicas.

    What is sent is at most each matrix once for each axis, each way, and once to each replica.
    """
    known = fs.optim.matrices(spec, select=seen)
    ranks = [*itertools.product(*(range(size) for _, size in spec.bound_mesh.sizes))]
    numbered = iter(range(1, 10**6))
    for names in known.groups:
        some = [known.by_name[name] for name in names]
        full = {m.name: torch.tensor([next(numbered) for _ in range(m.param.numel)]) for m in some}
        cut = {at: [piece_of(m, spec, at) for m in some] for at in ranks}
        slices = {
            at: [full[m.name][p.begin : p.begin + p.high - p.low] for m, p in zip(some, cut[at], strict=True)] for at in ranks
        }
        whole, collected = walk({at: there(some, spec, at) for at in ranks}, spec, slices)
        for at in ranks:
            for matrix, got in zip(some, whole[at], strict=True):
                assert torch.equal(got, full[matrix.name] if matrix.owner == at else got[:0])
        again, spread = walk({at: back(some, spec, at) for at in ranks}, spec, whole)
        for at in ranks:
            for want, got in zip(slices[at], again[at], strict=True):
                assert torch.equal(got, want)
        numel, axes = sum(m.param.numel for m in some), some[0].unit.p.axes
        hops = sum(spec.bound_mesh[name].size > 1 for name in axes)
        replicas = len(ranks) // spec.size(some[0].unit)
        assert collected <= hops * numel
        assert spread <= (hops + replicas - 1) * numel


@settings(max_examples=depth(15, 300))
@given(sharded())
def test_all_ranks_agree(spec: fs.PartitionSpec) -> None:
    """On the owners and the groups, whichever rank asks; each group is of one dtype and one way, each matrix in one."""
    known = fs.optim.matrices(spec, select=seen)
    last = spec.on({name: Group(size, size - 1, name) for name, size in spec.bound_mesh.sizes})
    other = fs.optim.matrices(last, select=seen)
    assert (known.chosen, known.groups, str(known)) == (other.chosen, other.groups, str(other))
    assert [name for names in known.groups for name in names] == [m.name for m in known.chosen]
    for names in known.groups:
        assert len({(known.by_name[name].unit.dtype, known.by_name[name].unit.p.axes) for name in names}) == 1
