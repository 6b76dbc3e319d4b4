"""Law G4: remat is invisible in values, at every order; and what it is for: what stays alive does not grow with the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orders
import pytest
import torch
from collective_log import Collectives, gathers, scatters, world
from depth import at_most, depth, each, every
from gradient_cases import assert_shards_of_mean, cases, penalty
from hypothesis import given, settings
from parity import DERIVATIVES, gradient_of, loss_of, shards_of
from test_memory import Alive, Curved, Held, no_collector
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import funshard as fs

W = torch.randn(4, 4, dtype=torch.float64)
X = torch.randn(3, 4, dtype=torch.float64)
V = W.cos()
Function = Callable[..., Any]


def layer(w: Tensor, x: Tensor) -> Tensor:
    return (torch.tanh(x @ w) @ w).sin()


def squared(f: Function) -> Function:
    return lambda w, x: (f(w, x) ** 2).sum()


def hvp(f: Function) -> Function:
    return lambda w: jvp(lambda w: grad(squared(f))(w, X), (w,), (V,))[1]


ORDERS: dict[str, Callable[[Function, tuple[Tensor, Tensor]], Any]] = {
    **orders.ORDERS,
    "jvp of zero": lambda f, xs: jvp(f, xs, (V, torch._efficientzerotensor(X.shape, dtype=X.dtype))),
    "jacobians": orders.whole_jacobians,
}


@pytest.mark.parametrize("order", ORDERS)
def test_equals_the_function_at_every_order(order: str) -> None:
    class Seen:  # a list would be put back for each run
        calls = 0

    def counted(w: Tensor, x: Tensor) -> Tensor:
        Seen.calls += 1
        return layer(w, x)

    assert_close(ORDERS[order](fs.remat(counted), (W, X)), ORDERS[order](layer, (W, X)), rtol=1e-11, atol=1e-11)
    assert Seen.calls > (order != "value")


def test_plain_forward_mode() -> None:
    """It keeps nothing, so there is nothing to run again; over reverse mode too."""
    for f in (layer, fs.remat(layer)):
        w = W.clone().requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(w, V)
            out = f(dual, X)
            (g,) = torch.autograd.grad((out**2).sum(), dual)
            tangents = forward_ad.unpack_dual(out).tangent, forward_ad.unpack_dual(g).tangent
        assert_close(tangents, (jvp(lambda w: layer(w, X), (W,), (V,))[1], hvp(layer)(W)))


def test_forward_mode_without_grad_mode() -> None:
    """The backward of SiLU is a kernel there that forward-mode AD does not know."""
    f = lambda w: torch.nn.functional.silu(w).sum()  # noqa: E731
    with torch.no_grad():
        got = jvp(grad(fs.remat(f)), (W,), (V,))[1]
    assert_close(got, jvp(grad(f), (W,), (V,))[1])


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_numbers_are_those_of_the_first_run(randomness: str) -> None:
    """Dropout in the function, in grad and in vmap of grad; and what is drawn afterwards."""

    def dropped(w: Tensor, x: Tensor) -> Tensor:
        return layer(w, torch.nn.functional.dropout(x, 0.5))

    def results(f: Function) -> tuple[Any, ...]:
        torch.manual_seed(3)
        xs = torch.stack([X, X, X])
        each = torch.vmap(grad(squared(f)), (None, 0), randomness=randomness)(W, xs)
        return each, grad(squared(f))(W, X), orders.thrice_by_autograd(f, (W, X)), torch.rand(3)

    got = results(fs.remat(dropped))
    assert_close(got, results(dropped))
    assert torch.equal(got[0][0], got[0][1]) == (randomness == "same")


@contextlib.contextmanager
def changed(change: Callable[..., None], to: Any, back: Any, **options: bool) -> Iterator[None]:
    """A default of torch's, within this."""
    change(to, **options)
    try:
        yield
    finally:
        change(back)


class ReadsDefaults(nn.Linear):
    """A layer whose result depends on torch's defaults."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.linspace(0.1, 1.0, 3)
        scale = 2 if made.device.type == "meta" else made.to(x.dtype)
        return torch.tanh(super().forward(x) * scale) * (1 + torch.get_deterministic_debug_mode())


class Doubles(TorchFunctionMode):
    """A mode in which tanh gives other values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.tanh else out


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "dtype": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "device": lambda: torch.device("meta"),
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False, warn_only=True),
    "function mode": Doubles,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@every(around=["forward", "backward", "both"], name=DEFAULTS)
def test_defaults_are_those_of_the_first_run(name: str, around: str) -> None:
    """A default dtype or device, deterministic mode, autocast or a TorchFunctionMode around forward, backward or both."""

    def inside(*places: str) -> contextlib.AbstractContextManager[Any]:
        return DEFAULTS[name]() if around in places else contextlib.nullcontext()

    model, x = nn.Sequential(ReadsDefaults(3, 3), ReadsDefaults(3, 3)), torch.randn(2, 3)
    grads: list[Any] = []
    for remat in (False, True):
        spec, params = shards_of(fs.by_type(ReadsDefaults, p=fs.P(remat=remat)), model)
        params = {key: shard.requires_grad_() for key, shard in params.items()}
        with inside("both"):
            with inside("forward"):
                loss = loss_of(model, spec, x)(params)
            with inside("backward"):
                grads.append(torch.autograd.grad(loss, list(params.values())))
    assert_close(grads[1], grads[0], rtol=0, atol=0)
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert not torch.are_deterministic_algorithms_enabled()


def test_any_pytree_goes_in_and_out() -> None:
    """Constants, whole numbers, None, keywords, an argument that comes back."""

    def f(tree: Mapping[str, Any], scale: float, *, flag: bool) -> Any:
        return {"out": tree["w"] @ tree["x"].T * scale, "same": tree["x"], "where": tree["x"] > 0}, flag, None

    args = ({"w": W, "x": X}, 3.0)
    got, expected = fs.remat(f)(*args, flag=True), f(*args, flag=True)
    assert_close(got[0], expected[0])
    assert got[1:] == (True, None)
    loss = lambda f: lambda w: (f({"w": w, "x": X}, 3.0, flag=False)[0]["out"] ** 2).sum()  # noqa: E731
    assert_close(grad(loss(fs.remat(f)))(W), grad(loss(f))(W))
    with torch.no_grad():
        assert fs.remat(f)(*args, flag=True)[0]["same"] is X


HELD = Held()


def test_only_arguments_are_kept() -> None:
    """What the function computes on its way is gone when it returns, and when its derivative has been computed."""
    for order in (1, 2):
        w = W.clone().requires_grad_()
        with no_collector():
            out = fs.remat(lambda w: (HELD(torch.tanh(w)) ** 2).sum())(w)
            assert HELD.alive() == 0
            for _ in range(order):
                HELD.refs = ()
                (out,) = torch.autograd.grad(out.sum(), w, create_graph=True)
                assert (len(HELD.refs) > 0, HELD.alive()) == (True, 0)


USES: dict[str, Callable[[Function], Any]] = {
    "dropped": lambda loss: loss(W.clone().requires_grad_()),
    "backward": lambda loss: loss(W.clone().requires_grad_()).backward(),
    "grad": lambda loss: grad(loss)(W),
    "grad of grad": lambda loss: grad(lambda w: grad(loss)(w).sum())(W),
}


@pytest.mark.parametrize("way", USES)
def test_arguments_and_results_go_without_the_collector(way: str) -> None:
    """What went in and what came out, with the graph behind them, in every derivative: there are no circles."""
    f = fs.remat(lambda tree: {"out": torch.tanh(tree["h"]), "same": tree})

    def loss(w: Tensor) -> Tensor:
        h = w * 2
        out = f({"h": h})["out"]
        held(h, out)
        return out.sum()

    with no_collector():
        held = Held()
        USES[way](loss)
        assert (len(held.refs) > 0, held.alive()) == (True, 0)


# --- P(remat=True) ---
def rematerialized(policy: fs.Policy, *, every: bool) -> fs.Policy:
    """The policy's units, all or every second one recomputed."""

    def chosen(model: Any) -> fs.PartitionSpec:
        spec = policy(model)
        paths = [*(dict(spec.selected) or {"": spec.root}).items()]
        some = paths if every else paths[1::2]
        again = {path: fs.P(p.axis, remat=True, reshard=p.reshard, align=p.align) for path, p in some}
        return fs.policies.override(policy, fs.by_path(again, p=spec.root))(model) if again else spec

    return chosen


TRANSFORMS = {
    "grad": lambda loss, p, v: grad(loss)(p),
    "fs.grad": lambda loss, p, v: fs.grad(loss)(p),
    "grad of grad": lambda loss, p, v: grad(lambda p: penalty(grad(loss)(p)))(p),
    "hvp": lambda loss, p, v: fs.hvp(loss, p, v),
}


@at_most(1)
@each
@pytest.mark.parametrize("every", [True, False], ids=["all", "some"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@settings(max_examples=depth(5, 300))
@given(case=cases())
def test_recomputed_units_are_invisible(transform: str, every: bool, case: Any) -> None:
    """Any model, any policy, any mesh: the shards of the reference's derivative."""
    model, policy, sizes = case
    exact = transform in ("grad", "fs.grad")
    assert_shards_of_mean((model, rematerialized(policy, every=every), sizes), TRANSFORMS[transform], exact=exact)


MEMORY: dict[str, tuple[int, Callable[..., Any]]] = {
    "grad": (2, TRANSFORMS["grad"]),
    "fs.grad": (2, TRANSFORMS["fs.grad"]),  # one of them holds the gradient that is being reduced, as above
    "grad of grad": (1, TRANSFORMS["grad of grad"]),
    "jvp of grad": (2, TRANSFORMS["hvp"]),
    # one is the last block, which forward leaves to backward
    "double backward": (2, lambda loss, p, v: DERIVATIVES["double backward"](loss)(p)),
    "third": (3, lambda loss, p, v: grad(lambda p: penalty(fs.hvp(loss, p, v)))(p)),
}
"""For each transform, how many buffers of one unit's size are alive at once, exactly."""


def recomputed(blocks: int, **options: int) -> tuple[fs.PartitionSpec, Function, fs.Params]:
    """Blocks that are units of their own, and their loss."""
    model = nn.Sequential(*(Curved(4) for _ in range(blocks)))
    spec, params = shards_of(fs.by_type(Curved, p=fs.P("shard", remat=True)), model)
    return spec, loss_of(model, spec, X, **options), params


@at_most(2)
@each(transform=MEMORY, blocks=[3, 6])
def test_gathered_buffers_alive_do_not_grow_with_the_model(transform: str, blocks: int) -> None:
    """ZeRO-3 memory at every order: a few buffers of one block, however many blocks there are."""
    buffers, compute = MEMORY[transform]
    with world(4):
        spec, loss, params = recomputed(blocks, prefetch=0)
        with no_collector(), Alive() as alive:
            compute(loss, params, params)
        assert alive.peak == buffers * spec.padded_numel(spec.by_key["0"])
        assert alive.now() == []


ONCE = {"fs.grad": fs.grad, "grad": grad, "a pullback": DERIVATIVES["vjp"]}
"""Derivatives that nobody differentiates."""


@pytest.mark.parametrize("way", ONCE)
def test_recomputed_units_are_gathered_ahead(way: str) -> None:
    """In forward and in backward: one ahead, reduced one behind, and the last one stays."""
    with world(4):
        spec, loss, params = recomputed(4)
        with no_collector(), Alive() as alive, Collectives() as log:
            ONCE[way](loss)(params)
        gather, scatter = gathers(spec, "0"), scatters(spec, "0")
        behind = 3 * [*gather, *scatter]  # 2 is gathered and 3 runs and is reduced, 1 is gathered and 2 runs, and so on
        assert log.all == [*4 * gather, *behind, *scatter]
        assert alive.peak <= 3 * spec.padded_numel(spec.by_key["0"])
        assert alive.now() == []


@each(ways=["frozen", "kept"], way=ONCE)
def test_recomputed_units_that_are_frozen_or_kept(ways: str, way: str) -> None:
    """No gradient tells when a frozen unit has been used: it goes when its module has run. A kept one is gathered once."""
    with world(4):
        model = nn.Sequential(*(Curved(4) for _ in range(5)))
        model.requires_grad_(ways == "kept")
        model[0].requires_grad_(True)
        spec, params = shards_of(fs.by_type(Curved, p=fs.P("shard", remat=True, reshard=ways == "frozen")), model)
        trained, frozen = fs.partition(params, spec)
        with no_collector(), Alive() as alive, Collectives() as log:
            ONCE[way](loss_of(model, spec, X, frozen=frozen))(trained)
        gathered = [sent for sent in log.all if sent.op == "all_gather"]
        blocks = alive.peak / spec.padded_numel(spec.by_key["0"])
        assert (len(gathered), blocks <= 3) == ((9, True) if ways == "frozen" else (5, False))
        assert alive.now() == []


def counted_runs(policy: fs.Policy, way: Function) -> int:
    runs = 0

    class Counting(Curved):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return super().forward(x)

    gradient_of(policy, nn.Sequential(Counting(2), Counting(2)), torch.ones(1, 2, dtype=torch.float64), way=way)
    return runs


def test_how_often_a_module_runs() -> None:
    """Once more for its gradient; not at all where nothing is differentiated; the root only where it is the unit."""
    again = fs.P(remat=True)
    assert counted_runs(fs.by_type(Curved, p=again), fs.grad) == 4
    assert counted_runs(fs.by_type(Curved, p=fs.P()), fs.grad) == 2
    assert counted_runs(fs.policies.whole(again), fs.grad) == 4
    assert counted_runs(fs.by_path({"0": again}), fs.grad) == 3
    with torch.no_grad():
        assert counted_runs(fs.by_type(Curved, p=again), lambda f: f) == 2


def test_ignored_and_tied_parameters_have_gradients() -> None:
    """A recomputed module with a weight of a unit outside of it, and one that no unit owns."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)}).double()
    model["b"].weight = model["a"].weight
    model.forward = lambda x: model["c"](torch.tanh(model["b"](torch.tanh(model["a"](x)))))
    x = torch.randn(2, 3, dtype=torch.float64)
    results = []
    for remat in (False, True):
        base = fs.by_path({"b": fs.P(remat=remat), "c": fs.P(remat=remat)}, p=fs.P())
        spec, params = shards_of(fs.policies.ignoring(base, params=["c.bias"]), model)
        model["c"].bias.grad = None
        full = {k: p.requires_grad_() for k, p in params.items()}
        loss_of(model, spec, x)(full).backward()
        results.append(({k: p.grad for k, p in full.items()}, model["c"].bias.grad.clone()))
    assert_close(*results)
    assert results[0][1].abs().sum() > 0


def test_inside_simulated_ranks_and_around_them() -> None:
    """A spec is an argument: its ranks take part in every transform, in whichever order."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    full = {name: p.detach() for name, p in model.named_parameters()}
    xs = torch.randn(3, 4, 2, dtype=torch.float64)

    def loss(params: fs.Params, x: Tensor, spec: fs.PartitionSpec) -> Tensor:
        return loss_of(model, spec, x)(params)

    def total(f: Function, full: fs.Params) -> Tensor:
        def rank(mesh: Any, x: Tensor) -> Tensor:
            spec = fs.policies.always()(model).on(mesh)
            return f(fs.shard(full, spec), x, spec)

        return fs.testing.spmd(rank, 3)(xs).sum()

    assert_close(*(grad(lambda full, f=f: total(f, full))(full) for f in (fs.remat(loss), loss)))
