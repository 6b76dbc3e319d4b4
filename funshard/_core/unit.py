"""P and Unit: how one flat buffer lies on the mesh, and what is in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .tree import Param

LocalDims = tuple[tuple[str, int], ...]
"""For each axis that a tensor is local over, outermost first, the dimension that it splits."""


def global_shape(param: Param, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the larger parameter of which each rank has a piece."""
    return join_shape(param.shape, param.local, sizes)


def join_shape(shape: Sequence[int], local: LocalDims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the whole tensor whose pieces over local axes have this shape."""
    whole = list(shape)
    for axis, dim in local:
        whole[dim] *= sizes[axis]
    return tuple(whole)


class Option:
    """The frozen value of a keyword of `P`, which checks itself and the units that have it: `Precision`, `Codec`, `Remat`.

    Layouts need no more of an option than this. What it does is in the stages and wrappers that it brings.
    """

    def _count_block(self) -> int:
        """Return the number of elements of which every start of a parameter or slice has to be a multiple."""
        return 1

    def _count_stored(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the length and dtype in which `shard` gives a slice of this length and dtype."""
        return numel, dtype

    def _find_param_dtypes(self, params: Sequence[Param]) -> tuple[torch.dtype | None, ...]:
        """Return a dtype of its own for each parameter that gets one, None for the rest; empty if none of them gets one."""
        return ()

    def _mark(self, param: Param) -> Param:
        """Return a parameter of a unit that has this option, with what the option says of it."""
        return param

    def _check_units(self, units: Sequence[Unit]) -> None:
        """Raise ValueError, naming the unit, where one of those with this option cannot have it."""


PARSERS: dict[str, Callable[[Any, P], object]] = {}
"""By keyword of `P`, a function that checks its value and brings it into one form. The file of an option adds its own."""


def add_keyword(keyword: str, kinds: Any, expected: str) -> None:
    """Have a keyword of `P` take values of these types; ``expected`` is the error's text, with {} for what was given."""

    def parse(value: object, _: P) -> object:
        if not isinstance(value, kinds):
            raise TypeError(f"P: {keyword}: expected {expected.format(repr(value))}")
        return value

    PARSERS[keyword] = parse


ALIGN_BYTES = 16
"""The alignment of a tensor that vectorized kernels, tensor cores and NCCL need; FSDP1's with use_orig_params."""


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
    local: Mapping[str, int | Mapping[str, int]] | Option | None = field(default=None, kw_only=True)
    unit: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in self.axes if isinstance(self.axis, tuple) else () if self.axis is None else (self.axis,):
            if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"P: expected an axis name, a tuple of names or None, got {self.axis!r}")
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"P: axis named twice in {self.axis!r}: expected different mesh axes")
        self._check_reshard()
        if self.unit is not None and (not isinstance(self.unit, str) or not self.unit):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: unit: expected a label or None, got {self.unit!r}")
        if not isinstance(self.align, int | None) or isinstance(self.align, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: align: expected a whole number of elements, got {self.align!r}")
        if self.align is not None and self.align < 1:
            raise ValueError(f"P: expected align >= 1, got {self.align}")
        for keyword, parse in PARSERS.items():
            object.__setattr__(self, keyword, parse(getattr(self, keyword), self))

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

    @property
    def offloads(self) -> tuple[str, ...]:
        """The parts of the unit that live in host memory, as a tuple."""
        return () if self.offload is None else (self.offload,) if isinstance(self.offload, str) else tuple(self.offload)

    def _without_wrappers(self) -> P:
        return dataclasses.replace(self, remat=False, compile=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis names as a tuple, outermost first."""
        return () if self.axis is None else (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)

    @property
    def options(self) -> tuple[Option, ...]:
        """The options among its fields."""
        return tuple(value for keyword in PARSERS if isinstance(value := getattr(self, keyword), Option))

    def mark(self, param: Param) -> Param:
        """Return a parameter of a unit with this `P`, with what the options say of it.

        Args:
            param: The parameter, as its model has it.
        """
        for option in self.options:
            param = option._mark(param)
        return param

    def __str__(self) -> str:
        axis = "" if self.axis is None else repr(self.axis)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default}
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
    def is_encoded(self) -> bool:
        """Whether its slices are stored as bytes, which stand for its elements."""
        return self.at_rest is not None

    @property
    def requires_grad(self) -> bool:
        """Whether the parameters are trained."""
        return self.params[0].requires_grad
