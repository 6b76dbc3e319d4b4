"""Objects as bytes: what a function was given is copied for each of its runs, compared between them, and written back.

Tensors, modules and classes stand beside the bytes, by number: each run loads its own objects, with its own tensors in them.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import functools
import io
import itertools
import pickle
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
_COPIED = (Tensor, tuple, list, dict, set, deque, functools.partial, torch.Generator, random.Random)
_FILLED = (list, dict, set, deque, types.CellType)
_IMMUTABLE = (Tensor, tuple, frozenset, functools.partial, types.MethodType)


@functools.lru_cache(maxsize=4096)
def _is_shared(cls: type) -> bool:
    """Return whether all runs share an object of this class, as those of torch and of this library, but for containers."""
    package, _, module = cls.__module__.partition(".")
    is_opaque = package == "funshard" or (package == "torch" and not module.startswith("distributions")) or cls is object
    is_container = issubclass(cls, _CONTAINERS) and not (
        issubclass(cls, tuple) and isinstance(cls.__reduce__, types.FunctionType)
    )
    return issubclass(cls, _SHARED) or (is_opaque and not is_container)


def _has_own_state(f: types.FunctionType) -> bool:
    """Return whether a function has a closure or defaults, and is none of torch or of this library."""
    has_state = bool(f.__closure__ or f.__defaults__ or f.__kwdefaults__)
    return has_state and str(f.__globals__.get("__name__", "")).partition(".")[0] not in ("funshard", "torch")


def is_copied(value: Any) -> bool:
    """Return whether each run gets its own copy of an attribute of a module."""
    if isinstance(value, tuple) and all(type(x) in ATOMS for x in value):  # pyright: ignore[reportUnknownVariableType]
        return False
    if type(value).__module__.partition(".")[0] == "numpy":
        return getattr(value, "nbytes", 0) <= 1 << 16  # larger ones are tables
    return isinstance(value, _COPIED) or (isinstance(value, types.FunctionType) and _has_own_state(value))


def is_watched(value: Any) -> bool:
    """Return whether an attribute of a module is an object that all runs share, and that one of them could change."""
    return hasattr(value, "__dict__") and not _is_shared(type(value)) and not is_copied(value)


class Snapshot(pickle.Pickler):
    """Objects as bytes, each a part that knows the objects of those before; tensors and what all runs share, by number.

    ``tensors`` and shared objects ``others`` have the first numbers; what ``placed`` has by the id of an object is shared in
    its place. Errors are pickle's.
    """

    def __init__(
        self,
        parts: Iterable[Any],
        tensors: Iterable[Tensor] = (),
        others: Iterable[Any] = (),
        placed: Mapping[int, Any] = types.MappingProxyType({}),
    ) -> None:
        super().__init__(file := io.BytesIO(), protocol=5)
        self.parts: list[bytes] = []
        self.ends: list[int] = []  # the numbers of tensors in the parts up to each
        self.tensors, self.others, self._placed = list(tensors), list(others), placed
        self._tensor_numbers = {id(x): i for i, x in enumerate(self.tensors)}
        self._numbers = {id(_key_of(x)): i for i, x in enumerate(self.others)}
        for part in parts:
            begin = file.tell()
            self.dump(part)
            self.parts.append(file.getvalue()[begin:])
            self.ends.append(len(self.tensors))

    def load(self, tensors: Sequence[Any]) -> tuple[list[Any], _Unpickler]:
        """Return the objects with other tensors in them, and what has loaded them."""
        unpickler = _Unpickler(b"".join(self.parts), tensors, self.others)
        return [unpickler.load() for _ in self.parts], unpickler

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of what takes the place of an object."""
        return self.number(self._placed[id(obj)]) if id(obj) in self._placed else None

    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return how an object is pickled: by number, by its parts, or by pickle's own rules."""
        cls: Any = type(obj)
        if issubclass(cls, Tensor) and not issubclass(cls, _torch.ForbiddenTensor):
            if id(obj) in self._numbers:
                return _shared, (self.number(obj),)
            return _tensor, (self._number_tensor(obj),)
        if cls is types.FunctionType and obj.__module__ == __name__:
            return NotImplemented
        if cls is types.FunctionType and _has_own_state(obj):
            return _function, (self.number(obj), obj.__closure__, obj.__defaults__, obj.__kwdefaults__)
        if cls is types.MethodType:  # pickle would look it up by its name, and super().f is another one
            return types.MethodType, (obj.__func__, obj.__self__)
        if cls is types.CellType:
            return types.CellType, (), _read_attributes(obj), None, None, _fill_object
        if cls is PartitionSpec and any(isinstance(axis, Simulated) for _, axis in obj.bound_mesh.axes):
            return _spec, (self.number(obj), obj.bound_mesh)
        if _is_shared(cls):
            return _shared, (self.number(obj),)
        own_state = getattr(cls, "__getstate__", None), getattr(cls, "__setstate__", None)  # which may leave something out
        if _is_plain(cls) and own_state != (getattr(object, "__getstate__", None), None) and cls.__new__ is object.__new__:
            return copyreg.__newobj__, (cls,), _read_attributes(obj), None, None, _fill_object  # pyright: ignore
        return NotImplemented

    def number(self, obj: Any) -> int:
        """Return the number of a shared object."""
        i = self._numbers.setdefault(id(_key_of(obj)), len(self.others))
        if i == len(self.others):
            self.others.append(obj)
        return i

    def _number_tensor(self, x: Tensor) -> int:
        """Return the number of a tensor; an operand may be inside of other wrappers."""
        if (i := self._tensor_numbers.get(id(x))) is None:
            i = self._tensor_numbers.get(id(_torch.unwrap_untracked(x)), len(self.tensors))
            self._tensor_numbers[id(x)] = i
            if i == len(self.tensors):
                self.tensors.append(x)
        return i


def _key_of(obj: Any) -> Any:
    """Return what a function that is copied, or a spec, has in common with its copies; another object itself."""
    if type(obj) is types.FunctionType and _has_own_state(obj):
        return obj.__code__
    return obj.units if type(obj) is PartitionSpec else obj


# The bytes name these functions, in the place of which an unpickler has its own.


def _tensor(i: int) -> Any: ...
def _shared(i: int) -> Any: ...
def _function(i: int, closure: Any, defaults: Any, kwdefaults: Any) -> Any: ...
def _spec(i: int, mesh: Any) -> Any: ...


def _fill_object(obj: Any, state: Any) -> None:
    for name, value in state.items():
        object.__setattr__(obj, name, value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Any], others: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.persistent_load = others.__getitem__  # what `write_back` has put in the place of an object
        self._own: dict[str, Any] = {
            "_tensor": tensors.__getitem__,
            "_shared": others.__getitem__,
            "_function": functools.partial(_make_function, others),
            "_spec": lambda i, mesh: others[i].on(mesh),
        }

    def find_class(self, module: str, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (module == __name__ and self._own.get(name)) or super().find_class(module, name)


def _make_function(others: Sequence[Any], i: int, closure: Any, defaults: Any, kwdefaults: Any) -> Any:
    f = others[i]
    new = types.FunctionType(f.__code__, f.__globals__, f.__name__, defaults, closure)
    new.__qualname__, new.__module__, new.__kwdefaults__ = f.__qualname__, f.__module__, kwdefaults
    return new


def find_tensors(*values: Any) -> list[Tensor]:
    """Return the tensors that can be reached from some values; those alone in values that cannot be copied."""
    try:
        return Snapshot(values).tensors
    except Exception:
        return [x for value in values for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


# --- What a run has changed goes into the caller's objects ---


def write_back(before: Snapshot, loaded: _Unpickler, out: Any, tensors: dict[int, Tensor], *, has_changes: bool) -> Any:
    """Fill the caller's objects as a run has left its copies of them, and return its result with the caller's objects in it.

    ``before`` has the caller's objects, ``loaded`` the copies, and ``tensors`` what stands for the run's, by id. TypeError for
    a change elsewhere than in lists, dicts, sets, deques and attributes.
    """
    if not has_changes:
        with contextlib.suppress(KeyError):
            return _replace(out, tensors)
    memo: Any = before.memo
    copies: dict[int, Any] = loaded.memo.copy()
    pairs = [(obj, copies[i]) for i, obj in memo.copy().values()]
    placed: dict[int, Any] = {id(copy): obj for obj, copy in pairs} | tensors
    changed: list[tuple[Any, list[Any], dict[str, Any]]] = []
    for obj, copy in pairs if has_changes else ():
        if isinstance(obj, _IMMUTABLE) or _is_shared(type(obj)):
            continue
        if isinstance(obj, _FILLED) or _is_plain(type(obj)):
            items, attributes = _read_items(copy), _read_attributes(copy)
            was = [*_read_items(obj), *itertools.chain(*_read_attributes(obj).items())]
            now = [placed.get(id(x), x) for x in (*items, *itertools.chain(*attributes.items()))]
            if len(was) != len(now) or not all(a is b or (type(a) in ATOMS and a == b) for a, b in zip(was, now, strict=True)):
                changed.append((obj, items, attributes))
        elif Snapshot([obj]).parts != Snapshot([copy]).parts:
            raise TypeError(f"a {type(obj).__name__} that it changes")
    after = Snapshot([([x[1:] for x in changed], out)], placed=placed)
    [(contents, out)], _ = after.load(after.tensors)
    for (obj, *_), (items, attributes) in zip(changed, contents, strict=True):
        _fill(obj, items, attributes)
    return out


def _replace(out: Any, tensors: dict[int, Tensor]) -> Any:
    """Return a result with other tensors; KeyError if it is not made of tensors, tuples and None alone."""
    if type(out) is tuple:
        return tuple([_replace(x, tensors) for x in out])
    return None if out is None else tensors[id(out)]


def _read_items(obj: Any) -> list[Any]:
    """Return the items of a container, of a dict keys and values in turn."""
    if isinstance(obj, dict):
        return [*itertools.chain(*dict.items(obj))]
    return [*obj] if isinstance(obj, list | deque | set) else []


def _fill(obj: Any, items: list[Any], attributes: dict[str, Any]) -> None:
    if isinstance(obj, dict):
        base: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
        base.clear(obj)
        for key, value in zip(items[::2], items[1::2], strict=True):
            base.__setitem__(obj, key, value)
    elif isinstance(obj, list | deque | set):
        obj.clear()
        (obj.update if isinstance(obj, set) else obj.extend)(items)
    for name in _read_attributes(obj).keys() - attributes.keys():
        object.__delattr__(obj, name)
    _fill_object(obj, attributes)


def _is_plain(cls: Any) -> bool:
    """Return whether objects of this class are copied by their attributes alone."""
    getstate = getattr(cls, "__getstate__", None)  # of a class in C, what it returns is in no attribute
    is_python = getstate is getattr(object, "__getstate__", None) or isinstance(getstate, types.FunctionType)
    is_default = cls.__reduce_ex__ is object.__reduce_ex__ and not hasattr(cls, "__getnewargs_ex__")
    return is_python and is_default and cls.__reduce__ in (object.__reduce__, types.SimpleNamespace.__reduce__)


def _read_attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, and its slots that are set; of a closure's cell what is in it."""
    names = ["cell_contents"] if isinstance(obj, types.CellType) else copyreg._slotnames(type(obj))  # pyright: ignore
    slots: dict[str, Any] = {}
    for name in names:
        with contextlib.suppress(AttributeError, ValueError):
            slots[name] = getattr(obj, name)
    return slots | getattr(obj, "__dict__", {})
