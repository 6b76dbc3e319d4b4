"""Mesh axes: over process groups, simulated by vmap, or sizes alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ProcessAxis:
    """An axis over a process group.

    Args:
        size: The number of ranks.
        rank: This process's rank on the axis.
        name: The process group's name. Without one the axis is only a size: shapes can be computed, nothing can be sent. An
            axis of one rank needs none.
        reduction_name: The name of another process group over the same ranks, for functional_call's reductions.
    """

    size: int
    rank: int | None = None
    name: str = ""
    reduction_name: str = ""


@dataclass(frozen=True, eq=False)
class Simulated:
    """An axis whose ranks are a batch dimension of torch.vmap: N ranks in one process, without a process group.

    ``rank`` is ``torch.arange(size)`` as seen inside that vmap. `funshard.testing.spmd` makes it.
    """

    size: int
    rank: Tensor


Axis = ProcessAxis | Simulated
"""One axis of a mesh: over a process group, or simulated."""
Axes = str | tuple[str, ...] | None
"""Axes of a mesh by name; None for all of them."""


@_torch.assume_constant
def _find_rank(group: str) -> tuple[int, int]:
    """Return this process's rank in a named group, and its size; (-1, 0) if the group does not exist here."""
    try:
        return (found := _torch.resolve_group(group)).rank(), found.size()
    except (RuntimeError, ValueError):
        return -1, 0


@dataclass(frozen=True)
class Mesh:
    """Named axes and the process groups to communicate over them.

    Args:
        axes: Names and axes, outermost first.
        device_type: The type of the devices that its tensors are on; None for any.
        submesh: Whether the mesh is meant to have only some ranks of the default process group.
    """

    axes: tuple[tuple[str, Axis], ...]
    device_type: str | None = None
    submesh: bool = False

    @staticmethod
    def of(mesh: DeviceMesh | Mesh | Mapping[str, int | Axis]) -> Mesh:
        """Make a Mesh from a `DeviceMesh`, or from axis names with sizes.

        Args:
            mesh: A DeviceMesh (if it is 1-D and unnamed, its axis is "shard"), axis names with sizes, or a Mesh.

        Returns:
            The mesh; a Mesh as it is.

        Raises:
            ValueError: For several unnamed dimensions, ranks that do not rise along each of them, a mesh that this process is
                not on, and sizes below one.
            TypeError: For anything else.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return Mesh(tuple((name, _to_axis(name, axis)) for name, axis in mesh.items()))
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(f"mesh: expected a DeviceMesh, or axis names with sizes such as {{'shard': 2}}, got {mesh!r}")
        names = mesh.mesh_dim_names or (("shard",) if mesh.ndim == 1 else None)
        if names is None:
            raise ValueError(
                f"mesh of {mesh.ndim} dimensions has no names: expected one for each axis; "
                "give mesh_dim_names to init_device_mesh"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"mesh: rank {dist.get_rank()} of the world is not on the mesh of ranks {mesh.mesh.tolist()}: expected a mesh "
                "that this process is on; the others leave the call out"
            )
        for i, name in enumerate(names):
            if (mesh.mesh.diff(dim=i) <= 0).any():  # a process group counts its ranks in the order of the world's
                raise ValueError(f"mesh axis '{name}': expected ranks that rise along it, got {mesh.mesh.tolist()}; sort them")
        groups = [mesh.get_group(i) for i in range(mesh.ndim)]
        axes = (ProcessAxis(mesh.size(i), mesh.get_local_rank(i), g.group_name) for i, g in enumerate(groups))
        return Mesh(tuple(zip(names, axes, strict=True)), mesh.device_type)

    def with_reductions_over(self, other: Mesh) -> Mesh:
        """Return this mesh with the process groups of another one of the same axes for reductions.

        Args:
            other: The other mesh. ValueError if its axes differ, or an axis has the same process group in both.
        """
        if self.sizes != other.sizes:
            raise ValueError(f"reductions: expected a mesh of the same axes {dict(self.sizes)}, got {dict(other.sizes)}")
        axes: list[tuple[str, Axis]] = []
        for (name, axis), (_, second) in zip(self.axes, other.axes, strict=True):
            if isinstance(axis, ProcessAxis) and isinstance(second, ProcessAxis):
                if axis.size > 1 and axis == second:
                    raise ValueError(
                        f"reductions: expected other process groups, got the same one for axis '{name}' (init_device_mesh "
                        "gives one for the same ranks); make it by DeviceMesh.from_group(torch.distributed.new_group(...), ...)"
                    )
                axis = replace(axis, reduction_name=second.name)
            axes.append((name, axis))
        return replace(self, axes=tuple(axes))

    @staticmethod
    def world() -> Mesh:
        """Return all processes as one axis "shard"; one rank if torch.distributed is not initialised.

        Warns once if srun or mpirun has started several tasks: their variables are also set where one of them runs one process.

        Raises:
            RuntimeError: If torch.distributed is not initialised and a launcher such as torchrun started this process as one
                of several (``WORLD_SIZE``): each would train alone.
        """
        if not (dist.is_available() and dist.is_initialized()):
            started = os.environ.get("WORLD_SIZE", "")
            if started.isdecimal() and int(started) > 1:
                raise RuntimeError(
                    f"this process was started as one of {started} (WORLD_SIZE) and has no process group, so each would train "
                    "alone: expected torch.distributed.init_process_group() before this, or .on({'shard': 1}) on the spec"
                )
            if not started:
                _torch.warn_of_tasks()
            return Mesh((("shard", ProcessAxis(1, 0)),))
        group = dist.group.WORLD
        assert group is not None
        axis = ProcessAxis(dist.get_world_size(), dist.get_rank(), group.group_name)
        return Mesh((("shard", axis),), _device_type(dist.get_backend_config()))

    @property
    def device(self) -> torch.device | None:
        """The device of this mesh's tensors; None for any.

        For an accelerator, the one that the process groups are bound to (``init_process_group(device_id=...)``), or else the
        current one.
        """
        if self.device_type in (None, "cpu"):
            return None if self.device_type is None else torch.device("cpu")
        groups = [_torch.resolve_group(axis.name) for _, axis in self.axes if isinstance(axis, ProcessAxis) and axis.name]
        if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
            groups.append(dist.group.WORLD)
        for device in (getattr(group, "bound_device_id", None) for group in groups):
            if device is not None and device.type == self.device_type:
                return device
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    def check_groups(self) -> None:
        """Check that the axes' process groups still exist, and that this process has the same rank in them.

        Raises:
            RuntimeError: Naming the axis, for example after ``destroy_process_group`` and another ``init_process_group``.
        """
        for name, axis in self.axes:
            if axis.size == 1 or isinstance(axis, Simulated) or not axis.name:
                continue
            rank, size = _find_rank(axis.name)
            if rank != axis.rank or size != axis.size:  # not as tuples, which Dynamo of torch 2.11 does not compare here
                found = f"where it is now rank {rank} of {size}" if size else "which is destroyed"
                raise RuntimeError(
                    f"mesh axis '{name}': the spec was bound when this process was rank {axis.rank} of {axis.size} in a "
                    f"process group, {found}: expected one on the current groups; bind it again, spec.on(mesh), and shard"
                )

    def __getitem__(self, name: str) -> Axis:
        return dict(self.axes)[name]

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The axis names with their sizes, outermost first."""
        return tuple((name, axis.size) for name, axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def is_simulated(self) -> bool:
        """Whether the ranks of any axis are a batch dimension of vmap."""
        return any(isinstance(axis, Simulated) for _, axis in self.axes)

    def select(self, axes: Iterable[str] | None) -> tuple[str, ...]:
        """Return the names of some axes, in the mesh's order.

        Args:
            axes: Names of axes, one name, or None for all. ValueError for an unknown one.
        """
        names = self.names if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            if name not in self.names:
                raise ValueError(f"unknown mesh axis '{name}': expected some of {self.names}")
        return tuple(name for name in self.names if name in names)


def _to_axis(name: object, axis: object) -> Axis:
    if not isinstance(name, str) or not name:
        raise TypeError(f"mesh: expected axis names, got {name!r}")
    if isinstance(axis, ProcessAxis | Simulated):
        return axis
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"mesh axis '{name}': expected its size, got {axis!r}")
    if axis < 1:
        raise ValueError(f"mesh axis '{name}': expected a size of at least 1, got {axis}")
    return ProcessAxis(axis, 0 if axis == 1 else None)


def _device_type(backends: str) -> str | None:
    """Return this machine's accelerator with a backend of its own in a group's backends, such as "cpu:gloo,cuda:nccl".

    None if one backend serves the CPU as well (gloo): then tensors stay where they are.
    """
    of = dict(pair.split(":", 1) for pair in backends.split(",") if ":" in pair)
    own = [kind for kind, backend in of.items() if kind != "cpu" and backend != of.get("cpu")]
    return next((kind for kind in own if torch.get_device_module(kind).is_available()), None)


# --- The ranks of an axis in the world, and meshes that do not span it ---


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
