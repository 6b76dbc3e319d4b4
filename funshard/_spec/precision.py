"""Precision: the dtypes in which a unit's values are sent and computed with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

import torch

from .codec import Codec
from .tree import Param

__all__ = ["Dtypes", "Precision"]

KeptDtypes = tuple[tuple[str, torch.dtype], ...]
"""Dtypes by glob of parameter names."""


class Dtypes(NamedTuple):
    """The dtypes in which parameters are gathered and their gradients reduced."""

    param: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Precision:
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
        object.__setattr__(self, "keep", _check_keep(self.keep) or None)
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

    def _kept_dtypes(self, params: Sequence[Param]) -> tuple[torch.dtype | None, ...]:
        """Return the dtype that ``keep`` gives each parameter, None for the rest; empty if it gives none of them one.

        Raises ValueError, naming the parameter, for globs that give it several.
        """
        found = [_find_kept(param, cast("KeptDtypes", self.keep)) for param in params] if self.keep else []
        return tuple(found) if any(found) else ()

    def _find_unmatched(self, params: Iterable[Param]) -> str | None:
        """Return a glob of ``keep`` that matches no name of the floating point ones among these parameters; or None."""
        names = [name for param in params if param.dtype.is_floating_point for name in param.names]
        globs = dict(self.keep or ())
        return next((glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)), None)


def _check_keep(keep: object) -> KeptDtypes:
    """Return ``Precision(keep=...)`` in its hashable form; raise TypeError unless it maps globs to floating point dtypes."""
    if keep is None:
        return ()
    items = tuple(keep.items()) if isinstance(keep, Mapping) else keep  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if not isinstance(items, tuple) or not all(isinstance(i, tuple) and len(i) == 2 and isinstance(i[0], str) for i in items):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        raise TypeError(f"Precision: keep: expected a dict such as {{'*norm*': torch.float32}}, got {keep!r}")
    for glob, dtype in items:  # pyright: ignore[reportUnknownVariableType]
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Precision: keep: {glob!r}: expected a floating point dtype, got {dtype!r}")
    return items  # pyright: ignore[reportUnknownVariableType]


def _find_kept(param: Param, keep: KeptDtypes) -> torch.dtype | None:
    """Return the dtype of ``keep`` for a parameter, None if no glob matches it."""
    if not param.dtype.is_floating_point:
        return None
    matching = {glob: dtype for glob, dtype in keep if any(fnmatchcase(name, glob) for name in param.names)}
    if len({*matching.values()}) > 1:
        raise ValueError(
            f"parameter '{param.name}': Precision(keep={matching}) for its names {list(param.names)}: expected one dtype"
        )
    return next(iter(matching.values()), None)
