"""Which adapter an object has: that of its class, or of the container that its class derives from, with its attributes.

Objects that have one: dicts and their views, lists, sets, deques, tuples, objects with ``__dict__`` or ``__slots__``,
functions (closures, defaults and attributes), bound methods, functools.partial, threading.local, WeakKeyDictionary, random
number generators, and modules (without their parameters). Any other object is a constant.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ..._spec.spec import PartitionSpec
from ..._spec.unit_state import UnitState
from ...collectives._mesh import Mesh, Simulated
from .adapters import ADAPTERS, Contents, ObjectAdapter, Part, ordered_elements, refill, to_part
from .array_adapters import find_array_adapter
from .stateful_adapters import STATEFUL_ADAPTERS, find_generator_adapter, find_simulated_ranks

__all__ = ["find_adapter"]


def find_adapter(obj: Any) -> ObjectAdapter | None:
    """Return the adapter of an object; None for a constant."""
    if isinstance(obj, types.FunctionType):
        is_ours = str(obj.__globals__.get("__name__", "")).partition(".")[0] in ("funshard", "torch")
        return None if is_ours else ADAPTERS[types.FunctionType]
    if isinstance(obj, PartitionSpec | Mesh | Simulated):
        return STATEFUL_ADAPTERS[Simulated] if find_simulated_ranks(obj) else None
    return _find_by_class(type(obj))


@functools.lru_cache(maxsize=4096)
def _find_by_class(cls: type) -> ObjectAdapter | None:
    """Return the adapter of the objects of a class, None for constants."""
    if issubclass(cls, nn.Module):
        return STATEFUL_ADAPTERS[nn.Module]
    for base in (tuple, frozenset, threading.local):
        if issubclass(cls, base):
            return ADAPTERS[base]
    if adapter := ADAPTERS.get(cls) or STATEFUL_ADAPTERS.get(cls):
        return adapter
    if adapter := find_array_adapter(cls):
        return adapter
    if cls is UnitState:
        return _make_adapter(cls)
    if adapter := find_generator_adapter(cls):
        return adapter
    package, _, module = cls.__module__.partition(".")
    is_opaque = package in _OPAQUE_PACKAGES or (package == "torch" and module.partition(".")[0] != "distributions")
    if hasattr(cls, "__next__") and (is_opaque or package == "_io" or not cls.__dictoffset__):
        return STATEFUL_ADAPTERS[Iterator]
    return None if is_opaque or issubclass(cls, enum.Enum | type) else _make_adapter(cls)


def _dict_access(base: Any) -> tuple[Callable[[Any], Part], Callable[[Any, list[Any], list[Any]], None]]:
    """Return how to read and fill the items of a dict class, whatever a subclass overrides."""

    def fill(obj: Any, names: list[Any], values: list[Any]) -> None:
        base.clear(obj)
        for name, value in zip(names, values, strict=True):
            base.__setitem__(obj, name, value)

    return lambda obj: (list(base.keys(obj)), list(base.values(obj))), fill


def _sequence_access(base: Any) -> tuple[Callable[[Any], Part], Callable[[Any, list[Any], list[Any]], None]]:
    """Return how to read and fill the elements of a list, a set or a deque, whatever a subclass overrides."""

    def fill(obj: Any, _: list[Any], values: list[Any]) -> None:
        base.clear(obj)
        (base.update if base is set else base.extend)(obj, values)

    read = ordered_elements if base is set else lambda obj: list(base.__iter__(obj))
    return lambda obj: (list(range(len(obj))), read(obj)), fill


_CONTAINER_BASES: dict[type, tuple[Any, Any]] = {
    object: (None, None),
    types.SimpleNamespace: (None, None),
    **{base: _dict_access(base) for base in (dict, OrderedDict, defaultdict)},
    **{base: _sequence_access(base) for base in (list, set, deque)},
}
"""How to read and fill the items of classes that may have attributes as well; None where there are no items."""


def _make_adapter(cls: type) -> ObjectAdapter | None:
    """Make the adapter of a class: items as its container base has them, then slots, then attributes."""
    bases = [base for base in cls.__mro__ if base in _CONTAINER_BASES or not base.__flags__ & _HEAP_TYPE]
    foreign = next((base for base in bases if base not in _CONTAINER_BASES), None)
    base = next(base for base in bases if base in _CONTAINER_BASES)
    read_items, fill_items = _CONTAINER_BASES[base]
    slots = [
        (name, slot)
        for one in reversed(cls.__mro__)
        for name, slot in vars(one).items()
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    ]
    if not (read_items or slots or cls.__dictoffset__) or (foreign and not cls.__dictoffset__):
        return None

    def read(obj: Any) -> Contents:
        contents = [] if read_items is None else [read_items(obj)]
        if slots:
            contents.append(_read_slots(obj, slots))
        if cls.__dictoffset__:
            contents.append(to_part(_attributes_of(obj)))
        return contents

    def fill(obj: Any, contents: Contents) -> None:
        contents = list(contents)
        if fill_items is not None:
            fill_items(obj, *contents.pop(0))
        if slots:
            _fill_slots(obj, slots, contents.pop(0))
        if contents:
            refill(_attributes_of(obj), contents.pop(0))

    def make_empty(maxlen: Any) -> Any:
        if foreign or hasattr(cls, "__del__"):
            raise TypeError(f"it is a {foreign.__name__}" if foreign else "its class has __del__")
        empty: Any = base.__new__(cls)  # pyright: ignore
        if isinstance(empty, deque):
            deque.__init__(empty, (), maxlen)
        return empty

    return ObjectAdapter(read, fill, make_empty, (lambda obj: obj.maxlen) if base is deque else lambda obj: None)


_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the flag of classes that Python defines (and some that C does, as deque from Python 3.12 on)."""
_OPAQUE_PACKAGES = {
    "funshard", "logging", "threading", "concurrent", "multiprocessing", "asyncio", "weakref", "contextvars", "_thread",
}  # fmt: skip


def _attributes_of(obj: Any) -> dict[str, Any]:
    """Return an object's own ``__dict__``, past properties of that name; {} without one."""
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}


def _read_slots(obj: Any, slots: Sequence[tuple[str, Any]]) -> Part:
    """Return the names and values of the slots that are set."""
    names, values = [], []
    for name, slot in slots:
        with contextlib.suppress(AttributeError):
            values.append(slot.__get__(obj))
            names.append(name)
    return names, values


def _fill_slots(obj: Any, slots: Sequence[tuple[str, Any]], part: Part) -> None:
    """Set an object's slots to these values, and delete the others."""
    values = dict(zip(*part, strict=True))
    for name, slot in slots:
        if name in values:
            slot.__set__(obj, values[name])
        else:
            with contextlib.suppress(AttributeError):
                slot.__delete__(obj)
