"""Many models, many steps, many products: ensembles, MAML, Hessian-vector products and what is solved with them, on shards.

Each law is a function of a loss, a point, a direction and an inner product; it gives on shards, with the loss of each
rank's batch, the shards of what it (or a plain reference) gives on full parameters with the mean loss. Random models,
policies and meshes of simulated ranks, and two real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import strategies
import torch
from collective_log import Collectives, world
from depth import at_most, depth, mark_seldom
from gradient_cases import Case, agree, assert_shards_of_mean, cases, inputs, mean_loss, models, penalty, values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import module_class, refused
from parity import shards_of
from ranks import Pool
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

import funshard as fs
from funshard.collectives import Mesh

Tree = Mapping[str, Tensor]
Loss = Callable[..., Tensor]
"""``loss(params, scale=1)``: of this rank's input times ``scale``, and a penalty on shards."""
Dot = Callable[[Tree, Tree], Tensor]

RATE = 2**-5


def plain_dot(a: Tree, b: Tree) -> Tensor:
    return sum((a[k] * b[k]).sum() for k in a)


def dot_of(spec: fs.PartitionSpec) -> Dot:
    """The inner product of the full trees from shards: slices add up over the ranks that they are split over."""
    return lambda a, b: fs.optim.vdot(a, b, spec)


def rank_loss(model: nn.Module, spec: fs.PartitionSpec, x: Tensor) -> Loss:
    return lambda p, scale=1: fs.functional_call(model, p, x * scale, spec=spec) + penalty(p)


def full_loss(model: nn.Module, xs: Tensor) -> Loss:
    return lambda t, scale=1: mean_loss(model, xs * scale)(t)


def by_reverse(f: Loss, p: Tree, v: Tree) -> fs.Params:
    """H v as the gradient of grad . v, without forward mode."""
    return grad(lambda p: plain_dot(grad(f)(p), v))(p)


def moved(p: Tree, rate: Any, grads: Tree) -> fs.Params:
    return {k: p[k] - rate * g for k, g in grads.items()}


def descended(f: Loss, p: Tree, steps: int, rate: Any = RATE, scale: Any = 1, by: Any = fs.grad) -> fs.Params:
    for _ in range(steps):
        p = moved(p, rate, by(f)(p, scale))
    return p


def conjugate_gradients(apply: Callable[[fs.Params], Tree], b: fs.Params, dot: Dot, steps: int) -> fs.Params:
    """A fixed number of steps, so that it can be batched; without a residual they do nothing."""
    x, r, p = {k: torch.zeros_like(t) for k, t in b.items()}, b, b
    rr = dot(r, r)
    for _ in range(steps):
        ap = apply(p)
        x, r = moved(x, -rr / dot(p, ap).clamp_min(1e-60), p), moved(r, rr / dot(p, ap).clamp_min(1e-60), ap)
        rr, old = dot(r, r), rr
        p = moved(r, -rr / old.clamp_min(1e-60), p)
    return x


def stack(*trees: Tree) -> fs.Params:
    return {k: torch.stack([tree[k] for tree in trees]) for k in trees[0]}


def member(tree: Tree, i: int) -> fs.Params:
    return {k: t[i] for k, t in tree.items()}


RATES, SCALES = torch.tensor([RATE, RATE / 2]).double(), torch.tensor([1, -0.5]).double()
"""Of two members of an ensemble, or of two tasks."""


def squared_hessian(f: Loss, p: Tree, hvp: Callable[..., fs.Params]) -> Callable[[fs.Params], fs.Params]:
    """H H + 1: positive definite whatever the loss."""
    return lambda v: moved(v, -1, hvp(f, p, hvp(f, p, v)))


def strengthened(f: Loss) -> Callable[[Tree, Tree], Tensor]:
    return lambda p, s: f(p) + sum((s[k] * p[k] ** 2).sum() for k in p)


def hypergradient(f: Loss, p: Tree, s: Tree, dot: Dot, hvp: Callable[..., fs.Params]) -> fs.Params:
    """Through the mixed derivative, of a strength for each element."""
    g = strengthened(f)
    q = conjugate_gradients(squared_hessian(lambda p: g(p, s), p, hvp), grad(f)(p), dot, 2)
    return vjp(lambda s: grad(g)(p, s), s)[1](q)[0]


class Law(NamedTuple):
    """On shards, and on full parameters by plain torch.func: each of a loss, two trees and an inner product."""

    sharded: Callable[[Loss, fs.Params, fs.Params, Dot], fs.Params]
    plain: Callable[[Loss, fs.Params, fs.Params, Dot], fs.Params]


def both(law: Callable[..., fs.Params]) -> Law:
    """One law that is given the Hessian-vector product to use."""
    return Law(lambda *args: law(*args, fs.hvp), lambda *args: law(*args, by_reverse))


def over_tasks(f: Loss, p: fs.Params, scale: Any) -> Tensor:
    return f(descended(f, p, 2, scale=scale, by=grad), -scale)


LAWS = {
    "hvp of a global norm": both(  # to the fourth: it couples every rank and unit
        lambda f, p, v, dot, hvp: hvp(lambda p: f(p) + dot(p, p) ** 2, p, v)),
    "hvp of many directions": Law(
        lambda f, p, v, dot: member(vmap(lambda v: fs.hvp(f, p, v))(stack(v, p)), 1), lambda f, p, v, dot: by_reverse(f, p, p)),
    "hvp through a step": both(lambda f, p, v, dot, hvp: hvp(lambda p: f(descended(f, p, 1, by=grad)), p, v)),
    "gradient of v.Hv": both(lambda f, p, v, dot, hvp: grad(lambda p: dot(v, hvp(f, p, v)))(p)),
    "ensemble with its own data and rates": Law(
        lambda f, p, v, dot: member(
            vmap(lambda p, rate, scale: descended(f, p, 3, rate, scale))(stack(p, v), RATES, SCALES), 1
        ),
        lambda f, p, v, dot: descended(f, v, 3, RATES[1], SCALES[1], by=grad),
    ),
    "MAML over tasks": Law(
        lambda f, p, v, dot: fs.grad(lambda p: vmap(lambda s: over_tasks(f, p, s))(SCALES).mean())(p),
        lambda f, p, v, dot: grad(lambda p: (over_tasks(f, p, SCALES[0]) + over_tasks(f, p, SCALES[1])) / 2)(p)),
    "MAML with learned rates": Law(
        lambda f, p, v, dot: fs.grad(lambda r: f({k: p[k] - r[k] * g for k, g in fs.grad(f)(p).items()}))(v),
        lambda f, p, v, dot: grad(lambda r: f({k: p[k] - r[k] * g for k, g in grad(f)(p).items()}))(v)),
    "conjugate gradients": both(lambda f, p, v, dot, hvp: conjugate_gradients(squared_hessian(f, p, hvp), v, dot, 3)),
    "implicit gradient": both(hypergradient),
}  # fmt: skip


@at_most(1)
@pytest.mark.parametrize("name", LAWS)
@settings(max_examples=depth(3, 100))
@given(case=cases(models(1)))
def test_laws(name: str, case: Case) -> None:
    model, policy, sizes = case
    xs = inputs(sizes, exact=False)
    t, v = (values(model, seed, exact=False) for seed in (0, 1))

    def run(mesh: Mesh, x: Tensor) -> fs.Params:
        spec = policy(model).on(mesh)
        return LAWS[name].sharded(rank_loss(model, spec, x), fs.shard(t, spec), fs.shard(v, spec), dot_of(spec))

    expected = LAWS[name].plain(full_loss(model, xs), t, v, plain_dot)
    want = fs.testing.spmd(lambda mesh, _: fs.shard(expected, policy(model).on(mesh)), sizes)(xs)
    agree(fs.testing.spmd(run, sizes)(xs), want, exact=False)


def law_on_this_rank(rank: int, name: str, model: nn.Module, spec: fs.PartitionSpec, expected: fs.Params) -> None:
    spec = spec.bound
    p, v = (fs.shard(values(model, seed, exact=False), spec) for seed in (0, 1))
    f = rank_loss(model, spec, inputs({"shard": 2}, exact=False)[rank])
    agree(LAWS[name].sharded(f, p, v, dot_of(spec)), fs.shard(expected, spec), exact=False)


@at_most(4)
@pytest.mark.parametrize("name", mark_seldom(LAWS, *[*LAWS][::2]))
@settings(max_examples=depth(1, 50))
@given(data=st.data())
def test_laws_on_real_ranks(gloo2: Pool, name: str, data: st.DataObject) -> None:
    model = data.draw(models(1))
    policy = data.draw(strategies.policies(model))
    t, v = (values(model, seed, exact=False) for seed in (0, 1))
    expected = LAWS[name].plain(full_loss(model, inputs({"shard": 2}, exact=False)), t, v, plain_dot)
    gloo2.run(law_on_this_rank, name, model, policy(model), expected)


@at_most(1)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "real"])
@settings(max_examples=depth(8, 300))
@given(case=cases())
def test_hvp_is_shards_of_the_mean_hessian_times_the_vector(case: Case, exact: bool) -> None:
    """The reference is a gradient of a gradient; bit by bit on whole numbers."""
    assert_shards_of_mean(case, lambda f, p, v: fs.hvp(f, p, v), by_reverse, exact=exact)


Convex = module_class(
    "Convex",
    lambda: {"direct": nn.Linear(3, 4), "squares": nn.Linear(3, 4, bias=False)},
    lambda self, x: self.direct(x) + self.squares(x**2),
)
"""Multinomial logistic regression on the inputs and their squares."""
CONVEX = Convex().double()


def squared(spec: fs.PartitionSpec) -> Loss:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    return lambda p: (torch.tanh(fs.functional_call(CONVEX, p, (x,), spec=spec)) ** 2).mean()


@pytest.mark.parametrize("members", [2, 5])
def test_an_ensemble_sends_as_often_as_one_member(members: int) -> None:
    """A vmapped step has each collective of one member's step once, of all members' bytes."""
    with world(4):
        spec, shards = shards_of(fs.by_type(nn.Linear), CONVEX)
        alone, together = Collectives(), Collectives()
        with alone:
            grad(squared(spec))(shards)
        with together:
            vmap(grad(squared(spec)))({k: p.expand(members, -1) for k, p in shards.items()})
    assert {one.op for one in alone.all} == {"all_gather", "reduce_scatter"}
    assert sorted((one.op, members * one.numel) for one in alone.all) == sorted((one.op, one.numel) for one in together.all)


V = {"direct": torch.ones(8).double(), "squares": torch.ones(6).double()}
WRONG = {
    "missing": ({"direct": V["direct"]}, r"v\['squares'\]: expected \[6\] torch.float64 as in params, got none"),
    "unknown": (V | {"more": V["direct"]}, r"v\['more'\]: expected none as in params, got \[8\] torch.float64"),
    "shape": (V | {"direct": torch.ones(7).double()}, r"v\['direct'\]: expected \[8\] torch.float64 .*, got \[7\]"),
    "dtype": (V | {"direct": torch.ones(8)}, r"v\['direct'\]: expected \[8\] torch.float64 .*, got \[8\] torch.float32"),
    "number": (V | {"direct": 1.0}, r"v\['direct'\]: expected \[8\] torch.float64 as in params, got float"),
}


@pytest.mark.parametrize(("v", "message"), WRONG.values(), ids=WRONG)
def test_hvp_names_what_is_wrong_before_anything_is_sent(v: Any, message: str) -> None:
    with world(2):
        spec, shards = shards_of(fs.by_type(nn.Linear), CONVEX)
        assert {k: p.shape for k, p in shards.items()} == {k: p.shape for k, p in V.items()}
        with Collectives() as sent:
            refused(ValueError, message, lambda: fs.hvp(squared(spec), shards, v))
            assert not sent.all
            fs.hvp(squared(spec), shards, V)
        assert sent.all


def test_hvp_of_what_has_no_curvature() -> None:
    """Zeros, never None: a linear loss, one of part of the parameters, and a constant."""
    shards = fs.shard(CONVEX, fs.by_type(nn.Linear)(CONVEX).bound)
    v = {k: torch.ones_like(p) for k, p in shards.items()}
    part = fs.hvp(lambda p: (p["direct"] ** 2).sum(), shards, v)
    agree(part, {"direct": 2 * v["direct"], "squares": 0 * v["squares"]})
    for flat in (lambda p: p["direct"].sum(), lambda p: torch.ones(())):
        agree(fs.hvp(flat, shards, v), {k: 0 * p for k, p in shards.items()})
