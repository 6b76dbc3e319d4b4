"""fs.compile of derivatives of derivatives, of batches of several lengths, its price, and what it has of an eager call."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import Collectives, world
from depth import at_most, depth, each, every, mark_seldom, seldom
from models import module_class
from parity import loss_of as loss_of_params
from parity import same_leaves, shards_of, squares
from ranks import Pool, launch, mesh_of, real_ranks
from test_compile import Read, Step, chain, gpt, loss_of, low_precision, models, needs_cpp, recording, same, tokens, training
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch.distributed import get_world_size
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map

import funshard as fs
from funshard import P, _torch
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
        "vmap of grad": lambda p, x, y: torch.vmap(torch.func.grad(sample_loss), (None, 0, 0))(p, x, y),
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
    by: Any = functools.partial(torch.compile, fullgraph=True) if strategy == "torch.compile" else compile
    compiled = by(step, backend="aot_eager")
    for i in range(2):
        same(compiled(params, *tokens(rank, i)), step(params, *tokens(rank, i)))


TRANSFORMS = ["jvp", "hvp", "hvp in reverse", "grad of grad", "vjp of grad", "maml", "per sample", "per sample, clipped"]

USUAL = ("gloo2", depth("chain", "gpt"), "reshard", "hvp")
CASES = [
    *(("gloo2", USUAL[1], strategy, name) for name in TRANSFORMS for strategy in STRATEGIES),
    *(("gloo2", which, "reshard", name) for which in ("gpt", "llama") for name in ("hvp", "grad of hvp")),
    *(("gloo4", "chain", "hsdp", name) for name in ("hvp", "grad of grad", "per sample, clipped")),
]
BY_TORCH = [("gloo2", USUAL[1], "torch.compile", name) for name in ("grad of grad", "hvp", "vjp of grad", "vmap of grad")]
"""With the strategy of blocks."""
MARKED = [pytest.param(*case, marks=[seldom] * (case not in (USUAL, BY_TORCH[0]))) for case in (*CASES, *BY_TORCH)]


@pytest.mark.parametrize(("ranks", "which", "strategy", "name"), MARKED)
def test_higher_orders_equal_eager(request: pytest.FixtureRequest, ranks: str, which: str, strategy: str, name: str) -> None:
    """Law G10. Also of a GPT and a Llama, on a mesh of two axes, and by torch.compile, whose gradients test_matrix.py has."""
    request.getfixturevalue(ranks).run(equal_to_eager, name, which, strategy)


# --- batches and sequences of several lengths ---
counters = torch._dynamo.utils.counters


GRAPHS_BY_SHAPES = [
    ([(4, 8), (4, 8), (3, 8)] * 2, {}, [1, 1, 2, 2, 2, 2]),  # two epochs, with a last smaller batch
    ([(4, 8), (4, 7), (4, 5), (4, 3), (4, 8)], {}, [1, 2, 2, 2, 2]),
    ([(4, 8), (3, 8), (2, 8), (3, 8), (4, 8)], {"dynamic": False}, [1, 2, 3, 3, 3]),
]


@seldom
@low_precision
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
@low_precision
def test_linear_with_a_bias_makes_constants_of_sizes() -> None:
    """Inside torch.func torch's own does, without which `flat_linear` can go; it has the same numbers."""
    layer, x = nn.Linear(3, 2), torch.randn(2, 5, 3)
    flat = _torch.flat_linear(layer)
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
    check(fs.by_type(Block, p=P())(model).bound, 3)
    check(policy(model).bound, 3)


@seldom
@pytest.mark.parametrize("ranks", mark_seldom(["alone", "gloo2"], "alone"))
def test_equal_specs_share_a_graph(request: pytest.FixtureRequest, ranks: str) -> None:
    """A spec that is made anew, with the same contents, does not compile again; any other does, and has its own values."""
    pool: Pool = request.getfixturevalue(ranks)
    pool.run(compiles)


def test_buffers_that_two_modules_share() -> None:
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
    own = dict(model.named_buffers(remove_duplicate=False))

    def run(call: Any) -> Any:
        buffers = {"0.seen": own["0.seen"].clone()}
        with pytest.warns(fs._call.buffers.BufferWarning):
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


# --- what a compiled call has of an eager one: its casts, and what forward sets in its modules ---
LOW = fs.Precision(param=torch.bfloat16, reduce=torch.float32, buffer=torch.bfloat16)
SHARD, REPLICATED = P("shard", precision=LOW), P(precision=LOW)


Cast = module_class(
    "Cast",
    lambda: {
        "first": nn.Linear(3, 4),
        "norm": nn.LayerNorm(4),
        "last": nn.Linear(4, 2),
        "scale": nn.Buffer(torch.tensor([1.001, 0.5, 2.0, 3.0])),
    },
    lambda self, x: self.last(self.norm(self.first(x) * self.scale) + torch.ones(4)),  # of float32: the last layer casts
)
"""Modules with a precision of their own inside of one with another, a tensor made on the way, and a buffer."""


@pytest.mark.parametrize(
    ("p", "last"),
    [
        *(
            pytest.param(p, last, marks=low_precision)
            for p, last in depth([(SHARD, REPLICATED)], [(SHARD, SHARD), (REPLICATED, REPLICATED)])
        ),
        pytest.param(P("shard", precision=fs.Precision(reduce=torch.bfloat16)), None, marks=seldom),
    ],
)
@real_ranks(2)
def test_casts_inside_of_a_compiled_call(rank: int, p: fs.P, last: fs.P | None) -> None:
    """The same casts around modules, of buffers, gathers and reductions, bit for bit; the model is as it was.

    A precision of the whole model on every torch.
    """
    model, x = Cast(), torch.randn(2, 5, 3)[rank]
    spec = fs.policies.whole(p)(model).bound
    if last:
        units = fs.policies.override(fs.policies.whole(p), fs.by_path({"first": p, "last": last}))
        spec = fs.policies.full_precision(units, torch.nn.LayerNorm)(model).bound
    params = fs.shard(model, spec)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = fs.functional_call(model, params, (x,), spec=spec)
        assert y.dtype == torch.bfloat16 or p.precision is None or p.precision.param is None
        return y.float().square().mean()

    for gradient in depth([fs.grad if p.axes else torch.func.grad], [fs.grad, torch.func.grad]):
        torch._dynamo.reset()
        expected = gradient(loss)(params, x)
        before = {path: dict(vars(module)) for path, module in model.named_modules()}
        compiled = torch.compile(gradient(loss), fullgraph=True, backend="aot_eager")
        same_leaves(compiled(params, x), expected, rtol=0, atol=0)
        assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


@pytest.mark.skipif(_torch.FORWARD_CAN_BE_REPLACED, reason="before torch 2.13")
def test_casts_inside_of_a_compiled_call_are_refused() -> None:
    """By name, where Dynamo cannot see them."""
    model = Cast()
    spec = fs.by_type(torch.nn.Linear, p=P("shard", precision=LOW))(model)
    call = torch.compile(lambda p, x: fs.functional_call(model, p, (x,), spec=spec), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"unit 'first' has a Precision: inside torch\.compile"):
        call(fs.shard(model, spec), torch.randn(5, 3))


# --- what forward sets in its modules: as in eager calls, the modules have it until the call ends ---
class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count, self.cache, self.gone = 0, None, 2.0


def counts(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.linear(x) * self.count


def caches(self: Any, x: Tensor) -> Tensor:
    self.cache = x.detach() if self.cache is None else self.cache + x.detach()
    return self.linear(x) + self.cache


def deletes(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x) * getattr(self, "gone", 3.0)
    if hasattr(self, "gone"):
        del self.gone
    return y * getattr(self, "gone", 5.0)


def registers(self: Any, x: Tensor) -> Tensor:
    if "late" not in self._buffers:
        self.register_buffer("late", torch.full_like(x[0], 2.0))
    self.late = self.late * 1.5
    return self.linear(x) * self.late


def switches(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x) * (2.0 if self.training else 3.0)
    self.eval()
    return y * (5.0 if self.linear.training else 7.0)


def stateful(forward: Callable[..., Any]) -> type[nn.Module]:
    return type(forward.__name__, (Stateful,), {"forward": forward})


MODULES = {f.__name__: stateful(f) for f in (counts, caches, deletes, registers, switches)}
if not _torch.FORWARD_CAN_BE_REPLACED:  # before torch 2.13 Dynamo cannot ask for an attribute that the same trace has deleted
    del MODULES["deletes"]
COMPILERS: dict[str, Callable[..., Any]] = {"fs.compile": fs.compile, "torch.compile": torch.compile}


def attributes(model: nn.Module) -> list[Any]:
    return [{name: str(value) for name, value in vars(m).items() if name != "_parameters"} for m in model.modules()]


def check(rank: int, which: str, compiler: str, derivative: str) -> None:
    warnings.simplefilter("ignore", fs._call.buffers.BufferWarning)
    model = nn.Sequential(MODULES[which](), nn.Linear(3, 3), MODULES[which]()).double()
    spec, params = shards_of(fs.by_type(Stateful, p=P("shard", remat=get_world_size() > 1)), model)

    def step(params: fs.Params, x: Tensor) -> Any:
        model.steps = getattr(model, "steps", 0) + 1  # outside of the call, where it stays

        def loss(params: fs.Params) -> Tensor:
            outs = [fs.functional_call(model, params, (x * k,), spec=spec).sin() for k in (1, 2)]
            return model.steps * outs[0].sum() * outs[1].sum()

        if derivative == "hvp":
            return fs.hvp(loss, params, tree_map(torch.ones_like, params))
        return fs.grad_and_value(loss)(params)

    torch._dynamo.reset()
    counters.clear()
    before = attributes(model)
    compiled = COMPILERS[compiler](step, backend="aot_eager", fullgraph=True)
    results: list[list[Any]] = []
    for function in (compiled, step):
        model.__dict__.pop("steps", None)
        results.append([])
        for seed in range(3):
            x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + seed))
            results[-1].append(tree_map(torch.clone, function(params, x)))
        assert model.__dict__.pop("steps") == 3
        assert attributes(model) == before
    torch.testing.assert_close(*results)


@at_most(1)
@each
@pytest.mark.parametrize("ranks", mark_seldom(["alone", "gloo2"], "alone"))
@every(derivative=mark_seldom(["grad", "hvp"], "grad"), compiler=COMPILERS, which=mark_seldom(MODULES, "caches", "counts"))
def test_attributes_that_forward_sets_are_restored(
    request: pytest.FixtureRequest, which: str, compiler: str, derivative: str, ranks: str
) -> None:
    """Counters, caches, deleted ones, new buffers, the training flag: equal to eager in every call; on two ranks with remat."""
    request.getfixturevalue(ranks).run(check, which, compiler, derivative)


class Routes(Stateful):
    """As a mixture of experts has it, beside a cache of constants and a state where None was before."""

    def forward(self, x: Tensor) -> Tensor:
        gates = self.linear(x).softmax(-1)
        self.count, self.cache, self.positions = gates.square().sum(), gates[1:], torch.arange(3.0).cos()
        return x * gates * self.positions


def recorded(rank: int, compiler: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    normed = nn.utils.weight_norm(nn.Linear(3, 3))  # its hook computes a weight with a graph in each forward
    model, x = nn.Sequential(Routes(), normed), torch.randn(2, 3)
    spec = fs.policies.whole()(model)
    step = fs.grad(lambda p: fs.functional_call(model, p, (x,), spec=spec).sum() + model[0].count)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="leaves a tensor with a graph in attribute 'count' of a Routes, and the call puts"):
        COMPILERS[compiler](step, backend="aot_eager", fullgraph=True)(fs.shard(model, spec))
    torch._dynamo.reset()
    model[0].forward = lambda x: x * 2
    COMPILERS[compiler](step, backend="aot_eager", fullgraph=True)(fs.shard(model, spec))


@seldom
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_tensor_with_a_graph_in_an_attribute_is_an_error(alone: Pool, compiler: str) -> None:
    """It would be read later without its gradient, as in eager calls."""
    alone.run(recorded, compiler)
