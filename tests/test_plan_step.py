"""fs.plan(step=): the peak is the profiler's, and what is sent is what the step sends."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from depth import at_most, each, mark_seldom, seldom
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import funshard as fs

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(folder: Path, name: str) -> Any:
    """A module of a folder of scripts, which import each other by their names."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


common, measured, moe = (
    load(EXAMPLES / "benchmarks", "common"),
    load(EXAMPLES / "benchmarks", "measured"),
    load(EXAMPLES, "moe"),
)
P = fs.P
BF16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
MIXED = fs.Precision(param=torch.bfloat16, reduce=torch.float32, keep={"*norm*": torch.float32})
BATCH = 4, 64


class Case(NamedTuple):
    """A model, its policy with these options of P, and the value of its loss."""

    make: Callable[[], nn.Module]
    policy: Callable[[P], fs.Policy]
    value: Callable[[nn.Module, fs.Params, tuple[Tensor, ...], fs.PartitionSpec], Tensor]
    plain_value: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    """The same value by a call of the model itself."""


def gpt_value(model: nn.Module, params: fs.Params, batch: tuple[Tensor, ...], spec: fs.PartitionSpec) -> Tensor:
    return common.loss_of(fs.functional_call(model, params, (batch[0],), spec=spec), batch[1])


def llama_value(model: nn.Module, params: fs.Params, batch: tuple[Tensor, ...], spec: fs.PartitionSpec) -> Tensor:
    inputs = {"input_ids": batch[0], "labels": batch[1], "use_cache": False}
    return fs.functional_call(model, params, (), inputs, spec=spec).loss


def moe_value(model: nn.Module, params: fs.Params, batch: tuple[Tensor, ...], spec: fs.PartitionSpec) -> Tensor:
    return fs.functional_call(model, params, (*batch, spec.bound_mesh, 0.01), spec=spec)


def make_llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def moe_policy(p: P) -> fs.Policy:
    """Experts as units of their own. The mesh needs no axis for them, of which each rank has all."""
    return fs.policies.by_path({"blocks.*": p, "blocks.*.experts": p}, p)


CASES = {
    "gpt": Case(
        lambda: common.GPT(6, 128, 2, 64),
        lambda p: fs.by_type(common.Block, p=p),
        gpt_value,
        lambda model, batch: common.loss_of(model(batch[0]), batch[1]),
    ),
    "llama": Case(
        make_llama,
        lambda p: fs.by_type(LlamaDecoderLayer, p=p),
        llama_value,
        lambda model, batch: model(input_ids=batch[0], labels=batch[1], use_cache=False).loss,
    ),
    "moe": Case(
        lambda: moe.MoE(2, 64, 4, 64, 128, 8), moe_policy, moe_value, lambda model, batch: model(*batch, moe.ALONE, 0.01)
    ),
}


def optimizer_of(name: str) -> Any:
    if name == "sgd":
        return fs.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    return fs.optim.from_torch(torch.optim.AdamW, lr=1e-3, fused=name == "donate", donate=name == "donate")


def step_of(case: Case, model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    def step(params: fs.Params, state: Any, batch: Any, *, spec: fs.PartitionSpec) -> Any:
        grads, value = fs.grad_and_value(lambda p: case.value(model, p, batch, spec))(params)
        params, state = optimizer.update(grads, state, params)
        return params, state, grads, value

    return step


def measured_peak(case: Case, p: P, optimizer: Any, mesh: dict[str, int], batch: tuple[Tensor, ...]) -> int:
    """The most bytes that a step's tensors hold, by the profiler, on a process group in name only."""

    def build(model: nn.Module) -> Any:
        spec = case.policy(p)(model).on(init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)))
        trees = [fs.shard(model, spec), None]
        trees[1] = optimizer.init(trees[0])
        step = step_of(case, fs.skeleton(model), optimizer)

        def run(*batch: Tensor) -> None:
            trees[0], trees[1], *_ = step(*trees, batch, spec=spec)

        return run

    mesh = {"expert": 1, **mesh} if case.value is moe_value else mesh
    with common.fake_world(math.prod(mesh.values())):
        return measured.peak_bytes(build, case.make, batch)


def planned(case: Case, p: P, optimizer: Any, mesh: dict[str, int], batch: tuple[Tensor, ...]) -> fs._plan.plan.Plan:
    model = case.make()
    spec = case.policy(p)(model).on({"expert": 1, **mesh} if case.value is moe_value else mesh)
    return fs.plan(spec, batch=batch, step=step_of(case, fs.skeleton(model), optimizer), optimizer=optimizer)


# --- plans of a step ---
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
