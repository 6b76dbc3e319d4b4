"""Codec: an encoding of slices, for their gather, for the reduction of their gradients, and at rest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from .. import _torch
from .._core.unit import Option, Unit, add_keyword

Encoding = tuple[tuple[torch.dtype, torch.Size], ...]
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
    keyword. ``name`` is its printed form. `funshard.codecs` has some.
    """

    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    block: int = field(default=1, kw_only=True)
    takes_dtype: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)
    _encodings: dict[tuple[int, torch.dtype], tuple[int, Encoding]] = field(default_factory=dict, init=False, compare=False)

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

    def _describe_encoding(self, numel: int, dtype: torch.dtype) -> tuple[int, Encoding]:
        """Return ``(number of bytes, encoding)`` of an encoded slice of so many elements, from shapes alone."""
        if _torch.is_in_graph():  # as PartitionSpec._compute_once
            return self._find_encoding(numel, dtype)
        if (numel, dtype) not in self._encodings:
            with _torch.below_transforms():
                self._encodings[numel, dtype] = self._find_encoding(numel, dtype)
        return self._encodings[numel, dtype]

    def _find_encoding(self, numel: int, dtype: torch.dtype) -> tuple[int, Encoding]:
        try:
            encoded = self._encode_slice(torch.empty(numel, dtype=dtype, device="meta"))
        except RuntimeError as error:
            raise TypeError(f"{self}: expected encode to run on shapes alone, on the meta device, got {error}") from error
        encoding = tuple((x.dtype, x.shape) for x in encoded)
        sizes = [shape.numel() * dtype.itemsize for dtype, shape in encoding]
        return sum(size + -size % _ALIGN for size in sizes), encoding

    def _decode_slices(self, tensors: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """Return all slices end to end in this dtype, from their encoded tensors stacked in dimension 0.

        Raises ValueError if a slice does not have ``numel`` elements.
        """
        decode = functools.partial(self.decode, dtype=dtype) if self.takes_dtype else self.decode
        stacked = _try_vmap(decode, tensors)
        rows: list[Tensor] = [decode(*row) for row in zip(*tensors, strict=True)] if stacked is None else []
        shapes = [row.shape for row in rows] if stacked is None else [stacked.shape[1:]]
        if wrong := [shape for shape in shapes if tuple(shape) != (numel,)]:
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


def pack_bytes(tensors: Iterable[Tensor]) -> tuple[Tensor, Encoding]:
    """Return ``(bytes, encoding)``: the tensors as one of uint8, to be sent at once. Inverse of `unpack_bytes`."""
    raw, encoding = pack_rows(x[None] for x in tensors)
    return raw[0], encoding


def pack_rows(tensors: Iterable[Tensor]) -> tuple[Tensor, Encoding]:
    """Return ``(bytes, encoding)`` as `pack_bytes` for each row of the tensors."""
    parts: list[Tensor] = []
    encoding: list[tuple[torch.dtype, torch.Size]] = []
    for x in tensors:
        raw = _torch.view_as_dtype((x.flatten(1) if x.dim() > 1 else x[:, None]).contiguous(), torch.uint8)
        parts += [raw, raw.new_zeros(len(x), -raw.shape[1] % _ALIGN)]
        encoding.append((x.dtype, x.shape[1:]))
    return torch.cat(parts, 1), tuple(encoding)


def unpack_bytes(raw: Tensor, encoding: Encoding) -> list[Tensor]:
    """Return the tensors in these bytes as views, batched over leading dimensions of the bytes. Inverse of `pack_bytes`."""
    tensors: list[Tensor] = []
    start = 0
    for dtype, shape in encoding:
        size = shape.numel() * dtype.itemsize
        part = _torch.view_as_dtype(raw[..., start : start + size], dtype)
        tensors.append(part.view(*raw.shape[:-1], *shape))
        start += size + -size % _ALIGN
    return tensors


def check_trainable(units: Iterable[Unit], what: str) -> None:
    """Raise ValueError, naming the unit, where one is at rest in a codec: it is frozen, and bytes have no derivative."""
    for unit in units:
        if unit.at_rest:
            raise ValueError(
                f"unit '{unit.key}' is at rest in {unit.at_rest}, and so frozen: expected no {what} of it; set it apart with "
                "trainable, frozen = partition(params, spec), or leave at_rest= out of its P to train it"
            )
