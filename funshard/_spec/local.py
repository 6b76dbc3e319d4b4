"""Local axes: mesh axes over which each rank holds another piece of a larger parameter, and the tensors of these pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from .._core.tree import Param
from .._core.unit import LocalDims, Unit, whole_shape

__all__ = ["check_axes_are_given", "describe_pieces", "distinct_axes", "piece_offsets", "stack_dims"]


def check_axes_are_given(axes: object, units: Iterable[Unit], what: str) -> None:
    """Raise ValueError where ``axes`` is None, for all, and a unit is local over one: there ranks may have other channels."""
    if axes is None and (unit := next((unit for unit in units if unit.local_axes), None)) is not None:
        raise ValueError(
            f"{what}: unit '{unit.key}' is local over axis '{unit.local_axes[0]}', where ranks may have values of other "
            "channels: expected axes=, the mesh axes over which all ranks have the same channels, got None"
        )


def stack_dims(param: Param, shape: Sequence[int], sizes: Mapping[str, int]) -> LocalDims:
    """Return ``(axis, dim)`` of the local axes that split the stack of matrices with which a tensor of this shape begins.

    Such as [experts, n, m] over an axis of experts: each rank has matrices that are whole. Axes of one rank do not count.
    """
    stacked = len(param.shape) - 2
    return tuple(
        (axis, dim)
        for axis, dim in param.local
        if dim < stacked and sizes[axis] > 1 and tuple(shape[: dim + 1]) == param.shape[: dim + 1]
    )


def distinct_axes(owner: Unit | Param, tensor: Tensor, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes over which ranks hold different elements of a tensor: a unit's slice, or a tensor by parameter name.

    By name, a tensor of the shape of a rank's piece differs over the parameter's local axes, and a whole one over none.

    Raises ValueError, naming the parameter, for a local parameter's tensor of neither shape.
    """
    if not isinstance(owner, Param):
        return owner.distinct_axes
    if not owner.local or tuple(tensor.shape) == (whole := whole_shape(owner, sizes)):
        return ()
    if tuple(tensor.shape) != owner.shape:
        raise ValueError(
            f"parameter '{owner.name}': expected the whole, {list(whole)}, or this rank's piece of it, {list(owner.shape)}, "
            f"got {list(tensor.shape)}; it is local over {dict(owner.local)}"
        )
    return tuple(axis for axis, _ in owner.local)


def piece_offsets(shape: Sequence[int], local: LocalDims, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, ...]:
    """Return the offsets, in the whole tensor, of the piece of this shape that the rank at these coordinates has."""
    index = [0] * len(shape)
    for axis, dim in local:
        index[dim] = index[dim] * sizes[axis] + at[axis]
    return tuple(i * size for i, size in zip(index, shape, strict=True))


def describe_pieces(param: Param, sizes: Mapping[str, int]) -> str:
    """Return a sentence about the pieces of a whole parameter, for an error about its shape; "" if it is not local."""
    over = " and ".join(f"axis '{axis}' of {sizes[axis]} along dimension {dim}" for axis, dim in param.local)
    return f"; each rank's module has {list(param.shape)} of it, a piece over {over}" if over else ""
