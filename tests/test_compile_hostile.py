"""Compiled units and compiled steps of models that do what Dynamo does not expect: right as in eager, or a clear error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, each, mark_seldom, seldom
from models import module_class
from ranks import real_ranks
from test_compiled_units import AOT, EXACT, Branches, Leaf, Writes, batch, reset
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import funshard as fs
from funshard import P
from funshard._transforms.error_hints import find_hint

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo "),
]
"""Dynamo asks for it and hides the warning, which the tests' filter makes an error."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    reset()


def network(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), nn.Linear(6, 2)).double()


Recurrent = module_class("Recurrent", lambda: {"gru": nn.GRU(6, 6, batch_first=True)}, lambda self, x: self.gru(x[None])[0][0])
"""Dynamo runs the kernels of a GRU eagerly, after a graph break."""


@real_ranks(2)
def test_saved_tensor_hooks_are_not_traced(rank: int) -> None:
    """On several ranks a unit has them; Dynamo compiled their frames, and failed on the version of a tensor."""
    reset()
    net, results = network(Recurrent), []
    for compile in (False, AOT):
        spec = fs.by_type(Recurrent, p=P("shard", compile=compile))(net)
        loss = lambda p, spec=spec: fs.functional_call(net, p, batch(rank), spec=spec).square().sum()  # noqa: E731
        results.append(fs.grad(loss)(fs.shard(net, spec)))
    torch.testing.assert_close(results[1], results[0], **EXACT)


class WritesBuffers(Leaf):
    """Its derivative is in the new values, which backward can compute from the old ones, or take as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.full((6,), 2.0))
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.sums.sin()
        self.runs += 1
        self.sums.add_(x.detach().mean(0))
        return super().forward(x) * scale * self.sums * self.runs


@pytest.mark.parametrize("remat", mark_seldom([False, True], False))
@pytest.mark.parametrize("compile", [AOT, pytest.param(True, marks=seldom)])
def test_a_buffer_that_forward_changes_in_place(compile: bool | fs.Compile, remat: bool) -> None:
    """torch's partitioner computes the new values once more in backward, from a buffer that has them already."""
    net, results = network(WritesBuffers), []
    for how in (False, compile):
        spec = fs.by_type(WritesBuffers, p=P("shard", compile=how, remat=remat))(net).on({"shard": 1})
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        loss = lambda p, spec=spec, b=buffers: fs.functional_call(net, p, batch(), spec=spec, buffers=b).sum()  # noqa: E731
        results.append(([fs.grad(loss)(fs.shard(net, spec)) for _ in range(2)], buffers))
    torch.testing.assert_close(results[1], results[0], **EXACT)
    assert int(results[1][1]["1.runs"]) == 2


@at_most(1)
@pytest.mark.parametrize("which", ["unit", pytest.param("step", marks=seldom)])
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


class Constant(Leaf):
    """What it computes under no_grad is a view, a tensor that is written to, and a list."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            first = super().forward(x).T
            total = torch.zeros_like(x).add_(y)
            parts = y.split(1)
            pairs = y.unflatten(1, (3, 2))  # a method of Python's
        out = y * first.T + y * total + torch.cat([part * y[:1] for part in parts])
        return out + (pairs * y.sin().unflatten(1, (3, 2))).flatten(1)


@seldom
@each
@pytest.mark.parametrize("compiler", mark_seldom(["fs.compile", "torch.compile"], "fs.compile"))
@pytest.mark.parametrize("forward", mark_seldom([True, False], False))
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


# --- errors that say what to do ---
class Prints(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        return self.l(x)


class Keeps(Leaf):
    kept: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.l(x))
        return self.kept[-1].sin()


class Differentiates(Leaf):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.l(x).sum(), x)[0]


class BackwardHook(Leaf):
    def __init__(self) -> None:
        super().__init__()
        self.l.register_full_backward_hook(lambda module, given, out: given)


CHECKPOINTS = type(
    "Checkpoints", (Leaf,), {"forward": lambda self, x: checkpoint(Leaf.forward.__get__(self), x, use_reentrant=False)}
)
HINTS: dict[type[nn.Module], str] = {
    CHECKPOINTS: "forward uses torch.utils.checkpoint: expected P(remat=True) of the unit, or fs.remat",
    Branches: "forward has a branch, a size or an assertion that depends on values: expected torch.where",
    Prints: "forward prints or logs: expected that under `if not torch.compiler.is_compiling()`",
    Recurrent: "expected torch._dynamo.config.allow_rnn = True, or P(compile=True) of units",
    Writes: "forward changes a parameter, a buffer or an argument in place: expected a new tensor",
    Keeps: "forward keeps a tensor that it computes, in a list",
    Differentiates: "expected fs.grad, fs.grad_and_value or torch.func.grad for every gradient",
    BackwardHook: "a module has a backward hook: expected tensor.register_hook in forward, or P(compile=True) of units",
    type(
        "Seeds", (Leaf,), {"forward": lambda self, x: self.l(x) * torch.rand(6, generator=torch.Generator().manual_seed(0))}
    ): ("a torch.Generator is made inside of the compiled function: expected one that is made outside"),
}


def compiled_gradient(kind: type[nn.Module], **options: Any) -> Any:
    net = network(kind)
    spec = fs.by_type(kind)(net).on({"shard": 1})
    step = fs.compile(fs.grad(lambda p, x: fs.functional_call(net, p, x, spec=spec).sum()), backend="aot_eager", **options)
    return step(fs.shard(net, spec), batch())


@at_most(1)
@pytest.mark.parametrize("kind", HINTS, ids=lambda kind: kind.__name__)
def test_compile_errors_say_what_to_do(kind: type[nn.Module]) -> None:
    """Dynamo's words stay, and a note names what forward does."""
    if kind is CHECKPOINTS and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("an older torch compiles it")
    with pytest.raises(RuntimeError) as error:
        compiled_gradient(kind)
    assert f"funshard: {HINTS[kind]}" in find_hint(error.value)


def test_a_failed_trace_leaves_no_state() -> None:
    """Dynamo leaves saved-tensor hooks disabled after a checkpoint in a torch.func.grad."""
    with contextlib.suppress(RuntimeError):  # torch 2.11 compiles it
        compiled_gradient(CHECKPOINTS)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        torch.ones(2, requires_grad=True).sin().sum().backward()


@at_most(1)
@each
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("outer", ["fs.compile", "torch.compile"])
def test_a_compiled_step_in_a_compiled_function(inside: bool, outer: str) -> None:
    """It is a part of the graph that is being traced, also where it is made there."""

    def halve(params: fs.Params) -> fs.Params:
        return {key: p / 2 for key, p in params.items()}

    def make() -> Callable[[fs.Params], fs.Params]:
        return fs.compile(halve, donate_argnums=0, backend="aot_eager")

    made = make()

    def twice(params: fs.Params) -> fs.Params:
        return make()(make()(params)) if inside else made(made(params))

    compile = fs.compile if outer == "fs.compile" else torch.compile
    given = {"a": torch.tensor([4.0, 8.0])}
    got = compile(twice, backend="aot_eager", fullgraph=True)(given)
    torch.testing.assert_close((got, given), ({"a": torch.tensor([1.0, 2.0])},) * 2)


def test_a_compiled_step_in_a_transform_is_refused() -> None:
    square = fs.compile(lambda x: (x * x).sum(), backend="aot_eager")
    for transform in (torch.func.grad(square), torch.vmap(square), lambda x: torch.func.jvp(square, (x,), (x,))):
        with pytest.raises(RuntimeError, match=r"the compiled step is called inside of a torch.func transform, .* expected"):
            transform(torch.ones(2, 3))
    assert fs.grad(lambda x: x.sum() * square(torch.ones(3)))(torch.ones(1)) == 3  # a constant


def test_a_compiled_step_in_a_loss_is_refused() -> None:
    """The step runs under no_grad: gradients through it were 0."""
    loss = fs.compile(lambda params, x: (params[""].sum() * x).sum(), backend="aot_eager")
    linear, x = nn.Linear(1, 1), torch.ones(2, 3)
    spec = fs.policies.whole()(linear)
    params = fs.shard(linear, spec)
    for gradient in (
        lambda: fs.grad(lambda p: loss({"": p[""] * 2}, x))(params),
        lambda: fs.grad(lambda p: fs.remat(loss)(p, x))(params),
        lambda: fs.grad(lambda p: fs.chunked(lambda p, x: (loss(p, x), 1), 2)(p, x)[0])(params),
        lambda: fs.accumulate(loss, params, [x], spec=spec),
    ):
        with pytest.raises(RuntimeError, match=r"step is called inside of a loss or a recomputed function, .* expected"):
            gradient()


# --- shards and full parameters inside of a compiled step ---
@seldom
@real_ranks(2)
def test_full_parameters_in_a_step(rank: int) -> None:
    """On several ranks: what is gathered there is not compared while it is traced."""
    reset()
    net = network(Leaf)
    spec = fs.policies.override(fs.by_type(Leaf), fs.by_path({"1": P()}))(net).bound
    shards = fs.shard(net, spec)

    def through(p: fs.Params, x: Tensor) -> fs.Params:
        return fs.grad(lambda q: torch.func.functional_call(net, fs.unshard(q, spec), (x,)).square().sum())(p)

    def changed(p: fs.Params, x: Tensor) -> Any:
        full = fs.unshard(p, spec)
        for shard in p.values():
            shard.add_(1)
        return full, fs.shard(full, spec), fs.unshard(p, spec)

    for step in (through, changed):
        expected, got = (
            f({key: p.clone() for key, p in shards.items()}, batch(rank)) for f in (step, fs.compile(step, backend="aot_eager"))
        )
        torch.testing.assert_close(got, expected, **EXACT)


@seldom
def test_dropout_of_sizes_that_change() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).sum()

    step = fs.compile(fs.grad(loss), backend="aot_eager")
    step(batch())
    with pytest.raises(RuntimeError) as error:
        step(batch()[:2])
    assert "expected dynamic=False" in find_hint(error.value)
    step = fs.compile(fs.grad(loss), backend="aot_eager", dynamic=False)
    for n in (3, 2):
        results = []
        for f in (step, fs.grad(loss)):
            torch.manual_seed(0)
            results.append(f(batch()[:n]))
        torch.testing.assert_close(*results)
