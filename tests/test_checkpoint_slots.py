"""LAWS of what a unit's state is: slices of its parameters, or numbers of their options, also where both have one length."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from depth import depth
from hypothesis import given, settings
from torch import Tensor, nn

import funshard as fs
from funshard import P
from funshard.checkpoint._state.leaves import Leaf, ScalarLeaf, SliceLeaf
from funshard.checkpoint._state.tree import describe, iter_leaves
from funshard.collectives import ProcessAxis
from funshard.testing import integers_like, modules

Params = fs.Params


def ranks_of(spec: fs.PartitionSpec, size: int) -> list[fs.PartitionSpec]:
    return [spec.on({"shard": ProcessAxis(size, rank)}) for rank in range(size)]


def initial(full: Any, spec: fs.PartitionSpec, rank: int, cut: set[str]) -> Any:
    """What `declared` gives as plain dicts, as users' own states are."""
    return {key: dict(values) for key, values in declared(full, spec, rank, cut).items()}


def declared(full: Any, spec: fs.PartitionSpec, rank: int, cut: set[str]) -> Any:
    """AdamW's state on one rank, where some parameters are not decayed."""
    init, _ = fs.optim.from_torch(
        torch.optim.AdamW,
        spec=spec,
        options=lambda name, _: {"weight_decay": 0.0 if name in cut else 0.1},
        rank=rank,
        lr=0.1,
    )
    return init(fs.shard(full, spec, rank=rank))


def kinds(state: Any, spec: fs.PartitionSpec) -> dict[str, set[type[Leaf]]]:
    """What the slots of each name are taken for."""
    node, _ = describe({"opt": state}, spec)
    out: dict[str, set[type[Leaf]]] = {}
    for leaf in iter_leaves(node):
        assert isinstance(leaf, SliceLeaf | ScalarLeaf)
        out.setdefault(leaf.names[0][0].rpartition(".")[2], set()).add(type(leaf))
    return out


RIGHT = {"step": {ScalarLeaf}, "exp_avg": {SliceLeaf}, "exp_avg_sq": {SliceLeaf}}


@settings(max_examples=depth(25, 400))
@given(modules(), st.integers(1, 6), st.integers(1, 3), st.data())
def test_numbers_are_told_from_slices(model: nn.Module, size: int, align: int, data: st.DataObject) -> None:
    """Right or refused, on all ranks alike; and refused only if no unit's slices are longer than it has parameters."""
    full = integers_like(model)
    if not full:
        return
    cut = data.draw(st.sets(st.sampled_from(sorted(full))))
    p, each = P("shard", align=align), {type(module) for module in model.modules()}
    specs = ranks_of(data.draw(st.sampled_from([fs.policies.whole(p), fs.by_type(*each, p=p)]))(model), size)
    assert all(kinds(declared(full, spec, rank, cut), spec) == RIGHT for rank, spec in enumerate(specs))
    states = [initial(full, spec, rank, cut) for rank, spec in enumerate(specs)]
    if all(specs[0].shard_numel(unit) <= len(unit.params) for unit in specs[0]):
        assert len({refused_or_right(state, spec) for state, spec in zip(states, specs, strict=True)}) == 1
    else:
        assert all(kinds(state, spec) == RIGHT for state, spec in zip(states, specs, strict=True))


def refused_or_right(state: Any, spec: fs.PartitionSpec) -> str:
    try:
        assert kinds(state, spec) == RIGHT
    except ValueError as error:
        return str(error)
    return ""


def tiny(*widths: int, align: int = 1) -> tuple[nn.Module, fs.PartitionSpec]:
    """A unit of two parameters for each width, of as many elements on each of two ranks."""
    model = nn.Sequential(*(nn.Linear(1, width) for width in widths))
    return model, ranks_of(fs.by_type(nn.Linear, p=P("shard", align=align))(model), 2)[0]


def test_another_unit_tells() -> None:
    """Linear(1, 2) has a slice of 2 elements and 2 options; of Linear(1, 3) slices have 3, or those of 2 have no 2 options."""
    for widths, cut in (((2, 3), {"0.bias", "1.bias"}), ((2, 3), {"0.bias"}), ((2, 3), {"1.bias"}), ((2, 3), set[str]())):
        model, spec = tiny(*widths)
        assert spec.shard_numel(spec.by_key["0"]) == 2
        assert kinds(initial(dict(model.named_parameters()), spec, 0, cut), spec) == RIGHT


def test_what_nothing_tells_is_refused() -> None:
    """Also by a like=, and not with a larger align, or where the unit's numbers have no dimension."""
    model, spec = tiny(2, 2)
    full = dict(model.named_parameters())
    state = initial(full, spec, 0, {"0.bias", "1.bias"})
    with pytest.raises(ValueError, match=r"unit '0' of state 'opt\.0\.exp_avg': \[2\] may be .* has 2: .*P\(align=3\)"):
        kinds(state, spec)
    assert kinds(initial(full, spec, 0, set()), spec) == RIGHT
    model, spec = tiny(2, 2, align=3)
    assert kinds(initial(dict(model.named_parameters()), spec, 0, {"0.bias"}), spec) == RIGHT


def test_one_slice_in_a_unit_is_a_slice() -> None:
    """As of momentum; of parameters themselves; and numbers by the names that torch's optimizers have."""
    _, spec = tiny(2, 2)

    def of_each(**slots: Tensor) -> Any:
        return {unit.key: dict(slots) for unit in spec}

    two = torch.ones(2)
    assert kinds(of_each(momentum=two), spec) == {"momentum": {SliceLeaf}}
    assert kinds({unit.key: two for unit in spec}, spec).popitem()[1] == {SliceLeaf}
    with pytest.raises(ValueError, match=r"unit '0' of state 'opt\.0\.a': \[2\] may be"):
        kinds(of_each(b=two, a=two.clone()), spec)
