"""Values of gradients and parameters: which kinds there are, whether all are finite on all ranks, and moving averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from .. import _torch
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._wire.host import compute_device
from ..collectives._functions import sum_over
from .pieces import map_unpadded

Tree = TypeVar("Tree")


def find_nonfinite(grads: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return, for each gradient, whether it has an inf or NaN on this rank, apart from padding: bool, [gradients]."""
    mesh = spec.bound_mesh
    away = {unit.key: compute_device(unit, mesh) for unit in spec}
    flags = [_has_nonfinite(key, g, spec).to(away.get(key) or g.device) for key, g in grads.items()]
    return torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=mesh.device)


def agree_finite(nonfinite: Tensor, spec: PartitionSpec) -> Tensor:
    """Return whether all gradients of all ranks are finite: a bool scalar, the same on all ranks."""
    return sum_over(nonfinite.any().float(), spec.bound_mesh) == 0


def select_if_finite(finite: Tensor, new: Tree, old: Tree) -> Tree:
    """Return a tree with the tensors of ``new`` if ``finite``, else those of ``old``, without a branch on the host."""

    def choose(a: Any, b: Any) -> Any:
        return torch.where(finite.to(a.device), a, b) if isinstance(a, Tensor) else a

    return pytree.tree_map(choose, new, old)


def _has_nonfinite(key: str, grad: Tensor, spec: PartitionSpec) -> Tensor:
    unit = spec.by_key.get(key)
    if unit is not None and grad.shape == (spec.shard_numel(unit),):
        grad = map_unpadded(lambda g: g, unit, spec, grad)
    if not grad.numel():
        return torch.zeros((), dtype=torch.bool, device=grad.device)
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    # Both extremes of a tensor with a NaN are NaN, and two reductions allocate nothing: isfinite makes five tensors.
    return ~(real.amax().isfinite() & real.amin().isfinite())


def check_decay(decay: float | Tensor) -> None:
    """Raise ValueError unless the decay is a number from 0 to 1; a tensor is read where that costs no wait."""
    if isinstance(decay, Tensor) and not decay.dim() and (decay.device.type != "cpu" or not _torch.is_eager()):
        return
    if (isinstance(decay, Tensor) and decay.dim()) or not 0 <= decay <= 1:
        raise ValueError(f"ema: expected a decay from 0 to 1, got {decay}")


def update_average(average: Mapping[str, Tensor], params: Mapping[str, Tensor], decay: float | Tensor) -> Params:
    """Return ``decay * average + (1 - decay) * params``; raise ValueError if the two differ in keys or shapes."""
    check_decay(decay)
    for key in (*average, *params):
        if key not in average or key not in params:
            where = "the average" if key not in average else "the params"
            raise ValueError(f"ema: '{key}' is not in {where}: expected the same keys in both")
        if average[key].shape != params[key].shape:
            expected, got = list(average[key].shape), list(params[key].shape)
            raise ValueError(f"ema: '{key}': expected shape {expected} as its average has, got {got}; are they of one spec?")
    weight = 1 - decay
    return {
        key: a.lerp(params[key].to(a), weight.to(a) if isinstance(weight, Tensor) else weight)
        if is_inexact(a)
        else params[key].to(a, copy=True)
        for key, a in average.items()
    }


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor is floating point or complex. Others are neither updated nor averaged."""
    return tensor.is_floating_point() or tensor.is_complex()


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
