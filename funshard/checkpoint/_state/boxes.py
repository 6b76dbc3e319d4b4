"""Flat ranges of a tensor as the N-d boxes that they cover, and who writes which part of what several ranks hold."""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "boxes", "check_tiles", "cut", "share"]

LARGEST = 16 << 20
"""Bytes of a box at most: what is read and checked at once. Readers of a part of a box read all of it."""
SMALLEST = 1 << 20
"""Bytes under which a range is not divided among the ranks that hold it: a box has some 1,500 bytes of its own."""
PRIME = (1 << 61) - 1


class Box(NamedTuple):
    """A part of a tensor: where it begins and how long it is, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes of elements ``begin`` to ``end`` of a tensor in row-major order; one after the other they are that range.

    At most ``2 * len(shape) - 1`` of them. A tensor without elements, or dimensions, is one box.

    >>> [tuple(box) for box in boxes([3, 4], 2, 12)]
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if not math.prod(shape):
        return [Box((0,) * len(shape), tuple(shape))]
    return list(_boxes(tuple(shape), begin, end))


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    if begin == end:
        return
    if len(shape) < 2:
        yield Box((begin,), (end - begin,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the rows that are whole
    if first > last:  # a part of one row
        yield from _in_row(shape, last, begin, end)
        return
    yield from _in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], at: int, begin: int, end: int) -> Iterator[Box]:
    start = at * math.prod(shape[1:])
    for box in _boxes(shape[1:], begin - start, end - start):
        yield Box((at, *box.offsets), (1, *box.sizes))


def check_tiles(shape: Sequence[int], pieces: Iterable[Box]) -> None:
    """Check that boxes tile a tensor: every element is in exactly one of them. Raises ValueError that says what is wrong.

    In linear time, by the lemma of Schwartz and Zippel. The mixed difference of a sum of boxes is a sum over their corners,
    and determines it. With a random number mod a prime for each coordinate of each dimension, a box becomes the product over
    dimensions of (number of its begin - number of its end), and boxes that tile the tensor add up to its own product. Others
    do so for one draw in 2 ** 55.
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


def cut(begin: int, end: int, itemsize: int) -> list[tuple[int, int]]:
    """The range in parts of at most `LARGEST` bytes."""
    step = max(LARGEST // itemsize, 1)
    return [(at, min(at + step, end)) for at in range(begin, end, step)] or [(begin, end)]


class share:  # noqa: N801  a function that remembers
    """Deals ranges that each of some ranks holds out among them, evenly, in the same way on each of them."""

    def __init__(self) -> None:
        self._dealt: dict[int, list[int]] = {}  # bytes, for each of so many ranks

    def __call__(self, begin: int, end: int, itemsize: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """What the rank writes of the next range that all ``ranks`` hold: those who write least are next."""
        dealt = self._dealt.setdefault(ranks, [0] * ranks)
        length = end - begin
        parts = max(1, min(ranks, length * itemsize // SMALLEST))
        mine: list[tuple[int, int]] = []
        for i, who in enumerate(reversed(sorted(range(ranks), key=dealt.__getitem__)[:parts])):  # later parts are longer
            low, high = begin + length * i // parts, begin + length * (i + 1) // parts
            dealt[who] += (high - low) * itemsize
            if who == rank:
                mine.append((low, high))
        return mine
