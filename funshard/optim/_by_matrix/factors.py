"""What Shampoo and SOAP have in common: the factors G G^T and G^T G of each matrix, renewed every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import _torch
from ..._spec.spec import PartitionSpec
from .._matrices.matrices import Matrices, matrices

__all__ = ["along", "chosen_where", "eigh", "outer", "real_matrices", "sides"]

SIDES = ("left", "right")
"""A matrix's rows and its columns."""


def real_matrices(who: str, spec: PartitionSpec | Matrices) -> Matrices:
    """The matrices of a spec, or those given. TypeError, naming it, for one that is complex, or of one dimension or four."""
    known = spec if isinstance(spec, Matrices) else matrices(spec)
    for matrix in known.chosen:
        if matrix.param.dtype.is_complex or len(matrix.shape) not in (2, 3):
            got = f"{list(matrix.shape)} {matrix.param.dtype}"
            raise TypeError(f"{who}: '{matrix.name}': expected a real matrix, [n, m] or [batch, n, m], got {got}")
    return known


def sides(shape: Sequence[int], max_size: int) -> dict[str, int]:
    """Those sides of a matrix [..., n, m] that have a factor, with its size: not where that would be over ``max_size``."""
    return {side: size for side, size in zip(SIDES, shape[-2:], strict=True) if size <= max_size}


def outer(grad: Tensor, side: str) -> Tensor:
    """``G G^T`` of the rows, ``G^T G`` of the columns."""
    return grad @ grad.mT if side == "left" else grad.mT @ grad


def along(x: Tensor, factor: Tensor, side: str) -> Tensor:
    """The matrix with a factor applied to its rows, or to its columns."""
    return factor @ x if side == "left" else x @ factor


def eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; NaN of what is not finite: an error of one owner would leave the others waiting."""
    finite = factor.isfinite().all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, factor, 0))
    return torch.where(finite[..., 0], values, torch.nan), torch.where(finite, vectors, torch.nan)


def chosen_where(due: Tensor, new: Callable[[], Sequence[Tensor]], old: Sequence[Tensor]) -> list[Tensor]:
    """The new tensors, which are made only if they are due, or the old ones. ``due`` is on the host, and alike on all ranks."""
    if not _torch.is_wrapped(due):
        return list(new() if bool(due) else old)
    return [torch.where(due, a, b) for a, b in zip(new(), old, strict=True)]  # simulated ranks, of which none can be asked
