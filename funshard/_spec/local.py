"""Local axes: mesh axes over which each rank holds another piece of a larger parameter, such as its experts or columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from .tree import Param

if TYPE_CHECKING:
    from torch import Tensor

    from .unit import Unit

__all__ = [
    "LocalAxes",
    "LocalDims",
    "check_axes_are_given",
    "check_local",
    "describe_pieces",
    "distinct_axes",
    "find_unmatched",
    "join_shape",
    "mark_local",
    "piece_offsets",
    "stack_dims",
    "whole_shape",
]

LocalAxes = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""For each axis, outermost first, the dimension that is split over it, by a glob of parameter names."""
LocalDims = tuple[tuple[str, int], ...]
"""For each axis that a tensor is local over, outermost first, the dimension that it splits."""


def check_local(local: object, axes: Iterable[str]) -> LocalAxes:
    """Return ``P(local=...)`` in its hashable form.

    Raises TypeError or ValueError unless it maps axis names, which are not among ``axes``, to a dimension or to dimensions by
    glob of parameter names.
    """
    if local is None:
        return ()
    given = dict(local) if isinstance(local, tuple) else local  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if not isinstance(given, Mapping):
        raise TypeError(f"P: local: expected a dict such as {{'expert': 0}}, got {local!r}")
    out: list[tuple[str, tuple[tuple[str, int], ...]]] = []
    for axis, dims in given.items():  # pyright: ignore[reportUnknownVariableType]
        by_name = {"*": dims} if _is_dim(dims) else dims  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(axis, str) or not axis:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: local: expected axis names, got {axis!r}")
        if axis in axes:
            raise ValueError(f"P: axis '{axis}' is in local= and splits the unit: expected one of the two")
        items = _to_items(by_name)
        if items is None:
            raise TypeError(
                f"P: local: axis '{axis}': expected a dimension (0 or more), or dimensions by glob of parameter names such as "
                f"{{'*.up.weight': 0}}, got {dims!r}"
            )
        out.append((axis, items))
    return tuple(out)


def _to_items(dims: object) -> tuple[tuple[str, int], ...] | None:
    """Return dimensions by glob, given as a mapping or as its items, in hashable form; None if they are anything else."""
    items = tuple(dims.items()) if isinstance(dims, Mapping) else dims  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if not items or not isinstance(items, tuple):
        return None
    is_item = [isinstance(i, tuple) and len(i) == 2 and isinstance(i[0], str) and _is_dim(i[1]) for i in items]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return items if all(is_item) else None  # pyright: ignore[reportUnknownVariableType]


def _is_dim(dim: object) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0


def mark_local(param: Param, local: LocalAxes) -> Param:
    """Return the parameter with the axes that it is local over, and its dimension that each of them splits.

    Raises ValueError, naming the parameter, for a dimension that it does not have, and for globs that give it several.
    """
    found: list[tuple[str, int]] = []
    for axis, dims in local:
        matching = {glob: dim for glob, dim in dims if any(fnmatchcase(name, glob) for name in param.names)}
        if not matching:
            continue
        if len({*matching.values()}) > 1:
            raise ValueError(
                f"parameter '{param.name}': P(local={{'{axis}': ...}}) has {matching} for its names {list(param.names)}: "
                "expected one dimension"
            )
        dim = next(iter(matching.values()))
        if dim >= len(param.shape):
            raise ValueError(
                f"parameter '{param.name}': P(local={{'{axis}': {dim}}}) but its shape is {list(param.shape)}: expected a "
                "dimension that it has; name what is split by globs, and the rest is replicated"
            )
        found.append((axis, dim))
    return dataclasses.replace(param, local=tuple(found)) if found else param


def find_unmatched(local: LocalAxes, params: Iterable[Param]) -> str | None:
    """Return a glob that matches no name of these parameters; None if there is none."""
    names = [name for param in params for name in param.names]
    globs = [glob for _, dims in local for glob, _ in dims]
    return next((glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)), None)


def check_axes_are_given(axes: object, units: Iterable[Unit], what: str) -> None:
    """Raise ValueError where ``axes`` is None, for all, and a unit is local over one: there ranks may have other channels."""
    if axes is None and (unit := next((unit for unit in units if unit.local_axes), None)) is not None:
        raise ValueError(
            f"{what}: unit '{unit.key}' is local over axis '{unit.local_axes[0]}', where ranks may have values of other "
            "channels: expected axes=, the mesh axes over which all ranks have the same channels, got None"
        )


def whole_shape(param: Param, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the larger parameter of which each rank has a piece."""
    return join_shape(param.shape, param.local, sizes)


def join_shape(shape: Sequence[int], local: LocalDims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the whole tensor whose pieces over local axes have this shape."""
    whole = list(shape)
    for axis, dim in local:
        whole[dim] *= sizes[axis]
    return tuple(whole)


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
