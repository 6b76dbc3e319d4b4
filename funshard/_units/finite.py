"""Whether gradients are finite: each rank looks at its slices, and all ranks agree by one reduction of a number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .._spec.host import compute_device
from .._spec.spec import PartitionSpec
from ..collectives._functions import sum_over
from .padding import map_unpadded

__all__ = ["agree_finite", "find_nonfinite"]


def find_nonfinite(grads: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return, for each gradient, whether it has an inf or NaN on this rank, apart from padding: bool, [gradients]."""
    mesh = spec.bound_mesh
    away = {unit.key: compute_device(unit, mesh) for unit in spec}
    flags = [_has_nonfinite(key, g, spec).to(away.get(key) or g.device) for key, g in grads.items()]
    return torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=mesh.device)


def agree_finite(nonfinite: Tensor, spec: PartitionSpec) -> Tensor:
    """Return whether all gradients of all ranks are finite: a bool scalar, the same on all ranks."""
    return sum_over(nonfinite.any().float(), spec.bound_mesh) == 0


def _has_nonfinite(key: str, grad: Tensor, spec: PartitionSpec) -> Tensor:
    """Return whether any element except padding is inf or NaN."""
    unit = spec.by_key.get(key)
    if unit is None or grad.shape != (spec.shard_numel(unit),):
        return (~torch.isfinite(grad)).any()
    return map_unpadded(lambda g: ~torch.isfinite(g), unit, spec, grad).any()
