"""Mesh axes: over process groups, simulated by vmap, or only sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axis", "Group", "Mesh", "Simulated"]


@dataclass(frozen=True)
class Group:
    """An axis over a process group: its size, this process's rank in it and the group's name.

    Without a name it is only a size: shapes can be computed, nothing can be sent. One rank needs no name.
    ``reductions`` is the name of another process group over the same ranks for functional_call's reductions.
    """

    size: int
    rank: int | None = None
    name: str = ""
    reductions: str = ""


@dataclass(frozen=True, eq=False)
class Simulated:
    """An axis whose ranks are a batch dimension of torch.vmap: N ranks in one process, without a process group.

    ``rank`` is ``torch.arange(size)`` as seen inside that vmap. `funshard.testing.spmd` makes it.
    """

    size: int
    rank: Tensor


Axis = Group | Simulated


@dataclass(frozen=True)
class Mesh:
    """Named axes with what it takes to communicate over them."""

    axes: tuple[tuple[str, Axis], ...]
    device_type: str | None = None

    @staticmethod
    def of(mesh: DeviceMesh | Mesh | Mapping[str, int | Axis]) -> Mesh:
        """The Mesh of a `DeviceMesh`, or of axis names with sizes. An unnamed one-dimensional DeviceMesh is "shard"."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return Mesh(tuple((name, Group(a, 0 if a == 1 else None) if isinstance(a, int) else a) for name, a in mesh.items()))
        names = mesh.mesh_dim_names or (("shard",) if mesh.ndim == 1 else None)
        if names is None:
            raise ValueError(
                f"mesh of {mesh.ndim} dimensions has no names: expected one for each axis; "
                "give mesh_dim_names to init_device_mesh"
            )
        groups = [mesh.get_group(i) for i in range(mesh.ndim)]
        axes = (Group(mesh.size(i), mesh.get_local_rank(i), g.group_name) for i, g in enumerate(groups))
        return Mesh(tuple(zip(names, axes, strict=True)), mesh.device_type)

    def reducing_over(self, other: Mesh) -> Mesh:
        """This mesh with another one's process groups for reductions.

        Raises ValueError unless both are over the same axes, and where the second has no group of its own.
        """
        if self.sizes != other.sizes:
            raise ValueError(f"reductions: expected a mesh of the same axes {dict(self.sizes)}, got {dict(other.sizes)}")
        for (name, axis), (_, second) in zip(self.axes, other.axes, strict=True):
            if isinstance(axis, Group) and axis.size > 1 and axis == second:
                raise ValueError(
                    f"reductions: expected other process groups, got the same one for axis '{name}' (init_device_mesh gives "
                    "one for the same ranks); make it by DeviceMesh.from_group(torch.distributed.new_group(...), ...)"
                )
        axes = [
            (name, replace(axis, reductions=second.name) if isinstance(axis, Group) and isinstance(second, Group) else axis)
            for (name, axis), (_, second) in zip(self.axes, other.axes, strict=True)
        ]
        return replace(self, axes=tuple(axes))

    @staticmethod
    def world() -> Mesh:
        """All processes as one axis "shard"; one rank where torch.distributed was not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return Mesh((("shard", Group(1, 0)),))
        group = dist.group.WORLD
        assert group is not None
        device = "cuda" if dist.get_backend() == "nccl" else None
        return Mesh((("shard", Group(dist.get_world_size(), dist.get_rank(), group.group_name)),), device)

    @property
    def device(self) -> torch.device | None:
        """The device that tensors of this mesh are on; None where any will do."""
        if self.device_type in (None, "cpu"):
            return None if self.device_type is None else torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

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
