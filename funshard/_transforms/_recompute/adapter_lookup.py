"""Kinds of objects: how to see what is in one, and how to make another one with other things in it.

Looked into are dicts and their views, lists, sets, deques, tuples, objects with ``__dict__`` or ``__slots__``, functions
(their closures, defaults and attributes), bound methods, functools.partial, threading.local, WeakKeyDictionary, generators of
random numbers, and modules (not their parameters). Anything else is a constant.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..._spec.spec import PartitionSpec
from ...collectives._mesh import Mesh, Simulated
from .adapters import Contents, ObjectAdapter
from .callable_adapters import FUNCTION
from .special_adapters import BASES, ITERATOR, LOCAL, MODULE, NUMPY, RANKS, SPECIAL, TUPLE, ranks_in

__all__ = ["find_adapter"]


def find_adapter(obj: Any) -> ObjectAdapter | None:
    """How to look into an object; None for a constant."""
    if isinstance(obj, types.FunctionType):
        mine = str(obj.__globals__.get("__name__", "")).partition(".")[0] in ("funshard", "torch")
        return None if mine else FUNCTION
    if isinstance(obj, PartitionSpec | Mesh | Simulated):
        return RANKS if ranks_in(obj) else None
    return _kind(type(obj))


@functools.lru_cache(maxsize=4096)
def _kind(cls: type) -> ObjectAdapter | None:
    if issubclass(cls, nn.Module):
        return MODULE
    if issubclass(cls, tuple):
        return TUPLE
    if cls in SPECIAL:
        return SPECIAL[cls]
    if issubclass(cls, threading.local):
        return LOCAL
    if hasattr(cls, "__next__") and not cls.__dictoffset__:  # one that C keeps
        return ITERATOR
    bases = [base for base in cls.__mro__ if base in BASES or not base.__flags__ & _HEAP]
    root, _, rest = cls.__module__.partition(".")
    if root == "numpy" and cls.__name__ == "Generator":
        return NUMPY
    alien = root in _ALIEN or (root == "torch" and rest.partition(".")[0] != "distributions")
    if alien or issubclass(cls, enum.Enum | type):
        return None
    opaque = next((base for base in bases if base not in BASES), None)
    base = next(base for base in bases if base in BASES)
    items, fill = BASES[base]
    slots = [
        (name, slot)
        for one in reversed(cls.__mro__)
        for name, slot in vars(one).items()
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    ]
    if not (items or slots or cls.__dictoffset__) or (opaque and not cls.__dictoffset__):
        return None

    def all_parts(obj: Any) -> Contents:
        parts = [] if items is None else [items(obj)]
        if slots:
            parts.append(_slots(obj, slots))
        if cls.__dictoffset__:
            attributes = _vars(obj)
            parts.append((list(attributes), list(attributes.values())))
        return parts

    def fill_all(obj: Any, parts: Contents) -> None:
        parts = list(parts)
        if fill is not None:
            fill(obj, *parts.pop(0))
        if slots:
            found = dict(zip(*parts.pop(0), strict=True))
            for name, slot in slots:
                if name in found:
                    slot.__set__(obj, found[name])
                else:
                    with contextlib.suppress(AttributeError):
                        slot.__delete__(obj)
        if parts:
            attributes = _vars(obj)
            attributes.clear()
            attributes.update(zip(*parts.pop(0), strict=True))

    def blank(like: Any) -> Any:
        if opaque or hasattr(cls, "__del__"):
            raise TypeError(f"it is a {opaque.__name__}" if opaque else "its class has __del__")
        made: Any = base.__new__(cls)  # pyright: ignore
        if isinstance(made, deque):
            deque.__init__(made, (), like)
        return made

    return ObjectAdapter(all_parts, (lambda obj: obj.maxlen) if base is deque else lambda obj: None, blank, fill_all)


_HEAP = 1 << 9
"""The flag of classes that Python defines (and some that C does, such as deque from Python 3.12 on)."""
_ALIEN = {"funshard", "logging", "threading", "concurrent", "multiprocessing", "asyncio", "weakref", "contextvars", "_thread"}


def _vars(obj: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}


def _slots(obj: Any, slots: Sequence[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
    names, values = [], []
    for name, slot in slots:
        with contextlib.suppress(AttributeError):
            values.append(slot.__get__(obj))
            names.append(name)
    return names, values
