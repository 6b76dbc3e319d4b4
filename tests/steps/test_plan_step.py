"""fs.plan from shapes alone: what it counts is what a step sends and holds."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from depth import at_most, each, seldom
from models import module_class, refused
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import funshard as fs
from funshard.__main__ import main
from funshard._plan.plan import CATEGORY_COLORS

P = fs.P
EXAMPLES = Path(__file__).parents[2] / "examples"


def load(folder: Path, name: str) -> Any:
    """A module of a folder of scripts, which import each other by their names."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


common, counted, measured = (load(EXAMPLES / "benchmarks", name) for name in ("common", "counted", "measured"))
moe = load(EXAMPLES, "moe")
BF16 = fs.Precision(param=torch.bfloat16, reduce=torch.float32)
MIXED = dataclasses.replace(BF16, keep={"*norm*": torch.float32})
ENCODED = fs.Precision(param=torch.bfloat16, reduce_codec=fs.codecs.int8())
ONE, TWO = {"shard": 8}, {"replicate": 2, "shard": 4}
BOTH = ("replicate", "shard")


def blocks(p: P) -> fs.Policy:
    return fs.by_type(common.Block, p=p)


def shapes_of(layers: int) -> nn.Module:
    with torch.device("meta"):
        return common.GPT(layers, 64, 2, 16)


def nested(p: P, inner: P) -> fs.Policy:
    return fs.policies.override(blocks(p), fs.by_type(nn.Linear, p=inner))


def grouped(p: P) -> fs.Policy:
    """Blocks by three, and the last layers."""
    return fs.policies.override(fs.policies.by_group([common.Block], size=3, p=p), fs.policies.by_group(["norm", "head"], p=p))


CASES: dict[str, tuple[fs.Policy, dict[str, int]]] = {
    "shard": (blocks(P("shard")), ONE),
    "keep": (blocks(P("shard", reshard=False)), ONE),
    "HSDP in bf16": (blocks(P("shard", precision=BF16)), TWO),
    "P() on two axes": (blocks(P()), TWO),
    "both axes in bf16": (blocks(P(BOTH, precision=BF16)), TWO),
    "mixed dtypes": (blocks(P("shard", precision=MIXED)), ONE),
    "remat HSDP": (blocks(P("shard", remat=True)), TWO),
    "whole": (fs.policies.whole(P("shard")), ONE),
    "codec": (blocks(P("shard", precision=fs.Precision(codec=fs.codecs.int8()))), ONE),
    "encoded gradients, HSDP": (blocks(P("shard", remat=True, align=64, precision=ENCODED)), TWO),
    "nested remat keep": (nested(P("shard", remat=True), P("shard", reshard=False)), ONE),
    "remat in remat": (nested(P("shard", remat=True), P("shard", remat=True)), ONE),
    "mixed": (nested(P("shard"), P()), TWO),
    "kept slices of a codec": (blocks(P(BOTH, reshard="shard", precision=fs.Precision(codec=fs.codecs.int8()))), TWO),
    "kept slices, remat": (nested(P(BOTH, reshard="shard", remat=True), P(BOTH, reshard="shard")), TWO),
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


def bound(case: str, model: nn.Module) -> fs.PartitionSpec:
    policy, mesh = CASES[case]
    spec = policy(model).on(init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)))
    return spec.ordered(fs.trace_order(model, spec, (torch.zeros(1, 16, dtype=torch.long),)))


@at_most(1)
@pytest.mark.parametrize("case", CASES)
def test_counts_are_those_of_a_step(case: str) -> None:
    """Collectives and bytes of every kind, to the byte; the bytes of shards and gradients; what is allocated is freed."""
    model = common.GPT(4, 64, 2, 16)
    with common.fake_world(8):
        spec = bound(case, model)
        plan = fs.plan(spec)
        work, grads = work_of(spec, model)
        planned = {one.op: [0, 0, 0] for one in plan.traffic}
        for one in plan.traffic:
            planned[one.op] = [
                a + b for a, b in zip(planned[one.op], (one.count, one.input_bytes, one.output_bytes), strict=True)
            ]
        ops = [op for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") if work.ops[op]]
        assert planned == {op: [work.ops[op], work.bytes[f"into {op}"], work.bytes[f"out of {op}"]] for op in ops}
        assert plan.at_rest["parameters"] == sum(shard.nbytes for shard in fs.shard(model, spec).values())
        assert plan.peaks["update"]["gradients"] == sum(grad.nbytes for grad in grads.values())
        held = [moment.held for moment in plan.moments]
        assert all(size >= 0 for some in held for size in some.values())
        assert {name: size for name, size in held[-1].items() if size} == plan.at_rest


def test_buckets_are_those_of_the_device() -> None:
    """16 units of 1 MiB are reduced by 4 MiB on a mesh of the CPU, and together where the mesh is sizes alone."""
    spec = fs.by_type(nn.Linear, p=P())(nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))))
    with common.fake_world(8):
        on_cpu = fs.plan(spec.on(init_device_mesh("cpu", (8,))), optimizer=None)
    assert [[one.count for one in plan.traffic] for plan in (on_cpu, fs.plan(spec.on(ONE)))] == [[4], [1]]


def test_optimizer_on_frozen_and_host_units() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    policy = fs.by_path({"0": P("shard", at_rest=fs.codecs.nf4()), "1": P("shard", offload="params")})
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
    model = shapes_of(3)
    plan = fs.plan(blocks(p)(model).on(ONE), batch=64)
    kinds = [(event.kind, *(plan.events[i].kind for i in event.after)) for event in plan.events]
    assert ("wait", "copy") not in kinds
    assert kinds.count(("gather", "copy")) == sum(kind == "gather" for kind, *_ in kinds) == 6
    assert kinds.count(("copy",)) == 6 + len(plan.units)
    held = [moment.held for moment in plan.moments]
    assert all(size >= 0 for some in held for size in some.values())
    assert not any(held[-1].values())


def test_exposed_communication() -> None:
    """A slower network makes the step longer, by what it exposes alone; a fast one is hidden."""
    model = shapes_of(4)
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
        *(({"batch": n}, ValueError, rf"number of tokens, at least 1, .* got {n}") for n in (0, True, 2.5)),
        ({"hardware": 0}, TypeError, "expected a Hardware"),
        ({"hardware": fs.Hardware(bandwidth={"other": 1e9})}, ValueError, "no bandwidth for axis 'shard'"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    spec = fs.policies.whole()(nn.Linear(4, 4)).on({"shard": 2})
    refused(error, words, lambda: str(fs.plan(spec, **change)))


def test_wrong_hardware() -> None:
    refused(ValueError, "bandwidth", lambda: fs.Hardware(bandwidth=0))
    refused(ValueError, "'80GB'", lambda: fs.Hardware(memory="a lot"))
    refused(ValueError, "latency: expected at least 0", lambda: fs.Hardware(latency=math.nan))


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
    assert all(f"'{name}': <Plan: " in str(found) for name in found)
    policy = fs.policies.override(fs.by_type(Block), fs.by_path({"2": P()}))  # units with another P than the main one keep it
    plan = fs.plan(policy(nn.Sequential(Block(), Block(), nn.Linear(32, 2))).on({"shard": 4}))
    changed = plan.compare({"keep": P("shard", reshard=False)})["keep"].spec
    assert (changed.by_key["2"].p, changed.by_key["0"].p) == (P(), P("shard", reshard=False))


def test_a_step_without_spec() -> None:
    """It would run on the ranks that its own spec knows, and all choices alike."""
    spec = fs.policies.whole()(nn.Linear(8, 8)).on(ONE_STEP)
    with pytest.raises(TypeError, match=r"plan: step: expected step\(params, state, batch, \*, spec\), .* got no spec"):
        fs.plan(spec, batch=torch.ones(2, 8), step=lambda params, state, batch: params)
    refused(TypeError, "expected a PartitionSpec", lambda: fs.plan(spec).compare({"3": 3}))


# --- python -m funshard plan, and the picture of a plan ---
GUIDE = Path(__file__).parents[2] / "examples" / "guide"

MODEL = """
from torch import nn
import funshard as fs


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def make():
    return nn.Sequential(nn.Embedding(32, 16), *(Block() for _ in range(3)), nn.Linear(16, 32))
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM


def llama_7b():
    return LlamaForCausalLM(LlamaConfig())
"""
SVG = "{http://www.w3.org/2000/svg}"
MADE_WITH = {"torch": "2.13.0", "transformers": "5.24.0"}
"""The versions that the picture in README was made with: others save other activations."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a callable that returns a model, in a module of its own."""
    (tmp_path / "planned_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planned_model", raising=False)
    return "planned_model:make"


def test_what_is_printed_is_the_plan(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The table is that of fs.plan for the same model, policy and mesh; with a batch activations are counted, and drawn."""
    main(["plan", model, "--policy", "by_type:Block", "--mesh", "replicate=2,shard=4", "--batch", "64"])
    module = sys.modules["planned_model"]
    spec = fs.by_type(module.Block)(module.make()).on({"replicate": 2, "shard": 4})
    assert capsys.readouterr().out == f"{fs.plan(spec, batch=64)}\n"
    main(["plan", model, "--policy", "by_type:Block", "--mesh", "shard=2", "--batch", "4x8", "--svg", "plan.svg"])
    assert "activations" in capsys.readouterr().out
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert root.tag == f"{SVG}svg"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "by_type:Blok"], "--policy: expected whole, or by_type:NAME with some of ['Block'"),
        (["--mesh", "shard"], "argument --mesh: invalid axes_and_sizes value: 'shard'"),
        (["--batch", "4,8"], "argument --batch: invalid shape_or_tokens value: '4,8'"),
    ],
)
def test_wrong_options(model: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(SystemExit, "2", lambda: main(["plan", model, *options]))
    assert words in capsys.readouterr().err


def test_picture() -> None:
    """Areas for what is held, and the phases and streams, inside of the picture."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    plan = fs.plan(fs.by_type(nn.Linear)(module).on({"shard": 3}), batch=16)
    root = ElementTree.fromstring(plan.to_svg())
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    held = {name for held in plan.peaks.values() for name, size in held.items() if size}
    areas = [path.attrib["fill"] for path in root.iter(f"{SVG}path") if path.attrib["d"].endswith("Z")]
    assert sorted(areas) == sorted(CATEGORY_COLORS[name] for name in held)
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert {"forward", "backward", "gathers", "reductions"} <= {*texts}
    assert any("peak: backward of" in text for text in texts)


@seldom
def test_readme_shows_what_its_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make it again: run the command under it, and move plan.svg to examples/guide."""
    if (found := {name: version(name).partition("+")[0] for name in MADE_WITH}) != MADE_WITH:
        pytest.skip(f"the picture is of {MADE_WITH}, and here are {found}")
    (tmp_path / "models.py").write_text(LLAMA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "models", sys)  # so that tests/models.py, if others have it, is there again afterwards
    del sys.modules["models"]
    readme = (GUIDE.parents[1] / "README.md").read_text()
    (command,) = re.findall(r"^python -m funshard (plan .*)$", readme, re.MULTILINE)
    assert "](examples/guide/plan.svg)" in readme.partition(command)[0]
    main(shlex.split(command))
    assert (tmp_path / "plan.svg").read_text() == (GUIDE / "plan.svg").read_text()


# --- fs.plan(step=): the peak is the profiler's, and what is sent is what the step sends ---
BATCH = 4, 64


class Case(NamedTuple):
    """A model, its policy with these options of P, and the value of its loss."""

    make: Callable[[], nn.Module]
    policy: Callable[[P], fs.Policy]
    value: Callable[[nn.Module, fs.Params, tuple[Tensor, ...], fs.PartitionSpec], Tensor]


def moe_value(model: nn.Module, params: fs.Params, batch: tuple[Tensor, ...], spec: fs.PartitionSpec) -> Tensor:
    return fs.functional_call(model, params, (*batch, spec.bound_mesh, 0.01), spec=spec)


def make_llama() -> nn.Module:
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64))


# the experts of moe are units of their own: the mesh needs no axis for them, of which each rank has all
STEP_CASES = {
    "gpt": Case(
        lambda: common.GPT(6, 128, 2, 64),
        blocks,
        lambda model, p, batch, spec: common.loss_of(fs.functional_call(model, p, (batch[0],), spec=spec), batch[1]),
    ),
    "llama": Case(
        make_llama,
        lambda p: fs.by_type(LlamaDecoderLayer, p=p),
        lambda model, p, batch, spec: (
            fs.functional_call(model, p, (batch[0],), {"labels": batch[1], "use_cache": False}, spec=spec).loss
        ),
    ),
    "moe": Case(
        lambda: moe.MoE(2, 64, 4, 64, 128, 8), lambda p: fs.by_path({"blocks.*": p, "blocks.*.experts": p}, p), moe_value
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
ONE_STEP, TWO_STEPS = {"shard": 4}, {"replicate": 2, "shard": 2}
PEAKS: list[tuple[str, str, P, str, dict[str, int]]] = [
    ("gpt", "shard", P("shard"), "adamw", ONE_STEP),
    ("gpt", "keep", P("shard", reshard=False), "donate", ONE_STEP),
    ("gpt", "P()", P(), "sgd", ONE_STEP),
    ("gpt", "save", P("shard", remat=fs.Remat(common.ATTENTION)), "donate", ONE_STEP),
    ("llama", "remat", P("shard", remat=True), "sgd", ONE_STEP),
    ("llama", "both axes", P(("replicate", "shard"), precision=BF16), "adamw", TWO_STEPS),
    ("gpt", "kept slices", P(("replicate", "shard"), reshard="shard"), "donate", TWO_STEPS),
    ("moe", "shard", P("shard"), "adamw", ONE_STEP),
    ("moe", "remat", P("shard", remat=True), "sgd", ONE_STEP),
    ("gpt", "mixed dtypes", P("shard", precision=MIXED), "adamw", ONE_STEP),
    ("gpt", "encoded gradients", P("shard", align=64, precision=ENCODED), "adamw", ONE_STEP),
]


@at_most(1)
@each
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(
    ("name", "what", "p", "optimizer", "mesh"),
    [pytest.param(*c, id=f"{c[0]} {c[1]}", marks=[] if i % 4 == 1 else seldom) for i, c in enumerate(PEAKS)],
)
def test_peaks_are_the_profilers(name: str, what: str, p: P, optimizer: str, mesh: dict[str, int]) -> None:
    """Within 3 percent, for every choice of P, strategy and optimizer; and what is sent is what shapes alone say."""
    batch = tuple(torch.randint(256, (2, *BATCH), generator=torch.Generator().manual_seed(0)).unbind())
    plan = planned(STEP_CASES[name], p, optimizer_of(optimizer), mesh, batch)
    peak = measured_peak(STEP_CASES[name], p, optimizer_of(optimizer), mesh, batch)
    assert plan.peak - plan.batch_bytes == pytest.approx(peak, rel=0.03)
    of_shapes = fs.plan(plan.spec, optimizer=optimizer_of(optimizer))
    sent = [{(t.axis, t.op): (t.input_bytes, t.output_bytes) for t in one.traffic} for one in (plan, of_shapes)]
    assert sent[0] == sent[1] or name == "moe"  # whose loss adds up over ranks by itself
    assert plan.at_rest["optimizer"] == of_shapes.at_rest["optimizer"]


def fail(*_: object, spec: object) -> None:
    raise KeyError("mine")


def test_steps_that_are_refused_leave_nothing_behind() -> None:
    """One that fails, one that sends nothing from its one rank, and units on the host without an accelerator."""
    for p, error, words, step in (
        (P("shard"), KeyError, "mine", fail),
        (P("shard"), RuntimeError, "sends nothing", lambda params, state, batch, spec: batch.sum()),
        (
            P("shard", offload="params"),
            NotImplementedError,
            "where the device is the host",
            lambda params, state, batch, spec: params,
        ),
    ):
        spec = fs.policies.whole(p)(nn.Linear(4, 4)).on(ONE_STEP)
        refused(error, words, lambda: fs.plan(spec, batch=torch.ones(2, 4), step=step))
        assert not dist.is_initialized()
    with common.fake_world(2):
        spec, group = fs.policies.whole()(nn.Linear(4, 4)).on(ONE_STEP), dist.group.WORLD
        refused(RuntimeError, "plan before init_process_group", lambda: fs.plan(spec, batch=torch.ones(2, 4), step=fail))
        assert dist.group.WORLD is group
