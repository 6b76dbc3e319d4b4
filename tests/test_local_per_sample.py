"""Gradients of single samples with local units: those of one process, where ranks along local axes have the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import each, mark_seldom
from ranks import Pool
from test_local import LAYERS, OPTIONS, full_sizes, objective, spec_of, whole_params
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import funshard as fs
from funshard import P

Tree = dict[str, Tensor]
KINDS = ("replicated", "pair", "experts")
WHOLE, FULL = whole_params(KINDS)
SAMPLES, CLIP = 3, 2.45
MESHES = [
    {"shard": 2, "tensor": 2},
    {"tensor": 2, "expert": 2},
    {"replicate": 2, "expert": 2},
    {"tensor": 4},
    {"shard": 2},
    {"expert": 3, "shard": 2, "tensor": 2},
]


def batches(sizes: dict[str, int]) -> Tensor:
    """[ranks, samples, tokens, features], shared along "tensor" and "expert"."""
    torch.manual_seed(1)
    own = [1 if name in ("tensor", "expert") else size for name, size in sizes.items()]
    return torch.randn(*own, SAMPLES, 12, 4, dtype=torch.float64).expand(*sizes.values(), SAMPLES, 12, 4).flatten(0, -4)


def reference(full: Tree, x: Tensor) -> Tree:
    """Each sample's gradient in one process."""
    grad = torch.func.grad(lambda p, x: objective(torch.func.functional_call(WHOLE, p, (x,))))
    return torch.func.vmap(grad, (None, 0))(full, x)


def clipped_sum(full: Tree, xs: Tensor, sizes: dict[str, int]) -> tuple[Tree, int]:
    """Over all samples, of which ranks along local axes have the same, and their number."""
    at = [slice(1) if name in ("tensor", "expert") else slice(None) for name in sizes]
    found = reference(full, (samples := xs.unflatten(0, tuple(sizes.values()))[tuple(at)].flatten(0, -3)))
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
    assert 0 < int((norms > CLIP).sum()) < len(samples)
    scale = (CLIP / (norms + 1e-6)).clamp(max=1)
    return {name: torch.einsum("b...,b->...", g, scale) for name, g in found.items()}, len(samples)


def of_rank(mesh: Any, model: nn.Module, spec: fs.PartitionSpec, x: Tensor) -> dict[str, Tree]:
    spec, full = spec.on(mesh), FULL
    params, axes = fs.shard(full, spec), {name: spec.axis(name) for name in ("tensor", "expert")}

    def loss(params: Tree, x: Tensor) -> Tensor:
        return objective(fs.functional_call(model, params, (x, axes), spec=spec))

    found = fs.per_sample_grads(loss, params, (x,), spec=spec)
    want = reference(full, x)
    local = {f"layers.{i}": P(local=LAYERS[kind][1]) for i, kind in enumerate(KINDS)}
    unsplit = fs.policies.by_path({"": P(), **local})(model).on(mesh)  # whose shards are this rank's alone
    apart = [fs.shard({name: g[i] for name, g in want.items()}, unsplit, check_values=False) for i in range(SAMPLES)]
    pieces = [fs.unshard(one, unsplit, whole=False) for one in apart]
    error = {name: (g - torch.stack([p[name] for p in pieces])).abs().max() for name, g in found.items()}
    out = {"error": error}
    for reduce in ("sum", "mean", 7.0):
        out[str(reduce)] = fs.unshard(fs.per_sample_grads(loss, params, (x,), spec=spec, clip=CLIP, reduce=reduce), spec)
    noisy = fs.per_sample_grads(
        loss, params, (x,), spec=spec, clip=CLIP, noise=0.4, reduce="sum", generator=torch.Generator().manual_seed(3)
    )
    return out | {"noise": {name: g - out["sum"][name] for name, g in fs.unshard(noisy, spec).items()}}


def noise() -> Tree:
    """That of axes of one rank."""
    (model, spec), full = spec_of(KINDS, full_sizes({}), OPTIONS[0]), FULL
    spec = spec.on(full_sizes({}))
    zero = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum() * 0  # noqa: E731
    options: dict[str, Any] = {"clip": CLIP, "noise": 0.4, "reduce": "sum", "generator": torch.Generator().manual_seed(3)}
    x = torch.zeros(1, 12, 4, dtype=torch.float64)
    return fs.unshard(fs.per_sample_grads(zero, fs.shard(full, spec), (x,), spec=spec, **options), spec)


def check(found: dict[str, Tree], xs: Tensor, sizes: dict[str, int]) -> None:
    assert all((error < 1e-10).all() for error in found["error"].values()), found["error"]
    total, count = clipped_sum(FULL, xs, sizes)
    for reduce, by in (("sum", 1), ("mean", count), ("7.0", 7)):
        for name, g in found[reduce].items():
            torch.testing.assert_close(g, (total[name] / by).expand_as(g), rtol=1e-9, atol=1e-11)
    for name, drawn in noise().items():
        torch.testing.assert_close(found["noise"][name], drawn.expand_as(found["noise"][name]), rtol=1e-9, atol=1e-9)


@each
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("sizes", mark_seldom(MESHES, MESHES[1]), ids=str)
def test_on_simulated_ranks(sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Alone, clipped by the norm over the pieces of all ranks, and with the noise of one process."""
    sizes = full_sizes(sizes)
    xs, (model, spec) = batches(sizes), spec_of(KINDS, sizes, options)
    check(fs.testing.spmd(lambda mesh, x: of_rank(mesh, model, spec, x), sizes)(xs), xs, sizes)


def mesh_of(sizes: dict[str, int]) -> Any:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def on_ranks(rank: int, sizes: dict[str, int]) -> None:
    xs, (model, spec) = batches(sizes), spec_of(KINDS, sizes, OPTIONS[0])
    check(of_rank(mesh_of(sizes), model, spec, xs[rank]), xs, sizes)


@pytest.mark.parametrize("sizes", mark_seldom(MESHES[:4], MESHES[0]), ids=str)
def test_on_real_ranks(gloo4: Pool, sizes: dict[str, int]) -> None:
    gloo4.run(on_ranks, full_sizes(sizes))


def with_other_samples(rank: int, sizes: dict[str, int]) -> str:
    model, spec = spec_of(KINDS, sizes, OPTIONS[0])
    spec = spec.on(mesh_of(sizes))
    loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).sum()  # noqa: E731
    x = batches(sizes)[rank] + (rank == 3)  # which not all of the ranks see along their own axes
    with pytest.raises(ValueError, match=r"the model is local over 'expert', and ranks along it have other samples: expected"):
        fs.per_sample_grads(loss, fs.shard(FULL, spec), x, spec=spec)
    return "refused"


def test_ranks_with_samples_of_their_own(gloo4: Pool) -> None:
    """A sample that goes to another rank's expert has a part in that rank's gradient: refused, on all ranks."""
    assert gloo4.run(with_other_samples, full_sizes({"shard": 2, "expert": 2})) == ["refused"] * 4
    sizes = full_sizes({"expert": 2})
    model, spec = spec_of(KINDS, sizes, OPTIONS[0])

    def rank(mesh: Any, x: Tensor, clip: float | None) -> Any:
        on = spec.on(mesh)
        axes = {name: on.axis(name) for name in ("tensor", "expert")}
        loss = lambda p, x: objective(fs.functional_call(model, p, (x, axes), spec=on))  # noqa: E731
        return fs.per_sample_grads(loss, fs.shard(FULL, on), x, spec=on, clip=clip)

    xs = batches(sizes) + torch.arange(2)[:, None, None, None]
    for clip in (None, CLIP):
        found = fs.testing.spmd(lambda mesh, x, clip=clip: rank(mesh, x, clip), sizes)(xs)
        assert all(g.isnan().all() for g in found.values())


def test_frozen_local_units() -> None:
    """A trained unit before frozen columns: its gradient on one rank has the part of that rank's columns alone."""
    sizes = full_sizes({"shard": 2, "tensor": 2})
    xs, (model, spec), full = batches(sizes), spec_of(KINDS, sizes, OPTIONS[0]), FULL

    def rank(mesh: Any, x: Tensor) -> Tree:
        on = spec.on(mesh)
        params, axes = fs.shard(full, on), {name: on.axis(name) for name in ("tensor", "expert")}
        trained, frozen = {"layers.0": params["layers.0"]}, {key: p for key, p in params.items() if key != "layers.0"}
        loss = lambda p, x: objective(fs.functional_call(model, {**frozen, **p}, (x, axes), spec=on))  # noqa: E731
        want = reference(full, x)
        return {name: g - want[name] for name, g in fs.per_sample_grads(loss, trained, x, spec=on).items()}

    assert all(error.abs().max() < 1e-10 for error in fs.testing.spmd(rank, sizes)(xs).values())
