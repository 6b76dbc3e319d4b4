"""unshard_unit and scatter_unit: a unit's buffer from its slices and back, with the reduction of gradients as transpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .division import ReduceBy, Reduction, choose_division, count_ranks
from .layout import rank_coords
from .mesh import Axis, Mesh, ProcessAxis, Simulated
from .primitive import LinearFunction, apply, linear_map
from .unit import Unit

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
    """Return the tensor, whose gradient is divided."""
    return x if divisor == 1 else LinearFunction.apply(x, None, linear_map(lambda x: x, lambda grad: grad / divisor))


def scatter_unit(buffer: Tensor, unit: Unit, mesh: Mesh, rank: int | None = None) -> Tensor:
    """Return this rank's (or ``rank``'s) slice of a unit's full buffer, equal on all ranks. Inverse of `unshard_unit`."""
    at = {} if rank is None else dict(zip(mesh.names, rank_coords(mesh, rank), strict=True))
    for name in unit.p.axes:
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
