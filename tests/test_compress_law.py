"""One law of what a compressor reduces, over all compressors x axes x layouts x sizes of layers, on simulated and real ranks.

Gradients are whole numbers times the number of ranks, so that their means are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from depth import at_most, depth, mark_seldom
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import Pool
from torch import nn
from torch.distributed import init_device_mesh
from torch.testing import assert_close

import funshard as fs
from funshard.compress import Compressor, exact, powersgd, quantize, switch

LAYERS: dict[str, tuple[int, ...]] = {
    "bias": (3,),
    "scalar": (),
    "empty": (0, 4),
    "row": (1, 9),
    "small": (2, 3),
    "matrix": (6, 5),
    "kernel": (4, 2, 3),
}
MESHES = ({"shard": 1}, {"shard": 3}, {"replicate": 2, "shard": 2}, {"a": 2, "b": 1, "c": 3})
OVER_ALL: dict[str, Any] = {
    "quantize": lambda axes: quantize(axes=axes),
    "chunks": lambda axes: quantize(4, axes=axes),
    "powersgd": lambda axes: powersgd(axes=axes),
    "eager": lambda axes: powersgd(2, axes=axes, min_compression_rate=0.5),
    "batched": lambda axes: powersgd(1, axes=axes, batched=True, min_compression_rate=0.5),
    "no error": lambda axes: powersgd(1, axes=axes, min_compression_rate=0.5, error_feedback=False, warm_start=False),
}
"""Lossy ones: exact over the axes that they do not compress over."""
LOSSLESS: dict[str, Any] = {
    "each alone": lambda axes: quantize(1, axes=axes),
    "full rank": lambda axes: powersgd(99, axes=axes, min_compression_rate=0),
    "full rank, batched": lambda axes: powersgd(99, axes=axes, batched=True, min_compression_rate=0),
    "full rank, cold": lambda axes: powersgd(99, axes=axes, min_compression_rate=0, warm_start=False, error_feedback=False),
    "nothing is worth it": lambda axes: powersgd(1, axes=axes, min_compression_rate=1e9),
    "switch": lambda axes: switch(0, exact(()), powersgd(99, axes=axes, min_compression_rate=0)),
}
OVER_SOME: dict[str, Any] = {
    "exact": exact,
    "local": lambda axes: switch(0, exact(()), exact(axes)),
}
"""The mean over the axes that they are given, and nothing over the others."""


@dataclass(frozen=True)
class Case:
    sizes: dict[str, int]
    axes: tuple[str, ...] | str | None
    layers: tuple[tuple[str, str | tuple[str, ...] | None, int], ...]
    """Of each its kind, and what its P is of: axis and align."""

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def model(self) -> nn.Module:
        model = nn.Module()
        for i, (kind, _, _) in enumerate(self.layers):
            layer = nn.Module()
            layer.register_parameter("w", nn.Parameter(torch.zeros(LAYERS[kind], dtype=torch.float64)))
            if kind == "matrix":
                layer.register_parameter("b", nn.Parameter(torch.zeros(5, dtype=torch.float64)))
            model.add_module(f"m{i}", layer)
        return model

    @property
    def spec(self) -> fs.PartitionSpec:
        return fs.by_path({f"m{i}": fs.P(axis, align=align) for i, (_, axis, align) in enumerate(self.layers)})(self.model)

    def gradients(self, seed: int = 0) -> fs.Params:
        """Each rank's own, in dimension 0."""
        g = torch.Generator().manual_seed(seed)
        named = self.model.named_parameters()
        return {n: torch.randint(-9, 10, (self.ranks, *p.shape), generator=g).double() * self.ranks for n, p in named}

    def mean(self, full: fs.Params, axes: tuple[str, ...]) -> fs.Params:
        """Each rank's mean over these axes."""
        dims = [i for i, name in enumerate(self.sizes) if name in axes]
        shaped = {n: x.unflatten(0, tuple(self.sizes.values())) for n, x in full.items()}
        means = {n: (x.mean(dims, keepdim=True) if dims else x).expand_as(x) for n, x in shaped.items()}
        return {n: x.flatten(0, len(self.sizes) - 1) for n, x in means.items()}

    def slices(self, full: fs.Params) -> fs.Params:
        """Each rank's shards of its own full tensors, by slicing alone."""
        spec = self.spec.on(self.sizes)
        each = [fs.shard({n: x[r] for n, x in full.items()}, spec, rank=r) for r in range(self.ranks)]
        return {key: torch.stack([shards[key] for shards in each]) for key in each[0]}

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(self.sizes) if self.axes is None else (self.axes,) if isinstance(self.axes, str) else self.axes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.sampled_from(MESHES))
    some = st.permutations(list(sizes)).flatmap(lambda names: st.integers(0, len(names)).map(lambda n: tuple(names[:n])))
    layer = st.tuples(st.sampled_from(list(LAYERS)), some, st.sampled_from([1, 4]))
    axes = draw(st.one_of(st.none(), st.sampled_from(list(sizes)), some))
    return Case(sizes, axes, tuple(draw(st.lists(layer, min_size=1, max_size=4))))


def steps(compressor: Compressor[Any], spec: fs.PartitionSpec, *grads: fs.Params) -> list[fs.Params]:
    state, out = compressor.init(spec), []
    for g in grads:
        shards, state = compressor.reduce(g, state, spec)
        out.append(shards)
    return out


def simulated(case: Case, compressor: Compressor[Any], *grads: fs.Params) -> list[fs.Params]:
    """What every step gives, ranks in dimension 0."""
    return fs.testing.spmd(lambda mesh, *g: steps(compressor, case.spec.on(mesh), *g), case.sizes)(*grads)


def check_replicas(case: Case, shards: fs.Params) -> None:
    """Ranks that hold the same slice hold the same numbers, and zeros in the padding."""
    inside = case.slices({n: torch.ones_like(g) for n, g in case.gradients().items()})
    for unit in case.spec.on(case.sizes):
        x = shards[unit.key].unflatten(0, tuple(case.sizes.values()))
        for dim, axis in enumerate(case.sizes):
            if axis not in unit.p.axes:
                # vmap's matrix products round each rank's in another way; on real ranks it is bit for bit
                assert_close(x, x.narrow(dim, 0, 1).expand_as(x), rtol=0, atol=1e-10)
        assert not shards[unit.key][inside[unit.key] == 0].any()


SMALL = Case(
    {"replicate": 2, "shard": 2}, "shard", (("bias", "shard", 1), ("small", "shard", 1), ("row", ("shard", "replicate"), 1))
)
SPLIT = Case({"replicate": 2, "shard": 2}, "replicate", (("bias", ("replicate", "shard"), 1), ("matrix", "replicate", 4)))


@given(case=cases())
@example(case=SMALL)
@example(case=SPLIT)
@settings(max_examples=depth(4, 250))
def test_a_lossless_one_is_the_mean_over_all_ranks(case: Case) -> None:
    """Over the axes that are named and over the others."""
    grads = case.gradients()
    want = case.slices(case.mean(grads, tuple(case.sizes)))
    for name, make in LOSSLESS.items():
        [shards] = simulated(case, make(case.axes), grads)
        tolerance = 1e-5 if name == "each alone" else 1e-9
        assert_close(shards, want, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
        check_replicas(case, shards)


@given(case=cases())
@settings(max_examples=depth(4, 250))
def test_an_exact_one_is_the_mean_over_its_axes(case: Case) -> None:
    grads = case.gradients()
    want = case.slices(case.mean(grads, case.chosen))
    for make in OVER_SOME.values():
        [shards] = simulated(case, make(case.axes), grads)
        assert_close(shards, want, rtol=1e-6, atol=1e-6)
    [own] = simulated(case, exact(()), grads)
    assert_close(own, case.slices(grads), rtol=0, atol=0)


@given(case=cases())
@example(case=SMALL)
@example(case=SPLIT)
@settings(max_examples=depth(4, 250))
def test_a_lossy_one_keeps_replicas_alike(case: Case) -> None:
    grads = [case.gradients(seed) for seed in range(2)]
    for make in OVER_ALL.values():
        for shards in simulated(case, make(case.axes), *grads):
            check_replicas(case, shards)


@given(case=cases())
@example(case=SMALL)
@example(case=SPLIT)
@settings(max_examples=depth(2, 150))
def test_what_powersgd_leaves_out_comes_later(case: Case) -> None:
    """Each step takes what it sends from what is left, whose rank is lower by one: then it was the mean over all ranks."""
    grads = case.gradients()
    nothing = {n: torch.zeros_like(g) for n, g in grads.items()}
    want = case.slices(case.mean(grads, tuple(case.sizes)))
    for batched, rate in ((False, 0.5), (True, 0.5), (False, 1.0)):
        compressor = powersgd(1, axes=case.axes, batched=batched, warm_start=False, min_compression_rate=rate)
        out = simulated(case, compressor, grads, *[nothing] * 7)
        assert_close({key: torch.stack([shards[key] for shards in out]).sum(0) for key in want}, want, rtol=1e-6, atol=1e-6)


REAL = (
    SMALL,
    SPLIT,
    Case(
        {"replicate": 2, "shard": 2},
        "shard",
        (("matrix", None, 1), ("kernel", ("replicate", "shard"), 1), ("row", "replicate", 4)),
    ),
    Case({"replicate": 2, "shard": 2}, None, (("matrix", "shard", 1), ("kernel", (), 1), ("bias", ("shard", "replicate"), 1))),
)


def compressors(case: Case) -> dict[str, Any]:
    """By default two cases in turn share all of them."""
    every = LOSSLESS | OVER_ALL
    return {name: every[name] for name in depth([*every][REAL.index(case) % 2 :: 2], [*every])}


def on_real_ranks(rank: int, case: Case) -> dict[str, list[fs.Params]]:
    spec = case.spec.on(init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes)))
    grads = [{n: g[rank] for n, g in case.gradients(seed).items()} for seed in range(2)]
    return {name: steps(make(case.axes), spec, *grads) for name, make in compressors(case).items()}


@at_most(1)
@pytest.mark.parametrize("case", mark_seldom(REAL, REAL[0], REAL[2]), ids=["small", "split", "mixed", "all"])
def test_on_real_ranks(gloo4: Pool, case: Case) -> None:
    """The mean where nothing is lost, bit for bit the same on replicas, and as on simulated ranks."""
    each = gloo4.run(on_real_ranks, case)
    for name, make in compressors(case).items():
        there = simulated(case, make(case.axes), *[case.gradients(seed) for seed in range(2)])
        for step in range(2):
            shards = {key: torch.stack([one[name][step][key] for one in each]) for key in each[0][name][step]}
            check_replicas(case, shards)
            for unit in case.spec.on(case.sizes):
                x = shards[unit.key].unflatten(0, tuple(case.sizes.values()))
                for dim, axis in enumerate(case.sizes):
                    assert axis in unit.p.axes or torch.equal(x.select(dim, 0), x.select(dim, 1)), (name, unit.key)
            assert_close(shards, there[step], rtol=1e-5, atol=1e-5)
            if name in LOSSLESS:
                want = case.slices(case.mean(case.gradients(step), tuple(case.sizes)))
                assert_close(shards, want, rtol=1e-5, atol=1e-5)
