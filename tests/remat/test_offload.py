"""offload and P(offload="activations"): memory alone changes, values are the same to the last bit, nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import orders
import pytest
import torch
import torch.nn.functional as F
from depth import at_most, depth, each, every, mark_seldom, seldom
from hosted import elsewhere
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import refused, unchanged
from offloaded import counted, everywhere, moved
from parity import DERIVATIVES, WAYS, check_parity, gradient_of, loss_of, numbers, shards_of
from peer_models import MLP, Net
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import funshard as fs
from funshard import P, _torch
from funshard._wire.host import place_slice
from funshard.compress import _compressors

ACTIVATIONS = "activations"


def equal(got: Any, expected: Any) -> None:
    """To the last bit."""
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def nothing_left() -> None:
    """No hooks, and none refused."""
    assert _torch.current_pack_hook() is None
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


# --- any function ---
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: torch.cat([y.sin() * y.cos() for y in x.chunk(2, -1)], -1),
    "transposed": lambda x: (x.t() @ x.exp().clamp(max=2.0)).sin()[:, : x.shape[1]].mean(0) * x,
    "dropout": lambda x: F.dropout(x, 0.5) + x,
    "in place": lambda x: (x * 2).sigmoid_().view_as(x) + (x + 1).mul_(x).exp_(),
    "spans": lambda x: torch.cat([(2 * y).sin() * y.exp() for y in (x * 2).chunk(4, 0)]) * x,
    "unsafe chunks": lambda x: torch.cat([y.sigmoid_() * y for y in (x * 2).unsafe_chunk(2, -1)], -1) * x,
    "unsafe rows": lambda x: (lambda y, z: torch.cat([y.tanh_() * z, z.exp() * y]))(*(x * 2).unsafe_chunk(2)) * x,
    "rows": lambda x: x + x[0] ** 2,
    "expanded": lambda x: x * x[:1].expand_as(x) ** 2,
    "complex": lambda x: torch.view_as_real(torch.complex(*x.unflatten(-1, (2, -1)).unbind(-2)) ** 2).flatten(-2),
    "detached": lambda x: x.detach() * x**3,
    "no grad": lambda x: x * quiet(x),
    "remat": fs.remat(lambda x: x.tanh().exp()),
    "unbound": lambda x: torch.stack([y.sin() * y.exp() for y in (x * 2).unbind()]),
}


@torch.no_grad()
def quiet(x: Tensor) -> Tensor:
    return x.exp()


ORDERS: dict[str, Callable[[Callable[[Tensor], Tensor], tuple[Tensor]], Any]] = {
    **orders.ORDERS,
    "double": lambda f, xs: twice(f, *xs),
    "vmap inside": lambda f, xs: orders.by_a_kept_graph(lambda x: torch.vmap(f, randomness="same")(x[None]).sum(), xs),
}


def twice(f: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """A double backward whose graphs are gone through twice."""
    x = x.detach().requires_grad_()
    y = f(x)
    (again,) = torch.autograd.grad(y, x, retain_graph=True)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    first = torch.autograd.grad(g.square().sum(), x, retain_graph=True)
    return [again, g.detach(), *first, *torch.autograd.grad(g.cos().sum(), x)]


STEP_LISTS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=depth(8, 400))
@given(STEP_LISTS, st.booleans(), st.sampled_from(sorted(ORDERS)), st.integers(0, 400))
@example([("unbound", True)], False, "double", 1 << 26)  # rows of a load that has not left, by a backward's backward, too
def test_values_are_those_of_the_plain_function(steps: list[tuple[str, bool]], whole: bool, order: str, load: int) -> None:
    """Whatever is computed, whichever parts of it are offloaded, in loads of any size, at every order."""

    def run(wrap: Callable[..., Any]) -> Any:
        def f(x: Tensor) -> Tensor:
            for step, mine in steps:
                x = (wrap(STEPS[step], load=load) if mine else STEPS[step])(x)
            return x.square().mean()

        torch.manual_seed(0)
        return ORDERS[order](wrap(f, load=load) if whole else f, (numbers(0, 0, 4),))

    with counted() as copies:
        equal(run(moved), run(lambda f, **_: f))
    assert copies.wait_for_none()
    nothing_left()


def saved(f: Callable[..., Any], *args: Any, **options: Any) -> tuple[int, int]:
    """How many storages go out in a forward and come back in its backward."""
    with counted() as copies:
        moved(f, **options)(*args).sum().backward()
    return copies.out, copies.back


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
W = torch.linspace(-1, 2, 36, dtype=torch.float64).view(6, 6)


def test_a_storage_goes_once_and_what_the_caller_holds_stays() -> None:
    x, w = (t.clone().requires_grad_() for t in (X, W))
    frozen = nn.Linear(6, 6).double().requires_grad_(False)
    plus = X + 1
    assert saved(lambda: (x @ w).sin()) == (1, 0)  # leaves, and a view of one, stay; the last load is there
    assert saved(lambda: x.t().sin().t() @ w.t()) == (1, 0)
    assert saved(lambda x, y: x * y.cos(), x, plus) == (1, 0)  # an argument that nobody differentiates
    assert saved(lambda x: frozen(x * 2).tanh(), x) == (1, 0)
    of_views = saved(lambda x: (lambda y: y.sin() + y.t().cos().t() + y.view(-1).exp().view_as(y))(x * 2), x)
    assert of_views == (2, 0)  # y, its exp
    assert saved(lambda x: sum(y.sin() for y in (x * 2).chunk(3, 1)), x) == (1, 0)
    assert saved(lambda x: sum(y.sin() for y in (x * 2).chunk(4, 0)), x) == (1, 0)
    assert saved(lambda x: (x * 2).sin().exp(), x, at_least=24 * 8) == (2, 0)
    assert saved(lambda x: (x * 2).sin().exp(), x, at_least=24 * 8 + 1) == (0, 0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    assert saved(module, x, at_least=6 * 8 + 1) == (1, 0)
    out, back = saved(lambda x: x.sin().sin().sin().sin(), x * 1, load=1)
    assert (out, back) == (4, 3)  # each in a load of its own; the last is there
    with counted() as copies:
        fs.offload(lambda x: (x * 2).sin().exp(), at_least=0)(x).sum().backward()  # the device is the host
    assert copies.out == 0


def test_changes_in_place() -> None:
    """Refused as ever; saved, changed and saved again, each derivative has, or refuses, what was there when it was saved."""
    x, scale = X.clone().requires_grad_(), X.clone()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y.sin(), y

    out, y = moved(f)(x)
    y.add_(1)
    del y
    words = r"shape \[4, 6\] needed for gradient computation was modified in place.*version 1, exp"
    refused(RuntimeError, words, lambda: out.sum().backward())
    changed = moved(lambda x: (lambda y: y.sin() + y.mul_(2).cos())(x * 2))
    refused(RuntimeError, "modified in place", lambda: changed(x).sum().backward())

    def g(x: Tensor) -> tuple[Tensor, Tensor]:
        before = (x * scale).sin()  # after which the scale has left
        scale.mul_(2)
        return before, x * scale

    before, after = moved(g, load=1)(x)
    equal(torch.autograd.grad(after.sum(), x), (scale,))
    refused(RuntimeError, "modified in place", lambda: before.sum().backward())


def test_nothing_is_left_behind() -> None:
    """After an exception in forward or in backward, and on another thread; another's hooks and checkpoints keep their own."""
    x = X.clone().requires_grad_()

    def fails(x: Tensor) -> Tensor:
        x.sin()
        raise KeyError("inside")

    for transform in (lambda f: f, torch.func.grad, torch.func.vmap, fs.remat):
        with pytest.raises(KeyError):
            transform(moved(fails))(x)
        nothing_left()

    def then_fails(x: Tensor) -> Tensor:
        y = x.sin().exp()
        y.register_hook(lambda _: {}["backward"])
        return y.cos().exp()

    with counted() as copies:
        y = moved(then_fails, load=1)(x)
        with pytest.raises(KeyError):
            y.sum().backward()
        del y
        assert copies.wait_for_none()
    nothing_left()
    equal(WAYS["backward"](lambda p: moved(torch.sin)(p["x"]).sum())({"x": X})[0]["x"], X.cos())

    step = fs.grad(lambda p: moved(lambda x: x.sin().exp(), load=1)(p["x"]).sum())
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(step, [{"x": X}] * 4))
    equal(results, [{"x": X.sin().exp() * X.cos()}] * 4)

    with counted() as copies:
        equal(checkpointed(moved(lambda x: x.sin().exp())), checkpointed(lambda x: x.sin().exp()))
        with torch.autograd.graph.save_on_cpu():
            moved(torch.sin)(x * 2)
        assert copies.out == 0
        held = moved(lambda x: checkpoint(lambda x: x.sin().exp().cos(), x * 2, use_reentrant=False))(x)
        assert copies.out == 1  # what the checkpoint was handed
        held.sum().backward()


def checkpointed(f: Callable[[Tensor], Tensor]) -> Tensor:
    x = X.clone().requires_grad_()
    checkpoint(f, x * 2, use_reentrant=False).sum().backward()
    assert x.grad is not None
    return x.grad


def test_both_orders_of_remat() -> None:
    """Around a remat its arguments go, inside of one what its second run saves: FEATURES.md I2, I3."""
    x = X.clone().requires_grad_()
    insides = lambda x: x.sin().exp().cos()  # noqa: E731
    parts = [fs.remat(insides) for _ in range(3)]
    with counted() as copies:
        y = moved(lambda x: parts[2](parts[1](parts[0](x))), load=1)(x).sum()
        assert (copies.out, copies.alive) == (2, 2)  # the leaf stays
        (outside,) = torch.autograd.grad(y, x)
        assert copies.out == 2
        del y
        gc.collect()
        copies.out = 0
        y = fs.remat(moved(insides))(x).sum()
        assert copies.out == 0
        (inside,) = torch.autograd.grad(y, x)
        assert copies.out == 1  # x is the leaf of the second run, exp's result cos's argument
    equal(outside, torch.autograd.grad(insides(insides(insides(x))).sum(), x)[0])
    equal(inside, torch.autograd.grad(insides(x).sum(), x)[0])


def test_what_is_refused() -> None:
    """Sizes that are none, a transform inside, and the device of an update, which runs where the shards are."""
    words = "offload: {}: expected a whole number of bytes, got {}"
    refused(TypeError, words.format("at_least", 1.5), lambda: fs.offload(torch.sin, at_least=1.5))
    refused(TypeError, words.format("load", True), lambda: fs.offload(torch.sin, load=True))
    refused(ValueError, "offload: load: expected at least 0 bytes, got -1", lambda: fs.offload(torch.sin, load=-1))
    words = r"offload: what is offloaded uses a torch.func transform.*expected none inside"
    refused(RuntimeError, words, lambda: moved(lambda x: torch.func.grad(lambda x: x.sin().sum())(x))(X))
    nothing_left()
    words = "from_torch: an update runs where the shards are: expected no device="
    refused(ValueError, words, lambda: fs.optim.from_torch(torch.optim.SGD, device="cpu", lr=0.1))


def test_inside_torch_compile_it_is_the_function() -> None:
    with counted() as copies:
        compiled = torch.compile(moved(lambda x: x.sin().exp()), fullgraph=True, backend="aot_eager")
        x = X.clone().requires_grad_()
        compiled(x).sum().backward()
    assert copies.out == 0
    equal(x.grad, X.sin().exp() * X.cos())


# --- units ---
class Noisy(MLP):
    """Dropout, a buffer that counts, a normalisation in place."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width).double()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + F.dropout(super().forward(self.norm(x)), 0.3, self.training).mul_(2)


def noisy() -> nn.Module:
    torch.manual_seed(0)
    model = Net(3)
    model.blocks = nn.ModuleList([Noisy(5) for _ in range(3)])
    return model


@contextlib.contextmanager
def ignored_buffers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)
        yield


def seeded_loss(model: nn.Module, spec: fs.PartitionSpec, rank: int) -> Callable[[fs.Params], Tensor]:
    def loss(params: fs.Params) -> Tensor:
        torch.manual_seed(rank)
        with ignored_buffers():
            return fs.functional_call(model, params, (numbers(rank, 0),), spec=spec).square().mean()

    return loss


STEP = {**WAYS, **{name: DERIVATIVES[name] for name in ("double backward", "hvp", "vjp", "grad of grad")}}
FLOAT8 = fs.Codec(lambda x: (x.float(), x.abs().amax()), lambda x, scale: x.to(scale.dtype) + 0 * scale)
PS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "kept": {"reshard": False},
    "recomputed": {"remat": True},
    "mixed": {"precision": fs.Precision(param=torch.float32, reduce=torch.float64)},
    "narrow": {"precision": fs.Precision(param=torch.float32, reduce=torch.float32)},
    "encoded": {"precision": fs.Precision(codec=FLOAT8)},
    "replicated": {"axis": None},
}
IN_GRAPHS = ("fs", "backward", "autograd.grad", "double backward")
"""The ways in which saved tensors leave: torch.func keeps what it saves on the device."""


def p_of(which: str, **more: Any) -> P:
    return P(**{"axis": "shard", **PS[which], **more})


@at_most(4)
@each(to=[ACTIVATIONS, "params"], which=PS, way=mark_seldom(STEP, "fs", "backward", "hvp", "torch.func"))
@real_ranks(2)
def test_units_on_real_ranks(rank: int, to: str, which: str, way: str) -> None:
    """Two ranks, dropout and buffers included: the bits of the same units without offload."""
    model = noisy()
    with unchanged(model):
        plain, params = shards_of(fs.by_type(Noisy, p=p_of(which)), model)
        expected = STEP[way](seeded_loss(model, plain, rank))(params)
        with elsewhere() as slices, everywhere() as saved:
            spec, shards = shards_of(fs.by_type(Noisy, p=p_of(which, offload=to)), model)
            equal(shards, params)
            equal(STEP[way](seeded_loss(model, spec, rank))(shards), expected)
            equal(fs.unshard(shards, spec), fs.unshard(params, plain))
        if to == ACTIVATIONS:
            assert (saved.out > 5) is (way in IN_GRAPHS)
        else:
            assert slices.beside + slices.nodes > 6
            assert slices.beside > 6 or way in ("hvp", "grad of grad")
    assert saved.wait_for_none()
    nothing_left()


class OffloadsInside(MLP):
    """Offloads parts of what it computes, with its own weights."""

    wrap: Any = staticmethod(moved)

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(super().forward)(x) + self.wrap(lambda x: (x * self.out_proj.weight.sum()).tanh())(x)


@real_ranks(2)
def test_a_function_that_forward_offloads(rank: int) -> None:
    model = nn.Sequential(OffloadsInside(5), OffloadsInside(5))
    with counted() as copies:
        got = gradient_of(fs.by_type(MLP), model, numbers(rank, 0))
    assert copies.out > 2
    with mock.patch.object(OffloadsInside, "wrap", lambda self, f: f):
        equal(got, gradient_of(fs.by_type(MLP), model, numbers(rank, 0)))


@seldom
@real_ranks(2)
def test_compiled_and_offloaded_as_a_whole(rank: int) -> None:
    """fs.compile decides for itself, and offload around the call moves all."""
    model, x = Net(2), numbers(rank, 0)
    plain, spec = (fs.by_type(MLP, p=P("shard", offload=to))(model).bound for to in (None, ACTIVATIONS))
    params, loss = fs.shard(model, spec), loss_of(model, spec, x)
    expected = fs.grad(loss_of(model, plain, x))(params)
    with everywhere() as copies:
        torch._dynamo.reset()
        equal(fs.compile(fs.grad(loss), backend="aot_eager")(params), expected)
        assert copies.out == 0
        equal(fs.grad(moved(loss_of(model, plain, x)))(params), expected)
        assert copies.out > 4
        model.blocks[0].register_forward_hook(lambda module, args, out: torch.func.grad(torch.sum)(out))
        with pytest.raises(RuntimeError, match=r"torch\.func transform, .* torch refuses where saved tensors are replaced"):
            fs.grad(loss)(params)
    nothing_left()


# --- PEER_TESTS.md 16 ---
@every(options=[{"offload": ACTIVATIONS}, {"offload": ACTIVATIONS, "remat": True}, {"remat": True}])
@real_ranks(2)
def test_fsdp_checkpoint(rank: int, options: dict[str, Any]) -> None:
    """Losses, gradients and parameters over steps are the averaged plain model's: offloaded, recomputed, or both."""
    spec = fs.by_type(Noisy, p=P("shard", **options))
    model = noisy().eval()  # both runs draw other numbers
    with everywhere() as copies, ignored_buffers():
        check_parity(rank, model, spec(model), steps=3)
    assert (copies.out > 0) is bool(options.get("offload"))


# --- P(offload="params"): shards, gradients and the optimizer's state rest on the host; values are the same ---
PARAMS = "params"


@real_ranks(4)
def test_hybrid(rank: int) -> None:
    """Two axes, bound one after the other: a slice leaves once it is reduced over both."""
    mesh = mesh_of(2, 2)
    model, x = Net(3), numbers(rank, 0)
    call = lambda p, spec, **options: fs.functional_call(model, p, (x,), spec=spec, **options).square().mean()  # noqa: E731
    narrow = fs.Precision(param=torch.float32, reduce=torch.float32)
    for p in (P("shard"), P("shard", precision=narrow), P(("replicate", "shard"))):
        plain, params = shards_of(fs.by_type(MLP, p=p), model, mesh)
        with elsewhere():
            spec = fs.by_type(MLP, p=P(p.axis, precision=p.precision, offload=PARAMS))(model).on(mesh)
            equal(fs.grad(call)(params, spec), fs.grad(call)(params, plain))
            if p.axis == "shard" and not p.precision:
                firsts = [fs.grad(call)(params, s, reduce_axes="shard") for s in (spec, plain)]
                equal(*(fs.reduce_grads(g, s, reduce_axes="replicate") for g, s in zip(firsts, (spec, plain), strict=True)))


# --- around the step ---


COMPRESSORS = {
    "exact": fs.compress.exact(),
    "unreduced": fs.compress.exact(()),
    "quantize": fs.compress.quantize(5),
    "powersgd": fs.compress.powersgd(2, min_compression_rate=0.5),
    "post local": fs.compress.switch(1, fs.compress.exact(), fs.compress.exact(())),
}


@real_ranks(2)
def test_averages_on_real_ranks(rank: int) -> None:
    """The bits of the same units without offload: of a block that is split, one that is not, and the rest."""
    model, by = Net(3), torch.tensor(rank + 1.0).double()
    full = {name: p.detach() + by * p.detach().cos() for name, p in model.named_parameters()}  # that drifted apart

    def averaged(offload: Any) -> Any:
        spec = fs.by_path({"blocks.0": P("shard", offload=offload), "blocks.1": P(offload=offload)})(model).bound
        (init, update), shards = fs.averaging.periodic(spec, 2), {key: x + by for key, x in fs.shard(model, spec).items()}
        first = update(shards, init())
        return first, update(*first), fs.averaging.average(full, spec)

    expected = averaged(None)
    with elsewhere():
        equal(averaged(PARAMS), expected)
        with mock.patch.object(fs.collectives.Mesh, "device_type", "another"):  # than that of the shards
            equal(averaged(PARAMS), expected)


@every(axis=["shard", None], name=COMPRESSORS)
def test_compressed_gradients_are_where_the_shards_are(monkeypatch: pytest.MonkeyPatch, name: str, axis: str | None) -> None:
    """With "meta" in the place of the host."""
    monkeypatch.setattr(_compressors, "HOST", torch.device("meta"))
    model, compressor = Net(2), COMPRESSORS[name]
    spec = fs.by_path({"blocks.0": P(axis, offload=PARAMS), "blocks.1": P(axis)})(model)
    with elsewhere():
        grads = {name: p.detach() for name, p in model.named_parameters()}
        shards, _ = compressor.reduce(grads, compressor.init(spec.bound), spec)
    assert {key: x.device.type for key, x in shards.items()} == {"": "cpu", "blocks.0": "meta", "blocks.1": "cpu"}


# --- what is refused ---
def test_a_shard_on_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 says of CPUOffloadPolicy: "Found following parameters on non-CPU device"."""
    monkeypatch.setattr(fs.collectives.Mesh, "device", torch.device("cuda", 0))
    model = Net(2)
    spec = fs.by_type(MLP, p=P("shard", offload=PARAMS))(model).on({"shard": 1})

    class There(Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 0)

    params = {key: torch.zeros(spec.shard_numel(spec.by_key[key]), dtype=torch.float64) for key in spec.by_key}
    params["blocks.1"] = params["blocks.1"].as_subclass(There)
    message = r"unit 'blocks\.1' has P\(offload=\"params\"\): expected its shard on the host, .* to cuda:0, got it on cuda:0; "
    refused(ValueError, message, lambda: fs.functional_call(model, params, (numbers(0, 0),), spec=spec))
    refused(ValueError, message, lambda: fs.unshard(params, spec))
    refused(ValueError, message, lambda: fs.param_views(params, spec, rank=0))
    monkeypatch.setattr(fs.collectives.Mesh, "device", None)
    whole = {name: p.detach().as_subclass(There) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"expected a mesh that says on which device it is used, got sizes \{'shard': 1\}"):
        place_slice(next(iter(whole.values())), spec.units[1], spec.bound_mesh)


# --- the peer's rows of CPU offload (FSDP2's CPUOffloadPolicy) ---
@pytest.mark.parametrize("which", ["sharded", "kept"])
@real_ranks(2)
def test_peer_train_parity(rank: int, which: str) -> None:
    """test_train_parity_*_cpu_offload: losses, gradients and parameters are those of the averaged plain run, for five steps."""
    with elsewhere() as copies:
        spec = fs.by_type(MLP, p=p_of(which, offload=PARAMS))(Net(3)).bound
        torch.manual_seed(0)
        check_parity(rank, Net(3), spec)
        assert copies.beside > 5 * 3


@real_ranks(2)
def test_grad_acc_cpu_offload(rank: int) -> None:
    """With test_gradient_accumulation[offload]: reduced at each micro-batch, or once."""
    torch.manual_seed(0)
    model = Net(3)
    with elsewhere():
        spec, shards = shards_of(fs.by_type(MLP, p=P("shard", offload=PARAMS)), model)
        grads, full = [fs.grad(loss_of(model, spec, numbers(rank, i))) for i in range(3)], fs.unshard(shards, spec)
        each_, once = ([grad(params) for grad in grads] for params in (shards, full))
        total, summed = ({key: sum(g[key] for g in some) for key in some[0]} for some in (each_, once))
        for key, g in fs.reduce_grads(summed, spec).items():
            torch.testing.assert_close(g, total[key], rtol=1e-9, atol=1e-12)
            assert g.device.type == "cpu"


@real_ranks(2)
def test_dp_state_dict_cpu_offload(rank: int) -> None:
    """What is loaded has to be on the host, and trains on from there."""
    torch.manual_seed(0)
    model, x = Net(2), numbers(rank, 0)
    with elsewhere():
        spec, params = shards_of(fs.by_type(MLP, p=P("shard", offload=PARAMS)), model)
        (init, update), loss = fs.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True), loss_of(model, spec, x)
        state = init(params)
        params, state = update(fs.grad(loss)(params), state, params)
        full = fs.unshard(params, spec, rank0_only=True, offload_to_cpu=True)
        loaded = fs.shard(full if rank == 0 else None, spec, src=0)
        equal(loaded, params)
        equal(update(fs.grad(loss)(loaded), state, loaded), update(fs.grad(loss)(params), state, params))
