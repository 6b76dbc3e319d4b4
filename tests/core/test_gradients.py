"""Laws G1, G3, G5, G7, G8 and G9 on random models, policies and meshes of simulated ranks.

Bit by bit on whole numbers (see gradient_cases), and closely on real ones.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import strategies
import torch
from collective_log import Collectives, world
from depth import at_most, depth, each, every
from gradient_cases import agree, assert_shards_of_mean, assume_exact, calls, cases, inputs, mean_loss, models, penalty, values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import refused, with_forward
from parity import dot, loss_of, mean_square, numbers, shards_of
from ranks import Pool, mesh_of, real_ranks
from strategies import integers_like, meshes, modules, policies
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import funshard as fs
from funshard import P
from funshard.testing import spmd

both = pytest.mark.parametrize("exact", [True, False], ids=["exact", "real"])


@at_most(1)
@both
@settings(max_examples=depth(12, 600))
@given(case=cases(st.one_of(models(), calls())))
def test_g1_gradients_are_shards_of_the_mean_gradient(case: Any, exact: bool) -> None:
    """By torch.func.grad and fs.grad, alike, of a loss of gathered values and a penalty on shards. G5, G9: each use of a
    shared, tied or repeated part counts, in any order; what is not used has gradient zeros, never None."""
    for by in (grad, fs.grad):
        assert_shards_of_mean(case, lambda f, p, v, by=by: by(f)(p), exact=exact)


def squares(f: Any, p: Mapping[str, Tensor]) -> Tensor:
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
def test_g3_higher_derivatives_are_shards_of_the_mean_ones(transform: object, case: Any, exact: bool) -> None:
    """HVPs both ways, a penalty on the sharded gradient, and third order, of constant directions and of the gradient itself."""
    assert_shards_of_mean(case, transform, exact=exact)


@at_most(1)
@pytest.mark.parametrize("member", [0, 1])
@settings(max_examples=depth(4, 250))
@given(case=cases())
def test_g3_ensembles(member: int, case: Any) -> None:
    """vmap of grad over stacked shards is, for each member, that member's own gradient."""

    def each(f: Any, p: fs.Params, v: fs.Params) -> fs.Params:
        return {k: g[member] for k, g in vmap(grad(f))({k: torch.stack([p[k], v[k]]) for k in p}).items()}

    assert_shards_of_mean(case, each, lambda f, p, v: grad(f)((p, v)[member]))


def descended(f: Any, p: fs.Params, steps: int, rate: float, by: object = fs.grad) -> fs.Params:
    for _ in range(steps):
        p = {k: p[k] - rate * g for k, g in by(f)(p).items()}
    return p


@settings(max_examples=depth(3, 200))
@given(cases(models(1)), st.integers(1, 2))
def test_g3_maml(case: Any, steps: int) -> None:
    """The gradient of the loss after k sharded steps, through these steps: exact uphill (no number cancels), close downhill."""
    for exact, rate in ((True, -1.0), (False, 2**-4)):
        assert_shards_of_mean(
            case, lambda f, p, v, rate=rate: grad(lambda p: f(descended(f, p, steps, rate, grad)))(p), exact=exact
        )


@settings(max_examples=depth(3, 250))
@given(cases(), st.lists(st.integers(-2, 2), min_size=3, max_size=3))
def test_g3_samples(case: Any, samples: list[int]) -> None:
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


@settings(max_examples=depth(4, 250))
@given(cases(calls()))
def test_g5_nothing_runs(case: Any) -> None:
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
def two_policies(draw: st.DrawFn) -> Any:
    case = draw(cases(st.one_of(models(), calls())))
    return case, draw(strategies.policies(case[0]))


@at_most(1)
@both
@settings(max_examples=depth(5, 300))
@given(both_cases=two_policies())
def test_g7_schedules_and_specs_agree(both_cases: Any, exact: bool) -> None:
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
def test_g8_sgd_steps_commute_with_sharding(case: Any, steps: int, exact: bool) -> None:
    """k steps on shards are the shards of k steps on the mean loss, uphill as in G3."""
    assert_shards_of_mean(case, lambda f, p, v: descended(f, p, steps, -1.0 if exact else 2**-6), exact=exact)


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
def test_g1_g7_g9_on_real_ranks(gloo2: Pool, both_cases: Any) -> None:
    """The same, bit by bit, where units are really freed and gathered again; zeros, never None, where nothing was used (G5)."""
    (model, policy, _), other = both_cases
    assume_exact(model, inputs({"shard": 2}), lambda f, p, v: grad(f)(p))
    gloo2.run(on_this_rank, model, policy(model), other(model))


# --- reduce_grads: gradients that are reduced later ---
HYBRID = {"replicate": 2, "shard": 2}


def total(sizes: Mapping[str, int]) -> int:
    return torch.Size(sizes.values()).numel()


def own(model: nn.Module, full: fs.Params, spec: fs.PartitionSpec, x: Tensor) -> fs.Params:
    """This rank's own full gradients."""
    return fs.grad(lambda full: fs.functional_call(model, full, (x,), spec=spec))(full)


def sharded(model: nn.Module, params: fs.Params, spec: fs.PartitionSpec, x: Tensor, **options: Any) -> fs.Params:
    return fs.grad(lambda params: fs.functional_call(model, params, (x,), spec=spec, **options))(params)


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=depth(12, 300))
@given(st.data())
def test_reduced_later_as_at_once(data: st.DataObject) -> None:
    """On any model, policy and mesh, to the mean, the sum, or the sum over a number."""
    model = data.draw(modules(max_depth=2))
    policy, sizes = data.draw(policies(model)), data.draw(meshes(3))
    reduce = data.draw(st.sampled_from(["mean", "sum", 3.0, 0.5]))
    full = integers_like(model, high=2)
    xs = torch.arange(1.0, 1 + total(sizes), dtype=torch.float64)

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        spec = policy(model).on(mesh)
        params = fs.shard(full, spec)
        later = fs.reduce_grads(own(model, fs.unshard(params, spec), spec, x), spec, reduce=reduce)
        by_unshard = fs.grad(lambda p: fs.functional_call(model, fs.unshard(p, spec, reduce=reduce), (x,), spec=spec))(params)
        return sharded(model, params, spec, x, reduce=reduce), later, by_unshard

    at_once, later, by_unshard = spmd(run, sizes)(xs)
    same(later, at_once)
    same(by_unshard, at_once)


@pytest.mark.parametrize("p", [P("shard"), P(), P("shard", reshard=False), P(("replicate", "shard"))], ids=str)
def test_over_some_axes_and_then_the_others(p: P) -> None:
    """The same as over all: gradients are partial in between, and so are those of functional_call with reduce_axes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    full = {name: t.detach() for name, t in model.named_parameters()}
    xs = torch.randn(4, 5, 3, dtype=torch.float64)
    first = [name for name in HYBRID if name in (p.axes or ("shard",))]
    rest = [name for name in HYBRID if name not in first]

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        spec = fs.by_type(nn.Linear, p=p)(model).on(mesh)
        params, loss = fs.shard(full, spec), loss_of(model, spec, x, of=mean_square)
        whole = fs.grad(loss)(params)
        partial = fs.grad(loss_of(model, spec, x, of=mean_square, reduce_axes=first))(params)
        by_hand = fs.reduce_grads(fs.grad(loss)(fs.unshard(params, spec)), spec, reduce_axes=first)
        done = fs.reduce_grads(partial, spec, reduce_axes=rest)
        return whole, partial, by_hand, done

    whole, partial, by_hand, done = spmd(run, HYBRID)(xs)
    same(by_hand, partial)
    same(done, whole)
    if rest:  # the replicas have their own
        assert not any(torch.equal(t[0], t[2] if rest == ["replicate"] else t[1]) for t in partial.values())


@at_most(2)
@every(p=[P("shard"), P("shard", reshard=False)], way=["fs", "torch.func"])
@real_ranks(4)
def test_micro_batches_with_one_all_reduce(rank: int, way: str, p: P) -> None:
    """HSDP on real ranks: three micro-batches reduced over the slices each, over the replicas once; or once altogether."""
    mesh = mesh_of(2, 2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    spec, params = shards_of(fs.by_type(nn.Linear, p=p), model, mesh)
    gradient = {"fs": fs.grad, "torch.func": torch.func.grad}[way]
    losses = [functools.partial(loss_of, model, spec, numbers(rank, i, width=3), of=mean_square) for i in range(3)]
    whole = [gradient(loss())(params) for loss in losses]
    with Collectives() as log:
        partial = [gradient(loss(reduce_axes="shard"))(params) for loss in losses]
    assert not any(sent.op.startswith("all_reduce") for sent in log.all)
    accumulated = {key: torch.stack([g[key] for g in partial]).sum(0) for key in params}
    with Collectives() as log:
        done = fs.reduce_grads(accumulated, spec, reduce_axes="replicate")
    assert [sent.op for sent in log.all] == ["all_reduce"] * len(spec)
    same(done, {key: torch.stack([g[key] for g in whole]).sum(0) for key in params})
    full = fs.unshard(params, spec)
    local = [gradient(loss())(full) for loss in losses]
    with Collectives() as log:
        once = fs.reduce_grads({name: torch.stack([g[name] for g in local]).sum(0) for name in full}, spec)
    assert len(log.all) == 2 * len(spec)
    same(once, done)


@settings(max_examples=depth(12, 300))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_reduce_mean_is_the_mean_over_all_samples(counts: list[int]) -> None:
    """On ranks with any numbers of samples, none at all among them, where the rank's own mean is NaN."""
    model = nn.Linear(3, 1).double()
    full = {name: t.detach() for name, t in model.named_parameters()}
    most, n = max(counts), len(counts)
    xs = torch.randn(n, max(most, 1), 3, dtype=torch.float64)
    mask = torch.arange(max(most, 1)) < torch.tensor(counts)[:, None]

    def mean(params: fs.Params, x: Tensor, mask: Tensor) -> Tensor:
        losses = torch.func.functional_call(model, params, (x,)).square().squeeze(-1)
        return torch.where(mask, losses, 0).sum() / mask.sum()

    def run(mesh: fs.collectives.Mesh, x: Tensor, mask: Tensor) -> Any:
        spec = fs.policies.whole()(model).on(mesh)
        params = fs.shard(full, spec)
        grads = fs.reduce_grads(torch.func.grad(mean)(fs.unshard(params, spec), x, mask), spec, weight=mask.sum())

        return fs.weight_share(mask.sum(), spec), fs.unshard(grads, spec)

    shares, got = spmd(run, n)(xs, mask)
    torch.testing.assert_close(
        shares.double(), torch.tensor(counts) / max(sum(counts), 1), rtol=1e-6, atol=0, check_dtype=False
    )
    if not sum(counts):
        assert not any(t.any() for t in got.values())
        return
    expected = torch.func.grad(lambda p: mean(p, xs.flatten(0, 1), mask.flatten()))(full)
    torch.testing.assert_close({name: g[0] for name, g in got.items()}, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", [-2.0, math.nan, math.inf])
def test_a_weight_that_is_no_number_of_samples(wrong: float) -> None:
    """All ranks' shares are NaN, and none is 0 without a word."""
    spec = fs.policies.whole()(nn.Linear(3, 1))
    shares = spmd(lambda mesh, weight: fs.weight_share(weight, spec.on(mesh)), 2)(torch.tensor([2.0, wrong]))
    assert shares.isnan().all()


@real_ranks(2)
def test_a_weighted_loss_is_reduced_in_backward(rank: int) -> None:
    """``loss * weight_share`` and ``reduce="sum"`` on two ranks with two and five samples: the mean over seven."""
    mesh = mesh_of(2)
    model = nn.Linear(3, 1).double()
    spec, params = shards_of(fs.policies.whole(), model, mesh)
    xs = torch.randn(7, 3, dtype=torch.float64)
    x = xs[:2] if rank == 0 else xs[2:]

    def loss(params: fs.Params) -> Tensor:
        value = fs.functional_call(model, params, (x,), spec=spec, reduce="sum").square().mean()
        return value * fs.weight_share(len(x), spec)

    got = fs.grad(loss)(params)
    own = fs.grad(lambda p: loss(p) / fs.weight_share(len(x), spec))(fs.unshard(params, spec))
    later = fs.reduce_grads(own, spec, weight=len(x))
    full = {name: t.detach() for name, t in model.named_parameters()}
    expected = fs.shard(torch.func.grad(lambda p: torch.func.functional_call(model, p, (xs,)).square().mean())(full), spec)
    for grads in (got, later):
        torch.testing.assert_close(grads, expected, rtol=1e-6, atol=1e-7)


def test_history_in_float32() -> None:
    """What is accumulated as you say: 256 + 1 - 256 is 1 in float32, and 0 where it is added up in bfloat16."""
    model = with_forward(nn.Linear, lambda self, x: nn.Linear.forward(self, x).sum())(1, 1, bias=False)
    spec = fs.policies.whole(P("shard", align=1, precision=fs.Precision(param=torch.bfloat16, reduce=torch.float32)))(model)

    def run(mesh: fs.collectives.Mesh, *steps: Tensor) -> Tensor:
        bound = spec.on(mesh)
        shards = fs.shard({"weight": torch.zeros(1, 1)}, bound)
        acc = {"weight": torch.zeros(1, 1)}
        low = {"weight": torch.zeros(1, 1, dtype=torch.bfloat16)}
        for x in steps:
            g = own(model, fs.unshard(shards, bound), bound, x)
            acc = {name: acc[name] + t for name, t in g.items()}
            low = {name: low[name] + t.bfloat16() for name, t in g.items()}
        return torch.cat([fs.reduce_grads(tree, bound)[""].float() for tree in (acc, low)])

    steps = (torch.full((2, 1), v) for v in (256.0, 1.0, -256.0))
    assert spmd(run, 2)(*steps)[0].tolist() == [1.0, 0.0]


def test_what_is_wrong_is_said_before_anything_is_sent() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with world(8):
        mesh = mesh_of(2, 4)
        spec = fs.by_type(nn.Linear)(model).on(mesh)
        full = {name: t.detach() for name, t in model.named_parameters()}
        params = fs.shard(full, spec, rank=0)

        def loss(**options: Any) -> Tensor:
            return fs.functional_call(model, params, (torch.ones(2, 3),), spec=spec, **options)

        with Collectives() as log:
            with pytest.raises(ValueError, match=r"unit '0' is split over axis 'shard'.*got axes \['replicate'\]"):
                fs.reduce_grads(full, spec, reduce_axes=["replicate"])
            refused(ValueError, "unit '0' is split over axis 'shard'", lambda: loss(reduce_axes=["replicate"]))
            refused(ValueError, "unknown mesh axis 'model': expected some of", lambda: loss(reduce_axes=["shard", "model"]))
            refused(ValueError, "unit '0': a slice cannot be reduced over axis 'shard'", lambda: fs.reduce_grads(params, spec))
            refused(ValueError, "'mean', 'sum' or a positive number", lambda: loss(reduce=0.0))
            with pytest.raises(ValueError, match=r"'mean', 'sum' or a positive number.*got 'avg'"):
                fs.reduce_grads(full, spec, reduce="avg")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"parameter '0.bias' of unit '0' is missing"):
                fs.reduce_grads({"0.weight": full["0.weight"]}, spec)
            with pytest.raises(ValueError, match="unit 'nowhere' is not in the spec"):
                fs.reduce_grads({**full, "nowhere": full["0.bias"]}, spec)
            # a weight is a share of all ranks' weights: a sum over some axes, or another division, would be no mean
            for others in ({"reduce": "sum"}, {"reduce_axes": ("shard",)}):
                with pytest.raises(ValueError, match=r"reduce_grads: expected weight= alone, got reduce="):
                    fs.reduce_grads(full, spec, weight=1, **others)
        assert not log.all
    alone = spec.on({"shard": 1, "replicate": 1})  # of some units, as of a model of which a part is frozen
    assert list(fs.reduce_grads({name: t for name, t in full.items() if name[0] == "1"}, alone)) == ["1"]
