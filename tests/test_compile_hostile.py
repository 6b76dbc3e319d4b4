"""Compiled units and compiled steps of models that do what Dynamo does not expect: right as in eager, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import each, seldom
from ranks import Pool
from test_compiled_units import AOT, EXACT, Leaf, batch, reset
from torch import Tensor, nn

import funshard as fs
from funshard import P

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo "),
]
"""Dynamo asks for it and hides the warning, which the tests' filter makes an error."""

Grad = Callable[[Callable[[fs.Params], Tensor]], Any]
GRADS: dict[str, Grad] = {"fs.grad": fs.grad, "torch.func.grad": torch.func.grad}


@pytest.fixture(autouse=True)
def fresh() -> None:
    reset()


def network(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), nn.Linear(6, 2)).double()


class Recurrent(nn.Module):
    """Dynamo runs the kernels of a GRU eagerly, after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x[None])[0][0]


def saved_tensor_hooks_are_not_traced(rank: int, how: str) -> None:
    reset()
    net, results = network(Recurrent), []
    for compile in (False, AOT):
        spec = fs.by_type(Recurrent, p=P("shard", compile=compile))(net)
        loss = lambda p, spec=spec: fs.functional_call(net, p, batch(rank), spec=spec).square().sum()  # noqa: E731
        results.append(GRADS[how](loss)(fs.shard(net, spec)))
    torch.testing.assert_close(results[1], results[0], **EXACT)


@each
@pytest.mark.parametrize("how", GRADS)
def test_saved_tensor_hooks_are_not_traced(gloo2: Pool, how: str) -> None:
    """On several ranks a unit has them; Dynamo compiled their frames, and failed on the version of a tensor."""
    gloo2.run(saved_tensor_hooks_are_not_traced, how)


class Scaled(Leaf):
    """A buffer that forward reads, and one that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs = self.runs + 1
        return super().forward(x) * self.scale + self.runs


@pytest.mark.filterwarnings("ignore::funshard.BufferWarning")
@pytest.mark.parametrize("is_given", [False, True])
def test_buffers_in_a_torch_func_grad(is_given: bool) -> None:
    """The call's own copies of them belong to the transform, outside of which the compiled code runs."""
    net, results = network(Scaled), []
    for compile in (False, AOT):
        spec = fs.by_type(Scaled, p=P("shard", compile=compile))(net).on({"shard": 1})
        buffers = {name: b.clone() for name, b in net.named_buffers()} if is_given else None
        loss = lambda p, spec=spec, b=buffers: fs.functional_call(net, p, batch(), spec=spec, buffers=b).sum()  # noqa: E731
        results.append((torch.func.grad_and_value(loss)(fs.shard(net, spec)), buffers))
    torch.testing.assert_close(results[1], results[0], **EXACT)
    assert not is_given or float(results[1][1]["1.runs"]) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


class KeepsInBuffer(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.scale = out[0]
        return out


@pytest.mark.filterwarnings("ignore::funshard.BufferWarning")
def test_a_buffer_with_a_derivative_in_a_torch_func_grad() -> None:
    net = network(KeepsInBuffer)
    spec = fs.by_type(KeepsInBuffer, p=P("shard", compile=AOT))(net).on({"shard": 1})
    with pytest.raises(RuntimeError, match=r"module '0' with .* sets its buffer 'scale' to a tensor that has a derivative"):
        torch.func.grad(lambda p: fs.functional_call(net, p, batch(), spec=spec).sum())(fs.shard(net, spec))


@pytest.mark.parametrize("which", ["unit", "step"])
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_that_are_registered_later(which: str, inside: bool) -> None:
    """By default Dynamo does not see them, and goes on with the code from before, without an error."""
    results = []
    for is_compiled in (False, True):
        net = network(Leaf)
        spec = fs.by_type(Leaf, p=P("shard", compile=AOT if is_compiled and which == "unit" else False))(net).on({"shard": 1})
        step: Any = fs.grad(lambda p, x, net=net, spec=spec: fs.functional_call(net, p, x, spec=spec).sum())
        if is_compiled and which == "step":
            step = fs.compile(step, backend="aot_eager")
        got = [step(fs.shard(net, spec), batch())]
        handle = (net[1].l if inside else net[1]).register_forward_hook(lambda module, args, out: out * 3)
        got.append(step(fs.shard(net, spec), batch()))
        handle.remove()
        results.append([*got, step(fs.shard(net, spec), batch())])
    torch.testing.assert_close(results[1], results[0], **EXACT)
    assert (results[0][0]["1"] != results[0][1]["1"]).any()


class Takes(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.repeat(len(x), 1)) * len(x)


@each
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=seldom)])
def test_sizes_that_change_in_a_torch_func_grad(backend: str) -> None:
    """AOTAutograd makes a backward ahead of time there, which refused to run with retain_graph=True."""
    net, results = network(Takes), []
    for compile in (False, fs.Compile(backend=backend, dynamic=True)):
        spec = fs.by_type(Takes, p=P("shard", compile=compile))(net).on({"shard": 1})
        loss = lambda p, x, spec=spec: fs.functional_call(net, p, x, spec=spec).square().sum()  # noqa: E731
        results.append([torch.func.grad(loss)(fs.shard(net, spec), batch()[:n]) for n in (3, 2, 3)])
    torch.testing.assert_close(results[1], results[0], **EXACT)


def test_sizes_that_change_where_backward_runs_twice() -> None:
    """Clipping in backward runs one for the norm, and one for the updates."""
    net, results = network(Takes), []
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
    for compile in (False, fs.Compile(backend="aot_eager", dynamic=True)):
        spec = fs.by_type(Takes, p=P("shard", compile=compile))(net).on({"shard": 1})
        loss = lambda p, x, spec=spec: fs.functional_call(net, p, x, spec=spec).square().sum()  # noqa: E731
        params = fs.shard(net, spec)
        for n in (3, 2):
            step = fs.update_in_backward(update, loss, params, init(params), [batch()[:n]], spec=spec, max_norm=0.1)
            results.append((step.params, step.norm))
    torch.testing.assert_close(results[2:], results[:2], **EXACT)


class Constant(Leaf):
    """What it computes under no_grad is a view, a tensor that is written to, and a list."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            first = super().forward(x).T
            total = torch.zeros_like(x).add_(y)
            parts = y.split(1)
        return y * first.T + y * total + torch.cat([part * y[:1] for part in parts])


@each
@pytest.mark.parametrize("compiler", ["fs.compile", "torch.compile"])
@pytest.mark.parametrize("forward", [True, False])
def test_no_grad_in_a_compiled_hvp(compiler: str, forward: bool) -> None:
    """torch.func.jvp itself differentiates through it."""
    net = network(Constant)
    spec = fs.by_type(Constant)(net).on({"shard": 1})
    params = {key: shard.double() for key, shard in fs.shard(net, spec).items()}

    def product(params: fs.Params, x: Tensor) -> fs.Params:
        loss = lambda p: fs.functional_call(net, p, x, spec=spec).square().sum()  # noqa: E731
        return fs.hvp(loss, params, {key: p.cos() for key, p in params.items()}, forward=forward)

    compile = fs.compile if compiler == "fs.compile" else torch.compile
    compiled = compile(product, backend="aot_eager", fullgraph=True)
    for n in (3, 2):  # the second call compiles after an eager one
        torch.testing.assert_close(compiled(params, batch()[:n]), product(params, batch()[:n]), **EXACT)
