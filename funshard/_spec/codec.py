"""Codec: what is sent of a unit's slice when it is gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Codec", "Form", "packed", "unpacked"]


@dataclass(frozen=True, repr=False)
class Codec:
    """How slices are sent in a gather: each rank computes with ``decode(*encode(slice))`` of every rank's slice.

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
    """

    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]

    def __repr__(self) -> str:  # the same on every rank
        names = (f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__qualname__)}" for fn in (self.encode, self.decode))
        return f"Codec({', '.join(names)})"

    def encoded(self, piece: Tensor) -> tuple[Tensor, ...]:
        """What is sent of a slice. TypeError if that is anything but tensors."""
        tensors = self.encode(piece)
        if not isinstance(tensors, tuple) or not all(isinstance(x, Tensor) for x in tensors) or not tensors:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = type(tensors).__name__ if tensors != () else "an empty one"
            raise TypeError(f"{self}: expected encode to return a tuple of tensors, got {got}")
        return tensors

    def decoded(self, tensors: Sequence[Tensor], numel: int) -> Tensor:
        """All slices, of so many elements each, end to end, from what was sent of them, stacked in dimension 0.

        ValueError if a slice has another length.
        """
        rows: Sequence[Tensor] | Tensor | None = None
        if not torch.compiler.is_compiling():  # which fuses what is written out, and recovers from no error
            with contextlib.suppress(Exception):  # of torch.vmap, or else decode raises it again
                rows = torch.vmap(self.decode)(*tensors)
        if rows is None:
            rows = [self.decode(*row) for row in zip(*tensors, strict=True)]
        shapes = [tuple(rows.shape[1:])] if isinstance(rows, Tensor) else [tuple(row.shape) for row in rows]
        if wrong := [shape for shape in shapes if shape != (numel,)]:
            raise ValueError(f"{self}: expected decode to return {numel} elements, got shape {list(wrong[0])}")
        return rows.flatten() if isinstance(rows, Tensor) else torch.cat(rows)


Form = tuple[tuple[torch.dtype, torch.Size], ...]
"""The dtypes and shapes of an encoded slice's tensors."""

_ALIGN = 16  # bytes: more than any dtype's


def packed(tensors: Iterable[Tensor]) -> tuple[Tensor, Form]:
    """``(bytes, form)``: tensors as one of uint8, to be sent at once. Inverse of `unpacked`."""
    parts: list[Tensor] = []
    form: list[tuple[torch.dtype, torch.Size]] = []
    for x in tensors:
        raw = x.contiguous().view(-1).view(torch.uint8)
        parts += [raw, raw.new_zeros(-len(raw) % _ALIGN)]
        form.append((x.dtype, x.shape))
    return torch.cat(parts), tuple(form)


def unpacked(raw: Tensor, form: Form) -> list[Tensor]:
    """The tensors, as views; of many at once where the bytes have dimensions before the last. Inverse of `packed`."""
    tensors: list[Tensor] = []
    start = 0
    for dtype, shape in form:
        size = shape.numel() * dtype.itemsize
        tensors.append(raw[..., start : start + size].view(dtype).view(*raw.shape[:-1], *shape))
        start += size + -size % _ALIGN
    return tensors
