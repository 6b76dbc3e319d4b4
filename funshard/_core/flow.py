"""unshard_unit and scatter_along: a unit's buffer from its slices and back, with the reduction of gradients as transpose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .layout import rank_coords
from .mesh import Axis, Mesh, ProcessAxis, Simulated
from .ops import LinearFunction, apply, linear_map
from .unit import Unit

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


REDUCE_MEAN = Reduction()


class UnitAxes(NamedTuple):
    """The mesh axes of a unit with more than one rank, and how gradients are reduced over them."""

    split: tuple[str, ...]
    """The axes of its slices, outermost first: gathered over from the last one on, reduced over from the first one on."""
    replicas: tuple[str, ...]
    """The other axes that its gradients are reduced over, in that order, as slices."""
    op: Literal["mean", "sum"]
    before: float
    """The divisor of gradients before they are reduced."""
    after: float
    """The divisor after that."""

    @classmethod
    def find(cls, unit: Unit, mesh: Mesh, reduction: Reduction, dtype: torch.dtype) -> UnitAxes:
        """Return the axes of a unit whose gradients are reduced in this dtype. A unit without elements has none."""
        sizes = {name: axis.size for name, axis in mesh.axes if axis.size > 1 and unit.numel}
        split = tuple(name for name in unit.p.axes if name in sizes)
        included = tuple(name for name in reversed(sizes) if reduction.includes(name))
        replicas = tuple(name for name in included if name not in unit.distinct_axes)
        local_ranks = count_ranks((name for name in unit.local_axes if name in included), mesh)
        by = reduction.by if unit.numel else "sum"
        return cls(split, replicas, *choose_division(by, count_ranks((*split, *replicas), mesh), dtype, local_ranks))


def resolve_reduction(by: ReduceBy, axes: Iterable[str] | None, mesh: Mesh, units: Iterable[Unit]) -> Reduction:
    """Return the reduction of these units' gradients: by mean, sum or a divisor, over these mesh axes or all.

    Raises ValueError for an unknown axis and, naming the unit, without an axis that it is split over.
    """
    reduction = Reduction.make(by, None if axes is None else mesh.select(axes))
    if reduction.over is None:
        return reduction
    for unit in units:
        if missing := [axis for axis in unit.p.axes if not reduction.includes(axis)]:
            raise ValueError(
                f"unit '{unit.key}' is split over axis '{missing[0]}': expected its gradients to be reduced over it, too, "
                f"got axes {sorted(reduction.over or ())}"
            )
    return reduction


def unshard_unit(piece: Tensor, unit: Unit, mesh: Mesh, reduction: Reduction = REDUCE_MEAN) -> Tensor:
    """Return the full buffer of a unit from each rank's slice of it; its gradient is the reduced slice.

    Gathers over the axes of ``unit.p``; over the other axes of the mesh the buffer is replicated. FSDP, HSDP and DDP are this
    one function. In backward the gradient is reduce-scattered first and all-reduced as a slice.
    """
    axes = UnitAxes.find(unit, mesh, reduction, piece.dtype)
    x = _divide_grad(piece, axes.after)
    for name in reversed(axes.replicas):
        x = apply(f"vary_{axes.op}", x, mesh[name])
    for name in reversed(axes.split):
        x = apply(f"gather_{axes.op}", x, mesh[name])
    return _divide_grad(x, axes.before)


def _divide_grad(x: Tensor, divisor: float) -> Tensor:
    return x if divisor == 1 else LinearFunction.apply(x, None, linear_map(lambda x: x, lambda grad: grad / divisor))


def scatter_along(buffer: Tensor, axes: Iterable[str], mesh: Mesh, rank: int | None = None) -> Tensor:
    """Return this rank's (or ``rank``'s) slice, along axes from the outermost on, of a buffer that is equal on all ranks."""
    at = {} if rank is None else dict(zip(mesh.names, rank_coords(mesh, rank), strict=True))
    for name in axes:
        buffer = take_slice(buffer, mesh[name], at.get(name))
    return buffer


def take_slice(x: Tensor, axis: Axis, rank: int | None = None) -> Tensor:
    """Return a rank's slice of a tensor that is the same on all ranks, copied; by default this rank's."""
    if isinstance(axis, Simulated) and rank is None:
        return apply("slice", x, axis)
    here = rank if rank is not None or isinstance(axis, Simulated) else axis.rank
    if here is None or not 0 <= here < axis.size:
        raise ValueError(f"scatter: expected a rank in 0..{axis.size - 1}, got {here}; give rank= or bind a DeviceMesh")
    if isinstance(axis, ProcessAxis) and axis.name and rank is None and axis.size > 1:
        return apply("slice", x, axis, here)
    n = len(x) // axis.size
    return x.narrow(0, here * n, n).clone()
