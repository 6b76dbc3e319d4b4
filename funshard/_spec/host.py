"""Units that live in host memory, ``P(offload="params")``, and the device on which they are used."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _torch
from ..collectives._mesh import Mesh
from .spec import PartitionSpec
from .unit import Unit

__all__ = ["HOST", "check_host_resident", "compute_device", "is_host"]

HOST = torch.device("cpu")


def is_host(device: torch.device) -> bool:
    """Return whether the device is the host itself: then nothing is copied. Tests of offloading replace this."""
    return device.type == HOST.type


def compute_device(unit: Unit, mesh: Mesh) -> torch.device | None:
    """Return the device to which a host-resident unit is copied for use, None for a unit that is used where it is stored.

    It is the mesh's own. A mesh that does not say on which device it computes leaves units where they are.
    """
    if "params" not in unit.p.offloads:
        return None
    device = _mesh_compute_device(mesh)
    return None if device is None or is_host(device) else device


@_torch.assume_constant
def _mesh_compute_device(mesh: Mesh) -> torch.device | None:
    """Return the mesh's device, a constant to torch.compile."""
    return mesh.device


def check_host_resident(shards: Mapping[str, Tensor], spec: PartitionSpec) -> None:
    """Raise ValueError, naming the unit, where the shard of a host-resident unit is on another device."""
    for key, device in spec._compute_once(_host_resident_units):
        if key in shards and (at := shards[key].device).type not in (HOST.type, "meta"):
            raise ValueError(
                f"unit '{key}' has P(offload=\"params\"): expected its shard on the host, from where it is copied to {device}, "
                f"got it on {at}; fs.shard puts it there, and so does .cpu() what was loaded"
            )


def _host_resident_units(spec: PartitionSpec) -> tuple[tuple[str, torch.device], ...]:
    """Return the keys of the units that live in host memory, and the device on which each is used."""
    devices = ((unit.key, compute_device(unit, spec.bound_mesh)) for unit in spec)
    return tuple((key, device) for key, device in devices if device is not None)
