"""Optimizers of matrices on local units: equal to those of the whole matrices in one process.

A column slice is no matrix: its owner gathers the whole. Over an axis of experts each rank owns matrices that are whole.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import matrix_peers as peers
import pytest
import torch
from collective_log import Collectives, world
from depth import at_most, each, every, mark_seldom, seldom
from parity import step_with
from ranks import mesh_of, real_ranks
from test_by_matrix import ADAMW, OPTIMIZERS
from torch import nn
from torch.testing import assert_close

import funshard as fs
from funshard import P

SHAPES: dict[str, tuple[int, ...]] = {
    "both": (4, 4, 6),
    "columns": (5, 8),
    "experts": (4, 3, 3),
    "line": (8,),
    "plain": (4, 4),
    "rows": (8, 4),
    "turned": (4, 8),
    "twice": (8, 8),
}
"""The whole parameters. "turned" lies transposed in memory."""
LOCAL: dict[str, Any] = {
    "expert": {"experts": 0, "both": 0},
    "tensor": {"both": 2, "columns": 1, "line": 0, "rows": 0, "turned": 1, "twice": 0},
    "other": {"twice": 1},
}
STACKS = ("both", "experts")
SGD = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "experts": ({"expert": 2, "shard": 2}, "shard"),
    "tensor": ({"shard": 2, "tensor": 2}, "shard"),
    "both": ({"tensor": 2, "expert": 2}, None),
    "replicas": ({"replicate": 2, "tensor": 2}, "shard"),
    "split over another": ({"tensor": 2, "replicate": 2}, ("replicate", "shard")),
    "three axes": ({"expert": 2, "tensor": 2, "shard": 2}, "shard"),
    "pieces of pieces": ({"other": 2, "tensor": 2}, "shard"),
    "one expert each": ({"expert": 4}, "shard"),
    "alone": ({}, "shard"),
}
ON_FOUR = [name for name, (sizes, _) in MESHES.items() if math.prod(sizes.values()) == 4]


def numbers(seed: int) -> fs.Params:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}


PARAMS, GRADS = numbers(0), [numbers(t) for t in (1, 2)]


def all_axes(sizes: dict[str, int]) -> dict[str, int]:
    return {**sizes, **{name: 1 for name in ("expert", "other", "replicate", "shard", "tensor") if name not in sizes}}


def spec_on(mesh: Any, sizes: dict[str, int], axis: Any, dtype: torch.dtype = torch.float64) -> fs.PartitionSpec:
    """The spec of the local model."""
    model = nn.ParameterDict()
    for name, whole in SHAPES.items():
        shape = [*whole]
        for local, dims in LOCAL.items():
            if name in dims:
                shape[dims[name]] //= sizes[local]
        x = torch.zeros(shape[::-1], dtype=dtype).T if name == "turned" else torch.zeros(shape, dtype=dtype)
        model[name] = nn.Parameter(x)
    return fs.policies.whole(P(axis, local=LOCAL, align=1))(model).on(mesh)


def on_ranks(mesh: str) -> tuple[dict[str, int], fs.PartitionSpec]:
    sizes = all_axes(MESHES[mesh][0])
    return sizes, spec_on(mesh_of(**sizes), sizes, MESHES[mesh][1])


def matrices_of(spec: fs.PartitionSpec, **options: Any) -> fs.optim._matrices.Matrices:
    return fs.optim.matrices(spec, select=lambda name, param: len(param.shape) > 1, **options)


def expected(optimizer: str) -> fs.Params:
    """By the peer, each matrix of a stack by itself."""

    def apart(tree: fs.Params) -> fs.Params:
        out = {name: x for name, x in tree.items() if name not in STACKS}
        return out | {f"{name}.{i}": x for name in STACKS for i, x in enumerate(tree[name])}

    each_alone = {*apart(PARAMS)} - {"line"}
    found = peers.trained(apart(PARAMS), [apart(g) for g in GRADS], OPTIMIZERS[optimizer][1], each_alone, **ADAMW)
    stacks = {name: torch.stack([found.pop(f"{name}.{i}") for i in range(SHAPES[name][0])]) for name in STACKS}
    return found | stacks


def trained(spec: fs.PartitionSpec, optimizer: str, **options: Any) -> fs.Params:
    """Whole parameters after all steps."""
    return fs.unshard(peers.sharded(spec, OPTIMIZERS[optimizer][0](matrices_of(spec, **options)), PARAMS, GRADS)[0], spec)


def check(found: fs.Params, want: fs.Params, optimizer: str = "muon") -> None:
    """Of SOAP the square and tall matrices alone: in the null space of the others' factors its basis is any."""
    for name, x in found.items():
        if optimizer != "soap" or name in ("experts", "line", "plain", "twice"):
            assert_close(x, want[name].expand_as(x), rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@at_most(1)
@each(mesh=mark_seldom(MESHES, "three axes", "alone"))
@every(optimizer=mark_seldom(["muon", "shampoo", "soap"], "muon", "shampoo"), gather_stacks=[False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_equal_on_simulated_ranks(optimizer: str, mesh: str, gather_stacks: bool) -> None:
    sizes = all_axes(MESHES[mesh][0])
    spec = functools.partial(spec_on, sizes=sizes, axis=MESHES[mesh][1])
    run = fs.testing.spmd(lambda on, _: trained(spec(on), optimizer, gather_stacks=gather_stacks), sizes)
    check(run(torch.zeros(math.prod(sizes.values()))), expected(optimizer), optimizer)


@at_most(1)
@pytest.mark.parametrize("mesh", mark_seldom(ON_FOUR, "experts", "both"))
@real_ranks(4)
def test_equal_on_real_ranks(rank: int, mesh: str) -> None:
    _, spec = on_ranks(mesh)
    for optimizer in ("muon", "shampoo", "soap"):
        check(trained(spec, optimizer), expected(optimizer), optimizer)
    check(trained(spec, "shampoo", gather_stacks=True), expected("shampoo"))


@pytest.mark.parametrize("optimizer", ["muon", "shampoo", "soap"])
@real_ranks(2)
def test_units_split_and_local_over_one_axis(rank: int, optimizer: str) -> None:
    """They were sent in one batch, with the sizes of its first unit: one rank raised, the other waited. A projection that is
    split over "tensor" before a layer that is local over it, and another unit that is neither."""
    local = {"columns": 1, "rows": 0, "turned": 1, "twice": 0}
    model = nn.ModuleDict({unit: nn.ParameterDict() for unit in ("first", "layer", "other")})
    units = {"plain": "first", "experts": "other"} | dict.fromkeys(local, "layer")
    for name, unit in units.items():
        shape = [n // (2 if i == local.get(name) else 1) for i, n in enumerate(SHAPES[name])]
        model[unit][name] = nn.Parameter(torch.zeros(shape, dtype=torch.float64))  # pyright: ignore[reportIndexIssue]
    by_path = {"first": P("tensor", align=1), "layer": P(local={"tensor": {f"*.{n}": dim for n, dim in local.items()}})}
    spec = fs.by_path(by_path | {"other": P()})(model).on(mesh_of(tensor=2))

    pair = OPTIMIZERS[optimizer][0](matrices_of(spec))
    named = [{f"{unit}.{name}": tree[name] for name, unit in units.items()} for tree in (PARAMS, *GRADS)]
    got = fs.unshard(peers.sharded(spec, pair, named[0], named[1:])[0], spec)
    check({name.split(".")[1]: x for name, x in got.items()}, expected(optimizer), optimizer)


# --- the state ---
RESUMED = [("experts", "one expert each"), ("both", "split over another"), ("one expert each", "tensor"), ("tensor", "both")]


@pytest.mark.parametrize(("first", "then"), [RESUMED[0], *(pytest.param(*some, marks=seldom) for some in RESUMED[1:])])
@pytest.mark.parametrize("optimizer", mark_seldom(["muon", "shampoo", "soap"], "shampoo"))
@real_ranks(4)
def test_state_goes_to_other_owners(rank: int, tmp_path: Path, optimizer: str, first: str, then: str) -> None:
    """Files have the whole state of a stack, whatever owners had of it."""
    want = expected(optimizer)

    def on(name: str) -> tuple[fs.PartitionSpec, Any, Any]:
        _, spec = on_ranks(name)
        return spec, *OPTIMIZERS[optimizer][0](matrices_of(spec))

    spec, init, update = on(first)
    params = fs.shard(PARAMS, spec)
    params, state = update(fs.shard(GRADS[0], spec), init(params), params)
    fs.checkpoint.save(tmp_path / "step", {"params": params, "state": state}, spec).wait()
    to, init, update = on(then)
    now = fs.reshard(params, spec, to)
    saved = fs.checkpoint.load(tmp_path / "step", to, like={"params": now, "state": init(now)})
    check(fs.unshard(update(fs.shard(GRADS[1], to), saved["state"], saved["params"])[0], to), want, optimizer)


@seldom
@real_ranks(4)
def test_adafactor_of_whole_stacks(rank: int) -> None:
    """It scales by the norm of a whole parameter, of which no rank has it all: so it is sent to one owner."""
    _, spec = on_ranks("both")
    init, update = fs.optim.adafactor(0.05, spec)
    params = fs.shard(PARAMS, spec)
    state = init(params)
    want = {name: p.clone() for name, p in PARAMS.items()}
    theirs = torch.optim.Adafactor(want.values(), lr=0.05)
    for grads in GRADS:
        params, state = update(fs.shard(grads, spec), state, params)
        step_with(grads, want, theirs)
    assert_close(fs.unshard(params, spec), want)
    with pytest.raises(ValueError, match=r"matrix 'experts': its stack is local over axis 'expert'.*gather_stacks=True"):
        fs.optim.adafactor(0.05, matrices_of(spec))


# --- what is refused, and what it costs ---
def test_a_state_that_looks_like_a_part_of_a_stack() -> None:
    """A checkpoint tells parts by shape: of a whole stack no state may begin as a part does."""
    spec = spec_on(all_axes({"expert": 2}), all_axes({"expert": 2}), "shard")
    step = lambda grad, state, param: (param, state)  # noqa: E731
    with pytest.raises(ValueError, match=r"matrix 'experts': state 'two' \[2\] of the matrix \[4, 3, 3\]: expected"):
        fs.optim.by_matrix(lambda p: {"two": p.new_zeros(2)}, step, matrices_of(spec, gather_stacks=True), fallback=SGD)


def test_select_is_asked_about_whole_parameters() -> None:
    """And its shape is that of the whole: a local convolution is the same matrix on any mesh."""
    model = nn.ParameterDict({"conv": torch.zeros(2, 3, 2, 2), "experts": torch.zeros(2, 4, 2, 3)})
    p = P("shard", local={"tensor": {"conv": 0}, "expert": {"experts": 0}})
    spec = fs.policies.whole(p)(model).on({"tensor": 2, "expert": 3, "shard": 1})
    asked: dict[str, tuple[int, ...]] = {}

    def select(name: str, param: fs.Param) -> tuple[int, ...]:
        asked[name] = param.shape
        return (param.shape[0], -1) if name == "conv" else (param.shape[0], 4, -1)

    known = fs.optim.matrices(spec, select=select)
    assert asked == {"conv": (4, 3, 2, 2), "experts": (6, 4, 2, 3)}
    assert {m.name: (m.shape, m.stack_axes) for m in known.chosen} == {
        "conv": ((4, 12), ()),
        "experts": ((2, 4, 6), ("expert",)),
    }
    assert known.by_name["experts"].owner[1] is None
    assert "expert" in str(known)


def test_bytes_of_experts() -> None:
    """On 64 ranks: a rank sends its slice to the owner of its experts, and an owner what it owns back, over 4 ranks."""
    with world(64):
        model = nn.ParameterDict({"experts": torch.zeros(8, 16, 16)})
        spec = fs.policies.whole(P("shard", local={"expert": 0}))(model).on(mesh_of(expert=16, shard=4))
        known = fs.optim.matrices(spec, select=lambda name, param: True)
        params = fs.shard({"experts": torch.zeros(128, 16, 16)}, spec, check_values=False)
        init, update = fs.optim.muon(known, steps=1)
        state = init(params)
        with Collectives() as sent:
            update(params, state, params)
        numel = 8 * 16 * 16
        assert [(one.op, one.ranks, one.numel) for one in sent.all] == [
            ("all_to_all_single", 4, numel // 4),
            ("all_to_all_single", 4, numel * known._is_owner("experts")),
        ]
