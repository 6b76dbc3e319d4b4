"""fs.compile: the graph and the generated code of a step have functional_call's schedule; values are the eager step's."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_log import world
from depth import at_most, depth, every, mark_seldom, seldom
from models import build, module_class, refused
from parity import loss_of as loss_of_params
from parity import shards_of
from ranks import launch, mesh_of, real_ranks
from test_scan import held
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P, _torch
from funshard._compiled.step import compile

PATH = Path(__file__).parents[2] / "examples" / "benchmarks" / "common.py"
_found = importlib.util.spec_from_file_location("benchmark_models", PATH)
assert _found is not None
assert _found.loader is not None
common = sys.modules["benchmark_models"] = importlib.util.module_from_spec(_found)
_found.loader.exec_module(common)

Step = Callable[..., Any]
LAYERS = 3
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
IMPORT = "`torch.jit.script_method`"  # torch's own, when inductor is first imported


def has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


needs_cpp = pytest.mark.skipif(not has_cpp_compiler(), reason="inductor needs a C++ compiler on this machine")


def gpt(layers: int = LAYERS, dim: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return common.GPT(layers, dim, 2, 8, 32).double()


Block = module_class("Block", lambda dim: {"linear": nn.Linear(dim, dim)}, lambda self, x: x + F.gelu(self.linear(x)))


def chain(layers: int = LAYERS, dim: int = 16) -> nn.Sequential:
    """A GPT of one product a block: as many units, and a fraction of the compiler's work."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
    parts = {"token": nn.Embedding(32, dim), "blocks": blocks, "head": nn.Linear(dim, 32, bias=False)}
    return nn.Sequential(OrderedDict(parts)).double()


def tokens(rank: int, i: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(32, (2, 2, 8), generator=torch.Generator().manual_seed(10 * i + rank))
    return x, y


def loss_of(model: nn.Module, spec: fs.PartitionSpec) -> Step:
    return lambda params, x, y: common.loss_of(fs.functional_call(model, params, (x,), spec=spec), y)


def training(loss: Step, grad: Step = fs.grad_and_value) -> Step:
    """A step with momentum."""

    def step(params: fs.Params, state: fs.Params, *batch: Any) -> tuple[fs.Params, fs.Params, Tensor]:
        grads, value = grad(loss)(params, *batch)
        state = {k: 0.9 * m + grads[k] for k, m in state.items()}
        return {k: p - 0.1 * state[k] for k, p in params.items()}, state, value

    return step


def zeros(params: fs.Params) -> fs.Params:
    return {k: torch.zeros_like(p) for k, p in params.items()}


def copies(tree: Any) -> Any:
    return pytree.tree_map(torch.clone, tree)


def same(got: object, expected: object) -> None:
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
        assert a.abs().sum() > 0  # a lost backward is silently zero
        close = {"rtol": 1e-10, "atol": 1e-12} if a.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(b, a, **close)


def recording(graphs: list[GraphModule]) -> Step:
    """A backend that runs the scheduled graph as it is, and keeps it."""

    def backend(graph: GraphModule, inputs: object) -> GraphModule:
        graphs.append(graph)
        return graph

    return backend


# --- the graph: any machine, any number of ranks ---
class Read:
    """What a graph does, in its order: starts and waits of gathers, their uses, and the same of reductions.

    Units are numbered by the order in which they are first gathered, reductions by that of their starts.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.events: list[tuple[str, int]] = []
        self.peak = 0
        nodes = list(graph.graph.nodes)
        self.targets = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
        place = {node: i for i, node in enumerate(nodes)}
        units: dict[Node, int] = {}
        unit_of: dict[Node, int] = {}
        reductions: dict[Node, int] = {}
        alive: list[tuple[int, int, int]] = []
        for node in nodes:
            name = str(node.target)
            inputs = node.all_input_nodes
            if "all_gather" in name:
                unit = units.setdefault(self.source(node), len(units))
                unit_of[node] = unit
                self.events.append(("gather", unit))
                alive.append((place[node], max(place[n] for n in self.seen(node)), node.meta["val"].nbytes))
            elif "reduce_scatter_tensor" in name or "all_reduce" in name:
                reductions[node] = len(reductions)
                self.events.append(("reduce", reductions[node]))
            elif "wait_tensor" in name and inputs[0] in unit_of:
                unit_of[node] = unit_of[inputs[0]]
                self.events.append(("arrive", unit_of[node]))
            elif "wait_tensor" in name:
                self.events.append(("reduced", reductions[inputs[0]]))
            elif self.is_view(node):
                unit_of.update((node, unit_of[n]) for n in inputs if n in unit_of)
            else:
                used = {unit_of[n] for n in inputs if n in unit_of}
                self.events += [("use", unit) for unit in sorted(used) if self.events[-1] != ("use", unit)]
        for i in range(len(nodes)):
            self.peak = max(self.peak, sum(size for first, last, size in alive if first <= i <= last))

    @staticmethod
    def is_view(node: Node) -> bool:
        return getattr(node.target, "is_view", False) or "getitem" in str(node.target)

    @staticmethod
    def source(node: Node) -> Node:
        while node.op != "placeholder":
            (node,) = node.all_input_nodes
        return node

    def seen(self, node: Node) -> set[Node]:
        """The nodes that have the buffer, or a view of it, in their hands."""
        through = [n for n in node.users if self.is_view(n) or "wait_tensor" in str(n.target)]
        return {*node.users, node}.union(*(self.seen(n) for n in through))

    def of(self, *kinds: str) -> list[tuple[str, int]]:
        return [event for event in self.events if event[0] in kinds]


@functools.cache
def graph_of(p: P, mesh: tuple[tuple[str, int], ...] = (), layers: int = LAYERS, **options: Any) -> tuple[Read, int, int]:
    """What the one graph of a training step does on 4 ranks; the bytes of the root's unit and of a block's."""
    graphs: list[GraphModule] = []
    with world(4):
        model = chain(layers)
        spec, params = shards_of(fs.by_type(Block, p=p), model, mesh_of(**(dict(mesh) or {"shard": 4})))
        compile(training(loss_of(model, spec)), backend=recording(graphs), **options)(params, zeros(params), *tokens(0))
        root, block = (spec.padded_numel(spec.by_key[key]) * 8 for key in ("", "blocks.0"))
    (graph,) = graphs
    return Read(graph), root, block


def between(events: list[tuple[str, int]], first: tuple[str, int], last: tuple[str, int]) -> list[tuple[str, int]]:
    return events[events.index(first) + 1 : events.index(last)]


FIRST, *REST, LAST = range(LAYERS + 1)
AGAIN = [*REST[::-1]]
BOTH = {"prefetch": 0, "in_flight": 2}
"""Options that have nothing to do with each other, and one graph."""


@seldom
def test_other_strategies_and_a_mesh_of_two_axes() -> None:
    """With reshard=False a unit is gathered once, in one graph with the same code but for that, of P() none. On two axes a
    slice is all-reduced over the other as soon as it is reduce-scattered, one unit behind."""
    kept, root, block = graph_of(P("shard", reshard=False))
    assert [unit for _, unit in kept.of("gather")] == [FIRST, *REST, LAST]
    assert kept.peak == root + LAYERS * block
    replicated, _, _ = graph_of(P())
    assert replicated.of("gather") == []
    assert len(replicated.of("reduce")) == LAYERS + 1
    hybrid, _, _ = graph_of(P("shard"), mesh=(("replicate", 2), ("shard", 2)))
    reductions = hybrid.of("reduce", "reduced")
    assert len(reductions) == 4 * (LAYERS + 1)
    assert reductions[:5] == [("reduce", 0), ("reduced", 0), ("reduce", 1), ("reduce", 2), ("reduced", 1)]
    assert [unit for _, unit in hybrid.of("gather")] == [FIRST, *REST, LAST, *AGAIN]


@seldom
def test_every_phase_gathers_what_was_let_go() -> None:
    """Forward gathers every unit once, backward again those that functional_call does; each one unit ahead of its use."""
    read, _, _ = graph_of(P("shard"))
    order = read.of("gather", "arrive", "use")
    forward = [("gather", 0), ("arrive", 0), ("gather", 1), ("use", 0)]
    for i in (*REST, LAST):
        forward += [("arrive", i), *([("gather", i + 1)] if i < LAST else []), ("use", i)]
    backward = [("use", 0), ("gather", AGAIN[0]), ("use", LAST)]
    for i in AGAIN:
        backward += [("arrive", i), *([("gather", i - 1)] if i > REST[0] else []), ("use", i)]
    assert order == forward + backward


low_precision = pytest.mark.skipif(not _torch.FORWARD_CAN_BE_REPLACED, reason="torch 2.13: casts inside of a compiled call")


@at_most(2)
@every(options=mark_seldom([BOTH, {}, {"prefetch": 2, "layers": 4}], BOTH, {}))
def test_what_is_alive_and_under_way(options: dict[str, int]) -> None:
    """Never more bytes than of the root's unit, the one that runs and ``prefetch`` others, to the last use of a view.

    A reduction starts as soon as its unit's backward is done, and ends when ``in_flight`` more are to start.
    """
    prefetch, in_flight, layers = (options.get(name, n) for name, n in (("prefetch", 1), ("in_flight", 1), ("layers", LAYERS)))
    read, root, block = graph_of(P("shard"), **options)
    assert read.peak == root + (1 + prefetch) * block
    assert len(read.of("gather")) == 2 * layers  # every unit in forward, all but the root's and the last block's again
    units = [*range(layers, 0, -1)]  # the root's is the last to be complete
    for reduction, unit in enumerate(units):
        start = read.events.index(("reduce", reduction))
        assert ("use", unit) in read.events[:start]
        assert ("use", unit) not in read.events[start:]
        assert not any(("use", u) in read.events[:start][-1:] for u in units[reduction + 1 :])
        if reduction + in_flight < len(units):
            meanwhile = between(read.events, ("reduce", reduction), ("reduced", reduction))
            used = [unit for what, unit in meanwhile if what == "use"]
            assert used == units[reduction + 1 : reduction + 1 + in_flight]
        if reduction + in_flight <= len(units):
            landed = read.events.index(("reduced", reduction))
            assert read.events[landed + 1] == ("reduce", reduction + in_flight)


def test_graph_is_of_plain_operators() -> None:
    """Collectives are torch's functional ones; of our own there is only the cat that assembles a unit's gradient."""
    targets = graph_of(P("shard"))[0].targets
    own = [target for target in targets if target.namespace not in ("aten", "prims", "_c10d_functional")]
    assert own == [torch.ops.funshard.cat.default] * (LAYERS + 1)
    assert sum(target.namespace == "_c10d_functional" for target in targets) == 2 * (LAYERS + 1 + len(AGAIN) + LAYERS + 1)


# --- values, on two real ranks ---
def models(which: str, layers: int = 2) -> tuple[nn.Module, type[nn.Module], Step]:
    """A model, the class of its blocks, and the loss of a batch of tokens by a call."""
    if which == "mlp":
        mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        return mlp, nn.Linear, lambda call, x, y: F.mse_loss(call(x / 32), y / 32)
    if which == "chain":
        return chain(layers), Block, lambda call, x, y: common.loss_of(call(x), y)
    if which == "gpt":
        return gpt(layers), common.Block, lambda call, x, y: common.loss_of(call(x), y)
    made = build("llama_tied", 1)
    del made.model.get_submodule("model.layers")[layers:]
    return made.model, made.blocks[0], lambda call, x, y: call(input_ids=x % 17, labels=x % 17).loss


LOW = fs.Precision(param=torch.float32, reduce=torch.float64)
SAVE = fs.Remat([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
STRATEGIES: dict[str, P] = {
    "reshard": P("shard"),
    "hsdp": P("shard"),
    "keep": P("shard", reshard=False),
    "replicate": P(),
    "low": P("shard", precision=LOW),
    "remat": P("shard", remat=True),
    "save": P("shard", remat=SAVE),
}
SIZES = [(4, 7), (3, 7), (2, 6), (5, 5)]


def batch_of(rank: int, i: int, shapes: str) -> tuple[Tensor, ...]:
    """Of one shape, or of another size and length each time and on each rank."""
    if shapes == "fixed":
        return tokens(rank, i)
    (size, length), generator = SIZES[i], torch.Generator().manual_seed(2 * i + rank)
    batch = tuple(torch.randint(32, (size + rank, length + 1 - rank), generator=generator) for _ in range(2))
    for x, dim in itertools.product(batch, range(2)) if shapes == "marked" else ():
        torch._dynamo.mark_dynamic(x, dim)
    return batch


def trained(rank: int, which: str, strategy: str, backend: str, shapes: str) -> None:
    warnings.filterwarnings("ignore", IMPORT)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, block, by_call = models(which, depth(1, 2) if shapes == "fixed" else 2)
    model = model.float() if backend == "inductor" else model
    in_replicated = fs.by_path({"": P(), "blocks.0": P("shard", reshard=False)})
    policy = in_replicated if strategy == "both" else fs.by_type(block, p=STRATEGIES[strategy])
    spec, eager = shards_of(policy, model, mesh_of(2, 2) if strategy == "hsdp" else mesh_of(dist.get_world_size()))
    step = training(lambda params, x, y: by_call(lambda *a, **k: fs.functional_call(model, params, a, k, spec=spec), x, y))
    expected, got = (eager, zeros(eager)), (copies(eager), zeros(eager))
    compiled = compile(step, donate_argnums=(0, 1), backend=backend, dynamic={"dynamic": True}.get(shapes))
    for i in range(4):
        *expected, value = step(*expected, *batch_of(rank, i, shapes))
        *after, loss_value = compiled(*got, *batch_of(rank, i, shapes))
        assert all(a is b for a, b in zip(pytree.tree_leaves(after), pytree.tree_leaves(got), strict=True))
        same((after, loss_value), (expected, value))
    batch = batch_of(rank, 0, shapes)
    same(compiled(*copies(got), *batch), step(*expected, *batch))  # other tensors, same step
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


CHAIN = depth("chain", "gpt")
TRAINED = [
    ("gloo2", CHAIN, "both", "aot_eager", "fixed"),
    *depth([], [("gloo2", "gpt", strategy, "aot_eager", "fixed") for strategy in ("reshard", "keep", "replicate")]),
    pytest.param("gloo2", CHAIN, "low", "aot_eager", "fixed", marks=[low_precision, seldom]),
    pytest.param("gloo2", "llama", "reshard", "aot_eager", "fixed", marks=seldom),
    pytest.param("gloo2", "llama", "remat", "aot_eager", "fixed", marks=[low_precision, seldom]),
    pytest.param("gloo4", depth("mlp", "gpt"), "hsdp", "aot_eager", "fixed", marks=seldom),
    pytest.param("gloo2", depth("mlp", "gpt"), "reshard", "inductor", "fixed", marks=[seldom, needs_cpp]),
    pytest.param("gloo2", CHAIN, "reshard", "aot_eager", "dynamic", marks=low_precision),
    *(
        pytest.param("gloo2", CHAIN, strategy, "aot_eager", shapes, marks=[low_precision, seldom])
        for strategy, shapes in (("reshard", "marked"), *itertools.product(("keep", "remat", "replicate", "save"), ["dynamic"]))
    ),
    pytest.param("gloo2", "chain", "save", "inductor", "marked", marks=[low_precision, seldom, needs_cpp]),
]


@pytest.mark.parametrize(("ranks", "which", "strategy", "backend", "shapes"), TRAINED)
def test_training_equals_eager(
    request: pytest.FixtureRequest, ranks: str, which: str, strategy: str, backend: str, shapes: str
) -> None:
    """Five steps with donated parameters and state, compiled once, also when other tensors, or other shapes, are given.

    "both": a kept block in a replicated model. Shapes that are not fixed differ between ranks.
    """
    request.getfixturevalue(ranks).run(trained, which, strategy, backend, shapes)


@seldom
@real_ranks(2)
def test_on_gloo_buffers_are_held_no_longer(rank: int) -> None:
    """Gathers are in place, as eager; and a gradient, whose own part is added last, ends before the next is sent."""
    torch._dynamo.reset()
    graphs: list[GraphModule] = []
    model = chain(2)
    spec, params = shards_of(fs.by_type(Block), model)
    compile(training(loss_of(model, spec)), backend=recording(graphs))(params, zeros(params), *tokens(rank))
    nodes = list(graphs[0].graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    targets = [node.target for node in nodes]
    assert targets.count(torch.ops.funshard.all_gather.default) == 3 + 1  # the first block again
    assert torch.ops._c10d_functional.all_gather_into_tensor.default not in targets
    starts = [node for node in nodes if node.target is torch.ops._c10d_functional.all_to_all_single.default]
    assert len(starts) == 3
    for start, following in itertools.pairwise(starts):
        (wait,) = start.users
        (total,) = wait.users
        assert total.target is torch.ops.aten.add.Tensor
        assert place[start] + 1 < place[wait] < place[total] < place[following]


# --- the generated code ---
@pytest.fixture
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not compiled, which takes longest: what they would compute on a fake group means nothing."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()  # compiles six probes, once for a cache and a process
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@functools.cache
def inductors(reshard: bool) -> tuple[str, int]:
    """The code of a training step on 4 ranks with everything donated, and the most bytes it allocates: `peak_bytes`."""
    from torch._inductor.utils import run_and_get_code

    with world(4):
        model = chain(dim=64).float()  # torch 2.11: no attention of float64
        spec, params = shards_of(fs.by_type(Block, p=P("shard", reshard=reshard)), model)
        step, args = compile(training(loss_of(model, spec)), donate_argnums=(0, 1)), (params, zeros(params), *tokens(0))
        _, (code,) = run_and_get_code(step, *args)
        return code, peak_bytes(step, *args)


def generated(reshard: bool) -> tuple[list[tuple[str, str]], str]:
    """Collectives, and matrix products by the first gathered buffer among their operands, in the order of the code."""
    code, _ = inductors(reshard)
    body = code[code.index("def call(") :]
    gathered: dict[str, str] = {}
    reduced: dict[str, str] = {}
    events: list[tuple[str, str]] = []
    for line in body.splitlines():
        if started := re.match(
            r"\s*(\w+) = torch\.ops\._c10d_functional\.(all_gather|reduce_scatter)\w+\.default\((\w+)", line
        ):
            buffer, op, source = started.groups()
            (gathered if op == "all_gather" else reduced)[buffer] = source if op == "all_gather" else str(len(reduced))
            events.append(("gather", source) if op == "all_gather" else ("reduce", reduced[buffer]))
        elif waited := re.match(r"\s*torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)", line):
            buffer = waited[1]
            events.append(("arrive", gathered[buffer]) if buffer in gathered else ("reduced", reduced[buffer]))
        elif re.match(r"\s*extern_kernels\.(mm|addmm)\(", line):
            used = [gathered[name] for name in re.findall(r"\bbuf\d+\b", line) if name in gathered]
            if used and events[-1] != ("use", used[0]):
                events.append(("use", used[0]))
    return events, body


@seldom
@needs_cpp
@pytest.mark.usefixtures("no_kernels")
def test_generated_code_has_the_order_of_the_graph() -> None:
    """Gathers and waits of inductor's code are those of the graph; of two steps that differ in reshard only as well,
    which its cache must not take for one; and donated results are written in place: what it returns is the loss."""
    (events, body), (kept, _) = generated(reshard=True), generated(reshard=False)
    gathers = [unit for what, unit in events if what == "gather"]
    units = gathers[: LAYERS + 1]
    assert gathers == [units[i] for i in (FIRST, *REST, LAST, *AGAIN)]
    assert [unit for what, unit in kept if what == "gather"] == units
    of_graph = [(what, units[i]) for what, i in graph_of(P("shard"))[0].of("gather", "arrive")]
    assert [e for e in events if e[0] in ("gather", "arrive")] == of_graph
    for i, (what, unit) in enumerate(events):
        if what == "arrive" and unit != units[0]:  # its products come after, and after the start of the next gather
            following = [e for e in events[i + 1 :] if e[0] in ("gather", "use")]
            coming = [g for g in events[i:] if g[0] == "gather"]
            assert ("use", unit) in following[:2]
            if coming and unit != units[LAST]:
                assert following[0][0] == "gather"
    reductions = [e for e in events if e[0] in ("reduce", "reduced")]
    assert reductions == [(what, str(i)) for i in range(LAYERS + 1) for what in ("reduce", "reduced")]
    overlapped = [e for e in between(events, ("reduce", "0"), ("reduced", "0")) if e[0] == "use"]
    assert overlapped == [("use", units[AGAIN[0]])]
    assert len(re.findall(r"return \((.*)\)", body)[0].strip(", ").split(",")) == 1


def peak_bytes(step: Step, *args: Any) -> int:
    """The most bytes that are allocated while the step runs beyond what there was before."""
    step(*args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        step(*args)
    return held(record)


@seldom
@needs_cpp
@pytest.mark.usefixtures("no_kernels")
def test_peak_memory_is_not_above_eager() -> None:
    """Of a training step with everything donated; eager, the update is in place too.

    Near the turn inductor computes the one or other activation in forward that backward could, hence 2%; without the
    second gathers and the early reductions it is half as much again.
    """
    with world(4):
        model = chain(dim=64).float()
        spec, params = shards_of(fs.by_type(Block), model)
        loss = loss_of(model, spec)

        def eager(params: fs.Params, state: fs.Params, x: Tensor, y: Tensor) -> Tensor:
            grads, value = fs.grad_and_value(loss)(params, x, y)
            for key, p in params.items():
                state[key].mul_(0.9).add_(grads[key])
                p.sub_(state[key], alpha=0.1)
            return value

        limit = 1.02 * peak_bytes(eager, params, zeros(params), *tokens(0))
    assert inductors(True)[1] <= limit
    assert inductors(True)[1] < inductors(False)[1]  # with all units kept


# --- donation ---
def test_donated_values_move() -> None:
    """What is returned is the donated tensors, whether they require grad or not; what is not donated is left alone."""
    given, kept, leaf = torch.arange(3.0), torch.ones(3), torch.ones(3, requires_grad=True)
    step = compile(lambda donated, k: ([donated[0] + k, donated[1] * 2], k.sum()), donate_argnums=0, backend="aot_eager")
    (a, b), total = step([given, leaf], kept)
    assert (a is given, b is leaf, total) == (True, True, 3)
    assert [x.tolist() for x in (given, leaf, kept)] == [[1, 2, 3], [2, 2, 2], [1, 1, 1]]
    # old values that go to another donated tensor are read before they are written over
    now, before = torch.tensor([1.0, 2.0]), torch.zeros(2)
    compile(lambda now, before: (now + 1, now.clone()), donate_argnums=(0, 1), backend="aot_eager")(now, before)
    assert (now.tolist(), before.tolist()) == ([2, 3], [1, 2])
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    compile(lambda tree: {"a": tree["b"], "b": tree["a"]}, donate_argnums=0, backend="aot_eager")({"a": a, "b": b})
    assert (a.item(), b.item()) == (2, 1)


def double(x: Tensor) -> Tensor:
    return x.double()


def test_donation_errors() -> None:
    """What cannot be written over; by name."""
    x, give = torch.ones(2), functools.partial(compile, donate_argnums=0, backend="aot_eager")
    refused(ValueError, "donated argument 0: expected a result with its tree, shapes and dtypes", lambda: give(double)(x))
    for step in (lambda x: (x + 1, x[1:]), lambda x: (x + 1, x)):
        refused(ValueError, "a result is, or is a view of, a donated tensor", lambda step=step: give(step)(x))
    words = r"donate_argnums \(1,\) but 1 positional arguments: expected 0..0"
    refused(ValueError, words, lambda: give(double, donate_argnums=1)(x))
    refused(TypeError, r"donated argument 0\['a'\]: expected a tensor, got int", lambda: give(lambda x: x)({"a": 1}))
    # of views that overlap what is written into one would be seen in the other
    step = compile(lambda p: {key: x * 2 for key, x in p.items()}, donate_argnums=0, backend="aot_eager")
    x = torch.arange(12.0)
    words = r"\['a'\] and .* argument 0\['b'\] share memory, which donate_argnums=\(0,\) writes"
    refused(ValueError, words, lambda: step({"a": x[:4], "b": x[2:6]}))
    assert x.equal(torch.arange(12.0))
    step({"a": x[:4], "b": x[4:]})
    assert x.equal(torch.arange(12.0) * 2)


# --- options ---
def test_options_and_backends_that_cannot_be() -> None:
    words = "backend: expected 'inductor', 'aot_eager' or a function, got 'eager'"
    refused(ValueError, words, lambda: compile(double, backend="eager"))
    words = "expected prefetch of at least 0 and in_flight of at least 1, got "
    for options in ({"prefetch": -1}, {"in_flight": 0}):
        refused(ValueError, words, lambda options=options: compile(lambda: None, backend="aot_eager", **options))
    for name in ("joint_custom_pre_pass", "post_grad_custom_post_pass"):
        refused(ValueError, f"options: expected no '{name}'", lambda: compile(double, options={name: None}))


@seldom
@needs_cpp
def test_options_are_of_this_step_only() -> None:
    """Inductor's own settings are what they were; those that are given, a mode's among them, are seen by the compiler."""
    from torch._inductor import config

    before = config.save_config_portable()
    seen: list[bool] = []

    def look(graph: torch.fx.Graph) -> None:
        own_pass = config.post_grad_custom_post_pass is not None
        seen.append(config.max_autotune and not config.reorder_for_peak_memory and own_pass)

    options = {"post_grad_custom_pre_pass": look}
    assert compile(double, mode="max-autotune-no-cudagraphs", options=options)(torch.ones(2)).dtype == torch.float64
    assert seen == [True]
    assert config.save_config_portable() == before


@seldom
def test_many_compiled_steps_in_one_process() -> None:
    """Each has recompiles of its own: Dynamo allows eight of one function."""
    for i in range(12):
        assert compile(lambda x, i=i: x + i, backend="aot_eager")(torch.ones(1)) == 1 + i


Branches = module_class(
    "Branches",
    lambda: {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)},
    lambda self, x: self.b(y) if (y := self.a(x)).sum() > 0 else y,
)
"""A branch on values between two units."""


@pytest.mark.parametrize("options", [{"precision": fs.Precision(param=torch.bfloat16)}, {"remat": True}])
def test_a_partial_in_a_graph(options: dict[str, Any]) -> None:
    """As the forward of a module, and as a function that remat, offload and chunked are given there."""
    model = chain(1)
    model[2].forward = functools.partial(nn.Linear.forward, model[2])
    spec, params = shards_of(fs.by_type(Block, nn.Linear, p=P("shard", **options)), model)

    def run(y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return (y * rows).sum(), rows.new_tensor(1.0)

    def loss(params: fs.Params) -> Tensor:
        y = fs.functional_call(model, params, torch.arange(8)[None], spec=spec)
        for wrap in (fs.remat, fs.offload, lambda f: fs.chunked(f, 2)):
            y = y * wrap(functools.partial(run))(y.mean(), torch.ones(4, dtype=y.dtype))[0]
        return y.sum()

    torch.testing.assert_close(fs.compile(fs.grad(loss), backend="aot_eager")(params), fs.grad(loss)(params))


@seldom
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_graph_break_inside_of_a_gradient_says_so() -> None:
    """torch's own words are an internal assertion of its dispatcher."""
    model = Branches()
    spec, params = shards_of(fs.by_type(nn.Linear), model)
    step = fs.grad_and_value(loss_of_params(model, spec, torch.ones(3, 2)))
    with pytest.raises(RuntimeError, match=r"the graph breaks inside of a gradient, .* fullgraph=True names the line"):
        compile(step, fullgraph=False, backend="aot_eager")(params)
    refused(Exception, r"[Dd]ata-dependent", lambda: compile(step, backend="aot_eager")(params))


class TooLong(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise IndexError('a batch of "more" than 4')
        return super().forward(x)


@seldom
def test_errors_of_the_step_are_its_own() -> None:
    """Those of forward and those of funshard's checks, not Dynamo's "Observed exception"; later calls run."""
    model = TooLong(2, 2)
    spec, params = shards_of(fs.policies.whole(), model, {"shard": 1})
    loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum()  # noqa: E731
    step = compile(fs.grad(loss), backend="aot_eager")
    for _ in range(2):
        refused(IndexError, r'^a batch of "more" than 4$', lambda: step(params, torch.ones(5, 2)))
        torch.testing.assert_close(step(params, torch.ones(3, 2)), fs.grad(loss)(params, torch.ones(3, 2)))
    refused(ValueError, r"^unit 'b' is not in the spec", lambda: step({**params, "b": torch.ones(2)}, torch.ones(3, 2)))

    def private(params: fs.Params, x: Tensor, **options: Any) -> Any:
        return fs.per_sample_grads(lambda p, x: loss(p, x[None]), params, x, spec=spec, clip=1.0, **options)

    def product(params: fs.Params, x: Tensor) -> Any:
        return fs.curvature.fisher(lambda p: loss(p, x)[None], params, spec).__matmul__(params)

    other, twice = "per_sample_grads: .*because a graph draws other numbers", "ggnvp and fishervp run their function twice"
    for run, kind, text in (
        (functools.partial(private, randomness="different"), ValueError, other),
        (product, RuntimeError, twice),
    ):
        refused(kind, f"^{text}", lambda run=run: compile(run, backend="aot_eager")(params, torch.ones(3, 2)))


def test_graph_breaks_are_errors_unless_allowed() -> None:
    def step(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.relu(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile(step, backend="aot_eager")(torch.ones(2))
    assert compile(step, backend="aot_eager", fullgraph=False)(-torch.ones(2)).tolist() == [0, 0]


@seldom
def test_in_a_fresh_process(tmp_path: Path) -> None:
    """A spec that nobody has asked anything of is traced: Python 3.11's cached properties have locks, which Dynamo is not."""
    program = tmp_path / "program.py"
    program.write_text("""
import torch, funshard as fs
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
params = fs.shard(model, fs.by_type(torch.nn.Linear)(model).on({"shard": 1}))
spec = fs.by_type(torch.nn.Linear)(model).on({"shard": 1})
loss = lambda params: fs.functional_call(model, params, torch.ones(2, 4), spec=spec).sum()
print(sorted(fs.compile(fs.grad(loss), backend="aot_eager")(params)))
""")
    assert "['0', '1']" in launch(1, program)
