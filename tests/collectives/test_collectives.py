"""Law G2 (each collective against its transpose) and the vmap rules, on the simulated axis."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from collective_log import world
from depth import seldom
from hypothesis import given
from hypothesis import strategies as st
from models import refused
from parity import HIGHER, along, dot, numbers, shards_of, squared_loss
from peer_models import MLP, Net
from ranks import mesh_of, real_ranks
from torch import Tensor
from torch.distributed import DeviceMesh

import funshard as fs
from funshard import collectives as c
from funshard.collectives import Axis, Mesh, ProcessAxis, members
from funshard.testing import spmd

Op = Callable[[Tensor, Axis], Tensor]


def joined(x: Tensor) -> Tensor:
    return x.flatten(0, 1).expand(len(x), -1, -1)


# name: (op, what counts at its input, what counts at its output, what every rank gets). The two kinds of values of DESIGN.md:
# gathered ones count with their mean over ranks, shards with their sum; "one" is a value that all have alike and counts once.
OPS: dict[str, tuple[Op, str, str, Callable[[Tensor], Tensor]]] = {
    "gather_slices": (c.gather_slices, "sum", "mean", joined),
    "gather_slices sum": (lambda x, a: c.gather_slices(x, a, reduce="sum"), "sum", "sum", joined),
    "gather_values": (c.gather_values, "mean", "mean", joined),
    "reduce_scatter": (c.reduce_scatter, "mean", "sum", lambda x: torch.stack(x.mean(0).chunk(len(x)))),
    "reduce_scatter sum": (
        lambda x, a: c.reduce_scatter(x, a, reduce="sum"), "sum", "sum", lambda x: torch.stack(x.sum(0).chunk(len(x)))),
    "all_reduce": (c.all_reduce, "mean", "mean", lambda x: x.mean(0).expand_as(x)),
    "all_reduce sum": (lambda x, a: c.all_reduce(x, a, reduce="sum"), "mean", "mean", lambda x: x.sum(0).expand_as(x)),
    "sum_shards": (c.sum_shards, "sum", "mean", lambda x: x.sum(0).expand_as(x)),
    "vary": (c.vary, "one", "mean", lambda x: x),
    "vary sum": (lambda x, a: c.vary(x, a, reduce="sum"), "one", "sum", lambda x: x),
    "broadcast": (lambda x, a: c.broadcast(x, a, src=a.size - 1), "mean", "mean", lambda x: x[-1].expand_as(x)),
    "all_to_all": (
        c.all_to_all, "sum", "sum",
        lambda x: torch.stack([torch.cat([y.chunk(len(x))[i] for y in x]) for i in range(len(x))])),
    "permute": (c.permute, "mean", "mean", lambda x: x.roll(1, 0)),
    "permute to the next": (
        lambda x, a: c.permute(x, a, perm=[(i, i + 1) for i in range(a.size - 1)]), "sum", "sum",
        lambda x: torch.cat([torch.zeros_like(x[:1]), x[:-1]])),
    "scatter": (c.scatter, "one", "sum", lambda x: torch.stack([y.chunk(len(x))[i] for i, y in enumerate(x)])),
}  # fmt: skip

ranks = st.integers(1, 6)
name = st.sampled_from(sorted(OPS))


def inputs(kind: str, n: int, seed: int, high: int = 5) -> Tensor:
    """Small whole numbers times n, so that means are whole as well: [n ranks, 2n, 3]."""
    x = n * torch.randint(-high, high, (n, 2 * n, 3), generator=torch.Generator().manual_seed(seed)).double()
    return x[:1].expand_as(x) if kind == "one" else x


def weigh(kind: str, x: Tensor, y: Tensor) -> Tensor:
    """The inner product of what all ranks hold, [n, ...]."""
    products = (x * y).flatten(1).sum(1)
    return products.sum() if kind == "sum" else products.mean() if kind == "mean" else products[0]


def run(op: str, x: Tensor) -> Tensor:
    return spmd(lambda mesh, x: OPS[op][0](x, mesh["shard"]), len(x))(x)


@given(name, ranks, st.integers(0, 99))
def test_values(op: str, n: int, seed: int) -> None:
    """Each collective gives what its picture shows. It is linear: the derivative is the map, and of its tangent."""
    f, before, _, picture = OPS[op]
    x, t = inputs(before, n, seed), inputs(before, n, seed + 1)
    assert torch.equal(run(op, x), picture(x))
    tangents = spmd(lambda mesh, x, t: torch.func.jvp(lambda x: f(x, mesh["shard"]), (x,), (t,))[1], n)(x, t)
    assert torch.equal(tangents, picture(t))


@given(name, ranks, st.integers(0, 99))
def test_g2_adjoint(op: str, n: int, seed: int) -> None:
    """<op x, y> == <x, transpose y> in the inner products of the two kinds of values; the transpose of the transpose is the
    collective again (for scatter: on values that all ranks have alike)."""
    f, before, after, _ = OPS[op]
    x = inputs(before, n, seed)
    y = inputs("any", n, seed + 1)[:, : run(op, x).shape[1]] if run(op, x).shape[1] <= 2 * n else torch.ones_like(run(op, x))

    def transpose(mesh: Mesh, x: Tensor, y: Tensor) -> Tensor:
        return torch.func.vjp(lambda x: f(x, mesh["shard"]), x)[1](y)[0]

    assert torch.equal(weigh(after, run(op, x), y), weigh(before, x, spmd(transpose, n)(x, y)))

    def twice(mesh: Mesh, x: Tensor) -> Tensor:
        def once(y: Tensor) -> Tensor:
            return torch.func.vjp(lambda x: f(x, mesh["shard"]), x)[1](y)[0]

        y = f(x, mesh["shard"])
        return torch.func.vjp(once, torch.zeros_like(y))[1](x)[0]

    assert torch.equal(spmd(twice, n)(x), run(op, x))


@given(name, ranks, st.integers(0, 2), st.booleans(), st.integers(0, 99))
def test_vmap_rules(op: str, n: int, in_dim: int, outside: bool, seed: int) -> None:
    """One collective over a batch equals one for each entry, for every in_dim, with vmap inside and outside the ranks."""
    f, before, *_ = OPS[op]
    entries = [inputs(before, n, seed + i) for i in range(3)]
    expected = torch.stack([run(op, x) for x in entries])
    if outside:
        got = torch.vmap(lambda x: run(op, x), in_dims=in_dim)(torch.stack(entries, in_dim))
        assert torch.equal(got, expected)
    else:
        batched = torch.stack([torch.stack([x[r] for x in entries], in_dim) for r in range(n)])
        got = spmd(lambda mesh, x: torch.vmap(lambda x: f(x, mesh["shard"]), in_dims=in_dim)(x), n)(batched)
        assert torch.equal(got.transpose(0, 1), expected)


@given(name, st.integers(0, 99))
def test_grad_outside_of_the_ranks(op: str, seed: int) -> None:
    """Differentiating through the whole simulation applies the same transposes as differentiating inside it."""
    f, before, *_ = OPS[op]
    x = inputs(before, 3, seed, high=3)

    def inside(mesh: Mesh, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (f(x, mesh["shard"]) ** 2).sum())(x)

    leaf = x.clone().requires_grad_()
    (run(op, leaf) ** 2).sum().backward()
    outer = torch.func.grad(lambda x: (run(op, x) ** 2).sum())(x.clone())
    assert torch.equal(outer, spmd(inside, 3)(x))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, outer)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda a: c.reduce_scatter(torch.ones(4), a), ValueError, r"reduce_scatter: .*3 ranks divide, got \(4,\)"),
        (lambda a: c.all_to_all(torch.ones(()), a), ValueError, r"all_to_all: .*got \(\)"),
        (lambda a: c.scatter(torch.ones(3), a), ValueError, r"expected a rank in 0\.\.2, got None; give rank="),
        (lambda a: c.gather_slices(torch.ones(()), a), ValueError, r"gather_slices: expected at least one dimension"),
        (lambda a: c.gather_slices(torch.ones(1), a, reduce="max"), ValueError, r"expected 'mean' or 'sum', got 'max'"),
        (lambda a: c.all_reduce(torch.ones(1, dtype=torch.int64), a), TypeError, r"mean .* floating point .* got torch.int64"),
        (lambda a: c.broadcast(torch.ones(1), a, src=3), ValueError, r"expected src in 0\.\.2, got 3"),
        (lambda a: c.all_reduce(torch.ones(1), a), ValueError, r"3 ranks without a process group.*\.on\(mesh\)"),
        (lambda a: c.permute(torch.ones(1), a, 1, perm=[(0, 1)]), TypeError, r"permute: expected a shift or a perm, got both"),
        (lambda a: c.permute(torch.ones(1), a, perm=[(0, 3)]), ValueError, r"ranks in 0\.\.2, got \(0, 3\)"),
        (lambda a: c.permute(torch.ones(1), a, perm=[(-1, 0)]), ValueError, r"ranks in 0\.\.2, got \(-1, 0\)"),
        (lambda a: c.permute(torch.ones(1), a, perm=[(0, 1), (0, 2)]), ValueError, r"once as a source.*broadcast"),
        (lambda a: c.permute(torch.ones(1), a, perm=[(0, 1), (2, 1)]), ValueError, r"once as a destination"),
        (lambda a: c.all_to_all(torch.ones(3, 4), a, split_dim=1), ValueError, r"dimension 1 that 3 ranks .*, got \(3, 4\)"),
        (lambda a: c.all_to_all(torch.ones(3, 4), a, concat_dim=-3), ValueError, r"all_to_all: .*in -2\.\.1 .*, got -3"),
        (lambda a: c.gather_values(torch.ones(3, 4), a, dim=2), ValueError, r"gather_values: .*in -2\.\.1 .*, got 2"),
    ],
)
def test_errors(call: Callable[[Axis], Tensor], error: type[Exception], match: str) -> None:
    """Bad input is a clear error before any communication."""
    refused(error, match, lambda: call(ProcessAxis(3)))


def test_one_rank_is_the_identity() -> None:
    """An axis of one rank sends nothing, whatever the op, and needs no process group."""
    x = torch.ones(2)
    for name, (f, *_) in OPS.items():
        assert torch.equal(f(x, ProcessAxis(1, 0)), torch.zeros(2) if name == "permute to the next" else x)


# --- members beside torch's, on every rank of meshes of several axes ---
MESHES = {"one axis": (4,), "two": (2, 2), "uneven": (3, 2), "three": (2, 3, 2), "an axis of one": (1, 4)}


def agree_with_torch(mesh: DeviceMesh) -> None:
    """For every axis: the same answers about all of its ranks, and inverses."""
    for i, (_, axis) in enumerate(Mesh.of(mesh).axes):
        group = mesh.get_group(i)
        ranks = members(axis)
        assert list(ranks) == dist.get_process_group_ranks(group)
        assert [ranks[r] for r in range(axis.size)] == [dist.get_global_rank(group, r) for r in range(axis.size)]
        assert [ranks.index(g) for g in ranks] == [dist.get_group_rank(group, g) for g in ranks]
        assert ranks[axis.rank] == dist.get_rank()


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_every_rank_of_a_mesh(shape: tuple[int, ...]) -> None:
    """They are the rank's row of the mesh along the axis, ranks of the world, also where the mesh has some of them."""
    sizes = dict(zip("abc", shape, strict=False))
    grid = torch.arange(math.prod(shape)).view(shape)
    for rank in range(math.prod(shape)):
        with world(math.prod(shape), rank):
            mesh = mesh_of(**sizes)
            agree_with_torch(mesh)
            at = torch.unravel_index(torch.tensor(rank), shape)
            for i, name in enumerate(sizes):
                row = grid[tuple(slice(None) if j == i else at[j] for j in range(len(shape)))]
                assert members(Mesh.of(mesh)[name]) == tuple(row.tolist())
    with world(8, 5):
        mesh = DeviceMesh("cpu", [[1, 3], [5, 7]], mesh_dim_names=("a", "b"))
        agree_with_torch(mesh)
        assert [members(axis) for _, axis in Mesh.of(mesh).axes] == [(1, 5), (5, 7)]


@real_ranks(4)
def test_real_ranks(rank: int) -> None:
    """Torch's broadcast takes a rank of the world, ours one of the axis: the same tensor."""
    mesh = mesh_of(quad=2, pair=2)
    agree_with_torch(mesh)
    for name, axis in Mesh.of(mesh).axes:
        for src in range(2):
            theirs = torch.tensor([float(rank)])
            dist.broadcast(theirs, members(axis)[src], group=mesh.get_group(name))
            assert torch.equal(fs.collectives.broadcast(torch.tensor([float(rank)]), axis, src=src), theirs)


def test_axes_without_members() -> None:
    with pytest.raises(ValueError, match=r"an axis of 4 ranks without a process group has no members: expected a DeviceMesh"):
        members(ProcessAxis(4))
    refused(ValueError, r"an axis of 4 ranks without a process group", lambda: members(Mesh.of({"shard": 4})["shard"]))

    def simulated(mesh: Mesh, x: Tensor) -> Tensor:
        refused(ValueError, r"a simulated axis of 2 ranks is in one process.* ranks 0\.\.1", lambda: members(mesh["shard"]))
        return x

    fs.testing.spmd(simulated, 2)(torch.zeros(2))


@real_ranks(4)
def test_a_mesh_whose_ranks_do_not_rise(rank: int) -> None:
    """A process group sorts its ranks, so two of them would take the same slice: an error on every rank."""
    for ranks in ([[3, 1], [0, 2]], [[0, 1], [3, 2]]):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
        with pytest.raises(ValueError, match=r"mesh axis '.': expected ranks that rise along it, got"):
            fs.policies.whole(fs.P(("a", "b")))(torch.nn.Linear(4, 1)).on(mesh)


def test_a_spec_bound_to_groups_that_are_gone_is_refused() -> None:
    """It would slice by the rank that this process had, and gather by the one that it has."""
    model = torch.nn.Linear(4, 4)
    with world(2, rank=0):
        spec, shards = shards_of(fs.policies.whole(), model)
        fs.unshard(shards, spec)
    message = r"axis 'shard': the spec was bound when this process was rank 0 of 2 in a process group, "
    refused(RuntimeError, message + "which is destroyed", lambda: fs.unshard(shards, spec))
    for rank, size in ((1, 2), (0, 4)):
        with world(size, rank=rank):
            for use in (lambda: fs.unshard(shards, spec), lambda: fs.functional_call(model, shards, spec=spec)):
                refused(RuntimeError, message + f"where it is now rank {rank} of {size}: .* bind it again", use)
    with world(2, rank=0):
        fs.unshard(shards, spec)


@seldom
def test_a_compiled_step_on_groups_that_are_gone_is_refused() -> None:
    """Its graph has the groups' names alone: in another world it is traced again, and calls check their specs."""
    model = torch.nn.Linear(4, 4)
    with world(2, rank=0):
        spec, shards = shards_of(fs.policies.whole(), model)
    step = fs.compile(lambda p: fs.functional_call(model, p, torch.ones(2, 4), spec=spec).sum(), backend="aot_eager")
    message = r"^mesh axis 'shard': the spec was bound when this process was rank 0 of 2 in a process group, "
    for rank in (0, 1, 0):
        with world(2, rank=rank):
            if rank == 0:
                step(shards)
                continue
            refused(RuntimeError, message + "where it is now rank 1 of 2", lambda: step(shards))
    refused(RuntimeError, message + "which is destroyed", lambda: step(shards))


# --- law D: two real ranks agree with the ranks that vmap simulates, for every collective and transform ---
def collective_results(mesh: Mesh, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
    axis = mesh["shard"]
    out = {}
    for name, (op, *_) in OPS.items():

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


@real_ranks(2)
def test_collectives_agree_with_simulated_ranks(rank: int) -> None:
    """Values, derivatives of two orders and vmaps of each of them."""
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    simulated = fs.testing.spmd(collective_results, 2)(x)
    for name, results in collective_results(Mesh.world(), x[rank]).items():
        for i, result in enumerate(results):
            torch.testing.assert_close(result, simulated[name][i][rank], msg=f"{name}[{i}]")


@real_ranks(2)
def test_plain_autograd_outside_and_inside(rank: int) -> None:
    """Autograd over torch.func and over fs.grad: the regathered weights carry every derivative, the same by every way."""
    model, x = Net(2), numbers(rank, 0)
    spec, shards = shards_of(fs.by_type(MLP), model)
    v = along(shards)
    loss = squared_loss(model, spec, x)

    expected = HIGHER["jvp of grad"](loss)(shards)
    leaves = {k: t.clone().requires_grad_() for k, t in shards.items()}
    over_func = torch.autograd.grad(dot(torch.func.grad(loss)(leaves), v), list(leaves.values()))
    over_fs = torch.autograd.grad(dot(fs.grad(loss)(leaves), v), list(leaves.values()))
    for got in (over_func, over_fs):
        torch.testing.assert_close(dict(zip(leaves, got, strict=True)), expected, rtol=1e-10, atol=1e-12)
