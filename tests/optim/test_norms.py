"""optim.norms: the norm of every parameter by name is that of the gathered tree, from one reduction."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from collective_log import Collectives
from depth import every
from models import refused
from parity import policies
from ranks import mesh_of, real_ranks
from test_optim import poisoned
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard.optim import global_norm, norms

MODEL = nn.ModuleDict({"one": nn.Linear(5, 5), "two": nn.Linear(5, 5), "last": nn.Linear(5, 1, bias=False)}).double()
MODEL["two"].weight = MODEL["one"].weight
"""Two layers with one weight, one of few elements, and one that most ranks have nothing of."""
POLICIES = policies({"one": P(("replicate", "shard")), "two": P("replicate"), "last": P()}, "sharded", "whole", "replicated")
POLICIES["aligned"] = fs.policies.whole(P("shard", align=16))
MESHES = [{"replicate": 1, "shard": 1}, {"replicate": 1, "shard": 3}, {"replicate": 2, "shard": 2}]


def full(seed: int = 0) -> fs.Params:
    generator = torch.Generator().manual_seed(seed)
    named = MODEL.named_parameters()
    return {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in named}


@every(sizes=MESHES, policy=POLICIES)
def test_norms_of_the_gathered_tree(policy: str, sizes: dict[str, int]) -> None:
    """And their squares add up to that of the global norm; slices with padding and full tensors alike."""
    tree = full()

    def run(mesh: Any, _: Tensor) -> Any:
        spec = POLICIES[policy](MODEL).on(mesh)
        shards = poisoned(spec, tree, math.nan)
        grouped = norms(shards, spec, by=1), norms(shards, spec, by=lambda name: name.rsplit(".")[-1])
        return norms(shards, spec), *grouped, norms(tree, spec), global_norm(shards, spec)

    def group(names: list[str]) -> Tensor:
        return torch.cat([tree[name].flatten() for name in names]).norm()

    got, by_module, by_kind, of_full, total = fs.testing.spmd(run, sizes)(torch.zeros(math.prod(sizes.values())))
    ranks = len(total)
    expected = {name: x.norm().expand(ranks) for name, x in tree.items()}
    assert list(got) == list(expected) == ["one.weight", "one.bias", "two.bias", "last.weight"]
    assert_close(got, expected)
    assert_close(of_full, expected)
    assert_close(by_module["one"], group(["one.weight", "one.bias"]).expand(ranks))
    assert_close(by_kind, {k: group([n for n in tree if n.endswith(k)]).expand(ranks) for k in ("weight", "bias")})
    assert_close(torch.stack([*got.values()]).square().sum(0).sqrt(), total)


@pytest.mark.parametrize(("sizes", "sent"), [((1, 2), [1, 1, 0, 1, 1]), ((2, 2), [1, 1, 0, 2, 1])])
@real_ranks(lambda sizes: math.prod(sizes))
def test_real_ranks(rank: int, sizes: tuple[int, int], sent: list[int]) -> None:
    """One reduction for each axis that splits units, and none where nothing is split."""
    mesh, tree, counts = mesh_of(*sizes), full(), []
    for policy in POLICIES.values():
        spec = policy(MODEL).on(mesh)
        shards = poisoned(spec, tree, math.nan)
        with Collectives() as log:
            got = norms(shards, spec)
        counts.append(len(log.all))
        assert_close(got, {name: x.norm() for name, x in tree.items()})
    assert counts == sent


@pytest.mark.parametrize("policy", ["sharded", "mixed"])
def test_differentiable(policy: str) -> None:
    """The gradient and a Hessian-vector product are the shards of the whole tree's, also where a rank has zeros alone."""
    tree, v = full(), full(1)
    tree["one.weight"].view(-1)[:-1] = 0  # all that the first rank has
    tree["two.bias"] = torch.zeros_like(tree["two.bias"])

    def whole(tree: fs.Params) -> Tensor:
        return torch.stack([(i + 1) * x.norm() ** 3 for i, x in enumerate(tree.values())]).sum()

    want_grad = torch.func.grad(whole)(tree)
    rest = {k: x for k, x in tree.items() if k != "two.bias"}
    want_hvp = fs.hvp(lambda t: whole({k: t.get(k, tree[k]) for k in tree}), rest, {k: v[k] for k in rest})

    def run(mesh: Any, _: Tensor) -> Any:
        spec = POLICIES[policy](MODEL).on(mesh)

        def f(shards: fs.Params) -> Tensor:
            return torch.stack([(i + 1) * x**3 for i, x in enumerate(norms(shards, spec).values())]).sum()

        direction = fs.shard(v | {"two.bias": torch.zeros(5).double()}, spec)
        shards = fs.shard(tree, spec)
        want = fs.shard(want_grad, spec), fs.shard(want_hvp | {"two.bias": torch.zeros(5).double()}, spec)
        return (torch.func.grad(f)(shards), fs.hvp(f, shards, direction)), want

    assert_close(*fs.testing.spmd(run, {"replicate": 1, "shard": 2})(torch.zeros(2)))


@every(value=[1e-30, 1e30, math.inf, math.nan], dtype=[torch.float32, torch.bfloat16, torch.complex64])
def test_tiny_huge_and_not_finite(value: float, dtype: torch.dtype) -> None:
    """As in float64: squares are neither 0 nor inf in between."""
    model = nn.Linear(3, 4, dtype=dtype)
    spec = fs.policies.whole()(model)
    tree = {name: torch.full(p.shape, value, dtype=dtype) for name, p in model.named_parameters()}
    got = norms(fs.shard(tree, spec), spec)
    for name, x in tree.items():
        wide = x.abs().double().norm()
        assert got[name].dtype == torch.float32
        assert_close(got[name], wide.float(), equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    spec = fs.policies.whole()(MODEL)
    with pytest.raises(ValueError, match="again: expected a tree that has it once"):
        norms({"one.weight": torch.ones(5, 5), "two.weight": torch.ones(5, 5)}, spec)
    refused(ValueError, "expected this rank's slice", lambda: norms({"": torch.ones(3)}, spec))
    with pytest.raises(TypeError, match="norms: '': expected a tensor, got UnitState"):
        norms(fs.optim.from_torch(torch.optim.AdamW).init(fs.shard(MODEL, spec)), spec)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="global_norm: '': expected a tensor, got NoneType; an unused parameter has gradient z"):
        global_norm({"": None}, spec)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="norms: by: expected a function of a name"):
        norms({}, spec, by="layer")  # type: ignore[arg-type]
    assert norms({}, spec) == {}


@pytest.mark.parametrize(("sizes", "policy"), [((1, 2), "sharded"), ((1, 2), "mixed"), ((2, 2), "sharded")])
@real_ranks(lambda sizes: math.prod(sizes))
def test_a_rank_that_leaves_out_a_unit(rank: int, sizes: tuple[int, int], policy: str) -> None:
    """An error on every rank, also on those that share no axis with it; no norm of fewer units, and no rank that waits."""
    spec = POLICIES[policy](MODEL).on(mesh_of(*sizes))
    shards = fs.shard(full(), spec)
    last, size = [*shards][-1], sizes[0] * sizes[1]
    lacking = {key: x for key, x in shards.items() if rank != size - 1 or key != last}
    empty = {} if rank == size - 1 else shards
    error = rf"rank 0 has '{last}' in its tree where rank {size - 1} has nothing more: expected the same keys in the same order"
    for tree in (lacking, empty):
        match = error if tree is lacking else "has an empty tree: expected the same"
        refused(ValueError, match, lambda: global_norm(tree, spec))
        refused(ValueError, match, lambda: fs.optim.clip_by_global_norm(tree, spec, 1.0))
        refused(ValueError, match, lambda: fs.optim.vdot(tree, tree, spec))
        refused(ValueError, match, lambda: norms(tree, spec))
    assert_close(global_norm(shards, spec), torch.cat([x.flatten() for x in full().values()]).norm())
    if rank == 0:
        global_norm(full(), spec)  # which sends nothing
