"""Kinds of objects: how to see what is in one, and how to make another one with other things in it.

Looked into are dicts, lists, sets, deques, tuples, objects with ``__dict__`` or ``__slots__``, closures, bound methods,
functools.partial, generators of random numbers, and modules (not their parameters). Anything else is a constant.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import pickle
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._batchnorm import MESH
from .._spec.spec import PartitionSpec
from ..collectives._mesh import Mesh, Simulated

__all__ = ["ATOMS", "OWN", "Kind", "Parts", "kind_of", "read_own", "set_attributes"]

Parts = list[tuple[list[Any], list[Any]]]
"""What is in an object: names and values, of its items, of its attributes and so on."""

OWN = ("_parameters", "_buffers", "forward", MESH)
"""The attributes of a module that functional_call puts there."""


class _State:
    """The state of a generator of random numbers, or the place of an iterator."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _State):
            return False
        if isinstance(self.value, Tensor):
            return torch.equal(self.value, other.value)
        return bool(self.value == other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), type, range, slice, torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, types.BuiltinFunctionType, types.ModuleType, _State}
)


@dataclass(frozen=True)
class Kind:
    """How to look into objects of a class, and to make one."""

    read: Callable[[Any], Parts]
    like: Callable[[Any], Any]
    """What to make another one of."""
    blank: Callable[[Any], Any] | None
    """An empty one; None for what cannot change."""
    fill: Callable[[Any, Parts], Any]
    """Have this in it; or, of what cannot change, one that has it."""


def kind_of(obj: Any) -> Kind | None:
    """How to look into an object; None for a constant."""
    if isinstance(obj, types.FunctionType):
        mine = str(obj.__globals__.get("__name__", "")).partition(".")[0] in ("funshard", "torch")
        return None if mine or not obj.__closure__ else _FUNCTION
    if isinstance(obj, PartitionSpec | Mesh | Simulated):
        return _RANKS if _ranks(obj) else None
    return _kind(type(obj))


@functools.lru_cache(maxsize=4096)
def _kind(cls: type) -> Kind | None:
    if issubclass(cls, nn.Module):
        return _MODULE
    if issubclass(cls, tuple):
        return _TUPLE
    if cls in _SPECIAL:
        return _SPECIAL[cls]
    if hasattr(cls, "__next__") and not cls.__dictoffset__:  # one that C keeps
        return _ITERATOR
    bases = [base for base in cls.__mro__ if not base.__flags__ & _HEAP]
    root, _, rest = cls.__module__.partition(".")
    if root == "numpy" and cls.__name__ == "Generator":
        return _NUMPY
    alien = root in _ALIEN or (root == "torch" and rest.partition(".")[0] != "distributions")
    if alien or issubclass(cls, enum.Enum | type):
        return None
    opaque = next((base for base in bases if base not in _BASES), None)
    base = next(base for base in bases if base in _BASES)
    items, fill = _BASES[base]
    slots = [
        (name, slot)
        for one in reversed(cls.__mro__)
        for name, slot in vars(one).items()
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    ]
    if not (items or slots or cls.__dictoffset__) or (opaque and not cls.__dictoffset__):
        return None

    def all_parts(obj: Any) -> Parts:
        parts = [] if items is None else [items(obj)]
        if slots:
            parts.append(_slots(obj, slots))
        if cls.__dictoffset__:
            attributes = _vars(obj)
            parts.append((list(attributes), list(attributes.values())))
        return parts

    def fill_all(obj: Any, parts: Parts) -> None:
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

    return Kind(all_parts, (lambda obj: obj.maxlen) if base is deque else lambda obj: None, blank, fill_all)


_HEAP = 1 << 9
"""The flag of classes that Python defines (and some that C does)."""
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


def _dict_of(base: Any) -> tuple[Callable[[Any], Any], Callable[[Any, list[Any], list[Any]], None]]:
    def fill(obj: Any, names: list[Any], values: list[Any]) -> None:
        base.clear(obj)
        for name, value in zip(names, values, strict=True):
            base.__setitem__(obj, name, value)

    return lambda obj: (list(base.keys(obj)), list(base.values(obj))), fill


def _sequence_of(base: Any) -> tuple[Callable[[Any], Any], Callable[[Any, list[Any], list[Any]], None]]:
    def fill(obj: Any, _: list[Any], values: list[Any]) -> None:
        base.clear(obj)
        (base.update if base is set else base.extend)(obj, values)

    return lambda obj: (list(range(len(obj))), list(base.__iter__(obj))), fill


_BASES: dict[type, tuple[Any, Any]] = {
    object: (None, None),
    types.SimpleNamespace: (None, None),
    **{base: _dict_of(base) for base in (dict, OrderedDict, defaultdict)},
    **{base: _sequence_of(base) for base in (list, set, deque)},
}


_INTERNAL = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)) - set(OWN)
"""Hooks and submodules: few modules have anything there."""


def _read_module(module: nn.Module) -> Parts:
    some = [(name, value) for name, value in vars(module).items() if name not in _INTERNAL or value]
    return [([name for name, _ in some], [value for _, value in some])]


def read_own(module: nn.Module) -> Parts:
    """What is in a module but for `OWN` and submodules."""
    some = [
        (name, value)
        for name, value in vars(module).items()
        if name not in OWN and name != "_modules" and (name not in _INTERNAL or value)
    ]
    return [([name for name, _ in some], [value for _, value in some])]


def set_attributes(module: nn.Module, new: Mapping[str, Any], but: tuple[str, ...] = OWN) -> None:
    """Give a module these attributes, but for some; those that it has stay in their order."""
    attributes = vars(module)
    for name in [name for name in attributes if name not in new and name not in but and name not in _INTERNAL]:
        del attributes[name]
    attributes.update((name, value) for name, value in new.items() if name not in but)


_MODULE = Kind(
    _read_module,
    lambda module: module,
    lambda module: module,
    lambda module, parts: set_attributes(module, dict(zip(*parts[0], strict=True))),
)


def _tuple(cls: Any, parts: Parts) -> Any:
    values = parts[0][1]
    return cls._make(values) if hasattr(cls, "_make") else cls(values)


_TUPLE = Kind(lambda obj: [(list(range(len(obj))), list(tuple.__iter__(obj)))], type, None, _tuple)
_FROZENSET = Kind(lambda obj: [(list(range(len(obj))), list(obj))], type, None, lambda cls, parts: cls(parts[0][1]))
_METHOD = Kind(
    lambda obj: [(["__func__", "__self__"], [obj.__func__, obj.__self__])],
    lambda obj: None,
    None,
    lambda _, parts: types.MethodType(*parts[0][1]),
)


def _make_partial(cls: Any, parts: Parts) -> Any:
    (func, args, keywords), attributes = parts[0][1], parts[1]
    made = cls(func, *args, **keywords)
    vars(made).update(zip(*attributes, strict=True))
    return made


_PARTIAL = Kind(
    lambda obj: [
        (["func", "args", "keywords"], [obj.func, obj.args, dict(obj.keywords)]),
        (list(vars(obj)), list(vars(obj).values())),
    ],
    type,
    None,
    _make_partial,
)


def _function(like: Any, parts: Parts) -> Any:
    code, around, name, defaults, keywords, attributes = like
    made = types.FunctionType(code, around, name, defaults, tuple(parts[0][1]))
    made.__kwdefaults__ = keywords
    made.__dict__.update(attributes)
    return made


_FUNCTION = Kind(
    lambda f: [(list(f.__code__.co_freevars), list(f.__closure__))],
    lambda f: (f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__kwdefaults__, dict(vars(f))),
    None,
    _function,
)


def _read_cell(cell: Any) -> Parts:
    try:
        return [(["cell_contents"], [cell.cell_contents])]
    except ValueError:  # not set yet
        return [([], [])]


def _fill_cell(cell: Any, parts: Parts) -> None:
    for value in parts[0][1]:
        cell.cell_contents = value


_CELL = Kind(_read_cell, lambda cell: None, lambda _: types.CellType(), _fill_cell)


def _position(obj: Any) -> object:
    """Something that changes when the iterator moves on; None where there is nothing to see."""
    if isinstance(obj, types.GeneratorType):
        return obj.gi_frame.f_lasti if obj.gi_frame else -1
    if hasattr(obj, "__length_hint__"):
        return operator.length_hint(obj)
    if isinstance(obj, zip | enumerate | map | filter):
        return tuple(_position(inner) if hasattr(inner, "__next__") else str(inner) for inner in obj.__reduce__()[1])
    return repr(obj)  # as of itertools.count


def _no_other(_: Any) -> Any:
    raise TypeError("it cannot be wound back")


_ITERATOR = Kind(lambda obj: [(["position"], [_State(_position(obj))])], lambda _: None, _no_other, lambda obj, parts: None)


def _random(
    like: Callable[[Any], Any], blank: Callable[[Any], Any], state: Callable[[Any], Any], put: Callable[[Any, Any], object]
) -> Kind:
    def fill(generator: Any, parts: Parts) -> None:
        put(generator, parts[0][1][0].value)

    return Kind(lambda generator: [(["state"], [_State(state(generator))])], like, blank, fill)


_NUMPY = _random(
    lambda g: (type(g), type(g.bit_generator)),
    lambda like: like[0](like[1]()),
    lambda g: pickle.dumps(g.bit_generator.state),
    lambda g, state: setattr(g.bit_generator, "state", pickle.loads(state)),
)
_SPECIAL: dict[type, Kind | None] = {
    frozenset: _FROZENSET,
    types.MethodType: _METHOD,
    types.CellType: _CELL,
    functools.partial: _PARTIAL,
    torch.Generator: _random(lambda g: g.device, torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _random(lambda _: None, lambda _: random.Random(), random.Random.getstate, random.Random.setstate),
}


def _ranks(obj: PartitionSpec | Mesh | Simulated) -> list[Tensor]:
    if isinstance(obj, Simulated):
        return [obj.rank]
    mesh = obj.mesh if isinstance(obj, PartitionSpec) else obj
    return [axis.rank for _, axis in mesh.axes if isinstance(axis, Simulated)] if mesh else []


def _on_ranks(obj: Any, parts: Parts) -> Any:
    """The same with other tensors as the ranks that vmap simulates."""

    def other(axis: Any, ranks: Iterator[Tensor]) -> Any:
        return replace(axis, rank=next(ranks)) if isinstance(axis, Simulated) else axis

    ranks = iter(parts[0][1])
    if isinstance(obj, Simulated):
        return other(obj, ranks)
    mesh = obj.bound_mesh if isinstance(obj, PartitionSpec) else obj
    mesh = replace(mesh, axes=tuple((name, other(axis, ranks)) for name, axis in mesh.axes))
    return obj.on(mesh) if isinstance(obj, PartitionSpec) else mesh


_RANKS = Kind(lambda obj: [(list(range(len(_ranks(obj)))), _ranks(obj))], lambda obj: obj, None, _on_ranks)
