"""Kinds of objects that are made by their own means: modules, views of dicts, generators of random numbers, meshes."""

from __future__ import annotations

import functools
import gc
import operator
import pickle
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..._spec.spec import PartitionSpec
from ...collectives._mesh import Mesh, Simulated
from .adapters import CALL_ATTRIBUTES, PLAIN_TYPES, Contents, ObjectAdapter, OpaqueState
from .callable_adapters import CELL, METHOD, PARTIAL

__all__ = [
    "BASES",
    "ITERATOR",
    "LOCAL",
    "MODULE",
    "NUMPY",
    "RANKS",
    "SPECIAL",
    "TUPLE",
    "ranks_in",
    "read_own",
    "set_attributes",
]


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

    read = _elements if base is set else lambda obj: list(base.__iter__(obj))
    return lambda obj: (list(range(len(obj))), read(obj)), fill


def _elements(obj: set[Any] | frozenset[Any]) -> list[Any]:
    """The elements of a set, in an order that an equal set has as well where they are plain values."""
    elements = list(set.__iter__(obj) if isinstance(obj, set) else frozenset.__iter__(obj))
    plain = all(type(element) in PLAIN_TYPES for element in elements)
    return sorted(elements, key=lambda element: (type(element).__name__, repr(element))) if plain else elements


BASES: dict[type, tuple[Any, Any]] = {
    object: (None, None),
    types.SimpleNamespace: (None, None),
    **{base: _dict_of(base) for base in (dict, OrderedDict, defaultdict)},
    **{base: _sequence_of(base) for base in (list, set, deque)},
}


_INTERNAL = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)) - set(CALL_ATTRIBUTES)
"""Hooks and submodules: few modules have anything there."""


def _read_module(module: nn.Module, but: tuple[str, ...] = ()) -> Contents:
    some = {k: value for k, value in vars(module).items() if k not in but and (k not in _INTERNAL or value)}
    return [(list(some), list(some.values()))]


def read_own(module: nn.Module) -> Contents:
    """What is in a module but for `OWN` and submodules."""
    return _read_module(module, (*CALL_ATTRIBUTES, "_modules"))


def set_attributes(module: nn.Module, new: Mapping[str, Any], but: tuple[str, ...] = CALL_ATTRIBUTES) -> None:
    """Give a module these attributes, but for some; those that it has stay in their order."""
    attributes = vars(module)
    for name in [name for name in attributes if name not in new and name not in but and name not in _INTERNAL]:
        del attributes[name]
    attributes.update((name, value) for name, value in new.items() if name not in but)


MODULE = ObjectAdapter(
    _read_module,
    lambda module: module,
    lambda module: module,
    lambda module, parts: set_attributes(module, dict(zip(*parts[0], strict=True))),
)


def _tuple(cls: Any, parts: Contents) -> Any:
    values = parts[0][1]
    return cls._make(values) if hasattr(cls, "_make") else cls(values)


TUPLE = ObjectAdapter(lambda obj: [(list(range(len(obj))), list(tuple.__iter__(obj)))], type, None, _tuple)
_FROZENSET = ObjectAdapter(
    lambda obj: [(list(range(len(obj))), _elements(obj))], type, None, lambda cls, parts: cls(parts[0][1])
)


def _view_of(base: Any, name: str) -> tuple[type, ObjectAdapter]:
    """A view of a dict, which knows the dict but does not say so."""
    make = getattr(base, name)
    return type(make(base())), ObjectAdapter(
        lambda view: [(["mapping"], gc.get_referents(view)[:1])], lambda view: None, None, lambda _, parts: make(parts[0][1][0])
    )


_VIEWS = dict(_view_of(base, name) for base in (dict, OrderedDict) for name in ("keys", "values", "items"))
_PROXY = ObjectAdapter(
    lambda proxy: [(["mapping"], gc.get_referents(proxy)[:1])],
    lambda proxy: None,
    None,
    lambda _, parts: types.MappingProxyType(parts[0][1][0]),
)


def _fill_weak(obj: Any, parts: Contents) -> None:
    obj.clear()
    obj.update(zip(*parts[0], strict=True))


_WEAK_KEYS = ObjectAdapter(
    lambda obj: [(list(obj.keys()), list(obj.values()))], lambda obj: None, lambda _: WeakKeyDictionary[Any, Any](), _fill_weak
)


def _fill_local(obj: Any, parts: Contents) -> None:
    vars(obj).clear()
    vars(obj).update(zip(*parts[0], strict=True))


LOCAL = ObjectAdapter(
    lambda obj: [(list(vars(obj)), list(vars(obj).values()))], type, lambda cls: cls.__new__(cls), _fill_local
)
"""threading.local, of which a run sees what is of its thread."""


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


ITERATOR = ObjectAdapter(
    lambda obj: [(["position"], [OpaqueState(_position(obj))])], lambda _: None, _no_other, lambda obj, parts: None
)


def _random(
    like: Callable[[Any], Any], blank: Callable[[Any], Any], state: Callable[[Any], Any], put: Callable[[Any, Any], object]
) -> ObjectAdapter:
    def fill(generator: Any, parts: Contents) -> None:
        put(generator, parts[0][1][0].value)

    return ObjectAdapter(lambda generator: [(["state"], [OpaqueState(state(generator))])], like, blank, fill)


NUMPY = _random(
    lambda g: (type(g), type(g.bit_generator)),
    lambda like: like[0](like[1]()),
    lambda g: pickle.dumps(g.bit_generator.state),
    lambda g, state: setattr(g.bit_generator, "state", pickle.loads(state)),
)
SPECIAL: dict[type, ObjectAdapter | None] = {
    frozenset: _FROZENSET,
    types.MethodType: METHOD,
    types.CellType: CELL,
    functools.partial: PARTIAL,
    types.MappingProxyType: _PROXY,
    **_VIEWS,
    WeakKeyDictionary: _WEAK_KEYS,
    torch.Generator: _random(lambda g: g.device, torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _random(lambda _: None, lambda _: random.Random(), random.Random.getstate, random.Random.setstate),
}


def ranks_in(obj: PartitionSpec | Mesh | Simulated) -> list[Tensor]:
    """The ranks in it that vmap simulates."""
    if isinstance(obj, Simulated):
        return [obj.rank]
    mesh = obj.mesh if isinstance(obj, PartitionSpec) else obj
    return [axis.rank for _, axis in mesh.axes if isinstance(axis, Simulated)] if mesh else []


def _on_ranks(obj: Any, parts: Contents) -> Any:
    """The same with other tensors as the ranks that vmap simulates."""

    def other(axis: Any, ranks: Iterator[Tensor]) -> Any:
        return replace(axis, rank=next(ranks)) if isinstance(axis, Simulated) else axis

    ranks = iter(parts[0][1])
    if isinstance(obj, Simulated):
        return other(obj, ranks)
    mesh = obj.bound_mesh if isinstance(obj, PartitionSpec) else obj
    mesh = replace(mesh, axes=tuple((name, other(axis, ranks)) for name, axis in mesh.axes))
    return obj.on(mesh) if isinstance(obj, PartitionSpec) else mesh


RANKS = ObjectAdapter(lambda obj: [(list(range(len(ranks_in(obj)))), ranks_in(obj))], lambda obj: obj, None, _on_ranks)
