"""fs.compile with batches and sequences of several lengths: how many graphs, and the values of the eager step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collective_log import world
from depth import depth, each, mark_seldom, seldom
from ranks import Pool
from test_compile import Chain, Step, copies, gpt, loss_of, low_precision, same, training, zeros
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import funshard as fs
from funshard import P
from funshard._compiled.step import compile

counters = torch._dynamo.utils.counters
needs_forward = low_precision
"""torch 2.13: linear layers flatten their input by themselves."""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def batch(size: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(32, (2, size, length), generator=torch.Generator().manual_seed(seed))
    return x.clone(), y.clone()


def marked(*tensors: Tensor) -> None:
    for x in tensors:
        for dim in range(x.dim()):
            torch._dynamo.mark_dynamic(x, dim)


EPOCHS = [(4, 8)] * 2 + [(3, 8)] + [(4, 8)] * 2 + [(3, 8)]
"""Two, with a last smaller batch."""
LENGTHS = [(4, 8), (4, 7), (4, 5), (4, 3), (4, 8)]


def graphs_of(shapes: list[tuple[int, int]], *, which: str, **options: Any) -> list[int]:
    """How many graphs there are after each of these batches, for a GPT or a Chain that is trained on a rank of 4."""
    counts: list[int] = []
    with world(4):
        model = gpt(1) if which == "gpt" else Chain(1, 16).double()
        spec = fs.by_type(type(model.blocks[0]))(model).bound
        params = fs.shard(model, spec)
        step = compile(training(loss_of(model, spec)), backend="aot_eager", **options)
        state = zeros(params)
        for size, length in shapes:
            x, y = batch(size, length)
            step(params, state, x, y)
            counts.append(counters["stats"]["unique_graphs"])
    return counts


@seldom
@needs_forward
@pytest.mark.parametrize(
    ("shapes", "options", "counts"),
    [
        (EPOCHS, {}, [1, 1, 2, 2, 2, 2]),
        (LENGTHS, {}, [1, 2, 2, 2, 2]),
        ([(4, 8), (3, 8), (2, 8), (3, 8), (4, 8)], {"dynamic": False}, [1, 2, 3, 3, 3]),
    ],
    ids=str,
)
def test_graphs_by_shapes(shapes: list[tuple[int, int]], options: dict[str, bool], counts: list[int]) -> None:
    """The second size or length compiles once more, and others after it do not; with dynamic=False each shape has its graph."""
    assert graphs_of(shapes, which=depth("chain", "gpt"), **options) == counts


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


STRATEGIES = {
    "reshard": P("shard"),
    "keep": P("shard", reshard=False),
    "remat": P("shard", remat=True),
    "save": P("shard", remat=fs.Remat([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])),
    "replicate": P(),
}


def trained(rank: int, strategy: str, mark: bool, which: str, backend: str) -> None:
    warnings.filterwarnings("ignore", "`torch.jit.script_method`")
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = gpt(2) if which == "gpt" else Chain(2, 16).double()
    if backend == "inductor":
        model = model.float()
    spec = fs.by_type(type(model.blocks[0]), p=STRATEGIES[strategy])(model).bound
    eager = fs.shard(model, spec)
    expected, got = (eager, zeros(eager)), (copies(eager), zeros(eager))
    step = training(loss_of(model, spec))
    compiled = compile(step, donate_argnums=(0, 1), backend=backend, dynamic=None if mark else True)
    for i, (size, length) in enumerate([(4, 7), (3, 7), (2, 6), (5, 5)]):
        x, y = batch(size + rank, length + (1 - rank), seed=2 * i + rank)
        if mark:
            marked(x, y)
        *expected, value = step(*expected, x, y)
        *got, loss = compiled(*got, x, y)
        same((got, loss), (expected, value))
    assert counters["stats"]["unique_graphs"] == 1


@needs_forward
@each
@pytest.mark.parametrize("mark", mark_seldom([False, True], False), ids=["dynamic", "marked"])
@pytest.mark.parametrize("strategy", mark_seldom(STRATEGIES, "reshard"))
@pytest.mark.parametrize("backend", mark_seldom(["aot_eager", "inductor"], "aot_eager"))
def test_shapes_that_change_equal_eager(gloo2: Pool, backend: str, strategy: str, mark: bool) -> None:
    """With parameters and state given away, by one graph, on ranks whose batches have other sizes and lengths."""
    gloo2.run(trained, strategy, mark, depth("chain", "gpt") if backend == "aot_eager" else "chain", backend)


@seldom
def test_products_with_directions_in_one_graph() -> None:
    """fs.hvp in reverse of a model of products; v is compared with params although their sizes are symbols."""
    with world(4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        spec = fs.by_type(nn.Linear)(model).bound
        params = fs.shard(model, spec)

        def product(params: fs.Params, x: Tensor) -> fs.Params:
            f: Step = lambda p: F.mse_loss(fs.functional_call(model, p, x, spec=spec), x)  # noqa: E731
            return fs.hvp(f, params, {k: p.cos() for k, p in params.items()}, forward=False)

        step = compile(product, backend="aot_eager", dynamic=True)
        for size in (5, 4, 3):
            step(params, torch.randn(size, 4, dtype=torch.float64))
        assert counters["stats"]["unique_graphs"] == 1
