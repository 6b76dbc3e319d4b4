"""No reading of a freed buffer: whatever user code holds of a parameter past its unit keeps the values it had.

Every case runs on the two processes of the gloo2 fixture, which are children of the test run: one that crashes fails
the test with "the process died", and nothing else. The blocks are of one size, so that each buffer that is let go is
the next one's, unless something still holds it; and prefetch, which decides when that is, takes several values.
"""

from __future__ import annotations

import copy
import functools
import gc
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import soak
import torch
import torch.distributed as dist
from depth import at_most, depth, each, mark_seldom, seldom, some
from models import function, refused, unchanged
from parity import WAYS, average_gradients, loss_of, numbers, same, shards_of
from peer_models import MLP, Net
from ranks import launch, real_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

import funshard as fs
from funshard import P

BLOCKS = 4
AHEAD = (0, 1, 2)
PLAIN = [way for way in WAYS if way != "torch.func"]  # inside a transform a parameter has no memory to point at


class Hooked(Net):
    """A Net whose forward is given when it is made: a function of the model and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Any] = Net.forward) -> None:
        super().__init__(BLOCKS)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def specs(model: nn.Module) -> Iterator[fs.PartitionSpec]:
    for p in (P("shard"), P("shard", reshard=False), P()):
        yield fs.by_type(MLP, p=p)(model).bound


def agrees(rank: int, run: Callable[[Any, Tensor], Any], loss: Callable[[Any, Tensor], Tensor], *ways: str) -> None:
    """The loss of what forward returns, and its gradients, are those of the model itself, averaged by hand."""
    model, x = Hooked(run), numbers(rank, 0)
    expected, mean = loss(copy.deepcopy(model)(x), x).detach(), averaged(model, lambda model: loss(model(x), x))
    for spec, way, prefetch in some(product(specs(model), ways or WAYS, AHEAD)):
        f = lambda p: loss(fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch), x)  # noqa: E731
        with unchanged(model):
            grads, value = WAYS[way](f)(fs.shard(model, spec))
        what = f"{spec.units[1].p} {way} prefetch={prefetch}"
        assert_close(value, expected, msg=lambda m: f"{what}: {m}")
        same(grads, fs.shard(mean, spec), what)


def mean_square(y: Tensor, x: Any = None) -> Tensor:
    return y.pow(2).mean()


def averaged(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> fs.Params:
    """The gradients of the model itself, averaged by hand."""
    reference = copy.deepcopy(model)
    loss(reference).backward()
    return average_gradients(reference)


# --- in what forward gives back, or keeps ---
def with_parameters(model: Net, x: Tensor) -> dict[str, Tensor]:
    first, second = model.blocks[0].in_proj.weight, model.blocks[1].out_proj.weight
    return {"y": Net.forward(model, x), "weight": first, "bias": model.first.bias, "view": second[1:, ::2].t()}


def with_closure(model: Net, x: Tensor) -> Callable[[Tensor], Tensor]:
    y, weight, bias = Net.forward(model, x), model.blocks[0].in_proj.weight, model.blocks[3].out_proj.bias
    return lambda x: y * bias + (x @ weight.t()).tanh() @ weight


# --- held outside ---
HOLD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "the parameter": (lambda p: p, lambda held, p: held),
    "data": (lambda p: p.data, lambda held, p: held),
    "a view": (lambda p: p.detach().view(-1)[:].view(torch.int64), lambda held, p: held.view(p.dtype)),
    "untyped_storage": (
        lambda p: (p.untyped_storage(), p.storage_offset()),
        lambda held, p: p.new_empty(0).set_(held[0], held[1], p.shape),
    ),
    "numpy": (lambda p: p.detach().numpy(), lambda held, p: torch.from_numpy(held)),
}
"""How to hold a parameter, and how to read it (given another tensor of its shape) later."""


# --- held by backward ---


def product_saved(by_attribute: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """x @ w.t(), with the weight saved in one way or the other."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w = inputs
        ctx.save_for_backward(x, *([] if by_attribute else [w]))
        ctx.w = w if by_attribute else None

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = (*ctx.saved_tensors, ctx.w)[:2]
        return grad @ w, grad.t() @ x

    return function(lambda x, w: x @ w.t(), setup_context=setup_context, backward=backward).apply


def by_product(apply: Callable[[Tensor, Tensor], Tensor], model: Net, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = apply(torch.tanh(apply(x, block.in_proj.weight)), block.out_proj.weight)
    return model.head(x)


def gradients_are_the_callers(rank: int) -> None:
    """What a step returned, and what hooks saw in it, is not written over by the rest of it or by the next step."""
    model, x = Net(BLOCKS), numbers(rank, 0)
    seen: list[tuple[Tensor, Tensor]] = []

    def note(grad: Tensor) -> None:
        seen.append((grad, grad.clone()))

    def hook(module: nn.Module, *_: object) -> None:
        if module.weight.requires_grad:
            module.weight.register_hook(note)
            module.bias.register_hook(note)

    for block in model.blocks:
        block.in_proj.register_forward_hook(hook)
    for spec, prefetch in product(specs(model), AHEAD):
        params, f = fs.shard(model, spec), loss_of(model, spec, x, of=mean_square, prefetch=prefetch)
        first = fs.grad(f)(params)
        copies = {key: grad.clone() for key, grad in first.items()}
        fs.grad(lambda p: -3.0 * f(p))(params)
        assert all(torch.equal(first[key], copies[key]) for key in first)
        assert len(seen) == 2 * 2 * BLOCKS
        assert all(torch.equal(grad, copied) for grad, copied in seen)
        seen.clear()


def input_gradient_in_the_loss(rank: int) -> None:
    """Backward in the middle of the loss, of the input alone, and then through that."""
    model, x = Net(BLOCKS), numbers(rank, 0).requires_grad_()

    def loss(call: Callable[[Tensor], Tensor]) -> Tensor:
        y = call(x)
        (plain,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
        (slope,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        return y.pow(2).mean() + (slope**2).mean() + (plain * slope).sum()

    mean = averaged(model, loss)
    for spec, way, prefetch in some(product(specs(model), PLAIN, AHEAD)):
        f = lambda p: loss(lambda x: fs.functional_call(model, p, (x,), spec=spec, prefetch=prefetch))  # noqa: E731
        same(WAYS[way](f)(fs.shard(model, spec))[0], fs.shard(mean, spec), f"{way} prefetch={prefetch}")


def generator(rank: int) -> None:
    model, x = Hooked(lambda model, x: (block(x) for block in model.blocks)), numbers(rank, 0)
    for spec in specs(model):
        call = loss_of(model, spec, x)
        refused(TypeError, "expected results, got a generator", lambda: call(fs.shard(model, spec)))


def outputs_and_parameters(out: dict[str, Tensor], x: Tensor) -> Tensor:
    return mean_square(out["y"]) + (out["weight"] ** 3).sum() * out["bias"].sum() + out["view"].exp().sum()


CASES: dict[str, Callable[[int], None]] = {
    "outputs": lambda rank: agrees(rank, with_parameters, outputs_and_parameters),
    "closure": lambda rank: agrees(rank, with_closure, lambda after, x: mean_square(after(x))),
    **{f.__name__: f for f in (gradients_are_the_callers, input_gradient_in_the_loss, generator)},
}


@at_most(1)
@pytest.mark.parametrize("name", CASES)
@real_ranks(2)
def test_what_outlives_its_unit_is_right_or_an_error(rank: int, name: str) -> None:
    """Outputs, views, closures, partial backwards, generators."""
    CASES[name](rank)


@at_most(1)
@pytest.mark.parametrize("how", mark_seldom(HOLD, "the parameter", "data", "a view", "untyped_storage"))
@real_ranks(2)
def test_what_is_held_stays_what_it_was(rank: int, how: str) -> None:
    """Held in every way that points at its memory, while the next units are gathered, in backward and in the next call."""
    model, x = Net(BLOCKS), numbers(rank, 0)
    hold, read = HOLD[how]
    kept: dict[str, Any] = {}
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, *_: object) -> None:
        for attr in ("weight", "bias"):
            name = f"{names[module]}.{attr}"
            if name not in kept:
                kept[name] = hold(getattr(module, attr))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(hook)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}

    def check(when: str) -> None:
        assert kept.keys() == expected.keys()
        for name, tensor in expected.items():
            value = read(kept[name], tensor).detach()
            assert torch.equal(value.flatten(), tensor.flatten()), (name, when)

    for spec, way, prefetch in some(product(specs(model), PLAIN, AHEAD)):
        params = fs.shard(model, spec)
        then = functools.partial(check, f"between forward and backward: {spec.units[1].p} {way} {prefetch}")
        WAYS[way](loss_of(model, spec, x, of=mean_square, then=then, prefetch=prefetch))(params)
        check(f"after backward: {spec.units[1].p} {way} {prefetch}")
        fs.functional_call(model, params, (x,), spec=spec, prefetch=prefetch)
        check(f"after the next call: {spec.units[1].p} {way} {prefetch}")
        kept.clear()


@at_most(1)
@pytest.mark.parametrize("by_attribute", [False, True])
@real_ranks(2)
def test_custom_functions_keep_their_weights(rank: int, by_attribute: bool) -> None:
    """By save_for_backward, where a note stands for the weight, and as an attribute, where the buffer itself is held."""
    run = functools.partial(by_product, product_saved(by_attribute))
    agrees(rank, run, mean_square)


# --- What is under way: who holds its tensors, what becomes of it after an error, and a soak where memory is guarded ---
OPS = torch.ops._c10d_functional
STARTED: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all_gather_into_tensor": lambda x, name: OPS.all_gather_into_tensor(x, 2, name),
    "all_to_all_single": lambda x, name: OPS.all_to_all_single(x, [2, 2], [2, 2], name),
    "all_reduce": lambda x, name: OPS.all_reduce(x, "sum", name),
    "all_reduce_": lambda x, name: OPS.all_reduce_(x, "sum", name),
    "broadcast_": lambda x, name: OPS.broadcast_(x, 1, name),
}
"""What ops.py starts on gloo, for four rows on each of two ranks."""


@at_most(1)
@pytest.mark.parametrize("op", STARTED)
@real_ranks(2)
def test_gloo_holds_what_it_writes(rank: int, op: str) -> None:
    """And what it reads: no buffer that is let go is freed under it.

    Asserts that input and output are there until the wait, although another rank is late and nobody else holds them.
    """
    dist.barrier()
    time.sleep(0.3 * rank)
    x = torch.full((4, 1000), float(rank))
    read = StorageWeakRef(x.untyped_storage())
    out = STARTED[op](x, dist.group.WORLD.group_name)  # pyright: ignore[reportOptionalMemberAccess]
    written = weakref.ref(out)
    del x, out
    gc.collect()
    assert read.expired() == (op == "all_reduce")  # which reads a clone, and writes to it
    assert written() is not None
    OPS.wait_tensor(written())
    end = time.monotonic() + 10
    while not (read.expired() and written() is None) and time.monotonic() < end:
        time.sleep(0.01)  # gloo's own thread lets go of them after it has said so
    assert read.expired()
    assert written() is None


def fail(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    if ctx.error:
        raise ctx.error("the cause")
    return grad, None


def keep_error(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.error = inputs[1]


Failing = function(lambda x, error: x.view_as(x), setup_context=keep_error, backward=fail)
"""The identity, whose backward raises an error."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.error: dict[str, type[BaseException]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "forward" in self.error:
            raise self.error["forward"]("the cause")
        return torch.tanh(Failing.apply(self.linear(x), self.error.get("backward")))


@each(error=[ValueError, KeyboardInterrupt], where=["forward", "backward"])
@pytest.mark.parametrize("p", [P("shard"), P("shard", remat=True), P()], ids=["shard", "remat", "replicated"])
@real_ranks(2, "worst")
def test_the_step_after_an_error(rank: int, p: P, where: str, error: type[BaseException]) -> None:
    """The error comes as it was raised; what was under way is waited for by the next step, which is right."""
    model = nn.Sequential(*(Layer() for _ in range(6))).double()
    spec, params = shards_of(fs.by_type(Layer, p=p), model)
    x, leaves = torch.randn(3, 4, dtype=torch.float64), {key: shard.requires_grad_() for key, shard in params.items()}
    loss = loss_of(model, spec, x, of=mean_square, prefetch=2, in_flight=2)
    ignored: list[object] = []
    with mock.patch.object(sys, "unraisablehook", ignored.append):
        model[3].error = {where: error}
        with pytest.raises(error, match="the cause") as raised:
            loss(leaves).backward()
        assert raised.value.__context__ is None
        del raised
        gc.collect()
        model[3].error = {}
        loss(leaves).backward()
    mean_square(model(x)).backward()
    full = {name: param.grad for name, param in model.named_parameters()}
    assert_close({key: leaf.grad for key, leaf in leaves.items()}, dict(fs.shard(full, spec)), rtol=1e-9, atol=1e-9)
    assert [str(item) for item in ignored] == []  # what Python could only print


ALONE = """
import os, sys, time
import torch, torch.distributed as dist
sys.path[:] = {path}
import funshard as fs
from test_freed import Layer

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(*(Layer() for _ in range(6)))
spec = fs.policies.always(fs.P("shard"))(model).bound
leaves = {{key: shard.requires_grad_() for key, shard in fs.shard(model, spec).items()}}

def leave(text: str) -> None:
    time.sleep(0.5)
    os._exit(0)

if rank == 0:
    model[3].error = {{{where!r}: {error}}}
else:
    model[{last}].error = {{{where!r}: leave}}
fs.functional_call(model, leaves, torch.randn(3, 4), spec=spec, prefetch=2, in_flight=2).sum().backward()
"""


@at_most(1)
@pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
@pytest.mark.parametrize(("where", "last"), [("forward", 2), ("backward", 4)])
def test_an_error_is_all_that_is_said(tmp_path: Path, where: str, last: int, error: str) -> None:
    """On a rank where collectives are under way that never end: the other rank is gone after its ``last`` layer."""
    script = tmp_path / "script.py"
    script.write_text(ALONE.format(path=sys.path, where=where, last=last, error=error))
    with pytest.raises(AssertionError) as raised:
        launch(2, script)
    said = str(raised.value)
    assert f"{error}: the cause" in said
    assert said.count("Traceback") == 1, said


needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cc") or shutil.which("gcc")),
    reason="guard.c is for Linux, and to be compiled",
)


@seldom
@needs_compiler
def test_no_buffer_is_touched_when_it_is_free() -> None:
    """A few steps of soak.py, --thorough: a few seconds. It is to be run for longer by hand."""
    seconds, least = depth((0, 10), (2, soak.LEAST))
    assert soak.soak(ranks=2, seconds=seconds, seed=5, least=least) >= least
