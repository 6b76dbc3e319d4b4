"""Moving averages of trees of tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .. import _torch
from .._core.layout import Params


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
        if is_averaged(a)
        else params[key].to(a, copy=True)
        for key, a in average.items()
    }


def is_averaged(tensor: Tensor) -> bool:
    """Return whether a tensor is averaged: integers and bools are copied instead."""
    return tensor.is_floating_point() or tensor.is_complex()
