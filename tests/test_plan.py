"""fs.plan from shapes alone: what it counts is what a step sends and holds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_most
from models import module_class
from test_plan_step import load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import funshard as fs

P = fs.P
BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"

common, counted = (load(BENCHMARKS, name) for name in ("common", "counted"))
BF16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
MIXED = dataclasses.replace(BF16, keep={"*norm*": torch.float32})
ENCODED = fs.Precision(param=torch.bfloat16, reduce_codec=fs.codecs.int8())
ONE, TWO = {"shard": 8}, {"replicate": 2, "shard": 4}
BOTH = ("replicate", "shard")


def blocks(p: P) -> fs.Policy:
    return fs.by_type(common.Block, p=p)


def nested(p: P, inner: P) -> fs.Policy:
    return fs.policies.override(blocks(p), fs.by_type(nn.Linear, p=inner))


def grouped(p: P) -> fs.Policy:
    """Blocks by three, and the last layers."""
    return fs.policies.override(fs.policies.by_group([common.Block], size=3, p=p), fs.policies.by_group(["norm", "head"], p=p))


CASES: dict[str, tuple[fs.Policy, dict[str, int]]] = {
    "shard": (blocks(P("shard")), ONE),
    "keep": (blocks(P("shard", reshard=False)), ONE),
    "P()": (blocks(P()), ONE),
    "P() in bf16": (blocks(P(precision=BF16)), ONE),
    "HSDP": (blocks(P("shard")), TWO),
    "HSDP in bf16": (blocks(P("shard", precision=BF16)), TWO),
    "P() on two axes": (blocks(P()), TWO),
    "both axes": (blocks(P(BOTH)), TWO),
    "both axes in bf16": (blocks(P(BOTH, precision=BF16)), TWO),
    "bf16": (blocks(P("shard", precision=BF16)), ONE),
    "mixed dtypes": (blocks(P("shard", precision=MIXED)), ONE),
    "mixed dtypes of P()": (blocks(P(precision=MIXED)), ONE),
    "mixed dtypes on both axes": (blocks(P(BOTH, precision=MIXED)), TWO),
    "remat": (blocks(P("shard", remat=True)), ONE),
    "remat keep": (blocks(P("shard", remat=True, reshard=False)), ONE),
    "remat HSDP": (blocks(P("shard", remat=True)), TWO),
    "whole": (fs.policies.whole(P("shard")), ONE),
    "whole remat": (fs.policies.whole(P("shard", remat=True)), ONE),
    "codec": (blocks(P("shard", precision=fs.Precision(codec=fs.codecs.int8()))), ONE),
    "encoded gradients": (blocks(P("shard", align=64, precision=ENCODED)), ONE),
    "encoded gradients, HSDP": (blocks(P("shard", remat=True, align=64, precision=ENCODED)), TWO),
    "nested": (nested(P("shard"), P("shard")), ONE),
    "nested remat": (nested(P("shard", remat=True), P("shard")), ONE),
    "nested remat keep": (nested(P("shard", remat=True), P("shard", reshard=False)), ONE),
    "remat in remat": (nested(P("shard", remat=True), P("shard", remat=True)), ONE),
    "mixed": (nested(P("shard"), P()), TWO),
    "kept slices": (blocks(P(BOTH, reshard="shard")), TWO),
    "kept slices in bf16": (blocks(P(BOTH, reshard="replicate", precision=BF16)), TWO),
    "kept slices of a codec": (blocks(P(BOTH, reshard="shard", precision=fs.Precision(codec=fs.codecs.int8()))), TWO),
    "kept slices of two dtypes": (blocks(P(BOTH, reshard="shard", precision=MIXED)), TWO),
    "kept slices, remat": (nested(P(BOTH, reshard="shard", remat=True), P(BOTH, reshard="shard")), TWO),
    "groups": (grouped(P("shard")), ONE),
    "groups remat": (grouped(P("shard", remat=True)), ONE),
    "groups with units inside": (fs.policies.override(grouped(P("shard")), fs.by_type(nn.Linear)), ONE),
}


def work_of(spec: fs.PartitionSpec, model: nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
    """What comm.py counts in one step, and its gradients."""
    params, x = fs.shard(model, spec), torch.zeros(1, 16, dtype=torch.long)
    trained, frozen = fs.partition(params, spec)

    def loss(trained: fs.Params) -> torch.Tensor:
        return common.loss_of(fs.functional_call(model, {**trained, **frozen}, (x,), spec=spec), x)

    with counted.Work() as work:
        grads = fs.grad(loss)(trained)
    return work, grads


def counts_of(work: Any) -> dict[str, tuple[int, int, int]]:
    ops = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return {op: (work.ops[op], work.bytes[f"into {op}"], work.bytes[f"out of {op}"]) for op in ops if work.ops[op]}


def totals(plan: fs._plan.plan.Plan) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for one in plan.traffic:
        old = found.get(one.op, (0, 0, 0))
        found[one.op] = old[0] + one.count, old[1] + one.input_bytes, old[2] + one.output_bytes
    return found


def bound(case: str, model: nn.Module) -> fs.PartitionSpec:
    policy, mesh = CASES[case]
    spec = policy(model).on(init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)))
    return spec.ordered(fs.trace_order(model, spec, (torch.zeros(1, 16, dtype=torch.long),)))


@at_most(1)
@pytest.mark.parametrize("case", CASES)
def test_counts_are_those_of_a_step(case: str) -> None:
    """Collectives and bytes of every kind, to the byte; and the bytes of shards and gradients."""
    model = common.GPT(4, 64, 2, 16)
    with common.fake_world(8):
        spec = bound(case, model)
        plan = fs.plan(spec)
        work, grads = work_of(spec, model)
        assert totals(plan) == counts_of(work)
        assert plan.at_rest["parameters"] == sum(shard.nbytes for shard in fs.shard(model, spec).values())
        assert plan.peaks["update"]["gradients"] == sum(grad.nbytes for grad in grads.values())


@at_most(2)
@pytest.mark.parametrize(
    "case",
    [
        "shard",
        "HSDP",
        "remat",
        "nested remat",
        "both axes in bf16",
        "P()",
        "codec",
        "encoded gradients, HSDP",
        "groups",
        "groups remat",
        "kept slices",
        "kept slices, remat",
    ],
)
def test_what_is_allocated_is_freed(case: str) -> None:
    """At the end of a step a rank holds what it held before it, and never less than nothing meanwhile."""
    with torch.device("meta"):
        model = common.GPT(3, 64, 2, 16)
    policy, mesh = CASES[case]
    plan = fs.plan(policy(model).on(mesh))
    held = [dict(some) for some in plan.held]
    assert all(size >= 0 for some in held for size in some.values())
    assert {name: size for name, size in held[-1].items() if size} == plan.at_rest


def test_encoded_gradients_are_decoded() -> None:
    """For a moment a rank of eight holds the slices of two, their sum, and that of the ones before, in the sum's dtype."""
    policy, mesh = CASES["encoded gradients"]
    spec = policy(common.GPT(3, 64, 2, 16)).on(mesh)
    events, decoded = fs.plan(spec).events, set[int]()
    for i, event in enumerate(events):
        received = events[event.after[0]].collective if event.kind == "wait" else None
        if received is not None and received.op == "all_to_all":
            changes = (after.memory.get("gradients", 0) for after in events[i + 1 :])
            until_freed = itertools.takewhile(lambda change, nbytes=received.output_bytes: change != -nbytes, changes)
            decoded.add(max(itertools.accumulate(until_freed)))
    assert {4 * 4 * spec.shard_numel(unit) for unit in spec} == decoded


def test_buckets_are_those_of_the_device() -> None:
    """16 units of 1 MiB are reduced by 4 MiB on a mesh of the CPU, and together where the mesh is sizes alone."""
    spec = fs.by_type(nn.Linear, p=P())(nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))))
    with common.fake_world(8):
        on_cpu = fs.plan(spec.on(init_device_mesh("cpu", (8,))), optimizer=None)
    assert [[one.count for one in plan.traffic] for plan in (on_cpu, fs.plan(spec.on(ONE)))] == [[4], [1]]


def test_gathered_units() -> None:
    """At most the root, the running unit and the next; without reshard all of them."""
    with torch.device("meta"):
        model = common.GPT(6, 64, 2, 16)
    plan = fs.plan(blocks(P("shard"))(model).on(ONE))
    size = {unit.key: plan.spec.padded_numel(unit) * 4 for unit in plan.spec}
    assert plan.peaks["forward"]["gathered"] == size[""] + 2 * size["blocks.0"]
    groups = fs.plan(fs.policies.by_group([common.Block], size=2)(model).on(ONE))
    assert groups.peaks["forward"]["gathered"] == size[""] + 2 * 2 * size["blocks.0"]
    kept = fs.plan(blocks(P("shard", reshard=False))(model).on(ONE))
    assert kept.peaks["forward"]["gathered"] == sum(size.values())


@pytest.mark.parametrize("name", ["adamw", "SGD", "adagrad", "rmsprop"])
def test_optimizer_state(name: str) -> None:
    """Bytes are those of the state that the optimizer makes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    spec = fs.by_type(nn.Linear)(model).on({"shard": 2})
    plan = fs.plan(spec, optimizer=name)
    cls = next(cls for key, cls in vars(torch.optim).items() if key.lower() == name.lower())
    state = fs.optim.from_torch(cls, lr=0.1).init(fs.shard(model, spec, rank=0))
    want = sum(x.nbytes for x in pytree.tree_leaves(state) if x.dim())
    assert plan.at_rest["optimizer"] == want
    assert sum(unit.optimizer for unit in plan.units.values()) == want


def test_optimizer_on_frozen_and_host_units() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    policy = fs.policies.override(
        fs.by_type(nn.Linear, p=P("shard", at_rest=fs.codecs.nf4())), fs.by_path({"1": P("shard", offload="params")})
    )
    plan = fs.plan(policy(model).on({"shard": 2}))
    frozen, host = plan.units["0"], plan.units["1"]
    assert frozen.optimizer == 0
    assert frozen.parameters == plan.spec.stored(plan.spec.by_key["0"])[0]
    assert host.on_host
    assert plan.host_bytes == 3 * host.parameters
    assert plan.at_rest == {"parameters": frozen.parameters, "optimizer": 0}
    assert {event.unit for event in plan.events if event.kind == "copy"} == {"1"}


@pytest.mark.parametrize("p", [P("shard", offload="params"), P("shard", offload="params", precision=BF16, remat=True)], ids=str)
def test_copies_are_behind_computation(p: P) -> None:
    """A gather waits for the copy of its slice, and the device does not; what is copied there and back is freed."""
    with torch.device("meta"):
        model = common.GPT(3, 64, 2, 16)
    plan = fs.plan(blocks(p)(model).on(ONE), batch=64)
    kinds = [(event.kind, *(plan.events[i].kind for i in event.after)) for event in plan.events]
    assert ("wait", "copy") not in kinds
    assert kinds.count(("gather", "copy")) == sum(kind == "gather" for kind, *_ in kinds) == 6
    assert kinds.count(("copy",)) == 6 + len(plan.units)
    held = [dict(some) for some in plan.held]
    assert all(size >= 0 for some in held for size in some.values())
    assert not any(held[-1].values())


def test_exposed_communication() -> None:
    """A slower network makes the step longer, by what it exposes alone; a fast one is hidden."""
    with torch.device("meta"):
        model = common.GPT(4, 64, 2, 16)
    spec = blocks(P("shard"))(model).on(ONE)
    links = (fs.Hardware(bandwidth=rate, latency=0, flops=1e12) for rate in (1e15, 1e9))
    fast, slow = (fs.plan(spec, batch=4096, hardware=hardware) for hardware in links)
    assert fast.exposed_seconds < 1e-3 * fast.seconds
    assert slow.seconds - slow.exposed_seconds == pytest.approx(fast.seconds - fast.exposed_seconds)
    assert slow.exposed_seconds > 10 * fast.exposed_seconds
    total = sum(one.seconds for one in slow.traffic)
    assert slow.exposed_seconds <= total


def test_large_mesh_is_fast() -> None:
    """126 blocks on 32 x 512 ranks take a fraction of a second."""
    with torch.device("meta"):
        model = common.Llama(126, 16384, 128, 53248, 128256, kv_heads=8)
    spec = fs.by_type(common.LlamaBlock)(model).on({"replicate": 32, "shard": 512})
    start = time.process_time()
    plan = fs.plan(spec, batch=8192)
    text = str(plan)
    assert time.process_time() - start < 5
    assert "replicate=32" in text
    assert plan.at_rest["parameters"] == sum(spec.shard_numel(unit) for unit in spec) * 4


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"optimizer": "adamv"}, ValueError, "name of a class of torch.optim"),
        ({"optimizer": 3}, TypeError, "expected a name such as 'adamw'"),
        ({"batch": "4"}, TypeError, "number of tokens"),
        *(({"batch": n}, ValueError, rf"number of tokens, at least 1, .* got {n}") for n in (-1, 0, True, False, 2.5)),
        ({"hardware": "h100"}, TypeError, "expected a Hardware"),
        ({"hardware": 0}, TypeError, "expected a Hardware"),
        ({"hardware": fs.Hardware(bandwidth={"other": 1e9})}, ValueError, "no bandwidth for axis 'shard'"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    spec = fs.policies.whole()(nn.Linear(4, 4)).on({"shard": 2})
    with pytest.raises(error, match=words):
        str(fs.plan(spec, **change))


def test_wrong_hardware() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        fs.Hardware(bandwidth=0)
    with pytest.raises(ValueError, match="'80GB'"):
        fs.Hardware(memory="a lot")
    with pytest.raises(ValueError, match="latency: expected at least 0"):
        fs.Hardware(latency=math.nan)


# --- Plan.compare: choices beside each other ---
Block = module_class(
    "Block", lambda: {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}, lambda self, x: x + self.down(self.up(x).relu())
)


def plan_of(mesh: dict[str, int], **options: Any) -> fs._plan.plan.Plan:
    model = nn.Sequential(*(Block() for _ in range(2)))
    optimizer = fs.optim.from_torch(torch.optim.AdamW, lr=1e-3, donate=True)

    def step(params: Any, state: Any, batch: torch.Tensor, *, spec: fs.PartitionSpec, microbatches: int = 1) -> Any:
        def loss(params: fs.Params, x: torch.Tensor) -> torch.Tensor:
            return fs.functional_call(model, params, (x,), spec=spec).square().mean()

        grads, value = fs.accumulate(loss, params, list(batch.chunk(microbatches)), spec=spec)
        return *optimizer.update(grads, state, params), value

    return fs.plan(fs.by_type(Block)(model).on(mesh), step=step, batch=torch.ones(64, 32), optimizer=optimizer, **options)


def test_compare() -> None:
    """Each choice is the plan that fs.plan gives for it, and the fastest is first."""
    plan = plan_of({"shard": 4})
    found = plan.compare({"keep": P("shard", reshard=False), "all": P(), "remat": P("shard", remat=True), "same": plan.spec})
    assert set(found) == {"keep", "all", "remat", "same"}
    assert found["same"].peak == plan.peak
    assert found["remat"].peak < plan.peak < found["all"].peak
    assert {one.op for one in found["all"].traffic} == {"all_reduce"}
    times = [one.seconds for one in found.values()]
    assert times == sorted(times)
    assert all(name in str(found) for name in found)


def test_main_p_alone_changes() -> None:
    """Units with another P than the main one keep it."""
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 2))
    policy = fs.policies.override(fs.by_type(Block), fs.by_path({"2": P()}))
    plan = fs.plan(policy(model).on({"shard": 4}))
    changed = plan.compare({"keep": P("shard", reshard=False)})["keep"].spec
    assert changed.by_key["2"].p == P()
    assert changed.by_key["0"].p == P("shard", reshard=False)


def test_refusals() -> None:
    model = nn.Linear(4, 4)
    unbound = fs.policies.whole()(model)

    def step(params: Any, state: Any, batch: Any) -> Any:
        return fs.grad(lambda p: fs.functional_call(model, p, (batch,), spec=unbound).sum())(params)

    plan = fs.plan(unbound.on({"shard": 2}), step=step, batch=torch.ones(2, 4))
    with pytest.raises(ValueError, match="would run with the same spec"):
        plan.compare({"keep": P("shard", reshard=False)})
    with pytest.raises(TypeError, match="expected a PartitionSpec"):
        plan.compare({"3": 3})  # pyright: ignore[reportArgumentType]
