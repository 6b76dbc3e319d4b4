"""Adapters that read an object's contents and make another object of them: the interface; callables, tuples and views.

pickle's ``__reduce_ex__`` would run ``__getstate__`` and ``__reduce__`` of users' classes, which leave out caches, and it
has no rule for functions, cells, bound methods and views of dicts.
"""

from __future__ import annotations

import functools
import gc
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

__all__ = ["ADAPTERS", "PLAIN_TYPES", "Contents", "ObjectAdapter", "OpaqueState", "Part"]
__all__ += ["ordered_elements", "read_cell", "refill", "to_part"]

Part = tuple[list[Any], list[Any]]
"""Names or keys, and the values in the same order."""

Contents = list[Part]
"""The parts of an object: its items, its slots, its attributes and so on."""


class OpaqueState:
    """The state of a random number generator or the position of an iterator, which can only be compared."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpaqueState):
            return False
        return torch.equal(self.value, other.value) if isinstance(self.value, Tensor) else bool(self.value == other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


PLAIN_TYPES = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, types.BuiltinFunctionType, types.ModuleType, OpaqueState}
)
"""The types of constants that are compared by value."""


@dataclass(frozen=True)
class ObjectAdapter:
    """Functions that read the objects of a class, and make one."""

    read: Callable[[Any], Contents]
    fill: Callable[[Any, Contents], Any]
    """``fill(obj, contents)`` replaces what a mutable object contains; ``fill(context, contents)`` makes an immutable one."""
    make_empty: Callable[[Any], Any] | None = None
    """``make_empty(context)`` makes a mutable object; None for an immutable class."""
    get_context: Callable[[Any], Any] = lambda obj: None
    """Return what another object is made from, beside the contents."""

    @property
    def is_mutable(self) -> bool:
        """Whether a run can change an object of the class."""
        return self.make_empty is not None


def to_part(mapping: Mapping[Any, Any]) -> Part:
    """Return the keys and the values of a mapping."""
    return list(mapping), list(mapping.values())


def refill(mapping: MutableMapping[Any, Any], part: Part) -> None:
    """Replace all items of a mapping."""
    mapping.clear()
    mapping.update(zip(*part, strict=True))


def ordered_elements(obj: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the elements of a set; plain values in the same order for equal sets."""
    elements = list(set.__iter__(obj) if isinstance(obj, set) else frozenset.__iter__(obj))
    plain = all(type(element) in PLAIN_TYPES for element in elements)
    return sorted(elements, key=lambda element: (type(element).__name__, repr(element))) if plain else elements


def _immutable_adapter(base: Any, read: Callable[[Any], Part]) -> ObjectAdapter:
    """Return the adapter of tuple or frozenset and its subclasses, which may have attributes and their own ``__new__``."""

    def make(cls: Any, contents: Contents) -> Any:
        is_structseq = hasattr(cls, "n_sequence_fields")  # torch.return_types.max: only its own __new__ is safe
        obj = cls(contents[0][1]) if is_structseq else base.__new__(cls, contents[0][1])
        if len(contents) > 1:
            vars(obj).update(zip(*contents[1], strict=True))
        return obj

    return ObjectAdapter(
        lambda obj: [read(obj), *([to_part(vars(obj))] if type(obj).__dictoffset__ else [])], make, get_context=type
    )


def _view_adapter(make: Callable[[Any], Any]) -> ObjectAdapter:
    """Return the adapter of a view of a dict, which refers to the dict but has no attribute for it."""
    return ObjectAdapter(lambda view: [(["mapping"], gc.get_referents(view)[:1])], lambda _, contents: make(contents[0][1][0]))


_VIEW_METHODS: list[Any] = [getattr(base, name) for base in (dict, OrderedDict) for name in ("keys", "values", "items")]


def _make_partial(cls: Any, contents: Contents) -> Any:
    """Make a functools.partial from its contents."""
    (_, (func, *args)), keywords, attributes = contents
    partial = cls(func, *args, **dict(zip(*keywords, strict=True)))
    vars(partial).update(zip(*attributes, strict=True))
    return partial


def _read_function(f: Any) -> Contents:
    """Read the function's own dicts, not copies: what is written into them is in the function."""
    return [
        (list(f.__code__.co_freevars), list(f.__closure__ or ())),
        (["__defaults__", "__kwdefaults__", "__dict__"], [f.__defaults__, f.__kwdefaults__, vars(f)]),
    ]


def _make_function(context: Any, contents: Contents) -> Any:
    """Make a function with the same code from its contents: cells, defaults and attributes."""
    (_, cells), (_, (defaults, keyword_defaults, attributes)) = contents
    code, variables, name = context
    function = types.FunctionType(code, variables, name, defaults, tuple(cells))
    function.__kwdefaults__, function.__dict__ = keyword_defaults, attributes
    return function


def read_cell(cell: Any) -> Contents:
    """Return what is in the cell of a closure, if it is set."""
    try:
        return [(["cell_contents"], [cell.cell_contents])]
    except ValueError:  # not set yet
        return [([], [])]


def _fill_cell(cell: Any, contents: Contents) -> None:
    for value in contents[0][1]:
        cell.cell_contents = value


ADAPTERS: dict[type, ObjectAdapter] = {
    tuple: _immutable_adapter(tuple, lambda obj: (list(range(len(obj))), list(tuple.__iter__(obj)))),
    frozenset: _immutable_adapter(frozenset, lambda obj: (list(range(len(obj))), ordered_elements(obj))),
    types.MethodType: ObjectAdapter(
        lambda obj: [(["__func__", "__self__"], [obj.__func__, obj.__self__])],
        lambda _, contents: types.MethodType(*contents[0][1]),
    ),
    types.FunctionType: ObjectAdapter(
        _read_function, _make_function, get_context=lambda f: (f.__code__, f.__globals__, f.__name__)
    ),
    types.CellType: ObjectAdapter(read_cell, _fill_cell, lambda _: types.CellType()),
    functools.partial: ObjectAdapter(
        lambda obj: [
            # each argument by itself: a partial copies the containers of its arguments when it is made
            (["func", *(f"args[{i}]" for i in range(len(obj.args)))], [obj.func, *obj.args]),
            to_part(obj.keywords),
            to_part(vars(obj)),
        ],
        _make_partial,
        get_context=type,
    ),
    types.MappingProxyType: _view_adapter(types.MappingProxyType),
    **{type(make(make.__objclass__())): _view_adapter(make) for make in _VIEW_METHODS},
    threading.local: ObjectAdapter(  # a run sees the attributes of its own thread
        lambda obj: [to_part(vars(obj))],
        lambda obj, contents: refill(vars(obj), contents[0]),
        lambda cls: cls.__new__(cls),
        type,
    ),
    WeakKeyDictionary: ObjectAdapter(
        lambda obj: [to_part(obj)],
        lambda obj, contents: refill(obj, contents[0]),
        lambda _: WeakKeyDictionary[Any, Any](),
    ),
}
"""The adapters of these classes; of their subclasses only for tuple, frozenset and threading.local."""
