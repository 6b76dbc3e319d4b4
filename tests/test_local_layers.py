"""Layers with random numbers and buffers in models with local units: on shared activations all ranks of an axis do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import mark_seldom
from ranks import real_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import funshard as fs
from funshard import P

Tree = dict[str, Tensor]
SIZES = {"shard": 2, "tensor": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "remat": {"remat": True},
    "kept": {"reshard": False},
    "offloaded": {"offload": ("params", "activations")},
    "compiled": {"compile": fs.Compile(backend="aot_eager")},
}


class Layers(nn.Module):
    """A pair of columns and rows between dropout and normalisation of the activations that ranks share."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.up, self.down = nn.Linear(4, 8 // ranks), nn.Linear(8 // ranks, 4, bias=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, axis: Any = None) -> Tensor:
        x = self.drop(self.norm(self.before(x)))
        y = self.down(self.up(x).tanh())
        y = y if axis is None else fs.collectives.all_reduce(y, axis, reduce="sum")
        return self.drop(x + y)


def models(options: dict[str, Any]) -> tuple[nn.Module, nn.Module, fs.PartitionSpec, Tree]:
    torch.manual_seed(0)
    whole, local = Layers().double(), Layers(SIZES["tensor"]).double()
    local_axes = {"tensor": {"up.*": 0, "down.weight": 1}}
    spec = fs.policies.whole(P("shard", local=local_axes, **options))(local)
    return whole, local, spec, {name: p.detach() for name, p in whole.named_parameters()}


def batch() -> Tensor:
    return torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("option", mark_seldom(OPTIONS, "plain", "remat"))
@real_ranks(4)
def test_dropout_and_buffers(rank: int, option: str) -> None:
    """Gradients and running statistics of one process, for any way in which units run.

    A rank is seeded by its coordinates on the axes that are not local: the guide's advice.
    """
    whole, local, spec, full = models(OPTIONS[option])
    on = spec.on(init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES)))
    at, xs = on.axis("shard").rank, batch()
    buffers = dict(local.named_buffers())

    def loss(params: Tree) -> tuple[Tensor, Tree]:
        torch.manual_seed(100 + at)  # pyright: ignore[reportOperatorIssue]
        own = {name: b.clone() for name, b in buffers.items()}
        return fs.functional_call(local, params, (xs[at], on.axis("tensor")), spec=on, buffers=own).square().sum(), own

    grads, (_, new) = fs.grad_and_value(loss, has_aux=True)(fs.shard(full, on))

    def of_rank(params: Tree, shard: int) -> tuple[Tensor, Tree]:
        torch.manual_seed(100 + shard)
        own = {name: b.clone() for name, b in whole.named_buffers()}
        return torch.func.functional_call(whole, {**params, **own}, (xs[shard],)).square().sum(), own

    want = torch.func.grad(lambda p: (of_rank(p, 0)[0] + of_rank(p, 1)[0]) / 2)(full)
    for name, g in fs.unshard(grads, on).items():
        assert_close(g, want[name], rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    assert_close(new, of_rank(full, at)[1])  # pyright: ignore[reportArgumentType]
