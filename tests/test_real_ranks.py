"""Law D: the c10d path on two real ranks agrees with the ranks that vmap simulates, for every collective and transform."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from depth import some
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import funshard as fs
from funshard import collectives as c
from funshard.collectives import Mesh


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def model(blocks: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), *(Block(5) for _ in range(blocks)), nn.Linear(5, 2)).double()


def data(size: int) -> Tensor:
    return torch.randn(size, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


COLLECTIVES = {
    "gather_slices": lambda x, a: c.gather_slices(x, a),
    "gather_slices_sum": lambda x, a: c.gather_slices(x, a, reduce="sum"),
    "gather_values": lambda x, a: c.gather_values(x, a),
    "reduce_scatter": lambda x, a: c.reduce_scatter(x, a),
    "reduce_scatter_sum": lambda x, a: c.reduce_scatter(x, a, reduce="sum"),
    "all_reduce": lambda x, a: c.all_reduce(x, a),
    "all_reduce_sum": lambda x, a: c.all_reduce(x, a, reduce="sum"),
    "sum_shards": lambda x, a: c.sum_shards(x, a),
    "vary": lambda x, a: c.vary(x, a),
    "vary_sum": lambda x, a: c.vary(x, a, reduce="sum"),
    "broadcast": lambda x, a: c.broadcast(x, a, src=1),
    "all_to_all": lambda x, a: c.all_to_all(x, a),
    "permute": lambda x, a: c.permute(x, a),
    "permute_to_the_next": lambda x, a: c.permute(x, a, perm=[(0, 1)]),
    "scatter": lambda x, a: c.scatter(x, a),
}


def collective_results(mesh: Mesh, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
    axis = mesh["shard"]
    out = {}
    for name, op in COLLECTIVES.items():

        def cubed(x: Tensor, op=op) -> Tensor:
            return (op(x, axis) ** 3).sum()

        out[name] = (
            op(x, axis),
            torch.func.grad(cubed)(x),
            torch.func.jvp(torch.func.grad(cubed), (x,), (x.cos(),))[1],
            torch.func.grad(lambda x: (torch.func.grad(cubed)(x) ** 2).sum())(x),
            torch.vmap(lambda x: op(x, axis))(torch.stack([x, 2 * x, x.sin()])),
            torch.vmap(lambda x: op(x, axis), in_dims=1)(torch.stack([x, 2 * x, x.sin()], 1)),
        )
    return out


def real_collectives(rank: int) -> dict[str, tuple[Tensor, ...]]:
    return collective_results(Mesh.world(), torch.randn(2, 4, 3, dtype=torch.float64)[rank])


def test_collectives_agree_with_simulated_ranks(gloo2: Pool) -> None:
    torch.manual_seed(0)
    simulated = fs.testing.spmd(collective_results, 2)(torch.randn(2, 4, 3, dtype=torch.float64))
    for rank, real in enumerate(gloo2.run(real_collectives)):
        for name, results in real.items():
            for i, result in enumerate(results):
                torch.testing.assert_close(result, simulated[name][i][rank], msg=f"{name}[{i}]")


MODEL = model()


def transform_results(mesh: Mesh, x: Tensor) -> dict[str, dict[str, Tensor]]:
    m = MODEL
    spec = fs.by_type(Block)(m).on(mesh)
    params = fs.shard({k: v.detach() for k, v in m.named_parameters()}, spec)
    v = {k: p.cos() for k, p in params.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        penalty = sum((p**2).sum() for p in params.values())
        return F.softplus(fs.functional_call(m, params, (x,), spec=spec)).sum() + 0.1 * penalty

    def penalised(params: dict[str, Tensor]) -> Tensor:
        return loss(params) + sum((g**3).sum() for g in torch.func.grad(loss)(params).values())

    return {
        "grad": torch.func.grad(loss)(params),
        "fs.grad": fs.grad(loss)(params),
        "hvp, jvp of grad": torch.func.jvp(torch.func.grad(loss), (params,), (v,))[1],
        "hvp, grad of dot": torch.func.grad(lambda p: sum((g * v[k]).sum() for k, g in torch.func.grad(loss)(p).items()))(
            params
        ),
        "grad of grad": torch.func.grad(penalised)(params),
        "maml": torch.func.grad(lambda p: loss({k: p[k] - 0.1 * g for k, g in torch.func.grad(loss)(p).items()}))(params),
    }


def real_transforms(rank: int) -> dict[str, dict[str, Tensor]]:
    return transform_results(Mesh.world(), data(2)[rank])


def test_transforms_agree_with_simulated_ranks(gloo2: Pool) -> None:
    simulated = fs.testing.spmd(transform_results, 2)(data(2))
    for rank, real in enumerate(gloo2.run(real_transforms)):
        for name, tree in real.items():
            for key, value in tree.items():
                torch.testing.assert_close(value, simulated[name][key][rank], rtol=1e-12, atol=1e-12, msg=f"{name} {key}")


LAYOUTS: dict[str, fs.P] = {
    "hsdp": fs.P("shard"),
    "two axes": fs.P(("replicate", "shard")),
    "other order": fs.P(("shard", "replicate")),
    "ddp": fs.P(),
    "zero2": fs.P("shard", reshard=False, align=4),
}


DERIVATIVES: dict[str, Callable[[Any, fs.Params], fs.Params]] = {
    "grad": lambda loss, p: fs.grad(loss)(p),
    "hvp": lambda loss, p: torch.func.jvp(torch.func.grad(loss), (p,), ({k: t.cos() for k, t in p.items()},))[1],
    "grad of sum": lambda loss, p: torch.func.grad(lambda p: loss(p, reduce="sum"))(p),
}


def layout_results(mesh: Mesh, x: Tensor) -> dict[str, dict[str, Tensor]]:
    full = {k: v.detach() for k, v in MODEL.named_parameters()}
    out = {}
    for name, derivative in some(itertools.product(LAYOUTS, DERIVATIVES), 1):
        spec = fs.by_type(Block, p=LAYOUTS[name])(MODEL).on(mesh)

        def loss(params: dict[str, Tensor], spec: fs.PartitionSpec = spec, **options: Any) -> Tensor:
            return (fs.functional_call(MODEL, params, (x,), spec=spec, **options) ** 2).mean()

        out[f"{name} {derivative}"] = DERIVATIVES[derivative](loss, fs.shard(full, spec))
    return out


def real_layouts(rank: int) -> dict[str, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return layout_results(Mesh.of(mesh), data(4)[rank])


def test_layouts_on_two_axes_agree_with_simulated_ranks(gloo4: Pool) -> None:
    """HSDP, one buffer over two axes in either order, and replication: real meshes equal simulated ones."""
    simulated = fs.testing.spmd(layout_results, {"replicate": 2, "shard": 2})(data(4))
    for rank, real in enumerate(gloo4.run(real_layouts)):
        for name, tree in real.items():
            for key, value in tree.items():
                torch.testing.assert_close(value, simulated[name][key][rank], rtol=1e-12, atol=1e-12, msg=f"{name} {key}")


@real_ranks(2)
def test_plain_autograd_outside_and_inside(rank: int) -> None:
    """Double backward, autograd over torch.func, fs.grad in fs.grad: the regathered weights carry every derivative.

    Every way to stack plain autograd and torch.func gives the same second derivative.
    """
    spec = fs.by_type(Block)(MODEL).bound
    shards, x = fs.shard(MODEL, spec), data(2)[rank]
    v = {k: t.cos() for k, t in shards.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return (fs.functional_call(MODEL, params, (x,), spec=spec) ** 2).mean()

    def dot(grads: dict[str, Tensor]) -> Tensor:
        return sum((g * v[k]).sum() for k, g in grads.items())

    expected = torch.func.jvp(torch.func.grad(loss), (shards,), (v,))[1]
    leaves = {k: t.clone().requires_grad_() for k, t in shards.items()}
    first = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    double = torch.autograd.grad(dot(dict(zip(leaves, first, strict=True))), list(leaves.values()))
    over_func = torch.autograd.grad(dot(torch.func.grad(loss)(leaves)), list(leaves.values()))
    over_fs = torch.autograd.grad(dot(fs.grad(loss)(leaves)), list(leaves.values()))
    nested = fs.grad(lambda p: dot(fs.grad(loss)(p)))(shards)
    for i, (key, want) in enumerate(expected.items()):
        for got in (double[i], over_func[i], over_fs[i], nested[key]):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
