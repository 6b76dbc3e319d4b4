"""Local units in models as users write them: dropout, buffers, policies by size; their pieces by name, and refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from depth import at_most, each, seldom
from models import module_class, refused
from ranks import mesh_of, real_ranks
from test_local import Setting, check, objective, of_rank
from test_local_training import Tree, tied
from torch import Tensor, nn

import funshard as fs
from funshard import P, averaging, policies
from funshard.collectives import Axis
from funshard.testing._exact import ModelCall

OPTIONS: dict[str, dict[str, Any]] = {
    "shard": {"axis": "shard"},
    "kept": {"axis": "shard", "reshard": False},
    "recomputed": {"axis": "shard", "remat": True},
    "replicated": {"axis": None},
    "offloaded": {"axis": "shard", "offload": ("params", "activations")},
}


# --- dropout ---
FEATURES, HIDDEN = 4, 12


class Dropped(nn.Module):
    """Columns and rows, whose hidden features and results are dropped: a rank draws for its columns, all draw for results."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.up, self.down = nn.Linear(FEATURES, HIDDEN // ranks), nn.Linear(HIDDEN // ranks, FEATURES, bias=False)

    def forward(self, x: Tensor, seeds: tuple[list[int], int], axis: Axis | None = None) -> Tensor:
        columns, shared = seeds  # of the columns that this module has, by rank, and of what ranks share
        x = self.first(x)
        x = x * mask(shared, x)
        hidden = self.up(x).tanh()
        kept = torch.cat([mask(seed, part) for seed, part in zip(columns, hidden.chunk(len(columns), -1), strict=True)], -1)
        y = self.down(hidden * kept)
        return y if axis is None else fs.collectives.all_reduce(y, axis, reduce="sum")


def mask(seed: int, like: Tensor) -> Tensor:
    """Dropout's, drawn from torch's own generator."""
    torch.manual_seed(seed)
    return nn.functional.dropout(torch.ones_like(like), 0.4)


@at_most(1)
@each(options=OPTIONS.values(), sizes=[{"shard": 2, "tensor": 2}, {"tensor": 4, "shard": 1}, {"tensor": 1, "shard": 4}])
@real_ranks(4)
def test_dropout(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Masks differ on all ranks, or on those that have other rows; the whole model draws the same ones."""
    torch.manual_seed(0)
    whole, local = Dropped().double(), Dropped(sizes["tensor"]).double()
    names = {"up.*": 0, "down.weight": 1}
    spec = fs.policies.by_path({"": fs.P(**options, local={"tensor": names})})(local).on(mesh_of(**sizes))
    at = spec.bound_mesh["shard"].rank
    x, seeds = torch.randn(sizes["shard"], 6, FEATURES)[at].double(), [100 * at + part for part in range(sizes["tensor"])]

    def loss(call: ModelCall, x: Tensor) -> Tensor:
        axis = call.axis("tensor")
        return objective(call(x, (seeds if axis is None else [seeds[axis.rank]], 7 + at), axis))

    def sharded(params: Tree, x: Tensor) -> Tensor:
        return loss(ModelCall(lambda *args: fs.functional_call(local, params, args, spec=spec), spec), x)

    fs.testing.assert_exact(loss, whole, spec, x, local=local, order=2)
    params = fs.shard(dict(whole.named_parameters()), spec)
    grads = fs.grad(sharded)(params, x)
    for got in (torch.func.grad(sharded)(params, x), fs.accumulate(sharded, params, [x, x], spec=spec)[0]):
        torch.testing.assert_close(got, grads)


class Layers(nn.Module):
    """A pair of columns and rows between dropout and normalisation of the activations that ranks share."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.up, self.down = nn.Linear(4, 8 // ranks), nn.Linear(8 // ranks, 4, bias=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, axis: Axis | None = None) -> Tensor:
        x = self.drop(self.norm(self.before(x)))
        y = self.down(self.up(x).tanh())
        return self.drop(x + (y if axis is None else fs.collectives.all_reduce(y, axis, reduce="sum")))


@pytest.mark.parametrize("compile", [False, pytest.param(fs.Compile(backend="aot_eager"), marks=seldom)], ids=str)
@real_ranks(4)
def test_dropout_and_buffers_of_shared_activations(rank: int, compile: Any) -> None:
    """Gradients and running statistics of one process, where ranks are seeded by their coordinates on the other axes."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own reads
    whole, local = Layers().double(), Layers(2).double()
    spec = fs.policies.whole(fs.P("shard", local={"tensor": {"up.*": 0, "down.weight": 1}}, compile=compile))(local)
    spec = spec.on(mesh_of(shard=2, tensor=2))
    at = spec.bound_mesh["shard"].rank

    def loss(call: ModelCall, x: Tensor) -> Tensor:
        torch.manual_seed(100 + at)
        return call(x, call.axis("tensor")).square().sum()

    fs.testing.assert_exact(loss, whole, spec, torch.randn(2, 6, 4)[at].double(), local=local)


# --- buffers ---
class Counting(nn.Module):
    """Experts, each with its BatchNorm over rows of all ranks and a counter of them: buffers of a rank's own experts."""

    def __init__(self, experts: int, ranks: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts // ranks, FEATURES, FEATURES))
        self.norms = nn.ModuleList(nn.BatchNorm1d(FEATURES, affine=False) for _ in range(experts // ranks))
        self.head = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("rows", torch.zeros(experts // ranks))

    def forward(self, x: Tensor, axis: Axis | None = None) -> Tensor:
        """Of rows [experts * n, features], n for each expert."""
        size = 1 if axis is None else axis.size
        there = x if axis is None else fs.collectives.all_to_all(x, axis)
        rows = there.view(size, len(self.weight), -1, FEATURES)
        self.rows += rows.shape[0] * rows.shape[2]
        outs = []
        for i, (weight, bn) in enumerate(zip(self.weight, self.norms, strict=True)):
            y = bn((rows[:, i].flatten(0, 1) @ weight).tanh())
            outs.append(y.view(size, 1, -1, FEATURES))
        y = torch.cat(outs, 1).reshape(x.shape)
        return self.head(y if axis is None else fs.collectives.all_to_all(y, axis))


@at_most(1)
@each
@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("shard", "recomputed", "replicated", "kept")], ids=str)
@pytest.mark.parametrize("sizes", [{"shard": 2, "expert": 2}, {"expert": 4, "shard": 1}], ids=str)
@real_ranks(4)
def test_buffers_of_experts(rank: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Statistics of an expert are those of its rows, on whatever ranks; the call returns a rank's own."""
    torch.manual_seed(0)
    experts, group = 4, sizes["expert"]
    whole, local = Counting(experts).double(), Counting(experts, group).double()
    full = {name: p.detach() for name, p in whole.named_parameters()}
    p = fs.P(**options)
    spec = fs.policies.by_path({"": fs.P(**options, local={"expert": {"weight": 0}}), "head": p})(local)
    spec = spec.on(mesh_of(**sizes))
    axis, at = spec.axis("expert"), {name: x.rank for name, x in spec.bound_mesh.axes}
    xs = torch.randn(sizes["shard"], group, experts * 3, FEATURES, dtype=torch.float64)

    def loss(params: Tree) -> tuple[Tensor, Tree]:
        x, buffers = xs[at["shard"], at["expert"]], {name: b.clone() for name, b in local.named_buffers()}
        return objective(fs.functional_call(local, params, (x, axis), spec=spec, buffers=buffers)), buffers

    def mean(params: Tree) -> tuple[Tensor, list[Tree]]:
        """Of the groups of ranks that share experts, whose rows have one set of statistics."""
        values, states = [], []
        for of_group in xs:
            buffers = {name: b.clone() for name, b in whole.named_buffers()}
            x = of_group.view(group, experts, -1, FEATURES).transpose(0, 1).reshape(-1, FEATURES)
            values.append(objective(torch.func.functional_call(whole, (params, buffers), (x,))))
            states.append(buffers)
        return torch.stack(values).mean(), states

    params = fs.shard(full, spec)
    grads, buffers = fs.grad(loss, has_aux=True)(params)
    want, states = torch.func.grad(mean, has_aux=True)(full)
    for name, got in fs.unshard(grads, spec).items():
        torch.testing.assert_close(got, want[name], rtol=1e-9, atol=1e-11)
    mine, first = states[at["shard"]], at["expert"] * (experts // group)
    torch.testing.assert_close(buffers["rows"], mine["rows"][first : first + experts // group])
    for i in range(experts // group):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(buffers[f"norms.{i}.{name}"], mine[f"norms.{first + i}.{name}"])
    floating = {name: b for name, b in buffers.items() if b.is_floating_point()}
    averaged = fs.averaging.average_buffers(floating, spec, axes="shard")
    for name, got in averaged.items():
        path = name.split(".")
        theirs = ".".join([path[0], str(first + int(path[1])), *path[2:]]) if len(path) > 1 else name
        mean_of = torch.stack([state[theirs].detach() for state in states]).mean(0)
        torch.testing.assert_close(got, mean_of if len(path) > 1 else mean_of[first : first + experts // group])


# --- policies ---
@seldom
@pytest.mark.parametrize("min_numel", [1, 60, 130])
def test_by_size(min_numel: int) -> None:
    """Units by size, each local where its parameters are; a piece that would be in the root, replicated, is refused."""
    case = Setting(("pair", "replicated", "pair"), {"tensor": 2, "shard": 2}, {"axis": "shard"})
    p = fs.P("shard", local={"tensor": {"layers.?.up.*": 0, "layers.?.down.weight": 1}})
    if min_numel == 60:
        message = r"'layers.\?.down.weight' matches no parameter of its units: .* what a policy leaves is replicated"
        refused(ValueError, message, lambda: fs.by_size(min_numel, p=p)(case.model))
        return
    case.spec = spec = fs.by_size(min_numel, p=p)(case.model)
    local = {param.name for unit in spec for param in unit.params if param.local}
    assert local == {f"layers.{i}.{name}" for i in (0, 2) for name in ("up.weight", "up.bias", "down.weight")}
    check(fs.testing.spmd(lambda mesh, x: of_rank(case.on(mesh), x, eager=False), case.sizes)(case.xs), case)


# --- pieces by name ---
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


def measures(spec: fs.PartitionSpec) -> Tensor:
    """Norms and an inner product of pieces and of whole tensors by name."""
    trees = my_pieces(spec), WHOLE
    each = ([*(fs.optim.global_norm(t, spec, p=p) for p in NORMS), fs.optim.vdot(t, t, spec)] for t in trees)
    return torch.stack([x for some in each for x in some])


NORMS = (1.0, 2.0, float("inf"))
WANTED = torch.stack([*(torch.linalg.vector_norm(vector(WHOLE), p) for p in NORMS), vector(WHOLE).square().sum()]).repeat(2)


@real_ranks(4)
def test_norms_count_every_piece_once(rank: int) -> None:
    """On simulated ranks and on real ones."""
    torch.testing.assert_close(of_all_ranks(measures), WANTED.expand(4, -1))
    torch.testing.assert_close(measures(SPEC.on(mesh_of(**SIZES))), WANTED)


def test_the_derivative_of_clipped_pieces() -> None:
    """Of a sum over them, of which each rank has a part."""

    def loss(tree: fs.Params) -> Tensor:
        scale = 1.0 / (vector(tree).norm() + 1e-6)
        return (tree["weight"] * scale).pow(3).sum() + (tree["bias"] * scale).cos().sum()

    def of_pieces(tree: fs.Params, spec: fs.PartitionSpec) -> Tensor:
        clipped, _ = fs.optim.clip_by_global_norm(tree, spec, 1.0)
        weight = fs.collectives.gather_slices(clipped["weight"], spec.axis("tensor"))
        return weight.pow(3).sum() + clipped["bias"].cos().sum()

    got = of_all_ranks(lambda spec: torch.func.grad(of_pieces)(my_pieces(spec), spec))
    want = torch.func.grad(loss)(WHOLE)
    torch.testing.assert_close(got["weight"], want["weight"].view(2, 1, 2, 2).expand(2, 2, 2, 2).flatten(0, 1))
    torch.testing.assert_close(got["bias"], want["bias"].expand(4, 2))


def averages(spec: fs.PartitionSpec) -> tuple[fs.Params, fs.Params, fs.Params]:
    """Averages of pieces that drifted apart over "shard", and the pieces."""
    before = my_pieces(spec)
    index = fs.collectives.scatter(torch.arange(2.0), spec.axis("shard"))[0]
    drifted = {name: x + index for name, x in before.items()}
    init, update = averaging.periodic(spec, 1)
    return averaging.average(drifted, spec), update(drifted, init())[0], before


@real_ranks(4)
def test_averages_keep_pieces_apart(rank: int) -> None:
    """On simulated ranks and on real ones."""
    for *found, before in (of_all_ranks(averages), averages(SPEC.on(mesh_of(**SIZES)))):
        for got in found:
            torch.testing.assert_close(got, {name: x + 0.5 for name, x in before.items()})


TWO, INNER = SPEC.on({"tensor": 2, "shard": 1}), P("shard", local={"t": 0})
WHOLE_IN_A_CALL = r"expected shape \[2, 2\], got \[4, 2\]; it is local over .'tensor': 0.: .*as from unshard\(whole=False\)"
OF_PIECES = r"parameter 'weight' of unit '.*': expected shape \[4, 2\], got \[2, 2\]; .*the whole is expected"
DISAGREE = r"parameter 'weight': .*'weight': 0.* for its names .'weight'.: expected one dimension"
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "buffers averaged over a local axis": (
        r"average_buffers: unit '.*' is local over axis 'tensor'.*expected axes=",
        lambda: averaging.average_buffers({"mean": torch.zeros(2)}, TWO)),
    "pieces averaged over it": (
        "is split over 'tensor', where each rank has other elements: expected axes without it",
        lambda: of_all_ranks(lambda spec: averaging.average(my_pieces(spec), spec, axes="tensor"))),
    "tensors of neither shape": (
        r"parameter 'weight': expected the whole, \[4, 2\], or this rank's piece of it, \[2, 2\], got \[3, 2\]; it is local",
        lambda: fs.optim.global_norm({"weight": torch.zeros(3, 2)}, SPEC.on(SIZES))),
    "whole parameters in a call": (
        WHOLE_IN_A_CALL, lambda: fs.functional_call(PIECES, WHOLE, torch.zeros(2), spec=TWO)),
    "whole gradients to reduce": (WHOLE_IN_A_CALL, lambda: fs.reduce_grads(WHOLE, TWO)),
    **{f"a module of pieces, on rank {rank}": (  # which with one seed on all ranks would be the same values
        OF_PIECES, lambda rank=rank: fs.shard(PIECES, SPEC.on(SIZES), rank=rank)) for rank in range(4)},
    **{f"globs that disagree, {[*globs]}": (
        DISAGREE, lambda globs=globs: policies.whole(P(local={"t": globs}))(nn.Linear(2, 2, bias=False)))
        for globs in ({"*": 1, "weight": 0}, {"weight": 0, "*": 1})},
    "a weight tied to one outside": (
        r"'a.weight', also \['b.weight'\], is in unit '', above all its uses, .* of 'b' says",
        lambda: fs.by_path({"b": INNER})(tied())),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_of_pieces(what: str) -> None:
    """Named, and what is expected."""
    match, call = REFUSED[what]
    refused(ValueError, match, call)


def test_what_is_no_piece_is_as_ever() -> None:
    """Other axes, one rank along the axis, globs that agree, and a unit above that is local, too."""
    assert averaging.average_buffers({"mean": torch.zeros(2)}, TWO, axes="shard")
    assert fs.shard(PIECES, SPEC.on({"tensor": 1, "shard": 1}))
    policies.whole(P(local={"t": {"*": 0, "weight": 0}}))(nn.Linear(2, 2, bias=False))
    (unit,) = fs.by_path({"": INNER, "b": INNER})(tied())
    assert unit.local_axes == ("t",)


@pytest.mark.parametrize("dims", [-1, True, 0.0, None, "0", "up.*", ["up.*"], [0], (0, 1), ((0, "*"),), {}, {"*": -1}, {0: 0}])
def test_what_is_no_dimension(dims: Any) -> None:
    """Neither a number nor globs."""
    with pytest.raises(TypeError, match=r"P: local: axis 't': expected a dimension \(0 or more\), or dimensions by glob.*got"):
        P("shard", local={"t": dims})


Normed = module_class(
    "Normed",
    lambda channels, axes: {
        "map": nn.Linear(4, channels), "norm": fs.SyncBatchNorm(channels, axes=axes, track_running_stats=False)},
    lambda self, x: self.norm(self.map(x)).pow(3),
)  # fmt: skip
"""A linear map to channels of which each rank of "tensor" has some, and their norm."""


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
