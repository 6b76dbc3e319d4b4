"""Precision and Codec: the dtypes and the encodings in which a unit's values are sent."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import _torch
from .._core.tree import Param
from .._core.unit import Option, P, Unit, add_keyword
from .globs import find_unmatched, parse_globs, value_of

__all__ = ["Codec", "Dtypes", "Form", "Precision", "check_trainable", "pack_bytes", "pack_rows", "precision_of"]
__all__ += ["resolve_dtypes", "storage_codec", "unpack_bytes"]


# --- Codec: the encoding of a unit's slices for their gather, and of their gradients for the reduction ---

Form = tuple[tuple[torch.dtype, torch.Size], ...]
"""The dtypes and shapes of an encoded slice's tensors."""

_ALIGN = 16  # bytes: more than any dtype's


@dataclass(frozen=True, repr=False)
class Codec(Option):
    """An encoding of slices for their gather: each rank computes with ``decode(*encode(slice))`` of every rank's slice.

    ``encode`` maps a 1-D slice to a tuple of tensors, of the same shapes and dtypes on every rank; ``decode`` maps these to
    as many elements, in any floating point dtype. Gradients pass straight through. Float8, with a scale for each slice:

    >>> import torch, funshard as fs
    >>> def encode(x):
    ...     scale = x.abs().amax().clamp(min=1e-12) / 448
    ...     return (x / scale).to(torch.float8_e4m3fn), scale
    >>> float8 = fs.Codec(encode, lambda x, scale: x.to(scale.dtype) * scale)
    >>> float8.decode(*float8.encode(torch.tensor([448.0, 3.1])))
    tensor([448.,   3.])

    Both must be pure, and are called on every rank for each gather: ``encode`` on its slice, ``decode`` on all slices at
    once, by torch.vmap, so that the number of kernels is that of one. Where vmap cannot run it (it reads a value on the
    host, or writes to a tensor that it made), and inside torch.compile, it is called slice by slice. After
    ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of FSDP2's tensor subclasses.

    ``block`` is the number of elements that it encodes together. Parameters and slices at rest in it (`P`) start at multiples
    of that, so that no block straddles two of them. ``takes_dtype`` says that ``decode`` takes the ``dtype`` to decode to as a
    keyword, ``takes_noise`` that ``encode`` takes ``noise``: numbers in [0, 1), by which it rounds each element up or down so
    that the mean is the element. ``name`` is its printed form. `funshard.codecs` has some.
    """

    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    block: int = field(default=1, kw_only=True)
    takes_dtype: bool = field(default=False, kw_only=True)
    takes_noise: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)
    _forms: dict[tuple[int, torch.dtype], tuple[int, Form]] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:  # the same on every rank
        if self.name:
            return self.name
        names = (f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__qualname__)}" for fn in (self.encode, self.decode))
        return f"Codec({', '.join(names)})"

    def _count_block(self) -> int:
        return self.block

    def _count_stored(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return self._describe_encoding(numel, dtype)[0], torch.uint8

    def _check_units(self, units: Sequence[Unit]) -> None:
        if not any(unit.at_rest for unit in units):
            raise ValueError(
                f"unit '{units[0].key}' is {units[0].p}, which is for what is frozen, and nothing is: expected "
                "requires_grad_(False) before the spec is made"
            )

    def _encode_slice(self, piece: Tensor) -> tuple[Tensor, ...]:
        tensors = self.encode(piece)
        if not isinstance(tensors, tuple) or not all(isinstance(x, Tensor) for x in tensors) or not tensors:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = type(tensors).__name__ if tensors != () else "an empty one"
            raise TypeError(f"{self}: expected encode to return a tuple of tensors, got {got}")
        return tensors

    def _encode_rows(self, rows: Tensor) -> list[Tensor]:
        """Encode slices that are the rows of a matrix; return their tensors stacked in dimension 0."""
        if (stacked := _try_vmap(self._encode_slice, [rows])) is not None:
            return [*stacked]
        return [torch.stack(parts) for parts in zip(*map(self._encode_slice, rows), strict=True)]

    def _describe_encoding(self, numel: int, dtype: torch.dtype) -> tuple[int, Form]:
        """Return ``(number of bytes, form)`` of an encoded slice of so many elements, from shapes alone."""
        if _torch.is_in_graph():  # as PartitionSpec._compute_once
            return self._find_form(numel, dtype)
        if (numel, dtype) not in self._forms:
            with _torch.below_transforms():
                self._forms[numel, dtype] = self._find_form(numel, dtype)
        return self._forms[numel, dtype]

    def _find_form(self, numel: int, dtype: torch.dtype) -> tuple[int, Form]:
        try:
            encoded = self._encode_slice(torch.empty(numel, dtype=dtype, device="meta"))
        except RuntimeError as error:
            raise TypeError(f"{self}: expected encode to run on shapes alone, on the meta device, got {error}") from error
        form = tuple((x.dtype, x.shape) for x in encoded)
        sizes = [shape.numel() * dtype.itemsize for dtype, shape in form]
        return sum(size + -size % _ALIGN for size in sizes), form

    def _decode_slices(self, tensors: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """Return all slices end to end in this dtype, from their encoded tensors stacked in dimension 0.

        Raises ValueError if a slice does not have ``numel`` elements.
        """
        decode = functools.partial(self.decode, dtype=dtype) if self.takes_dtype else self.decode
        stacked = _try_vmap(decode, tensors)
        rows: list[Tensor] = [decode(*row) for row in zip(*tensors, strict=True)] if stacked is None else [stacked[0]]
        if wrong := [row.shape for row in rows if tuple(row.shape) != (numel,)]:
            raise ValueError(f"{self}: expected decode to return {numel} elements, got shape {list(wrong[0])}")
        return (torch.cat(rows) if stacked is None else stacked.flatten()).to(dtype)


def _try_vmap(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """Return what torch.vmap makes of a function; None where it fails, since the function itself raises the error again."""
    if not _torch.is_in_graph():  # which fuses what is written out, and recovers from no error
        with contextlib.suppress(Exception):
            return torch.vmap(fn)(*tensors)
    return None


add_keyword("at_rest", Codec | None, "a Codec such as codecs.nf4() or None, got {}")


def storage_codec(unit: Unit) -> Codec | None:
    """Return the codec in which a unit's slices are stored, ``P(at_rest=...)``; None for a unit that is stored as it is."""
    return cast("Codec | None", unit.at_rest)


def pack_bytes(tensors: Iterable[Tensor]) -> tuple[Tensor, Form]:
    """Return ``(bytes, form)``: the tensors as one of uint8, to be sent at once. Inverse of `unpack_bytes`."""
    raw, form = pack_rows(x[None] for x in tensors)
    return raw[0], form


def pack_rows(tensors: Iterable[Tensor]) -> tuple[Tensor, Form]:
    """Return ``(bytes, form)`` as `pack_bytes` for each row of the tensors."""
    parts: list[Tensor] = []
    form: list[tuple[torch.dtype, torch.Size]] = []
    for x in tensors:
        raw = _torch.view_as_dtype((x.flatten(1) if x.dim() > 1 else x[:, None]).contiguous(), torch.uint8)
        parts += [raw, raw.new_zeros(len(x), -raw.shape[1] % _ALIGN)]
        form.append((x.dtype, x.shape[1:]))
    return torch.cat(parts, 1), tuple(form)


def unpack_bytes(raw: Tensor, form: Form) -> list[Tensor]:
    """Return the tensors in these bytes as views, batched over leading dimensions of the bytes. Inverse of `pack_bytes`."""
    tensors: list[Tensor] = []
    start = 0
    for dtype, shape in form:
        size = shape.numel() * dtype.itemsize
        part = _torch.view_as_dtype(raw[..., start : start + size], dtype)
        tensors.append(part.view(*raw.shape[:-1], *shape))
        start += size + -size % _ALIGN
    return tensors


# --- Precision: the dtypes in which a unit's values are sent and computed with ---

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
    """Return ``P(precision=...)``."""
    return cast("Precision | None", p.precision)


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


def check_trainable(units: Iterable[Unit], what: str) -> None:
    """Raise ValueError, naming the unit, where one is at rest in a codec: it is frozen, and bytes have no derivative."""
    for unit in units:
        if unit.at_rest:
            raise ValueError(
                f"unit '{unit.key}' is at rest in {unit.at_rest}, and so frozen: expected no {what} of it; set it apart with "
                "trainable, frozen = partition(params, spec), or leave at_rest= out of its P to train it"
            )
