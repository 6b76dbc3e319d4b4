"""The dimension of a tensor that a collective joins or slices: its checks, and the way to dimension 0 and back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ._mesh import Axis

__all__ = ["apply_along", "check_dim", "check_divisible"]


def check_dim(what: str, x: Tensor, dim: int) -> int:
    """Return a dimension of a tensor, counted from 0.

    Raises:
        ValueError: If the tensor does not have it.
    """
    if x.dim() == 0:
        raise ValueError(f"{what}: expected at least one dimension, got a 0-dim tensor; use x.reshape(1)")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: expected a dimension in {-x.dim()}..{x.dim() - 1} of shape {tuple(x.shape)}, got {dim}")
    return dim % x.dim()


def check_divisible(what: str, x: Tensor, axis: Axis, dim: int = 0) -> int:
    """Return a dimension that the ranks of an axis divide, counted from 0.

    Raises:
        ValueError: If they do not, or the tensor does not have it.
    """
    at = check_dim(what, x, dim) if x.dim() else 0
    if x.dim() == 0 or x.shape[at] % axis.size:
        which = f"dimension {at}" if at else "first dimension"
        raise ValueError(f"{what}: expected a {which} that {axis.size} ranks divide, got {tuple(x.shape)}; pad it")
    return at


def apply_along(dim: int, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of tensors that acts on dimension 0 along another dimension."""
    return fn(x) if dim == 0 else fn(x.movedim(dim, 0)).movedim(0, dim)
