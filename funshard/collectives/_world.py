"""The ranks of an axis in the world, and meshes that do not span it."""

from __future__ import annotations

import math

import torch.distributed as dist

from .. import _torch
from .._core.mesh import Axis, Mesh, ProcessAxis, Simulated


def check_spans_world(mesh: Mesh, where: str) -> None:
    """Raise ValueError if the mesh has only some ranks of the default process group, and is no ``submesh``.

    A mesh of sizes alone, of one rank without a process group, or of simulated ranks passes: it communicates with nobody.
    """
    named = any(isinstance(axis, ProcessAxis) and axis.name for _, axis in mesh.axes)
    if mesh.submesh or not named or mesh.is_simulated or not dist.is_initialized():
        return
    size, world = math.prod([axis.size for _, axis in mesh.axes]), dist.get_world_size()
    if size < world:
        raise ValueError(
            f"{where}: the spec's mesh {dict(mesh.sizes)} has {size} of {world} ranks: expected all of the process group, "
            "because the others may hold other parts of the model, as in tensor parallelism, and are left out; if that is "
            "intended, bind the spec with spec.on(mesh, submesh=True)"
        )


def members(axis: Axis) -> tuple[int, ...]:
    """Return the ranks in the world of all ranks of the axis that this one communicates with, itself among them.

    In the order of their ranks on the axis: ``members(axis)[rank]`` is torch's ``get_global_rank``, and
    ``members(axis).index(global_rank)`` its ``get_group_rank``. Collectives here take ranks on the axis.

    Args:
        axis: A mesh axis with a process group; ValueError for one that is only a size, or simulated.

    Example:
        >>> from funshard.collectives import Mesh, members
        >>> members(Mesh.world()["shard"])
        (0,)
    """
    if isinstance(axis, Simulated):
        raise ValueError(
            f"a simulated axis of {axis.size} ranks is in one process: expected an axis over a process group; "
            f"collectives take its own ranks 0..{axis.size - 1}"
        )
    if axis.name:
        return tuple(dist.get_process_group_ranks(_torch.resolve_group(axis.name)))
    if axis.size == 1:
        return (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)
    raise ValueError(
        f"an axis of {axis.size} ranks without a process group has no members: expected a DeviceMesh axis; "
        "bind the spec with .on(mesh) (a pickled spec must be bound anew)"
    )


def process_axes(mesh: Mesh) -> dict[str, ProcessAxis]:
    """Return the axes of more than one rank that have a process group, by name."""
    return {name: axis for name, axis in mesh.axes if isinstance(axis, ProcessAxis) and axis.name and axis.size > 1}


def has_peers(mesh: Mesh) -> bool:
    """Return whether the mesh has other processes and process groups to reach them."""
    return len(process_axes(mesh)) > 0  # Dynamo of torch 2.11 traces no bool() of a list
