"""Global parameters: those of which ranks on local axes hold different pieces, and their buffers.

A unit's global buffer has the buffers of all pieces end to end, in the order of the ranks along its local axes, the outermost
first. Without local axes it is the unit's own buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .._core.checks import take_full_params
from .._core.flow import Reduction, count_ranks, scatter_unit
from .._core.layout import flatten_unit, rank_coords, unflatten_unit
from .._core.mesh import Mesh
from .._core.spec import PartitionSpec
from .._core.unit import LocalDims, Unit
from ..collectives._functions import gather_slices, scatter
from .flow import run_stages, unshard_unit
from .route import Route
from .stages import Decode, Stage


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


def scatter_global(buffer: Tensor, unit: Unit, mesh: Mesh, rank: int | None = None) -> Tensor:
    """Return this rank's (or ``rank``'s) slice of a unit's global buffer, equal on all ranks. Inverse of `unshard_global`."""
    at = dict(zip(mesh.names, rank_coords(mesh, rank), strict=True)) if rank is not None else {}
    for name in unit.local_axes:
        buffer = scatter(buffer, mesh[name], rank=at.get(name))
    return scatter_unit(buffer, unit, mesh, rank)
