"""SyncBatchNorm, on simulated ranks and real ones, against torch's BatchNorm of the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cases import stacked
from depth import at_most, depth, each, mark_seldom, seldom
from models import module_class, refused, unchanged
from ranks import mesh_of, real_ranks
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import funshard as fs
from funshard.collectives import Mesh

Tree = dict[str, Tensor]


Block = module_class(
    "Block",
    lambda width: {"linear": nn.Linear(width, width), "norm": nn.BatchNorm1d(width)},
    lambda self, x: x + torch.tanh(self.norm(self.linear(x))),
)


torch.manual_seed(5)
MORE = (Block(4) for _ in range(depth(0, 1)))
PLAIN = nn.Sequential(nn.Linear(3, 4), *MORE, nn.BatchNorm1d(4, momentum=None, affine=False), Block(4)).double()
MODEL = fs.SyncBatchNorm.convert_sync_batchnorm(PLAIN)
FULL = {name: p.detach() for name, p in PLAIN.named_parameters()}
BUFFERS = {name: b.clone() for name, b in PLAIN.named_buffers()}
V = {name: p.cos() for name, p in FULL.items()}
LAYOUTS = {"shard": fs.P("shard"), "kept": fs.P("shard", reshard=False), "remat": fs.P("shard", remat=True), "ddp": fs.P()}


def batch(*counts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(n, 3, dtype=torch.float64, generator=generator) + i for i, n in enumerate(counts)]


def orders(loss: Callable[[Tree, Tree], tuple[Tensor, Tree]], params: Tree, v: Tree) -> dict[str, Tree]:
    """Derivatives of first and second order of a loss that also gives the buffers afterwards, and those."""

    def value(p: Tree) -> Tensor:
        return loss(p, BUFFERS)[0]

    def penalised(p: Tree) -> Tensor:
        return value(p) + sum((g**2).sum() for g in torch.func.grad(value)(p).values())

    first, (_, buffers) = fs.grad_and_value(loss, has_aux=True)(params, BUFFERS)
    grads, again = torch.func.grad(loss, has_aux=True)(params, BUFFERS)
    return {
        "fs.grad": first,
        "grad": grads,
        "buffers": buffers,
        "buffers of torch.func": again,
        "hvp": fs.hvp(value, params, v),
        "grad of dot": torch.func.grad(lambda p: sum((g * v[k]).sum() for k, g in torch.func.grad(value)(p).items()))(params),
        "grad of grad": torch.func.grad(penalised)(params),
    }


def plain(xs: list[Tensor]) -> dict[str, Tree]:
    def loss(full: Tree, buffers: Tree) -> tuple[Tensor, Tree]:
        buffers = {name: b.clone() for name, b in buffers.items()}
        out = torch.func.functional_call(PLAIN, (full, buffers), torch.cat(xs))
        return (out**3).sum(1).mean(), buffers

    return orders(loss, FULL, V)


def synced(mesh: Mesh, x: Tensor, p: fs.P, total: int = 0, *, model: nn.Module = MODEL) -> dict[str, Tree]:
    """The mean over this rank's rows; of uneven batches their part of the mean over all of so many."""
    spec = fs.by_type(Block, p=p)(model).on(mesh)

    def loss(params: Tree, buffers: Tree) -> tuple[Tensor, Tree]:
        buffers = dict(buffers)
        out = fs.functional_call(model, params, x, spec=spec, buffers=buffers, reduce="sum" if total else "mean")
        rows = (out**3).sum(1)
        return rows.sum() / total if total else rows.mean(), buffers

    return orders(loss, fs.shard(FULL, spec), fs.shard(V, spec))


def check(got: dict[str, Tree], expected: dict[str, Tree], spec: fs.PartitionSpec, rank: int) -> None:
    for name, tree in got.items():
        want = expected[name] if "buffers" in name else fs.shard(expected[name], spec, rank=rank)
        assert tree.keys() == want.keys()
        for key, value in tree.items():
            assert_close(value, want[key], rtol=1e-9, atol=1e-9, msg=lambda m, at=f"{name} {key}": f"{at}: {m}")


@at_most(1)
@each(size=[2, 3], layout=LAYOUTS)
def test_simulated_ranks(layout: str, size: int) -> None:
    """Values, statistics and derivatives of first and second order are BatchNorm's of the joined batch."""
    xs, p = batch(*[4] * size), LAYOUTS[layout]
    out = fs.testing.spmd(lambda mesh, x: synced(mesh, x, p), size)(torch.stack(xs))
    spec, expected = fs.by_type(Block, p=p)(MODEL).on({"shard": size}), plain(xs)
    for rank in range(size):
        check({name: {k: t[rank] for k, t in tree.items()} for name, tree in out.items()}, expected, spec, rank)


BATCHES = [*((layout, (4, 4)) for layout in LAYOUTS), *(("shard", counts) for counts in ((5, 2), (1, 6), (4, 0)))]


@at_most(2)
@pytest.mark.parametrize(("layout", "counts"), BATCHES)
@real_ranks(2)
def test_real_ranks(rank: int, layout: str, counts: tuple[int, int]) -> None:
    """Also with different numbers of samples, one or none: the mean over all of them, by reduce="sum"."""
    total = sum(counts) if len(set(counts)) > 1 else 0
    with unchanged(MODEL):
        got = synced(Mesh.world(), batch(*counts)[rank], LAYOUTS[layout], total)
    check(got, plain(batch(*counts)), fs.by_type(Block, p=LAYOUTS[layout])(MODEL).bound, rank)


@pytest.mark.parametrize("layout", mark_seldom(LAYOUTS, "shard", "remat"))
@real_ranks(2)
def test_padded_micro_batches(rank: int, layout: str) -> None:
    """Two on rank 0, one with rubbish on rank 1: rows of weight 0 enter no statistics, and nothing comes back through them."""
    xs = batch(4, 4, 4)
    spec = fs.by_type(Block, p=LAYOUTS[layout])(MODEL).bound
    buffers = {name: b.clone() for name, b in BUFFERS.items()}

    def loss(params: Tree, x: Tensor) -> Tensor:
        return (fs.functional_call(MODEL, params, x, spec=spec, buffers=buffers) ** 3).sum(1).mean()

    rubbish = torch.full((3, 3), torch.nan, dtype=torch.float64)
    step = fs.pad_microbatches([xs[0], xs[1]] if rank == 0 else [xs[2]], spec=spec, stand_in=rubbish)
    grads, _ = fs.accumulate(loss, fs.shard(FULL, spec), step.microbatches, spec=spec, weights=step.weights)
    fs.accumulate(loss, fs.shard(FULL, spec), [rubbish], spec=spec, weights=[0])
    model = copy.deepcopy(PLAIN)
    (sum((model(x) ** 3).sum() for x in (torch.cat([xs[0], xs[2]]), xs[1])) / 12).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_close(grads, dict(fs.shard(expected, spec)), rtol=1e-9, atol=1e-9)
    assert_close(buffers, dict(model.named_buffers()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("axes", mark_seldom([None, ("shard",), "replicate"], "replicate"))
@real_ranks(4)
def test_two_axes(rank: int, axes: str | tuple[str, ...] | None) -> None:
    """With HSDP over all ranks, or over one axis alone: then the statistics are of the ranks along it."""
    mesh = Mesh.of(mesh_of(2, 2))
    model, xs = fs.SyncBatchNorm.convert_sync_batchnorm(PLAIN, axes=axes), batch(4, 4, 4, 4)
    got, spec = synced(mesh, xs[rank], fs.P("shard"), model=model), fs.by_type(Block)(model).on(mesh)
    groups = {None: [[0, 1, 2, 3]], ("shard",): [[0, 1], [2, 3]], "replicate": [[0, 2], [1, 3]]}[axes]
    parts = {rank: plain([xs[i] for i in group]) for group in groups for rank in group}
    linear = ("fs.grad", "grad", "hvp", "grad of dot")  # of the mean over groups; a penalty on it is not
    mean = {name: {k: sum(parts[r][name][k] for r in range(4)) / 4 for k in FULL} for name in linear}
    if axes is None:
        mean["grad of grad"] = parts[rank]["grad of grad"]
    else:
        got.pop("grad of grad")
    check(got, mean | {name: parts[rank][name] for name in ("buffers", "buffers of torch.func")}, spec, rank)


KINDS = {(3,): nn.BatchNorm1d, (3, 5): nn.BatchNorm1d, (3, 2, 3): nn.BatchNorm2d, (3, 1, 2, 2): nn.BatchNorm3d}


def normed(norm: nn.Module, steps: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Tree, Tensor]:
    """Outputs, gradients of a sum, the statistics at the end, and what eval mode then gives."""
    outs, grads = [], []
    for x in steps:
        leaf = x.clone().requires_grad_()
        outs.append(norm(leaf))
        grads += torch.autograd.grad((outs[-1] ** 3).sum(), leaf)
    still = norm.eval()(steps[-1].cos()).detach() if norm.track_running_stats else torch.empty(0)
    return [out.detach() for out in outs], grads, dict(norm.named_buffers()), still


@pytest.mark.parametrize(
    ("shape", "counts", "momentum", "affine", "track"),
    [
        ((3,), [(1, 1), (0, 2)], None, True, True),
        ((3, 5), [(4, 2)], 0.1, False, True),
        ((3, 2, 3), [(2, 3), (1, 0)], 0.5, True, False),
        ((3, 1, 2, 2), [(0, 2), (3, 1), (1, 1)], None, False, True),
    ],
)
@real_ranks(2)
def test_any_batches(
    rank: int, shape: tuple[int, ...], counts: list[tuple[int, int]], momentum: float | None, affine: bool, track: bool
) -> None:
    """Outside of functional_call, over all processes: BatchNorm of the joined batch, for any shapes and numbers of samples.
    The gradient of the sum over ranks is what a backward on every rank gives: what one rank's value does to all losses."""
    norm = KINDS[shape](3, momentum=momentum, affine=affine, track_running_stats=track).double()
    for p in norm.parameters():
        nn.init.normal_(p)
    steps = [[torch.randn(n, *shape, dtype=torch.float64) * (i + 1) + i for n in pair] for i, pair in enumerate(counts)]
    ours = normed(fs.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm)), [xs[rank] for xs in steps])
    outs, grads, buffers, _ = normed(norm, [torch.cat(xs) for xs in steps])
    for i, xs in enumerate(steps):
        mine = slice(len(xs[0]), None) if rank else slice(len(xs[0]))
        assert_close(ours[0][i], outs[i][mine], rtol=1e-9, atol=1e-11)
        assert_close(ours[1][i], grads[i][mine], rtol=1e-9, atol=1e-9)
    assert_close(ours[2], buffers, rtol=1e-10, atol=1e-12)
    if track:  # of one value per channel torch takes no statistics
        assert_close(ours[3], norm(steps[-1][rank].cos()).detach())


@seldom
@real_ranks(2)
def test_compiled(rank: int) -> None:
    """torch.compile, fs.compile and make_fx of a step, statistics among its results, beside the eager one."""
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    axes = ("replicate", "shard")  # which the world does not have
    model = fs.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm), axes=axes)
    spec, xs = fs.policies.whole()(model).on(mesh_of(1, 2)), batch(4, 4)
    full, statistics = dict(norm.named_parameters()), {name: b.clone() for name, b in norm.named_buffers()}

    def step(params: Tree, buffers: Tree) -> tuple[Tree, Tree]:
        def loss(params: Tree, buffers: Tree) -> tuple[Tensor, Tree]:
            buffers = dict(buffers)
            return (fs.functional_call(model, params, xs[rank], spec=spec, buffers=buffers) ** 3).mean(), buffers

        grads, (_, buffers) = fs.grad_and_value(loss, has_aux=True)(params, buffers)
        return grads, buffers

    (norm(torch.cat(xs)) ** 3).mean().backward()
    expected = fs.shard({name: p.grad for name, p in full.items()}, spec), dict(norm.named_buffers())
    params = fs.shard(model, spec)
    with unchanged(model):
        whole = depth([], [torch.compile(step, fullgraph=True, backend="aot_eager")])  # with which fs.compile begins
        steps = [step, *whole, fs.compile(step, backend="aot_eager")]
        for run in [*steps, make_fx(step)(params, statistics)]:
            assert_close(run(params, dict(statistics)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@real_ranks(2)
def test_ensembles(rank: int, layout: str) -> None:
    """vmap over parameters and statistics, on real ranks and simulated ones: each member is BatchNorm on the joined batch."""
    xs, policy = batch(4, 4), fs.by_type(Block, p=LAYOUTS[layout])
    full = [{name: t * (1 + i) for name, t in FULL.items()} for i in range(3)]
    statistics = [{name: b + i for name, b in BUFFERS.items()} for i in range(3)]

    def of_all(mesh: Mesh, x: Tensor) -> tuple[Tree, Tree]:
        spec = policy(MODEL).on(mesh)

        def loss(params: Tree, buffers: Tree) -> tuple[Tensor, Tree]:
            buffers = dict(buffers)
            return (fs.functional_call(MODEL, params, (x,), spec=spec, buffers=buffers) ** 3).sum(1).mean(), buffers

        return torch.vmap(torch.func.grad(loss, has_aux=True))(
            stacked([fs.shard(one, spec) for one in full]), stacked(statistics)
        )

    def plainly(full: Tree, buffers: Tree) -> tuple[Tensor, Tree]:
        buffers = {name: b.clone() for name, b in buffers.items()}
        return (torch.func.functional_call(PLAIN, (full, buffers), torch.cat(xs)) ** 3).sum(1).mean(), buffers

    want = [torch.func.grad(plainly, has_aux=True)(*one) for one in zip(full, statistics, strict=True)]
    spec = policy(MODEL).bound
    expected = stacked([fs.shard(grads, spec) for grads, _ in want]), stacked([after for _, after in want])
    assert_close(of_all(Mesh.world(), xs[rank]), expected, rtol=1e-9, atol=1e-9)
    simulated = fs.testing.spmd(of_all, 2)(torch.stack(xs))
    assert_close(pytree.tree_map(lambda t: t[rank], simulated), expected, rtol=1e-9, atol=1e-9)


@real_ranks(2)
def test_low_precision(rank: int) -> None:
    """bfloat16 inputs: statistics in float32, output as the input, as BatchNorm gives it."""
    x = (100 + torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(1))).bfloat16()
    norm = nn.BatchNorm1d(3)
    out = fs.SyncBatchNorm.convert_sync_batchnorm(norm)(x[rank])
    assert out.dtype == torch.bfloat16
    assert_close(out, norm(x.flatten(0, 1)).unflatten(0, (2, 64))[rank], rtol=2e-2, atol=2e-2)


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_conversion() -> None:
    """A new model with the same tensors, names, modes and hooks; the given one stays as it is."""
    shared = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.BatchNorm1d(2, affine=False)), "c": nn.Linear(2, 2)})
    model["b"][1].eval()
    hooked: list[nn.Module] = []
    shared.register_forward_hook(lambda module, *_: hooked.append(module))
    with unchanged(model):
        ours = fs.SyncBatchNorm.convert_sync_batchnorm(model, axes="shard")
    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == {
        n: id(t) for n, t in ours.state_dict(keep_vars=True).items()
    }
    assert isinstance(ours["a"], fs.SyncBatchNorm)
    assert ours["a"] is ours["b"][0]
    assert ours["a"].axes == "shard"
    assert (ours["a"].training, ours["b"][1].training) == (True, False)
    assert type(ours["c"]) is nn.Linear
    ours["a"](torch.randn(2, 3, 4, 4))
    assert hooked == [ours["a"]]
    assert isinstance(fs.SyncBatchNorm.convert_sync_batchnorm(shared), fs.SyncBatchNorm)
    assert isinstance(fs.SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(3)), fs.SyncBatchNorm)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: fs.SyncBatchNorm(3)(torch.ones(2, 4)), r"\[samples, 3, \.\.\.\], got shape \[2, 4\]"),
        (lambda: fs.SyncBatchNorm(3)(torch.ones(3)), r"\[samples, 3, \.\.\.\], got shape \[3\]"),
        (lambda: fs.SyncBatchNorm(3)(torch.ones(1, 3)), r"more than 1 value per channel in training, got shape \[1, 3\]"),
        (lambda: fs.SyncBatchNorm(3, axes="node")(torch.ones(2, 3)), r"unknown mesh axis 'node'"),
        (lambda: fs.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Own(2))), r"module '0' of Own has a forward of its own"),
        (
            lambda: fs.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d())),
            r"module '0': expected initialised",
        ),
    ],
)
def test_errors(call: Callable[[], object], match: str) -> None:
    refused(ValueError, match, call)
