"""What a function is given, and what it leaves, as bytes: tensors, modules and classes stand beside them, by number.

Loaded with other tensors, the bytes give each run objects of its own. Runs that leave equal bytes have done the same.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import enum
import functools
import io
import itertools
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import _torch
from ..._core.mesh import Mesh, Simulated
from ..._core.spec import PartitionSpec
from ..._spec.unit_state import UnitState

__all__ = [
    "ATOMS", "DeferredError", "Merge", "Snapshot", "TensorName", "find_difference", "find_tensors", "find_uncopied",
    "is_copied", "is_watched", "load", "walk",
]  # fmt: skip

ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, types.BuiltinFunctionType, types.ModuleType}
)
"""The types of values that nothing can change, and that contain no tensor."""


# --- Which way an object goes: by its class ---


class _Kind(enum.Enum):
    TENSOR = "by number"
    REFERENCE = "itself, by number"
    RANKED = "itself, with other ranks if vmap simulates those"
    FUNCTION = "a function with a closure of its own"
    CELL = "a cell of closures"
    GENERATOR = "a torch.Generator with the same state"
    DEFERRED = "an iterator, which nothing sets back"
    VALUE = "as pickle does"


_OPAQUE_PACKAGES = {
    "funshard", "logging", "threading", "concurrent", "multiprocessing", "asyncio", "weakref", "contextvars", "_thread",
}  # fmt: skip
_REDUCE = (
    object.__reduce__,
    set.__reduce__,
    deque.__reduce__,
    OrderedDict.__reduce__,
    defaultdict.__reduce__,
)  # not one of ours that refuses
_REFERENCES = (nn.Module, type, weakref.ref, contextvars.ContextVar, *ATOMS - {type(None), type(...)})


@functools.lru_cache(maxsize=4096)
def _kind_of(cls: type) -> _Kind:
    """Return how objects of a class are handed to a run."""
    if issubclass(cls, _REFERENCES):
        return _Kind.REFERENCE
    if cls is UncopiedIterator:
        return _Kind.VALUE
    for base, kind in _KINDS.items():
        if issubclass(cls, base):
            return kind
    package, _, module = cls.__module__.partition(".")
    is_opaque = package in _OPAQUE_PACKAGES or (package == "torch" and module.partition(".")[0] != "distributions")
    is_iterator = hasattr(cls, "__next__") and (is_opaque or package == "_io" or not cls.__dictoffset__)
    if is_iterator or issubclass(cls, types.CoroutineType | types.AsyncGeneratorType):
        return _Kind.DEFERRED
    is_container = (issubclass(cls, tuple | list | dict | set | deque) and cls.__reduce__ in _REDUCE) or cls is UnitState
    return _Kind.REFERENCE if is_opaque and not is_container else _Kind.VALUE


_KINDS = {
    Tensor: _Kind.TENSOR,
    PartitionSpec: _Kind.RANKED,
    Mesh: _Kind.RANKED,
    Simulated: _Kind.RANKED,
    types.FunctionType: _Kind.FUNCTION,
    types.CellType: _Kind.CELL,
    torch.Generator: _Kind.GENERATOR,
}


def is_deferred(value: object) -> bool:
    """Return whether a value is an iterator or a coroutine, which computes later."""
    return _kind_of(type(value)) is _Kind.DEFERRED


def is_copied(value: Any) -> bool:
    """Return whether each run gets its own copy of an attribute of a module: a container, or a state of random numbers."""
    cls = type(value)
    if cls in ATOMS or (cls is tuple and all(type(x) in ATOMS for x in value)):
        return False
    if cls is types.FunctionType:
        return _has_own_state(value)
    if cls.__module__.partition(".")[0] == "numpy":
        return getattr(value, "nbytes", 0) <= _MAX_BYTES
    return isinstance(value, _COPIED) or _kind_of(cls) is _Kind.DEFERRED


_COPIED = (Tensor, tuple, list, dict, set, deque, functools.partial, torch.Generator, random.Random, bytearray, array.array)
_MAX_BYTES = 1 << 16
"""The size of the largest NumPy array among the attributes of a module that is copied."""


def is_watched(value: Any) -> bool:
    """Return whether an attribute of a module is an object that all runs share, and that one of them could change."""
    return _kind_of(type(value)) is _Kind.VALUE and not is_copied(value) and hasattr(value, "__dict__")


def _has_own_state(f: types.FunctionType) -> bool:
    """Return whether a function has a closure or defaults, and is none of torch or of this library."""
    has_state = bool(f.__closure__ or f.__defaults__ or f.__kwdefaults__)
    return has_state and str(f.__globals__.get("__name__", "")).partition(".")[0] not in ("funshard", "torch")


# --- Functions that the bytes name, which a load replaces by its own (`_Unpickler.find_class`) ---


class UncopiedIterator:
    """An object that runs get instead of an iterator: it raises TypeError where it is read."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __reduce__(self) -> Any:
        return UncopiedIterator, (self.name, self.kind)

    def __next__(self) -> Any:
        raise TypeError(
            f"{self.name} was given a {self.kind} that it changes, which cannot be copied for another run: expected its "
            "values; call next() or read() outside"
        )

    def __getattr__(self, name: str) -> Any:
        return self.__next__()

    __iter__ = __next__


def _tensor(i: int) -> Any: ...


def _reference(i: int) -> Any: ...


def _ranked(i: int, ranks: Any) -> Any: ...


def _function(i: int, closure: Any) -> Any: ...


_NOT_SET = UncopiedIterator  # a cell without contents


def _fill_function(f: Any, state: Any) -> None:
    """Give a function its defaults, attributes and the contents of its closure."""
    f.__defaults__, f.__kwdefaults__, attributes, contents = state
    vars(f).update(attributes)
    for cell, value in zip(f.__closure__ or (), contents, strict=True):
        if value is not _NOT_SET:
            cell.cell_contents = value


def _contents_of(f: Any) -> list[Any]:
    """Return what is in the cells of a function's closure."""
    out: list[Any] = []
    for cell in f.__closure__ or ():
        try:
            out.append(cell.cell_contents)
        except ValueError:  # noqa: PERF203
            out.append(_NOT_SET)
    return out


def _make_generator(device: torch.device, state: bytes) -> torch.Generator:
    """Return a torch.Generator with this state."""
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


_OWN = {_tensor, _reference, _ranked, _function, _fill_function, _make_generator}


def find_simulated_ranks(obj: PartitionSpec | Mesh | Simulated) -> list[Tensor]:
    """Return the ranks in a spec, a mesh or an axis that vmap simulates, each a tensor."""
    if isinstance(obj, Simulated):
        return [obj.rank]
    mesh = obj.mesh if isinstance(obj, PartitionSpec) else obj
    return [axis.rank for _, axis in mesh.axes if isinstance(axis, Simulated)] if mesh else []


def _replace_ranks(obj: Any, ranks: Iterator[Tensor]) -> Any:
    """Return the same spec, mesh or axis with other tensors as its simulated ranks."""
    if isinstance(obj, PartitionSpec):
        return obj.on(_replace_ranks(obj.bound_mesh, ranks))
    if isinstance(obj, Mesh):
        return replace(obj, axes=tuple((name, _replace_ranks(axis, ranks)) for name, axis in obj.axes))
    return replace(obj, rank=next(ranks)) if isinstance(obj, Simulated) else obj


# --- The bytes ---


class _Pickler(pickle.Pickler):
    """Pickles objects; it lists tensors, and what is handed on itself."""

    def __init__(self, snapshot: Snapshot, *, by_value: bool) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5)
        self._snapshot, self._by_value = snapshot, by_value

    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return how an object is made again, if it is none of Python's containers and atoms."""
        cls: Any = type(obj)
        kind, number = _kind_of(cls), self._snapshot.number
        if cls is types.MethodType:  # pickle would look it up by its name, and super().f is another one
            return types.MethodType, (obj.__func__, obj.__self__)
        if kind is _Kind.VALUE:
            return NotImplemented
        if kind is _Kind.TENSOR and not self._snapshot.is_constant(obj):
            return _tensor, (self._snapshot.number_tensor(obj),)
        if kind is _Kind.FUNCTION:
            if obj in _OWN:
                return NotImplemented
            if self._by_value and _has_own_state(obj):
                state = obj.__defaults__, obj.__kwdefaults__, vars(obj), _contents_of(obj)
                return _function, (number(obj), obj.__closure__), state, None, None, _fill_function
        elif kind is _Kind.CELL:
            return types.CellType, ()
        elif kind is _Kind.RANKED and (ranks := find_simulated_ranks(obj)):
            return _ranked, (number(obj), ranks)
        elif kind is _Kind.GENERATOR:
            with _torch.below_transforms():
                return _make_generator, (obj.device, obj.get_state().numpy().tobytes())
        elif kind is _Kind.DEFERRED:
            if self._snapshot.is_after:
                raise DeferredError(cls.__name__)
            return UncopiedIterator, (self._snapshot.name, cls.__name__)
        return _reference, (number(obj),)


class DeferredError(TypeError):
    """A run has made an iterator."""


class _Unpickler(pickle.Unpickler):
    """Makes the objects again, with these tensors."""

    def __init__(self, data: bytes, tensors: Sequence[Any], others: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors, self._others = tensors, others
        self.made: list[tuple[Any, int]] = []

    def find_class(self, module: str, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a function that the bytes name."""
        if module != __name__:
            return super().find_class(module, name)
        if name == "_tensor":
            return self._tensors.__getitem__
        if name == "_reference":
            return self._others.__getitem__
        own = {"_ranked": self._make_ranked, "_function": self._make_function}
        return own.get(name) or super().find_class(module, name)

    def _make_ranked(self, i: int, ranks: list[Tensor]) -> Any:
        made = _replace_ranks(self._others[i], iter(ranks))
        self.made.append((made, i))
        return made

    def _make_function(self, i: int, closure: Any) -> Any:
        f = self._others[i]
        made = types.FunctionType(f.__code__, f.__globals__, f.__name__, None, closure)
        made.__qualname__, made.__module__ = f.__qualname__, f.__module__
        self.made.append((made, i))
        return made


class Snapshot:
    """Objects as bytes, in parts that know each other's objects.

    Args:
        parts: The objects.
        tensors: Tensors that have the first numbers; a part that contains one contains an operand.
        others: Objects that have the first numbers.
        made: Objects that a load has made in the place of others, with the numbers of those.
        constants: The ids of parameters that all parts but the first hand on themselves.
        name: What errors call the function that is given the objects.
        is_after: Whether a run has left these objects, which may not contain an iterator then.
        by_value: Whether functions have closures of their own.
    """

    def __init__(
        self,
        parts: Iterable[Any],
        tensors: Iterable[Tensor] = (),
        others: Iterable[Any] = (),
        constants: Container[int] = (),
        made: Iterable[tuple[Any, int]] = (),
        *,
        name: str = "",
        is_after: bool = False,
        by_value: bool = True,
    ) -> None:
        self.name = name
        self.tensors, self.others, self.is_after, self.by_value = list(tensors), list(others), is_after, by_value
        self._tensor_numbers = {id(x): i for i, x in enumerate(self.tensors)}
        self._numbers = {id(x): i for x, i in (*zip(self.others, itertools.count()), *made)}
        self._constants: Container[int] = ()
        pickler = _Pickler(self, by_value=by_value)
        self.parts: list[bytes] = []
        for part in parts:
            start = pickler.file.tell()
            pickler.dump(part)
            self.parts.append(pickler.file.getvalue()[start:])
            self._constants = constants
        self._tensor_numbers, self._numbers, self._constants = {}, {}, ()

    def is_constant(self, x: Tensor) -> bool:
        """Return whether a tensor is one of the constants, and not in the first part."""
        return id(x) in self._constants and id(x) not in self._tensor_numbers

    def number(self, obj: Any) -> int:
        """Return the number of an object that is handed on itself."""
        i = self._numbers.setdefault(id(obj), len(self.others))
        if i == len(self.others):
            self.others.append(obj)
        return i

    def number_tensor(self, x: Tensor) -> int:
        """Return the number of a tensor; an operand may be inside of other wrappers."""
        if (i := self._tensor_numbers.get(id(x))) is None:
            i = self._tensor_numbers.get(id(_torch.unwrap_untracked(x)), len(self.tensors))
            self._tensor_numbers[id(x)] = i
            if i == len(self.tensors):
                self.tensors.append(x)
        return i


def load(parts: Sequence[bytes], tensors: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, int]]]:
    """Return the objects that the bytes stand for, and what was made in the place of others, with their numbers."""
    unpickler = _Unpickler(b"".join(parts), tensors, others)
    return [unpickler.load() for _ in parts], unpickler.made


def find_tensors(*values: Any) -> list[Tensor]:
    """Return the tensors that can be reached from some values; those alone in values that cannot be copied."""
    try:
        return Snapshot(values).tensors
    except Exception:
        return [x for value in values for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


# --- What is in an object, by the text that follows its name ---


def _items_of(obj: Any) -> list[tuple[str, Any]]:
    """Return what an object contains, and the text that follows the object's name for each."""
    if isinstance(obj, types.FunctionType):
        return [(f".{name}", value) for name, value in zip(obj.__code__.co_freevars, _contents_of(obj), strict=True)]
    if type(obj) in ATOMS or _kind_of(type(obj)) is not _Kind.VALUE:
        return []
    out: list[tuple[str, Any]] = []
    if isinstance(obj, dict):
        out += [(f"[{k!r}]", v) for k, v in dict.items(obj)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(obj, list | tuple | deque | set):
        out += [(f"[{i}]", v) for i, v in enumerate(obj)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return out + [(f".{name}", value) for name, value in _read_attributes(obj).items()]


def _read_attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, and its slots that are set."""
    out: dict[str, Any] = {}
    for name in _slots_of(type(obj)):
        with contextlib.suppress(AttributeError):
            out[name] = getattr(obj, name)
    return {**out, **getattr(obj, "__dict__", {})}


@functools.lru_cache(maxsize=4096)
def _slots_of(cls: type) -> list[str]:
    """Return the names of the slots that a class has."""
    own = ((name, value) for base in reversed(cls.__mro__) if base.__flags__ & 1 << 9 for name, value in vars(base).items())
    return [name for name, value in own if isinstance(value, types.MemberDescriptorType) and not name.startswith("__")]


def find_uncopied(value: Any, path: str) -> str:
    """Return the path of what cannot be copied, and why; empty if all can. Functions are copied without their closures."""
    try:
        Snapshot([value], by_value=False)
    except Exception as error:
        items = value.items() if not path and type(value) is dict else _items_of(value)  # pyright: ignore
        inside = (text for name, item in items if (text := find_uncopied(item, path + name)))
        return next(inside, f"{path} ({error})")
    return ""


def walk(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all that can be reached, by path, such as ``args[0].layers[1].keys``, each object once; the nearest first."""
    todo, seen = deque(values.items()), {id(values): values}
    while todo:
        path, value = todo.popleft()
        yield path, value
        if id(value) not in seen:
            seen[id(value)] = value
            todo.extend((path + name, item) for name, item in _items_of(value))


class TensorName(NamedTuple):
    """The name of a tensor where the outcomes of two runs are compared."""

    number: int
    text: str


def find_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what differs between what two runs have left, loaded with `TensorName`, with its path; empty if nothing does."""
    texts = [{path: _describe(value) for path, value in walk(values)} for values in (before, now)]
    for path in (*texts[1], *texts[0]):
        was, is_now = (text.get(path, ("nothing",)) for text in texts)
        if was != is_now:
            return f"{path} was {was[-1]}, now it is {is_now[-1]}"
    return ""


def _describe(value: Any) -> tuple[Any, ...]:
    """Return what a value is, and the words for it last; the length of a container belongs to it."""
    if isinstance(value, TensorName):
        return value
    if type(value) in ATOMS:
        return type(value), repr(value)
    return type(value), f"a {type(value).__name__}"


# --- What a run has changed goes into the caller's objects ---


_CALLABLES = {
    UncopiedIterator: (),
    types.MethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
}
"""The classes whose attributes are not set, and the attributes that contain what a run may have changed."""


class Merge:
    """Puts what a run has left in its copies, loaded with the caller's tensors, into the caller's objects."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # by the id of a run's object: what stands for it, and the object

    def __call__(self, old: Any, new: Any) -> Any:
        """Return what stands for a run's object: the caller's at the same place if it is of the same class, filled anew."""
        cls = type(new)
        if new is old or cls in ATOMS or isinstance(new, Tensor):
            return old if cls in ATOMS and type(old) is cls and old == new else new
        if id(new) in self._done:
            return self._done[id(new)][0]
        is_same = type(old) is cls
        if (names := _CALLABLES.get(cls)) is not None:
            out = old if is_same or is_deferred(old) else new
            for name in names if is_same else ():
                self(getattr(old, name), getattr(new, name))
        elif isinstance(new, tuple):
            out = self._merge_tuple(old if is_same else (), new)
        else:
            out = old if is_same else new
            self._done[id(new)] = out, new
            if cls is types.FunctionType:
                self._merge_function(old if is_same else new, new)
            elif _kind_of(cls) is _Kind.REFERENCE or _kind_of(cls) is _Kind.RANKED:
                out = new
            else:
                self._merge_items(out, new)
        self._done[id(new)] = out, new
        return out

    def _merge_tuple(self, old: Any, new: Any) -> Any:
        parts = [self(a, b) for a, b in zip(itertools.chain(old, itertools.repeat(None)), new)]  # noqa: B905
        for made in (old, new):
            if len(made) == len(parts) and all(a is b for a, b in zip(parts, made, strict=True)):
                return made
        return type(new)(parts) if hasattr(new, "n_sequence_fields") else tuple.__new__(type(new), parts)

    def _merge_function(self, f: Any, new: Any) -> None:
        """Fill the closure, the defaults and the attributes of a function."""
        contents = [self(a, b) for a, b in zip(_contents_of(f), _contents_of(new), strict=True)]
        defaults, keywords = self(f.__defaults__, new.__defaults__), self(f.__kwdefaults__, new.__kwdefaults__)
        _fill_function(f, (defaults, keywords, self(dict(vars(f)), vars(new)), contents))

    def _merge_items(self, out: Any, new: Any) -> None:
        """Fill an object with what another one of its class contains."""
        if (get := getattr(type(new), "getstate", None) or getattr(type(new), "get_state", None)) is not None:
            (getattr(out, "setstate", None) or out.set_state)(get(new))
        elif hasattr(new, "bit_generator"):
            out.bit_generator.state = new.bit_generator.state
        elif isinstance(new, bytearray | array.array):
            out[:] = new
        elif (numpy := sys.modules.get("numpy")) and isinstance(new, numpy.ndarray):
            out[...] = new
        elif isinstance(new, dict):
            base: Any = OrderedDict if isinstance(new, OrderedDict) else dict
            items = [(self(None, k), self(base.get(out, k), v)) for k, v in base.items(new)]
            base.clear(out)
            for key, value in items:
                base.__setitem__(out, key, value)
        elif isinstance(new, list | deque):
            values = [self(a, b) for a, b in zip(itertools.chain(out, itertools.repeat(None)), list(new))]  # noqa: B905
            out.clear()
            out.extend(values)
        elif isinstance(new, set):
            elements = [self(None, value) for value in new]  # pyright: ignore[reportUnknownVariableType]
            out.clear()
            out.update(elements)
        self._merge_attributes(out, new)

    def _merge_attributes(self, out: Any, new: Any) -> None:
        """Set the attributes of an object; those that a class of its own leaves out of its state stay."""
        before = _read_attributes(out)
        values = {name: self(before.get(name), value) for name, value in _read_attributes(new).items()}
        is_whole = getattr(type(new), "__getstate__", None) is getattr(object, "__getstate__", None)
        own = getattr(out, "__dict__", {})
        for name in before.keys() - values.keys() if is_whole else ():
            own.pop(name) if name in own else object.__delattr__(out, name)
        for name in _slots_of(type(new)):
            if name in values:
                object.__setattr__(out, name, values.pop(name))
        own.update(values)
