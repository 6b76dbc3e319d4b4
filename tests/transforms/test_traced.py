"""Sharded code that torch records or rewrites: make_fx, torch.export, linearize, functionalize, and Jacobians."""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from collective_log import SHORT, Collectives, world
from depth import at_most, depth, each, mark_seldom, seldom
from models import Block, function, module_class, refused
from parity import STRATEGIES, WAYS, loss_of
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp
from torch.fx.experimental.const_fold import split_const_subgraphs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard import P
from funshard.collectives import Mesh


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = depth(lambda: (Block(3), nn.Linear(3, 2)), lambda: (nn.Linear(3, 5), Block(5), Block(5), nn.Linear(5, 2)))()
    return nn.Sequential(*layers).double()


MODEL = model()
State = tuple[fs.Params, Any]
BLOCKS = depth(1, 2)
ADAMW = fs.optim.adamw(1e-2, b2=0.99, weight_decay=0.1)


def batch(rank: int, step: int, rows: int = 4) -> Tensor:
    seed = 7 + rank + 100 * step
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spec_on(strategy: str, mesh: Any = None) -> fs.PartitionSpec:
    spec = fs.by_type(Block, p=STRATEGIES[strategy])(MODEL)
    return spec.on(mesh) if mesh else spec.bound


def square(y: Tensor) -> Tensor:
    return (y**2).mean()


def sharded(spec: fs.PartitionSpec) -> Callable[[fs.Params, Tensor], Tensor]:
    return lambda params, x: loss_of(MODEL, spec, x, of=square)(params)


def training(spec: fs.PartitionSpec, way: str) -> Callable[[State, Tensor], tuple[State, Tensor]]:
    """A step of a state and a batch: its gradients and an update."""

    def step(state: State, x: Tensor) -> tuple[State, Tensor]:
        grads, value = WAYS[way](loss_of(MODEL, spec, x, of=square))(state[0])
        return ADAMW.update(grads, state[1], state[0]), value

    return step


def start(full: nn.Module, spec: fs.PartitionSpec) -> State:
    params = fs.shard(full, spec)
    return params, ADAMW.init(params)


@at_most(1)
@each(way=["fs", "torch.func"], strategy=STRATEGIES)
@real_ranks(2)
def test_traced_training(rank: int, strategy: str, way: str) -> None:
    """make_fx of a step with its update trains another model as the eager step does, and as torch's AdamW the plain one."""
    spec = spec_on(strategy)
    step = training(spec, way)
    graph = make_fx(step)(start(MODEL, spec), batch(rank, 0))
    plain = copy.deepcopy(MODEL)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(p.flip(0))
    eager = traced = start(plain, spec)
    optim = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for i in range(1, 4):
        eager, expected = step(eager, batch(rank, i))
        traced, value = graph(traced, batch(rank, i))
        losses = [square(plain(batch(r, i))) for r in range(2)]
        assert_close(value, losses[rank].detach())
        assert_close(value, expected, rtol=1e-13, atol=0)
        optim.zero_grad()
        (sum(losses) / 2).backward()
        optim.step()
        for a, b in zip(pytree.tree_leaves(traced), pytree.tree_leaves(eager), strict=True):
            assert_close(a, b, rtol=1e-13, atol=1e-15)
        assert_close(traced[0], fs.shard(plain, spec), msg=lambda m, i=i: f"after step {i}: {m}")


def recorded(graph: torch.fx.Graph) -> list[str]:
    """The collectives in a graph; nothing but operators may be in it."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert all(isinstance(target, torch._ops.OpOverload) for target in targets if target is not getitem)
    names = [t._schema.name.partition("::") for t in targets if isinstance(t, torch._ops.OpOverload)]
    assert {namespace for namespace, *_ in names} <= {"aten", "_c10d_functional"}
    sent = [name for namespace, _, name in names if namespace == "_c10d_functional"]
    assert sent.count("wait_tensor") * 2 == len(sent)
    return [SHORT.get(name, name) for name in sent if name != "wait_tensor"]


@at_most(1)
@each(way=["fs", "torch.func"], strategy=STRATEGIES)
def test_fully_shard_compile_graph(strategy: str, way: str) -> None:
    """The graph of a step on a mesh of two axes has the very collectives that the eager one sends, regathers included, in the
    same order, one update and all."""
    with world(8):
        spec = spec_on(strategy, mesh_of(2, 4))
        step, state = training(spec, way), start(MODEL, spec)
        with Collectives() as sent:
            step(state, batch(0, 0))
        ops = recorded(make_fx(step)(state, batch(0, 0)).graph)
    assert ops == [s.op for s in sent.all]
    assert Counter(ops)["all_reduce"] > 0


# --- torch.export ---
Forward = module_class(
    "Forward", lambda spec: {"spec": spec}, lambda self, params, x: fs.functional_call(MODEL, params, (x,), spec=self.spec)
)
"""The sharded forward as a module without parameters of its own: they are inputs."""


def exported(spec: fs.PartitionSpec, x: Tensor, strict: bool) -> tuple[torch.export.ExportedProgram, fs.Params]:
    """The forward for any number of rows."""
    params = fs.shard(MODEL, spec)
    shapes = (dict.fromkeys(params), {0: torch.export.Dim("rows", min=2)})
    with warnings.catch_warnings():  # strict export warns of any torch.func.functional_call on a module from outside
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects", UserWarning)
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        return torch.export.export(Forward(spec), (params, x), dynamic_shapes=shapes, strict=strict), params


@each(strict=mark_seldom([False, True], False), strategy=depth(mark_seldom(["shard", "replicated"], "shard"), [*STRATEGIES]))
@real_ranks(2)
def test_export_equals_eager(rank: int, strategy: str, strict: bool) -> None:
    """An exported forward, decomposed or saved and loaded too, on other shards and another number of rows."""
    spec = spec_on(strategy)
    program, params = exported(spec, batch(rank, 0), strict)
    other, x = {k: p.cos() for k, p in params.items()}, batch(rank, 1, rows=9)
    expected = fs.functional_call(MODEL, other, (x,), spec=spec)
    assert_close(expected, torch.func.functional_call(MODEL, fs.unshard(other, spec), (x,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        saved = io.BytesIO()
        torch.export.save(program, saved)
        saved.seek(0)
        for each in (program, program.run_decompositions(), torch.export.load(saved)):
            assert torch.equal(each.module()(other, x), expected)
            assert not each.constants
            assert not each.state_dict


@at_most(1)
@each(strict=[False, True], strategy=STRATEGIES)
def test_export_is_plain_operators(strategy: str, strict: bool) -> None:
    """One gather for each sharded unit, in the order of the model, and nothing of funshard's or torch.func's."""
    with world(4):
        program, params = exported(spec_on(strategy), batch(0, 0), strict)
        assert recorded(program.graph) == ["all_gather"] * (0 if strategy == "replicated" else len(params))
        sizes = [n.args[1] for n in program.graph.nodes if "all_gather" in str(n.target)]
        assert set(sizes) <= {4}


# --- torch.func.linearize ---
LINEARIZED = {"loss": lambda loss: loss, "grad": grad, "fs.grad_and_value": fs.grad_and_value}


@at_most(1)
@each(of=LINEARIZED, strategy=STRATEGIES)
@real_ranks(2)
def test_linearize_is_jvp(rank: int, strategy: str, of: str) -> None:
    """linearize of a sharded loss and of its gradient is jvp, in many directions."""
    spec = spec_on(strategy)
    params, x = fs.shard(MODEL, spec), batch(rank, 0)
    f = lambda p: LINEARIZED[of](sharded(spec))(p, x)  # noqa: E731
    v, w = ({k: f(p) for k, p in params.items()} for f in (torch.sin, torch.exp))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node", UserWarning)
        value, tangent = linearize(f, params)
        for direction in (v, w, v):
            expected = jvp(f, (params,), (direction,))
            assert all(t.any() for t in pytree.tree_leaves(expected[1]))
            assert_close((value, tangent(direction)), expected, rtol=1e-12, atol=1e-14)


@at_most(1)
@pytest.mark.parametrize("strategy", ["shard", "keep"])
def test_linearize_folds_no_collective(strategy: str) -> None:
    """Each call of what it gives gathers parameters and tangents. Folded, a gather would lose the wait for it."""
    with world(2):
        spec = spec_on(strategy)
        params, x = fs.shard(MODEL, spec), batch(0, 0)
        graph = make_fx(lambda v: jvp(lambda p: sharded(spec)(p, x), (params,), (v,))[1])({k: p + 1 for k, p in params.items()})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node", UserWarning)
            split = split_const_subgraphs(graph)
    once = split.const_subgraph_module.graph.nodes if split.const_subgraph_module else []
    assert not any("c10d" in str(node.target) for node in once)
    always = [node.target._schema.name.partition("::")[2] for node in split.graph.nodes if "c10d" in str(node.target)]
    assert always.count("all_gather_into_tensor") == always.count("wait_tensor") == 2 * (BLOCKS + 1)


# --- torch.func.functionalize ---
def test_functionalize_takes_no_custom_function() -> None:
    """A fact about torch: it has no rule for them, so a sharded call has none either, and says so."""
    with world(2):
        spec = spec_on("shard")
        params, x = fs.shard(MODEL, spec), batch(0, 0)
        words = "Functionalize rule for custom_function_call"
        refused(RuntimeError, words, lambda: functionalize(function(lambda x: 2 * x).apply)(torch.ones(2)))
        refused(RuntimeError, words, lambda: grad(functionalize(sharded(spec)))(params, x))


# --- Jacobians ---
SMALL = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()


def small(full: fs.Params, x: Tensor) -> Tensor:
    return torch.func.functional_call(SMALL, full, (x,))


def full_parameters() -> fs.Params:
    return {
        name: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).sin().view(p.shape) + i / 5
        for i, (name, p) in enumerate(SMALL.named_parameters())
    }


def jacobians(mesh: Mesh, x: Tensor) -> dict[str, Any]:
    """One rank's derivatives, with respect to gathered parameters, inputs and shards."""
    spec, one = fs.policies.always()(SMALL).on(mesh), fs.policies.whole()(SMALL).on(mesh)  # and a single buffer
    params, shard = fs.shard(full_parameters(), spec), fs.shard(full_parameters(), one)[""]

    def of_input(x: Tensor) -> Tensor:
        return fs.functional_call(SMALL, params, (x,), spec=spec).flatten()

    def of_shard(shard: Tensor) -> Tensor:
        return fs.functional_call(SMALL, {"": shard}, (x,), spec=one).flatten()

    gathered = hessian(lambda p: square(small(p, x)))(fs.unshard(params, spec))
    return {"gathered hessian": pytree.tree_map(lambda h: fs.collectives.all_reduce(h, mesh["shard"]), gathered)} | {
        f"{name} {how}": of(f)(at)
        for name, f, at in (("inputs", of_input, x), ("shards", of_shard, shard))
        for how, of in (("reverse", jacrev), ("forward", jacfwd), ("hessian", lambda f: hessian(lambda at: square(f(at)))))
    }


def check_jacobians(mine: dict[str, Any], rank: int, ranks: int) -> None:
    xs, full, one = [batch(r, 0) for r in range(ranks)], full_parameters(), fs.policies.whole()(SMALL).on({"shard": ranks})
    x, buffer = xs[rank], fs.flatten(full, one)[""]
    of_buffer = lambda b, x: small(fs.unflatten({"": b}, one), x).flatten()  # noqa: E731
    n = len(buffer) // ranks
    own, others = slice(rank * n, (rank + 1) * n), [slice(q * n, (q + 1) * n) for q in range(ranks)]
    rows = [jacrev(of_buffer)(buffer, x) for x in xs]
    whole = hessian(lambda b: sum(square(of_buffer(b, x)) for x in xs) / ranks)(buffer)
    expected = {
        "gathered hessian": hessian(lambda p: sum(square(small(p, x)) for x in xs) / ranks)(full),
        "inputs reverse": (of_inputs := jacrev(lambda x: small(full, x).flatten())(x)),
        "inputs forward": of_inputs,
        "inputs hessian": hessian(lambda x: square(small(full, x)))(x),
        "shards reverse": (sum(rows) / ranks)[:, own],
        "shards forward": sum(rows[rank][:, q] for q in others),
        "shards hessian": sum(whole[own, q] for q in others),
    }
    assert_close(mine, expected, rtol=1e-10, atol=1e-12)


@at_most(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_jacobians_on_simulated_ranks(ranks: int) -> None:
    """Of gathered parameters and of inputs: the plain model's. Of shards: sums over every rank's basis, as the guide says.

    With respect to a shard, jacrev is this slice of the mean Jacobian over ranks, jacfwd the sum of this rank's
    Jacobian over all slices, and hessian the sum over the slices of this slice's rows of the mean Hessian.
    """
    out = fs.testing.spmd(jacobians, ranks)(torch.stack([batch(r, 0) for r in range(ranks)]))
    for rank in range(ranks):
        check_jacobians(pytree.tree_map(lambda t, rank=rank: t[rank], out), rank, ranks)


@seldom
@real_ranks(2)
def test_jacobians_on_a_process_group(rank: int) -> None:
    """The same on two real ranks."""
    check_jacobians(jacobians(Mesh.world(), batch(rank, 0)), rank, 2)


@pytest.mark.parametrize("p", [P("shard"), P("shard", remat=True)], ids=str)
def test_a_pullback_gives_plain_tensors(p: P) -> None:
    """What torch.func.vjp returned, and so jacrev, gives tensors without a graph when nothing that went in has one."""
    with world(2):
        spec = fs.policies.always(p)(SMALL).bound
        params = fs.shard(full_parameters(), spec)
        y, pullback = vjp(lambda params, x: fs.functional_call(SMALL, params, (x,), spec=spec), params, batch(0, 0))
        grads, x_grad = pullback(torch.ones_like(y))
        assert not any(g.requires_grad for g in [*grads.values(), x_grad])
