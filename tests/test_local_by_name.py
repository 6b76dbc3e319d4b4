"""Pieces of local parameters by parameter name: norms and averages over the axes where ranks differ; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import funshard as fs
from funshard import P, averaging, policies

PIECES = nn.Linear(2, 2).double()
"""Half of the rows of a linear map over "tensor"; the bias is replicated."""
SPEC = policies.whole(P("shard", local={"tensor": {"weight": 0}}))(PIECES)
SIZES = {"tensor": 2, "shard": 2}
WHOLE = {"weight": torch.arange(8.0, dtype=torch.float64).view(4, 2), "bias": torch.tensor([3.0, -1.0], dtype=torch.float64)}


def my_pieces(spec: fs.PartitionSpec) -> fs.Params:
    """The rank's piece of the weight, and the bias."""
    return {"weight": fs.collectives.scatter(WHOLE["weight"], spec.axis("tensor")), "bias": WHOLE["bias"]}


def vector(tree: fs.Params) -> Tensor:
    return torch.cat([x.flatten() for x in tree.values()])


def of_all_ranks(f: Callable[[fs.PartitionSpec], Any]) -> Any:
    return fs.testing.spmd(lambda mesh, _: f(SPEC.on(mesh)), SIZES)(torch.zeros(4))


def on_four_ranks(rank: int, f: Callable[[fs.PartitionSpec], Any]) -> Any:
    return f(SPEC.on(init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))))


def measures(spec: fs.PartitionSpec) -> Tensor:
    """Norms and an inner product of pieces and of whole tensors by name."""
    trees = my_pieces(spec), WHOLE
    return torch.stack(
        [x for t in trees for x in (*(fs.optim.global_norm(t, spec, p=p) for p in NORMS), fs.optim.vdot(t, t, spec))]
    )


NORMS = (1.0, 2.0, float("inf"))
WANTED = torch.stack([*(torch.linalg.vector_norm(vector(WHOLE), p) for p in NORMS), vector(WHOLE).square().sum()]).repeat(2)


def clipped_derivative(spec: fs.PartitionSpec) -> fs.Params:
    """The gradient of a sum over clipped pieces, of which each rank has a part."""

    def loss(tree: fs.Params) -> Tensor:
        clipped, _ = fs.optim.clip_by_global_norm(tree, spec, 1.0)
        weight = fs.collectives.gather_slices(clipped["weight"], spec.axis("tensor"))
        return weight.pow(3).sum() + clipped["bias"].cos().sum()

    return torch.func.grad(loss)(my_pieces(spec))


def test_norms_count_every_piece_once(gloo4: Pool) -> None:
    torch.testing.assert_close(of_all_ranks(measures), WANTED.expand(4, -1))
    for got in gloo4.run(on_four_ranks, measures):
        torch.testing.assert_close(got, WANTED)


def test_the_derivative_of_clipped_pieces() -> None:
    def loss(tree: fs.Params) -> Tensor:
        scale = 1.0 / (vector(tree).norm() + 1e-6)
        return (tree["weight"] * scale).pow(3).sum() + (tree["bias"] * scale).cos().sum()

    got, want = of_all_ranks(clipped_derivative), torch.func.grad(loss)(WHOLE)
    torch.testing.assert_close(got["weight"], want["weight"].view(2, 1, 2, 2).expand(2, 2, 2, 2).flatten(0, 1))
    torch.testing.assert_close(got["bias"], want["bias"].expand(4, 2))


def averages(spec: fs.PartitionSpec) -> tuple[fs.Params, fs.Params, fs.Params]:
    """Averages of pieces that drifted apart over "shard", and the pieces."""
    before = my_pieces(spec)
    index = fs.collectives.scatter(torch.arange(2.0), spec.axis("shard"))[0]
    drifted = {name: x + index for name, x in before.items()}
    init, update = averaging.periodic(spec, 1)
    return averaging.average(drifted, spec), update(drifted, init())[0], before


def test_averages_keep_pieces_apart(gloo4: Pool) -> None:
    for every in (of_all_ranks(averages), *gloo4.run(on_four_ranks, averages)):
        *found, before = every
        for got in found:
            torch.testing.assert_close(got, {name: x + 0.5 for name, x in before.items()})


def test_averages_over_a_local_axis_are_refused() -> None:
    spec = SPEC.on({"tensor": 2, "shard": 1})
    with pytest.raises(ValueError, match=r"average_buffers: unit '.*' is local over axis 'tensor'.*expected axes="):
        averaging.average_buffers({"mean": torch.zeros(2)}, spec)
    assert averaging.average_buffers({"mean": torch.zeros(2)}, spec, axes="shard")
    with pytest.raises(
        ValueError, match="is split over 'tensor', where each rank has other elements: expected axes without it"
    ):
        of_all_ranks(lambda spec: averaging.average(my_pieces(spec), spec, axes="tensor"))


def test_tensors_of_neither_shape_are_refused() -> None:
    spec = SPEC.on({"tensor": 2, "shard": 2})
    message = (
        r"parameter 'weight': expected the whole, \[4, 2\], or this rank's piece of it, \[2, 2\], got \[3, 2\]; it is local"
    )
    with pytest.raises(ValueError, match=message):
        fs.optim.global_norm({"weight": torch.zeros(3, 2)}, spec)


def test_whole_parameters_in_a_call_are_refused() -> None:
    """A call, and the reduction of its gradients, take pieces."""
    spec = SPEC.on({"tensor": 2, "shard": 1})
    message = r"expected shape \[2, 2\], got \[4, 2\]; it is local over .'tensor': 0.: .*as from unshard\(whole=False\)"
    for call in (lambda: fs.functional_call(PIECES, WHOLE, torch.zeros(2), spec=spec), lambda: fs.reduce_grads(WHOLE, spec)):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_module_of_pieces_is_refused() -> None:
    """With one seed on all ranks their pieces would be the same values."""
    message = r"parameter 'weight' of unit '.*': expected shape \[4, 2\], got \[2, 2\]; .*the whole is expected"
    for rank in range(4):
        with pytest.raises(ValueError, match=message):
            fs.shard(PIECES, SPEC.on(SIZES), rank=rank)
    assert fs.shard(PIECES, SPEC.on({"tensor": 1, "shard": 1}))


@pytest.mark.parametrize("dims", [-1, True, 0.0, None, "0", "up.*", ["up.*"], [0], (0, 1), ((0, "*"),), {}, {"*": -1}, {0: 0}])
def test_what_is_no_dimension(dims: Any) -> None:
    with pytest.raises(TypeError, match=r"P: local: axis 't': expected a dimension \(0 or more\), or dimensions by glob.*got"):
        P("shard", local={"t": dims})


def test_globs_that_disagree() -> None:
    for globs in ({"*": 1, "weight": 0}, {"weight": 0, "*": 1}):
        with pytest.raises(
            ValueError, match=r"parameter 'weight': .*'weight': 0.* for its names .'weight'.: expected one dimension"
        ):
            policies.whole(P(local={"t": globs}))(nn.Linear(2, 2, bias=False))
    policies.whole(P(local={"t": {"*": 0, "weight": 0}}))(nn.Linear(2, 2, bias=False))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight


def test_a_weight_tied_to_one_outside_of_a_local_unit() -> None:
    """It is in the unit above both, which must be local, too."""
    inner = P("shard", local={"t": 0})
    with pytest.raises(ValueError, match=r"'a.weight', also \['b.weight'\], is in unit '', above all its uses, .* of 'b' says"):
        fs.by_path({"b": inner})(Tied())
    (unit,) = fs.by_path({"": inner, "b": inner})(Tied())
    assert unit.local_axes == ("t",)


class Normed(nn.Module):
    """A linear map to channels of which each rank of "tensor" has some, and their norm."""

    def __init__(self, channels: int, axes: Any) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, channels), fs.SyncBatchNorm(channels, axes=axes, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.map(x)).pow(3)


@pytest.mark.parametrize("axes", [None, "shard"])
def test_statistics_over_a_local_axis_are_refused(axes: Any) -> None:
    """Of the axes that are given they are exact, and by default, over all axes, refused."""
    torch.manual_seed(0)
    whole, local = Normed(4, "shard").double(), Normed(2, axes).double()
    full = {name: p.detach() for name, p in whole.named_parameters()}
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    spec = policies.whole(P("shard", local={"tensor": 0}))(local)

    def rank(mesh: Any, _: Tensor) -> Tensor:
        on = spec.on(mesh)
        own = fs.collectives.scatter(x, on.axis("shard"))[0]
        return fs.functional_call(local, fs.shard(full, on), (own,), spec=on)

    if axes is None:
        with pytest.raises(ValueError, match=r"SyncBatchNorm 'norm': unit '.*' is local over axis 'tensor'.*expected axes="):
            fs.testing.spmd(rank, SIZES)(torch.zeros(4))
        return
    got = fs.testing.spmd(rank, SIZES)(torch.zeros(4)).view(2, 2, 5, 2)  # [tensor, shard, samples, channels]
    want = nn.functional.batch_norm(
        torch.func.functional_call(whole.map, {n[4:]: p for n, p in full.items() if n[:4] == "map."}, (x.flatten(0, 1),)),
        None, None, full["norm.weight"], full["norm.bias"], training=True,
    ).pow(3)  # fmt: skip
    torch.testing.assert_close(got.permute(1, 2, 0, 3).reshape(10, 4), want)
