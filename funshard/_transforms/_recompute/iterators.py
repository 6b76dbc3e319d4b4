"""Positions of iterators that cannot be copied: comparable values that tell whether a run has advanced one."""

from __future__ import annotations

import gc
import io
import itertools
import operator
import types
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .adapters import PLAIN_TYPES

__all__ = ["find_referents", "read_position"]

_MAX_VALUES = 1000
"""The number of values that a position has at most; the nearest ones, for a generator that refers to a large structure."""


def read_position(iterator: Any) -> list[Any]:
    """Return a list that changes when the iterator moves on. Where that cannot be seen, it equals no other list."""
    position: list[Any] = []
    queue: deque[Any] = deque(_read_iterator(iterator) or [object()])
    seen: dict[int, Any] = {id(iterator): iterator}  # it keeps temporary objects alive, whose ids would be reused
    while queue and len(position) < _MAX_VALUES:
        value = queue.popleft()
        is_iterator = hasattr(type(value), "__next__")
        if type(value) in PLAIN_TYPES or type(value) is object:
            position.append(value)
            continue
        position.append(type(value) if is_iterator or isinstance(value, _CONTAINERS) else id(value))
        if id(value) not in seen:
            seen[id(value)] = value
            if is_iterator:
                queue.extendleft(_read_iterator(value))
            else:
                queue.extend(_read_state(value))
    return position


_CONTAINERS = (tuple, list, dict, set, deque, types.CellType)


def _read_iterator(iterator: Any) -> Sequence[Any]:
    """Return values that change when an iterator moves on, and objects that do; nothing if none are known."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return ["ended"]
        return [frame.f_lasti, *find_referents(iterator)]
    if isinstance(iterator, io.IOBase):
        try:
            if iterator.closed:
                return [None]
            in_memory = isinstance(iterator, io.StringIO | io.BytesIO)
            return [iterator.tell() if iterator.readable() else None, *([iterator.getvalue()] if in_memory else [])]
        except OSError:  # not seekable, or next() has disabled it
            return []
    if hasattr(iterator, "__length_hint__"):
        return [operator.length_hint(iterator)]
    if isinstance(iterator, itertools.count):
        return [repr(iterator)]
    cls = type(iterator)
    if cls.__module__ in ("builtins", "itertools") and cls.__reduce__ is not object.__reduce__ and cls is not _CALL_ITERATOR:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 deprecates it for itertools
            return iterator.__reduce__()[1:]
    if hasattr(iterator, "__dict__"):
        return [*vars(iterator).values()]
    return [x for x in gc.get_referents(iterator) if hasattr(type(x), "__next__")]


def find_referents(iterator: Any) -> list[Any]:
    """Return what an iterator refers to: of a generator its local variables, and the iterators of its loops."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is None:
        return gc.get_referents(iterator)
    unrelated = {id(x) for x in (frame, frame.f_globals, frame.f_builtins)}
    return [x for x in gc.get_referents(iterator, frame) if id(x) not in unrelated]


_CALL_ITERATOR = type(iter(int, 1))


def _read_state(value: Any) -> Iterable[Any]:
    """Return what a generator may change in a value that it refers to."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ or ()
    if isinstance(value, (*_CONTAINERS, types.MethodType)):
        referents = gc.get_referents(value)
        return referents if len(referents) <= 100 else [len(referents)]
    return () if isinstance(value, Tensor | nn.Module) else getattr(value, "__dict__", {}).values()
