"""LAW of what a unit's state is: slices of its parameters, and numbers, which have no dimension."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from depth import depth
from hypothesis import given, settings
from strategies import integers_like, modules
from torch import nn

import funshard as fs
from funshard import P
from funshard.checkpoint._leaves import Leaf, ScalarLeaf, SliceLeaf
from funshard.checkpoint._tree import Description
from funshard.collectives import ProcessAxis

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
        lr=0.1,
    )
    return init(fs.shard(full, spec, rank=rank))


def kinds(state: Any, spec: fs.PartitionSpec) -> dict[str, set[type[Leaf]]]:
    """What the slots of each name are taken for."""
    out: dict[str, set[type[Leaf]]] = {}
    for leaf in Description({"opt": state}, spec).leaves:
        assert isinstance(leaf, SliceLeaf | ScalarLeaf)
        out.setdefault(leaf.names[0][0].rpartition(".")[2], set()).add(type(leaf))
    return out


RIGHT = {"step": {ScalarLeaf}, "exp_avg": {SliceLeaf}, "exp_avg_sq": {SliceLeaf}}


@settings(max_examples=depth(25, 400))
@given(modules(), st.integers(1, 6), st.integers(1, 3), st.data())
def test_numbers_are_told_from_slices(model: nn.Module, size: int, align: int, data: st.DataObject) -> None:
    """On all ranks, whatever the lengths, and also in plain dicts."""
    full = integers_like(model)
    if not full:
        return
    cut = data.draw(st.sets(st.sampled_from(sorted(full))))
    p, each = P("shard", align=align), {type(module) for module in model.modules()}
    specs = ranks_of(data.draw(st.sampled_from([fs.policies.whole(p), fs.by_type(*each, p=p)]))(model), size)
    assert all(kinds(declared(full, spec, rank, cut), spec) == RIGHT for rank, spec in enumerate(specs))
    assert all(kinds(initial(full, spec, rank, cut), spec) == RIGHT for rank, spec in enumerate(specs))
