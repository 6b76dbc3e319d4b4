"""What composes optimizers: each equals the same by hand on the unsharded tree, on all ranks, saved and differentiated."""

from __future__ import annotations

import logging
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_most, depth, each, seldom
from models import refused
from parity import policies
from ranks import mesh_of, real_ranks
from test_compile import IMPORT
from test_profiling import logged
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P, optim

batched = pytest.mark.filterwarnings("ignore:There is a performance drop")
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)).double()
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
POLICIES = policies({"0": P(("replicate", "shard")), "1": P("replicate"), "2": P()}, "sharded", "replicated")
SIZES = {"replicate": 2, "shard": 2}
ONE = fs.policies.whole()(MODEL).on({"shard": 1})
PARAMS = fs.shard(FULL, ONE)
NAN_AT = 2
"""The step whose gradient is not finite on one rank."""
COSINE: dict[str, Any] = {"T_max": 7}
ADAM: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-3}

GRADS = [{name: torch.randn_like(p) for name, p in FULL.items()} for _ in range(10)]
"""The whole gradients of steps."""


def make_rule(spec: fs.PartitionSpec) -> optim.Optimizer:
    return optim.adamw(0.1, eps=1e-3, weight_decay=0.1, spec=spec)


def everything(spec: fs.PartitionSpec, **options: Any) -> optim.Optimizer:
    """All that composes, around AdamW."""
    adamw = optim.from_torch(torch.optim.AdamW, spec=spec, **ADAM, **options) if "rule" not in options else make_rule(spec)
    rate = optim.schedule(torch.optim.lr_scheduler.CosineAnnealingLR, 0.1, **COSINE)
    around = optim.apply_if_finite(spec), optim.ema(0.75), optim.accumulate_steps(2)
    return optim.chain(*around, optim.clip_gradients(spec, 0.5), optim.schedule_lr(rate), adamw)


def by_hand(steps: int) -> tuple[fs.Params, fs.Params]:
    """The parameters and their average after some steps of torch's own AdamW, scheduler and clipping."""
    params = {name: nn.Parameter(p.clone()) for name, p in FULL.items()}
    average = {name: p.clone() for name, p in FULL.items()}
    theirs = torch.optim.AdamW(params.values(), **ADAM)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, **COSINE)
    held: list[fs.Params] = []
    for i in (i for i in range(steps) if i != NAN_AT):
        held.append(GRADS[i])
        if len(held) == 2:
            for name, p in params.items():
                p.grad = (held[0][name] + held[1][name]) / 2
            torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
            theirs.step()
            scheduler.step()
            held.clear()
        average = {name: 0.75 * a + 0.25 * params[name].detach() for name, a in average.items()}
    return {name: p.detach() for name, p in params.items()}, average


def run_steps(
    spec: fs.PartitionSpec, rank: Tensor | int, steps: int, begin: int = 0, given: Any = None, **options: Any
) -> tuple[fs.Params, Any]:
    """Steps of everything on a rank's slices; in one of them a value of rank 1 is NaN."""
    init, update = everything(spec, **options)
    params = {key: x.clone() for key, x in fs.shard(FULL, spec).items()}
    params, state = given or (params, init(params))
    for i in range(begin, steps):
        grads = fs.shard(GRADS[i], spec)
        if i == NAN_AT:
            hit = torch.where(torch.as_tensor(rank) == 1, math.nan, 1.0)
            grads = {key: g * hit if key == spec.units[0].key else g for key, g in grads.items()}
        params, state = update(grads, state, params)
    return params, state


def check_run(spec: fs.PartitionSpec, params: fs.Params, state: Any, steps: int) -> None:
    expected, average = by_hand(steps)
    assert_close(fs.unshard(params, spec), expected)
    assert_close(fs.unshard(state.inner.average, spec), average)
    assert (state.total, state.consecutive) == (1, 0)
    assert state.inner.inner.inner[1].step == (steps - 1) // 2


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=seldom)])
@real_ranks(lambda shape: math.prod(shape))
def test_all_of_it_on_real_ranks(rank: int, shape: tuple[int, int], tmp_path: Path) -> None:
    """Each policy with one of the options, or thoroughly with each. Saved in the middle: loaded on one rank, with other units,
    with or without ``like``, the run goes on."""
    mesh = mesh_of(*shape)
    given: list[dict[str, Any]] = [{}, {"donate": True}, {"rule": True}]
    for policy, options in depth([*zip(POLICIES.values(), given, strict=True)], [*product(POLICIES.values(), given)]):
        spec = policy(MODEL).on(mesh)
        check_run(spec, *run_steps(spec, rank, 6, **options), 6)
    spec = fs.by_path({"0": P("shard"), "1": P()})(MODEL).on(mesh)
    params, state = run_steps(spec, rank, 4)
    fs.checkpoint.save(tmp_path / "a", {"params": params, "opt": state}, spec).wait()
    spec = fs.policies.always()(MODEL).on({"shard": 1})
    init, _ = everything(spec)
    params = fs.shard(FULL, spec)
    for like in (None, {"params": params, "opt": init(params)}):
        found = fs.checkpoint.load(tmp_path / "a", spec, like=like)
        assert pytree.tree_structure(found["opt"]) == pytree.tree_structure(init(params))
        check_run(spec, *run_steps(spec, 0, 6, 4, (found["params"], found["opt"])), 6)


# --- chain ---
def test_a_chain_is_its_parts_by_hand() -> None:
    """Chains in a chain, a pair of functions of the user's, and rates that go to the optimizer alone."""
    spec, params, grads = ONE, PARAMS, fs.shard(GRADS[0], ONE)

    def double(grads: fs.Params, state: Any, params: fs.Params) -> tuple[fs.Params, Any]:
        return {key: 2 * g for key, g in grads.items()}, {"n": state["n"] + 1}

    sgd: Any = optim.from_torch(torch.optim.SGD, momentum=0.9)
    transformation = optim.chain(optim.clip_gradients(spec, 0.5), optim.chain(optim.clip_gradients(spec, 9.0)))
    init, update = optim.chain(transformation, (lambda params: {"n": torch.tensor(0)}, double), sgd)
    new, state = update(grads, init(params), params, lr=0.5)
    clipped, _ = optim.clip_by_global_norm(grads, spec, 0.5)
    expected = sgd.update({key: 2 * g for key, g in clipped.items()}, sgd.init(params), params, lr=0.5)
    assert_close((new, state[2]), expected, rtol=0, atol=0)
    assert state[1]["n"] == 1


def test_what_is_no_chain_is_refused() -> None:
    sgd, spec, params = optim.from_torch(torch.optim.SGD), ONE, PARAMS
    clip: Any = optim.clip_gradients(spec, 1.0)
    refused(ValueError, "argument 0 of 2 is an optimizer", lambda: optim.chain(sgd, clip))
    with pytest.raises(TypeError, match=r"argument 1: expected \(init, update\)"):
        optim.chain(clip, torch.optim.SGD)  # pyright: ignore[reportCallIssue, reportArgumentType]
    refused(ValueError, "got nothing", lambda: optim.chain())
    refused(ValueError, "max_norm: expected a number from 0 on", lambda: optim.clip_gradients(spec, -1.0))
    init, update = optim.chain(clip, sgd)
    refused(ValueError, "expected a tuple of 2, as init", lambda: update(params, sgd.init(params), params))
    lost = (lambda params: (), lambda grads, state, params: ({}, state))
    with pytest.raises(ValueError, match="transformation 1: expected gradients of the same keys, got others: ''"):
        optim.chain(clip, lost, sgd).update(params, (*init(params)[:1], (), sgd.init(params)), params)
    of_steps = optim.accumulate_steps(2), optim.ema(0.5), optim.schedule_lr(lambda step: 0.1)
    for wrap in (optim.apply_if_finite(spec), *of_steps):
        refused(TypeError, "a gradient transformation returns gradients: expected an optimizer", lambda: wrap(clip))
        refused(TypeError, r"expected \(init, update\), such as", lambda: wrap(None))


def test_functions_of_one_units_state_refuse_a_composed_one() -> None:
    spec, params, adamw = ONE, PARAMS, optim.from_torch(torch.optim.AdamW)
    init, update = optim.chain(optim.apply_if_finite(spec), adamw)
    loss = lambda params, x: fs.functional_call(MODEL, params, (x,), spec=spec).sum()  # noqa: E731
    with pytest.raises(TypeError, match=r"got FiniteState; optimizers such as optim\.chain and apply_if_finite need all"):
        fs.update_in_backward(update, loss, params, init(params), [torch.ones(1, 3).double()], spec=spec)
    state = optim.chain(optim.clip_gradients(spec, 1.0), adamw).init(params)
    with pytest.raises(TypeError, match=r"got tuple; it is the last entry of the state of optim\.chain"):
        fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.AdamW)
    names = fs.checkpoint.optimizer_state_dict(state[-1], spec, torch.optim.AdamW)["state"]
    assert {*names} == {*FULL}
    state = optim.adafactor(0.01, spec).init(params)
    with pytest.raises(TypeError, match=r"elementwise state.*got MatrixState; .*checkpoint\.save keeps it"):
        fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.Adafactor)  # type: ignore[arg-type]


# --- apply_if_finite ---
@pytest.mark.parametrize(("value", "optimizer"), [(math.nan, "donated"), (math.inf, "fused"), (-math.inf, "muon")])
@real_ranks(2)
def test_a_step_is_skipped_on_all_ranks(rank: int, value: float, optimizer: str) -> None:
    """Bit for bit, in the same memory; counted and logged; too many in a row are an error on every rank."""
    spec = fs.by_path({"0": P("shard"), "1": P()})(MODEL).bound
    made: Any = {
        "donated": lambda: optim.from_torch(torch.optim.AdamW, spec=spec, donate=True),
        "fused": lambda: optim.from_torch(torch.optim.AdamW, spec=spec, donate=True, fused=True),
        "muon": lambda: optim.muon(spec, lr=0.1, dtype=torch.float64),
    }[optimizer]()
    init, update = optim.apply_if_finite(spec, max_consecutive=2)(made)
    with logged(logging.INFO) as found:
        params = {key: x.clone() for key, x in fs.shard(FULL, spec).items()}
        state = init(params)
        for i in range(2):
            params, state = update(fs.shard(GRADS[i], spec), state, params)
        before = pytree.tree_map(torch.clone, (params, state.inner))
        pointers = [x.data_ptr() for x in pytree.tree_leaves((params, state.inner))]
        bad = fs.shard(GRADS[2], spec)
        if rank == 1:
            bad["0"] = bad["0"].index_fill(0, torch.tensor(0), value)
        counts: list[int] = []
        for _ in range(2):
            params, state = update(bad, state, params)
            counts += [int(state.consecutive), int(state.total)]
            assert_close((params, state.inner), before, rtol=0, atol=0)
            assert [x.data_ptr() for x in pytree.tree_leaves((params, state.inner))] == pointers
        where = r"in units \['0'\]" if rank == 1 else "on another rank"
        with pytest.raises(FloatingPointError, match=f"3 steps in a row were not finite, now {where}: expected at most 2"):
            update(bad, state, params)
        assert_close((params, state.inner), before, rtol=0, atol=0)
        params, state = update(fs.shard(GRADS[3], spec), state, params)
        assert not torch.equal(params["0"], before[0]["0"])
        assert [*counts, int(state.consecutive), int(state.total)] == [1, 1, 2, 2, 0, 2]
        where = "in units ['0']" if rank else "on another rank"
        assert [message for _, message in found if message.startswith("apply_if_finite")] == [
            f"apply_if_finite: a step is skipped, {n} in a row, {n} in all: gradients are not finite {where}" for n in (1, 2)
        ]


def test_bfloat16_and_padding() -> None:
    """NaN in padding skips nothing, and bfloat16 needs no loss scale."""
    model = nn.Linear(3, 3).bfloat16()
    spec = fs.policies.whole(P("shard", align=16))(model).on({"shard": 1})
    init, update = optim.apply_if_finite(spec)(optim.sgd(1.0))
    params = fs.shard(model, spec)
    state = init(params)
    ones = torch.ones_like(params[""])
    ones[-1] = math.nan
    new, state = update({"": ones}, state, params)
    assert state.total == 0
    new, state = update({"": ones.index_fill(0, torch.tensor(0), math.inf)}, state, new)
    assert state.total == 1
    assert new[""][0] == params[""][0] - 1


@seldom
@pytest.mark.filterwarnings(f"ignore:{IMPORT}")
def test_a_skipped_step_in_a_graph() -> None:
    """One graph for both kinds of steps, also where the step donates."""
    spec = ONE
    rate = optim.schedule_lr(lambda step: 0.1 * 0.9**step)
    links = optim.apply_if_finite(spec), rate, optim.ema(0.5), optim.clip_gradients(spec, 0.5)
    init, update = optim.chain(*links, make_rule(spec))
    compiled: Any = fs.compile(
        lambda params, state, grads: update(grads, state, params), donate_argnums=(0, 1), backend="aot_eager"
    )
    expected: Any = fs.shard(FULL, spec)
    expected = expected, init(expected)
    got: Any = pytree.tree_map(torch.clone, expected)
    for i in range(4):
        grads = fs.shard(GRADS[i], spec)
        if i in (0, 2):
            grads[""][3] = math.nan
        expected = update(grads, expected[1], expected[0])
        got = compiled(*got, grads)
        assert_close(got, expected)
    assert got[1].total == 2


@pytest.mark.filterwarnings(f"ignore:{IMPORT}")
def test_what_needs_the_host_is_refused_in_a_graph() -> None:
    spec, params, sgd = ONE, PARAMS, optim.sgd(0.1)
    rate = optim.schedule(torch.optim.lr_scheduler.StepLR, 0.1, step_size=2)
    for (init, update), match in (
        (optim.accumulate_steps(2)(sgd), "whether it steps is a branch on the host"),
        (optim.schedule_lr(rate)(sgd), "torch's scheduler computes on the host"),
        (optim.apply_if_finite(spec, max_consecutive=1)(sgd), "max_consecutive"),
    ):
        step = fs.compile(lambda params, state, update=update: update(params, state, params), backend="aot_eager")
        refused(Exception, match, lambda: step(params, init(params)))
        torch._dynamo.reset()
    init, update = optim.apply_if_finite(spec, max_consecutive=1)(sgd)
    with pytest.raises(ValueError, match="max_consecutive: an error needs the host"):
        torch.vmap(lambda x: update({"": params[""] * x}, init(params), params)[0])(torch.tensor([1.0, math.nan]))


def test_steps_of_a_batch_are_skipped_one_by_one() -> None:
    """Under a vmap of the user's whose gradients are finite in part."""
    params, (init, update) = PARAMS, optim.apply_if_finite(ONE)(optim.sgd(1.0, momentum=0.9))

    def run(x: Tensor) -> Any:
        state = init(params)
        new, state = update({"": params[""] * x}, state, params)
        return update({"": params[""]}, state, new)

    batch = torch.tensor([1.0, math.nan, 2.0])
    new, state = torch.vmap(run)(batch)
    for i, x in enumerate(batch):
        assert_close(pytree.tree_map(lambda y, i=i: y[i], (new, state)), run(x))
    assert state.total.tolist() == [0, 1, 0]


# --- derivatives ---
def sum_of_cubes(params: fs.Params, spec: fs.PartitionSpec) -> Tensor:
    return optim.vdot({key: x**2 for key, x in params.items()}, params, spec)


@at_most(1)
@batched
@each(policy=["sharded", "mixed"], how=["grad", "remat", "scan", "hvp"])
def test_derivatives_through_skipped_steps(policy: str, how: str) -> None:
    """By the initial parameters and weights of gradients: those of plain operations on the unsharded tree."""
    steps = 6

    def plain(full: fs.Params) -> Tensor:
        init, update = optim.adamw(0.1, eps=1e-3, weight_decay=0.1)
        rate = optim.schedule(torch.optim.lr_scheduler.CosineAnnealingLR, 0.1, **COSINE)
        params, state, average, held, t = full, init(full), full, list[fs.Params](), 0
        for i in (i for i in range(steps) if i != NAN_AT):
            held.append({k: GRADS[i][k] + params[k] ** 2 for k in params})
            if len(held) == 2:
                g = {k: (held[0][k] + held[1][k]) / 2 for k in params}
                scale = (0.5 / (torch.cat([x.flatten() for x in g.values()]).norm() + 1e-6)).clamp(max=1)
                params, state = update({k: scale * x for k, x in g.items()}, state, params, lr=rate(t))
                t, held = t + 1, []
            average = {k: 0.75 * a + 0.25 * params[k] for k, a in average.items()}
        return sum(((x**3).sum() for x in (*params.values(), *average.values())), torch.zeros(()))

    def run(mesh: Any, rank: Tensor) -> Any:
        spec = POLICIES[policy](MODEL).on(mesh)
        init, update = everything(spec, rule=True)

        def one(params: fs.Params, state: Any, grads: fs.Params, hit: Tensor) -> Any:
            first = spec.units[0].key
            grads = {k: g + params[k] ** 2 for k, g in grads.items()}
            return update({**grads, first: grads[first] * hit}, state, params)

        step = fs.remat(one) if how == "remat" else one

        def loss(params: fs.Params) -> Tensor:
            state = init(params)
            hits = torch.where((rank == 1) & (torch.arange(steps) == NAN_AT), math.nan, 1.0).double()
            grads = [fs.shard(whole, spec) for whole in GRADS[:steps]]
            if how == "scan":
                xs = {key: torch.stack([g[key] for g in grads]) for key in grads[0]}, hits
                (params, state), _ = fs.scan(lambda state, x: (step(*state, *x), None), (params, state), xs)
            else:
                for x in zip(grads, hits, strict=True):
                    params, state = step(params, state, *x)
            return sum_of_cubes(params, spec) + sum_of_cubes(state.inner.average, spec)

        shards = fs.shard(FULL, spec)
        direction = fs.shard(GRADS[9], spec)
        got = fs.hvp(loss, shards, direction) if how == "hvp" else fs.grad(loss)(shards)
        return got, fs.shard(want, spec)

    want = fs.hvp(plain, FULL, GRADS[9]) if how == "hvp" else torch.func.grad(plain)(FULL)
    got, expected = fs.testing.spmd(run, SIZES)(torch.arange(4))
    assert_close(got, expected)


# --- accumulate_steps and ema ---
def test_accumulated_in_float32() -> None:
    """Sums of bfloat16 gradients are exact, and the means go back to bfloat16."""
    init, update = optim.accumulate_steps(3)(optim.sgd(1.0))
    params = {"": torch.zeros(2, dtype=torch.bfloat16)}
    state = init(params)
    for g in (256.0, 1.0, 1.0):
        params, state = update({"": torch.full((2,), g, dtype=torch.bfloat16)}, state, params)
    assert params[""].tolist() == 2 * [-86.0]
    assert not state.sums[""].any()
    assert state.sums[""].dtype == torch.float32
    assert state.num_summed == 0


def test_states_that_do_not_fit_are_refused() -> None:
    sgd = optim.from_torch(torch.optim.SGD)
    params = {"": torch.zeros(2)}
    init, update = optim.accumulate_steps(2)(sgd)
    refused(ValueError, "unit '' has no gradient", lambda: update({}, init(params), params))
    refused(ValueError, r"unit '': expected \[2\] .* got \[1\]", lambda: update({"": torch.ones(1)}, init(params), params))
    with pytest.raises(ValueError, match="has 2 gradients of a larger k"):
        update(params, init(params)._replace(num_summed=torch.tensor(2)), params)
    with pytest.raises(ValueError, match="same count of steps on all ranks"):
        torch.vmap(lambda n: update(params, init(params)._replace(num_summed=n), params)[0])(torch.arange(2))
    with pytest.raises(ValueError, match="has no value where operators are recorded"):
        make_fx(lambda params, state: update(params, state, params))(params, init(params))
    for k in (0, 1.5):
        refused(ValueError, f"k: expected a whole number from 1 on, got {k}", lambda: optim.accumulate_steps(k))
    finite = optim.apply_if_finite(fs.policies.whole()(MODEL))(sgd)
    made = (optim.accumulate_steps(2)(sgd), optim.ema(0.5)(sgd), optim.schedule_lr(lambda step: 0.1)(sgd), finite)
    for who, one in zip(("accumulate_steps", "ema", "schedule_lr", "apply_if_finite"), made, strict=True):
        with pytest.raises(TypeError, match=rf"{who}: state: expected \w+State, as init\(params\) .* got dict"):
            one.update(params, sgd.init(params), params)
    with pytest.raises(TypeError, match=r"state: expected a dict by unit key, .* got FiniteState"):
        sgd.update(params, finite.init(params), params)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="grads: '': expected a tensor, got NoneType; an unused parameter has gradient zeros"):
        finite.update({"": None}, finite.init(params), params)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_decay_that_is_a_function_of_the_step(compiled: bool) -> None:
    """As swa_utils.AveragedModel has avg_fn; in a graph without one for each step, and none outside of 0 to 1."""
    decay = lambda step: ((1 + step) / (10 + step)).clamp(max=0.5)  # noqa: E731
    sgd = optim.sgd(1.0)
    init, update = optim.ema(decay)(sgd)
    run = fs.compile(update, backend="aot_eager") if compiled else update
    params = {"": torch.zeros(2)}
    state, slow = init(params), torch.zeros(2)
    for step in range(12):
        params, state = run({"": torch.tensor([1.0, -2.0])}, state, params)
        slow = slow + (1 - min(0.5, (1 + step) / (10 + step))) * (params[""] - slow)
        assert_close(state.average[""], slow)
    assert state.step == 12
    with pytest.raises(ValueError, match=r"ema: expected a decay from 0 to 1, got 1\.5"):
        optim.ema(lambda step: 1.5 + step)(sgd).update(params, init(params), params)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_an_average_of_its_own(dtype: torch.dtype | None) -> None:
    """A copy at first, also where the optimizer donates, in any dtype; integers stay."""
    init, update = optim.ema(0.75, dtype=dtype)(optim.from_torch(torch.optim.SGD, lr=1.0, donate=True))
    params = {"": torch.zeros(2)}
    state = init(params)
    params, state = update({"": torch.ones(2)}, state, params)
    assert_close(state.average, {"": torch.full((2,), -0.25, dtype=dtype or torch.float32)})
    assert init({"": torch.arange(3)}).average[""].dtype == torch.int64
