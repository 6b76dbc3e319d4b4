"""fs.scan is the loop over its steps, in values and derivatives of any order; what it costs, and what it refuses."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import at_most, each, mark_seldom, seldom
from models import module_class, refused
from parity import double_grad, plain_grad
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


Derivative = Callable[[Any, Tensor, Tensor, fs.Params], Any]
DERIVATIVES: dict[str, Derivative] = {
    "value": lambda f, w, lr, p: f(w, lr, p),
    "fs.grad": lambda f, w, lr, p: fs.grad(f, (0, 1, 2))(w, lr, p),
    "torch.func.grad": lambda f, w, lr, p: torch.func.grad(f, (0, 1, 2))(w, lr, p),
    "plain autograd": lambda f, w, lr, p: plain_grad(lambda given: f(*given))((w, lr, p)),
    "jvp": lambda f, w, lr, p: torch.func.jvp(lambda w, lr: f(w, lr, p), (w, lr), (w.cos(), torch.ones_like(lr)))[1],
    "vmap": lambda f, w, lr, p: torch.vmap(torch.func.grad(lambda lr: f(w, lr, p)), randomness="same")(lr * torch.ones(2)),
    "fs.hvp": lambda f, w, lr, p: fs.hvp(lambda w: f(w, lr, p), w, w.cos()),
    "grad of grad": lambda f, w, lr, p: torch.func.grad(torch.func.grad(lambda lr: f(w, lr, p)))(lr),
    "grad of jvp": lambda f, w, lr, p: torch.func.grad(lambda r: torch.func.jvp(lambda w: f(w, r, p), (w,), (w.cos(),))[1])(lr),
    "double backward": lambda f, w, lr, p: double_grad(lambda given: f(w, given["lr"], p))({"lr": lr}),
}
OPTIONS: list[dict[str, Any]] = [{}, {"segments": "log"}, {"segments": STEPS}, {"segments": 1}, {"segments": 3}]


@at_most(1)
@each(options=OPTIONS, derivative=DERIVATIVES)
def test_every_derivative_is_that_of_the_loop(derivative: str, options: dict[str, Any]) -> None:
    """With dropout, clipping and a schedule, also at second order."""
    spec = fs.by_type(nn.Linear)(MODEL).bound
    at = WEIGHTS[0], LR, fs.shard(FULL, spec)
    runs = (run_adamw(scan, spec, X[0], VALIDATION[0], **options) for scan in (fs.scan, loop))
    got, want = (DERIVATIVES[derivative](run, *at) for run in runs)
    assert pytree.tree_leaves(want)[0].any()
    assert_close(got, want, **EXACT)


# --- ranks ---
POLICIES = {"P(shard)": fs.policies.always(), "P()": fs.policies.whole(P()), "mixed": fs.by_path({"0": P(), "3": P("shard")})}


@functools.cache
def wanted(ranks: int) -> Any:
    """By plain autograd of the unsharded model on the samples of all ranks, in one process."""
    joined = [t[:ranks].transpose(0, 1).flatten(1, 2) for t in (X, WEIGHTS)]
    MODEL.eval()  # ranks draw their own masks
    spec = fs.policies.whole()(MODEL).on({"shard": 1})
    f = run_adamw(loop, spec, joined[0], VALIDATION[:ranks].flatten(0, 1))
    weights, lr, params = plain_grad(lambda given: f(*given))((joined[1], LR, fs.shard(FULL, spec)))
    MODEL.train()
    return weights.unflatten(1, (ranks, -1)).transpose(0, 1), lr, fs.unshard(params, spec)


LAWS: list[Any] = [((2,), "mixed", {}), ((2,), "P(shard)", {"segments": "log"})]
LAWS += [
    pytest.param(sizes, policy, options, marks=seldom)
    for sizes, policy, options in itertools.product([(4,), (2, 2)], POLICIES, [{}, {"segments": "log"}])
]


@pytest.mark.parametrize(("sizes", "policy", "options"), LAWS)
@real_ranks(lambda sizes: math.prod(sizes))
def test_the_law_on_real_ranks(rank: int, sizes: tuple[int, ...], policy: str, options: dict[str, Any]) -> None:
    """The gradients are those of the loop on the unsharded model; on four ranks also with replicas."""
    mesh = mesh_of(*sizes)
    want_weights, want_lr, want_params = wanted(mesh.size())
    MODEL.eval()
    spec = POLICIES[policy](MODEL).on(mesh)
    f = run_adamw(fs.scan, spec, X[rank], VALIDATION[rank], **options)
    weights, lr, params = fs.grad(f, (0, 1, 2))(WEIGHTS[rank], LR, fs.shard(FULL, spec))
    MODEL.train()
    assert_close(weights, mesh.size() * want_weights[rank], **EXACT)
    assert_close(lr, want_lr, **EXACT)
    assert_close(fs.unshard(params, spec), want_params, **EXACT)


WIDTH = 64
STATE_BYTES = WIDTH * WIDTH * 8
count_run = itertools.count().__next__
"""Count a run of a step: a method of an object of C, into which the watch over globals does not look."""


def test_a_step_that_accumulates() -> None:
    """Where neither state nor slices are differentiated in the first step, but by what the loss closes over."""
    spec = POLICIES["mixed"](MODEL).on({"shard": 1})
    MODEL.eval()

    def objective(scan: Scan, weights: Tensor) -> Tensor:
        def step(params: fs.Params, given: tuple[Tensor, Tensor]) -> Any:
            pieces = list(zip(*(t.chunk(2) for t in given), strict=True))
            grads, value = fs.accumulate(lambda p, xw: weighted_loss(spec, p, *xw), params, pieces, spec=spec)
            return {key: p - LR * grads[key] for key, p in params.items()}, value

        params, _ = scan(step, fs.shard(FULL, spec), (X[0], weights))
        return weighted_loss(spec, params, VALIDATION[0], torch.ones(()))

    want = torch.func.grad(functools.partial(objective, loop))(WEIGHTS[0])
    for way in (torch.func.grad, fs.grad):
        assert_close(way(functools.partial(objective, fs.scan))(WEIGHTS[0]), want, **EXACT)
    MODEL.train()


# --- what it costs ---
def held(record: profile) -> int:
    """The most bytes that were allocated at once."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


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
    most, runs = peak_and_runs(16, segments=16)  # all states are kept where no step runs three times
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


# --- what is refused, and what a step does to objects and closures ---
VALUES = torch.linspace(-1, 1, 12).view(4, 3).double()
START = torch.linspace(0.5, 1, 3).double()


def keep(state: Any, x: Any) -> tuple[Any, None]:
    return state, None


@pytest.mark.parametrize(
    ("xs", "options", "error", "message"),
    [
        ((VALUES, {"b": VALUES[:3]}), {}, ValueError, r"xs\[1\]\['b'\]: expected length 4 in dimension 0.* got shape \[3, 3\]"),
        ({"a": [1.0]}, {}, TypeError, r"xs\['a'\]\[0\]: expected a tensor, got float"),
        (VALUES[:0], {}, ValueError, r"xs: expected a slice for each step, got tensors of length 0"),
        (VALUES, {"segments": 5}, ValueError, r"segments: expected 1 to 4, the number of steps, 'log' or None, got 5"),
    ],
)
def test_arguments(xs: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    refused(error, rf"scan: {message}", lambda: fs.scan(keep, START, xs, **options))


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda s, x: ({"a": s["a"][:2]}, None), ValueError, r"state\['a'\]: expected \[3\] torch.float64 .* got \[2\]"),
        (lambda s, x: ({**s, "b": x}, None), ValueError, r"state\['b'\]: expected nothing, as before the step, got \[3\]"),
        (lambda s, x: s, TypeError, r"expected step to return \(new state, y\), got dict"),
        (lambda s, x: (s, {"loss": 1.0}), TypeError, r"y\['loss'\]: expected a tensor or None, got float"),
        (lambda s, x: (s, {"l": x[:1] if x[0] > 0 else x}), ValueError, r"y\['l'\]: expected \[3\] .* got \[1\]"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True], ids=["values", "gradient"])
def test_what_a_step_returns(step: Any, error: type[Exception], message: str, recorded: bool) -> None:
    run = lambda x: fs.scan(step, {"a": START.clone()}, x)[0]["a"].sum()  # noqa: E731
    refused(error, rf"scan: {message}", lambda: (fs.grad(run) if recorded else run)(VALUES.clone()))


def test_a_step_that_changes_in_place() -> None:
    """It is refused where steps run again; where nothing is differentiated, it is the loop that it is."""
    run = lambda x: fs.scan(lambda s, x: (s.mul_(x), None), START.clone(), x)[0].sum()  # noqa: E731
    refused(
        RuntimeError, "scan changed in place a tensor .*: state; expected it unchanged", lambda: fs.grad(run)(VALUES.clone())
    )
    assert torch.equal(run(VALUES), functools.reduce(torch.mul, VALUES, START).sum())


def counts_in_a_variable() -> Any:
    calls = 0

    def step(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return s / 2 + x.sin() * calls, s * calls

    return step


def carries_a_tensor() -> Any:
    last = torch.zeros(3).double()

    def step(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal last
        last = last + s * x
        return s / 2 + last, last

    return step


def closes_over(scale: Tensor) -> Any:
    return lambda s, x: (s * scale.sin() + x, s)


ORDINARY: dict[str, Callable[[], Any]] = {
    "counts in a variable": counts_in_a_variable,
    "carries a tensor": carries_a_tensor,
    "closes over a tensor": lambda: closes_over(torch.tensor(0.3).double()),
    "scans again": lambda: lambda s, x: fs.scan(lambda s, x: (s.sin() * x, s.sum()), s, torch.stack([x, x + 1, x * s])),
    "differentiates a closure": lambda: lambda s, x: (s - fs.grad(lambda q: (q * x).sin().sum())(s), s),
    "detaches": lambda: lambda s, x: (s / 2 + (s * x).detach() * s, x * s.exp()),
    "returns its slice": lambda: lambda s, x: (x, s),
    "returns its state": lambda: lambda s, x: (s, s * x),
    "returns nothing": lambda: lambda s, x: (s.sin() * x, None),
    "in another order": lambda: lambda s, x: (s.sin() * x, {"b": s, "a": x} if x[0] > 0 else {"a": x, "b": s}),
}


@at_most(3)
@pytest.mark.parametrize("name", ORDINARY)
def test_what_people_write(name: str) -> None:
    """As the loop, by every kind of derivative; what a step changes in objects changes once for each step."""

    def objective(scan: Any) -> Any:
        def run(x: Tensor, s: Tensor = START) -> Tensor:
            state, ys = scan(ORDINARY[name](), s, x)
            return state.sum() + sum(y.square().sum() for y in pytree.tree_leaves(ys) if y is not None)

        return run

    plain, scanned = objective(loop), objective(fs.scan)
    for take in (torch.func.grad, lambda f: lambda x: fs.hvp(f, x, x.cos())):
        assert_close(take(scanned)(VALUES), take(plain)(VALUES), **EXACT)
    assert_close(fs.grad(scanned)(VALUES), torch.func.grad(plain)(VALUES), **EXACT)


def test_a_tensor_that_a_step_closes_over_has_its_gradient() -> None:
    """Where neither the state nor a slice is differentiated."""
    run = lambda scan: lambda scale: scan(closes_over(scale), START, VALUES)[0].sum()  # noqa: E731
    scale = torch.tensor(0.3).double()
    for way in (fs.grad, torch.func.grad):
        assert_close(way(run(fs.scan))(scale), way(run(loop))(scale), **EXACT)


def test_numbers_in_the_state_may_change() -> None:
    """They are no tensors; None and numbers keep their class."""
    step = lambda s, x: ((s[0] * x * s[1], s[1] + 1, None), None)  # noqa: E731
    run = lambda scan: lambda x: scan(step, (START, 1, None), x)[0][0].sum()  # noqa: E731
    assert fs.scan(step, (START, 1, None), VALUES)[0][1:] == (5, None)
    assert_close(fs.grad(run(fs.scan))(VALUES), fs.grad(run(loop))(VALUES), **EXACT)
    with pytest.raises(ValueError, match=r"scan: state\[1\]: expected int, as before the step, got float"):
        fs.scan(lambda s, x: ((s[0], s[1] / 2), None), (START, 1), VALUES)


class Lazy:
    @functools.cached_property
    def factor(self) -> float:
        return 0.5


LAZY = Lazy()


def test_a_global_may_compute_an_attribute_once() -> None:
    """It has the same value in the next run."""
    got = fs.grad(lambda x: fs.scan(lambda s, x: (s * LAZY.factor + x, None), START, x)[0].sum())(VALUES)
    assert_close(got, torch.tensor([0.125, 0.25, 0.5, 1.0]).double()[:, None].expand(4, 3))


def descent(x: Tensor) -> tuple[Tensor, Tensor]:
    def run(x: Tensor) -> Tensor:
        step = lambda s, x: (s - 0.1 * fs.grad(lambda q: (q * x).sin().sum())(s), s.sum())  # noqa: E731
        state, ys = fs.scan(step, START, x)
        return state.sum() + ys.square().sum()

    return fs.grad_and_value(run)(x)


@seldom
@pytest.mark.parametrize("compile", [fs.compile, torch.compile], ids=["fs.compile", "torch.compile"])
def test_compiled(compile: Any) -> None:
    torch._dynamo.reset()
    whole = {"fullgraph": True} if compile is torch.compile else {}
    assert_close(compile(descent, backend="aot_eager", **whole)(VALUES), descent(VALUES), **EXACT)


class Recurrent(nn.Module):
    """A recurrent network, whose time steps are a scan, with weights by arguments, or of a module that a step runs."""

    def __init__(self, runs_its_cell: bool = False) -> None:
        super().__init__()
        self.cell, self.head, self.runs_its_cell = nn.Linear(6, 3), nn.Linear(3, 1), runs_its_cell

    def forward(self, x: Tensor) -> Tensor:
        given = [] if self.runs_its_cell else [self.cell.weight.clone(), self.cell.bias.clone()]

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            both = torch.cat([h, x], -1)
            h = torch.tanh(torch.nn.functional.linear(both, *given) if given else self.cell(both))
            return h, h

        return self.head(fs.scan(step, x.new_zeros(x.shape[1:]), x)[1])


@pytest.mark.parametrize("way", [fs.grad, torch.func.grad], ids=["fs.grad", "torch.func.grad"])
def test_inside_of_functional_call(way: Any) -> None:
    """A step takes weights as tensors, or runs a module of its own; what it cannot give derivatives is refused by name."""
    x = torch.randn(7, 2, 3).double()
    torch.manual_seed(0)
    model = Recurrent().double()
    spec = fs.by_type(nn.Linear)(model).bound
    loss = lambda p: fs.functional_call(model, p, x, spec=spec).square().sum()  # noqa: E731
    full = {name: p.detach() for name, p in model.named_parameters()}
    want = torch.func.grad(lambda p: torch.func.functional_call(model, p, x).square().sum())(full)
    assert_close(fs.unshard(way(loss)(fs.shard(model, spec)), spec), want, **EXACT)
    model = Recurrent(runs_its_cell=True).double()
    model.load_state_dict(full)
    assert_close(fs.unshard(way(loss)(fs.shard(full, spec)), spec), want, **EXACT)  # by a plain loop
    with pytest.raises(RuntimeError, match=r"unit 'cell' is read inside of scan, which does not own it"):
        way(lambda x: fs.functional_call(model, fs.shard(full, spec), x, spec=spec).square().sum())(x)


def test_noise_is_that_of_the_loop() -> None:
    """From torch's generator and from one in the state of a module, also where the run is repeated."""

    Noisy = module_class(
        "Noisy",
        lambda: {"counter": itertools.count()},
        lambda self, s, x: s * torch.rand(3).double() + torch.nn.functional.dropout(x * s, 0.5),
    )

    def run(scan: Any) -> Any:
        def f(x: Tensor) -> Tensor:
            torch.manual_seed(3)
            noisy = Noisy()
            return scan(lambda s, x: (noisy(s, x), None), START, x)[0].square().sum() * torch.rand(()).double()

        return f

    for take in (fs.grad, lambda f: lambda x: fs.hvp(f, x, x.cos())):
        assert_close(take(run(fs.scan))(VALUES), take(run(loop))(VALUES), **EXACT)
