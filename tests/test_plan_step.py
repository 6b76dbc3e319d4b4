"""fs.plan(step=): the peak is the profiler's, and what is sent is what the step sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from depth import at_most, each, mark_seldom, seldom
from plan_cases import (
    BATCH,
    BF16,
    CASES,
    MIXED,
    P,
    common,
    measured_peak,
    optimizer_of,
    planned,
    step_of,
)
from torch import nn

import funshard as fs

ONE, TWO = {"shard": 4}, {"replicate": 2, "shard": 2}
PEAKS: list[tuple[str, str, P, str, dict[str, int]]] = [
    ("gpt", "shard", P("shard"), "adamw", ONE),
    ("gpt", "keep", P("shard", reshard=False), "donate", ONE),
    ("gpt", "P()", P(), "sgd", ONE),
    ("gpt", "HSDP", P("shard"), "donate", TWO),
    ("gpt", "bf16", P("shard", precision=BF16), "adamw", ONE),
    ("gpt", "remat", P("shard", remat=True), "donate", ONE),
    ("gpt", "save", P("shard", remat=fs.Remat(common.ATTENTION)), "donate", ONE),
    ("llama", "shard", P("shard"), "donate", ONE),
    ("llama", "keep", P("shard", reshard=False), "adamw", ONE),
    ("llama", "P()", P(), "adamw", ONE),
    ("llama", "remat", P("shard", remat=True), "sgd", ONE),
    ("llama", "both axes", P(("replicate", "shard"), precision=BF16), "adamw", TWO),
    ("gpt", "kept slices", P(("replicate", "shard"), reshard="shard"), "donate", TWO),
    ("moe", "shard", P("shard"), "adamw", ONE),
    ("moe", "keep", P("shard", reshard=False), "donate", ONE),
    ("moe", "remat", P("shard", remat=True), "sgd", ONE),
    ("gpt", "mixed dtypes", P("shard", precision=MIXED), "adamw", ONE),
    ("gpt", "mixed dtypes of P()", P(precision=MIXED), "adamw", ONE),
]


@at_most(1)
@each
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(
    ("name", "what", "p", "optimizer", "mesh"),
    [pytest.param(*c, id=f"{c[0]} {c[1]}", marks=[] if i % 4 == 1 else seldom) for i, c in enumerate(PEAKS)],
)
def test_peaks_are_the_profilers(name: str, what: str, p: P, optimizer: str, mesh: dict[str, int]) -> None:
    """Within 3 percent, for every choice of P, strategy and optimizer."""
    batch = tuple(torch.randint(256, (2, *BATCH), generator=torch.Generator().manual_seed(0)).unbind())
    plan = planned(CASES[name], p, optimizer_of(optimizer), mesh, batch)
    peak = measured_peak(CASES[name], p, optimizer_of(optimizer), mesh, batch)
    assert plan.peak - plan.batch_bytes == pytest.approx(peak, rel=0.03)


def most_gathered(plan: fs._plan.plan.Plan) -> dict[str, int]:
    """The most bytes that gathered buffers take in each phase."""
    found: dict[str, int] = {}
    for event, held in zip(plan.events, plan.held, strict=True):
        found[event.phase] = max(found.get(event.phase, 0), held["gathered"])
    return found


@at_most(1)
@pytest.mark.parametrize(
    "p", mark_seldom([P("shard"), P("shard", remat=True), P(), P("shard", reshard=False)], P("shard"), P()), ids=str
)
def test_what_is_sent_is_what_shapes_say(p: P) -> None:
    """The step's collectives and gathered buffers are those of the plan without it, which has another model."""
    case, optimizer = CASES["gpt"], optimizer_of("donate")
    batch = (torch.zeros(BATCH, dtype=torch.long),) * 2
    with_step = planned(case, p, optimizer, ONE, batch)
    model = case.make()
    without = fs.plan(case.policy(p)(model).on(ONE), optimizer=optimizer)
    counts = [{(t.axis, t.op): (t.input_bytes, t.output_bytes) for t in plan.traffic} for plan in (with_step, without)]
    assert counts[0] == counts[1]
    assert most_gathered(with_step) == most_gathered(without)
    assert with_step.at_rest["parameters"] == without.at_rest["parameters"]
    assert with_step.at_rest["optimizer"] == without.at_rest["optimizer"]


def test_phases_and_units() -> None:
    """Activations grow in forward, gradients come in backward, and every unit has its share of the work."""
    plan = planned(CASES["gpt"], P("shard"), optimizer_of("adamw"), ONE, (torch.zeros(BATCH, dtype=torch.long),) * 2)
    assert list(plan.peaks) == ["forward", "backward", "update"]
    assert plan.peaks["forward"]["activations"] > 10 * plan.batch_bytes
    flops = {unit: sum(e.flops for e in plan.events if e.unit == unit) for unit in plan.units}
    assert all(flops.values())
    assert sum(e.flops for e in plan.events if e.phase == "backward") == pytest.approx(
        2 * sum(e.flops for e in plan.events if e.phase == "forward"), rel=0.2
    )


@seldom
def test_nothing_is_left_behind() -> None:
    """No process group, no mode, and the model as it was."""
    planned(CASES["gpt"], P("shard"), optimizer_of("adamw"), ONE, (torch.zeros(BATCH, dtype=torch.long),) * 2)
    assert not dist.is_initialized()
    assert type(torch.empty(1)) is torch.Tensor


def test_a_failing_step_leaves_nothing_behind() -> None:
    spec = fs.policies.whole()(nn.Linear(4, 4)).on(ONE)

    def step(params: Any, state: Any, batch: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fs.plan(spec, batch=torch.ones(2, 4), step=step)
    assert not dist.is_initialized()


def test_a_process_group_is_not_touched() -> None:
    model = nn.Linear(4, 4)
    with common.fake_world(2):
        spec = fs.policies.whole()(model).on(ONE)
        group = dist.group.WORLD
        with pytest.raises(RuntimeError, match="plan before init_process_group"):
            fs.plan(spec, batch=torch.ones(2, 4), step=lambda params, state, batch: None)
        assert dist.group.WORLD is group


def test_a_step_that_sends_nothing_is_refused() -> None:
    """It runs on a spec of its own, which has one rank."""
    spec = fs.policies.whole()(nn.Linear(4, 4)).on(ONE)
    with pytest.raises(RuntimeError, match="sends nothing"):
        fs.plan(spec, batch=torch.ones(2, 4), step=lambda params, state, batch: batch.sum())


def test_offload_needs_an_accelerator() -> None:
    case = CASES["gpt"]
    model = case.make()
    spec = case.policy(P("shard", offload="params"))(model).on(ONE)
    with pytest.raises(NotImplementedError, match="where the device is the host"):
        fs.plan(spec, batch=torch.zeros(BATCH, dtype=torch.long), step=step_of(case, model, optimizer_of("adamw")))


def test_a_step_without_spec() -> None:
    """A step whose spec is bound to no mesh runs on the planned ranks."""
    model = nn.Linear(8, 8)
    unbound = fs.policies.whole()(model)

    def step(params: Any, state: Any, batch: Any) -> Any:
        return fs.grad(lambda p: fs.functional_call(model, p, (batch,), spec=unbound).sum())(params)

    plan = fs.plan(unbound.on(ONE), batch=torch.ones(2, 8), step=step, optimizer=None)
    assert {one.op: one.count for one in plan.traffic} == {"all_gather": 1, "reduce_scatter": 1}
