"""Losses over the features of all ranks, by gather_values, against plain autograd of the joined batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from depth import dealt, each
from parity import dot
from ranks import real_ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.func import grad
from torch.testing import assert_close

import funshard as fs
from funshard.collectives import Axis, Mesh, gather_slices, gather_values

Gather = Callable[[Tensor, Axis], Tensor]
Batch = tuple[Tensor, Tensor]


class TwoTowers(nn.Module):
    """CLIP in small: unit features of images and texts, and a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        self.text = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        u, v = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        return self.scale.exp() * u, v


torch.manual_seed(3)
MODEL = TwoTowers().double()
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
COSINES = {name: p.cos() for name, p in FULL.items()}


def batch(ranks: int) -> Batch:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(ranks, 4, n, dtype=torch.float64, generator=generator) for n in (5, 3))


def contrast(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def whole(u: Tensor, v: Tensor, mesh: Mesh, gather: Gather) -> Tensor:
    """Every rank the loss of all rows."""
    u, v = joined(u, mesh, gather), joined(v, mesh, gather)
    labels = torch.arange(len(u))
    return (contrast(u @ v.T, labels) + contrast(v @ u.T, labels)) / 2


def own_rows(u: Tensor, v: Tensor, mesh: Mesh, gather: Gather) -> Tensor:
    """Each rank the loss of its own rows against all."""
    rank = 0
    for name in mesh.names:
        rank = rank * mesh[name].size + mesh[name].rank
    labels = torch.arange(len(u)) + rank * len(u)
    return (contrast(u @ joined(v, mesh, gather).T, labels) + contrast(v @ joined(u, mesh, gather).T, labels)) / 2


def joined(x: Tensor, mesh: Mesh, gather: Gather) -> Tensor:
    for name in reversed(mesh.names):
        x = gather(x, mesh[name])
    return x


WAYS = {"whole": whole, "own rows": own_rows}


ORDERS: dict[str, Callable[..., fs.Params]] = {
    "grad": lambda f, p, v: grad(f)(p),
    "fs.grad": lambda f, p, v: fs.grad(f)(p),
    "hvp": lambda f, p, v: fs.hvp(f, p, v),
    "grad of dot": lambda f, p, v: grad(lambda p: dot(grad(f)(p), v))(p),
    "grad of grad": lambda f, p, v: grad(lambda p: f(p) + dot(g := grad(f)(p), g))(p),
}
"""Derivatives of a loss: first and second order, both ways, and first order by each transform."""


@functools.cache
def plain(ranks: int) -> dict[str, fs.Params]:
    """Of the joined batch, unsharded: the loss is what every rank's whole one is."""
    images, texts = batch(ranks)

    def loss(full: fs.Params) -> Tensor:
        u, v = torch.func.functional_call(MODEL, full, (images.flatten(0, 1), texts.flatten(0, 1)))
        labels = torch.arange(len(u))
        return (contrast(u @ v.T, labels) + contrast(v @ u.T, labels)) / 2

    return {name: derivative(loss, FULL, COSINES) for name, derivative in ORDERS.items()}


def sharded(
    mesh: Mesh,
    batch: Batch,
    way: str,
    p: fs.P,
    orders: Iterable[str] = ORDERS,
    gather: Gather = gather_values,
    reduce: str = "mean",
) -> dict[str, fs.Params]:
    spec = fs.by_type(nn.Linear, p=p)(MODEL).on(mesh)

    def loss(params: fs.Params) -> Tensor:
        u, v = fs.functional_call(MODEL, params, batch, spec=spec, reduce=reduce)
        return WAYS[way](u, v, mesh, gather)

    shards, v = fs.shard(FULL, spec), fs.shard(COSINES, spec)
    return {name: ORDERS[name](loss, shards, v) for name in orders}


def check(got: dict[str, fs.Params], expected: dict[str, fs.Params], spec: fs.PartitionSpec, rank: int) -> None:
    for name, tree in got.items():
        want = fs.shard(expected["grad" if name == "fs.grad" else name], spec, rank=rank)
        assert_close(tree, want, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name} {m}")


LAYOUTS = {"shard": fs.P("shard"), "kept": fs.P("shard", reshard=False), "remat": fs.P("shard", remat=True), "ddp": fs.P()}


@each(sizes=[{"shard": 4}, {"replicate": 2, "shard": 2}], way=WAYS, layout=LAYOUTS)
@real_ranks(4)
def test_contrastive_loss_on_real_ranks(rank: int, layout: str, way: str, sizes: dict[str, int]) -> None:
    """The rows of two axes, gathered over the inner one first, are in the order of the ranks."""
    grid = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    orders = dealt(layout, LAYOUTS, ORDERS)
    got = sharded(Mesh.of(grid), tuple(x[rank] for x in batch(4)), way, LAYOUTS[layout], orders)
    check(got, plain(4), fs.by_type(nn.Linear, p=LAYOUTS[layout])(MODEL).on(sizes), rank)


@pytest.mark.parametrize(
    ("gather", "reduce", "factor"), [(gather_values, "sum", 3.0), (gather_slices, "mean", 1 / 3), (gather_values, "mean", 1.0)]
)
def test_other_conventions(gather: Gather, reduce: str, factor: float) -> None:
    """What the docstring says of sums of gradients, and of taking the gather that is made for shards."""
    run = fs.testing.spmd(lambda mesh, *xs: sharded(mesh, xs, "whole", fs.P("shard"), ["grad"], gather, reduce)["grad"], 3)
    got = {key: g.flatten() for key, g in run(*batch(3)).items()}
    expected = {key: factor * g for key, g in plain(3)["grad"].items()}
    spec = fs.by_type(nn.Linear)(MODEL).on({"shard": 3})
    assert_close(fs.unflatten(got, spec), expected, rtol=1e-9, atol=1e-12)


@real_ranks(2)
def test_uneven_rows_are_an_error_on_every_rank(rank: int) -> None:
    """Before anything is sent: gloo would end one rank, and give the other a wrong shape."""
    axis = Mesh.world()["shard"]
    error = (
        r"do not fit: .* of \[2, 3\] torch.float32 on rank 0, and gather_values of \[1, 3\] .* on rank 1. Expected one shape"
    )
    for call in (
        lambda x: gather_values(x, axis),
        grad(lambda x: gather_values(x, axis).sum()),
        torch.vmap(lambda x: gather_values(x, axis), in_dims=1),
    ):
        with pytest.raises(RuntimeError, match="ranks are about to join values that do not fit: "):
            call(torch.ones(2 - rank, 3))
    with pytest.raises(RuntimeError, match=error):
        gather_values(torch.ones(2 - rank, 3), axis)
    assert gather_values(torch.full((1,), float(rank)), axis).tolist() == [0.0, 1.0]  # nothing is left under way
