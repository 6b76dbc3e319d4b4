"""flatten, unflatten, param_views: where each parameter lies in its unit's buffer. Arithmetic, no communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .checks import bind_spec, check_buffers, check_full, take_full_params
from .mesh import Mesh, ProcessAxis
from .spec import PartitionSpec
from .tree import Param
from .unit import Unit

Params = dict[str, Tensor]
"""Tensors by unit key when sharded or flattened, by parameter name when full."""


def flatten(params: Mapping[str, Tensor], spec: PartitionSpec) -> Params:
    """Return one padded 1-D buffer per unit: its parameters end to end, each in its memory order. Inverse of `unflatten`.

    Args:
        params: The full parameters, under any of their names.
        spec: Their spec.

    Returns:
        By unit key, buffers of ``spec.padded_numel(unit)`` elements in the tensors' own dtype, with zeros for padding. They are
        copies; differentiable.

    Raises:
        ValueError: Naming the parameter, for one that is missing, unknown, of another shape, or of another dtype than the rest
            of its unit.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.flatten({"weight": torch.arange(8.0).view(2, 4)}, spec)
        {'': tensor([0., 1., 2., 3., 4., 5., 6., 7.])}
    """
    spec = bind_spec(spec)
    check_full(params, spec)
    return {unit.key: flatten_unit(params, unit, spec.padded_numel(unit)) for unit in spec}


def flatten_unit(params: Mapping[str, Tensor], unit: Unit, padded: int) -> Tensor:
    """Return the buffer of one unit, ``padded`` elements long."""
    tensors = take_full_params(params, unit)
    return concat_padded(
        [to_memory_order(t, param).reshape(-1) for t, param in zip(tensors, unit.params, strict=True)], unit, padded
    )


def concat_padded(pieces: Sequence[Tensor], unit: Unit, padded: int) -> Tensor:
    """Return the buffer of one unit from a piece for each parameter, with zeros between them."""
    zeros = pieces[0].new_zeros(longest_padding(unit, padded) or 1)  # torch makes no float4 tensor of 0 zeros
    return torch.cat(insert_padding(pieces, unit, padded, zeros))


def insert_padding(pieces: Iterable[Tensor], unit: Unit, padded: int, zeros: Tensor) -> list[Tensor]:
    """Return the tensors to concatenate for a unit's buffer: a piece for each parameter, and parts of ``zeros`` between."""
    rest = iter(pieces)
    out = [zeros[:size] if param is None else next(rest) for size, param in unit.parts]
    return [*out, zeros[: padded - unit.span]] if padded > unit.span else out


def longest_padding(unit: Unit, padded: int) -> int:
    """Return the elements of the longest padding in a unit's buffer."""
    return max(padded - unit.span, *(size for size, param in unit.parts if param is None), 0)


def to_memory_order(tensor: Tensor, param: Param) -> Tensor:
    """Return a parameter, or its gradient, with its elements in the order of the buffer."""
    return tensor.permute(param.order) if param.permuted else tensor


def unflatten(buffers: Mapping[str, Tensor], spec: PartitionSpec) -> Params:
    """Return the full parameters, by name, as *views* of the units' buffers. Inverse of `flatten`.

    Args:
        buffers: By unit key, the buffers of ``spec.padded_numel(unit)`` elements.
        spec: Their spec.

    Returns:
        The parameters, in the model's order.

    Raises:
        ValueError: Naming the unit, for one that is missing, unknown or of another length.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.unflatten({"": torch.arange(8.0)}, spec)
        {'weight': tensor([[0., 1., 2., 3.],
                [4., 5., 6., 7.]])}
    """
    spec = bind_spec(spec)
    check_buffers(buffers, spec, {unit.key: spec.padded_numel(unit) for unit in spec})
    full = {
        param.name: view
        for unit in spec
        for param, view in zip(unit.params, unflatten_unit(buffers[unit.key], unit), strict=True)
    }
    return spec._to_model_order(full)


def unflatten_unit(buffer: Tensor, unit: Unit) -> list[Tensor]:
    """Return the unit's parameters, in the order of ``unit.params``, as views of its buffer (padded or not).

    One split: a slice per parameter would make as many full-size zero buffers in the backward pass.
    """
    pieces = buffer.split_with_sizes([*[size for size, _ in unit.parts], buffer.shape[0] - unit.span])
    return [
        piece if len(param.shape) == 1 else from_memory_order(piece, param)
        for piece, (_, param) in zip(pieces, unit.parts, strict=False)
        if param is not None
    ]


def from_memory_order(piece: Tensor, param: Param) -> Tensor:
    """Return a parameter from its elements in the order of the buffer, as a view. Inverse of `to_memory_order`."""
    if not param.permuted:
        return piece.view(param.shape)
    return piece.view([param.shape[d] for d in param.order]).permute([param.order.index(d) for d in range(len(param.order))])


def rank_along(axes: Iterable[str], mesh: Mesh, coordinates: Sequence[int]) -> tuple[int, int]:
    """Return the number of a rank among those along some axes, the first one outermost, and how many there are."""
    rank, ranks = 0, 1
    for name in axes:
        i = mesh.names.index(name)
        size = mesh.axes[i][1].size
        rank, ranks = rank * size + coordinates[i], ranks * size
    return rank, ranks


def rank_coords(mesh: Mesh, rank: int | None) -> tuple[int, ...]:
    """Return the mesh coordinates of a rank counted row by row; of this process for None.

    Raises:
        ValueError: Where there is no such rank, or where it is not known which rank this is.
    """
    sizes = [axis.size for _, axis in mesh.axes]
    ranks = torch.Size(sizes).numel()
    if rank is None:
        own = tuple(axis.rank for _, axis in mesh.axes if isinstance(axis, ProcessAxis) and axis.rank is not None)
        if len(own) < len(sizes):
            raise ValueError(f"a mesh of sizes {sizes} does not know its rank: expected rank=0..{ranks - 1}")
        return own
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not on the mesh of sizes {sizes}: expected 0..{ranks - 1}")
    out: list[int] = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        out.append(at)
    return tuple(reversed(out))
