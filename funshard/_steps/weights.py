"""The weights of micro-batches, as factors of their losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._spec.division import Reduction
from .._units.accumulation import drop_unweighted
from ..collectives._functions import all_reduce
from ..collectives._mesh import Mesh

__all__ = ["are_positive", "check_weight_count", "make_loss_scales", "scale_loss", "sum_dtype", "to_sum_dtype"]


def make_loss_scales(
    weights: Sequence[float | Tensor], params: Mapping[str, Tensor], mesh: Mesh, reduction: Reduction
) -> Tensor:
    """Return the factor of each micro-batch's loss: its weight; for a mean over the average weight of all ranks' micro-batches.

    Raises TypeError or ValueError for what is no weight. A tensor whose value the host cannot read without waiting for it
    makes all scales NaN instead.
    """
    for i, weight in enumerate(weights):
        if isinstance(weight, Tensor):
            if weight.dim():
                raise ValueError(f"accumulate: weight {i}: expected a scalar, got shape {list(weight.shape)}")
            if not (_torch.is_eager() and weight.device.type == "cpu"):
                continue
        elif not isinstance(weight, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"accumulate: weight {i}: expected a number or a scalar tensor, got {type(weight).__name__}")
        if not 0 <= weight < math.inf:
            raise ValueError(f"accumulate: weight {i}: expected a finite number from 0 on, got {float(weight)}")
    like = next(iter(params.values()), None)
    dtype = torch.float32 if like is None or like.is_complex() else sum_dtype(like.dtype)
    device = mesh.device if like is None else like.device
    each = torch.stack([torch.as_tensor(weight, device=device).to(dtype) for weight in weights])
    each = torch.where((each >= 0).all() & (each < math.inf).all(), each, math.nan)
    if reduction.by != "mean":
        return each
    total, ranks = each.sum(), 1
    for name, axis in mesh.axes:
        if reduction.includes(name):
            total, ranks = all_reduce(total, axis, reduce="sum"), ranks * axis.size
    return torch.where(total == 0, 0, each * (ranks * len(weights)) / total)


def are_positive(weights: Sequence[float | Tensor]) -> tuple[bool, ...]:
    """Return, for each weight, whether the host knows without waiting that it is not 0."""
    return tuple(
        bool(weight > 0) if not isinstance(weight, Tensor) or (_torch.is_eager() and weight.device.type == "cpu") else False
        for weight in weights
    )


def scale_loss(loss: Tensor, scales: Tensor, i: int) -> Tensor:
    """Return the loss of micro-batch ``i`` times its scale; 0 if that is 0, also for NaN. ValueError if it has none."""
    if i >= len(scales):
        raise ValueError(f"accumulate: expected a weight for each micro-batch, got {len(scales)} and one more micro-batch")
    return drop_unweighted(loss, scales[i]) * scales[i]


def check_weight_count(weights: Sequence[Any] | Tensor, count: int) -> None:
    """Raise ValueError unless there is a weight for each of ``count`` micro-batches."""
    if len(weights) != count:
        raise ValueError(f"accumulate: expected a weight for each of {count} micro-batches, got {len(weights)}")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add up in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def to_sum_dtype(x: Tensor) -> Tensor:
    """Return the tensor in the dtype to add up in."""
    return x.to(sum_dtype(x.dtype))
