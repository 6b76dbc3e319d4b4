"""The objects and tensors that can be reached from some values, as tokens that can be compared between runs."""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import _torch
from ..._core.mesh import Mesh, Simulated
from ..._core.spec import PartitionSpec
from ..._spec.unit_state import UnitState
from .adapters import (
    ADAPTERS,
    PLAIN_TYPES,
    STATEFUL_ADAPTERS,
    Contents,
    ObjectAdapter,
    Part,
    find_array_adapter,
    find_generator_adapter,
    find_simulated_ranks,
    ordered_elements,
    read_module_state,
    refill,
    to_part,
)

__all__ = [
    "CONSTANT",
    "OBJECT",
    "TENSOR",
    "ReachableObjects",
    "Token",
    "attributes_equal",
    "check_result_attributes",
    "copy_attributes",
    "find_adapter",
    "names_equal",
    "read_contents",
    "tokens_equal",
    "with_attributes",
]


# --- Which adapter an object has: that of its class, or of the container that its class derives from, with its attributes ---
#
# Objects that have one: dicts and their views, lists, sets, deques, tuples, objects with ``__dict__`` or ``__slots__``,
# functions (closures, defaults and attributes), bound methods, functools.partial, threading.local, WeakKeyDictionary, random
# number generators, and modules (without their parameters). Any other object is a constant.


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


# --- What can be reached, as tokens ---

CONSTANT, TENSOR, OBJECT = range(3)
Token = tuple[int, Any]
"""``(CONSTANT, value)``, or the index of a tensor or an object: ``(TENSOR, i)``, ``(OBJECT, i)``."""
TokenPart = tuple[list[Any], list[Token]]
"""A part of an object's contents: names, and a token for each value."""


class ReachableObjects:
    """The objects that a run may change, and the tensors, in the order in which they are found.

    ``owned`` are modules whose `CALL_ATTRIBUTES` and submodules are not searched, ``constants`` the ids of tensors that are
    constants (None: `_find_registered`). ``more`` is searched last: what it leads to has another path where there is one.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        owned: Iterable[nn.Module],
        constants: frozenset[int] | None = None,
        more: Sequence[Any] = (),
    ) -> None:
        self.owned = set(owned)
        self.constants = constants or frozenset()
        self._search(roots, more)
        if constants is None and (registered := self._find_registered()):
            self.constants = registered
            self._search(roots, more)

    def _search(self, roots: Sequence[Any], more: Sequence[Any]) -> None:
        """Find all that the roots reach, then what the others reach besides."""
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []
        self.adapters: list[ObjectAdapter] = []  # of the objects
        self.contents: list[list[TokenPart]] = []
        self._object_indices: dict[int, int] = {}  # by id
        self._tensor_indices: dict[int, int] = {}
        self._object_parents: list[tuple[int, Any]] = []  # the object each one was found in, and its name there
        self._tensor_parents: list[tuple[int, Any]] = []
        self.roots = [self._token_of(value, -1, i) for i, value in enumerate(roots)]
        self._read_objects()
        for value in more:
            self._token_of(value, -1, len(roots))
        self._read_objects()

    def _read_objects(self) -> None:
        """Read the contents of the objects that were found and not read yet, and of those in them."""
        while (i := len(self.contents)) < len(self.objects):
            self.contents.append(
                [
                    (names, [self._token_of(v, i, n) for n, v in zip(names, values, strict=True)])
                    for names, values in read_contents(self.objects[i], self.adapters[i], self.owned)
                ]
            )

    def _find_registered(self) -> frozenset[int]:
        """Return the ids of registered parameters that other attributes of modules hold as well.

        They are constants there, as in ``_parameters``: nn.GRU has a list of its weights, which is stale in a call.
        """
        held = [i for i, x in enumerate(self.tensors) if type(x) is nn.Parameter and self._is_in_module(i)]
        if not held:
            return frozenset()
        mappings = (vars(obj)["_parameters"] for obj in self.objects if isinstance(obj, nn.Module))
        registered = {id(x) for mapping in mappings if isinstance(mapping, dict) for x in dict.values(mapping)}
        return frozenset(id(self.tensors[i]) for i in held) & registered

    def _is_in_module(self, i: int) -> bool:
        """Return whether a tensor was found inside a module."""
        parent = self._tensor_parents[i][0]
        while parent >= 0 and not isinstance(self.objects[parent], nn.Module):
            parent = self._object_parents[parent][0]
        return parent >= 0

    def _token_of(self, value: Any, parent: int, name: Any) -> Token:
        """Return a value's token; number it if it is a new tensor or object."""
        cls = type(value)
        if cls in PLAIN_TYPES or cls is _torch.StandIn:
            return CONSTANT, value
        if isinstance(value, Tensor):
            if id(value) in self.constants:
                return CONSTANT, value
            i = self._tensor_indices.setdefault(id(value), len(self.tensors))
            if i == len(self.tensors):
                self.tensors.append(value)
                self._tensor_parents.append((parent, name))
            return TENSOR, i
        adapter = find_adapter(value)
        if adapter is None or (name == "_parameters" and isinstance(self.objects[parent], nn.Module)):
            return CONSTANT, value
        i = self._object_indices.setdefault(id(value), len(self.objects))
        if i == len(self.objects):
            self.objects.append(value)
            self.adapters.append(adapter)
            self._object_parents.append((parent, name))
        return OBJECT, i

    def index_of(self, obj: object) -> int | None:
        """Return the index of an object; None if it was not reached."""
        return self._object_indices.get(id(obj))

    def value_of(self, token: Token) -> Any:
        """Return the constant, tensor or object that a token stands for."""
        kind, x = token
        return x if kind == CONSTANT else self.tensors[x] if kind == TENSOR else self.objects[x]

    def path_of(self, token: Token, root_names: Sequence[str]) -> str:
        """Return the path of a tensor or an object, such as ``args[0].layers[1].keys``."""
        parent, name = (self._tensor_parents if token[0] == TENSOR else self._object_parents)[token[1]]
        return self.path_in(parent, name, root_names)

    def path_in(self, parent: int, name: Any, root_names: Sequence[str]) -> str:
        """Return the path of an item of the object with index ``parent``; of a root if that is -1."""
        if parent < 0:
            return str(root_names[name]) if name < len(root_names) else "an object"
        obj = self.objects[parent]
        prefix = self.path_in(*self._object_parents[parent], root_names)
        if isinstance(obj, types.CellType | types.MethodType):
            return prefix
        if isinstance(obj, list | tuple | deque | dict):
            return f"{prefix}[{name!r}]"
        return f"{prefix}.{name}"


def read_contents(obj: Any, adapter: ObjectAdapter, owned: Iterable[nn.Module]) -> Contents:
    """Return what an object contains; of an owned module all but `CALL_ATTRIBUTES` and submodules."""
    return read_module_state(obj) if isinstance(obj, nn.Module) and obj in owned else adapter.read(obj)


def tokens_equal(a: Token, b: Token) -> bool:
    """Return whether two tokens are the same; constants of other than `PLAIN_TYPES` need only have the same type."""
    (kind, x), (other_kind, y) = a, b
    if kind != CONSTANT or other_kind != CONSTANT:
        return a == b
    if x is y or type(x) is not type(y):
        return x is y
    return type(x) not in PLAIN_TYPES or bool(x == y) or bool(x != x and y != y)


def names_equal(names: list[Any], others: list[Any]) -> bool:
    """Return whether two parts have the same names in the same order: tensors by identity, others by value."""
    if len(names) != len(others):
        return False
    if all(map(operator.is_, names, others)):  # nearly always
        return True
    return all(not (a is not b and (isinstance(a, Tensor) or a != b)) for a, b in zip(names, others, strict=True))


# --- Attributes of Python that tensors have, such as ``y.tag = 1``: autograd gives and returns other tensors ---


def with_attributes(x: Tensor, attributes: Mapping[str, Any] | None) -> Tensor:
    """Return an operand with these attributes: a view if it is the caller's tensor, which has others by now."""
    if not attributes or attributes_equal(vars(x), attributes):
        return x
    if vars(x):
        with torch.enable_grad():
            x = x.view_as(x)
    vars(x).update(attributes)
    return x


def attributes_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two tensors have the same attributes, by identity, but for Dynamo's own and a running call's ``set_``."""
    names = {name for name in (*a, *b) if name != "set_" and not _torch.is_compiler_attribute(name)}
    return all(name in a and name in b and a[name] is b[name] for name in names)


def check_result_attributes(results: Sequence[Tensor], name: str) -> None:
    """Raise RuntimeError if tensors can be reached from an attribute of a result: they would have no gradient."""
    for attributes in filter(None, map(vars, results)):
        for key, value in attributes.items():
            if ReachableObjects([value], ()).tensors:
                raise RuntimeError(
                    f"{name} sets the attribute '{key}' of a result to a tensor or an object with one, where it would have no "
                    "gradient: expected it returned beside the result"
                )


def copy_attributes(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, which autograd has made, with the first run's classes and attributes of Python."""
    out = [
        output.as_subclass(type(r)) if _torch.is_attribute_subclass(type(r)) else output
        for r, output in zip(results, outputs, strict=True)
    ]
    for result, output in zip(results, out, strict=True):
        vars(output).update(vars(result))
    return out
