"""Local axes: mesh axes over which each rank holds another piece of a larger parameter, and the tensors of these pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import PARSERS, LocalDims, Option, P, Unit, global_shape
from .precision import find_unmatched, parse_globs, value_of

LocalAxes = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""For each axis, outermost first, the dimension that is split over it, by a glob of parameter names."""


# --- ``P(local=...)`` ---


@dataclass(frozen=True, repr=False)
class Local(Option):
    """The axes over which each rank holds another piece of larger parameters, and the dimensions that they split."""

    axes: LocalAxes

    def __repr__(self) -> str:
        return repr({name: dict(dims) if dims[0][0] != "*" else dims[0][1] for name, dims in self.axes})

    def _mark(self, param: Param) -> Param:
        """Return the parameter with the axes that it is local over, and its dimension that each of them splits.

        Raises ValueError, naming the parameter, for a dimension that it does not have, and for globs that give it several.
        """
        found: list[tuple[str, int]] = []
        for axis, dims in self.axes:
            dim = value_of(param, dims, f"P(local={{'{axis}': ...}})", "one dimension")
            if dim is None:
                continue
            if dim >= len(param.shape):
                raise ValueError(
                    f"parameter '{param.name}': P(local={{'{axis}': {dim}}}) but its shape is {list(param.shape)}: expected a "
                    "dimension that it has; name what is split by globs, and the rest is replicated"
                )
            found.append((axis, dim))
        return dataclasses.replace(param, local=tuple(found)) if found else param

    def _check_units(self, units: Sequence[Unit]) -> None:
        names = [name for unit in units for param in unit.params for name in param.names]
        if (glob := find_unmatched((glob for _, dims in self.axes for glob, _ in dims), names)) is not None:
            raise ValueError(
                f"P(local={self}): '{glob}' matches no parameter of its units: expected a glob of names such as "
                "'*.up.weight'; what a policy leaves is replicated over local axes, so it has to select their modules"
            )


def _parse_local(local: Any, p: P) -> Local | None:
    """Return the option of ``P(local=...)``: axis names that do not split the unit, with a dimension or dimensions by glob."""
    given = dict(local.axes) if isinstance(local, Local) else {} if local is None else local
    if not isinstance(given, Mapping):
        raise TypeError(f"P: local: expected a dict such as {{'expert': 0}}, got {local!r}")
    out: list[tuple[str, tuple[tuple[str, int], ...]]] = []
    for axis, dims in given.items():
        items = parse_globs({"*": dims} if _is_dim(dims) else dims)
        if not isinstance(axis, str) or not axis:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: local: expected axis names, got {axis!r}")
        if axis in p.axes:
            raise ValueError(f"P: axis '{axis}' is in local= and splits the unit: expected one of the two")
        if not items or not all(_is_dim(dim) for _, dim in items):
            raise TypeError(
                f"P: local: axis '{axis}': expected a dimension (0 or more), or dimensions by glob of parameter names such as "
                f"{{'*.up.weight': 0}}, got {dims!r}"
            )
        out.append((axis, items))
    return Local(tuple(out)) if out else None


def _is_dim(dim: object) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0


PARSERS["local"] = _parse_local


# --- Tensors of pieces ---


CHANNELS = "where ranks may have values of other channels: expected axes=, the mesh axes over which all have the same channels"


def check_axes_are_given(axes: object, spec: PartitionSpec, what: str, why: str = CHANNELS) -> None:
    """Raise ValueError where ``axes`` is None, for all, and a unit is local over one of several ranks."""
    for unit in spec if axes is None else ():
        if local := [axis for axis in unit.local_axes if spec.bound_mesh[axis].size > 1]:
            raise ValueError(f"{what}: unit '{unit.key}' is local over axis '{local[0]}', {why}, got None")


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
    if not owner.local or tuple(tensor.shape) == (whole := global_shape(owner, sizes)):
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
