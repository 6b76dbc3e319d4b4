"""update_in_backward: the step of accumulate and an optimizer, unit by unit while backward runs; what is alive meanwhile."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from collective_log import world
from depth import at_most, depth, each, mark_seldom
from gradient_cases import agree, calls, cases, models, penalty, values
from hypothesis import given, settings
from hypothesis import strategies as st
from models import module_class, refused
from parity import numbers, shards_of
from peer_models import MLP, Net
from ranks import mesh_of, real_ranks
from test_accumulate import OTHERWISE, STRATEGIES, Some, close, policy, used_otherwise
from test_memory import no_collector
from torch import Tensor, nn

import funshard as fs
from funshard import P

MICRO = [1, 3]
ADAM = {"lr": 0.1, "weight_decay": 0.1}
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "previous": {"max_norm": 0.01, "clip": "previous", "norm": torch.tensor(0.5)},
    "first": {"max_norm": 0.01, "clip": "previous"},
}
USUAL = ["shard", "kept", "replicated", "all axes", "fp16", "bf16 reduced", "remat"]


def reference(
    update: Callable[..., Any], loss: Callable[..., Tensor], params: fs.Params, state: Any, batches: Any, **options: Any
) -> tuple[Any, Any, Tensor, Tensor]:
    """accumulate, clipping and the update of all units, one after the other."""
    clip = {name: options.pop(name) for name in ("max_norm", "clip", "norm") if name in options}
    grads, value = fs.accumulate(loss, params, batches, **options)
    norm = fs.optim.global_norm(grads, options["spec"])
    by = clip.get("norm")
    if "max_norm" in clip and by is not None:
        scale = (clip["max_norm"] / (by + 1e-6)).clamp(max=1)
        grads = {key: g * scale.to(g.dtype) for key, g in grads.items()}
    return *update(grads, state, params), value, norm


def same(got: fs._steps.in_backward.StepResult, expected: Any, clip: Mapping[str, Any], tolerance: float = 1e-9) -> None:
    params, state, value, norm = expected
    close(got.params, params, tolerance)
    for key in params:
        close(got.state[key], state[key], tolerance)
    torch.testing.assert_close(got.value, value)
    assert (got.norm is None) == ("max_norm" not in clip)
    if got.norm is not None:
        torch.testing.assert_close(got.norm, norm, rtol=tolerance, atol=tolerance, check_dtype=False)


# --- equal to accumulate and the update ---
@settings(max_examples=depth(6, 300))
@given(cases(st.one_of(models(), calls())), st.sampled_from(MICRO), st.sampled_from(sorted(CLIPS)))
def test_of_any_model_on_any_mesh(case: Any, count: int, clip: str) -> None:
    """With a penalty on shards, on simulated ranks."""
    model, of, sizes = case
    t = values(model, exact=False)
    xs = torch.linspace(0.3, 1, torch.Size(sizes.values()).numel() * count).double().view(-1, count)
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)

    def run(mesh: fs.collectives.Mesh, x: Tensor) -> Any:
        spec = of(model).on(mesh)
        params = fs.shard(t, spec)
        loss = lambda p, x: fs.functional_call(model, p, x, spec=spec) + penalty(p)  # noqa: E731
        got = fs.update_in_backward(update, loss, params, init(params), x.unbind(), spec=spec, **CLIPS[clip])
        want = reference(update, loss, params, init(params), x.unbind(), spec=spec, **CLIPS[clip])
        return (got.params, got.value), (want[0], want[2])

    (params, value), (expected, mean) = fs.testing.spmd(run, sizes)(xs)
    agree(params, expected, exact=False)
    torch.testing.assert_close(value, mean)


@at_most(6)
@each(donate=[False, True], clip=CLIPS, count=MICRO, shape=[(2,), (2, 2)], strategy=mark_seldom(STRATEGIES, *USUAL))
@real_ranks(lambda shape: torch.Size(shape).numel())
def test_on_ranks(rank: int, shape: tuple[int, ...], strategy: str, count: int, clip: str, donate: bool) -> None:
    """Every strategy, with an unused unit: params, state, value and norm."""
    p = STRATEGIES[strategy]
    model = Some()
    spec = policy(p, P("shard"))(model).on(mesh_of(1, 2) if p.axes[1:] and len(shape) == 1 else mesh_of(*shape))
    init, update = fs.optim.from_torch(torch.optim.AdamW, donate=donate, **ADAM)
    params = fs.shard(model, spec)
    batches, options = [numbers(rank, i) for i in range(count)], {"spec": spec, **CLIPS[clip]}
    loss = lambda p, x: (fs.functional_call(model, p, (x,), spec=spec).double() ** 2).mean()  # noqa: E731
    state = init(params)
    for _ in range(2):  # from state that is not zeros
        own = torch.utils._pytree.tree_map(torch.clone, (params, state))
        expected = reference(fs.optim.from_torch(torch.optim.AdamW, **ADAM).update, loss, *own, batches, **options)
        before = {key: (x.clone(), x, x.data_ptr()) for key, x in params.items()}
        got = fs.update_in_backward(update, loss, params, state, batches, **options)
        same(got, expected, CLIPS[clip], 1e-9 if p.precision is None or "codec" in strategy else 1e-2)
        for key, (old, kept, at) in before.items():
            assert (got.params[key].data_ptr() == at) is donate
            if not donate:
                assert torch.equal(old, kept)
        params, state = got.params, got.state


@at_most(2)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    "how", mark_seldom(OTHERWISE, "twice", "teacher", "computed", "step inside", "gradient of the input", "remat")
)
@real_ranks(2)
def test_units_used_otherwise(rank: int, how: str, remat: bool) -> None:
    """Losses whose units get gradients from several places: each is updated once, with all of them."""
    model = Some()
    spec = policy(STRATEGIES["remat" if remat else "shard"], P("shard"))(model).bound
    params, teacher = fs.shard(model, spec), fs.shard(Some(), spec)
    loss = used_otherwise(how, model, spec, lambda x: fs.functional_call(model, teacher, (x,), spec=spec))
    told: list[str] = []
    init, plain = fs.optim.from_torch(torch.optim.AdamW, **ADAM)
    state = init(params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        told.extend(grads)
        return plain(grads, state, params)

    for count in MICRO:
        batches = [numbers(rank, i) for i in range(count)]
        got = fs.update_in_backward(update, loss, params, state, batches, spec=spec)
        same(got, reference(plain, loss, params, state, batches, spec=spec), {})
        assert sorted(told) == sorted(params)
        told.clear()


def without_gradient(self: Any, x: Tensor) -> Tensor:
    """A module runs twice, and one once: of each, backward does not come to a run."""
    h = self.first(x)
    out = self.twice(h)
    out = out + self.twice(h).detach()
    self.unused(h)
    return self.last(out)


@real_ranks(2)
def test_recomputed_runs_without_gradient(rank: int) -> None:
    """A unit is updated when its gradient is reduced, although the loss does not depend on its last run."""
    names = ("first", "twice", "unused", "last")
    model = module_class("M", lambda: {name: nn.Linear(3, 3, dtype=torch.float64) for name in names}, without_gradient)()
    group = fs.policies.by_group(["twice", "unused"], p=P("shard", remat=True))
    for units in (fs.by_type(nn.Linear, p=P("shard", remat=True)), fs.policies.override(fs.by_type(nn.Linear), group)):
        spec = units(model).bound
        params, (init, update) = fs.shard(model, spec), fs.optim.from_torch(torch.optim.AdamW, **ADAM)
        loss = lambda p, x: (fs.functional_call(model, p, (x,), spec=spec) ** 2).mean()  # noqa: E731
        batches, state = list(torch.randn(2, 4, 3, dtype=torch.float64)), init(params)
        for clip in ({}, CLIPS["previous"]):
            got = fs.update_in_backward(update, loss, params, state, batches, spec=spec, **clip)
            same(got, reference(update, loss, params, state, batches, spec=spec, **clip), clip)


def test_under_a_transform() -> None:
    """The gradient of what a step gives with respect to what it was given, as learning to learn has it."""
    model = MLP(3)
    (spec, params), x = shards_of(fs.policies.whole(), model), torch.linspace(-1, 1, 6).double().view(2, 3)
    init, update = fs.optim.sgd(0.1, momentum=0.9)
    loss = lambda p, x: (fs.functional_call(model, p, (x,), spec=spec) ** 2).mean()  # noqa: E731

    def after(p: fs.Params) -> Tensor:
        return loss(fs.update_in_backward(update, loss, p, init(p), [x], spec=spec).params, x)

    def expected(p: fs.Params) -> Tensor:
        return loss(update(torch.func.grad(loss)(p, x), init(p), p)[0], x)

    close(torch.func.grad(after)(params), torch.func.grad(expected)(params))


# --- what is alive ---
def lived(p: P, in_flight: int, count: int) -> tuple[list[str], int]:
    """In which order units are updated and blocks' backward is over, and how many gradients are alive at most at an update."""
    with world(8):
        model = Net(blocks=5)
        (spec, params), batches = shards_of(fs.by_type(MLP, p=p), model), [numbers(0, i) for i in range(count)]
        events: list[str] = []
        alive: list[weakref.ref[Any]] = []
        most = [0]

        def loss(p: fs.Params, x: Tensor) -> Tensor:
            def told(module: Any, _: Any, out: Any, name: str = "") -> None:
                if out.requires_grad:
                    out.register_hook(lambda _: events.append(f"backward {name}"))

            handles = [
                b.register_forward_hook(lambda *a, i=i: told(*a, name=f"blocks.{i}")) for i, b in enumerate(model.blocks)
            ]
            out = (fs.functional_call(model, p, (x,), spec=spec, in_flight=in_flight) ** 2).mean()
            for handle in handles:
                handle.remove()
            return out

        def update(grads: Any, state: Any, params: Any) -> Any:
            events.extend(f"update {key}" for key in grads)
            alive.extend(weakref.ref(g.untyped_storage()) for g in grads.values())
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            return params, state

        with no_collector():
            fs.update_in_backward(update, loss, params, dict.fromkeys(params), batches, spec=spec)
        return events, most[0]


@each(
    p=mark_seldom([P("shard"), P("shard", reshard=False), P("shard", remat=True)], P("shard"), P("shard", remat=True)),
    in_flight=[1, 2],
)
def test_updates_run_in_backward(p: P, in_flight: int) -> None:
    """A unit's update follows the backward of ``in_flight`` units before it, and its gradient goes with it."""
    events, most = lived(p, in_flight, 1)
    assert most == 1  # those under way are not handed on yet
    updates = [event for event in events if event.startswith("update blocks")]
    assert updates == [f"update blocks.{i}" for i in reversed(range(5))]
    for i in range(4, in_flight, -1):  # where blocks.k's backward begins, blocks.k + 1's gradient is complete
        assert events.index(f"update blocks.{i}") < events.index(f"backward blocks.{i - in_flight - 1}")
    micro, most = lived(p, in_flight, 3)
    assert most == 1
    assert [event for event in micro if event.startswith("update")] == [event for event in events if event.startswith("update")]
    assert micro[:10] == [f"backward blocks.{i}" for i in reversed(range(5))] * 2


# --- refused ---
def test_errors() -> None:
    model = MLP(3)
    (spec, params), x = shards_of(fs.policies.whole(), model), torch.ones(2, 3).double()
    init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
    loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum()  # noqa: E731
    step = lambda update=update, state=None, **options: fs.update_in_backward(  # noqa: E731
        update, loss, params, init(params) if state is None else state, [x], spec=spec, **options
    )
    for options, kind, match in [
        ({"clip": "exact"}, ValueError, "expected 'previous' with max_norm=, got 'exact'; .*: accumulate, optim.clip_by_"),
        ({"max_norm": 1.0}, ValueError, "clip: expected 'previous' .*, got None; to clip by the norm of this step's"),
        ({"norm": torch.ones(())}, ValueError, "norm is that of the step before"),
        ({"state": {}}, ValueError, "unit '' has no state"),
        ({"state": [1]}, TypeError, "state: expected a dict by unit key, got list"),
        ({"update": lambda *_: ({}, {})}, ValueError, "unit '': expected the update to return a new param"),
        ({"update": lambda grads, state, params: (params, None)}, ValueError, "to return a new state for it, got None"),
        ({"update": fs.optim.sgd(0.1)}, TypeError, r"update: expected the second of \(init, update\), got Optimizer"),
        ({"max_norm": -1.0, "clip": "previous"}, ValueError, "max_norm: expected a number from 0 on, got -1"),
    ]:
        refused(kind, match, lambda: step(**options))
    before = {key: p.clone() for key, p in params.items()}
    refused(RuntimeError, "oops", lambda: step(update=lambda *_: (_ for _ in ()).throw(RuntimeError("oops"))))
    close(params, before, 0)
    assert step().params[""].shape == params[""].shape


@each(where=["the loss", "its gradient", "the update"], clip=[None, "previous"])
def test_an_error_leaves_no_reference_cycle(where: str, clip: str | None) -> None:
    """What an exception leaves behind goes with it, without the cycle collector."""
    model = MLP(3)
    (spec, params), x = shards_of(fs.policies.whole(), model), torch.ones(2, 3).double()
    init, _ = fs.optim.from_torch(torch.optim.SGD, lr=0.1)
    seen: list[weakref.ref[Any]] = []

    def fail(*_: object) -> Any:
        raise OverflowError("oops")

    def loss(params: fs.Params, x: Tensor) -> Tensor:
        out = fs.functional_call(model, params, (x,), spec=spec)
        seen.extend(map(weakref.ref, (*params.values(), out)))
        if where == "its gradient":
            out.register_hook(fail)
        return out.sum() if where != "the loss" else fail()

    options = {} if clip is None else {"max_norm": 1.0, "clip": clip}
    with no_collector():
        with contextlib.suppress(OverflowError):
            fs.update_in_backward(fail, loss, params, init(params), [x], spec=spec, **options)
            pytest.fail("expected an error")
        assert seen
        assert not [ref for ref in seen if ref() is not None]


# --- what torch's own tests claim (PEER_TESTS.md, 17) ---
@real_ranks(2)
def test_ten_steps_bit_by_bit(rank: int) -> None:
    """test_post_acc_grad_hook_optim_parity, test_apply_optimizer_in_backward: AdamW and StepLR, ten iterations, bit by bit.
    Weights have one learning rate and biases another, and two blocks share a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MLP(5) for _ in range(3)))
    model[2].in_proj.weight = model[0].in_proj.weight
    spec = fs.by_type(MLP)(model).bound
    loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum()  # noqa: E731
    options = lambda name, _: {"lr": 1e-3} if name.endswith("bias") else {}  # noqa: E731
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=1e-2, foreach=True, spec=spec, options=options)
    after = inside = fs.shard(model, spec)
    states = [init(after), init(after)]
    for i in range(10):
        lr, x = 1e-2 * 0.5 ** (i // 5), numbers(rank, i)
        grads, value = fs.grad_and_value(loss)(after, x)
        after, states[0] = update(grads, states[0], after, lr=lr)
        step = fs.update_in_backward(lambda *a, lr=lr: update(*a, lr=lr), loss, inside, states[1], [x], spec=spec)
        inside, states[1] = step.params, step.state
        assert torch.equal(value, step.value)
        close(inside, after, 0)
