"""A spec's fingerprint: a string that stands for its contents where torch.compile traces.

Dynamo guards the one string instead of every field that it would read, and a graph can hold it as a constant.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

__all__ = ["find_fingerprinted", "set_fingerprint"]

_FIRST: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The first live object of each fingerprint."""
_NUMBERS = itertools.count()


@functools.lru_cache(maxsize=256)
def _fingerprint(contents: Hashable) -> str:
    """Return a string that no other contents have; equal contents have the same one while it is cached."""
    return f"{next(_NUMBERS)}"


def set_fingerprint(owner: Any, contents: Hashable) -> None:
    """Set ``owner._fingerprint``, never the same string for other contents. Equal ones share it while they are in use.

    All live objects with a fingerprint hold the first one, so that it can be found while any of them lives.
    """
    fingerprint = _fingerprint(contents)
    first = _FIRST.setdefault(fingerprint, owner)
    object.__setattr__(owner, "_fingerprint", fingerprint)
    if first is not owner:
        object.__setattr__(owner, "_equal", first)


def find_fingerprinted(fingerprint: str) -> Any:
    """Return the first object with this fingerprint. One that has it must be alive."""
    return _FIRST[fingerprint]
