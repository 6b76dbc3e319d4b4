"""The facts about torch that funshard stands on: what it works around, and the private parts that it touches."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from collective_log import world
from depth import at_most, mark_seldom, seldom
from models import function, refused
from ranks import real_ranks
from test_memory import Held, no_collector
from torch import Tensor, nn
from torch._C import _functorch
from torch._dynamo.testing import CompileCounter
from torch.func import grad, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from funshard import _torch
from funshard._torch.modules import BatchNorm, NormWithStatistics, find_reset


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=17))
    yield
    dist.destroy_process_group()


def asking(question: Callable[[Tensor], Any]) -> tuple[Callable[[Tensor], Tensor], list[Any]]:
    """The sum of a tensor, and the answers to what each call of it asks."""
    answers: list[Any] = []

    def f(x: Tensor) -> Tensor:
        answers.append(question(x))
        return x.sum()

    return f, answers


def test_a_world_in_name() -> None:
    """`_torch.fake_world` is a process group, and leaves none; real tensors stay real inside a mode."""
    with _torch.fake_world(16):
        with _torch.fake_mode(), _torch.real_tensors():
            assert (torch.ones(2) + 1).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match="has a process group"), _torch.fake_world(2):
            pass
        assert dist.get_world_size() == 16
    assert not dist.is_initialized()


def test_groups_in_name() -> None:
    """`_torch.named_groups` are found by name, of any device and beside a process group, and are gone afterwards."""
    meta = torch.device("meta")
    with _torch.fake_world(2):
        with _torch.named_groups({"replicate": 4, "shard": 512}, meta) as names:
            found = [_torch.resolve_group(names[axis]) for axis in ("replicate", "shard")]
            assert [(group.size(), group.rank()) for group in found] == [(4, 0), (512, 0)]
            assert [_torch.backend_name(name, meta) for name in names.values()] == ["fake"] * 2
            assert [getattr(group, "bound_device_id", None) for group in found] == [torch.device("meta", 0)] * 2
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(3, device=meta), 512, names["shard"])
            assert gathered.shape == (1536,)
        assert dist.get_world_size() == 2
    with pytest.raises(RuntimeError):
        _torch.resolve_group(names["shard"])


def test_flops() -> None:
    """torch's counter knows products, and no others."""
    x = torch.ones(2, 3)
    assert flop_registry[torch.ops.aten.mm](x, x.t(), out_val=torch.ones(2, 2)) == 2 * 2 * 3 * 2
    assert torch.ops.aten.add not in flop_registry


def raw_gather(name: str) -> Callable[[Tensor], Tensor]:
    ops = torch.ops._c10d_functional
    return lambda x: ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name))


def test_stored_at() -> None:
    """`_torch.make_storage_info` gives what torch's reader looks at, of the class that is in its files."""
    found = _torch.make_storage_info("__0_0.distcp", 3, 5)
    assert (found.relative_path, found.offset, found.length, found.transform_descriptors) == ("__0_0.distcp", 3, 5, None)
    assert b"torch.distributed.checkpoint.filesystem\n_StorageInfo" in pickle.dumps(found, 2)


def test_saved_unchecked(tmp_path: Path) -> None:
    """`_torch.save_unchecked` writes what torch.save does but for its checksums, whatever the switch for all threads says."""
    tensor = torch.arange(6.0).view(2, 3)
    with (tmp_path / "x").open("wb") as file:
        file.write(b"before")
        _torch.save_unchecked(tensor, file)
    assert torch.load(io.BytesIO((tmp_path / "x").read_bytes()[6:]), weights_only=True).equal(tensor)
    assert torch.serialization.get_crc32_options()


def test_grad_over_raw_collectives_raises() -> None:
    """Fact 1: so they are called only inside a Function's forward. Until torch has imported their autograd it warns."""
    importlib.import_module("torch.distributed._functional_collectives")
    with world(2):
        assert dist.group.WORLD is not None
        gathered = raw_gather(dist.group.WORLD.group_name)
        refused(RuntimeError, "setup_context", lambda: grad(lambda x: gathered(x).sum())(torch.ones(2)))


@real_ranks(2)
def test_jvp_over_raw_collectives_is_silently_zero(rank: int) -> None:
    """Fact 1, the worse half."""
    name = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    assert not jvp(raw_gather(name), (torch.ones(2),), (torch.ones(2),))[1].any()


def test_zero_tangents_arrive_without_memory() -> None:
    """Fact 3: jvp rules must materialise them."""
    seen = []

    def note(ctx: object, tangent: Tensor) -> Tensor:
        seen.append(tangent._is_zerotensor())
        return tangent

    Probe = function(lambda x: x.clone(), jvp=note)
    jvp(lambda x, y: Probe.apply(grad(lambda z: (x * z).sum())(y)), (torch.ones(1), torch.ones(1)), (torch.zeros(1),) * 2)
    with torch.autograd.forward_ad.dual_level():
        Probe.apply(torch.autograd.forward_ad.make_dual(torch.ones(1), torch._efficientzerotensor(1)))
    assert seen[-1]
    zero = torch._efficientzerotensor(2)
    assert _torch.materialize_zeros(zero).data_ptr()
    one = torch.ones(2)
    assert _torch.materialize_zeros(one) is one


def test_level_counts_transforms() -> None:
    """`_torch.current_level` is 0 outside of torch.func and counts the transforms that run.

    `_torch.can_replace_saved_tensors` is true in plain autograd, or in a single reverse-mode transform.
    """
    f, seen = asking(lambda x: (_torch.current_level(), _torch.can_replace_saved_tensors()))
    x = torch.ones(2)
    f(x)
    grad(f)(x)
    vjp(f, x)
    torch.vmap(f)(torch.ones(2, 2))
    torch.vmap(grad(f))(torch.ones(2, 2))
    jvp(f, (x,), (x,))
    grad(lambda x: grad(f)(x).sum())(x)
    f(x)
    assert seen == [(0, True), (1, True), (1, True), (1, False), (2, False), (1, False), (2, False), (0, True)]


def test_base_and_lower_unwrap() -> None:
    """`_torch.unwrap` finds the plain tensor inside every wrapper, `_torch.unwrap_level` removes one of grad's."""
    x = torch.ones(2)

    def f(y: Tensor) -> Tensor:
        assert _functorch.is_functorch_wrapped_tensor(y)
        assert _torch.unwrap(y) is not y
        assert not _functorch.is_functorch_wrapped_tensor(_torch.unwrap(y))
        assert _torch.storage_id(_torch.unwrap(y)) == _torch.storage_id(x)
        assert not _functorch.is_gradtrackingtensor(_torch.unwrap_level(y))
        return y.sum()

    grad(f)(x)
    assert _torch.unwrap(x) is x
    assert _torch.unwrap_level(x) is x


def test_hooks_work_in_one_transform() -> None:
    """torch.func switches saved-tensor hooks off; switched on again they see the level's tensors and are obeyed."""
    x, seen = torch.tensor([2.0, 3.0]), []

    def pack(tensor: Tensor) -> object:
        seen.append(_torch.unwrap(tensor).clone())
        return tensor

    def assert_off() -> None:
        refused(RuntimeError, "saved tensor hooks", torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t).__enter__)

    def cube(y: Tensor) -> Tensor:
        assert_off()
        with _torch.saved_tensor_hooks(pack, lambda t: 10 * t):
            out = (y * y * y).sum()
        assert_off()  # again, as it was
        return out

    got = grad(cube)(x)
    # d(y*y) = 2y and d(yy*y) = yy + y * d(yy), each saved factor ten times too large by our doing
    assert torch.equal(got, 10 * x**2 + 10 * x * 20 * x)
    assert len(seen) == 4


def test_forward_ad_level() -> None:
    """`_torch.is_in_forward_ad` tells an open forward-mode level."""
    assert not _torch.is_in_forward_ad()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.is_in_forward_ad()
    assert not _torch.is_in_forward_ad()


def test_hooks_switch_the_version_check_off() -> None:
    """So functional_call makes the check itself, on outputs that are saved as well."""
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = x.exp()
    y.detach().add_(1)
    y.sum().backward()  # no error, a wrong gradient
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2).exp() + 1)


def test_checkpoint_is_seen_by_its_hooks() -> None:
    """`_torch.current_pack_hook` is None outside of hooks, and tells torch.utils.checkpoint's from others."""
    f, seen = asking(lambda x: getattr(_torch.current_pack_hook(), "__module__", None))
    x = torch.ones(2, requires_grad=True)
    f(x)
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        f(x)
    assert seen == [None, "torch.utils.checkpoint", "torch.autograd.graph"]


def test_reentrant_checkpoint_is_seen_by_its_frame() -> None:
    """`_torch.count_reentrant_checkpoints` counts those whose forward runs, and not their recomputation."""
    f, seen = asking(lambda x: _torch.count_reentrant_checkpoints())
    x = torch.ones(2, requires_grad=True)
    f(x)
    nested = lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True)  # noqa: E731
    torch.utils.checkpoint.checkpoint(nested, nested(x), use_reentrant=True)
    f(x)
    assert seen == [0, 1, 2, 0]
    nested(x).sum().backward()
    assert seen[4:] == [1, 0]


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
def test_groups_by_name() -> None:
    """A process group is found by its name, and says what moves a device's tensors."""
    with world(3, rank=2):
        group = dist.group.WORLD
        assert group is not None
        assert _torch.resolve_group(group.group_name).rank() == 2
        assert _torch.backend_name(group.group_name, torch.device("cpu")) == "fake"


def test_below_autograd() -> None:
    """Operators record nothing there, and still count what is modified in place and know what is a view of what."""
    x = torch.randn(4, requires_grad=True)
    with _torch.below_transforms(), _torch.below_autograd():
        assert (x * 2).grad_fn is None
        y = torch.zeros(4)
        before = _torch.version(y)
        y[:2].div_(2)
        assert _torch.version(y) == before + 1
    assert (x * 2).grad_fn is not None


def test_layers_with_statistics() -> None:
    """One class is above every BatchNorm, another above those and InstanceNorm."""
    norms = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    assert all(isinstance(norm, BatchNorm) for norm in norms)
    assert not isinstance(nn.InstanceNorm1d(2), BatchNorm)
    assert all(isinstance(norm, NormWithStatistics) for norm in [*norms, nn.InstanceNorm1d(2)])
    assert not isinstance(nn.LayerNorm(2), NormWithStatistics)


def test_layers_that_reset_themselves() -> None:
    """By reset_parameters, but for two of torch's, which have it under another name."""
    for layer in [nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.Embedding(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2), nn.LSTM(2, 2)]:
        assert find_reset(layer) == layer.reset_parameters
    attention = nn.MultiheadAttention(2, 1)
    assert not hasattr(attention, "reset_parameters")
    assert find_reset(attention) == attention._reset_parameters
    whole = nn.Transformer(4, 2, 1, 1, 4, batch_first=True)
    assert find_reset(whole) == whole._reset_parameters
    assert find_reset(nn.Sequential()) is None


def test_beneath() -> None:
    """Beneath the transforms plain tensors stay plain; inside one, what is computed from them belongs to it."""
    plain = torch.ones(3)

    def f(x: Tensor) -> Tensor:
        with _torch.below_transforms():
            inside.append(plain * 2)
            assert _torch.current_level() == 0
            assert not torch.is_grad_enabled()
        assert _torch.current_level() == 1
        outside.append(plain * 2)
        return (x * inside[0]).sum()

    inside: list[Tensor] = []
    outside: list[Tensor] = []
    assert torch.equal(torch.func.grad(f)(plain), 2 * plain)
    assert not _torch.is_wrapped(inside[0])
    assert _torch.is_wrapped(outside[0])


def test_graph_task() -> None:
    """Every run of backward has its own number, and outside there is none."""
    seen: list[int] = []
    x = torch.ones(3, requires_grad=True)
    y = (2 * x).sum()
    y.register_hook(lambda _: seen.append(_torch.current_graph_task()))
    y.backward(retain_graph=True)
    y.backward()
    assert _torch.current_graph_task() == -1
    assert len({-1, *seen}) == 3


@pytest.mark.parametrize("by", [torch.func.grad, None], ids=["torch.func", "plain"])
def test_edges_in_a_graph(by: Callable[..., Any] | None) -> None:
    """A tensor is one result of a node; a graph tells which of its results are used."""

    def look(x: Tensor) -> Tensor:
        used, left = (2 * x).split(2)
        out = used.sum()
        edges = _torch.edges_in_graph([out])
        assert edges.issuperset(_torch.own_edges(used) + _torch.own_edges(out))
        assert _torch.own_edges(left)
        assert edges.isdisjoint(_torch.own_edges(left))
        return out

    by(look)(torch.ones(4)) if by else look(torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("fails", [False, True])
def test_held_until_backward_ends(fails: bool) -> None:
    """What a node's pre-hook holds is there for the nodes after it, and is freed when backward ends, also by an error."""
    held: list[weakref.ref[Any]] = []
    called: list[bool] = []

    def hold(_: object) -> None:
        one = lambda: called.append(True)  # noqa: E731
        held.append(weakref.ref(one))
        _torch.hold_until_backward_ends(one)

    def look(_: Tensor) -> None:
        assert held[0]() is not None
        assert not fails

    x = torch.ones(3, requires_grad=True)
    x.register_hook(look)
    y = (2 * x).sum()
    y.grad_fn.register_prehook(hold)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(AssertionError) if fails else contextlib.nullcontext():
        y.backward()
    assert held[0]() is None
    assert called == ([] if fails else [True])


@pytest.mark.parametrize("by", [torch.func.grad, None], ids=["torch.func", "plain"])
def test_hooks_for_the_rest_of_a_node(by: Callable[..., Any] | None) -> None:
    """Hooks that are pushed while a node unpacks see what that node saves for a second derivative, and no other does."""
    saved: list[str] = []

    def push(tensor: Tensor) -> Tensor:
        _torch.push_saved_tensor_hooks(lambda t: (saved.append("here"), t)[1], lambda t: t)
        return tensor

    def f(x: Tensor) -> Tensor:
        y = x.sin()  # its backward comes later and saves, too
        with _torch.saved_tensor_hooks(lambda t: t, push):
            return (y @ x).sum()

    x = torch.ones(2, 2, requires_grad=by is None)
    got = by(f)(x.detach()) if by else torch.autograd.grad(f(x), x, create_graph=True)[0]
    torch.testing.assert_close(got.detach(), grad(lambda x: (x.sin() @ x).sum())(torch.ones(2, 2)))
    assert saved
    count = len(saved)
    assert _torch.current_pack_hook() is None
    (torch.ones(2, requires_grad=True) ** 2).sum().backward()
    assert len(saved) == count


def test_hooks_of_a_tensor_are_seen() -> None:
    """Also in a transform; not the one that runs after a gradient was added, nor one that was removed."""

    def f(x: Tensor) -> Tensor:
        assert not x._backward_hooks
        x.register_hook(lambda g: g).remove()
        assert not x._backward_hooks
        x.register_hook(lambda g: g)
        assert x._backward_hooks
        return x.sum()

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda x: None)
    f(leaf)
    torch.func.grad(f)(torch.ones(2))


def test_hooks_of_a_node_can_be_taken_away() -> None:
    """Those that are pushed while a node unpacks; nodes that run later are none the wiser."""

    def push(tensor: Tensor) -> Tensor:
        _torch.push_saved_tensor_hooks(lambda t: t, lambda t: t)
        return tensor

    def by_torch_func(ctx: Any, g: Tensor) -> Tensor:
        """It refuses hooks."""
        (x,) = ctx.saved_tensors
        assert _torch.current_pack_hook() is not None
        _torch.pop_saved_tensor_hooks()
        assert _torch.current_pack_hook() is None
        return torch.func.vjp(torch.sin, x)[1](g)[0]

    def save(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    x = torch.ones(2, requires_grad=True)
    with _torch.saved_tensor_hooks(lambda t: t, push):
        y = function(lambda x: x.sin(), setup_context=save, backward=by_torch_func).apply(x * 2)
    (got,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(got, 2 * (2 * x).cos())
    assert _torch.current_pack_hook() is None


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

    def tell_in_a_node(ctx: Any, g: Tensor) -> Tensor:
        told.extend((_torch.is_last_backward(_torch.current_level()), _torch.is_in_python_node()))
        return g

    x = torch.tensor(0.5)
    leaf = x.clone().requires_grad_()
    assert not _torch.is_last_backward(0)
    for run, answers in (
        (lambda: grad(sine)(x), [True]),
        (lambda: grad(slope)(x), [False]),
        (lambda: grad(grad(sine))(x), [True]),
        (lambda: torch.func.vjp(sine, x)[1](x), [False]),
        (lambda: torch.autograd.grad(sine(leaf), leaf, create_graph=True), [False]),
        (lambda: grad(function(lambda x: x.clone(), backward=tell_in_a_node).apply)(x), [True, True]),
    ):
        told.clear()
        run()
        assert told == answers


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.complex64])
def test_joined(given: torch.dtype) -> None:
    """`_torch.concat_into` is torch.cat of the flat tensors, into a buffer of any dtype; where it is recorded, by torch.cat."""
    pieces = [torch.randn(shape, dtype=given) for shape in [(2, 3), (), (0,), (4,), (1, 2, 3)]]
    wanted = torch.complex128 if given.is_complex else torch.float32
    out = torch.empty(17, dtype=wanted)
    assert _torch.concat_into(pieces, out) is out
    assert torch.equal(out, torch.cat([piece.reshape(-1) for piece in pieces]).to(wanted))
    assert len(_torch.concat_into([torch.empty(0)], torch.empty(0))) == 0
    mixed = _torch.concat_into([torch.ones(2, 2, dtype=given), torch.ones(1, dtype=wanted)], torch.zeros(5, dtype=wanted))
    assert torch.equal(mixed, torch.ones(5, dtype=wanted))
    graph = make_fx(lambda *pieces: _torch.concat_into(pieces, pieces[0].new_empty(17, dtype=wanted)))(*pieces).graph
    assert not any("_chunk_cat" in str(node.target) for node in graph.nodes)


def test_backward_early() -> None:
    """Backward comes to what was made first when its gradient is complete, under torch.func.grad too; else last."""
    for early in (False, True):
        came: list[str] = []

        def f(x: Tensor, early: bool = early, came: list[str] = came) -> Tensor:
            pieces = x.view_as(x).split([2, 2])
            if early:
                _torch.prioritize_backward(pieces)
            pieces[0].register_hook(lambda _: came.append("piece"))
            y = 2 * x.exp()
            y.register_hook(lambda _: came.append("later"))
            parts = y.sin()
            parts.register_hook(lambda _: came.append("latest"))
            return parts.sum() + sum((p**2).sum() for p in pieces)

        plain = torch.ones(4, requires_grad=True)
        f(plain).backward()
        torch.testing.assert_close(torch.func.grad(f)(torch.ones(4)), plain.grad)
        expected = ["piece", "latest", "later"] if early else ["latest", "later", "piece"]
        assert sorted(came) == sorted(2 * expected)
        assert [came.index("piece") < came.index("later")] == [early]
        assert came[3:] == came[:3]


def test_alone() -> None:
    """A tensor is alone until a view, another tensor, an array or a Python storage holds its storage as well."""
    x = torch.empty(6)
    assert _torch.is_sole_holder(x)
    w = torch.ones(6, requires_grad=True)
    for hold in (lambda: x[2:], x.detach, x.untyped_storage, x.numpy, lambda: (w * x[:6]).sum()):  # which saves a tensor
        held = hold()
        assert not _torch.is_sole_holder(x)
        del held
        assert _torch.is_sole_holder(x)


def test_parametrizations_set_a_tensor_to_itself() -> None:
    """Which would count as a write; to another tensor they set it as ever."""
    linear = nn.Linear(2, 2)
    weight, other = linear.weight, torch.zeros(2, 2)
    version = weight._version
    nn.utils.parametrize.register_parametrization(linear, "weight", nn.Identity())
    assert linear.parametrizations.weight.original is weight  # pyright: ignore
    assert weight._version == version
    nn.utils.parametrize._maybe_set(other, torch.ones(2, 2))
    assert torch.equal(other, torch.ones(2, 2))


SAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "attention": lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3),
    "norm": lambda x: x.norm(),
    "in place": lambda x: (x * 1).exp_(),
    "chain": lambda x: x.exp().exp().sigmoid().sqrt(),
    "max": lambda x: x.max(0)[0],
    "lstm": lambda x: LSTM(x)[0],
    "custom": lambda x: Nested.apply(x),
}
LSTM = nn.LSTM(4, 4)


def exp_beside_others(x: Tensor) -> Tensor:
    """Makes other nodes before its result, which is saved."""
    with torch.enable_grad():
        x.detach().requires_grad_().exp().sum()
    return x.exp()


Nested = function(
    exp_beside_others,
    setup_context=lambda ctx, inputs, y: ctx.save_for_backward(y),
    backward=lambda ctx, g: g * ctx.saved_tensors[0],
)


@at_most(1)
@pytest.mark.parametrize("name", mark_seldom(SAVES, *[*SAVES][:4]))
def test_saved_outputs_hold_no_graph(name: str) -> None:
    """What `kept` keeps frees everything without the collector, and gives the gradients of plain autograd."""
    x = torch.rand(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(SAVES[name](x).sum(), x)
    saved = Held()

    def pack(tensor: Tensor) -> Tensor:
        what = _torch.unpack_versioned(_torch.pack_versioned(tensor, _torch.unwrap(tensor)))
        if tensor.untyped_storage()._cdata != x.untyped_storage()._cdata and not isinstance(tensor, nn.Parameter):
            saved(what)
        return what

    with no_collector():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = SAVES[name](x)
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.testing.assert_close(grad, expected)
        y = grad = None
        assert saved.alive() == 0


def test_functions_keep_their_signature() -> None:
    """``apply`` fills in defaults from ``__signature__`` where forward has one: here one that forward itself does not have."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by = inputs[1]

    Scaled = function(lambda x, by: x * by, _torch.Function, setup_context=keep, backward=lambda ctx, g: (g * ctx.by, None))
    kept = inspect.signature(Scaled.forward)
    assert Scaled.forward.__signature__ is kept
    by = kept.parameters["by"].replace(default=3.0)
    Scaled.forward.__signature__ = kept.replace(parameters=[kept.parameters["x"], by])
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(grad(lambda x: Scaled.apply(x).sum())(x.detach()), torch.full((2,), 3.0))
    assert torch.equal(torch.autograd.grad(Scaled.apply(x).sum(), x)[0], torch.full((2,), 3.0))


def test_functions_of_one_level() -> None:
    """A node of the running level's graph alone, which torch.func's own way through a Function would make a class for."""
    made: list[int] = []

    def forward(x: Tensor) -> Tensor:
        made.append(_torch.current_level())
        with _torch.below_transforms():
            out = 2 * _torch.unwrap(x)
        return _torch.wrap_at_level(out, _torch.current_level())

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.level = _torch.level_of(inputs[0])

    def backward(ctx: Any, g: Tensor) -> Tensor:
        made.append(_torch.level_of(g) - ctx.level)
        return 2 * g

    x, Doubled = torch.ones(2), function(forward, _torch.LevelFunction, setup_context=setup_context, backward=backward)
    assert torch.equal(grad(lambda x: (Doubled.apply(x) ** 2).sum())(x), torch.full((2,), 8.0))
    assert torch.equal(torch.autograd.grad((Doubled.apply(x.requires_grad_()) ** 2).sum(), x)[0], torch.full((2,), 8.0))
    assert made == [1, 0, 0, 0]
    with pytest.raises(RuntimeError, match="functorch"):
        grad(lambda x: torch.autograd.function._SingleLevelFunction.apply(x))(x.detach())


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


def test_taken_over() -> None:
    """The memory goes on in another tensor; of a leaf, a parameter and a view alike. A graph that saved the old one says so."""
    whole = torch.ones(4)
    for old in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), whole[:2]):
        needs, at = old.requires_grad, old.data_ptr()
        y = (old * old).sum()
        new = _torch.take_storage(old)
        assert (new.requires_grad, new.data_ptr(), new.tolist()) == (needs, at, [1.0, 1.0])
        refused(RuntimeError, "was donated", lambda: old.sum())
        assert isinstance(old, Tensor)
        if needs:
            refused(RuntimeError, r"modified by an inplace operation|was donated", lambda: y.backward())


def test_nodes_of_a_graph() -> None:
    """Each once, with its edges; a leaf's node knows the leaf; a hook of a node sees what it gives back, and can be removed."""
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    z = (y * y + x).sum()
    nodes = dict(_torch.iter_nodes([z.grad_fn, None]))
    names = sorted(type(node).__name__ for node in nodes)
    assert names == ["AccumulateGrad", "AddBackward0", "ExpBackward0", "MulBackward0", "SumBackward0"]
    users = [(type(node).__name__, edge) for node, edges in nodes.items() for edge in edges]
    users = [(name, i) for name, (other, i) in users if getattr(other, "variable", None) is x]
    assert len(dict(_torch.iter_nodes([z.grad_fn], {y.grad_fn}))) == 4  # without exp's own, and with the leaf by the sum
    assert len(dict(_torch.iter_nodes([y.square().grad_fn], {y.grad_fn}))) == 1
    assert sorted(users) == [("AddBackward0", 0), ("ExpBackward0", 0)]
    seen: list[Any] = []
    handles = [node.register_hook(lambda grads, _, node=node: seen.append((type(node).__name__, grads))) for node in nodes]
    handles.pop([*nodes].index(z.grad_fn)).remove()
    z.backward(inputs=[x])
    assert {name for name, _ in seen} == {*names} - {"SumBackward0"}
    assert torch.equal(dict(seen)["ExpBackward0"][0], 2 * y.detach() * y.detach())
    assert list(_torch.iter_nodes([x.detach().grad_fn])) == []


def test_followed_at_which_levels() -> None:
    """``detach`` ends derivatives of all levels, ``.data`` that of its own, ``no_grad`` those of reverse mode, views too."""
    keys: list[Any] = []
    seen: dict[str, dict[str, frozenset[int]]] = {}

    def inner(name: str) -> Callable[[Tensor], Tensor]:
        def f(x: Tensor) -> Tensor:
            keys[:] = [_torch.dispatch_keys()]
            with torch.no_grad():
                cut = {"view": x.view(1, 2), "made": x * 1}
            some = {"itself": x, "detach": x.detach(), "data": x.data, **cut}
            seen[name] = {kind: _torch.tracking_levels(t, keys[0]) for kind, t in some.items()}

            def pack(t: Tensor) -> Tensor:  # from within autograd, where other keys are on
                seen[name]["saved"] = _torch.tracking_levels(t, keys[0])
                return t

            with _torch.saved_tensor_hooks(pack, lambda t: t):
                return (x.detach() * x).sum()

        return f

    x = torch.ones(2)
    grad(lambda y: grad(inner("reverse"))(y).sum())(x)
    jvp(lambda y: grad(inner("forward"))(y), (x,), (x,))
    grad(inner("plain"))(x.clone().requires_grad_())
    ones, none = frozenset({1}), frozenset()
    assert seen["reverse"] == {"itself": ones, "detach": none, "data": ones, "view": none, "made": none, "saved": none}
    assert seen["forward"] == {"itself": ones, "detach": none, "data": ones, "view": ones, "made": ones, "saved": none}
    assert seen["plain"]["itself"] == frozenset({0})
    assert seen["plain"]["detach"] == none


def test_followed_after_a_transform_has_ended() -> None:
    """Its keys are asked with, and have no stack to go to."""
    f, keys = asking(lambda x: _torch.dispatch_keys())
    with torch.autograd.forward_ad.dual_level():
        plain = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        vjp(f, plain)
        assert _torch.tracking_levels(_torch.wrap_for_ended_level(plain), keys[0]) == frozenset({0})


def test_constants_come_back_wrapped() -> None:
    """What returns its argument returns another wrapper of a constant, and what is followed itself."""
    constant, seen = torch.ones(2), []

    def f(x: Tensor) -> Tensor:
        moved, kept = constant.to(x.device), x.to(x.device)
        made = constant * 1
        seen[:] = [moved is constant, _torch.unwrap_untracked(moved) is constant, kept is x, _torch.unwrap_untracked(x) is x]
        seen.append(_torch.unwrap_untracked(made) is constant)
        return (x * moved).sum()

    grad(f)(torch.ones(2))
    assert seen == [False, True, True, True, False]
    jvp(grad(f), (torch.ones(2),), (torch.ones(2),))
    assert seen == [False, True, True, True, False]


def test_functions_lose_subclasses() -> None:
    """Those in a transform; a class that wraps another tensor has a dispatch of its own."""

    class Tagged(Tensor):
        pass

    class Wraps(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    Doubles = function(lambda x: (x * 2).as_subclass(Tagged), _torch.Function, backward=lambda ctx, g: g * 2)
    classes: list[type[Tensor]] = []

    def f(x: Tensor) -> Tensor:
        classes.append(type(out := Doubles.apply(x)))
        return out.sum()

    f(torch.ones(2).requires_grad_())
    grad(f)(torch.ones(2))
    assert classes == [Tagged, Tensor]
    kinds = [_torch.is_attribute_subclass(cls) for cls in (Tagged, Tensor, torch.nn.Parameter, torch.nn.Buffer, Wraps)]
    assert kinds == [True, False, False, False, False]


def test_function_modes() -> None:
    """Those of the user and of funshard, the innermost last; while torch calls a handler they are not active."""

    class Notes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(_torch.function_modes(own=False))
            return func(*args, **(kwargs or {}))

    seen: list[list[TorchFunctionMode]] = []
    with torch.device("meta"), Notes() as mode, _torch.use_attention(_torch.math_attention):
        assert _torch.function_modes(own=False) == [mode]
        assert [*map(type, _torch.function_modes(own=True))] == [_torch.ReplaceAttention]
        torch.ones(1)
    assert seen
    assert not any(seen)
    assert not _torch.function_modes(own=False)


def test_a_dispatch_mode() -> None:
    """It sees operators below all transforms; what it keeps by `same_memory` has no graph, and counts the same versions."""

    class Keeps(_torch.DispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            assert isinstance(func, _torch.OpOverload)
            if func is torch.ops.aten.sin.default:
                self.kept.append(_torch.detach_in_dispatch(out))
            return out

    x = torch.ones(2, requires_grad=True)
    for run in (torch.sin, torch.vmap(torch.sin), lambda x: torch.func.vjp(torch.sin, x)[0]):
        with Keeps() as mode:
            out = run(x)
        (kept,) = mode.kept
        assert (kept.requires_grad, _torch.version(kept)) == (False, 0)
        assert _torch.shares_memory(kept, _torch.unwrap(out))
        with torch.no_grad():
            out.mul_(2)
        assert _torch.version(kept) == 1


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
    others = {aten.view.default, aten.split.Tensor, aten.relu_.default, aten.mm.out, aten.bernoulli_.float}
    others |= {aten.empty.memory_format, aten.empty_like.default, aten.native_batch_norm.default, aten._foreach_add_.Scalar}
    others |= {aten._native_batch_norm_legit.default, *(op.default for op in (sent.all_reduce, sent.wait_tensor))}
    others |= {torch.ops.c10d.barrier.default}
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
    in_place = [lambda x: x.data.clamp_(0, 0), lambda x: x.detach().numpy().fill(0), lambda x: x[:1].zero_()]
    for write in (*in_place, lambda x: torch.add(x, 1, out=x.view(-1))):
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


def test_storage_id() -> None:
    """`_torch.storage_id` is that of ``untyped_storage()``, of views, fake and meta tensors too, and makes no Python object."""
    x = torch.ones(4)
    with _torch.fake_mode():
        fake = torch.ones(4)
    for tensor in (x, x[1:], fake, torch.empty(4, device="meta")):
        assert _torch.storage_id(tensor) == tensor.untyped_storage()._cdata
    y = torch.ones(4)
    before = sum(type(known) is torch.UntypedStorage for known in gc.get_objects())
    _torch.storage_id(y)
    assert sum(type(known) is torch.UntypedStorage for known in gc.get_objects()) == before


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


def test_counter() -> None:
    """A tensor whose memory has been exchanged counts on with the one it is of, and with its views."""
    x = torch.ones(3)
    before = weakref.ref(x.untyped_storage())
    counter = _torch.make_version_probe(x)
    x.view(3, 1).add_(1)
    assert _torch.version(counter) == _torch.version(x) == 1
    del x
    assert before() is None
    torch.func.grad(lambda x: (_torch.version(_torch.make_version_probe(x.add(1).mul_(2))) == 1) * x.sum())(torch.ones(3))


def test_views_of_leaves() -> None:
    """A view knows what it is of: a leaf that is differentiated, or a frozen parameter."""
    leaf, other = torch.ones(2, 3, requires_grad=True), nn.Parameter(torch.ones(3), requires_grad=False)
    made = leaf * 2
    for view in (lambda x: x.view_as(x), lambda x: x.t()[1:], lambda x: x.view(-1).split(2)[0]):
        assert _torch.is_leaf_view(view(leaf))
        assert not _torch.is_leaf_view(view(made))
    assert all(map(_torch.is_leaf_view, (leaf, other, other[1:])))
    assert not _torch.is_leaf_view(leaf.detach() * 2)
    assert not _torch.is_leaf_view(leaf.clone())


def test_what_has_ended_twice() -> None:
    """torch sees through the wrapper of one transform that has ended; `living` through those of several."""
    kept: list[Tensor] = []
    x = torch.randn(3)

    def f(x: Tensor) -> Tensor:
        kept.append(x.tanh())
        return kept[-1].sum()

    grad(lambda x: grad(f)(x).sum())(x)
    refused(RuntimeError, "escaped", lambda: grad(lambda x: (x * kept[0]).sum())(x))
    torch.testing.assert_close(grad(lambda x: (x * _torch.unwrap_dead(kept[0])).sum())(x), x.tanh())
    assert _torch.unwrap_dead(x) is x


def test_operators_that_were_taken_apart() -> None:
    """A node of the compiler's graph knows the operator it was traced as: a copy of that, which is not equal to it."""
    from torch._dynamo.backends.common import aot_autograd

    from funshard._torch.compiler import original_op

    seen: dict[str, Any] = {}

    def look(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        seen.update((str(node.target), original_op(node)) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    table = torch._decomp.get_decompositions([torch.ops.aten.silu])
    compiler = aot_autograd(fw_compiler=look, decompositions=table)
    torch.compile(lambda x: F.silu(x).exp(), backend=compiler)(torch.ones(2))
    assert seen["aten.exp.default"] is torch.ops.aten.exp.default
    assert "aten.silu.default" not in seen
    assert seen["aten.sigmoid.default" if "aten.sigmoid.default" in seen else "aten.neg.default"] is torch.ops.aten.silu.default


def test_a_separate_tensor() -> None:
    """It computes as any other, and refuses what is about its own node: a gradient by it, hooks."""

    def check(x: Tensor) -> Tensor:
        y = 2 * x
        y.__class__, vars(y)["parameter"] = _torch.SeparateTensor, "w"
        assert type(y + 1) is type(F.linear(y, y[None])) is Tensor
        for use in (lambda: torch.autograd.grad(y.sum(), [x, y]), lambda: y.register_hook(print), lambda: y.retain_grad()):
            refused(RuntimeError, "parameter 'w' is read in forward where its module computes with another", use)
        return y.square().sum()

    assert torch.func.grad(check)(torch.ones(2)).equal(torch.full((2,), 8.0))
    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(check(x), x)[0].equal(torch.full((2,), 8.0))


def test_a_hook_that_no_mode_sees() -> None:
    """A mode that refuses hooks; and a gradient by one result of a node calls the hooks of the others, with None."""

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not Tensor.register_hook
            return func(*args, **(kwargs or {}))

    x, grads = torch.ones(2, requires_grad=True), list[Tensor | None]()
    with Refusing():
        y, z = (2 * x).unbind()
        _torch.add_gradient_hook(y, grads.append)
        torch.autograd.grad(z.square(), z)
        torch.autograd.grad(y.square(), y)
        with pytest.raises(AssertionError):
            y.register_hook(grads.append)
    assert grads[0] is None
    assert grads[1] is not None


def test_a_forbidden_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any mode it answers questions, and computes nothing until it is allowed again."""

    def check(x: Tensor) -> Tensor:
        tensor = torch.ones(2)
        allow = _torch.forbid([tensor])
        assert tensor.shape == tensor.size() == (2,)
        assert len(tensor) == 2
        assert {tensor: 1}[tensor] == 1
        joins = [lambda s: torch.cat([torch.ones(2), s]), lambda s: F.linear(torch.ones(1, 2), weight=s[None])]
        for use in (*joins, lambda s: s + 1, lambda s: torch.ones(2) @ s, lambda s: s.data, torch.ops.aten.neg):
            refused(RuntimeError, "the message", lambda: use(tensor))
        allow()
        assert tensor.sum() == 2
        return x.sum()

    monkeypatch.setattr(_torch.ForbiddenTensor, "explain", [lambda _: "the message"])
    check(torch.ones(2))
    torch.func.grad(check)(torch.ones(2))
    torch.func.vmap(check)(torch.ones(3, 2))
    weight = nn.Parameter(torch.ones(2))
    allow = _torch.forbid([weight])
    assert isinstance(weight, nn.Parameter)
    refused(RuntimeError, "the message", lambda: weight * 2)
    allow()
    assert type(weight) is nn.Parameter
    (weight * 2).sum().backward()


LATE = """
import os, sys
from pathlib import Path
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


def test_connect_store(group_of_one: None) -> None:
    """A connection of its own: the first value of a key stays, a counter takes negative numbers, and may be set."""
    store, other = (_torch.connect_store("a", timedelta(seconds=1)) for _ in range(2))
    assert store.compare_set("decision", "", "first") == b"first"
    assert other.compare_set("decision", "", "second") == b"first"
    assert store.add("count", 1 << 62) + store.add("count", -1) == (1 << 63) - 1
    other.set("count", "0")
    assert store.add("count", 2) == 2
    assert not _torch.default_store().check(["count"])


def test_compiler_files_are_on_the_stack() -> None:
    """While a backend compiles, and not while its result runs."""
    seen: list[bool] = []

    def look() -> None:
        seen.append(any(_torch.is_compiler_file(frame.f_code.co_filename) for frame, _ in traceback.walk_stack(None)))

    def backend(graph: Any, inputs: Any) -> Any:
        look()

        def run(*args: Any) -> Any:
            look()
            return graph(*args)

        return run

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert seen == [True, False]


def test_default_store(group_of_one: None) -> None:
    """It is a key-value store, whose wait for a key that nobody sets ends with a RuntimeError in time."""
    store = _torch.default_store()
    store.set("a", "1")
    store.set("b", "2")
    store.wait(["a", "b"], timedelta(seconds=1))
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert store.delete_key("a")
    with pytest.raises(RuntimeError):
        store.wait(["a"], timedelta(seconds=0.01))


def test_group_timeout(group_of_one: None) -> None:
    """That with which it was made."""
    assert dist.group.WORLD is not None
    assert _torch.group_timeout(dist.group.WORLD) == timedelta(seconds=17)


def test_an_unregistered_gloo_backend(group_of_one: None) -> None:
    """It computes what torch.distributed's groups do, is in none of torch's lists, and has the collectives of a backend."""
    names = dict(dist.distributed_c10d._world.pg_names)
    group = _torch.make_unregistered_gloo("a/", 0, 1, timedelta(seconds=5))
    assert dist.distributed_c10d._world.pg_names == names
    x, maximum = torch.tensor([1, -2]), dist.AllreduceOptions()
    maximum.reduceOp = dist.ReduceOp.MAX
    group.allreduce([x], maximum).wait()
    gathered = [torch.empty_like(x)]
    group.allgather([gathered], [x]).wait()
    to_first = dist.GatherOptions()
    to_first.rootRank = 0
    group.gather([gathered], [x], to_first).wait()
    group.broadcast([x], dist.BroadcastOptions()).wait()
    assert [x.tolist(), gathered[0].tolist()] == [[1, -2]] * 2


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


def test_what_reverse_mode_records() -> None:
    """At any level: by torch.func.grad and plain autograd, not by forward mode or vmap; what is computed from it as well."""
    ask, seen = asking(lambda x: [_torch.requires_grad_at_any_level(t) for t in (x, x.sin(), torch.ones(2))])
    x, one = torch.ones(2), torch.ones(2)
    torch.func.grad(ask)(x)
    torch.func.jvp(torch.func.grad(ask), (x,), (one,))
    torch.func.grad(lambda x: torch.func.jvp(ask, (x,), (one,))[1])(x)
    torch.func.grad(lambda x: torch.vmap(ask)(x).sum())(torch.ones(2, 2))
    ask(x.clone().requires_grad_())
    assert seen == [[True, True, False]] * 5
    seen.clear()
    torch.func.jvp(ask, (x,), (one,))
    torch.vmap(ask)(torch.ones(2, 2))
    torch.func.grad(lambda y: y.sum() + ask(x))(x)
    assert not any(map(any, seen))


def test_leaves_of_transforms() -> None:
    """What a transform is given is a leaf of it; what was computed at any level around is none."""
    inner, seen = asking(_torch.is_leaf)

    def outer(x: Tensor) -> Tensor:
        return torch.func.grad(inner)(x).sum() + torch.func.grad(inner)(2 * x).sum()

    torch.func.grad(outer)(torch.ones(2))
    torch.vmap(torch.func.grad(inner))(torch.ones(2, 2))
    leaf = torch.ones(2, requires_grad=True)
    inner(leaf)
    inner(2 * leaf)
    assert seen == [True, False, True, True, False]


# --- torch.compile ---
@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"backend": "inductor", "options": {}, "dynamic": None, "fullgraph": False}),
        ({"mode": "reduce-overhead"}, {"backend": "inductor", "options": {"triton.cudagraphs": True}}),
        ({"fullgraph": True, "dynamic": True, "options": {"max_autotune": True}},) * 2,
    ],
)
def test_options_of_a_compiled_module(given: dict[str, Any], options: dict[str, Any]) -> None:
    module = nn.Linear(2, 2)
    module.compile(**given)
    assert module._compiled_call_impl is not None
    assert _torch.compile_options(module._compiled_call_impl).items() >= options.items()
    module.compile(backend="aot_eager")
    found = _torch.compile_options(module._compiled_call_impl)["backend"]
    assert found is torch._dynamo.lookup_backend("aot_eager")


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_copied_function_compiles_by_itself() -> None:
    """Equal code objects share no compilations."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    copies = [_torch.copy_function(_doubled, "copied") for _ in range(2)]
    assert copies[0].__code__ == copies[1].__code__
    for copied in copies:
        for _ in range(2):
            assert torch.compile(copied, backend="eager")(torch.ones(2)).sum() == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


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


def test_attention_is_replaced() -> None:
    """torch's multi-head attention runs outside of a mode, as its copy does not; and asks for attention by its global name."""

    class Seen(TorchFunctionMode):
        names: tuple[str, ...] = ()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names += (func.__name__,)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    with Seen() as seen:
        out = module(x, x, x, need_weights=False)[0]
    assert "multi_head_attention_forward" in seen.names
    assert "scaled_dot_product_attention" not in seen.names
    calls: list[int] = []

    def twice(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(args))
        return F.scaled_dot_product_attention(*args, **kwargs) * 2

    before = dict(vars(F))
    with _torch.ReplaceAttention(twice):
        assert _torch.current_attention() is twice
        doubled = module(x, x, x, need_weights=False)[0]
        direct = F.scaled_dot_product_attention(x, x, x)
        inside: list[object] = []
        y = x.detach().requires_grad_()
        y.register_hook(lambda _: inside.append(_torch.current_attention()))
        y.sum().backward()
    assert inside == [None]  # torch runs backward outside of all modes
    assert torch.equal(F.scaled_dot_product_attention(x, x, x) * 2, direct)
    assert len(calls) == 2
    assert not torch.allclose(out, doubled)
    assert vars(F) == before


def test_attention_in_plain_operators() -> None:
    """The kernel that sdpa_kernel(MATH) chooses, called by its own name; it takes no mask of bools."""
    x, mask = torch.randn(2, 3, 5, 4), torch.randn(5, 5)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = F.scaled_dot_product_attention(x, x, x, mask, scale=0.3)
    assert torch.equal(_torch.math_attention(x, x, x, mask, 0.0, scale=0.3, enable_gqa=False), want)


def test_a_compiled_function_runs() -> None:
    """`_torch.is_in_traced_function`: after a graph break, too, and not outside of compiled functions."""
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        if x.sum() > 0:  # a graph break
            seen.append(_torch.is_in_traced_function())
        return x.sin()

    assert not _torch.is_in_traced_function()
    torch._dynamo.reset()
    torch.compile(run, backend="eager")(torch.ones(2))
    assert seen == [True]
    run(torch.ones(2))
    assert seen == [True, False]
