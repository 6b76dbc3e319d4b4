"""How often a function comes across what it is to save: the rest of a run then needs no dispatch mode.

A count too low costs a recomputation and one too high the mode, never a number.
"""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping

from torch.utils.weak import WeakIdKeyDictionary

from ..._spec.remat import Remat, Save

__all__ = ["find_count", "record_count"]

_COUNTS: MutableMapping[object, dict[Save, int]] = WeakIdKeyDictionary()
"""For each function and each set to save from it, the largest count of its runs."""


def find_count(function: object, remat: Remat) -> int | None:
    """Return how often earlier first runs came across what is to be saved; None if a function has to see every operator."""
    if not isinstance(remat.save, frozenset):
        return None
    return _counts_of(function).get(remat.save)


def record_count(function: object, remat: Remat, count: int) -> None:
    """Record how often a first run came across what is to be saved."""
    if isinstance(remat.save, frozenset):
        counts = _counts_of(function)
        counts[remat.save] = max(count, counts.get(remat.save, 0))


def _counts_of(function: object) -> dict[Save, int]:
    """Return the counts kept for a function; a new dict, which nothing keeps, if it takes no weak reference."""
    with contextlib.suppress(TypeError):  # an object without weak references
        return _COUNTS.setdefault(function, {})
    return {}
