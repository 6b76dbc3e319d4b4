"""What a function is given, and what it leaves, as bytes: tensors, modules and classes stand beside them, by number.

Loaded with other tensors, the bytes give each run objects of its own. Runs that leave equal bytes have done the same.
"""

from __future__ import annotations

import builtins
import contextvars
import copyreg
import functools
import io
import itertools
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import _torch
from ..._core.mesh import Mesh, ProcessAxis, Simulated
from ..._core.spec import PartitionSpec

ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, types.BuiltinFunctionType, types.ModuleType}
)
"""The types of values that nothing can change, and that contain no tensor."""

_SHARED = (nn.Module, types.FunctionType, weakref.ref, contextvars.ContextVar, *ATOMS - {type(None), type(...)})
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
    return hasattr(value, "__dict__") and not _is_shared(type(value)) and not is_copied(value)


# --- The bytes ---


class Snapshot(NamedTuple):
    """Objects as bytes, in parts that know each other's objects; the tensors in them, and what all runs share, by number."""

    parts: list[bytes]
    tensors: list[Tensor]
    others: list[Any]


def take_snapshot(
    parts: Iterable[Any],
    tensors: Iterable[Tensor] = (),
    others: Iterable[Any] = (),
    made: Iterable[tuple[Any, int]] = (),
    constants: Container[int] = (),
    shared: Container[int] = (),
) -> Snapshot:
    """Return the snapshot of some objects; an error of pickle for what it cannot copy.

    ``tensors`` and shared objects ``others`` have the first numbers; ``made`` are objects that a load has made in place of
    others, with the numbers of those. All parts share the objects whose ids are in ``shared``, and all but the first the
    tensors whose ids are in ``constants``.
    """
    snapshot = Snapshot([], list(tensors), list(others))
    pickler = _Pickler(file := io.BytesIO(), snapshot, made, shared)
    for part in parts:
        start = file.tell()
        pickler.dump(part)
        snapshot.parts.append(file.getvalue()[start:])
        pickler.constants = constants
    return snapshot


class _Pickler(pickle.Pickler):
    """Pickles objects, and lists tensors and shared objects in a snapshot."""

    def __init__(self, file: io.BytesIO, snapshot: Snapshot, made: Iterable[tuple[Any, int]], shared: Container[int]) -> None:
        super().__init__(file, protocol=5)
        self._tensors, self._others = snapshot.tensors, snapshot.others
        self.constants: Container[int] = ()
        self._shared = shared
        self._tensor_numbers = {id(x): i for i, x in enumerate(self._tensors)}
        self._numbers = {id(x): i for x, i in (*zip(self._others, itertools.count()), *made)}

    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return how an object is made again, if it is none of Python's containers and atoms."""
        cls: Any = type(obj)
        if issubclass(cls, Tensor) and not issubclass(cls, _torch.ForbiddenTensor):
            if id(obj) not in self.constants or id(obj) in self._tensor_numbers:
                return _tensor, (self._number_tensor(obj),)
        elif cls is types.FunctionType:
            if obj.__module__ == __name__:
                return NotImplemented
            if _has_own_state(obj):
                state = obj.__defaults__, obj.__kwdefaults__, vars(obj)
                return _function, (self._number(obj), obj.__closure__), state, None, None, _fill_function
        elif cls is types.MethodType:  # pickle would look it up by its name, and super().f is another one
            return types.MethodType, (obj.__func__, obj.__self__)
        elif cls is types.CellType:
            return types.CellType, (), read_cell(obj), None, None, _fill_cell
        elif cls is PartitionSpec and any(isinstance(axis, Simulated) for _, axis in obj.bound_mesh.axes):
            return _spec, (self._number(obj), obj.bound_mesh)
        elif not (_is_shared(cls) or id(obj) in self._shared or _is_sentinel(obj)):
            if not _has_own_state_methods(cls):
                return NotImplemented
            return copyreg.__newobj__, (cls,), _read_attributes(obj), None, None, _fill_object  # pyright: ignore
        return _shared, (self._number(obj),)

    def _number(self, obj: Any) -> int:
        i = self._numbers.setdefault(id(obj), len(self._others))
        if i == len(self._others):
            self._others.append(obj)
        return i

    def _number_tensor(self, x: Tensor) -> int:
        """Return the number of a tensor; an operand may be inside of other wrappers."""
        if (i := self._tensor_numbers.get(id(x))) is None:
            i = self._tensor_numbers.get(id(_torch.unwrap_untracked(x)), len(self._tensors))
            self._tensor_numbers[id(x)] = i
            if i == len(self._tensors):
                self._tensors.append(x)
        return i


# The bytes name these functions, in the place of which `load` puts its own.


def _tensor(i: int) -> Any: ...


def _shared(i: int) -> Any: ...


def _function(i: int, closure: Any) -> Any: ...


def _spec(i: int, mesh: Any) -> Any: ...


def _fill_function(f: Any, state: Any) -> None:
    f.__defaults__, f.__kwdefaults__, attributes = state
    vars(f).update(attributes)


def _fill_cell(cell: Any, state: Any) -> None:
    (cell.cell_contents,) = state


def _fill_object(obj: Any, state: Any) -> None:
    for name, value in state.items():
        object.__setattr__(obj, name, value)


def read_cell(cell: Any) -> tuple[Any] | None:
    """Return what is in a cell of a closure, None for an empty one."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, own: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._own = own

    def find_class(self, module: str, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a function that the bytes name."""
        return (module == __name__ and self._own.get(name)) or super().find_class(module, name)


def load(snapshot: Snapshot, tensors: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, int]]]:
    """Return the parts with other tensors in them, and what was made in the place of shared objects, with their numbers."""
    made: list[tuple[Any, int]] = []
    others = snapshot.others

    def function(i: int, closure: Any) -> Any:
        f = others[i]
        new = types.FunctionType(f.__code__, f.__globals__, f.__name__, None, closure)
        new.__qualname__, new.__module__ = f.__qualname__, f.__module__
        made.append((new, i))
        return new

    def spec(i: int, mesh: Mesh) -> Any:
        made.append((others[i].on(mesh), i))
        return made[-1][0]

    own = {"_tensor": tensors.__getitem__, "_shared": others.__getitem__, "_function": function, "_spec": spec}
    unpickler = _Unpickler(b"".join(snapshot.parts), own)
    return [unpickler.load() for _ in snapshot.parts], made


def find_tensors(*values: Any) -> list[Tensor]:
    """Return the tensors that can be reached from some values; those alone in values that cannot be copied."""
    try:
        return take_snapshot(values).tensors
    except Exception:
        return [x for value in values for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


# --- Where two runs differ ---


class TensorText(str):
    """The words for a tensor, which stand for it where what two runs have left is compared."""

    __slots__ = ()


def find_difference(was: Any, now: Any, path: str) -> str:
    """Return what differs between what two runs have left, with its path; empty if nothing does."""
    old, new = dict(_describe(was, path, {})), dict(_describe(now, path, {}))
    differ = (key for key in old | new if old.get(key) != new.get(key))
    return next((f"{key} was {old.get(key, 'absent')}, now it is {new.get(key, 'absent')}" for key in differ), "")


def _describe(obj: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, str]]:
    """Yield the paths and words for an object and all that it contains."""
    is_atom = isinstance(obj, TensorText) or type(obj) in ATOMS
    yield path, str(obj) if isinstance(obj, TensorText) else repr(obj) if is_atom else f"a {type(obj).__name__}"
    if not is_atom and seen.setdefault(id(obj), path) == path:
        for name, value in _items_of(obj):
            yield from _describe(value, path + name, seen)


def _items_of(obj: Any) -> list[tuple[str, Any]]:
    """Return what an object contains, and the text that follows the object's name for each."""
    if isinstance(obj, types.FunctionType):
        state = obj.__defaults__, obj.__kwdefaults__, vars(obj), *map(read_cell, obj.__closure__ or ())
        return [(f"'s {i}", value) for i, value in enumerate(state)]
    if _is_shared(type(obj)):
        return []
    out = [(f".{name}", value) for name, value in _read_attributes(obj).items()]
    if isinstance(obj, dict):
        return out + [(f"[{k!r}]", v) for k, v in dict.items(obj)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return out + [(f"[{i}]", v) for i, v in enumerate(obj if isinstance(obj, list | tuple | deque | set) else ())]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


# --- What a run has changed goes into the caller's objects ---


def merge(old: Any, new: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return what stands for a run's object, loaded with the caller's tensors: the caller's at the same place, filled anew.

    Only an object of the same class is filled. ``done`` has, by the id of a run's object, what stands for it, and the object.
    """
    cls: Any = type(new)
    if cls in ATOMS or isinstance(new, Tensor):
        return old if cls in ATOMS and type(old) is cls and old == new else new
    if id(new) in done:
        return done[id(new)][0]
    if isinstance(new, tuple):
        out = _merge_tuple(old if type(old) is cls else (), new, done)
    elif _is_shared(cls) and not (cls is types.FunctionType and _has_own_state(new)):
        out = new
    elif cls is types.MethodType:
        out = types.MethodType(new.__func__, merge(getattr(old, "__self__", None), new.__self__, done))
    else:
        is_same = type(old) is cls and getattr(old, "__code__", None) is getattr(new, "__code__", None)
        out = old if is_same else new
        done[id(new)] = out, new
        _merge_contents(out, new, done)
    done[id(new)] = out, new
    return out


def _merge_tuple(old: Any, new: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    parts = _merge_elements(old, new, done)
    for whole in (old, new):
        if len(whole) == len(parts) and all(a is b for a, b in zip(parts, whole, strict=True)):
            return whole
    return type(new)(parts) if hasattr(new, "n_sequence_fields") else tuple.__new__(type(new), parts)


def _merge_elements(old: Iterable[Any], new: Iterable[Any], done: dict[int, tuple[Any, Any]]) -> list[Any]:
    return [merge(a, b, done) for a, b in zip(itertools.chain(old, itertools.repeat(None)), [*new])]  # noqa: B905


def _merge_contents(out: Any, new: Any, done: dict[int, tuple[Any, Any]]) -> None:
    """Fill an object with what another one of its class contains; TypeError for a change of what is in no attribute."""
    if isinstance(new, types.FunctionType):
        states = [(f.__defaults__, f.__kwdefaults__, dict(vars(f)), f.__closure__) for f in (out, new)]
        _fill_function(out, merge(states[0], states[1], done)[:3])
    elif isinstance(new, types.CellType):
        if state := merge(read_cell(out), read_cell(new), done):
            _fill_cell(out, state)
    elif isinstance(new, functools.partial):
        states = [(f.func, f.args, f.keywords, vars(f)) for f in (out, new)]
        getattr(out, "__setstate__")(merge(states[0], states[1], done))  # noqa: B009
    elif isinstance(new, dict):
        base: Any = OrderedDict if isinstance(new, OrderedDict) else dict
        items = [(merge(None, k, done), merge(base.get(out, k), v, done)) for k, v in base.items(new)]
        base.clear(out)
        for key, value in items:
            base.__setitem__(out, key, value)
        _merge_attributes(out, new, done)
    elif isinstance(new, list | deque | set):
        elements = _merge_elements(() if isinstance(new, set) else out, new, done)
        out.clear()
        (out.update if isinstance(out, set) else out.extend)(elements)
        _merge_attributes(out, new, done)
    elif _is_plain(type(new)):
        _merge_attributes(out, new, done)
    elif out is not new:
        before, now = take_snapshot([out]), take_snapshot([new])
        if before.parts != now.parts or any(a is not b for a, b in zip(before.tensors, now.tensors, strict=True)):
            raise TypeError(f"a {type(new).__name__} that it changes")


def _is_plain(cls: Any) -> bool:
    """Return whether objects of this class are copied by their attributes alone."""
    getstate = getattr(cls, "__getstate__", None)  # of a class in C, what it returns is in no attribute
    is_python = getstate is getattr(object, "__getstate__", None) or isinstance(getstate, types.FunctionType)
    is_default = cls.__reduce_ex__ is object.__reduce_ex__ and not hasattr(cls, "__getnewargs_ex__")
    return is_python and is_default and cls.__reduce__ in (object.__reduce__, types.SimpleNamespace.__reduce__)


def _has_own_state_methods(cls: Any) -> bool:
    """Return whether pickle would ask an object for its state, which may leave out what the function reads."""
    own = getattr(cls, "__getstate__", None), getattr(cls, "__setstate__", None)
    is_made_empty = _is_plain(cls) and cls.__new__ is object.__new__ and not hasattr(cls, "__getnewargs__")
    return is_made_empty and own != (getattr(object, "__getstate__", None), None)


def _is_sentinel(obj: Any) -> bool:
    """Return whether an object is its identity alone: ``object()``, or a global without attributes, where its class is."""
    cls: Any = type(obj)
    if cls is object:
        return True
    is_empty = hasattr(obj, "__dict__") and cls.__new__ is object.__new__ and _is_plain(cls) and not _read_attributes(obj)
    return is_empty and any(x is obj for x in vars(sys.modules.get(cls.__module__, builtins)).values())


def _read_attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, and its slots that are set."""
    slots = {name: getattr(obj, name) for name in copyreg._slotnames(type(obj)) if hasattr(obj, name)}  # pyright: ignore
    return slots | getattr(obj, "__dict__", {})


def _merge_attributes(out: Any, new: Any, done: dict[int, tuple[Any, Any]]) -> None:
    before, now, own = _read_attributes(out), _read_attributes(new), getattr(out, "__dict__", {})
    for name in before.keys() - now.keys():
        own.pop(name) if name in own else object.__delattr__(out, name)
    for name, value in now.items():
        value = merge(before.get(name), value, done)
        if name in copyreg._slotnames(type(out)):  # pyright: ignore
            object.__setattr__(out, name, value)
        else:
            own[name] = value
