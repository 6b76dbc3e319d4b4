"""Derivatives with respect to a learning rate that all ranks share: those of the unsharded steps; torch's schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from depth import at_most, depth, each, every, seldom, some
from models import refused
from parity import policies
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler as theirs
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard.optim import adamw, schedule, sgd

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
X = torch.randn(4, 6, 3).double()
LR = torch.tensor(0.05).double()
POLICIES = policies({"0": P(), "2": P("shard"), "4": P("shard")}, "sharded", "replicated")
POLICIES["mixed on both axes"] = fs.by_path({"0": P(), "2": P(("replicate", "shard")), "4": P("replicate")})


def sign(grad: Tensor, state: Any, param: Tensor, *, lr: Any) -> tuple[Tensor, Any]:
    momentum = 0.9 * state["momentum"] + grad
    return param - lr * momentum / (1 + momentum.square().sum()).sqrt(), {"momentum": momentum}


def by_owners(spec: fs.PartitionSpec) -> Any:
    rest = adamw(0.05, weight_decay=0.01, spec=spec)
    update = fs.optim.by_matrix(lambda p: {"momentum": torch.zeros_like(p)}, sign, spec, fallback=rest)
    return update.init, lambda *args, lr: update.update(*args, lr=lr, fallback_lr=lr)


def muon(spec: fs.PartitionSpec) -> Any:
    init, update = fs.optim.muon(spec, dtype=torch.float64, fallback=adamw(0.05, weight_decay=0.01, spec=spec))
    return init, lambda *args, lr: update(*args, lr=lr, fallback_lr=lr)


OPTIMIZERS: dict[str, Callable[[fs.PartitionSpec], Any]] = {
    "AdamW": lambda spec: adamw(0.05, weight_decay=0.01, spec=spec),
    "SGD": lambda spec: sgd(0.05, momentum=0.9, spec=spec),
    "muon": muon,
    "owners": by_owners,
}


def loss(spec: fs.PartitionSpec, params: fs.Params, x: Tensor) -> Tensor:
    return fs.functional_call(MODEL, params, x, spec=spec).square().mean()


def after_two_steps(spec: fs.PartitionSpec, name: str, x: Tensor) -> Callable[[Tensor], Tensor]:
    """This rank's loss after two steps, as a function of the learning rate."""
    params = fs.shard(FULL, spec)
    init, update = OPTIMIZERS[name](spec)

    def f(lr: Tensor) -> Tensor:
        now, state = params, init(params)
        for _ in range(2):
            grads = torch.func.grad(lambda p: loss(spec, p, x))(now)
            now, state = update(grads, state, now, lr=lr)
        return loss(spec, now, x)

    return f


def derivatives(spec: fs.PartitionSpec, name: str, x: Tensor) -> tuple[Tensor, ...]:
    f = after_two_steps(spec, name, x)
    return torch.func.grad(f)(LR), torch.func.grad(torch.func.grad(f))(LR)


def wanted(name: str, ranks: int) -> tuple[Tensor, ...]:
    """On one rank, of all ranks' samples."""
    return derivatives(fs.policies.whole()(MODEL).on({"shard": 1}), name, X[:ranks].flatten(0, 1))


@at_most(1)
@each
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=["shard", "hsdp"])
@every(policy=POLICIES, name=OPTIMIZERS)
def test_on_simulated_ranks(name: str, policy: str, sizes: dict[str, int]) -> None:
    if policy == "mixed on both axes" and len(sizes) == 1:
        pytest.skip("has no such axis")
    ranks = torch.Size(sizes.values()).numel()
    got = fs.testing.spmd(lambda mesh, x: derivatives(POLICIES[policy](MODEL).on(mesh), name, x), sizes)(X[:ranks])
    for one, want in zip(got, wanted(name, ranks), strict=True):
        assert_close(one, want.expand(ranks), rtol=1e-7, atol=1e-9)


@each
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every(policy=["sharded", "replicated"], clips=[False, True], name=["AdamW", "SGD"])
def test_update_in_backward(name: str, clips: bool, policy: str) -> None:
    """By a rate from inside of the simulated ranks, or from outside, where it is not batched; and along it and all shards."""

    clipping: Any = {"max_norm": 0.1, "clip": "previous", "norm": torch.tensor(0.5)} if clips else {}

    def rank(mesh: Any, x: Tensor, outer: Tensor | None = None) -> Any:
        spec = POLICIES[policy](MODEL).on(mesh)
        init, update = OPTIMIZERS[name](spec)

        def after(lr: Tensor, params: fs.Params) -> Tensor:
            step = lambda grads, state, params: update(grads, state, params, lr=lr)  # noqa: E731
            run = fs.update_in_backward(step, partial(loss, spec), params, init(params), [x], spec=spec, **clipping)
            return loss(spec, run.params, x)

        params = fs.shard(FULL, spec)
        if outer is not None:
            return after(outer, params)
        point = LR, params
        tangent = torch.ones_like(LR), {key: torch.zeros_like(p) for key, p in params.items()}
        return torch.func.grad(after)(*point), torch.func.jvp(after, point, tangent)[1]

    def mean(lr: Tensor, x: Tensor = X[:2]) -> Tensor:
        return fs.testing.spmd(lambda mesh, x: rank(mesh, x, lr), len(x))(x).mean()

    joined = X[:2].flatten(0, 1)[None]
    want = (mean(LR + 1e-6, joined) - mean(LR - 1e-6, joined)) / 2e-6
    slope, products = fs.testing.spmd(rank, 2)(X[:2])
    lr = LR.clone().requires_grad_()
    for got in (*slope, products.mean(), torch.func.grad(mean)(LR), *torch.autograd.grad(mean(lr), lr)):
        assert_close(got, want, rtol=1e-6, atol=1e-7)


FOUR = [("AdamW", "mixed on both axes"), ("owners", "mixed on both axes")][: depth(1, 2)]
ON_RANKS = [(*case, (2,)) for case in some([(name, policy) for name in OPTIMIZERS for policy in ("mixed", "sharded")], 3)]


@seldom
@pytest.mark.parametrize(("name", "policy", "sizes"), [*ON_RANKS, *((*case, (2, 2)) for case in FOUR)])
@real_ranks(lambda sizes: torch.Size(sizes).numel())
def test_on_real_ranks(rank: int, name: str, policy: str, sizes: tuple[int, ...]) -> None:
    """The same over process groups."""
    mesh = mesh_of(*sizes)
    assert_close(derivatives(POLICIES[policy](MODEL).on(mesh), name, X[rank]), wanted(name, mesh.size()), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("policy", ["sharded", "replicated", "mixed"])
def test_weights_of_a_ranks_own_samples(policy: str) -> None:
    """Of a rank's own inputs the gradient is that of its own loss: N times that of the mean over ranks, also through a step."""
    weights = torch.linspace(0.5, 1.5, 24).view(4, 6, 1).double()

    def of_rank(mesh: Any, x: Tensor, weights: Tensor) -> Tensor:
        spec = POLICIES[policy](MODEL).on(mesh)
        params = fs.shard(FULL, spec)

        def after(weights: Tensor) -> Tensor:
            weighted = lambda p: (weights * fs.functional_call(MODEL, p, x, spec=spec).square()).mean()  # noqa: E731
            grads = torch.func.grad(weighted)(params)
            return loss(spec, {k: p - 0.1 * grads[k] for k, p in params.items()}, x)

        return torch.func.grad(after)(weights)

    got = fs.testing.spmd(of_rank, 4)(X, weights)
    want = of_rank({"shard": 1}, X.flatten(0, 1), weights.flatten(0, 1)).view_as(got)
    assert_close(got, 4 * want)


@real_ranks(2)
def test_without_a_spec_it_is_refused(rank: int) -> None:
    """Nothing in a shard tells a slice from a replica."""
    shards = {"": torch.ones(3)}
    init, update = adamw(0.05)
    slope = torch.func.grad(lambda lr: update(shards, init(shards), shards, lr=lr)[0][""].sum())
    refused(RuntimeError, "lr is differentiated on 2 ranks, of which each has a part", lambda: slope(torch.tensor(0.1)))
    full = {"weight": torch.ones(3, 2)}  # no shard: each rank's own
    slope = torch.func.grad(lambda lr: update(full, init(full), full, lr=lr)[0]["weight"].sum())
    assert slope(torch.tensor(0.1)) < 0


# --- schedules of torch ---
SCHEDULERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "LambdaLR": (theirs.LambdaLR, {"lr_lambda": lambda step: min(1.0, (step + 1) / 5)}),
    "CyclicLR": (theirs.CyclicLR, {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 3, "cycle_momentum": False}),
    "OneCycleLR": (theirs.OneCycleLR, {"max_lr": 0.3, "total_steps": 30, "cycle_momentum": False}),
    "SequentialLR": (
        lambda optimizer: theirs.SequentialLR(
            optimizer, [theirs.LinearLR(optimizer, 0.1, total_iters=5), theirs.CosineAnnealingLR(optimizer, 10)], [5]
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_torchs(name: str) -> None:
    """In any order of steps, also as tensors."""
    make, options = SCHEDULERS[name]
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer, **options)
        expected: list[float] = []
        for _ in range(25):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    rate = schedule(make, 0.1, **options)
    assert [rate(step) for step in range(25)] == expected
    assert rate(torch.tensor(13)) == expected[13] == rate(13)


def test_what_is_no_function_of_the_step_is_refused() -> None:
    """What depends on metrics, changes more than the rate or has another optimizer."""
    refused(TypeError, "ReduceLROnPlateau depends on metrics", lambda: schedule(theirs.ReduceLROnPlateau, 0.1))
    for name in ("CyclicLR", "OneCycleLR"):
        cls, options = SCHEDULERS[name]
        refused(ValueError, "give cycle_momentum=False", lambda: schedule(cls, 0.1, **{**options, "cycle_momentum": True}))
    refused(TypeError, r"StepLR: .*step_size", lambda: schedule(theirs.StepLR, 0.1))
    other = torch.optim.SGD([torch.zeros(())], lr=0.1)
    refused(TypeError, "for the optimizer that it is given", lambda: schedule(lambda optimizer: theirs.StepLR(other, 2), 0.1))
    rate = schedule(theirs.OneCycleLR, 0.1, max_lr=0.1, total_steps=9, cycle_momentum=False)
    rate(8)
    refused(ValueError, r"OneCycleLR: expected a step below \d+, got 40: Tried to step", lambda: rate(40))
    refused(ValueError, "expected a step from 0 on, got -1", lambda: rate(-1))
    init, update = fs.optim.schedule_lr(rate)(fs.optim.from_torch(torch.optim.SGD))
    params = {"": torch.ones(2)}
    refused(TypeError, "its schedule gives lr=", lambda: update(params, init(params), params, lr=0.1))


def test_a_rate_is_a_function_of_the_step_in_remat() -> None:
    """Run again, it changes nothing that the first run has read."""
    rate = schedule(theirs.StepLR, 0.5, step_size=1)

    def f(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return (x * rate(step)).sin().sum()

    x, step = torch.ones(2), torch.tensor(2000)
    torch.testing.assert_close(fs.grad(fs.remat(f))(x, step), fs.grad(f)(x, step))
