"""Random cases for the layout and sharding laws, and the helpers that compare and poison parameter trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import strategies
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import funshard as fs
from funshard import P, Params, PartitionSpec, Unit

Sizes = dict[str, int]


@dataclass(frozen=True)
class Case:
    """A model, small whole numbers in the shapes of its parameters, mesh sizes, and a spec bound to them."""

    model: nn.Module
    full: Params
    sizes: Sizes
    spec: PartitionSpec

    @property
    def ranks(self) -> range:
        return range(math.prod(self.sizes.values()))


def _on(policy: fs.Policy, p: P) -> fs.Policy:
    return fs.policies.override(policy, fs.by_path({"": p}))


def roots(sizes: Sizes) -> st.SearchStrategy[P]:
    """A P for the leftovers: over every axis, none, or all in either order."""
    names = tuple(sizes)
    return st.builds(P, st.sampled_from([None, *names, names, names[::-1]]), align=st.sampled_from([None, 1, 3]))


def specs(model: nn.Module, sizes: Sizes) -> st.SearchStrategy[PartitionSpec]:
    """Specs of one model on one mesh, by every kind of policy."""
    return st.builds(lambda policy, p: _on(policy, p)(model).on(sizes), strategies.policies(model), roots(sizes))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model, sizes = draw(strategies.modules()), draw(strategies.meshes())
    full = strategies.integers_like(model, draw(st.integers(0, 99)))
    return Case(model, full, sizes, draw(specs(model, sizes)))


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Asserts the same keys, and the same dtypes, shapes and values bit by bit."""
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype, key
        assert torch.equal(got[key], tensor), key  # shapes as well


def owners(unit: Unit, sizes: Sizes) -> Tensor:
    """[slice, replica] -> rank: who holds which slice, from the meaning of P alone (first axis outermost)."""
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    names = list(sizes)
    order = [*unit.p.axes, *(name for name in names if name not in unit.p.axes)]
    return grid.permute([names.index(name) for name in order]).reshape(
        math.prod(sizes[name] for name in unit.p.axes), -1
    )  # fmt: skip


def alignment(unit: Unit) -> int:
    """At a multiple of how many elements every parameter and slice of the unit starts, from the meaning of P alone."""
    return unit.p.align or (8 if unit.dtype == torch.float32 else 16 // unit.dtype.itemsize)


def places(unit: Unit) -> dict[str, slice]:
    """Where each parameter lies in the unit's buffer: after the one before it, from the next aligned element on."""
    out, end = {}, 0
    for param in unit.params:
        start = math.ceil(end / alignment(unit)) * alignment(unit)
        end = start + math.prod(param.shape)
        out[param.name] = slice(start, end)
    return out


def owned(unit: Unit, padded: int) -> Tensor:
    """Where the unit's buffer holds parameters, and not padding."""
    out = torch.zeros(padded, dtype=torch.bool)
    for place in places(unit).values():
        out[place] = True
    return out


def slice_numel(unit: Unit, count: int) -> int:
    """Elements of each slice where there are so many, from the meaning of P alone."""
    end = max(place.stop for place in places(unit).values())
    return math.ceil(end / (count * alignment(unit))) * alignment(unit)


def slices(full: Mapping[str, Tensor], unit: Unit, count: int) -> tuple[Tensor, ...]:
    """The unit's buffer in so many slices: parameters at their places and zeros between them; `shard`, written out."""
    buffer = full[unit.params[0].name].new_zeros(count * slice_numel(unit, count))
    for name, place in places(unit).items():
        buffer[place] = full[name].flatten()
    return buffer.chunk(count)


def each_rank(full: Params | nn.Module, spec: PartitionSpec) -> list[Params]:
    """The shards of every rank of a spec that is bound to sizes."""
    count = math.prod(size for _, size in spec.sizes or ())
    return [fs.shard(full, spec, rank=rank) for rank in range(count)]


def poisoned(shards: Params, spec: PartitionSpec, rank: int) -> Params:
    """The shards with NaN in all of their padding."""
    out = {key: torch.full_like(shard, torch.nan) for key, shard in shards.items()}
    pieces = fs.param_views(shards, spec, rank=rank)
    for name, piece in fs.param_views(out, spec, rank=rank).items():
        piece.copy_(pieces[name])
    return out


def stacked(many: list[Params]) -> Params:
    """Each rank's tensors with the ranks in dimension 0: what `fs.testing.spmd` takes."""
    return {key: torch.stack([one[key] for one in many]) for key in many[0]}


def on_ranks(sizes: Sizes, fn: Callable[..., Params], *args: object) -> list[Params]:
    """``fn(mesh, *args)`` on every simulated rank, each rank's result by itself."""
    count = math.prod(sizes.values())
    out = fs.testing.spmd(lambda mesh, _, *args: fn(mesh, *args), sizes)(torch.zeros(count), *args)
    return [{key: tensor[rank] for key, tensor in out.items()} for rank in range(count)]
