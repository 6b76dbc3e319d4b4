"""Reduction of gradients over ranks: its mesh axes, and the divisors of the sum."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from .mesh import Mesh

ReduceBy = Literal["mean", "sum"] | float
"""The reduction of gradients over ranks: their mean, their sum, or their sum divided by a number."""


class Reduction(NamedTuple):
    """The reduction that makes gradients of shards, and its mesh axes: None for all of them."""

    by: ReduceBy = "mean"
    over: frozenset[str] | None = None

    @classmethod
    def make(cls, by: ReduceBy, over: Iterable[str] | None = None) -> Reduction:
        """Check the arguments and return a `Reduction`.

        Raises ValueError for a name that is neither "mean" nor "sum" and a number that is not positive and finite.
        """
        known = by in ("mean", "sum") if isinstance(by, str) else not isinstance(by, bool) and 0 < by < math.inf
        if not known:
            raise ValueError(f"reduce: expected 'mean', 'sum' or a positive number to divide the sum by, got {by!r}")
        return cls(by, None if over is None else frozenset(over))

    def includes(self, axis: str) -> bool:
        """Return whether gradients are reduced over this mesh axis."""
        return self.over is None or axis in self.over


def count_ranks(axes: Iterable[str], mesh: Mesh) -> int:
    """Return the number of ranks along some axes of a mesh: the product of their sizes."""
    return torch.Size(mesh[name].size for name in axes).numel()


def divide_factors(total: float) -> tuple[float, float]:
    """Return ``(before, after)``, whose product is ``total``: the divisors before and after a sum over ranks.

    The first is a power of two near its square root, so that sums of float16 neither overflow nor vanish: doubled from 1
    on while it divides ``total`` and is below what is left. The rule of ``DefaultState._get_gradient_predivide_factor``.

    >>> [divide_factors(n) for n in (1, 2, 6, 8)]
    [(1.0, 1.0), (2.0, 1.0), (4.0, 1.5), (4.0, 2.0)]
    """
    before = 1.0
    while total % before == 0 and total / before > before:
        before *= 2
    return before, total / before


def choose_division(
    by: ReduceBy, ranks: int, dtype: torch.dtype, local_ranks: int = 1
) -> tuple[Literal["mean", "sum"], float, float]:
    """Return ``(collective, before, after)``: the reduction in this dtype and the divisors before and after it.

    A mean is also over the ``local_ranks`` that hold other parameters, whose parts collectives of the model itself have summed.

    Float16 in two parts, everything else once: ``_get_gradient_divide_factors`` of FSDP2, but that float64 needs no care.
    """
    if by == "sum":
        return "sum", 1.0, 1.0
    if by == "mean" and dtype != torch.float16:
        return "mean", 1.0, float(local_ranks)
    total = float(ranks * local_ranks if by == "mean" else by)
    return ("sum", *divide_factors(total)) if dtype == torch.float16 else ("sum", 1.0, total)
