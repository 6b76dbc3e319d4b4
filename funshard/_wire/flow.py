"""Gathers and reductions of a unit's buffer as data flow, differentiable at every order.

Where nothing is cast these are chains of the collectives. With a `Precision`, what is gathered and what is reduced have
dtypes of their own, but between two nodes of autograd a gradient has the dtype of the value. Then one linear map with its own
transpose leads from shards to the buffer, and from the buffer's gradient to that of the shards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import take_full_params
from .._core.flow import REDUCE_MEAN, Reduction, count_ranks
from .._core.layout import flatten_unit, unflatten_unit
from .._core.mesh import Axis, Mesh, Simulated
from .._core.ops import LinearFunction, linear_map
from .._core.spec import PartitionSpec
from .._core.unit import LocalDims, Unit
from .._spec.codec import pack_bytes, storage_codec
from .._spec.precision import precision_of
from ..collectives._functions import gather_slices, reduce_scatter, unvary
from .accumulation import drop_unweighted
from .host import HOST, place_slice
from .route import Route
from .stages import AllGather, Constants, Decode, Replicas, Stage, Transit, from_constants, to_constants


def refuse_reduce_codec_in_graph(spec: PartitionSpec) -> None:
    """Raise RuntimeError where Dynamo traces, or has met a graph break: a codec is no constant of its graphs."""
    for path, p in spec.by_path.items() if _torch.is_in_traced_function() else ():
        if p.precision and (precision := precision_of(p)) and precision.reduce_codec:
            raise RuntimeError(
                f"unit '{path}' has a Precision(reduce_codec=) in a step that is compiled whole: expected the step without "
                "fs.compile and torch.compile (P(compile=True) compiles its modules), or reduce= instead of reduce_codec="
            )


def unshard_unit(
    piece: Tensor,
    unit: Unit,
    mesh: Mesh,
    reduction: Reduction = REDUCE_MEAN,
    *,
    check_order: bool = False,
    casts: bool = True,
    as_stored: bool = False,
) -> Tensor:
    """Return the full buffer of a unit from each rank's slice of it; its gradient is the reduced slice.

    Gathers over the axes of ``unit.p``; over the other axes of the mesh the buffer is replicated. FSDP, HSDP and DDP are this
    one function. In backward the gradient is reduce-scattered first and all-reduced as a slice. Where the precision keeps some
    parameters in a dtype of their own, the buffer is in one that has the values of all: see `split_by_dtype`.

    With ``check_order`` ranks compare which unit they are about to gather, and in derivatives to reduce. With ``casts`` the
    buffer and the reduction have the dtypes of the unit's `Precision`. A buffer ``as_stored``, as of gradients and optimizer
    state, is what was sharded, whatever options compute with.
    """
    route = Route.for_unit(unit, mesh, reduction, piece.dtype, casts=casts)
    if not unit.numel:  # nothing to send
        return piece.new_empty(0, dtype=route.dtypes.param, device=route.device)
    return run_stages(piece, route.choose(as_stored), mesh, unit.key if check_order else None)


def weigh_grad(buffer: Tensor, weight: Tensor | None) -> Tensor:
    """Return a gathered buffer, or a view of it, to whose gradient `drop_unweighted` is applied."""
    return buffer if weight is None else _weigh_grad(buffer, weight)


@_torch.allow_in_graph
def _weigh_grad(buffer: Tensor, weight: Tensor) -> Tensor:
    return LinearFunction.apply(buffer, None, linear_map(lambda x, _: x, drop_unweighted), weight)


def store_slice(piece: Tensor, unit: Unit, mesh: Mesh) -> Tensor:
    """Return a slice as `shard` gives it, where it is kept: itself, or its bytes in the codec that it is stored in.

    Raise RuntimeError for bytes of a slice that has a derivative.
    """
    codec = storage_codec(unit)
    if codec is None:
        return place_slice(piece, unit, mesh)
    if _torch.has_derivative(piece):
        raise RuntimeError(
            f"unit '{unit.key}' is at rest in {codec}, and bytes have no derivative: expected full parameters "
            "without one; detach them, or leave at_rest= out of its P"
        )
    return place_slice(pack_bytes(codec._encode_slice(piece.detach().to(unit.dtype)))[0], unit, mesh)


def reduce_unit(
    buffer: Tensor,
    unit: Unit,
    mesh: Mesh,
    reduction: Reduction = REDUCE_MEAN,
    dtype: torch.dtype | None = None,
    *,
    check_order: bool = False,
    casts: bool = True,
    as_stored: bool = False,
) -> Tensor:
    """Return this rank's slice of the reduced full buffers of a unit, in this dtype. The transpose of `unshard_unit`."""
    dtype = dtype or buffer.dtype
    route = Route.for_unit(unit, mesh, reduction, dtype, casts=casts)
    if not unit.numel:
        return buffer.new_empty(0, dtype=dtype, device=route.device and HOST)
    return run_stages(buffer, route.choose(as_stored), mesh, unit.key if check_order else None, gathers=False)


def reduce_slice(grad: Tensor, unit: Unit, mesh: Mesh, reduction: Reduction, dtype: torch.dtype | None = None) -> Tensor:
    """Reduce the gradient of a unit's slice, as a slice, over axes that do not split it: there it is as of a whole unit."""
    whole = dataclasses.replace(unit, p=dataclasses.replace(unit.p, axis=None, reshard=True))
    return reduce_unit(grad, whole, mesh, reduction, dtype, as_stored=True)


def reduce_along(
    buffer: Tensor, split: Sequence[Axis], rest: Sequence[Axis], op: Literal["mean", "sum"], label: str = ""
) -> Tensor:
    """Reduce a buffer: to a slice along the split axes, and as that slice along the rest."""
    for axis in split:
        buffer = reduce_scatter(buffer, axis, reduce=op, label=label)
    for axis in rest:
        buffer = unvary(buffer, axis, reduce=op, label=label)
    return buffer


def run_stages(
    x: Tensor, stages: tuple[Stage, ...], mesh: Mesh, compared: str | None = None, *, gathers: bool = True
) -> Tensor:
    """Return what leaves the stages, of a slice or, back through them, of a buffer's gradient; differentiable.

    With the key of the unit that is ``compared``, ranks compare their collectives.
    """
    is_compared = compared is not None and not _torch.is_in_graph()  # there, nothing is sent yet
    label = f"unit '{compared}'" if is_compared else ""
    over = [(stage.axis, mesh[stage.axis]) for stage in stages if isinstance(stage, AllGather | Replicas)]
    simulated = {name: axis.rank for name, axis in over if isinstance(axis, Simulated)}
    transit, value = Transit(label, simulated), None
    has_derivative = x.is_floating_point() or x.is_complex()  # as bytes at rest in a codec have not
    if not has_derivative or all(type(stage) in (AllGather, Replicas) for stage in stages):
        return _fold(stages, x, transit, gathers=gathers)
    linear = [stage.linear() for stage in stages]
    if any(one is not stage for one, stage in zip(linear, stages, strict=True)):
        value = _fold(stages, x.detach(), transit, gathers=True) if gathers else None
        stages = tuple([stage for stage in linear if stage is not None])  # a list: Dynamo of torch 2.11 runs no generator here
    ranks = tuple(simulated.values())
    if _torch.is_in_graph():
        return _flow_in_graph(x, value, to_constants(stages), tuple(simulated), ranks, gathers)
    return _flow_as_node(x, value, stages, tuple(simulated), ranks, label, gathers)


def _fold(stages: Sequence[Stage], x: Tensor, transit: Transit, *, gathers: bool) -> Tensor:
    """Return what leaves the stages, of a value or, back through them, of a gradient."""
    for stage in stages if gathers else reversed(stages):
        x = stage.apply(x, transit) if gathers else stage.transpose(x, transit)
    return x


def _flow_as_node(
    x: Tensor,
    value: Tensor | None,
    stages: Sequence[Stage],
    axes: Sequence[str],
    ranks: Sequence[Tensor],
    label: str,
    gathers: bool,
) -> Tensor:
    """Run linear stages as one node of autograd: between two, a gradient would be cast to the dtype of the value."""

    def fold(x: Tensor, *ranks: Tensor, gathers: bool) -> Tensor:
        return _fold(stages, x, Transit(label, dict(zip(axes, ranks, strict=True))), gathers=gathers)

    there, back = (functools.partial(fold, gathers=way) for way in (gathers, not gathers))
    return LinearFunction.apply(x, value, linear_map(there, back), *ranks)


@_torch.allow_in_graph
def _flow_in_graph(
    x: Tensor, value: Tensor | None, stages: Constants, axes: tuple[str, ...], ranks: tuple[Tensor, ...], gathers: bool
) -> Tensor:
    """Do as `_flow_as_node`, as one node for Dynamo, as in _core.ops."""
    return _flow_as_node(x, value, from_constants(stages), axes, ranks, "", gathers)


# --- Global parameters: those of which ranks on local axes hold different pieces, and their buffers ---
#
# A unit's global buffer has the buffers of all pieces end to end, in the order of the ranks along its local axes, the outermost
# first. Without local axes it is the unit's own buffer.


def flatten_global(params: Mapping[str, Tensor], unit: Unit, spec: PartitionSpec) -> Tensor:
    """Return the global buffer of a unit from the global parameters."""
    padded = spec.padded_numel(unit)
    if not unit.local_axes:
        return flatten_unit(params, unit, padded)
    sizes = dict(spec.bound_mesh.sizes)
    tensors = take_full_params(params, unit, sizes)
    pieces = zip(*(split_pieces(x, param.local, sizes) for x, param in zip(tensors, unit.params, strict=True)), strict=True)
    names = [param.name for param in unit.params]
    return torch.cat([flatten_unit(dict(zip(names, of_rank, strict=True)), unit, padded) for of_rank in pieces])


def split_pieces(whole: Tensor, local: LocalDims, sizes: Mapping[str, int]) -> list[Tensor]:
    """Return a global tensor's pieces in rank order, the outermost local axis first. Inverse of `join_pieces`."""
    pieces = [whole]
    for axis, dim in local:
        pieces = [part for piece in pieces for part in piece.chunk(sizes[axis], dim)]
    return pieces


def unflatten_global(buffer: Tensor, unit: Unit, mesh: Mesh) -> list[Tensor]:
    """Return the global parameters of a unit from its global buffer: views where it has no local axes."""
    if not unit.local_axes:
        return unflatten_unit(buffer, unit)
    sizes, pieces = dict(mesh.sizes), split_global(buffer, unit, mesh)
    return [join_pieces(views, param.local, sizes) for views, param in zip(pieces, unit.params, strict=True)]


def split_global(buffer: Tensor, unit: Unit, mesh: Mesh) -> list[list[Tensor]]:
    """Return views of each parameter's pieces in a unit's global buffer. `join_pieces` joins them to the parameter."""
    rows = buffer.view(count_ranks(unit.local_axes, mesh), -1) if unit.local_axes else [buffer]
    return [list(pieces) for pieces in zip(*(unflatten_unit(row, unit) for row in rows), strict=True)]


def join_pieces(pieces: list[Tensor], local: LocalDims, sizes: Mapping[str, int]) -> Tensor:
    """Return the whole tensor from its pieces in rank order, the outermost local axis first. Inverse of `split_pieces`."""
    for axis, dim in reversed(local):
        size = sizes[axis]
        pieces = [torch.cat(pieces[i : i + size], dim) for i in range(0, len(pieces), size)]
    return pieces[0]


def unshard_global(
    piece: Tensor, unit: Unit, mesh: Mesh, reduction: Reduction, *, check_order: bool = False, as_stored: bool = False
) -> Tensor:
    """Return the global buffer of a unit from each rank's slice, as `unshard_unit`. Its gradient is reduced over all ranks.

    Over local axes that is a sum, which the route's divisor makes the mean.
    """
    buffer = unshard_unit(piece, unit, mesh, reduction, check_order=check_order, casts=False, as_stored=as_stored)
    for name in reversed(unit.local_axes):
        buffer = gather_slices(buffer, mesh[name], reduce="sum", label=f"unit '{unit.key}'" if check_order else "")
    return buffer


def decode_global(raw: Tensor, unit: Unit, mesh: Mesh) -> Tensor:
    """Return the global buffer of a unit, as stored, from the joined slices of all ranks, which may be bytes at rest."""
    stages = Route.for_unit(unit, mesh, Reduction(), raw.dtype, casts=False).stages if unit.at_rest else ()
    return _apply_by_piece(tuple(stage for stage in stages if isinstance(stage, Decode)), raw, unit, mesh)


def apply_options(buffer: Tensor, unit: Unit, mesh: Mesh) -> Tensor:
    """Return what is computed with, from the global buffer of a unit's parameters as they are stored; differentiable."""
    return _apply_by_piece(Route.for_unit(unit, mesh, Reduction(), buffer.dtype, casts=False).options, buffer, unit, mesh)


def _apply_by_piece(stages: tuple[Stage, ...], buffer: Tensor, unit: Unit, mesh: Mesh) -> Tensor:
    """Return a global buffer after these stages of each rank along its local axes."""
    if not stages:
        return buffer
    rows = [run_stages(row, stages, mesh) for row in buffer.view(count_ranks(unit.local_axes, mesh), -1)]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def transpose_options(grads: list[Tensor], unit: Unit, mesh: Mesh) -> list[Tensor]:
    """Return the gradients of what was sharded of a unit, full, from those of the full parameters that `unshard` gives."""
    stages = Route.for_unit(unit, mesh, Reduction(), unit.dtype, casts=False).options
    if not stages:
        return grads
    named = {param.name: grad for param, grad in zip(unit.params, grads, strict=True)}
    buffer = flatten_unit(named, unit, unit.padded_numel(count_ranks(unit.p.axes, mesh)))
    return unflatten_unit(run_stages(buffer, stages, mesh, gathers=False), unit)
