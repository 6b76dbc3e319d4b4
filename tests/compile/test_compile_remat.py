"""remat in fs.compile: the graph computes again what is not kept, and what forward made dies with it; no number changes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import world
from depth import at_most, depth, mark_seldom, seldom
from parity import loss_of as loss_of_params
from parity import same_leaves, shards_of
from test_compile import IMPORT, Read, copies, loss_of, needs_cpp, peak_bytes, recording, training, zeros
from torch import Tensor, nn
from torch.fx import GraphModule

import funshard as fs
from funshard import P, Remat, _torch

Step = Callable[..., Any]
pytestmark = [pytest.mark.filterwarnings(f"ignore:{IMPORT}"), pytest.mark.usefixtures("fresh_dynamo")]
MM, EXP, SIN, TANH = (getattr(torch.ops.aten, name).default for name in ("mm", "exp", "sin", "tanh"))
units = pytest.mark.skipif(not _torch.FORWARD_CAN_BE_REPLACED, reason="torch 2.13: a module's forward is put around its own")


def graph_of(step: Step, *args: Any) -> tuple[GraphModule, Any]:
    """The one graph that runs, and what it gives, which is what the step gives without the compiler."""
    graphs: list[GraphModule] = []
    torch.manual_seed(3)
    out = fs.compile(step, backend=recording(graphs))(*args)
    (graph,) = graphs
    return graph, out


def count(graph: GraphModule, *ops: Any) -> list[int]:
    """How often each operator is in the graph."""
    found = Counter(node.target for node in graph.graph.nodes)
    return [found[op] for op in ops]


equal = functools.partial(same_leaves, rtol=0, atol=0)


# --- by hand: exact counts of operators ---
W, X = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(0, 1, 12).reshape(3, 4)


def curve(w: Tensor, x: Tensor) -> Tensor:
    """Backward reads x @ w of sin, its result of exp, and again that of the next sin."""
    return fs.checkpoint_name((x @ w).sin(), "first").exp().sin()


SAVES: dict[str, tuple[Any, list[int]]] = {  # mm (two of them backward's), exp, sin
    "nothing": (None, [2 + 2, 2, 3]),
    "operators": ({MM}, [1 + 2, 2, 3]),
    "a function": (lambda op: op is MM, [1 + 2, 2, 3]),
    "a name": ({"first"}, [2 + 2, 2, 2]),
    "one that is not given": ({"last"}, [2 + 2, 2, 3]),  # which without the compiler is an error
    "both": ({"first", MM}, [1 + 2, 2, 2]),
    "all": ({MM, EXP, "first"}, [1 + 2, 1, 2]),
}


def gradient(f: Step) -> Step:
    return lambda w, x: torch.func.grad(lambda w, x: f(w, x).sum(), (0, 1))(w, x)


@at_most(1)
@pytest.mark.parametrize("save", SAVES)
def test_what_is_not_kept_is_computed_twice(save: str) -> None:
    """And what save= keeps once, by all of its kinds; the result of the last operator, which nobody reads again, once too."""
    keep, counts = SAVES[save]
    plain, expected = graph_of(gradient(curve), W, X)
    graph, got = graph_of(gradient(fs.remat(curve, save=keep)), W, X)
    assert count(plain, MM, EXP, SIN) == [1 + 2, 1, 2]
    assert count(graph, MM, EXP, SIN) == counts
    equal(got, expected)
    equal(got, gradient(curve)(W, X))


def test_regions_end_where_the_next_begins() -> None:
    """One remat that is called three times keeps its three arguments, and each is computed again when its turn comes."""
    block = lambda x: x.sin().exp().tanh()  # noqa: E731
    again = fs.remat(block)
    graph, got = graph_of(torch.func.grad(lambda x: again(again(again(x))).sum()), X)
    equal(got, torch.func.grad(lambda x: block(block(block(x))).sum())(X))
    back = torch.ops.aten.tanh_backward.default
    order = [node.target for node in graph.graph.nodes if node.target in (SIN, EXP, TANH, back)]
    assert order == [SIN, EXP, TANH] * 3 + [back, SIN, EXP] * 3  # what tanh gave is the next one's argument, and so there


# --- gradients of gradients, in a row, of batches ---
def twice(loss: Step, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)


TRANSFORMS: dict[str, tuple[Step, list[int]]] = {  # and how often exp runs, without remat inside and with it
    "grad of grad": (twice, [1, 3]),
    "hvp": (lambda loss, x: fs.hvp(loss, x, torch.ones_like(x)), [1, 2]),
    "vmap of grad": (lambda loss, x: torch.vmap(torch.func.grad(loss))(x), [1, 2]),
    "micro-batches": (lambda loss, x: sum(torch.func.grad(loss)(x * i) for i in (1, 2)), [2, 4]),
    "grad in remat": (lambda loss, x: torch.func.grad(lambda x: fs.remat(torch.func.grad(loss))(x).sin().sum())(x), [2, 3]),
}


@at_most(1)
@pytest.mark.parametrize("transform", mark_seldom(TRANSFORMS, "grad of grad", "vmap of grad", "micro-batches"))
def test_in_every_transform(transform: str) -> None:
    """Values as without; each phase that reads what a region makes has copies of its own."""
    curve = lambda x: (x.sin().exp().sin() * x).sin()  # noqa: E731
    again = fs.remat(curve)
    apply, counts = TRANSFORMS[transform]
    plain, expected = graph_of(lambda x: apply(lambda x: curve(x).sum(), x), X)
    graph, got = graph_of(lambda x: apply(lambda x: again(x).sum(), x), X)
    equal(got, expected)
    torch.testing.assert_close(got, apply(lambda x: curve(x).sum(), X))
    assert [count(plain, EXP)[0], count(graph, EXP)[0]] == counts


@seldom
def test_buffers_are_written_once() -> None:
    """Running statistics of a module that is computed again, and a donated tensor that it reads."""
    weight, bias = torch.linspace(1, 2, 4), torch.ones(4)

    def step(w: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def loss(w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            m, v = mean.clone(), var.clone()
            x = F.batch_norm((X @ w).sin(), m, v, weight, bias, training=True)
            return x.exp().sum(), (m, v)

        grad, (m, v) = torch.func.grad(fs.remat(loss), has_aux=True)(w)
        return w - grad, m, v

    args = W, torch.zeros(4), torch.ones(4)
    with torch.no_grad():
        expected = step(*copies(args))
    given = copies(args)
    got = fs.compile(step, donate_argnums=(0, 1, 2), backend="aot_eager")(*given)
    equal(got, expected)
    assert all(a is b for a, b in zip(got, given, strict=True))


# --- a model of blocks: bytes, gathers, ranks ---
LAYERS = depth(3, 4)


class Block(nn.Sequential):
    """That of a GPT without its attention and norms."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


@functools.cache
def gpt_step(p: P, size: int, layers: int = LAYERS, sequence: int = 64) -> tuple[GraphModule, Any]:
    """The graph of a training step of a GPT without attention and norms, on a long batch, and what it gives."""
    x, y = torch.randint(32, (2, 8, sequence), generator=torch.Generator().manual_seed(0))
    with world(size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 16), *(Block() for _ in range(layers)), nn.Linear(16, 32, bias=False))
        spec, params = shards_of(fs.by_type(Block, p=p), model)
        return graph_of(training(loss_of(model, spec)), params, zeros(params), x, y)


PRODUCTS = frozenset({torch.ops.aten.addmm.default, MM})
PLAIN, AGAIN, SOME = P("shard"), P("shard", remat=True), P("shard", remat=Remat(PRODUCTS))


@seldom
@units
def test_units_that_run_again() -> None:
    """Of each block all operators but the last, whose result nobody reads, are there twice; with save= products once."""
    addmm, gelu, n = torch.ops.aten.addmm.default, torch.ops.aten.gelu.default, LAYERS
    counts = {p: count(gpt_step(p, 1)[0], addmm, gelu) for p in (PLAIN, AGAIN, SOME)}
    assert counts == {PLAIN: [2 * n, n], AGAIN: [3 * n, 2 * n], SOME: [2 * n, 2 * n]}
    for p in (AGAIN, SOME):
        equal(gpt_step(p, 1)[1], gpt_step(PLAIN, 1)[1])


@seldom
@units
def test_gathers_go_together_with_regions() -> None:
    """Units are gathered as often, and as many are alive, as where nothing is computed again."""
    plain, again = (Read(gpt_step(p, 4, depth(2, 3), 16)[0]) for p in (PLAIN, AGAIN))
    assert again.of("gather", "arrive", "reduce") == plain.of("gather", "arrive", "reduce")
    assert again.peak == plain.peak


def peak_and_values(backend: str, p: P) -> tuple[int, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16), nn.Tanh())  # noqa: E731
    model = nn.Sequential(nn.Linear(16, 16), *(block() for _ in range(4)), nn.Linear(16, 16))
    spec, params = shards_of(fs.by_type(nn.Sequential, p=p), model, {"shard": 1})
    step = fs.compile(training(loss_of_params(model, spec, torch.randn(512, 16))), backend=backend)
    torch.manual_seed(5)
    out = step(params, zeros(params))
    return peak_bytes(step, params, zeros(params)), out


@seldom
@units
@pytest.mark.parametrize("backend", ["aot_eager", *depth([], [pytest.param("inductor", marks=needs_cpp)])])
def test_measured_peak(backend: str) -> None:
    """Of the profiler's memory events; with dropout, bit for bit, by both compilers; with products kept between them."""
    plain, expected = peak_and_values(backend, P("shard"))
    again, got = peak_and_values(backend, P("shard", remat=True))
    some, kept = peak_and_values(backend, SOME)
    equal((got, kept), (expected, expected))
    assert again <= 0.65 * plain  # of nested regions, as the root's around its blocks', the innermost count
    assert again < some < plain
