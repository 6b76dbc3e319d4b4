"""The layout, in bytes, of a buffer whose parameters have several dtypes, as ``Precision(keep=...)`` gives them.

    dtypes   | norm1 f32 | qkv bf16                | norm2 f32 | mlp bf16              |
    slices   | rank 0              | rank 1              | rank 2        | rank 3         |

The buffer has the unit's elements in their order, each in its own dtype. So a slice is one range of its bytes, and a parameter
is a view. Slices of equally many elements have different numbers of bytes. Each is sent padded to the longest, by one
all-gather, and one copy joins them without that padding.

In data flow the buffer is one tensor of a dtype that has all their values, because bytes have no derivative.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.layout import from_memory_order, unflatten_unit
from .._core.unit import Unit
from .._spec.precision import check_begins, resolve_dtypes

Run = tuple[int, torch.dtype]
"""A number of neighbouring elements, and their dtype."""


class SliceGroup(NamedTuple):
    """Neighbouring slices with equal runs: the number of slices, the runs of each, and the bytes of each."""

    number: int
    runs: tuple[Run, ...]
    nbytes: int


@dataclass(frozen=True)
class MixedLayout:
    """The layout in bytes of a buffer of several dtypes: its runs of one dtype, and its slices."""

    runs: tuple[Run, ...]
    num_slices: int
    index: int | None
    """Which slice this rank has; None where no process is one rank."""
    offsets: tuple[tuple[int, torch.dtype], ...] = field(default=(), compare=False)
    """Where each parameter begins, in bytes, and its dtype."""
    slices: tuple[SliceGroup, ...] = field(init=False, compare=False, repr=False)
    """The slices, neighbours of the same runs together: few, however many ranks there are."""
    sent_bytes: int = field(init=False, compare=False, repr=False)
    """The bytes that each rank sends: those of the longest slice."""
    buffer_bytes: int = field(init=False, compare=False, repr=False)
    """The bytes of the whole buffer."""

    def __post_init__(self) -> None:
        slices = tuple(_group_slices(self.runs, sum(numel for numel, _ in self.runs) // self.num_slices))
        object.__setattr__(self, "slices", slices)
        object.__setattr__(self, "sent_bytes", max(group.nbytes for group in slices))
        object.__setattr__(self, "buffer_bytes", _count_run_bytes(self.runs))

    @property
    def is_padded(self) -> bool:
        """Whether some slice is padded to be sent."""
        return self.sent_bytes * self.num_slices > self.buffer_bytes

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of its parameters."""
        return tuple(dict.fromkeys(dtype for _, dtype in (*self.offsets, *self.runs)))

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the buffer in data flow, which has the values of all of them."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    def encode(self, piece: Tensor) -> Tensor:
        """Return the bytes to send of this rank's slice, which lies in dimension 0 and may be batched along others."""
        ends = itertools.accumulate(group.number for group in self.slices)
        own = next(group for group, end in zip(self.slices, ends, strict=True) if (self.index or 0) < end)
        pieces = piece.split([numel for numel, _ in own.runs])
        parts = [view_as_bytes(part.to(dtype)) for part, (_, dtype) in zip(pieces, own.runs, strict=True)]
        return torch.cat([*parts, parts[0].new_zeros((self.sent_bytes - own.nbytes) * piece[0].numel())])

    def join(self, raw: Tensor, batch: int = 1) -> Tensor:
        """Return the buffer's bytes from those that all ranks have sent, perhaps batched."""
        rows, parts, first = raw.view(self.num_slices, -1), list[Tensor](), 0
        for count, _, size in self.slices:
            parts.append(rows[first : first + count, : size * batch].reshape(-1))
            first += count
        return torch.cat(parts)

    def join_into(self, raw: Tensor, out: Tensor) -> Tensor:
        """Write the buffer's bytes to ``out``, from those that all ranks have sent. Return ``out``."""
        at, begin = int(raw.storage_offset()), int(out.storage_offset())
        for count, _, size in self.slices:
            into = out.as_strided((count, size), (size, 1), begin)
            into.copy_(raw.as_strided((count, size), (self.sent_bytes, 1), at))
            at, begin = at + count * self.sent_bytes, begin + count * size
        return out

    def widen(self, raw: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the buffer in the wide dtype, from the bytes of all ranks, batched as a slice of this shape."""
        batch = torch.Size(shape[1:]).numel()
        runs = self.join(raw, batch).split_with_sizes([n * dtype.itemsize * batch for n, dtype in self.runs])
        values = [run.view(dtype).to(self.wide) for run, (_, dtype) in zip(runs, self.runs, strict=True)]
        return torch.cat(values).view(-1, *shape[1:])

    def unflatten(self, buffer: Tensor, unit: Unit) -> list[Tensor]:
        """Return the unit's parameters as views of its buffer's bytes, by one split for each dtype."""
        views: dict[int, Tensor] = {}
        for own in self.dtypes:
            sizes: list[int] = []
            end = 0
            for (offset, dtype), param in zip(self.offsets, unit.params, strict=True):
                if dtype == own:
                    begin = offset // dtype.itemsize if param.numel else end
                    sizes += [begin - end, param.numel]
                    end = begin + param.numel
            typed = view_whole_elements(buffer, own)
            pieces = iter(typed.split_with_sizes([*sizes, len(typed) - end])[1::2])
            for i, ((_, dtype), param) in enumerate(zip(self.offsets, unit.params, strict=True)):
                if dtype == own:
                    views[i] = from_memory_order(next(pieces), param)
        return [views[i] for i in range(len(views))]


def make_mixed_layout(
    unit: Unit, padded_numel: int, num_slices: int, default: torch.dtype, index: int | None
) -> MixedLayout | None:
    """Return the layout of a unit's buffer in bytes, or None if all its parameters have one dtype in use.

    ``default`` is that of the parameters which its `Precision` does not keep in another one, ``index`` says which slice this
    rank has, if it is known. Raises ValueError where a parameter would begin between two elements of its dtype.
    """
    param_dtypes = find_param_dtypes(unit, default)
    if not unit.param_dtypes or len({*param_dtypes}) == 1:
        return None
    check_begins(unit, default)
    dtypes = iter(param_dtypes)
    runs: list[Run] = []  # not list[Run](), which Dynamo does not trace
    offsets: list[tuple[int, torch.dtype]] = []
    begin = 0
    for size, param in (*unit.parts, (padded_numel - unit.span, None)):
        dtype = next(dtypes) if param is not None else runs[-1][1] if runs else default
        if param is not None:
            offsets.append((begin, dtype))
        begin += size * dtype.itemsize
        if runs and runs[-1][1] == dtype:
            runs[-1] = runs[-1][0] + size, dtype
        elif size:
            runs.append((size, dtype))
    return MixedLayout(tuple(runs), num_slices, index, tuple(offsets))


def find_param_dtypes(unit: Unit, default: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtype in use of each of the unit's parameters: ``default`` unless `Precision` keeps another."""
    return tuple(kept or default for kept in unit.param_dtypes) or (default,) * len(unit.params)


def cast_views(buffer: Tensor, unit: Unit, shard_dtype: torch.dtype) -> list[Tensor]:
    """Return a unit's parameters from its buffer in data flow: views of it, or casts of views to their own dtypes."""
    views = unflatten_unit(buffer, unit)
    if not unit.param_dtypes:
        return views
    return [view.to(dtype) for view, dtype in zip(views, _find_computed_dtypes(unit, shard_dtype), strict=True)]


def split_by_dtype(buffer: Tensor, unit: Unit, shard_dtype: torch.dtype) -> list[Tensor]:
    """Split a buffer in data flow into one for each dtype, with the parameters of that dtype end to end.

    The wide buffer need not live longer. Without parameters in dtypes of their own it is the only one.
    """
    if not unit.param_dtypes:
        return [buffer]
    dtypes = _find_computed_dtypes(unit, shard_dtype)
    parts = buffer[: unit.span].split_with_sizes([size for size, _ in unit.parts])
    pieces = [x for x, (_, param) in zip(parts, unit.parts, strict=True) if param]
    return [
        torch.cat([piece.to(own) for piece, own in zip(pieces, dtypes, strict=True) if own == dtype])
        for dtype in dict.fromkeys(dtypes)
    ]


def view_by_dtype(buffers: Sequence[Tensor], unit: Unit, shard_dtype: torch.dtype) -> list[Tensor]:
    """Return a unit's parameters as views of its buffers, one for each dtype, which `split_by_dtype` returns."""
    if not unit.param_dtypes:
        return unflatten_unit(buffers[0], unit)
    dtypes = _find_computed_dtypes(unit, shard_dtype)
    sized = [*zip(dtypes, (param.numel for param in unit.params), strict=True)]
    pieces = {x.dtype: iter(x.split_with_sizes([numel for dtype, numel in sized if dtype == x.dtype])) for x in buffers}
    return [from_memory_order(next(pieces[dtype]), param) for param, dtype in zip(unit.params, dtypes, strict=True)]


def _find_computed_dtypes(unit: Unit, shard_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return find_param_dtypes(unit, resolve_dtypes(unit.p, shard_dtype).param)


def view_whole_elements(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bytes of a buffer in a dtype, without the last bytes if they are no whole element."""
    left = len(buffer) % dtype.itemsize
    return (buffer[: len(buffer) - left] if left else buffer).view(dtype)


def _group_slices(runs: Sequence[Run], length: int) -> Iterator[SliceGroup]:
    """Split runs into slices of ``length`` elements; yield neighbouring slices with equal runs as one group."""
    some: list[Run] = []
    missing = length
    for numel, dtype in runs:
        while numel:
            if missing == length and numel >= length:
                yield SliceGroup(numel // length, ((length, dtype),), length * dtype.itemsize)
                numel %= length
                continue
            some.append((min(numel, missing), dtype))
            numel, missing = numel - some[-1][0], missing - some[-1][0]
            if not missing:
                yield SliceGroup(1, tuple(some), _count_run_bytes(some))
                some, missing = [], length


def _count_run_bytes(runs: Sequence[Run]) -> int:
    return sum(numel * dtype.itemsize for numel, dtype in runs)


def view_as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8, 1-D, because not every backend sends every dtype: a view if it is contiguous."""
    return x.contiguous().view(-1).view(torch.uint8)
