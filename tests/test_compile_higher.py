"""Derivatives of derivatives by fs.compile: values of the eager step, and each phase's own gathers."""

from __future__ import annotations

import functools

import pytest
import torch
from collective_log import Collectives, world
from depth import depth, mark_seldom, seldom
from test_compile import Chain, Read, Step, common, models, recording, same, tokens
from torch import Tensor
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

import funshard as fs
from funshard import P
from funshard._compiled.step import compile


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def direction(params: fs.Params) -> fs.Params:
    return {key: p.cos() for key, p in params.items()}


def squares(tree: fs.Params) -> Tensor:
    return torch.stack([(x**2).sum() for x in tree.values()]).sum()


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
        torch.manual_seed(0)
        model = Chain(LAYERS, 16).double()
        spec = fs.by_type(type(model.blocks[0]), p=P("shard", reshard=reshard))(model).bound
        params = fs.shard(model, spec)
        loss: Step = lambda p, x, y: common.loss_of(fs.functional_call(model, p, (x,), spec=spec), y)  # noqa: E731
        step = steps(loss, spec)[transform]
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


@seldom
@pytest.mark.parametrize("transform", mark_seldom(EXPECTED, "per sample, clipped"))
def test_gradients_of_gradients_gather_again(transform: str) -> None:
    """Each phase gathers what the one before let go, tangents and cotangents with their weights; no more than eager does,
    which has no schedule in such a stack. Single samples' gradients, whose eager call keeps all units, free them."""
    found, eager, _, _ = gathers_of(transform)
    assert found.keys == EXPECTED[transform]
    if "sample" not in transform:
        assert len(found.keys) <= eager


@seldom
def test_steps_through_steps_gather_again() -> None:
    """MAML of two steps: three forwards, their backwards, and those of the inner ones' backwards; fewer than eager."""
    found, eager, root, block = gathers_of("maml")
    assert len(found.keys) < eager
    assert found.keys[: 2 * len(UP) + len(DOWN)] == [*UP, *DOWN, *UP]
    assert found.peak <= 2 * root + 4 * block


@seldom
@pytest.mark.parametrize(
    ("transform", "roots", "blocks"), [("hvp", 2, 4), ("grad of grad", 2, 2), ("per sample, clipped", 1, 2)]
)
def test_gathered_bytes_alive_in_higher_orders(transform: str, roots: int, blocks: int) -> None:
    """The root's unit, the one that runs and the next, with the tangents of all three."""
    found, _, root, block = gathers_of(transform)
    assert found.peak == roots * root + blocks * block


@seldom
@pytest.mark.parametrize("transform", ["hvp", "grad of grad", "maml"])
def test_kept_units_are_gathered_once_in_higher_orders(transform: str) -> None:
    """Each weight of each call, and each tangent, once."""
    found, _, _, _ = gathers_of(transform, reshard=False)
    assert found.keys.count(BLOCKS[0]) == {"hvp": 2, "grad of grad": 2, "maml": 5}[transform]


# --- values, on two real ranks ---

STRATEGIES = {
    "reshard": P("shard"),
    "keep": P("shard", reshard=False),
    "remat": P("shard", remat=True),
    "replicate": P(),
}


def equal_to_eager(rank: int, transform: str, which: str, strategy: str) -> None:
    torch._dynamo.reset()
    model, block, by_call = models(which, 2)
    sizes = {"replicate": 2, "shard": 2} if strategy == "hsdp" else {"shard": get_world_size()}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    spec = fs.by_type(block, p=STRATEGIES.get(strategy, P("shard")))(model).on(mesh)
    params = fs.shard(model, spec)

    def loss(params: fs.Params, x: Tensor, y: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            return by_call(lambda *a, **k: fs.functional_call(model, params, a, k, spec=spec), x, y)

    step = steps(loss, spec)[transform]
    compiled = compile(step, backend="aot_eager")
    for i in range(2):
        same(compiled(params, *tokens(rank, i)), step(params, *tokens(rank, i)))


TRANSFORMS = ["jvp", "hvp", "hvp in reverse", "grad of grad", "vjp of grad", "maml", "per sample", "per sample, clipped"]


OF_TRANSFORMERS = [(which, name) for which in ("gpt", "llama") for name in ("hvp", "grad of hvp")]
ON_FOUR = ["hvp", "grad of grad", "per sample, clipped"]
CASES = [
    *(("gloo2", depth("chain", "gpt"), strategy, name) for name in TRANSFORMS for strategy in STRATEGIES),
    *(("gloo2", which, "reshard", name) for which, name in OF_TRANSFORMERS),
    *(("gloo4", "chain", "hsdp", name) for name in ON_FOUR),
]
USUAL = ("gloo2", depth("chain", "gpt"), "reshard", "hvp")


@pytest.mark.parametrize(
    ("ranks", "which", "strategy", "transform"), [pytest.param(*case, marks=[seldom] * (case != USUAL)) for case in CASES]
)
def test_higher_orders_equal_eager(
    request: pytest.FixtureRequest, ranks: str, which: str, strategy: str, transform: str
) -> None:
    request.getfixturevalue(ranks).run(equal_to_eager, transform, which, strategy)


@pytest.mark.parametrize("options", [{"prefetch": -1}, {"in_flight": 0}], ids=str)
def test_counts_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected prefetch of at least 0 and in_flight of at least 1, got "):
        compile(lambda: None, backend="aot_eager", **options)
