"""``Precision(keep=)`` of local units: pieces along an axis in several dtypes, beside the whole model with the same casts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, every, mark_seldom
from parity import strategies
from ranks import mesh_of, real_ranks
from test_keep import TRANSFORMS
from torch import Tensor, nn

import funshard as fs
from funshard import P, Precision
from funshard.collectives import Axis

F32, F64 = torch.float32, torch.float64
WIDTH, HIDDEN, TOKENS = 5, 12, 12


class Layer(nn.Module):
    """Parameters of which those in ``kept`` are in float64 where they are used, and the others in float32."""

    kept: tuple[str, ...] = ()

    def assert_dtypes(self) -> None:
        for name, p in self.named_parameters():
            assert p.dtype == (F64 if name in self.kept else F32), name


class Parallel(Layer):
    """Columns, a gain for each of them, and rows over an axis; the gain of the input is on every rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.linspace(0.7, 1.3, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN // size), nn.Linear(HIDDEN // size, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.6, 1.4, HIDDEN // size))

    def forward(self, x: Tensor, axis: Axis | None) -> Tensor:
        self.assert_dtypes()
        h = (F.layer_norm(x.to(self.norm.dtype), (WIDTH,)) * self.norm).to(self.up.weight.dtype)
        h = F.linear(h, self.up.weight) + self.up.bias
        y = self.down((h.tanh() * self.gain).to(self.down.weight.dtype))
        return x + (fs.collectives.all_reduce(y, axis, reduce="sum") if axis else y).to(x.dtype)


class Experts(Layer):
    """A stack of matrices over an axis, each with a gain, for every rank's share of all tokens."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(6 // size, WIDTH, WIDTH)), nn.Parameter(torch.randn(6 // size, WIDTH))

    def forward(self, x: Tensor, axis: Axis | None) -> Tensor:
        self.assert_dtypes()
        there = fs.collectives.all_to_all(x, axis) if axis else x
        rows = there.view(axis.size if axis else 1, len(self.weight), -1, WIDTH)
        y = torch.einsum("rekd,edf->rekf", rows, self.weight) * self.gain[:, None]
        y = y.to(x.dtype).reshape(x.shape)
        return x + (fs.collectives.all_to_all(y, axis) if axis else y).tanh()


LAYERS: dict[str, tuple[type[Layer], str, Any, tuple[str, ...]]] = {
    "columns": (Parallel, "tensor", {"*.up.*": 0, "*.gain": 0, "*.down.weight": 1}, ("gain", "norm")),
    "rows": (Parallel, "tensor", {"*.up.*": 0, "*.gain": 0, "*.down.weight": 1}, ("down.weight", "up.bias")),
    "experts": (Experts, "expert", 0, ("gain",)),
}
"""Layers, the axis of their pieces, the dimension of each, and which parameters are kept in float64."""
STRATEGIES = strategies("shard", "keep", "remat", "replicated")


class Chain(nn.Module):
    def __init__(self, name: str, size: int = 1) -> None:
        super().__init__()
        layer, _, _, kept = LAYERS[name]
        self.layers, self.head = nn.ModuleList(layer(size) for _ in range(2)), nn.Linear(WIDTH, 3)
        for one in self.layers:
            one.kept = kept
        self.double()

    def forward(self, x: Tensor, axis: Axis | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, axis)
        return self.head(x.double())


class Case:
    """A rank's side of a model of pieces, with its spec, and the whole one."""

    def __init__(self, name: str, sizes: Mapping[str, int], strategy: str = "shard") -> None:
        _, self.axis, dims, self.kept = LAYERS[name]
        torch.manual_seed(0)
        self.whole, self.model = Chain(name), Chain(name, sizes[self.axis])
        self.full = {name: p.detach() * 0.9 for name, p in self.whole.named_parameters()}
        keep = {f"layers.*.{name}": F64 for name in self.kept}
        p, precision = STRATEGIES[strategy], Precision(param=F32, reduce=F64, keep=keep)
        options = {"axis": p.axis, "reshard": p.reshard, "remat": p.remat}
        inner = P(**options, precision=precision, local={self.axis: dims})
        self.spec = fs.policies.by_path({"": P(**options), "layers.*": inner})(self.model)
        xs = torch.randn(*(1 if name == "tensor" else size for name, size in sizes.items()), TOKENS, WIDTH, dtype=F64)
        self.xs = xs.expand(*sizes.values(), TOKENS, WIDTH).reshape(-1, TOKENS, WIDTH)  # "tensor" shares them

    def expected(self, transform: str) -> fs.Params:
        """The mean over ranks, on the whole model, with each parameter cast by hand."""

        def loss(full: Mapping[str, Tensor], x: Tensor) -> Tensor:
            low = {name for name in full if name.startswith("layers") and name.split(".", 2)[2] not in self.kept}
            cast = {name: p.to(F32) if name in low else p for name, p in full.items()}
            return objective(torch.func.functional_call(self.whole, cast, (x.to(F32),)))

        found = [TRANSFORMS[transform][1](lambda p, x=x: loss(p, x))(self.full) for x in self.xs]
        return {name: torch.stack([tree[name] for tree in found]).mean(0) for name in self.full}

    def run(self, mesh: Any, x: Tensor, transform: str) -> fs.Params:
        spec = self.spec.on(mesh)

        def loss(params: Mapping[str, Tensor]) -> Tensor:
            return objective(fs.functional_call(self.model, params, (x.to(F32), spec.axis(self.axis)), spec=spec))

        return fs.unshard(TRANSFORMS[transform][0](loss)(fs.shard(self.full, spec)), spec)


def objective(y: Tensor) -> Tensor:
    return y.sin().square().sum()


def compare(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.abs().sum() > 0, name
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


MESHES = {
    "columns": [{"shard": 2, "tensor": 2}, {"tensor": 2, "shard": 2}],
    "rows": [{"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2, "shard": 1}],
    "experts": [{"expert": 2, "shard": 2}, {"shard": 2, "expert": 2}],
}
CASES = [(name, sizes) for name, some in MESHES.items() for sizes in some]


@at_most(2)
@every(transform=mark_seldom(TRANSFORMS, "fs.grad", "hvp"), strategy=mark_seldom(STRATEGIES, "shard"))
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
@real_ranks(4)
def test_real_ranks(rank: int, name: str, sizes: dict[str, int], strategy: str, transform: str) -> None:
    mesh = mesh_of(**sizes)
    case = Case(name, sizes, strategy)
    compare(case.run(mesh, case.xs[rank], transform), case.expected(transform))
