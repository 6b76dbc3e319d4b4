"""param_views: the part of each parameter that lies in a slice of its unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from .._core.checks import bind_spec, check_buffers
from .._core.layout import Params, rank_along, rank_coords
from .._core.mesh import Mesh
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import Unit
from .._spec.precision import check_trainable
from .._wire.host import check_host_resident

__all__ = ["Piece", "param_views", "slice_index", "slice_pieces"]


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
    check_buffers(shards, spec, {unit.key: spec.shard_numel(unit) for unit in spec if not unit.at_rest})
    check_host_resident(shards, spec)
    at = rank_coords(spec.bound_mesh, rank)
    return {
        piece.param.name: shards[unit.key][piece.low : piece.high]
        for unit in spec
        if not unit.at_rest
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
    begin = slice_index(unit, spec.bound_mesh, at) * length
    start = 0
    for size, param in unit.parts:
        if param is not None:
            low, high = (min(max(x - begin, 0), length) for x in (start, start + size))
            yield Piece(param, low, high, min(max(begin - start, 0), size))
        start += size


def slice_index(unit: Unit, mesh: Mesh, coordinates: Sequence[int]) -> int:
    """Return which slice of the unit the rank at these mesh coordinates owns."""
    return rank_along(unit.p.axes, mesh, coordinates)[0]
