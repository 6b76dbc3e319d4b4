"""What is under way: who holds its tensors, what becomes of it after an error, and a soak where memory is guarded."""

from __future__ import annotations

import gc
import shutil
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soak
import torch
import torch.distributed as dist
from depth import at_most, depth, each, seldom
from ranks import Pool, launch, real_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

import funshard as fs
from funshard import P

OPS = torch.ops._c10d_functional
STARTED: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all_gather_into_tensor": lambda x, name: OPS.all_gather_into_tensor(x, 2, name),
    "all_to_all_single": lambda x, name: OPS.all_to_all_single(x, [2, 2], [2, 2], name),
    "all_reduce": lambda x, name: OPS.all_reduce(x, "sum", name),
    "all_reduce_": lambda x, name: OPS.all_reduce_(x, "sum", name),
    "broadcast_": lambda x, name: OPS.broadcast_(x, 1, name),
}
"""What ops.py starts on gloo, for four rows on each of two ranks."""


def world() -> str:
    return dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]


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
    out = STARTED[op](x, world())
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


class Failing(torch.autograd.Function):
    """The identity, whose backward raises an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException] | None) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.error:
            raise ctx.error("the cause")
        return grad, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.error: dict[str, type[BaseException]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "forward" in self.error:
            raise self.error["forward"]("the cause")
        return torch.tanh(Failing.apply(self.linear(x), self.error.get("backward")))


def after_an_error(rank: int, p: P, where: str, error: type[BaseException]) -> list[object]:
    """What Python could only print, of a step that fails in the middle and one after it that is right."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(6))).double()
    spec = fs.by_type(Layer, p=p)(model).bound
    x = torch.randn(3, 4, dtype=torch.float64)
    leaves = {key: shard.requires_grad_() for key, shard in fs.shard(model, spec).items()}
    ignored: list[object] = []
    sys.unraisablehook = ignored.append
    try:
        model[3].error = {where: error}
        with pytest.raises(error, match="the cause") as raised:
            (fs.functional_call(model, leaves, x, spec=spec, prefetch=2, in_flight=2) ** 2).mean().backward()
        assert raised.value.__context__ is None
        del raised
        gc.collect()
        model[3].error = {}
        (fs.functional_call(model, leaves, x, spec=spec, prefetch=2, in_flight=2) ** 2).mean().backward()
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    (model(x) ** 2).mean().backward()
    full = {name: param.grad for name, param in model.named_parameters()}
    for key, mine in fs.shard(full, spec).items():
        assert_close(leaves[key].grad, mine, rtol=1e-9, atol=1e-9)
    return [str(item) for item in ignored]


@each(error=[ValueError, KeyboardInterrupt], where=["forward", "backward"])
@pytest.mark.parametrize("p", [P("shard"), P("shard", remat=True), P()], ids=["shard", "remat", "replicated"])
def test_the_step_after_an_error(worst2: Pool, p: P, where: str, error: type[BaseException]) -> None:
    """The error comes as it was raised; what was under way is waited for by the next step, which is right."""
    assert worst2.run(after_an_error, p, where, error) == [[], []]


ALONE = """
import os, sys, time
import torch, torch.distributed as dist
sys.path[:] = {path}
import funshard as fs
from test_in_flight import Layer

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
    assert soak.soak(ranks=2, seconds=seconds, guard="pages", burn=0, seed=5, least=least) >= least
