"""P and Unit: how one flat buffer lies on the mesh, and what is in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from .tree import Param, is_within

if TYPE_CHECKING:
    pass

__all__ = ["LocalDims", "P", "Unit", "find_unmatched", "join_shape", "mark_local", "whole_shape"]


# --- Local axes: mesh axes over which each rank holds another piece of a larger parameter, such as its experts or columns ---

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


def whole_shape(param: Param, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the larger parameter of which each rank has a piece."""
    return join_shape(param.shape, param.local, sizes)


def join_shape(shape: Sequence[int], local: LocalDims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the whole tensor whose pieces over local axes have this shape."""
    whole = list(shape)
    for axis, dim in local:
        whole[dim] *= sizes[axis]
    return tuple(whole)


# --- `P` and `Unit` ---


class Option:
    """The frozen value of a keyword of `P`, which checks itself and the units that have it: `Precision`, `Codec`, `Remat`.

    Layouts need no more of an option than this. What it does is in the stages and wrappers that it brings.
    """

    keywords: ClassVar[tuple[str, ...]] = ()
    """The keywords of `P` that take it."""

    def _count_block(self) -> int:
        """Return the number of elements of which every start of a parameter or slice has to be a multiple."""
        return 1

    def _count_stored(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the length and dtype in which `shard` gives a slice of this length and dtype."""
        return numel, dtype

    def _find_param_dtypes(self, params: Sequence[Param]) -> tuple[torch.dtype | None, ...]:
        """Return a dtype of its own for each parameter that gets one, None for the rest; empty if none of them gets one."""
        return ()

    def _check_units(self, units: Sequence[Unit]) -> None:
        """Raise ValueError, naming the unit, where one of those with this option cannot have it."""


_EXPECTED = {
    "precision": "a Precision or None, got {}",
    "at_rest": "a Codec such as codecs.nf4() or None, got {}",
    "remat": "True or False, got {} (or a Remat, which says what is kept)",
    "compile": "True, False or a Compile, got {}",
}
"""The keywords of `P` that take an `Option`, and the words for anything else."""

ALIGN_BYTES = 16
"""The alignment of a tensor that vectorized kernels, tensor cores and NCCL need; FSDP1's with use_orig_params."""

OFFLOADS = ("activations", "params")
"""The parts of a unit that may live in host memory."""


@dataclass(frozen=True)
class P:
    """The layout of one unit's flat buffer on the mesh: split over ``axis``, replicated over the other axes.

    Axes mean what they mean in ``jax.sharding.PartitionSpec``. That has one entry for each dimension of an array; a flat
    buffer has one dimension, and its ``P`` also says how the unit is gathered, computed with and kept.

    ``P("shard")`` is FSDP on a mesh ("shard",) and HSDP on ("replicate", "shard"); ``P()`` is DDP; a tuple of names
    splits over several axes, the first one outermost. Every parameter, and every rank's slice, starts at a multiple of
    ``align`` elements: by default 16 bytes, for which kernels are made, in its own dtype and, where that is float32, in those
    of 16 bits, whatever ``precision`` is, so that the same shards may be used with another; with 1 parameters lie end to end.

    ``reshard`` frees the gathered buffer between forward and backward (ZeRO-3) or keeps it (ZeRO-2). With the name of an axis,
    or several, it keeps this rank's slice over those alone, from which backward gathers (ZeRO++'s hpZ):
    ``P(("replicate", "shard"), reshard="shard")``.

    ``precision`` says in which dtypes its values travel. ``remat`` runs its module again for every derivative; a
    `Remat` says what is kept for that. ``offload`` says what rests on the host: ``"activations"``, which is what autograd
    saves in its module (as `funshard.offload` does), ``"params"``, or a set of both.

    ``local`` names mesh axes over which each rank holds another piece of larger parameters: ``{"expert": 0}``, a piece along
    dimension 0, or ``{"tensor": {"*.up.weight": 0, "*.down.weight": 1}}`` by glob of the parameters' names, where what no glob
    matches is replicated. Nothing is gathered or reduced over such an axis. The module has the pieces' shapes, and `shard`,
    `unshard` and checkpoints speak of the whole parameters. See ``examples/guide/axes.md``.

    ``compile`` runs its module's forward by torch.compile, within the eager schedule: True, or a `Compile`. Operators that a
    `Remat` chooses are those of the program, whatever the compiler makes of them.

    ``at_rest`` is a `Codec`, such as ``codecs.nf4()``, for what of it is frozen (not ``requires_grad``, when the spec is
    made) and floating point: `shard` gives the bytes of the encoded slice, gathers send these, and what is computed with is
    decoded, in ``precision``'s dtype or the parameters' own. What of it is trained stays as it is.

    ``unit`` is a label that makes one unit of several modules: those that have the same label, and equal ``P``, are gathered
    together, and stay gathered while they run one after another. `policies.by_group` sets it.

    Raises TypeError for an axis that is no name and a field of another type, ValueError for an axis that is named twice,
    for an ``offload`` of something else and for ``align < 1``.
    """

    axis: str | tuple[str, ...] | None = None
    reshard: bool | str | tuple[str, ...] = field(default=True, kw_only=True)
    precision: Option | None = field(default=None, kw_only=True)
    remat: bool | Option = field(default=False, kw_only=True)
    offload: str | Collection[str] | None = field(default=None, kw_only=True)
    compile: bool | Option = field(default=False, kw_only=True)
    align: int | None = field(default=None, kw_only=True)
    at_rest: Option | None = field(default=None, kw_only=True)
    local: Mapping[str, int | Mapping[str, int]] | LocalAxes | None = field(default=None, kw_only=True)
    unit: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in self.axes if isinstance(self.axis, tuple) else () if self.axis is None else (self.axis,):
            if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"P: expected an axis name, a tuple of names or None, got {self.axis!r}")
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"P: axis named twice in {self.axis!r}: expected different mesh axes")
        for keyword, expected in _EXPECTED.items():
            value: object = getattr(self, keyword)
            is_option = isinstance(value, Option) and keyword in value.keywords
            if not is_option and type(value) is not type(getattr(P, keyword)):  # the default is None, or False
                raise TypeError(f"P: {keyword}: expected {expected.format(repr(value))}")
        self._check_reshard()
        if self.unit is not None and (not isinstance(self.unit, str) or not self.unit):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: unit: expected a label or None, got {self.unit!r}")
        object.__setattr__(self, "local", check_local(self.local, self.axes) or None)
        self._check_offload()
        if not isinstance(self.align, int | None) or isinstance(self.align, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: align: expected a whole number of elements, got {self.align!r}")
        if self.align is not None and self.align < 1:
            raise ValueError(f"P: expected align >= 1, got {self.align}")

    def _check_reshard(self) -> None:
        """Raise TypeError or ValueError for a ``reshard`` that is no bool and no part of the axes; bring it into one form."""
        if isinstance(self.reshard, bool):
            return
        names = (self.reshard,) if isinstance(self.reshard, str) else self.reshard
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: reshard: expected True, False, or some of the axes {self.axes}, got {self.reshard!r}")
        if not {*names} < {*self.axes} or not names:
            hint = "; reshard=True keeps this rank's slice over all of them" if {*names} == {*self.axes} else ""
            raise ValueError(f"P: reshard: expected some of the axes {self.axes}, and not all, got {self.reshard!r}{hint}")
        inner = [name for name in self.axes if name in names]
        object.__setattr__(self, "reshard", tuple(inner) if len(inner) > 1 else inner[0])

    @property
    def reshard_axes(self) -> tuple[str, ...]:
        """The axes that the slices between forward and backward are split over, if ``reshard`` names some."""
        return () if isinstance(self.reshard, bool) else (self.reshard,) if isinstance(self.reshard, str) else self.reshard

    def _check_offload(self) -> None:
        """Raise TypeError or ValueError for an unknown ``offload``, and bring it into one form."""
        what = (self.offload,) if isinstance(self.offload, str) else () if self.offload is None else self.offload
        expected = f"{' or '.join(map(repr, OFFLOADS))}, a set of them or None"
        if not isinstance(what, tuple | list | set | frozenset) or not all(type(one) is str for one in what):
            raise TypeError(f"P: offload: expected {expected}, got {self.offload!r}")
        if unknown := sorted({*what} - {*OFFLOADS}):
            raise ValueError(f"P: offload: expected {expected}, got {unknown[0]!r}")
        named = tuple(one for one in OFFLOADS if one in what)
        object.__setattr__(self, "offload", named if len(named) > 1 else named[0] if named else None)

    @property
    def offloads(self) -> tuple[str, ...]:
        """The parts of the unit that live in host memory, as a tuple."""
        return () if self.offload is None else (self.offload,) if isinstance(self.offload, str) else tuple(self.offload)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis names as a tuple, outermost first."""
        return () if self.axis is None else (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)

    @property
    def options(self) -> tuple[Option, ...]:
        """The options among its fields."""
        return tuple(value for keyword in _EXPECTED if isinstance(value := getattr(self, keyword), Option))

    @property
    def local_axes(self) -> LocalAxes:
        """The axes of ``local``, and the dimension that each splits, by glob of parameter names."""
        return cast("LocalAxes", self.local or ())

    def __str__(self) -> str:
        axis = "" if self.axis is None else repr(self.axis)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default}
        if self.local:
            values["local"] = {name: dict(dims) if dims[0][0] != "*" else dims[0][1] for name, dims in self.local_axes}
        changed = [f"{name}={value!r}" for name, value in values.items()]
        return f"P({', '.join(filter(None, [axis, *changed]))})"

    __repr__ = __str__


@dataclass(frozen=True)
class Unit:
    """One flat buffer: parameters of one dtype and one ``requires_grad`` that are gathered, used and freed together.

    ``key`` is the unit's key in a dict of shards: its module path, or those of several modules (``blocks.0+blocks.1``). It has
    a suffix where parameters mix dtypes or ``requires_grad`` and become several units (``blocks.0:bfloat16``).
    """

    key: str
    path: str
    p: P
    params: tuple[Param, ...]
    paths: tuple[str, ...] = ()
    """The paths of all modules at which it is gathered, ``path`` first."""
    numel: int = field(init=False, compare=False, repr=False)
    """Elements of the parameters, without padding."""
    align: int = field(init=False, compare=False, repr=False)
    """The number of elements of which every start of a parameter or slice is a multiple."""
    parts: tuple[tuple[int, Param | None], ...] = field(init=False, compare=False, repr=False)
    """The contents of the buffer in order, with their numbers of elements: parameters, and padding (None)."""
    span: int = field(init=False, compare=False, repr=False)
    """Elements up to the end of the last parameter, with the padding before it."""
    param_dtypes: tuple[torch.dtype | None, ...] = field(init=False, compare=False, repr=False)
    """The dtype that an option gives each parameter, None for the rest; empty if none of them gets one."""

    def __post_init__(self) -> None:
        align = self.p.align
        if align is None:
            # not of the precision: the lengths of shards cannot tell apart two layouts of the same parameters
            align = ALIGN_BYTES // (torch.bfloat16 if self.dtype == torch.float32 else self.dtype).itemsize
        align = math.lcm(align, self.at_rest._count_block() if self.at_rest else 1)
        parts: list[tuple[int, Param | None]] = []
        span = 0
        for param in self.params:
            if gap := -span % align:
                parts.append((gap, None))
            parts.append((param.numel, param))
            span += gap + param.numel
        object.__setattr__(self, "paths", self.paths or (self.path,))
        object.__setattr__(self, "numel", sum(p.numel for p in self.params))
        object.__setattr__(self, "align", align)
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "span", span)
        by_option = (option._find_param_dtypes(self.params) for option in self.p.options)
        object.__setattr__(self, "param_dtypes", next((dtypes for dtypes in by_option if dtypes), ()))

    def is_inside(self, path: str) -> bool:
        """Return whether one of its modules is inside the module at this path, or that module itself.

        Args:
            path: The path of a module.
        """
        return any(is_within(own, path) for own in self.paths)

    def padded_numel(self, slices: int) -> int:
        """Return the number of elements of the unit's whole buffer, padding included.

        Args:
            slices: The number of slices that the buffer is split into.
        """
        return -(-self.span // (slices * self.align)) * self.align * slices

    @property
    def local_axes(self) -> tuple[str, ...]:
        """The axes over which each rank holds another piece of its parameters."""
        return tuple(axis for axis, _ in self.params[0].local)

    @property
    def distinct_axes(self) -> tuple[str, ...]:
        """The axes over which ranks hold different elements: those of ``local`` and those that its buffer is split over."""
        return (*self.local_axes, *self.p.axes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every parameter."""
        return self.params[0].dtype

    @property
    def at_rest(self) -> Option | None:
        """The codec in which its slices are stored: ``p.at_rest`` if it is frozen and floating point, else None."""
        frozen = not self.requires_grad and self.dtype.is_floating_point and any(param.numel for param in self.params)
        return self.p.at_rest if frozen else None

    @property
    def requires_grad(self) -> bool:
        """Whether the parameters are trained."""
        return self.params[0].requires_grad
