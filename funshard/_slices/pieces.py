"""The part of each parameter that lies in a slice of its unit, and the padding, which lies in none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.checks import bind_spec, check_buffers
from .._core.flow import scatter_along
from .._core.layout import Params, rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import Unit
from .._spec.codec import check_trainable
from .._wire.host import check_host_resident


def param_views(shards: Mapping[str, Tensor], spec: PartitionSpec, *, rank: int | None = None) -> Params:
    """Return the 1-D piece of every parameter that lies in this rank's slice, possibly empty, as a *view* of the shard.

    For weight decay per parameter, masks and inspection. Writing into a piece writes into the shard; the padding is in none.

    Args:
        shards: By unit key, the slices that `shard` gives.
        spec: Their spec.
        rank: The rank on the mesh (row-major) whose shards these are; this process's by default.

    Returns:
        By parameter name the pieces, with elements in the parameter's memory order (``Param.order``).

    Raises:
        ValueError: For a unit at rest in a codec, which has no pieces.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2)).on({"shard": 2})
        >>> shards = fs.shard({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, spec, rank=1)
        >>> {name: len(piece) for name, piece in fs.param_views(shards, spec, rank=1).items()}
        {'bias': 0, 'weight': 8}
    """
    spec = bind_spec(spec)
    check_trainable((unit for unit in spec if unit.key in shards), "param_views")
    check_buffers(shards, spec, {unit.key: spec.shard_numel(unit) for unit in spec if not unit.is_encoded})
    check_host_resident(shards, spec)
    at = rank_coords(spec.bound_mesh, rank)
    return {
        piece.param.name: shards[unit.key][piece.low : piece.high]
        for unit in spec
        if not unit.is_encoded
        for piece in slice_pieces(unit, spec, at)
    }


class Piece(NamedTuple):
    """The part of a parameter that lies in a slice of its unit, possibly empty."""

    param: Param
    low: int
    """The start in the slice, in elements."""
    high: int
    """The end in the slice."""
    begin: int
    """The start in the parameter, in its memory order."""


def slice_pieces(unit: Unit, spec: PartitionSpec, at: Sequence[int]) -> Iterator[Piece]:
    """Yield the part of each of the unit's parameters in the slice of the rank at these coordinates of the spec's mesh."""
    length = spec.shard_numel(unit)
    begin = rank_along(unit.p.axes, spec.bound_mesh, at)[0] * length
    start = 0
    for size, param in unit.parts:
        if param is not None:
            low, high = (min(max(x - begin, 0), length) for x in (start, start + size))
            yield Piece(param, low, high, min(max(begin - start, 0), size))
        start += size


# --- A slice without its padding: a sum over elements counts those of parameters alone ---


def map_unpadded(f: Callable[..., Tensor], unit: Unit, spec: PartitionSpec, *slices: Tensor) -> Tensor:
    """Apply an elementwise ``f`` to slices of a unit, and leave out the padding, whatever its values are.

    On simulated ranks, which have one shape, the results are zero where there is padding, and so are their derivatives.
    """
    if spec.bound_mesh.is_simulated:
        mask = padding_mask(unit, spec, slices[0].device)
        return torch.where(mask, 0, f(*(torch.where(mask, 1, x) for x in slices)))
    ranges = spec._compute_once(_merged_ranges)[unit.key]
    if len(ranges) != 1:
        return f(*(torch.cat([x[low:high] for low, high in ranges]) for x in slices))
    ((low, high),) = ranges
    return f(*(x if len(x) == high - low else x[low:high] for x in slices))


def zero_padding(piece: Tensor, unit: Unit, spec: PartitionSpec) -> Tensor:
    """Return this rank's slice with its padding set to 0: the same tensor if it has none."""
    if unit.numel == spec.padded_numel(unit):
        return piece
    if spec.bound_mesh.is_simulated:
        return torch.where(padding_mask(unit, spec, piece.device), 0, piece)
    ranges = spec._compute_once(_merged_ranges)[unit.key]
    if sum(high - low for low, high in ranges) == len(piece):
        return piece
    out = torch.zeros_like(piece)
    for low, high in ranges:
        out[low:high] = piece[low:high]
    return out


def padding_mask(unit: Unit, spec: PartitionSpec, device: torch.device) -> Tensor:
    """Return which elements of this rank's slice are padding: bool, as long as the slice."""
    return scatter_values([param is None for _, param in unit.parts], True, unit, spec, device)


def scatter_values(values: Sequence[int], rest: int, unit: Unit, spec: PartitionSpec, device: torch.device) -> Tensor:
    """Return this rank's slice of a buffer that has a value for each part of the unit, and for the rest."""
    sizes = [*(size for size, _ in unit.parts), spec.padded_numel(unit) - unit.span]
    whole = [torch.full((size,), value, device=device) for size, value in zip(sizes, (*values, rest), strict=True)]
    return scatter_along(torch.cat(whole), unit.p.axes, spec.bound_mesh)


def split_by_param(piece: Tensor, unit: Unit, spec: PartitionSpec) -> Iterator[tuple[Param, Tensor]]:
    """Yield each of the unit's parameters with its elements in this rank's slice: 1-D, possibly empty.

    On simulated ranks, which have one shape, they are the whole slice with zeros elsewhere.
    """
    if not spec.bound_mesh.is_simulated:
        for param, (_, low, high) in zip(unit.params, param_ranges(unit, spec), strict=True):
            yield param, piece[low:high]
        return
    owners = scatter_values(range(len(unit.parts)), -1, unit, spec, piece.device)
    for i, (_, param) in enumerate(unit.parts):
        if param is not None:
            yield param, torch.where(owners == i, piece, 0)


def param_ranges(unit: Unit, spec: PartitionSpec) -> tuple[tuple[str, int, int], ...]:
    """Return ``(name, begin, end)`` of each of the unit's parameters in this rank's slice; not of simulated ranks."""
    return spec._compute_once(_ranges_by_unit)[unit.key]


def _ranges_by_unit(spec: PartitionSpec) -> dict[str, tuple[tuple[str, int, int], ...]]:
    pieces = {unit.key: slice_pieces(unit, spec, slice_coords(unit, spec)) for unit in spec}
    return {key: tuple((piece.param.name, piece.low, piece.high) for piece in some) for key, some in pieces.items()}


def _merged_ranges(spec: PartitionSpec) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return by unit key where parameters lie in this rank's slice: neighbours as one range, and at least one range."""
    out: dict[str, tuple[tuple[int, int], ...]] = {}
    for unit in spec:
        ranges: list[tuple[int, int]] = []
        for _, low, high in param_ranges(unit, spec):
            if ranges and ranges[-1][1] == low:
                ranges[-1] = ranges[-1][0], high
            elif high > low:
                ranges.append((low, high))
        out[unit.key] = tuple(ranges) or ((0, 0),)
    return out


def slice_coords(unit: Unit, spec: PartitionSpec, rank: int | None = None) -> tuple[int, ...]:
    """Return this rank's coordinates, or ``rank``'s; zeros for an unsplit unit, because the mesh may not know its rank."""
    return rank_coords(spec.bound_mesh, rank) if unit.p.axes else (0,) * len(spec.bound_mesh.axes)


def check_slice(tensor: Tensor, unit: Unit, spec: PartitionSpec, what: str) -> None:
    """Raise ValueError, naming the unit, unless the tensor has the shape of this rank's slice and is not in a codec."""
    check_trainable([unit], what)
    if tuple(tensor.shape) != (spec.shard_numel(unit),):
        raise ValueError(
            f"unit '{unit.key}': expected this rank's slice of {spec.shard_numel(unit)} elements, got shape "
            f"{list(tensor.shape)}; is it of another spec or another mesh?"
        )
