"""fs.scan refuses what would be wrong, and names the path; what a step does to objects and closures is right."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import at_most, seldom
from test_scan import EXACT, FULL, MODEL, VALIDATION, WEIGHTS, X, loop, weighted_loss
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs

VALUES = torch.linspace(-1, 1, 12).view(4, 3).double()
START = torch.linspace(0.5, 1, 3).double()


def keep(state: Any, x: Any) -> tuple[Any, None]:
    return state, None


@pytest.mark.parametrize(
    ("xs", "options", "error", "message"),
    [
        (
            (VALUES, {"b": VALUES[:3]}),
            {},
            ValueError,
            r"xs\[1\]\['b'\]: expected .* as many as in xs\[0\] of shape \[4, 3\], got shape \[3, 3\]",
        ),
        ((VALUES, VALUES.sum()), {}, ValueError, r"xs\[1\]: expected a slice for each step, .* got shape \[\]"),
        ({"a": [1.0]}, {}, TypeError, r"xs\['a'\]\[0\]: expected a tensor, got float"),
        (None, {}, TypeError, r"xs: expected a tensor, got NoneType"),
        ({}, {}, ValueError, r"xs has no tensors: expected one at least, such as torch.arange\(T\)"),
        (VALUES[:0], {}, ValueError, r"xs: expected a slice for each step, got shape \[0, 3\]"),
        (VALUES, {"segments": 5}, ValueError, r"segments: expected 1 to 4, the number of steps, 'log' or None, got 5"),
        (VALUES, {"segments": "half"}, ValueError, r"segments: expected 1 to 4, .* 'log' or None, got 'half'"),
    ],
)
def test_arguments(xs: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"scan: {message}"):
        fs.scan(keep, START, xs, **options)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda s, x: ({"a": s["a"][:2]}, None), ValueError, r"state\['a'\]: expected \[3\] torch.float64 .* got \[2\]"),
        (lambda s, x: ({"a": s["a"].float()}, None), ValueError, r"state\['a'\]: expected .*float64 .* got .*float32"),
        (lambda s, x: ({"b": s["a"]}, None), ValueError, r"state\['a'\]: expected .* as before the step, got nothing"),
        (lambda s, x: ({**s, "b": x}, None), ValueError, r"state\['b'\]: expected nothing, as before the step, got \[3\]"),
        (lambda s, x: s, TypeError, r"expected step to return \(new state, y\), got dict"),
        (lambda s, x: (s, {"loss": 1.0}), TypeError, r"y\['loss'\]: expected a tensor or None, got float"),
        (lambda s, x: (s, {"l": x[:1] if x[0] > 0 else x}), ValueError, r"y\['l'\]: expected \[3\] .* got \[1\]"),
        (lambda s, x: ({"a": s["a"].mul_(x)}, None), RuntimeError, r"step changes state\['a'\] in place, as .* donate=True"),
        (lambda s, x: ({"a": s["a"] * x.mul_(2)}, None), RuntimeError, r"step changes x in place"),
    ],
)
@pytest.mark.parametrize("recorded", [False, True], ids=["values", "gradient"])
def test_what_a_step_returns(step: Any, error: type[Exception], message: str, recorded: bool) -> None:
    run = lambda x: fs.scan(step, {"a": START.clone()}, x)[0]["a"].sum()  # noqa: E731
    with pytest.raises(error, match=rf"scan: {message}"):
        (fs.grad(run) if recorded else run)(VALUES.clone())


@pytest.mark.parametrize("recorded", [False, True], ids=["values", "gradient"])
def test_an_update_that_donates_is_refused(recorded: bool) -> None:
    """By the path of the first parameter that it writes over."""
    spec = fs.by_type(nn.Linear)(MODEL).bound
    init, update = fs.optim.from_torch(torch.optim.AdamW, donate=True)
    params = fs.shard(FULL, spec)

    def step(state: Any, given: tuple[Tensor, Tensor]) -> Any:
        params, moments = state
        grads = fs.grad(lambda p: weighted_loss(spec, p, *given))(params)
        return update(grads, moments, params), None

    def run(weights: Tensor) -> Tensor:
        state, _ = fs.scan(step, (params, init(params)), (X[0], weights))
        return weighted_loss(spec, state[0], VALIDATION[0], torch.ones(()))

    in_place = r"scan: step changes state\[0\]\['0'\] in place, as an update with donate=True does"
    with pytest.raises(RuntimeError, match=r"from_torch: grads.* expected optim\.sgd" if recorded else in_place):
        (fs.grad(run) if recorded else run)(WEIGHTS[0])


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


def scans_again() -> Any:
    inner = lambda s, x: (s.sin() * x, s.sum())  # noqa: E731
    return lambda s, x: fs.scan(inner, s, torch.stack([x, x + 1, x * s]))


def differentiates_a_closure() -> Any:
    return lambda s, x: (s - fs.grad(lambda q: (q * x).sin().sum())(s), s)


ORDINARY: dict[str, Callable[[], Any]] = {
    "counts in a variable": counts_in_a_variable,
    "carries a tensor": carries_a_tensor,
    "closes over a tensor": lambda: closes_over(torch.tensor(0.3).double()),
    "scans again": scans_again,
    "differentiates a closure": differentiates_a_closure,
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

    plain = objective(loop) if name != "in another order" else objective(lambda step, s, x: by_name(step, s, x))
    scanned = objective(fs.scan)
    for take in (torch.func.grad, lambda f: lambda x: fs.hvp(f, x, x.cos())):
        assert_close(take(scanned)(VALUES), take(plain)(VALUES), **EXACT)
    assert_close(fs.grad(scanned)(VALUES), torch.func.grad(plain)(VALUES), **EXACT)


def by_name(step: Any, state: Any, xs: Tensor) -> Any:
    ys = []
    for x in xs:
        state, y = step(state, x)
        ys.append([y["a"], y["b"]])
    return state, [torch.stack(column) for column in zip(*ys, strict=True)]


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
    assert_close(
        compile(descent, backend="aot_eager", fullgraph=True)(VALUES)
        if compile is torch.compile
        else compile(descent, backend="aot_eager")(VALUES),
        descent(VALUES),
        **EXACT,
    )


class Recurrent(nn.Module):
    """A recurrent network, whose time steps are a scan, with weights by arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(6, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.cell.weight.clone(), self.cell.bias.clone()

        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(torch.nn.functional.linear(torch.cat([h, x], -1), weight, bias))
            return h, h

        return self.head(fs.scan(step, x.new_zeros(x.shape[1:]), x)[1])


class ReadsItsCell(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.cell(torch.cat([h, x], -1)))
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
    model = ReadsItsCell().double()
    model.load_state_dict(full)
    assert_close(fs.unshard(way(loss)(fs.shard(full, spec)), spec), want, **EXACT)  # by a plain loop
    with pytest.raises(RuntimeError, match=r"unit 'cell' is read inside of scan, which does not own it"):
        way(lambda x: fs.functional_call(model, fs.shard(full, spec), x, spec=spec).square().sum())(x)


def test_noise_is_that_of_the_loop() -> None:
    """From torch's generator and from one in the state of a module, also where the run is repeated."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter = itertools.count()

        def forward(self, s: Tensor, x: Tensor) -> Tensor:
            return s * torch.rand(3).double() + torch.nn.functional.dropout(x * s, 0.5)

    def run(scan: Any) -> Any:
        def f(x: Tensor) -> Tensor:
            torch.manual_seed(3)
            noisy = Noisy()
            return scan(lambda s, x: (noisy(s, x), None), START, x)[0].square().sum() * torch.rand(()).double()

        return f

    for take in (fs.grad, lambda f: lambda x: fs.hvp(f, x, x.cos())):
        assert_close(take(run(fs.scan))(VALUES), take(run(loop))(VALUES), **EXACT)
