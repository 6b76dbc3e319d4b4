"""Graph keys: a string that stands for the contents of a frozen object where torch.compile traces.

Dynamo guards the one string instead of every field that it would read, and a graph can hold it as a constant.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

_FIRST: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The first live object of each graph key."""


_NUMBERS = itertools.count()


@functools.lru_cache(maxsize=256)
def _make_key(contents: Hashable) -> str:
    """Return a string that no other contents have; equal contents have the same one while it is cached."""
    return f"{next(_NUMBERS)}"


def set_graph_key(owner: Any, contents: Hashable) -> None:
    """Set ``owner._graph_key``, never the same string for other contents. Equal ones share it while they are in use.

    All live objects with a graph key hold the first one, so that it can be found while any of them lives.
    """
    graph_key = _make_key(contents)
    first = _FIRST.setdefault(graph_key, owner)
    object.__setattr__(owner, "_graph_key", graph_key)
    if first is not owner:
        object.__setattr__(owner, "_equal", first)


def find_by_graph_key(graph_key: str) -> Any:
    """Return the first object with this graph key. One that has it must be alive."""
    return _FIRST[graph_key]
