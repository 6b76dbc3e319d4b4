"""Units that live in host memory, and their copies between the host and the device.

A tensor is cast on that side on which it is the larger, so that fewer bytes are copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _torch
from .._core.mesh import Mesh
from .._core.ops import PendingResult
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._torch.tracing import phase

# --- Units that live in host memory, ``P(offload="params")``, and the device on which they are used ---

HOST = torch.device("cpu")


def is_host(device: torch.device) -> bool:
    """Return whether the device is the host itself: then nothing is copied. Tests of offloading replace this."""
    return device.type == HOST.type


def is_host_resident(unit: Unit) -> bool:
    """Return whether a unit lives in host memory, where its mesh computes on another device."""
    return "params" in unit.p.offloads


def compute_device(unit: Unit, mesh: Mesh) -> torch.device | None:
    """Return the device to which a host-resident unit is copied for use, None for a unit that is used where it is stored.

    It is the mesh's own. A mesh that does not say on which device it computes leaves units where they are.
    """
    device = _mesh_compute_device(mesh) if is_host_resident(unit) else None
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
    devices = ((unit.key, compute_device(unit, spec.bound_mesh)) for unit in spec)
    return tuple((key, device) for key, device in devices if device is not None)


# --- Copies ---


def move(x: Tensor, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the device, or where it is, in this dtype; differentiable. Only a copy to the host is waited for."""
    if device is None:
        return x.to(dtype)
    early = dtype.itemsize < x.dtype.itemsize
    x = x.to(dtype) if early else x
    return x.to(device, non_blocking=device.type != HOST.type).to(dtype)


def start_copy_to_device(shard: Tensor, key: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, _torch.AsyncCopy]:
    """Start to copy a shard to the device, cast first if ``dtype`` is smaller; return the result and the pending copy."""
    if dtype.itemsize < shard.itemsize:
        shard = _torch.allocate_like(shard, HOST, dtype=dtype, beside=device).copy_(shard)
    there = _torch.allocate_like(shard, device)
    with phase("copy to the device", key):
        return there, _torch.AsyncCopy(shard, there)


def start_grad_copy(x: Tensor, key: str) -> PendingResult:
    """Start to copy a gradient to pinned host memory, for which `_torch.synchronize_copies` waits."""
    there = _torch.allocate_like(x, HOST)
    with phase("copy gradient to the host", key):
        copy = _torch.AsyncCopy(x, there)

    def end(x: Tensor = x) -> Tensor:  # which is held until then
        copy.wait()
        return there

    return PendingResult((), end)


def place_slice(piece: Tensor, unit: Unit, mesh: Mesh) -> Tensor:
    """Return a slice of a unit where it is kept: on the mesh's device, or in pinned host memory, by one copy.

    Raises ValueError where it is kept on the host and nothing says which device it is used on.
    """
    device = mesh.device
    if device is None and is_host_resident(unit) and _torch.is_accelerator(piece.device):
        raise ValueError(
            f"unit '{unit.key}' has P(offload=\"params\"): expected a mesh that says on which device it is used, got sizes "
            f"{dict(mesh.sizes)} and parameters on {piece.device}; bind the spec by .on(init_device_mesh(...))"
        )
    if device is None or piece.is_meta:
        return piece
    if (used := compute_device(unit, mesh)) is None:
        return piece.to(device)
    if not _torch.is_eager() or _torch.has_derivative(piece):
        return piece.to(HOST)
    return _torch.allocate_like(piece, HOST, beside=used).copy_(piece)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, from CUDA through pinned memory; the tensor itself if it is there."""
    there = tensor.to("cpu", non_blocking=True)  # torch pins what it copies so
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return there
