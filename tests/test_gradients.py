"""Laws G1, G3, G5, G7, G8 and G9 on random models, policies and meshes of simulated ranks.

Bit by bit on whole numbers (see gradient_cases), and closely on real ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import pytest
import strategies
import torch
from cases import each_rank, stacked
from depth import at_most, depth, each
from gradient_cases import (
    Case,
    Loss,
    agree,
    assert_shards_of_mean,
    assume_exact,
    calls,
    cases,
    inputs,
    mean_loss,
    models,
    penalty,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Pool
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import funshard as fs

both = pytest.mark.parametrize("exact", [True, False], ids=["exact", "real"])


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    return sum((a[k] * b[k]).sum() for k in a)


@at_most(1)
@both
@settings(max_examples=depth(6, 300))
@given(case=cases())
def test_g1_gradients_are_shards_of_the_mean_gradient(case: Case, exact: bool) -> None:
    """By torch.func.grad and fs.grad, alike, of a loss of gathered values and a penalty on shards."""
    for by in (grad, fs.grad):
        assert_shards_of_mean(case, lambda f, p, v, by=by: by(f)(p), exact=exact)


def squares(f: Loss, p: Mapping[str, Tensor]) -> Tensor:
    return sum((g**2).sum() for g in grad(f)(p).values())


HIGHER = {
    "jvp of grad": lambda f, p, v: jvp(grad(f), (p,), (v,))[1],
    "grad of (grad . v)": lambda f, p, v: grad(lambda p: dot(grad(f)(p), v))(p),
    "fs.hvp in reverse": lambda f, p, v: fs.hvp(f, p, v, forward=False),
    "penalty on the gradient": lambda f, p, v: grad(lambda p: f(p) + squares(f, p))(p),
    "grad of grad of grad": lambda f, p, v: grad(lambda p: dot(grad(lambda p: dot(grad(f)(p), v))(p), v))(p),
    "penalty on the gradient of a penalty": lambda f, p, v: grad(lambda p: squares(lambda p: f(p) + squares(f, p), p))(p),
}


@at_most(1)
@each
@both
@pytest.mark.parametrize("transform", HIGHER.values(), ids=HIGHER)
@settings(max_examples=depth(3, 150))
@given(case=cases())
def test_g3_higher_derivatives_are_shards_of_the_mean_ones(transform: object, case: Case, exact: bool) -> None:
    """HVPs both ways, a penalty on the sharded gradient, and third order, of constant directions and of the gradient itself."""
    assert_shards_of_mean(case, transform, exact=exact)


@at_most(1)
@pytest.mark.parametrize("member", [0, 1])
@settings(max_examples=depth(4, 250))
@given(case=cases())
def test_g3_ensembles(member: int, case: Case) -> None:
    """vmap of grad over stacked shards is, for each member, that member's own gradient."""

    def each(f: Loss, p: fs.Params, v: fs.Params) -> fs.Params:
        return {k: g[member] for k, g in vmap(grad(f))({k: torch.stack([p[k], v[k]]) for k in p}).items()}

    assert_shards_of_mean(case, each, lambda f, p, v: grad(f)((p, v)[member]))


def descended(f: Loss, p: fs.Params, steps: int, rate: float, by: object = fs.grad) -> fs.Params:
    for _ in range(steps):
        p = {k: p[k] - rate * g for k, g in by(f)(p).items()}
    return p


@settings(max_examples=depth(3, 200))
@given(cases(models(1)), st.integers(1, 2))
def test_g3_maml(case: Case, steps: int) -> None:
    """The gradient of the loss after k sharded steps, through these steps: exact uphill (no number cancels), close downhill."""
    for exact, rate in ((True, -1.0), (False, 2**-4)):
        assert_shards_of_mean(
            case, lambda f, p, v, rate=rate: grad(lambda p: f(descended(f, p, steps, rate, grad)))(p), exact=exact
        )


@settings(max_examples=depth(3, 250))
@given(cases(), st.lists(st.integers(-2, 2), min_size=3, max_size=3))
def test_g3_samples(case: Case, samples: list[int]) -> None:
    """vmap(grad) over samples with the gather inside: entry i is the shard of the mean of the ranks' i-th gradients."""
    model, policy, sizes = case
    xs = inputs(sizes)[:, None] * torch.tensor(samples).double()
    t = values(model)
    for i in range(len(samples)):
        assume_exact(model, xs[:, i].abs(), lambda f, p, v: grad(f)(p))

    def run(mesh: fs.collectives.Mesh, xs: Tensor) -> fs.Params:
        spec = policy(model).on(mesh)
        loss = lambda p, x: fs.functional_call(model, p, x, spec=spec) + penalty(p)  # noqa: E731
        return vmap(grad(loss), (None, 0))(fs.shard(t, spec), xs)

    got = fs.testing.spmd(run, sizes)(xs)
    for i in range(len(samples)):
        expected = grad(mean_loss(model, xs[:, i]))(t)
        want = fs.testing.spmd(lambda mesh, _, e=expected: fs.shard(e, policy(model).on(mesh)), sizes)(xs)
        agree({k: g[:, i] for k, g in got.items()}, want)


@at_most(1)
@both
@settings(max_examples=depth(6, 300))
@given(case=cases(calls()))
def test_g9_parts_called_in_any_order_again_or_never(case: Case, exact: bool) -> None:
    """G5, G9: each use of a shared, tied or repeated part counts; what is not used has gradient zeros, never None."""
    for by in (grad, fs.grad):
        assert_shards_of_mean(case, lambda f, p, v, by=by: by(f)(p), exact=exact)


@settings(max_examples=depth(4, 250))
@given(cases(calls()))
def test_g5_nothing_runs(case: Case) -> None:
    """A call that uses no unit has gradients all the same: zeros."""
    model, policy, sizes = case
    model.order = []

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> list[fs.Params]:
        spec = policy(model).on(mesh)
        shards = fs.shard(values(model), spec)
        return [by(lambda p: fs.functional_call(model, p, x, spec=spec))(shards) for by in (grad, fs.grad)]

    for grads in fs.testing.spmd(run, sizes)(inputs(sizes)):
        assert grads.keys() == policy(model).by_key.keys()
        assert all(g is not None and not g.any() for g in grads.values())


@st.composite
def two_policies(draw: st.DrawFn) -> tuple[Case, fs.Policy]:
    case = draw(cases(st.one_of(models(), calls())))
    return case, draw(strategies.policies(case[0]))


@at_most(1)
@both
@settings(max_examples=depth(5, 300))
@given(both_cases=two_policies())
def test_g7_schedules_and_specs_agree(both_cases: tuple[Case, fs.Policy], exact: bool) -> None:
    """Unit by unit, the whole model at once, and by another spec: the same full gradients, by name."""
    (model, policy, sizes), other = both_cases
    xs = inputs(sizes, exact=exact)
    t = values(model, exact=exact)
    if exact:
        assume_exact(model, xs, lambda f, p, v: grad(f)(p))

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> list[fs.Params]:
        one, two = policy(model).on(mesh), other(model).on(mesh)

        def by_units(p: fs.Params, spec: fs.PartitionSpec) -> Tensor:
            return fs.functional_call(model, p, x, spec=spec)

        def at_once(p: fs.Params, spec: fs.PartitionSpec) -> Tensor:
            return torch.func.functional_call(copy.deepcopy(model), fs.unshard(p, spec), (x,))

        cases = [(by_units, one), (at_once, one), (by_units, two), (at_once, two)]
        return [fs.unshard(fs.grad(f)(fs.shard(t, spec), spec), spec) for f, spec in cases]

    first, *rest = fs.testing.spmd(run, sizes)(xs)
    for grads in rest:
        agree(grads, first, exact=exact)


@at_most(1)
@both
@settings(max_examples=depth(4, 250))
@given(case=cases(st.one_of(models(1), calls())), steps=st.integers(1, 3))
def test_g8_sgd_steps_commute_with_sharding(case: Case, steps: int, exact: bool) -> None:
    """k steps on shards are the shards of k steps on the mean loss, uphill as in G3."""
    assert_shards_of_mean(case, lambda f, p, v: descended(f, p, steps, -1.0 if exact else 2**-6), exact=exact)


@settings(max_examples=depth(4, 200))
@given(cases(st.one_of(models(1), calls())), st.integers(1, 4))
def test_g8_adamw_steps_commute_with_sharding(case: Case, steps: int) -> None:
    """k steps of torch.optim.AdamW (foreach) on each rank's shards, unsharded, are k plain steps on the mean gradients."""
    model, policy, sizes = case
    options = {"lr": 2**-4, "weight_decay": 0.1, "eps": 0.01, "foreach": True}
    xs = inputs(sizes, exact=False)
    spec = policy(model).on(sizes)
    full = values(model, exact=False)
    ranks = each_rank(full, spec)
    theirs = torch.optim.AdamW(full.values(), **options)
    ours = [torch.optim.AdamW(shards.values(), **options) for shards in ranks]

    def run(mesh: fs.collectives.Mesh, x: Tensor, shards: fs.Params) -> fs.Params:
        here = policy(model).on(mesh)
        return fs.grad(lambda p: fs.functional_call(model, p, x, spec=here) + penalty(p))(shards)

    for _ in range(steps):
        for k, g in grad(mean_loss(model, xs))({k: p.detach() for k, p in full.items()}).items():
            full[k].grad = g
        theirs.step()
        grads = fs.testing.spmd(run, sizes)(xs, stacked(ranks))
        for r, optimizer in enumerate(ours):
            for k, shard in ranks[r].items():
                shard.grad = grads[k][r].clone()
            optimizer.step()
    unsharded = fs.testing.spmd(lambda mesh, p: fs.unshard(p, policy(model).on(mesh)), sizes)(stacked(ranks))
    agree(unsharded, {k: p.expand(math.prod(sizes.values()), *p.shape) for k, p in full.items()}, exact=False)


def on_this_rank(rank: int, model: nn.Module, one: fs.PartitionSpec, two: fs.PartitionSpec) -> None:
    xs, t = inputs({"shard": 2}), values(model)
    expected = grad(mean_loss(model, xs, lambda t: torch.zeros(())))(t)
    for spec in (one.bound, two.bound):
        for by in (fs.grad, grad):
            shards = fs.shard(t, spec)
            got = by(lambda p, spec=spec: fs.functional_call(model, p, xs[rank], spec=spec))(shards)
            agree(got, fs.shard(expected, spec))
        agree(fs.unshard(got, spec), expected)


@settings(max_examples=depth(4, 300))
@given(both_cases=two_policies())
def test_g1_g7_g9_on_real_ranks(gloo2: Pool, both_cases: tuple[Case, fs.Policy]) -> None:
    """The same, bit by bit, where units are really freed and gathered again; zeros, never None, where nothing was used (G5)."""
    (model, policy, _), other = both_cases
    assume_exact(model, inputs({"shard": 2}), lambda f, p, v: grad(f)(p))
    gloo2.run(on_this_rank, model, policy(model), other(model))
