"""Losses over the features of all ranks, by gather_values, against plain autograd of the joined batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import each
from parity import normal
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.func import grad

import funshard as fs
from funshard.collectives import Axis, Mesh, gather_values

Gather = Callable[[Tensor, Axis], Tensor]


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


def batch(ranks: int) -> tuple[Tensor, Tensor]:
    """Images and texts, [ranks, rows, features]."""
    return normal(ranks, 4, 5), normal(ranks, 4, 3, seed=1)


def joined(x: Tensor, mesh: Mesh, gather: Gather) -> Tensor:
    for name in reversed(mesh.names):
        x = gather(x, mesh[name])
    return x


def contrast(u: Tensor, v: Tensor, us: Tensor, vs: Tensor, first: int = 0) -> Tensor:
    """The loss of rows, counted from the first of them, against all."""
    labels = torch.arange(len(u)) + first
    return (F.cross_entropy(u @ vs.T, labels) + F.cross_entropy(v @ us.T, labels)) / 2


def loss_of(call: Any, batch: tuple[Tensor, Tensor, int], way: str) -> Tensor:
    """On every rank the loss of all rows, or that of its own rows against all; on shards a rank's call has its own alone."""
    images, texts, rank = batch
    if call.spec is None:
        us, vs = call(images.flatten(0, 1), texts.flatten(0, 1))
        u, v = (x.unflatten(0, images.shape[:2])[rank] for x in (us, vs))
    else:
        u, v = call(images[rank], texts[rank])
        us, vs = (joined(x, call.spec.bound_mesh, gather_values) for x in (u, v))
    return contrast(us, vs, us, vs) if way == "whole" else contrast(u, v, us, vs, rank * len(u))


LAYOUTS = {"shard": fs.P("shard"), "kept": fs.P("shard", reshard=False), "remat": fs.P("shard", remat=True), "ddp": fs.P()}


@each(sizes=[{"shard": 4}, {"replicate": 2, "shard": 2}], way=["whole", "own rows"], layout=LAYOUTS)
@real_ranks(4)
def test_contrastive_loss_on_real_ranks(rank: int, layout: str, way: str, sizes: dict[str, int]) -> None:
    """Of both orders. The rows of two axes, gathered over the inner one first, are in the order of the ranks."""
    spec = fs.by_type(nn.Linear, p=LAYOUTS[layout])(MODEL).on(mesh_of(**sizes))
    fs.testing.assert_exact(functools.partial(loss_of, way=way), MODEL, spec, (*batch(4), rank), order=2)


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
