"""members beside torch's, on every rank of meshes of several axes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from collective_log import world
from depth import seldom
from ranks import real_ranks
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

import funshard as fs
from funshard.collectives import Mesh, ProcessAxis, members

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
    """They are the rank's row of the mesh along the axis."""
    names = tuple("abc"[: len(shape)])
    grid = torch.arange(math.prod(shape)).view(shape)
    for rank in range(math.prod(shape)):
        with world(math.prod(shape), rank):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            agree_with_torch(mesh)
            at = torch.unravel_index(torch.tensor(rank), shape)
            for i, name in enumerate(names):
                row = grid[tuple(slice(None) if j == i else at[j] for j in range(len(shape)))]
                assert members(Mesh.of(mesh)[name]) == tuple(row.tolist())


def test_a_mesh_over_some_of_the_ranks() -> None:
    """Ranks of the world, not of the mesh."""
    with world(8, 5):
        mesh = DeviceMesh("cpu", [[1, 3], [5, 7]], mesh_dim_names=("a", "b"))
        agree_with_torch(mesh)
        assert members(Mesh.of(mesh)["b"]) == (5, 7)
        assert members(Mesh.of(mesh)["a"]) == (1, 5)


def test_the_world() -> None:
    with world(3, 1):
        assert members(Mesh.world()["shard"]) == (0, 1, 2)
        assert members(Mesh.of({"x": 1})["x"]) == (1,)
    assert members(Mesh.world()["shard"]) == (0,)


@real_ranks(4)
def test_real_ranks(rank: int) -> None:
    """Torch's broadcast takes a rank of the world, ours one of the axis: the same tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("quad", "pair"))
    agree_with_torch(mesh)
    for name, axis in Mesh.of(mesh).axes:
        for src in range(2):
            theirs = torch.tensor([float(rank)])
            dist.broadcast(theirs, members(axis)[src], group=mesh.get_group(name))
            assert torch.equal(fs.collectives.broadcast(torch.tensor([float(rank)]), axis, src=src), theirs)


def test_axes_without_members() -> None:
    with pytest.raises(ValueError, match=r"an axis of 4 ranks without a process group has no members: expected a DeviceMesh"):
        members(ProcessAxis(4))
    with pytest.raises(ValueError, match=r"an axis of 4 ranks without a process group"):
        members(Mesh.of({"shard": 4})["shard"])

    def simulated(mesh: Mesh, x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match=r"a simulated axis of 2 ranks is in one process.* ranks 0\.\.1"):
            members(mesh["shard"])
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
        spec = fs.policies.whole()(model).bound
        shards = fs.shard(model, spec)
        fs.unshard(shards, spec)
    message = r"axis 'shard': the spec was bound when this process was rank 0 of 2 in a process group, "
    with pytest.raises(RuntimeError, match=message + "which is destroyed"):
        fs.unshard(shards, spec)
    for rank, size in ((1, 2), (0, 4)):
        with world(size, rank=rank):
            for use in (lambda: fs.unshard(shards, spec), lambda: fs.functional_call(model, shards, spec=spec)):
                with pytest.raises(RuntimeError, match=message + f"where it is now rank {rank} of {size}: .* bind it again"):
                    use()
    with world(2, rank=0):
        fs.unshard(shards, spec)


@seldom
def test_a_compiled_step_on_groups_that_are_gone_is_refused() -> None:
    """Its graph has the groups' names alone: in another world it is traced again, and calls check their specs."""
    model = torch.nn.Linear(4, 4)
    with world(2, rank=0):
        spec = fs.policies.whole()(model).bound
        shards = fs.shard(model, spec)
    step = fs.compile(lambda p: fs.functional_call(model, p, torch.ones(2, 4), spec=spec).sum(), backend="aot_eager")
    message = r"^mesh axis 'shard': the spec was bound when this process was rank 0 of 2 in a process group, "
    for rank in (0, 1, 0):
        with world(2, rank=rank):
            if rank == 0:
                step(shards)
                continue
            with pytest.raises(RuntimeError, match=message + "where it is now rank 1 of 2"):
                step(shards)
    with pytest.raises(RuntimeError, match=message + "which is destroyed"):
        step(shards)
