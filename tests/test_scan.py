"""fs.scan is the loop over its steps, in values and derivatives of any order; its memory grows with few states."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import at_most, each, every, mark_seldom, seldom
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of in-place kernels under vmap

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
STEPS = 5
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2)).double()
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
X, VALIDATION = torch.randn(4, STEPS, 6, 3).double(), torch.randn(4, 6, 3).double()  # by rank
WEIGHTS = torch.linspace(0.5, 1.5, 4 * STEPS * 6).view(4, STEPS, 6, 1).double()
LR = torch.tensor(0.02).double()
Scan = Callable[..., Any]


def loop(step: Any, state: Any, xs: Any, **_: Any) -> Any:
    """What scan is equal to."""
    leaves, tree = pytree.tree_flatten(xs)
    ys: list[Any] = []
    for t in range(len(leaves[0])):
        state, y = step(state, pytree.tree_unflatten([leaf[t] for leaf in leaves], tree))
        ys.append(y)
    return state, pytree.tree_map(lambda *parts: None if parts[0] is None else torch.stack(parts), *ys)


def weighted_loss(spec: fs.PartitionSpec, params: fs.Params, x: Tensor, weights: Tensor) -> Tensor:
    return (weights * fs.functional_call(MODEL, params, x, spec=spec).square()).mean()


def run_adamw(
    scan: Scan, spec: fs.PartitionSpec, x: Tensor, validation: Tensor, **options: Any
) -> Callable[[Tensor, Tensor, fs.Params], Tensor]:
    """A rank's validation loss after clipped steps of AdamW on a schedule, by weights of samples, rate and first params."""
    init, update = fs.optim.adamw(1e-3, eps_root=1e-8, weight_decay=1e-2, spec=spec)
    ramp = torch.linspace(0.5, 1.0, STEPS).double()

    def after(weights: Tensor, lr: Tensor, params: fs.Params) -> Tensor:
        def step(state: Any, given: Any) -> Any:
            params, moments = state
            grads, value = fs.grad_and_value(functools.partial(weighted_loss, spec))(params, given["x"], given["w"])
            grads, norm = fs.optim.clip_by_global_norm(grads, spec, 0.2)
            return update(grads, moments, params, lr=lr * given["factor"]), {"loss": value, "norm": norm}

        torch.manual_seed(1)  # of dropout
        (params, _), ys = scan(step, (params, init(params)), {"x": x, "w": weights, "factor": ramp}, **options)
        return weighted_loss(spec, params, validation, torch.ones(())) + ys["norm"].mean() / 10

    return after


def double_backward(f: Any, lr: Tensor) -> Tensor:
    lr = lr.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(lr), lr, create_graph=True)
    return torch.autograd.grad(slope, lr)[0]


def plain_autograd(f: Any, *args: Any) -> Any:
    leaves, tree = pytree.tree_flatten(args)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(f(*pytree.tree_unflatten(leaves, tree)), leaves)


Derivative = Callable[[Any, Tensor, Tensor, fs.Params], Any]
DERIVATIVES: dict[str, Derivative] = {
    "value": lambda f, w, lr, p: f(w, lr, p),
    "fs.grad": lambda f, w, lr, p: fs.grad(f, (0, 1, 2))(w, lr, p),
    "torch.func.grad": lambda f, w, lr, p: torch.func.grad(f, (0, 1, 2))(w, lr, p),
    "of the weights alone": lambda f, w, lr, p: fs.grad(f)(w, lr, p),
    "plain autograd": plain_autograd,
    "jvp": lambda f, w, lr, p: torch.func.jvp(lambda w, lr: f(w, lr, p), (w, lr), (w.cos(), torch.ones_like(lr)))[1],
    "vmap": lambda f, w, lr, p: torch.vmap(torch.func.grad(lambda lr: f(w, lr, p)), randomness="same")(lr * torch.ones(2)),
    "fs.hvp": lambda f, w, lr, p: fs.hvp(lambda w: f(w, lr, p), w, w.cos()),
    "grad of grad": lambda f, w, lr, p: torch.func.grad(torch.func.grad(lambda lr: f(w, lr, p)))(lr),
    "grad of jvp": lambda f, w, lr, p: torch.func.grad(lambda r: torch.func.jvp(lambda w: f(w, r, p), (w,), (w.cos(),))[1])(lr),
    "double backward": lambda f, w, lr, p: double_backward(lambda lr: f(w, lr, p), lr),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sqrt": {},
    "log": {"segments": "log"},
    "all": {"segments": STEPS},
    "one": {"segments": 1},
    "uneven": {"segments": 3},
}


@at_most(1)
@each(options=OPTIONS, derivative=DERIVATIVES)
def test_every_derivative_is_that_of_the_loop(derivative: str, options: str) -> None:
    """With dropout, clipping and a schedule, also at second order."""
    spec = fs.by_type(nn.Linear)(MODEL).bound
    at = WEIGHTS[0], LR, fs.shard(FULL, spec)
    got, want = (
        DERIVATIVES[derivative](run_adamw(scan, spec, X[0], VALIDATION[0], **OPTIONS[options]), *at) for scan in (fs.scan, loop)
    )
    assert pytree.tree_leaves(want)[0].any()
    assert_close(got, want, **EXACT)


# --- ranks ---

POLICIES = {"P(shard)": fs.policies.always(), "P()": fs.policies.whole(P()), "mixed": fs.by_path({"0": P(), "3": P("shard")})}


def metagradient(mesh: Any, policy: str, x: Tensor, validation: Tensor, weights: Tensor, scan: Scan, **options: Any) -> Any:
    """A rank's: of its own weights of samples, of the shared rate, and full of its slices of the first params."""
    spec = POLICIES[policy](MODEL).on(mesh)
    f = run_adamw(scan, spec, x, validation, **options)
    weights_, lr, params = fs.grad(f, (0, 1, 2))(weights, LR, fs.shard(FULL, spec))
    return weights_, lr, fs.unshard(params, spec)


@functools.cache
def wanted(ranks: int, *, seed: int = 1) -> Any:
    """By plain autograd of the unsharded model on the samples of all ranks, in one process."""
    joined = [t[:ranks].transpose(0, 1).flatten(1, 2) for t in (X, WEIGHTS)]
    MODEL.eval()  # ranks draw their own masks
    spec = fs.policies.whole()(MODEL).on({"shard": 1})
    f = run_adamw(loop, spec, joined[0], VALIDATION[:ranks].flatten(0, 1))
    weights, lr, *params = plain_autograd(f, joined[1], LR, fs.shard(FULL, spec))
    MODEL.train()
    return weights.unflatten(1, (ranks, -1)).transpose(0, 1), lr, fs.unshard({"": params[0]}, spec)


def check_law(rank: int, policy: str, mesh: Any, **options: Any) -> None:
    want_weights, want_lr, want_params = wanted(mesh.size())
    MODEL.eval()
    weights, lr, params = metagradient(mesh, policy, X[rank], VALIDATION[rank], WEIGHTS[rank], fs.scan, **options)
    MODEL.train()
    assert_close(weights, mesh.size() * want_weights[rank], **EXACT)
    assert_close(lr, want_lr, **EXACT)
    assert_close(params, want_params, **EXACT)


@pytest.mark.parametrize(("policy", "options"), [("mixed", {}), ("P(shard)", {"segments": "log"})])
@real_ranks(2)
def test_the_law_on_two_ranks(rank: int, policy: str, options: dict[str, Any]) -> None:
    """The gradients are those of the loop on the unsharded model."""
    check_law(rank, policy, mesh_of(2), **options)


@seldom
@every(options=[{}, {"segments": "log"}], policy=POLICIES, sizes=[(4,), (2, 2)])
@real_ranks(4)
def test_the_law_on_four_ranks(rank: int, sizes: tuple[int, ...], policy: str, options: dict[str, Any]) -> None:
    """Also with replicas."""
    check_law(rank, policy, mesh_of(*sizes), **options)


# --- what a step may contain ---


def by_muon(spec: fs.PartitionSpec) -> Any:
    fallback = fs.optim.adamw(1e-3, eps_root=1e-8, weight_decay=1e-2, spec=spec)
    init, update = fs.optim.muon(spec, dtype=torch.float64, fallback=fallback)

    def step(state: Any, given: tuple[Tensor, Tensor], lr: Tensor) -> Any:
        params, moments = state
        grads = fs.grad(functools.partial(weighted_loss, spec))(params, *given)
        return update(grads, moments, params, lr=lr, fallback_lr=lr), None

    return init, step


def by_accumulate(spec: fs.PartitionSpec, parts: int = 2, keep: Any = "shards") -> Any:
    init, update = fs.optim.adamw(1e-3, eps_root=1e-8, weight_decay=1e-2, spec=spec)

    def step(state: Any, given: tuple[Tensor, Tensor], lr: Tensor) -> Any:
        params, moments = state
        pieces = list(zip(*(t.chunk(parts) for t in given), strict=True))
        grads, value = fs.accumulate(lambda p, xw: weighted_loss(spec, p, *xw), params, pieces, spec=spec, keep=keep)
        return update(grads, moments, params, lr=lr), value

    return init, step


def in_backward(spec: fs.PartitionSpec) -> Any:
    init, update = fs.optim.adamw(1e-3, eps_root=1e-8, weight_decay=1e-2, spec=spec)

    clipping: Any = {"max_norm": 0.2, "clip": "previous", "norm": torch.tensor(0.5)}

    def step(state: Any, given: tuple[Tensor, Tensor], lr: Tensor) -> Any:
        loss = lambda p, xw: weighted_loss(spec, p, *xw)  # noqa: E731
        run = fs.update_in_backward(functools.partial(update, lr=lr), loss, *state, [given], spec=spec, **clipping)
        return (run.params, run.state), run.value

    return init, step


def inner_gradient_of_closure(spec: fs.PartitionSpec) -> Any:
    """The inner gradient closes over what is differentiated: fs.grad alone would take it for a constant."""

    def step(state: Any, given: tuple[Tensor, Tensor], lr: Tensor) -> Any:
        grads = fs.grad(lambda p: weighted_loss(spec, p, *given))(state)
        return {key: p - lr * grads[key] for key, p in state.items()}, None

    return lambda params: params, step


STEPS_OF = {
    "muon": by_muon,
    "accumulate": by_accumulate,
    "accumulate full": functools.partial(by_accumulate, keep="full"),
    "update in backward": in_backward,
    "closure": inner_gradient_of_closure,
}


def of_step(scan: Scan, name: str, spec: fs.PartitionSpec, x: Tensor, validation: Tensor, **options: Any) -> Any:
    init, step = STEPS_OF[name](spec)
    first = fs.shard(FULL, spec)
    params_of = (lambda state: state) if name == "closure" else (lambda state: state[0])

    def after(weights: Tensor, lr: Tensor) -> Tensor:
        start = init(first) if name == "closure" else (first, init(first))
        state, _ = scan(lambda state, given: step(state, given, lr), start, (x[:3], weights), **options)
        return weighted_loss(spec, params_of(state), validation, torch.ones(()))

    return after


@at_most(1)
@each(derivative=["torch.func.grad", *mark_seldom(["fs.hvp"])], name=STEPS_OF)
def test_what_a_step_may_contain(name: str, derivative: str) -> None:
    """Also where neither state nor slices are differentiated in the first step, but by closures."""
    spec = POLICIES["mixed"](MODEL).on({"shard": 1})
    MODEL.eval()

    def derive(scan: Scan, take: Any = None) -> Any:
        f = of_step(scan, name, spec, X[0], VALIDATION[0])
        take = take or (fs.hvp if derivative == "fs.hvp" else None)
        if take is fs.hvp:
            return fs.hvp(lambda w: f(w, LR), WEIGHTS[0, :3], WEIGHTS[0, :3].cos())
        return (take or torch.func.grad)(f, (0, 1))(WEIGHTS[0, :3], LR)

    want = derive(loop)
    assert_close(derive(fs.scan), want, **EXACT)
    if derivative != "fs.hvp":
        assert_close(derive(fs.scan, fs.grad), want, **EXACT)
    MODEL.train()


# --- what it costs ---


def held(record: profile) -> int:
    """The most bytes that were allocated at once."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


WIDTH = 64
STATE_BYTES = WIDTH * WIDTH * 8
count_run = itertools.count().__next__
"""Count a run of a step: a method of an object of C, into which the watch over globals does not look."""


def training(w: Tensor, x: Tensor) -> tuple[Tensor, None]:
    count_run()
    grads = torch.func.grad(lambda w: torch.tanh(x @ w).square().mean())(w)
    return w - 0.1 * grads, None


def peak_and_runs(steps: int, **options: Any) -> tuple[int, int]:
    """Bytes beyond what one step's derivative takes, and the runs of steps, for the gradient by all x."""
    torch.manual_seed(0)
    w, xs = torch.randn(WIDTH, WIDTH).double(), torch.randn(steps, 2, WIDTH).double()
    gradient = fs.grad(lambda xs: fs.scan(training, w, xs, **options)[0].square().sum())
    fs.grad(lambda xs: fs.scan(training, w, xs)[0].sum())(xs[:1])  # what the first call allocates
    gc.collect()
    before = count_run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        gradient(xs)
    return held(record) - 3 * xs.nbytes, count_run() - before - 1


@pytest.mark.parametrize("ends", mark_seldom([(4, 16), (16, 64), (16, 256)], (4, 16)), ids=str)
def test_memory_grows_with_the_root_of_the_steps(ends: tuple[int, int]) -> None:
    """By 2 states for each unit of sqrt(T), and by one for each doubling with "log"; a step runs three times at most."""
    low, high = ends
    (least, _), (most, runs) = peak_and_runs(low), peak_and_runs(high)
    assert (most - least) / STATE_BYTES <= 2 * (math.sqrt(high) - math.sqrt(low)) + 2
    assert (most - least) / STATE_BYTES >= math.sqrt(high) - math.sqrt(low)
    assert runs <= 3 * high
    (least, _), (most, runs) = peak_and_runs(low, segments="log"), peak_and_runs(high, segments="log")
    assert (most - least) / STATE_BYTES <= math.log2(high / low) + 2
    assert runs == high * (1 + math.log2(high) / 2)


def test_all_states_are_kept_where_no_step_runs_three_times() -> None:
    most, runs = peak_and_runs(16, segments=16)
    assert most / STATE_BYTES >= 16
    assert runs == 2 * 16 - 1


def test_nothing_is_kept_where_nothing_is_differentiated_in_reverse() -> None:
    """A plain loop, also in forward mode: for few hyperparameters at any number of steps."""
    w, x = torch.randn(WIDTH, WIDTH).double(), torch.randn(2, WIDTH).double()

    def after(rate: Tensor, steps: int) -> Tensor:
        def step(w: Tensor, _: Tensor) -> tuple[Tensor, None]:
            count_run()
            return w - rate * torch.func.grad(lambda w: torch.tanh(x @ w).square().mean())(w), None

        return fs.scan(step, w, torch.arange(steps))[0].square().sum()

    peaks = []
    for steps in (4, 32):
        before = count_run()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            torch.func.jvp(functools.partial(after, steps=steps), (LR,), (torch.ones_like(LR),))
        peaks.append(held(record))
        assert count_run() - before - 1 == steps
    assert peaks[1] <= peaks[0] + 4096
