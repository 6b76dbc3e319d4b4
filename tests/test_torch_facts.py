"""The facts about torch that funshard stands on: what it works around, and the private parts that it touches."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from depth import at_most, mark_seldom, seldom
from ranks import Pool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.func import grad, jvp
from torch.testing._internal.distributed.fake_pg import FakeStore

from funshard import _torch


@pytest.fixture
def fake_group() -> Iterator[str]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def raw_gather(name: str) -> Callable[[Tensor], Tensor]:
    ops = torch.ops._c10d_functional
    return lambda x: ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name))


def test_grad_over_raw_collectives_raises(fake_group: str) -> None:
    """Fact 1: so they are called only inside a Function's forward. Until torch has imported their autograd it warns."""
    importlib.import_module("torch.distributed._functional_collectives")
    with pytest.raises(RuntimeError, match="setup_context"):
        grad(lambda x: raw_gather(fake_group)(x).sum())(torch.ones(2))


def raw_jvp(rank: int) -> Tensor:
    assert dist.group.WORLD is not None
    return jvp(raw_gather(dist.group.WORLD.group_name), (torch.ones(2),), (torch.ones(2),))[1]


def test_jvp_over_raw_collectives_is_silently_zero(gloo2: Pool) -> None:
    """Fact 1, the worse half."""
    assert all(not tangent.any() for tangent in gloo2.run(raw_jvp))


def test_zero_tangents_arrive_without_memory() -> None:
    """Fact 3: jvp rules must materialise them."""
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None: ...

        @staticmethod
        def jvp(ctx: object, tangent: Tensor) -> Tensor:
            seen.append(tangent._is_zerotensor())
            return tangent

    jvp(lambda x, y: Probe.apply(grad(lambda z: (x * z).sum())(y)), (torch.ones(1), torch.ones(1)), (torch.zeros(1),) * 2)
    with torch.autograd.forward_ad.dual_level():
        Probe.apply(torch.autograd.forward_ad.make_dual(torch.ones(1), torch._efficientzerotensor(1)))
    assert seen[-1]
    zero = torch._efficientzerotensor(2)
    assert _torch.materialize_zeros(zero).data_ptr()
    one = torch.ones(2)
    assert _torch.materialize_zeros(one) is one


def test_hooks_work_in_one_transform() -> None:
    """torch.func switches saved-tensor hooks off; switched on again they see the level's tensors and are obeyed."""
    x, seen = torch.tensor([2.0, 3.0]), []

    def pack(tensor: Tensor) -> object:
        seen.append(_torch.unwrap(tensor).clone())
        return tensor

    def cube(y: Tensor) -> Tensor:
        with (
            pytest.raises(RuntimeError, match="saved tensor hooks"),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            pass
        with _torch.saved_tensor_hooks(pack, lambda t: 10 * t):
            out = (y * y * y).sum()
        with (
            pytest.raises(RuntimeError, match="saved tensor hooks"),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            pass  # off again, as it was
        return out

    got = grad(cube)(x)
    # d(y*y) = 2y and d(yy*y) = yy + y * d(yy), each saved factor ten times too large by our doing
    assert torch.equal(got, 10 * x**2 + 10 * x * 20 * x)
    assert len(seen) == 4


def test_hooks_switch_the_version_check_off() -> None:
    """So functional_call makes the check itself, on outputs that are saved as well."""
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = x.exp()
    y.detach().add_(1)
    y.sum().backward()  # no error, a wrong gradient
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2).exp() + 1)


def test_transforms_refuse_hooks_outside() -> None:
    """torch.func.grad does not begin under saved-tensor hooks: the one transform that forward itself cannot use."""
    with (
        pytest.raises(RuntimeError, match=r"forward uses a torch.func transform.*expected P\(reshard=False\)"),
        _torch.saved_tensor_hooks(lambda t: t, lambda t: t),
    ):
        grad(torch.sum)(torch.ones(2))


def test_without_graph_cuts_one_level() -> None:
    """`_torch.detach_level` keeps the derivative of the level below, which ``detach`` inside a transform loses."""
    x = torch.tensor(3.0, requires_grad=True)
    kept = grad(lambda y: y * _torch.detach_level(y * y))(x)
    lost = grad(lambda y: y * (y * y).detach())(x)
    assert torch.autograd.grad(kept, x)[0] == 6
    assert not lost.requires_grad
    assert not _torch.detach_level(x * x).requires_grad


# --- What the schedule relies on ---


class Told(torch.autograd.Function):
    """The same number, whose backward tells of which kind it is."""

    told: list[tuple[bool, bool]] = []  # noqa: RUF012

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Told.told.append((_torch.is_last_backward(_torch.current_level()), _torch.is_in_python_node()))
        return g


def test_last_backward() -> None:
    """torch.func.grad ends with a backward that frees the graph; pullbacks, and torch.autograd.grad inside, can be repeated."""
    told: list[bool] = []

    def tell(tensor: Tensor) -> Tensor:
        assert not _torch.is_in_python_node()
        told.append(_torch.is_last_backward(_torch.level_of(tensor)))
        return tensor

    def sine(x: Tensor) -> Tensor:
        with _torch.saved_tensor_hooks(lambda t: t, tell):
            return x.sin()

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(sine(x), x, create_graph=True)[0]

    def asked() -> list[bool]:
        out, told[:] = list(told), []
        return out

    x = torch.tensor(0.5)
    assert not _torch.is_last_backward(0)
    assert grad(sine)(x) == x.cos()
    assert asked() == [True]
    assert grad(slope)(x) == -x.sin()
    assert asked() == [False]
    assert grad(grad(sine))(x) == -x.sin()
    assert asked() == [True]
    value, pull = torch.func.vjp(sine, x)
    assert pull(torch.ones_like(value))[0] == x.cos()
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(sine(leaf), leaf, create_graph=True)
    assert not any(asked())
    grad(Told.apply)(x)
    assert Told.told == [(True, True)]


def test_alone() -> None:
    """A tensor is alone until a view, another tensor, an array or a Python storage holds its storage as well."""
    x = torch.empty(6)
    assert _torch.is_sole_holder(x)
    w = torch.ones(6, requires_grad=True)
    for hold in (
        lambda: x[2:],
        lambda: x.detach(),
        lambda: x.untyped_storage(),
        lambda: x.numpy(),
        lambda: (w * x[:6]).sum(),  # a saved tensor
    ):
        held = hold()
        assert not _torch.is_sole_holder(x)
        del held
        assert _torch.is_sole_holder(x)


def test_reinterpreted() -> None:
    """Bits in another dtype, batched in any dimension, twice over, and inside a gradient."""
    x = torch.randn(2, 3, 4)
    for dim in range(2):
        for f in (lambda x: _torch.view_as_dtype(x.contiguous(), torch.uint8), lambda x: _torch.view_as_dtype(x, torch.int32)):
            got = torch.vmap(f, dim)(x)
            assert torch.equal(got, torch.stack([f(one) for one in x.unbind(dim)]))
            assert torch.equal(torch.vmap(torch.vmap(f))(x), f(x))
    back = torch.vmap(lambda raw: _torch.view_as_dtype(raw, torch.float32))(x.view(torch.uint8))
    assert torch.equal(back, x)
    empty = torch.vmap(torch.vmap(lambda raw: _torch.view_as_dtype(raw, torch.float64), 1), 1)(torch.empty(2, 3, 4, 0).byte())
    assert (empty.shape, empty.dtype) == ((3, 4, 2, 0), torch.float64)
    weighed = lambda w, raw: (w * _torch.view_as_dtype(raw, torch.float32)).sum()  # noqa: E731
    g = torch.vmap(grad(weighed), (None, 0))(torch.ones(4), x[0].view(torch.uint8))
    assert torch.equal(g, x[0])


def test_dynamo_stays_out_of_a_dispatch_mode() -> None:
    """Also where a compiled function has broken its graph, and Dynamo compiles each frame that it enters from there."""

    def helper(x: Tensor) -> Tensor:
        return x.cos()

    class Calls(_torch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return helper(out) if func is torch.ops.aten.sin.default else out

    @functools.partial(torch._dynamo.disable, recursive=False)
    def within(x: Tensor) -> Tensor:
        with Calls():
            return torch.sin(x) + 1

    compiled = CompileCounter()
    outer = torch.compile(lambda x: within(x), backend=compiled)
    x = torch.ones(3)
    torch.testing.assert_close(outer(x), x.sin().cos() + 1)
    assert not compiled.op_count


def test_operators_that_make_results() -> None:
    """Those that do nothing else, by their schemas: no views, no changes in place, nothing that is sent, no statistics."""
    aten, sent = torch.ops.aten, torch.ops._c10d_functional
    make = {aten.mm.default, aten.native_layer_norm.default, aten.rand_like.default, aten.sort.default, aten._to_copy.default}
    others = {
        aten.view.default,
        aten.split.Tensor,
        aten.relu_.default,
        aten.mm.out,
        aten.bernoulli_.float,
        aten.empty.memory_format,
    }
    others |= {aten.native_batch_norm.default, sent.all_reduce.default, sent.wait_tensor.default, aten.empty_like.default}
    others |= {aten._native_batch_norm_legit.default, aten._foreach_add_.Scalar, torch.ops.c10d.barrier.default}
    assert {op for op in make | others if _torch.is_pure_op(op)} == make
    x, y, z = torch.ones(3, 2, 2)
    assert list(_torch.mutated_args(aten.mm.out, (x, y), {"out": z})) == [z]
    assert list(_torch.mutated_args(aten._foreach_add_.Scalar, ([x, y], 1), {})) == [x, y]
    assert list(_torch.mutated_args(aten.mm.default, (x, y), {})) == []
    assert all(map(_torch.is_inplace_view, (aten.t_.default, aten.squeeze_.dims, aten.unsqueeze_.default)))
    changed = aten.set_.source_Tensor, aten.resize_.default, aten.relu_.default, aten.t.default
    assert not any(map(_torch.is_inplace_view, changed))
    assert [_torch.is_plain(t) for t in (x, nn.Parameter(x), x.to_sparse())] == [True, True, False]


def test_copies_on_write() -> None:
    """A copy on write sees every kind of write, by ``.data`` and NumPy too, and none of an ordinary read."""
    writes: list[Callable[[Tensor], object]] = [
        lambda x: x.data.clamp_(0, 0),
        lambda x: x.detach().numpy().fill(0),
        lambda x: x[:1].zero_(),
        lambda x: torch.add(x, 1, out=x.view(-1)),
    ]
    for write in writes:
        x = torch.tensor([1.0, 2.0])
        copy = _torch.lazy_clone(x)
        assert _torch.shares_memory(x, copy)
        write(x)
        later = _torch.lazy_clone(x)
        assert not _torch.shares_memory(x, copy)
        assert _torch.shares_memory(x, later)
        assert torch.equal(copy, torch.tensor([1.0, 2.0]))
    x = torch.randn(4, 4)
    copy = _torch.lazy_clone(x)
    torch.nn.functional.linear(x, x).sum() + x.t().contiguous().norm()
    torch.nn.functional.layer_norm(x, (4,), x[0], x[1])
    assert _torch.shares_memory(x, copy)
    assert torch.equal(copy, x)
    foreign = torch.from_numpy(np.ones(3))  # not torch's memory
    copy = _torch.lazy_clone(foreign)
    foreign.data.zero_()
    assert torch.equal(copy, torch.ones(3).double())


def test_shares_counter() -> None:
    """Views and ``detach`` count changes in place together with the tensor; ``.data`` and ``unsafe_chunk`` of it apart."""
    x = torch.ones(4).mul_(2)
    a, b = (x + 0).unsafe_chunk(2)
    for one, other, expected in [
        (x, x, True),
        (x, x.view(2, 2)[0], True),
        (x.detach(), x.requires_grad_().detach(), True),
        (x.detach(), _torch.make_version_probe(x), True),
        (x.detach(), x.data, False),
        (x.detach(), torch.ones(4).mul_(2), False),
        (a, b, False),
        (a[:1], a.t(), True),
    ]:
        versions = one._version, other._version
        assert _torch.shares_counter(one, other) is expected
        assert (one._version, other._version) == versions


LATE = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist

if sys.argv[1] == "funshard":
    import funshard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn.functional as functional
dist.destroy_process_group()
kept = functional.all_reduce.__defaults__[1] is not None
threads = [name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())]
sys.stdout.write(f"{kept} {bool(threads)}")
sys.stdout.flush()
os._exit(0)  # no abort
"""


@seldom
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("imported", mark_seldom(["torch", "funshard"], "funshard"))
def test_a_late_import_keeps_the_default_group(imported: str) -> None:
    """Default arguments of torch.distributed.nn.functional are the group of its import; funshard imports it before."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", LATE, imported], capture_output=True, text=True, env=env, timeout=100)
    if imported == "funshard":
        assert done.stdout == "False False", done.stderr
    else:  # its threads may not have their names yet
        assert done.stdout.startswith("True "), done.stderr


def test_no_grad_in_forward_mode() -> None:
    """jvp differentiates what is computed under no_grad; within the mode it does not, nor a view made there, nor by level 0."""

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            n, view = x * 2, x[:1]
        return x * n * view

    def watched(x: Tensor) -> Tensor:
        with _torch.NoGradInForwardMode():
            assert _torch.NoGradInForwardMode.is_active()
            return f(x)

    x = torch.tensor([1.0, 3.0])
    one = torch.ones(2)
    assert torch.func.jvp(f, (x,), (one,))[1].equal(torch.tensor([6.0, 30.0]))
    assert torch.func.jvp(watched, (x,), (one,))[1].equal(torch.tensor([2.0, 6.0]))
    assert torch.func.grad(lambda x: f(x).sum())(x).equal(torch.tensor([2.0, 6.0]))
    assert not _torch.NoGradInForwardMode.is_active()


# --- torch.compile ---


def test_nested_compile_regions_stop_inside_of_torch_func() -> None:
    """Dynamo's reusable regions (invoke_subgraph) know no torch.func transform, so a step cannot stamp out its blocks."""
    region = torch.compiler.nested_compile_region(lambda x: x.sin())
    grad = torch.func.grad(lambda x: region(region(x)).sum())
    with pytest.raises(Exception, match=r"Expected FakeTensor|invoke_subgraph|FunctionalTensor|HigherOrderOperator"):
        torch.compile(grad, backend="aot_eager", fullgraph=True)(torch.ones(2))


@at_most(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalars_are_written_in_a_graph(dtype: torch.dtype) -> None:
    """torch 2.11 and 2.13 lose a plain copy_ into a 0-D float64 tensor; `write_into` may go where none does."""
    torch._dynamo.reset()
    for write, is_safe in ((_torch.write_into, True), (Tensor.copy_, dtype != torch.float64)):
        x = torch.tensor(1.5, dtype=dtype)
        torch.compile(lambda x, write=write: write(x, x * 2), backend="aot_eager")(x)
        assert x == 3 or not is_safe
