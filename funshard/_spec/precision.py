"""Precision: the dtypes in which a unit's values are sent and computed with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar, cast

import torch

from .._core.tree import Param
from .._core.unit import Option, P, Unit, add_keyword
from .codec import Codec

KeptDtypes = tuple[tuple[str, torch.dtype], ...]
"""Dtypes by glob of parameter names."""


class Dtypes(NamedTuple):
    """The dtypes in which parameters are gathered and their gradients reduced."""

    param: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Precision(Option):
    """The dtypes of a unit's values on their way. Shards, gradients and optimizer state keep the parameters' own.

    ``param`` is what parameters are gathered and computed in; with ``cast_inputs`` floating point inputs of the unit's
    module are cast to it as well. ``reduce`` is what gradients are reduced in: by default ``param`` where that is given.
    Floating point outputs of the module are cast to ``output``, or with ``restore_outputs`` to the dtype in which the
    inputs came (of the first floating point one). ``buffer`` is what floating point buffers are cast to for the call.
    ``codec`` is how slices are sent in a gather: see `Codec`. None keeps what is there.

    ``reduce_codec`` is how gradients are sent to the owners of their slices, which decode and add them in ``reduce``: by
    default float32, and never in 16 bits. The unit has to be split over one axis; over other axes the sums are reduced in
    ``reduce``. A rank's own slice is rounded like those it sends. A codec of yours must leave nothing finite that was not.

    ``keep`` gives single parameters a dtype of their own instead of ``param``, by glob of their names in the model, as in
    ``{"*norm*": torch.float32}``. They are gathered and computed with in that dtype, in the same collective as the rest of
    their unit. Their gradients are reduced in ``reduce``, too; inputs are cast to ``param`` all the same.

    After ``MixedPrecision`` and ``MixedPrecisionPolicy`` of torch.distributed.fsdp. To keep gradients in low precision
    (FSDP1's ``keep_low_precision_grads``), differentiate with respect to params that are cast to it.

    Raises TypeError for what is no floating point dtype, ValueError for ``keep`` beside a codec and for ``reduce_codec`` beside
    a ``reduce`` of 16 bits. A glob that matches no floating point parameter is a ValueError when the spec is made.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast_inputs: bool = True
    buffer: torch.dtype | None = None
    restore_outputs: bool = False
    codec: Codec | None = None
    reduce_codec: Codec | None = None
    keep: Mapping[str, torch.dtype] | KeptDtypes | None = None

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output", "buffer"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"Precision: {name}: expected a floating point dtype or None, got {dtype!r}")
        if not isinstance(self.reduce_codec, Codec | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "Precision: reduce_codec: expected a Codec such as codecs.cast(torch.bfloat16) or None, got "
                f"{self.reduce_codec!r}"
            )
        if self.reduce_codec and self.reduce and self.reduce.itemsize < 4:
            raise ValueError(
                f"Precision: reduce_codec: decoded gradients are added in reduce: expected float32, float64 or None, got "
                f"{self.reduce}"
            )
        if self.output is not None and self.restore_outputs:
            raise ValueError(f"Precision: expected output or restore_outputs, got both: output={self.output}")
        if (keep := parse_globs(self.keep or ())) is None:
            raise TypeError(f"Precision: keep: expected a dict such as {{'*norm*': torch.float32}}, got {self.keep!r}")
        for glob, dtype in keep:
            if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"Precision: keep: {glob!r}: expected a floating point dtype, got {dtype!r}")
        object.__setattr__(self, "keep", keep or None)
        if self.keep and self.codec:
            raise ValueError(
                f"Precision: expected keep or codec, got both: {self.codec} encodes a slice as a whole; give the parameters of "
                "keep a unit of their own"
            )

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if self.keep:
            values["keep"] = dict(self.keep)
        return f"Precision({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _resolve(self, original: torch.dtype) -> Dtypes:
        """Return the dtypes for parameters of dtype ``original``; ``reduce`` defaults to ``param``, and that to ``original``.

        With a ``reduce_codec`` it defaults to float32, or to a wider ``original``. What is not floating point stays as it is.
        The rule of ``FlatParamHandle._init_param_reduce_dtypes``.

        >>> import torch, funshard as fs
        >>> fs.Precision(param=torch.bfloat16)._resolve(torch.float32)
        Dtypes(param=torch.bfloat16, reduce=torch.bfloat16)
        """
        if not original.is_floating_point:
            return Dtypes(original, original)
        wide = torch.promote_types(original, torch.float32) if self.reduce_codec else None
        return Dtypes(self.param or original, self.reduce or wide or self.param or original)

    def _find_param_dtypes(self, params: Sequence[Param]) -> tuple[torch.dtype | None, ...]:
        """Return the dtypes of ``keep``. Raises ValueError, naming the parameter, for globs that give it several."""
        keep = cast("KeptDtypes", self.keep or ())
        found = [value_of(x, keep if x.dtype.is_floating_point else (), "Precision(keep=)", "one dtype") for x in params]
        return tuple(found) if any(found) else ()

    def _check_units(self, units: Sequence[Unit]) -> None:
        names = [name for unit in units if unit.dtype.is_floating_point for param in unit.params for name in param.names]
        if (glob := find_unmatched(dict(self.keep or ()), names)) is not None:
            raise ValueError(
                f"{self}: keep: '{glob}' matches no floating point parameter of the units with this precision: expected a "
                f"glob of names in the model such as {names[:3]}"
            )
        for unit in units:
            if unit.param_dtypes and unit.at_rest:
                own = next(param.name for param, dtype in zip(unit.params, unit.param_dtypes, strict=True) if dtype)
                raise ValueError(
                    f"unit '{unit.key}' is at rest in {unit.at_rest}, and Precision(keep=...) names its parameter '{own}': a "
                    "codec encodes a slice as a whole; expected a unit of its own for what is kept, or another glob"
                )
            if unit.param_dtypes:
                check_begins(unit, self._resolve(unit.dtype).param)
            if self.reduce_codec:
                _check_reduce_codec(unit, self.reduce_codec)


add_keyword("precision", Precision | None, "a Precision or None, got {}")


def check_begins(unit: Unit, default: torch.dtype) -> None:
    """Raise ValueError where a parameter would begin between two elements of its dtype."""
    dtypes, begin, last = iter(unit.param_dtypes), 0, default
    for size, param in unit.parts:
        last = last if param is None else next(dtypes) or default  # padding has the dtype before it
        if param is not None and param.numel and begin % last.itemsize:
            raise ValueError(
                f"unit '{unit.key}': parameter '{param.name}' of {last} would begin at byte {begin}, between two of its "
                f"elements, because of {unit.p}: expected P(align={last.itemsize}), or a multiple of that"
            )
        begin += size * last.itemsize


def precision_of(p: P) -> Precision | None:
    """Return ``P(precision=...)``. Dynamo traces each call: a loop over all units asks for ``p.precision`` first."""
    return cast("Precision | None", p.precision)


def has_casts(p: P) -> bool:
    """Return whether there are casts around a module, and not only in gathers, reductions or buffers."""
    x = cast("Precision | None", p.precision)
    return x is not None and bool(x.restore_outputs or x.output or (x.cast_inputs and x.param))


def resolve_dtypes(p: P, original: torch.dtype) -> Dtypes:
    """Return the dtypes in which parameters of dtype ``original`` are computed with and reduced."""
    return (precision_of(p) or Precision())._resolve(original)


def _check_reduce_codec(unit: Unit, codec: Codec) -> None:
    if not unit.requires_grad or not unit.dtype.is_floating_point or not unit.numel:
        return
    if len(unit.p.axes) != 1:
        how = f"is split over {len(unit.p.axes)} axes" if unit.p.axes else "is replicated, so that gradients are all-reduced"
        raise ValueError(
            f"unit '{unit.key}' {how}: Precision(reduce_codec={codec}) sends gradients to the owners of slices over one axis; "
            "expected P('axis'), or a Precision without reduce_codec (fs.compress compresses gradients of any unit)"
        )
    if unit.align % codec.block:
        raise ValueError(
            f"unit '{unit.key}': Precision(reduce_codec={codec}): blocks of {codec.block} elements would straddle parameters "
            f"and ranks' slices, which start at multiples of {unit.align}: expected P(align={codec.block}), or a multiple of it"
        )


# --- Values by glob of parameter names ---

V = TypeVar("V")


def parse_globs(given: object) -> tuple[tuple[str, Any], ...] | None:
    """Return values by glob, given as a mapping or as its items, in hashable form; None for anything else."""
    items: Any = tuple(given.items()) if isinstance(given, Mapping) else given  # pyright: ignore
    is_pairs = isinstance(items, tuple) and all(isinstance(i, tuple) and len(i) == 2 and isinstance(i[0], str) for i in items)  # pyright: ignore
    return items if is_pairs else None  # pyright: ignore[reportUnknownVariableType]


def value_of(param: Param, values: Iterable[tuple[str, V]], option: str, what: str) -> V | None:
    """Return the value of the globs that match a parameter, None if none does; ValueError, naming it, for several values."""
    matching = {glob: value for glob, value in values if any(fnmatchcase(name, glob) for name in param.names)}
    if len({*matching.values()}) > 1:
        raise ValueError(
            f"parameter '{param.name}': {option} has {matching} for its names {list(param.names)}: expected {what}"
        )
    return next(iter(matching.values()), None)


def find_unmatched(globs: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the first glob that matches none of the names."""
    return next((glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)), None)
