"""Compressors of local units: over a local axis nothing is sent, and the mean divides by its size.

Without loss the results are the gradients of the mean over all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_log import Collectives, world
from depth import at_most, each, mark_seldom
from ranks import mesh_of, real_ranks
from test_local import OPTIONS, Setting
from test_local_training import KINDS, MESHES, Rank, Tree
from torch import Tensor

import funshard as fs
from funshard.compress import Compressor, exact, powersgd, quantize, switch

LOSSLESS: dict[str, Callable[[Any], Compressor[Any]]] = {
    "exact": exact,
    "switch": lambda axes: switch(0, exact(()), exact(axes)),
    "quantize": lambda axes: quantize(1, axes=axes),
    "powersgd of full rank": lambda axes: powersgd(99, axes=axes, min_compression_rate=0),
    "powersgd of buffers": lambda axes: powersgd(99, axes=axes, batched=True, min_compression_rate=0),
}
TOLERANCES = {"quantize": {"rtol": 1e-5, "atol": 1e-6}}


def reduced(compressor: Compressor[Any], spec: fs.PartitionSpec, loss: Callable[[Tree], Tensor], params: Tree) -> Tree:
    return compressor.reduce(fs.grad(loss)(fs.unshard(params, spec, whole=False)), compressor.init(spec), spec)[0]


@at_most(1)
@each(sizes=MESHES, options=OPTIONS[:2], name=LOSSLESS)
def test_gradients_of_one_process(name: str, options: dict[str, Any], sizes: dict[str, int]) -> None:
    """Over all axes, and by a compressor that takes some of them and leaves the others to exact reductions."""
    case = Setting(KINDS, sizes, options)
    axes = [None, ("replicate", "expert")] if name.startswith(("quantize", "powersgd")) else [None]

    def rank(mesh: Any, x: Tensor) -> list[Tree]:
        on = case.on(mesh)
        each = (reduced(LOSSLESS[name](some), on.spec, lambda p: on.loss(p, x), on.params) for some in axes)
        return [fs.unshard(tree, on.spec) for tree in each]

    want = torch.func.grad(case.mean)(case.full)
    for found in fs.testing.spmd(rank, case.sizes)(case.xs):
        for key, g in found.items():
            close = TOLERANCES.get(name, {"rtol": 1e-9, "atol": 1e-11})
            torch.testing.assert_close(g, want[key].expand_as(g), **close, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("sizes", mark_seldom(MESHES, MESHES[1]), ids=str)
@real_ranks(4)
def test_on_real_ranks(rank: int, sizes: dict[str, int]) -> None:
    """Units with local axes are exact, whatever the rank of PowerSGD."""
    case = Rank(rank, sizes, OPTIONS[0])
    case.xs = case.xs[:, :1]
    for name, make in LOSSLESS.items():
        grads = reduced(make(None), case.spec, lambda p: case.loss(p, case.x[0]), case.params)
        case.check(grads, **TOLERANCES.get(name, {}))
    lossy = reduced(powersgd(1), case.spec, lambda p: case.loss(p, case.x[0]), case.params)
    want = case.expected()
    local = {name for unit in case.spec if unit.local_axes for param in unit.params for name in param.names}
    for name, g in fs.unshard(lossy, case.spec).items():
        if name in local:
            torch.testing.assert_close(g, want[name], rtol=1e-9, atol=1e-11)


def test_sums_of_float16_do_not_overflow() -> None:
    """Gradients of local units of 16 bits are divided before they are added, by all ranks that the mean is over."""
    model = torch.nn.ParameterDict({"w": torch.zeros(2, 8, dtype=torch.float16)})
    spec = fs.policies.whole(fs.P("shard", local={"expert": 0}))(model)
    large = torch.finfo(torch.float16).max

    def rank(mesh: Any, own: Tensor) -> Tree:
        return exact().reduce({"w": own}, (), spec.on(mesh))[0]

    found = fs.testing.spmd(rank, {"expert": 2, "shard": 2})(torch.full((4, 2, 8), large, dtype=torch.float16))
    assert torch.equal(found[""], torch.full_like(found[""], large / 2))


def test_nothing_crosses_a_local_axis() -> None:
    """Of 64 ranks only those along the split axis exchange the gradient."""
    with world(64):
        mesh = mesh_of(expert=16, shard=4)
        model = torch.nn.ParameterDict({"w": torch.zeros(2, 32, 32)})
        spec = fs.policies.whole(fs.P("shard", local={"expert": 0}))(model).on(mesh)
        for compressor in (exact(), quantize(), powersgd()):
            with Collectives() as sent:
                compressor.reduce({"w": torch.ones(2, 32, 32)}, compressor.init(spec), spec)
            assert {one.ranks for one in sent.all} == {4}
            assert max(one.numel for one in sent.all) == model["w"].numel()


def test_local_axes_are_among_the_others() -> None:
    """Without an axis that a unit is local over, gradients would be that axis's size too large: refused."""
    model = torch.nn.ParameterDict({"w": torch.zeros(2, 8)})
    spec = fs.policies.whole(fs.P(local={"expert": 0}))(model).on({"node": 2, "expert": 2})
    message = r"compress.exact: unit '' is local over axis 'expert', .*: expected axes= with it, got \['node'\]"
    with pytest.raises(ValueError, match=message):
        exact("node").reduce({}, (), spec)
    exact("expert").reduce({}, (), spec)


def test_wholes_are_no_gradients_of_pieces() -> None:
    model = torch.nn.ParameterDict({"w": torch.zeros(2, 8)})
    spec = fs.policies.whole(fs.P(local={"expert": 0}))(model).on({"expert": 2})
    with pytest.raises(ValueError, match=r"'w'.*expected.*\[2, 8\], got .*\[4, 8\]"):
        exact().reduce({"w": torch.zeros(4, 8)}, (), spec)
