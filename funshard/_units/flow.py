"""Gathers and reductions of a unit's buffer as data flow, differentiable at every order.

Where nothing is cast these are chains of the collectives. With a `Precision`, what is gathered and what is reduced have
dtypes of their own, but between two nodes of autograd a gradient has the dtype of the value. Then one linear map with its own
transpose leads from shards to the buffer, and from the buffer's gradient to that of the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._spec.checks import HOST
from .._spec.division import ReduceBy, Reduction
from .._spec.precision import Codec, Precision, pack_bytes
from .._spec.unit import Unit
from ..collectives._functions import gather_slices, reduce_scatter, scatter, unvary, vary
from ..collectives._mesh import Axis, Mesh, ProcessAxis, Simulated
from ..collectives._primitive import LinearFunction, linear_map
from .accumulation import drop_unweighted
from .encoded_reduction import reduce_encoded, refuse_compiled_step
from .host import move
from .layout import rank_coords
from .mixed_layout import MixedLayout, Run
from .route import Route

__all__ = ["REDUCE_MEAN", "encode_at_rest", "gather_unit", "reduce_along", "reduce_unit", "resolve_reduction", "scatter_unit"]
__all__ += ["weigh_grad"]

REDUCE_MEAN = Reduction()


def resolve_reduction(by: ReduceBy, axes: Iterable[str] | None, mesh: Mesh, units: Iterable[Unit]) -> Reduction:
    """Return the reduction of these units' gradients: by mean, sum or a divisor, over these mesh axes or all.

    Raises:
        ValueError: For an unknown axis and, naming the unit, without an axis that it is split over.
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


def scatter_unit(buffer: Tensor, unit: Unit, mesh: Mesh, rank: int | None = None) -> Tensor:
    """Return this rank's (or ``rank``'s) slice of a unit's full buffer, equal on all ranks. Inverse of `gather_unit`."""
    at = {} if rank is None else dict(zip(mesh.names, rank_coords(mesh, rank), strict=True))
    for name in unit.p.axes:
        buffer = scatter(buffer, mesh[name], rank=at.get(name))
    return buffer


def gather_unit(
    piece: Tensor,
    unit: Unit,
    mesh: Mesh,
    reduction: Reduction = REDUCE_MEAN,
    precision: Precision | None = None,
    *,
    check_order: bool = False,
) -> Tensor:
    """Return the full buffer of a unit from each rank's slice of it; its gradient is the reduced slice.

    Gathers over the axes of ``unit.p``; over the other axes of the mesh the buffer is replicated. FSDP, HSDP and DDP are this
    one function. In backward the gradient is reduce-scattered first and all-reduced as a slice. Where the precision keeps some
    parameters in a dtype of their own, the buffer is in one that has the values of all: see `split_by_dtype`.

    Args:
        piece: This rank's slice.
        unit: The unit.
        mesh: The mesh that it is sharded on.
        reduction: How its gradient is reduced.
        precision: The dtypes of the buffer and of the reduction.
        check_order: Whether ranks compare which unit they are about to gather, and in derivatives to reduce: RuntimeError where
            they differ.
    """
    route = Route.for_unit(unit, mesh, reduction, precision, piece.dtype)
    label = f"unit '{unit.key}'" if check_order and not torch.compiler.is_compiling() else ""  # nothing is sent there yet
    if not unit.numel:  # nothing to send
        return piece.new_empty(0, dtype=route.dtypes.param, device=route.device)
    split, rest = ([mesh[name] for name in names] for names in (route.split_axes, route.replica_axes))
    if route.form:
        piece = move(piece, route.device, piece.dtype)
        return route.decode(_gather_along(piece, split, label) if split else piece.clone(), route.form)
    if route.codec:
        value = _gather_encoded(route.codec, move(piece.detach(), route.device, piece.dtype), split, route.dtypes.param, label)
        return _apply_route(piece, value, *_constants_of_route(route, mesh, label), True)
    if not route.has_only_collectives:
        return _apply_route(piece, None, *_constants_of_route(route, mesh, label), True)
    for axis in reversed(rest):
        piece = vary(piece, axis, reduce=route.reduce_op, label=label)
    for axis in reversed(split):
        piece = gather_slices(piece, axis, reduce=route.reduce_op, label=label)
    return piece


def weigh_grad(buffer: Tensor, weight: Tensor | None) -> Tensor:
    """Return a gathered buffer, or a view of it, to whose gradient `drop_unweighted` is applied."""
    return buffer if weight is None else _weigh_grad(buffer, weight)


@_torch.allow_in_graph
def _weigh_grad(buffer: Tensor, weight: Tensor) -> Tensor:
    return LinearFunction.apply(buffer, None, linear_map(lambda x, _: x, drop_unweighted), weight)


def encode_at_rest(piece: Tensor, unit: Unit) -> Tensor:
    """Return a slice as `shard` gives it: itself, or its bytes in the codec. Raise RuntimeError if it has a derivative."""
    if not unit.at_rest:
        return piece
    if _torch.is_tracked(piece):
        raise RuntimeError(
            f"unit '{unit.key}' is at rest in {unit.at_rest}, and bytes have no derivative: expected full parameters "
            "without one; detach them, or leave at_rest= out of its P"
        )
    return pack_bytes(unit.at_rest._encode_slice(piece.detach().to(unit.dtype)))[0]


def reduce_unit(
    buffer: Tensor,
    unit: Unit,
    mesh: Mesh,
    reduction: Reduction = REDUCE_MEAN,
    precision: Precision | None = None,
    dtype: torch.dtype | None = None,
    *,
    check_order: bool = False,
) -> Tensor:
    """Return this rank's slice of the reduced full buffers of a unit, in this dtype. The transpose of `gather_unit`."""
    dtype = dtype or buffer.dtype
    label = f"unit '{unit.key}'" if check_order and not torch.compiler.is_compiling() else ""  # nothing is sent there yet
    route = Route.for_unit(unit, mesh, reduction, precision, dtype)
    if not unit.numel:
        return buffer.new_empty(0, dtype=dtype, device=route.device and HOST)
    if not route.has_only_collectives:
        return _apply_route(buffer, None, *_constants_of_route(route, mesh, label), False)
    split, rest = ([mesh[name] for name in names] for names in (route.split_axes, route.replica_axes))
    return reduce_along(buffer, split, rest, route.reduce_op, label)


def reduce_along(
    buffer: Tensor, split: Sequence[Axis], rest: Sequence[Axis], op: Literal["mean", "sum"], label: str = ""
) -> Tensor:
    """Reduce a buffer: to a slice along the split axes, and as that slice along the rest."""
    for axis in split:
        buffer = reduce_scatter(buffer, axis, reduce=op, label=label)
    for axis in rest:
        buffer = unvary(buffer, axis, reduce=op, label=label)
    return buffer


class _RouteConstants(NamedTuple):
    """A route on a mesh as constants, and the ranks that vmap simulates, in a form that Dynamo can record."""

    ranks: tuple[Tensor, ...]
    split: tuple[tuple[int, str | None], ...]
    """The sizes of the split axes and the names of their groups, None for simulated ones."""
    replicas: tuple[tuple[int, str | None], ...]
    op: Literal["mean", "sum"]
    factors: tuple[float, float]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """The dtypes in which parameters are gathered, gradients reduced, and shards kept."""
    layout: tuple[tuple[Run, ...], int, int | None] | None
    """The layout of a buffer with parameters of several dtypes."""
    codec: Codec | None
    """The codec of the reduction, which no graph of Dynamo's has."""
    device: torch.device | None
    """The device to which host-resident shards are copied."""
    label: str
    """The label of its collectives."""


def _constants_of_route(route: Route, mesh: Mesh, label: str) -> _RouteConstants:
    """Return a route as constants for Dynamo, and the ranks of simulated axes, which are tensors."""
    axes = [[mesh[name] for name in names] for names in (route.split_axes, route.replica_axes)]
    ranks = tuple(axis.rank for some in axes for axis in some if isinstance(axis, Simulated))
    split, rest = (tuple((a.size, a.name if isinstance(a, ProcessAxis) else None) for a in some) for some in axes)
    dtypes = route.dtypes.param, route.dtypes.reduce, route.shard_dtype
    layout = (route.layout.runs, route.layout.num_slices, route.layout.index) if route.layout else None
    factors = route.divide_before, route.divide_after
    if route.reduce_codec:
        refuse_compiled_step(route.reduce_codec)
    return _RouteConstants(
        ranks, split, rest, route.reduce_op, factors, dtypes, layout, route.reduce_codec, route.device, label
    )


def _axes_from_constants(
    ranks: Sequence[Tensor], split: Sequence[tuple[int, str | None]], rest: Sequence[tuple[int, str | None]]
) -> tuple[list[Axis], list[Axis]]:
    """Return the axes that split a unit, and the others, from the constants of a route."""
    values = iter(ranks)

    def axis(size: int, name: str | None) -> Axis:
        return Simulated(size, next(values)) if name is None else ProcessAxis(size, None, name)

    return [axis(*some) for some in split], [axis(*some) for some in rest]


def _gather_along(piece: Tensor, split: Sequence[Axis], label: str) -> Tensor:
    """Gather a piece along the axes that split it, the innermost first."""
    for axis in reversed(split):
        piece = gather_slices(piece, axis, label=label)
    return piece


def _gather_encoded(codec: Codec, piece: Tensor, split: Sequence[Axis], dtype: torch.dtype, label: str) -> Tensor:
    """Gather the slices of all ranks, each encoded where it is and decoded everywhere."""
    rows = [_gather_along(x[None], split, label) for x in codec._encode_slice(piece)]
    if all(axis.size == 1 for axis in split):  # nothing was gathered, and decode may give what it is given
        rows = [x.clone() for x in rows]
    return codec._decode_slices(rows, len(piece), dtype)


def _gather_mixed(piece: Tensor, split: Sequence[Axis], layout: MixedLayout, label: str) -> Tensor:
    """Gather a piece of a unit with parameters of several dtypes as its wide buffer: by bytes where ranks are processes."""
    if split and layout.index is not None:
        return layout.widen(_gather_along(layout.encode(piece), split, label), piece.shape)
    return _gather_along(piece, split, label).to(layout.wide)  # what reads it casts


@_torch.allow_in_graph
def _apply_route(
    x: Tensor,
    value: Tensor | None,
    ranks: tuple[Tensor, ...],
    split: tuple[tuple[int, str | None], ...],
    rest: tuple[tuple[int, str | None], ...],
    op: Literal["mean", "sum"],
    factors: tuple[float, float],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    layout: tuple[tuple[Run, ...], int, int | None] | None,
    codec: Codec | None,
    device: torch.device | None,
    label: str,
    gathers: bool,
) -> Tensor:
    """Gather a slice along a route, or reduce a buffer: one node for Dynamo, as in collectives._primitive."""
    param_dtype, reduce_dtype, shard_dtype = dtypes
    mixed = None if layout is None else MixedLayout(*layout)

    def gather(piece: Tensor, *ranks: Tensor) -> Tensor:
        axes = _axes_from_constants(ranks, split, rest)[0]
        if mixed is not None:
            return _gather_mixed(move(piece, device, piece.dtype), axes, mixed, label)
        return _gather_along(move(piece, device, param_dtype), axes, label)

    def reduce_grad(grad: Tensor, *ranks: Tensor) -> Tensor:
        before, after = factors
        grad = move(grad, device, reduce_dtype)  # which is there, but for a slice that is to be reduced over more axes
        sliced, other = _axes_from_constants(ranks, split, rest)
        grad = grad / before if before != 1 else grad
        if codec is not None:
            grad, sliced = reduce_encoded(grad, codec, sliced[0], op, label), []
        grad = reduce_along(grad, sliced, other, op, label)
        return move(grad / after if after != 1 else grad, device and HOST, shard_dtype)

    return LinearFunction.apply(x, value, linear_map(*((gather, reduce_grad) if gathers else (reduce_grad, gather))), *ranks)
