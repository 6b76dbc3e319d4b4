"""Divide flat ranges of tensors into N-d boxes, and among the ranks that hold them."""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "RangeSharer", "check_tiles", "range_to_boxes", "split_range"]

MAX_BOX_BYTES = 16 << 20
"""The most bytes of a box, which is read and checked at once: a reader of a part of a box reads all of it."""
MIN_SHARED_BYTES = 1 << 20
"""A range is divided among its holders into parts of at least so many bytes: a box has about 1,500 bytes of overhead."""
PRIME = (1 << 61) - 1


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)


def range_to_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes that elements ``begin`` to ``end`` of a tensor in row-major order consist of, in this order.

    There are at most ``2 * len(shape) - 1``. A tensor without elements or dimensions is one box.

    >>> [tuple(box) for box in range_to_boxes([3, 4], 2, 12)]
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if not math.prod(shape):
        return [Box((0,) * len(shape), tuple(shape))]
    return list(_iter_boxes(tuple(shape), begin, end))


def _iter_boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes that the elements ``begin`` to ``end`` of a row-major tensor make up, in order."""
    if begin == end:
        return
    if len(shape) < 2:
        yield Box((begin,), (end - begin,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the complete rows
    if first > last:  # within one row
        yield from _boxes_in_row(shape, last, begin, end)
        return
    yield from _boxes_in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _boxes_in_row(shape, last, last * row, end)


def _boxes_in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes of the flat tensor's elements begin..end, all of which lie in this row of dimension 0."""
    start = row * math.prod(shape[1:])
    for box in _iter_boxes(shape[1:], begin - start, end - start):
        yield Box((row, *box.offsets), (1, *box.sizes))


def check_tiles(shape: Sequence[int], pieces: Iterable[Box]) -> None:
    """Check that boxes tile a tensor: every element is in exactly one of them. Raises ValueError otherwise.

    The check takes linear time, by the Schwartz-Zippel lemma. The mixed difference of a sum of boxes is a sum over their
    corners, and determines the sum. Each coordinate of each dimension gets a random number mod a prime. A box becomes the
    product over dimensions of (number of its begin - number of its end), and boxes that tile the tensor add up to the
    tensor's own product. Other boxes do so for one draw in 2 ** 55.
    """
    numbers = [defaultdict[int, int](lambda: secrets.randbelow(PRIME)) for _ in shape]

    def product(box: Box) -> int:
        out = 1
        for known, begin, size in zip(numbers, box.offsets, box.sizes, strict=True):
            out = out * (known[begin] - known[begin + size]) % PRIME
        return out

    total = 0
    elements = 0
    for box in pieces:
        if any(
            begin < 0 or size < 0 or begin + size > end for begin, size, end in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise ValueError(f"the piece of {list(box.sizes)} at {list(box.offsets)} is not inside of {list(shape)}")
        total += product(box)
        elements += box.numel
    if elements != (numel := math.prod(shape)):
        raise ValueError(f"expected {numel} elements in its pieces, got {elements}")
    if (total - product(Box((0,) * len(shape), tuple(shape)))) % PRIME:
        raise ValueError("its pieces overlap")


def split_range(begin: int, end: int, itemsize: int) -> list[tuple[int, int]]:
    """Return a range of elements as ranges of at most `MAX_BOX_BYTES` bytes."""
    step = max(MAX_BOX_BYTES // itemsize, 1)
    return [(at, min(at + step, end)) for at in range(begin, end, step)] or [(begin, end)]


class RangeSharer:
    """An even division of ranges among the ranks that hold them, in the same way on each of these ranks."""

    def __init__(self) -> None:
        # the bytes that each holder writes, by the number of holders and their axes
        self._shares: dict[tuple[int, tuple[str, ...] | None], list[int]] = {}

    def share(
        self, begin: int, end: int, itemsize: int, rank: int, ranks: int, axes: tuple[str, ...] | None = None
    ) -> list[tuple[int, int]]:
        """Return what ``rank`` writes of the next range that ``ranks`` ranks hold: those with the fewest bytes come first.

        The ranks along ``axes`` hold the same ranges for these axes, and perhaps different ones for others: each counts alone.
        """
        shares = self._shares.setdefault((ranks, axes), [0] * ranks)
        length = end - begin
        parts = max(1, min(ranks, length * itemsize // MIN_SHARED_BYTES))
        mine: list[tuple[int, int]] = []
        for i, holder in enumerate(reversed(sorted(range(ranks), key=shares.__getitem__)[:parts])):  # later parts are longer
            low, high = begin + length * i // parts, begin + length * (i + 1) // parts
            shares[holder] += (high - low) * itemsize
            if holder == rank:
                mine.append((low, high))
        return mine
