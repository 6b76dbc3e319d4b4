"""Local axes: mesh axes over which each rank holds another piece of a larger parameter, such as its experts or columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from .tree import Param

if TYPE_CHECKING:
    from .unit import Unit

__all__ = [
    "LocalAxes",
    "check_local",
    "describe_pieces",
    "find_unmatched",
    "mark_local",
    "piece_offsets",
    "refuse_local",
    "whole_shape",
]

LocalAxes = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""For each axis, outermost first, the dimension that is split over it, by a glob of parameter names."""


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
        items = tuple(by_name.items() if isinstance(by_name, Mapping) else by_name)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if not items or not all(isinstance(glob, str) and _is_dim(dim) for glob, dim in items):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"P: local: axis '{axis}': expected a dimension (0 or more), or dimensions by glob of parameter names such as "
                f"{{'*.up.weight': 0}}, got {dims!r}"
            )
        out.append((axis, items))
    return tuple(out)


def _is_dim(dim: object) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0


def mark_local(param: Param, local: LocalAxes) -> Param:
    """Return the parameter with the axes that it is local over, and its dimension that each of them splits.

    Raises ValueError, naming the parameter, for a dimension that it does not have.
    """
    found: list[tuple[str, int]] = []
    for axis, dims in local:
        dim = next((dim for glob, dim in dims if any(fnmatchcase(name, glob) for name in param.names)), None)
        if dim is None:
            continue
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


def refuse_local(units: Iterable[Unit], what: str, instead: str) -> None:
    """Raise NotImplementedError, naming the unit, where one has local axes, which ``what`` cannot take yet."""
    for unit in units:
        if unit.local_axes:
            raise NotImplementedError(
                f"unit '{unit.key}' is local over axis '{unit.local_axes[0]}', and {what} takes no such unit yet: expected "
                f"{instead}"
            )


def whole_shape(param: Param, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the larger parameter of which each rank has a piece."""
    shape = list(param.shape)
    for axis, dim in param.local:
        shape[dim] *= sizes[axis]
    return tuple(shape)


def piece_offsets(param: Param, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, ...]:
    """Return the offsets, in the larger parameter, of the piece of the rank at these coordinates of the mesh."""
    index = [0] * len(param.shape)
    for axis, dim in param.local:
        index[dim] = index[dim] * sizes[axis] + at[axis]
    return tuple(i * size for i, size in zip(index, param.shape, strict=True))


def describe_pieces(param: Param, sizes: Mapping[str, int]) -> str:
    """Return a sentence about the pieces of a whole parameter, for an error about its shape; "" if it is not local."""
    over = " and ".join(f"axis '{axis}' of {sizes[axis]} along dimension {dim}" for axis, dim in param.local)
    return f"; each rank's module has {list(param.shape)} of it, a piece over {over}" if over else ""
