"""fs.compile of derivatives of derivatives, of batches of several lengths, and its price: what is traced and compiled again."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import Collectives, world
from depth import depth, mark_seldom, seldom
from models import module_class
from parity import loss_of as loss_of_params
from parity import shards_of, squares
from ranks import Pool, launch, mesh_of
from test_compile import Read, Step, chain, gpt, loss_of, low_precision, models, needs_cpp, recording, same, tokens, training
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch.distributed import get_world_size
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

import funshard as fs
from funshard import P
from funshard._compiled.step import compile

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def direction(params: fs.Params) -> fs.Params:
    return {key: p.cos() for key, p in params.items()}


def steps(loss: Step, spec: fs.PartitionSpec) -> dict[str, Step]:
    """Steps of parameters and a batch that take derivatives of derivatives, or of single samples."""

    def adapted(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            grads = fs.grad(loss)(params, x, y)
            params = {key: p - 0.1 * grads[key] for key, p in params.items()}
        return loss(params, x, y)

    def sample_loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        return loss(params, x[None], y[None])

    return {
        "jvp": lambda p, x, y: torch.func.jvp(lambda p: loss(p, x, y), (p,), (direction(p),)),
        "hvp": lambda p, x, y: fs.hvp(lambda p: loss(p, x, y), p, direction(p)),
        "hvp in reverse": lambda p, x, y: fs.hvp(lambda p: loss(p, x, y), p, direction(p), forward=False),
        "grad of grad": lambda p, x, y: fs.grad(lambda p: squares(fs.grad(loss)(p, x, y)))(p),
        "vjp of grad": lambda p, x, y: torch.func.vjp(lambda p: torch.func.grad(loss)(p, x, y), p)[1](direction(p))[0],
        "maml": lambda p, x, y: fs.grad_and_value(adapted)(p, x, y),
        "per sample": lambda p, x, y: fs.per_sample_grads(sample_loss, p, (x, y), spec=spec),
        "per sample, clipped": lambda p, x, y: fs.per_sample_grads(sample_loss, p, (x, y), spec=spec, clip=0.1),
        "grad of hvp": lambda p, x, y: fs.grad(lambda p: squares(fs.hvp(lambda p: loss(p, x, y), p, direction(p))))(p),
    }


# --- the graph ---
LAYERS = 3
ROOT, *BLOCKS = "", *(f"blocks.{i}" for i in range(LAYERS))
UP, DOWN = [ROOT, *BLOCKS], [*BLOCKS[-2::-1]]
"""The gathers of a forward, and of its backward, which finds the root's unit and the last one there."""


class Gathers(Read):
    """The keys of the units that a graph gathers, in its order, and of those the most bytes that are alive at once."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.keys = [node.meta["custom"]["funshard_unit"] for node in graph.graph.nodes if "all_gather" in str(node.target)]

    @staticmethod
    def source(node: Node) -> Node:
        return node  # tangents are computed


@functools.cache
def gathers_of(transform: str, *, reshard: bool = True) -> tuple[Gathers, int, int, int]:
    """Those of a step on 4 ranks, of its eager one how many, and the bytes of the root's unit and of a block's."""
    graphs: list[GraphModule] = []
    with world(4):
        model = chain()
        spec, params = shards_of(fs.by_type(type(model.blocks[0]), p=P("shard", reshard=reshard)), model)
        step = steps(loss_of(model, spec), spec)[transform]
        compile(step, backend=recording(graphs))(params, *tokens(0))
        with Collectives() as sent:
            step(params, *tokens(0))
        root, block = (spec.padded_numel(spec.by_key[key]) * 8 for key in (ROOT, BLOCKS[0]))
    (graph,) = graphs
    return Gathers(graph), sum(s.op == "all_gather" for s in sent.all), root, block


def twice(keys: list[str]) -> list[str]:
    """Of each a weight and its tangent."""
    return [key for key in keys for _ in range(2)]


BACK_UP = [ROOT, BLOCKS[0], *twice(BLOCKS[1:]), ROOT]
"""The backward of a backward: cotangents of all units, and the weights but the first, which the backward had last."""
EXPECTED = {
    "jvp": twice(UP),
    "hvp": twice([*UP, *DOWN]),
    "grad of grad": [*UP, *DOWN, *BACK_UP, *DOWN],
    "hvp in reverse": [*UP, *DOWN, *BACK_UP, *DOWN],
    "per sample": [*UP, *DOWN],
    "per sample, clipped": [*UP, *DOWN] * 2,
}


ALIVE = {"hvp": (2, 4), "grad of grad": (2, 2), "per sample, clipped": (1, 2)}
"""How often the root's unit and a block's at once: the one that runs and the next, with the tangents of all three."""
KEPT = {"hvp": 2, "grad of grad": 2}
"""How often a block is gathered with reshard=False."""


@seldom
@pytest.mark.parametrize("transform", mark_seldom(EXPECTED, "per sample, clipped"))
def test_gradients_of_gradients_gather_again(transform: str) -> None:
    """Each phase gathers what the one before let go, tangents and cotangents with their weights; no more than eager does,
    which has no schedule in such a stack. Single samples' gradients, whose eager call keeps all units, free them. Kept units
    are gathered once, each weight of each call and each tangent."""
    found, eager, root, block = gathers_of(transform)
    assert found.keys == EXPECTED[transform]
    if "sample" not in transform:
        assert len(found.keys) <= eager
    if transform in ALIVE:
        assert found.peak == ALIVE[transform][0] * root + ALIVE[transform][1] * block
    if transform in KEPT:
        assert gathers_of(transform, reshard=False)[0].keys.count(BLOCKS[0]) == KEPT[transform]


# --- values, on two real ranks ---
STRATEGIES = {"reshard": P("shard"), "keep": P("shard", reshard=False), "remat": P("shard", remat=True), "replicate": P()}


def equal_to_eager(rank: int, transform: str, which: str, strategy: str) -> None:
    torch._dynamo.reset()
    model, block, by_call = models(which, 2)
    mesh = mesh_of(2, 2) if strategy == "hsdp" else mesh_of(get_world_size())
    spec, params = shards_of(fs.by_type(block, p=STRATEGIES.get(strategy, P("shard"))), model, mesh)

    def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            return by_call(lambda *a, **k: fs.functional_call(model, params, a, k, spec=spec), x, y)

    step = steps(loss, spec)[transform]
    compiled = compile(step, backend="aot_eager")
    for i in range(2):
        same(compiled(params, *tokens(rank, i)), step(params, *tokens(rank, i)))


TRANSFORMS = ["jvp", "hvp", "hvp in reverse", "grad of grad", "vjp of grad", "maml", "per sample", "per sample, clipped"]

USUAL = ("gloo2", depth("chain", "gpt"), "reshard", "hvp")
CASES = [
    *(("gloo2", USUAL[1], strategy, name) for name in TRANSFORMS for strategy in STRATEGIES),
    *(("gloo2", which, "reshard", name) for which in ("gpt", "llama") for name in ("hvp", "grad of hvp")),
    *(("gloo4", "chain", "hsdp", name) for name in ("hvp", "grad of grad", "per sample, clipped")),
]
MARKED = [pytest.param(*case, marks=[seldom] * (case != USUAL)) for case in CASES]


@pytest.mark.parametrize(("ranks", "which", "strategy", "name"), MARKED)
def test_higher_orders_equal_eager(request: pytest.FixtureRequest, ranks: str, which: str, strategy: str, name: str) -> None:
    """Also of a GPT and a Llama, and on a mesh of two axes."""
    request.getfixturevalue(ranks).run(equal_to_eager, name, which, strategy)


# --- batches and sequences of several lengths ---
counters = torch._dynamo.utils.counters
needs_forward = low_precision
"""torch 2.13: linear layers flatten their input by themselves."""


GRAPHS_BY_SHAPES = [
    ([(4, 8), (4, 8), (3, 8)] * 2, {}, [1, 1, 2, 2, 2, 2]),  # two epochs, with a last smaller batch
    ([(4, 8), (4, 7), (4, 5), (4, 3), (4, 8)], {}, [1, 2, 2, 2, 2]),
    ([(4, 8), (3, 8), (2, 8), (3, 8), (4, 8)], {"dynamic": False}, [1, 2, 3, 3, 3]),
]


@seldom
@needs_forward
@pytest.mark.parametrize(("shapes", "options", "counts"), GRAPHS_BY_SHAPES, ids=str)
def test_graphs_by_shapes(shapes: list[tuple[int, int]], options: dict[str, bool], counts: list[int]) -> None:
    """The second size or length compiles once more, and others after it do not; with dynamic=False each shape has its graph."""
    found: list[int] = []
    with world(4):
        model = depth(chain, gpt)(1)
        spec, params = shards_of(fs.by_type(type(model.blocks[0])), model)
        step = compile(training(loss_of(model, spec)), backend="aot_eager", **options)
        for shape in shapes:
            step(params, direction(params), torch.randint(32, shape), torch.randint(32, shape))
            found.append(counters["stats"]["unique_graphs"])
    assert found == counts


@seldom
@needs_forward
def test_linear_with_a_bias_makes_constants_of_sizes() -> None:
    """Inside torch.func torch's own does, without which `flat_linear` can go; it has the same numbers."""
    layer, x = nn.Linear(3, 2), torch.randn(2, 5, 3)
    flat = fs._torch.flat_linear(layer)
    assert torch.equal(flat(x), layer(x))
    assert torch.equal(flat(x[0]), layer(x[0]))
    for forward, count in ((layer, 2), (flat, 1))[TorchVersion(torch.__version__) >= "2.14" :]:
        torch._dynamo.reset()
        counters.clear()
        step = torch.compile(torch.func.grad(lambda x, f=forward: f(x).sum()), backend="aot_eager", dynamic=True)
        for size in (5, 4):
            step(torch.randn(2, size, 3))
        assert counters["stats"]["unique_graphs"] == count


@seldom
def test_products_with_directions_in_one_graph() -> None:
    """fs.hvp in reverse of a model of products; v is compared with params although their sizes are symbols."""
    with world(4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        spec, params = shards_of(fs.by_type(nn.Linear), model)

        def product(params: fs.Params, x: Tensor) -> fs.Params:
            loss = loss_of_params(model, spec, x, of=lambda y: F.mse_loss(y, x))
            return fs.hvp(loss, params, direction(params), forward=False)

        step = compile(product, backend="aot_eager", dynamic=True)
        for size in (5, 4, 3):
            step(params, torch.randn(size, 4, dtype=torch.float64))
        assert counters["stats"]["unique_graphs"] == 1


# --- what Dynamo traces for each unit, and when it compiles again ---
PACKAGE = Path(fs.__file__).parent

Block = module_class(
    "Block",
    lambda width=4: {"norm": nn.LayerNorm(width), "linear": nn.Linear(width, width), "scale": nn.Buffer(torch.ones(width))},
    lambda self, x: x + self.scale * self.linear(self.norm(x)).tanh(),
)


def blocks_of(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


def step_of(model: nn.Module) -> Any:
    return lambda params, x, spec: fs.grad_and_value(loss_of_params(model, spec, x))(params)


@pytest.fixture
def inlined(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Functions that Dynamo traces, by file and name."""
    found: Counter[str] = Counter()
    original = InliningInstructionTranslator.inline_call_

    def inline_call_(self: Any) -> Any:
        path, name = Path(self.f_code.co_filename), self.f_code.co_name
        found[f"{path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else 'torch'}:{name}"] += 1
        return original(self)

    monkeypatch.setattr(InliningInstructionTranslator, "inline_call_", inline_call_)
    return found


@seldom
def test_few_functions_are_traced_for_each_unit(inlined: Counter[str]) -> None:
    """A unit's gather, its layout and the checks of its shard are not traced; modules are walked without calls."""
    found = []
    for blocks in (3, 5):
        model = blocks_of(blocks)
        spec, params = shards_of(fs.by_type(Block), model, {"shard": 1})
        inlined.clear()
        torch._dynamo.reset()
        fs.compile(step_of(model), backend="aot_eager")(params, torch.ones(2, 4).double(), spec)
        found.append(Counter({name: count for name, count in inlined.items() if not name.startswith("torch:")}))
    few, many = found
    each = {name: (many[name] - few[name]) / 2 for name in many if many[name] != few[name]}
    own = {name: count for name, count in each.items() if "tests" not in name and not name.endswith(":forward")}
    assert sum(own.values()) <= 12, own
    assert few["_wire/flow.py:unshard_unit"] == 0
    assert few["_core/layout.py:unflatten_unit"] == 0


@seldom
def test_a_compiled_step_writes_no_dict_of_a_module() -> None:
    """What Dynamo runs around the graph neither clears nor updates a dict, though the model is a global for it."""
    model, names = blocks_of(4), set[str]()
    globals()["_model"] = model
    spec = fs.by_type(Block)(model).on({"shard": 1})

    def step(params: fs.Params, x: Tensor) -> Any:
        return fs.grad_and_value(lambda p: fs.functional_call(_model, p, (x,), spec=spec).square().mean())(params)  # noqa: F821

    torch._dynamo.reset()
    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda old, new: names.update(new.co_names))
    with contextlib.ExitStack() as stack:
        stack.callback(hook.remove)
        stack.callback(globals().pop, "_model")
        fs.compile(step, backend="aot_eager")(fs.shard(model, spec), torch.ones(2, 4).double())
    assert names
    assert not names & {"clear", "update"}


def compiles(rank: int) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model, x = blocks_of(2), torch.randn(2, 4, dtype=torch.float64)
    policy = fs.by_type(Block)
    compiled, eager = fs.compile(step_of(model), backend="aot_eager"), step_of(model)

    def check(spec: fs.PartitionSpec, graphs: int) -> None:
        params = fs.shard(model, spec)
        torch.testing.assert_close(compiled(params, x, spec), eager(params, x, spec))
        assert counters["stats"]["unique_graphs"] == graphs

    check(policy(model).bound, 1)
    check(policy(model).bound, 1)  # another object, equal
    gc.collect()
    check(policy(model).bound, 1)  # and after the first one is gone
    check(fs.policies.whole()(model).bound, 2)
    check(fs.by_type(Block, p=fs.P())(model).bound, 3)
    check(policy(model).bound, 3)


@seldom
@pytest.mark.parametrize("ranks", mark_seldom(["alone", "gloo2"], "alone"))
def test_equal_specs_share_a_graph(request: pytest.FixtureRequest, ranks: str) -> None:
    """A spec that is made anew, with the same contents, does not compile again; any other does, and has its own values."""
    pool: Pool = request.getfixturevalue(ranks)
    pool.run(compiles)


@pytest.mark.parametrize("given", depth(["all"], ["none", "some", "all"]))
def test_buffers_that_two_modules_share(given: str) -> None:
    """Compiled and eager calls agree on buffers that are shared, given in part, or replaced in forward."""

    def count(self: Any, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.linear(x) * self.shared * self.seen

    shared = torch.full((2,), 3.0)
    parts = lambda: {"linear": nn.Linear(2, 2), "shared": nn.Buffer(shared), "seen": nn.Buffer(torch.zeros(()))}  # noqa: E731
    Counting = module_class("Counting", parts, count)
    model = nn.Sequential(Counting(), Counting())
    model[1].shared = model[0].shared
    (spec, params), x = shards_of(fs.by_type(Counting), model, {"shard": 1}), torch.randn(3, 2)
    names = {"none": [], "some": ["0.seen"], "all": ["0.shared", "0.seen", "1.shared", "1.seen"]}[given]
    own = dict(model.named_buffers(remove_duplicate=False))

    def run(call: Any) -> Any:
        buffers = {name: own[name].clone() for name in names}
        with pytest.warns(fs._call.buffers.BufferWarning) if given != "all" else contextlib.nullcontext():
            return call(params, buffers), buffers

    def call(params: fs.Params, buffers: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (x,), spec=spec, buffers=buffers)

    expected = run(call)
    torch.testing.assert_close(run(torch.compile(call, backend="eager", fullgraph=True)), expected)
    assert all(torch.equal(b, torch.zeros(()) if name.endswith("seen") else shared) for name, b in own.items())


@seldom
@needs_cpp
def test_later_starts_find_the_compiled_code(tmp_path: Path) -> None:
    """In inductor's cache, or in torch's artifacts, which another machine loads; never that of another schedule."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys
import torch, funshard as fs
from torch._dynamo.utils import counters

artifacts, reshard = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
spec = fs.by_type(torch.nn.Linear, p=fs.P("shard", reshard=reshard == "reshard"))(model).on({"shard": 1})
loss = lambda params: fs.functional_call(model, params, torch.ones(2, 4), spec=spec).sum()
if artifacts.startswith("load "):
    torch.compiler.load_cache_artifacts(open(artifacts[5:], "rb").read())
fs.compile(fs.grad(loss))(fs.shard(model, spec))
if artifacts.startswith("save "):
    open(artifacts[5:], "wb").write(torch.compiler.save_cache_artifacts()[0])
print({name.removeprefix("fxgraph_cache_"): n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache")})
""")

    def start(cache: str, artifacts: str, reshard: str = "reshard") -> str:
        found = launch(1, program, artifacts, reshard, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / cache))
        return found.splitlines()[-1]

    file = tmp_path / "artifacts"
    assert start("here", f"save {file}") == "{'miss': 1}"
    assert start("here", "none") == "{'hit': 1}"
    assert start("there", f"load {file}") == "{'hit': 1}"
    assert start("here", "none", "keep") == "{'miss': 1}"
