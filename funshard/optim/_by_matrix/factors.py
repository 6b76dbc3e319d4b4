"""Shared parts of Shampoo and SOAP: the factors G G^T and G^T G of a matrix, and functions of them every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import _torch
from ..._spec.spec import PartitionSpec
from .._matrices.matrices import Matrices, matrices

__all__ = [
    "compute_if_due",
    "eigh_or_nan",
    "factored_sides",
    "gram",
    "limit_squares",
    "multiply_side",
    "resolve_real_matrices",
]

SIDES = ("left", "right")
"""A matrix's rows and its columns."""


def resolve_real_matrices(who: str, spec: PartitionSpec | Matrices) -> Matrices:
    """Return the matrices of a spec, or those given. TypeError for a complex one, or one of 1 or 4 dimensions."""
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    for matrix in known.chosen:
        if matrix.param.dtype.is_complex or len(matrix.shape) not in (2, 3):
            got = f"{list(matrix.shape)} {matrix.param.dtype}"
            raise TypeError(f"{who}: '{matrix.name}': expected a real matrix, [n, m] or [batch, n, m], got {got}")
    return known


def factored_sides(shape: Sequence[int], max_size: int) -> dict[str, int]:
    """Return the sides of a matrix [..., n, m] that have a factor, with their sizes: those of at most ``max_size``."""
    return {side: size for side, size in zip(SIDES, shape[-2:], strict=True) if size <= max_size}


def limit_squares(grad: Tensor) -> Tensor:
    """Return a gradient with finite elements cut to 2^48 in float32, as 2^384 in float64: sums of their squares are finite."""
    limit = torch.finfo(torch.promote_types(grad.dtype, torch.float32)).max ** 0.375
    limit = min(limit, torch.finfo(grad.dtype).max)
    return torch.where(grad.isfinite(), grad.clamp(-limit, limit), grad)


def gram(grad: Tensor, side: str) -> Tensor:
    """Return ``G G^T`` for the rows, ``G^T G`` for the columns."""
    return grad @ grad.mT if side == "left" else grad.mT @ grad


def multiply_side(x: Tensor, factor: Tensor, side: str) -> Tensor:
    """Multiply a matrix with a factor, on its left or right side."""
    return factor @ x if side == "left" else x @ factor


def eigh_or_nan(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors, NaN if not finite: an exception on one owner leaves the others waiting."""
    finite = factor.isfinite().all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, factor, 0))
    return torch.where(finite[..., 0], values, torch.nan), torch.where(finite, vectors, torch.nan)


def compute_if_due(due: Tensor, new: Callable[[], Sequence[Tensor]], old: Sequence[Tensor]) -> list[Tensor]:
    """Return the new tensors, computed only if due, else the old. ``due`` is on the host, the same on all ranks."""
    if not _torch.is_wrapped(due):
        return list(new() if bool(due) else old)
    return [torch.where(due, a, b) for a, b in zip(new(), old, strict=True)]  # simulated ranks, of which none can be asked
