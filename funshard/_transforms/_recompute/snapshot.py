"""What a function is given, and what it leaves, as a table of objects: tensors, modules and classes stand beside it, by number.

Loaded with other tensors, the table gives each run objects of its own. Runs that leave equal tables have done the same.
"""

from __future__ import annotations

import builtins
import contextvars
import copyreg
import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import _torch
from ..._core.mesh import Mesh, ProcessAxis, Simulated
from ..._core.spec import PartitionSpec

__all__ = ["ATOMS", "Outcome", "Snapshot", "find_changed", "find_tensors", "is_copied", "is_watched", "load", "read_cell"]
__all__ += ["write_back"]

ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, types.ModuleType}
)
"""The types of values that nothing can change, and that contain no tensor."""

_SHARED = (nn.Module, types.FunctionType, types.BuiltinFunctionType, weakref.ref, contextvars.ContextVar)
_SHARED += tuple(ATOMS - {type(None), type(...)})
_CONTAINERS = (tuple, list, dict, set, Mesh, ProcessAxis, Simulated)


@functools.lru_cache(maxsize=4096)
def _is_shared(cls: type) -> bool:
    """Return whether all runs share an object of this class, as those of torch and of this library, but for containers."""
    package, _, module = cls.__module__.partition(".")
    is_opaque = package == "funshard" or (package == "torch" and not module.startswith("distributions"))
    is_container = issubclass(cls, _CONTAINERS) and not (
        issubclass(cls, tuple) and isinstance(cls.__reduce__, types.FunctionType)
    )
    return issubclass(cls, _SHARED) or (is_opaque and not is_container)


def _has_own_state(f: types.FunctionType) -> bool:
    """Return whether a function has a closure or defaults, and is none of torch or of this library."""
    has_state = bool(f.__closure__ or f.__defaults__ or f.__kwdefaults__)
    return has_state and str(f.__globals__.get("__name__", "")).partition(".")[0] not in ("funshard", "torch")


_COPIED = (Tensor, tuple, list, dict, set, deque, functools.partial, torch.Generator, random.Random)
"""The classes of attributes of which each run has its own copy, or its own state."""
_MAX_BYTES = 1 << 16
"""The size of the largest NumPy array among the attributes of a module that is copied: larger ones are tables."""


def is_copied(value: Any) -> bool:
    """Return whether each run gets its own copy of an attribute of a module."""
    if isinstance(value, tuple) and all(type(x) in ATOMS for x in value):  # pyright: ignore[reportUnknownVariableType]
        return False
    if isinstance(value, types.FunctionType):
        return _has_own_state(value)
    if type(value).__module__.partition(".")[0] == "numpy":
        return getattr(value, "nbytes", 0) <= _MAX_BYTES
    return isinstance(value, _COPIED) or hasattr(type(value), "__next__")


def is_watched(value: Any) -> bool:
    """Return whether an attribute of a module is an object that all runs share, and that one of them could change."""
    return hasattr(value, "__dict__") and not is_copied(value) and not _is_shared(type(value))


def _is_sentinel(obj: Any) -> bool:
    """Return whether an object is its identity alone: ``object()``, or a global without attributes, where its class is."""
    cls: Any = type(obj)
    if cls is object:
        return True
    is_empty = hasattr(obj, "__dict__") and not vars(obj) and _is_made_empty(cls) and not _read_attributes(obj)
    return is_empty and any(x is obj for x in vars(sys.modules.get(cls.__module__, builtins)).values())


# --- The table ---


class Ref(NamedTuple):
    """A tensor, a shared object ("other") or an object of a snapshot, by number."""

    kind: str
    number: int


class Row(NamedTuple):
    """An object: a function, the arguments that make it, and what it contains: atoms, references, and rows of tuples."""

    kind: str
    make: tuple[Any, ...]
    items: tuple[Any, ...] = ()
    pairs: tuple[tuple[Any, Any], ...] = ()
    attributes: Mapping[str, Any] = types.MappingProxyType({})
    state: Any = None


class Snapshot:
    """Objects, and the rows of those that they reach, by number; with the tensors, shared objects and objects of the rows.

    ``objects``, which were loaded from the snapshot ``before`` with ``tensors``, have their numbers there.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        before: Snapshot | None = None,
        objects: Iterable[Any] = (),
        shared: Iterable[Any] = (),
    ) -> None:
        self.tensors, self.others, self.objects = [*tensors], [*before.others] if before else [*shared], [*objects]
        self._values = {"tensor": self.tensors, "other": self.others, "object": self.objects}
        self._numbers = {kind: {id(x): i for i, x in enumerate(xs)} for kind, xs in self._values.items()}
        self._before: Mapping[int, Row] = before.rows if before else {}
        self.operands, self.roots, self.rows = len(self.tensors), list[Any](), dict[int, Row]()

    def add(self, *roots: Any) -> Snapshot:
        """Add objects, and return this snapshot; TypeError for an object that cannot be copied."""
        self.roots += map(self._encode, roots)
        return self

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Share those of these tensors that were not found yet."""
        for x in tensors:
            if id(x) not in self._numbers["tensor"]:
                self._refer("other", x)

    def forget(self) -> None:
        """Let go of all but the shared objects and the rows."""
        self.tensors.clear()
        self.objects.clear()

    def _encode(self, obj: Any) -> Any:
        """Return the entry of an object, after adding its row."""
        cls: Any = type(obj)
        if cls in ATOMS:
            return obj
        if cls is tuple:
            return self._read(obj, cls)
        if cls is not dict and cls is not list and id(obj) not in self._numbers["object"]:
            if id(obj) in self._numbers["other"]:
                return self._refer("other", obj)
            if issubclass(cls, Tensor) and not issubclass(cls, _torch.ForbiddenTensor):
                inner = _torch.unwrap_untracked(obj)  # an operand may be inside of other wrappers
                return self._refer("tensor", inner if id(inner) in self._numbers["tensor"] else obj)
            if not _is_rebuilt(obj, cls) and (_is_shared(cls) or _is_sentinel(obj)):
                return self._refer("other", obj)
        ref = self._refer("object", obj)
        if ref.number not in self.rows:
            self.rows[ref.number] = Row("", ())  # in progress
            self.rows[ref.number] = self._read(obj, cls, ref.number)
        return ref

    def _refer(self, kind: str, obj: Any) -> Ref:
        values = self._values[kind]
        number = self._numbers[kind].setdefault(id(obj), len(values))
        if number == len(values):
            values.append(obj)
        return Ref(kind, number)

    def _encode_value(self, value: Any) -> Any:
        """Return the entry of what pickle was given in place of an object, which may have been made for that."""
        if type(value) in (tuple, list, dict):
            return self._read(value, type(value), encode=self._encode_value)
        return self._encode(value)

    def _read(self, obj: Any, cls: Any, number: int | None = None, encode: Callable[[Any], Any] | None = None) -> Row:
        encode, kind = encode or self._encode, cls.__name__
        if cls is tuple:
            return Row(kind, (_make_tuple, *map(encode, obj)))
        if cls is list or cls is set:
            return Row(kind, (cls,), tuple(map(encode, obj)))
        if cls is dict:
            return Row(kind, (cls,), pairs=tuple([(encode(key), encode(value)) for key, value in obj.items()]))
        if cls is types.MethodType:  # super().f is another one than the method of that name
            return Row(kind, (cls, encode(obj.__func__), encode(obj.__self__)))
        if cls is types.CellType:
            content = read_cell(obj)
            return Row(kind, (cls,), attributes={"cell_contents": encode(content[0])} if content else {})
        if cls is types.FunctionType or cls is PartitionSpec:
            original = self._before[number].make[1] if number in self._before else self._refer("other", obj)
            if cls is PartitionSpec:
                return Row(kind, (PartitionSpec.on, original, encode(obj.bound_mesh)))
            make = _make_function, original, *map(encode, obj.__closure__ or ())
            attributes = {**{name: getattr(obj, name) for name in _DEFAULTS}, **vars(obj)}
        elif _is_made_empty(cls) and _has_state_methods(cls):  # which may leave out what the function reads
            make, attributes = (object.__new__, cls), _read_attributes(obj)
        else:
            return self._read_reduced(obj, cls)
        return Row(kind, make, attributes={name: encode(value) for name, value in attributes.items()})

    def _read_reduced(self, obj: Any, cls: Any) -> Row:
        """Return the row of an object as pickle would copy it."""
        reduced = copyreg.dispatch_table.get(cls, lambda x: x.__reduce_ex__(4))(obj)
        if isinstance(reduced, str) or len(reduced) > 5:
            raise TypeError(f"cannot copy '{cls.__name__}' object")
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        entries = tuple([self._encode(x) for x in items or ()])
        encoded = tuple([(self._encode(key), self._encode(value)) for key, value in pairs or ()])
        make = make, *map(self._encode if isinstance(obj, tuple) else self._encode_value, args)
        if state is None or hasattr(cls, "__setstate__"):
            return Row(cls.__name__, make, entries, encoded, state=self._encode_value(state))
        own, slots = state if isinstance(state, tuple) else (state, None)
        attributes = {name: self._encode(value) for name, value in {**(own or {}), **(slots or {})}.items()}
        return Row(cls.__name__, make, entries, encoded, attributes)


_DEFAULTS = ("__defaults__", "__kwdefaults__")


def _make_tuple(*items: Any) -> tuple[Any, ...]:
    return items


def _make_function(original: types.FunctionType, *closure: types.CellType) -> types.FunctionType:
    f = types.FunctionType(original.__code__, original.__globals__, original.__name__, None, closure)
    f.__qualname__, f.__module__ = original.__qualname__, original.__module__
    return f


def _is_rebuilt(obj: Any, cls: type) -> bool:
    """Return whether an object of a shared class has a state of each run's own."""
    if cls is PartitionSpec:
        return any(isinstance(axis, Simulated) for _, axis in obj.bound_mesh.axes)
    return cls is types.FunctionType and _has_own_state(obj)


@functools.lru_cache(maxsize=4096)
def _is_made_empty(cls: Any) -> bool:
    """Return whether objects of this class are made without arguments, and are their attributes alone."""
    getstate = getattr(cls, "__getstate__", None)  # of a class in C, what it returns is in no attribute
    is_python = getstate is getattr(object, "__getstate__", None) or isinstance(getstate, types.FunctionType)
    is_default = cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__
    return is_python and is_default and cls.__new__ is object.__new__ and not hasattr(cls, "__getnewargs__")


def _has_state_methods(cls: Any) -> bool:
    own = getattr(cls, "__getstate__", None), getattr(cls, "__setstate__", None)
    return own != (getattr(object, "__getstate__", None), None)


def _read_attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, and its slots that are set."""
    slots = {name: getattr(obj, name) for name in copyreg._slotnames(type(obj)) if hasattr(obj, name)}  # pyright: ignore
    return slots | getattr(obj, "__dict__", {})


def read_cell(cell: Any) -> tuple[Any] | None:
    """Return what is in a cell of a closure, None for an empty one."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return None


def find_tensors(*values: Any) -> list[Tensor]:
    """Return the tensors that can be reached from some values; those alone in values that cannot be copied."""
    try:
        return Snapshot().add(*values).tensors
    except Exception:
        return [x for value in values for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


# --- Objects from the table ---


class _Loader:
    """Makes the objects of a snapshot, with other tensors; ``objects`` are those that exist, by number."""

    def __init__(self, snapshot: Snapshot, tensors: Sequence[Tensor], objects: dict[int, Any]) -> None:
        self._snapshot, self._tensors, self.objects = snapshot, tensors, objects

    def build(self, entry: Any) -> Any:
        """Return the object of an entry."""
        if type(entry) is Row:
            return self.fill(entry.make[0](*map(self.build, entry.make[1:])), entry)
        if type(entry) is not Ref:
            return entry
        kind, number = entry
        if kind != "object":
            return self._tensors[number] if kind == "tensor" else self._snapshot.others[number]
        if number not in self.objects:
            row = self._snapshot.rows[number]
            args = [self.build(arg) for arg in row.make[1:]]
            if number not in self.objects:  # an argument may have led back to it
                self.objects[number] = obj = row.make[0](*args)
                self.fill(obj, row)
        return self.objects[number]

    def fill(self, obj: Any, row: Row) -> Any:
        """Fill an empty object with what is in a row, and return it."""
        build = self.build
        if row.items:
            (obj.update if isinstance(obj, set) else obj.extend)([build(item) for item in row.items])  # pyright: ignore
        for key, value in row.pairs:
            _dict_of(obj).__setitem__(obj, build(key), build(value))
        if row.state is not None:
            obj.__setstate__(build(row.state))
        slots: Any = copyreg._slotnames(type(obj)) if row.attributes else ()  # pyright: ignore
        for name, value in row.attributes.items():
            if name in slots or name in _DEFAULTS or not hasattr(obj, "__dict__"):
                object.__setattr__(obj, name, build(value))
            else:
                vars(obj)[name] = build(value)
        return obj


def _dict_of(obj: Any) -> Any:
    return OrderedDict if isinstance(obj, OrderedDict) else dict


def load(snapshot: Snapshot, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the roots, with other tensors in them, and all objects by number."""
    loader = _Loader(snapshot, tensors, {})
    roots = [loader.build(root) for root in snapshot.roots]
    return roots, [loader.objects[i] for i in range(len(loader.objects))]


def write_back(before: Snapshot, after: Snapshot, changed: Iterable[int], tensors: Sequence[Tensor]) -> Any:
    """Write what a run has changed into the objects of ``before``, by these numbers; return the object of the last root."""
    loader = _Loader(after, tensors, dict(enumerate(before.objects)))
    for obj, row in ((before.objects[number], before.rows[number]) for number in changed):
        if isinstance(obj, dict):
            _dict_of(obj).clear(obj)
        elif row.items:
            obj.clear()
        for name in row.attributes.keys() - _DEFAULTS:
            vars(obj).pop(name) if name in getattr(obj, "__dict__", {}) else object.__delattr__(obj, name)
    for number in changed:
        loader.fill(before.objects[number], after.rows[number])
    return loader.build(after.roots[-1])


# --- Where two runs differ ---


class Outcome(NamedTuple):
    """What a run has left, without the objects."""

    roots: list[Any]
    rows: dict[int, Row]
    layouts: list[tuple[torch.dtype, list[int], torch.device]]
    operands: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> Outcome:
        """Return what is in a snapshot."""
        layouts = [(x.dtype, [*x.shape], x.device) for x in snapshot.tensors[snapshot.operands :]]
        return cls(snapshot.roots, snapshot.rows, layouts, snapshot.operands)

    def texts(self, entry: Any, path: str, seen: set[Ref]) -> Iterator[tuple[str, str]]:
        """Yield the paths and words for an entry and all that it contains."""
        if type(entry) is Ref and entry.kind == "object":
            row = self.rows[entry.number]
        elif type(entry) is Ref and entry.kind == "tensor" and entry.number >= self.operands:
            row = "{} of shape {} on {}".format(*self.layouts[entry.number - self.operands])
        else:
            row = entry
        yield path, f"a {row.kind}" if type(row) is Row else str(row) if row is not entry else repr(row)
        if type(row) is not Row or (row is not entry and entry in seen):
            return
        if row is not entry:
            seen.add(entry)
        parts = [(f"[{i}]", x) for i, x in enumerate((*row.make[1:], *row.items, row.state))]
        parts += [(f"[{key!r}]", x) for key, x in row.pairs] + [(f".{name}", x) for name, x in row.attributes.items()]
        for name, part in parts:
            yield from self.texts(part, path + name, seen)

    def find_difference(self, now: Outcome, a: Any, b: Any, path: str) -> str:
        """Return what differs between an entry and one of another run, in words.

        Empty if nothing does, or only which objects are the same.
        """
        old, new = dict(self.texts(a, path, set())), dict(now.texts(b, path, set()))
        differ = (key for key in old | new if old.get(key) != new.get(key))
        return next((f"{key} was {old.get(key, 'absent')}, now it is {new.get(key, 'absent')}" for key in differ), "")


def find_changed(before: Snapshot, after: Snapshot) -> list[int]:
    """Return the numbers of the objects that a run has changed; TypeError for one that no list, dict or attribute tells of."""
    changed = [number for number, row in before.rows.items() if after.rows.get(number, row) != row]
    opaque = [i for i in changed if (before.rows[i].make, before.rows[i].state) != (after.rows[i].make, after.rows[i].state)]
    for entry in (Ref("object", number) for number in opaque):
        if Outcome.of(before)._replace(operands=len(before.tensors)).find_difference(Outcome.of(after), entry, entry, ""):
            raise TypeError(f"a {before.rows[entry.number].kind} that it changes")
    return [i for i in changed if i not in opaque]
