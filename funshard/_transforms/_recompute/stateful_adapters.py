"""Adapters of modules, iterators, generators of random numbers, and meshes with ranks that vmap simulates."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._batchnorm import MESH, WEIGHT
from ..._spec.spec import PartitionSpec
from ...collectives._mesh import Mesh, Simulated
from .adapters import Contents, ObjectAdapter, OpaqueState, to_part
from .iterators import read_position

__all__ = ["CALL_ATTRIBUTES", "STATEFUL_ADAPTERS", "find_generator_adapter", "find_simulated_ranks"]
__all__ += ["read_module_state", "set_attributes"]

CALL_ATTRIBUTES = ("_parameters", "_buffers", "forward", MESH, WEIGHT)
"""The attributes of a module that functional_call replaces."""

_HOOK_AND_SUBMODULE_DICTS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)} - {
    *CALL_ATTRIBUTES
}
"""The names of a module's dicts of hooks and submodules, without parameters and buffers; most are empty."""


def _read_module(module: nn.Module, but: tuple[str, ...] = ()) -> Contents:
    """Read the attributes of a module, without internal dicts that are empty.

    `CALL_ATTRIBUTES` are last: a call sets them anew, which changes the order of attributes from run to run.
    """
    attributes = sorted(vars(module).items(), key=lambda item: item[0] in CALL_ATTRIBUTES)
    return [to_part({k: v for k, v in attributes if k not in but and (k not in _HOOK_AND_SUBMODULE_DICTS or v)})]


def read_module_state(module: nn.Module) -> Contents:
    """Read the attributes of a module except `CALL_ATTRIBUTES` and submodules."""
    return _read_module(module, (*CALL_ATTRIBUTES, "_modules"))


def set_attributes(module: nn.Module, new: Mapping[str, Any], but: tuple[str, ...] = CALL_ATTRIBUTES) -> None:
    """Replace all attributes of a module except ``but``; those that it has keep their order."""
    attributes = vars(module)
    for name in [name for name in attributes if name not in new and name not in but and name not in _HOOK_AND_SUBMODULE_DICTS]:
        del attributes[name]
    attributes.update((name, value) for name, value in new.items() if name not in but)


def _refuse_copy(_: Any) -> Any:
    """Raise TypeError: an iterator cannot be copied."""
    raise TypeError("an iterator cannot be set back: call next() outside, and pass the value")


def _generator_adapter(
    get_context: Callable[[Any], Any],
    make: Callable[[Any], Any],
    get_state: Callable[[Any], Any],
    set_state: Callable[[Any, Any], object],
) -> ObjectAdapter:
    """Return the adapter of a class of random number generators."""

    def fill(generator: Any, contents: Contents) -> None:
        set_state(generator, contents[0][1][0].value)

    return ObjectAdapter(lambda generator: [(["state"], [OpaqueState(get_state(generator))])], fill, make, get_context)


_TORCH_ADAPTER = _generator_adapter(lambda g: g.device, torch.Generator, torch.Generator.get_state, torch.Generator.set_state)
_PYTHON_ADAPTER = _generator_adapter(
    type, lambda cls: cls.__new__(cls), lambda g: g.getstate(), lambda g, state: g.setstate(state)
)
_NUMPY_ADAPTERS = {
    "Generator": _generator_adapter(
        lambda g: (type(g), type(g.bit_generator)),
        lambda classes: classes[0](classes[1]()),
        lambda g: pickle.dumps(g.bit_generator.state),
        lambda g, state: setattr(g.bit_generator, "state", pickle.loads(state)),
    ),
    "RandomState": _generator_adapter(
        type,
        lambda cls: cls(),
        lambda g: pickle.dumps(g.get_state(legacy=False)),
        lambda g, state: g.set_state(pickle.loads(state)),
    ),
}


@functools.lru_cache(maxsize=4096)
def find_generator_adapter(cls: type) -> ObjectAdapter | None:
    """Return the adapter of a class of random number generators; None for another class, and for one without a state."""
    if issubclass(cls, torch.Generator):
        return _TORCH_ADAPTER
    if issubclass(cls, random.Random):
        return None if issubclass(cls, random.SystemRandom) else _PYTHON_ADAPTER
    bases = (base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] == "numpy")
    return next((adapter for name in bases if (adapter := _NUMPY_ADAPTERS.get(name))), None)


def find_simulated_ranks(obj: PartitionSpec | Mesh | Simulated) -> list[Tensor]:
    """Return the ranks in a spec, a mesh or an axis that vmap simulates, each a tensor."""
    if isinstance(obj, Simulated):
        return [obj.rank]
    mesh = obj.mesh if isinstance(obj, PartitionSpec) else obj
    return [axis.rank for _, axis in mesh.axes if isinstance(axis, Simulated)] if mesh else []


def _replace_ranks(obj: Any, contents: Contents) -> Any:
    """Return the same spec, mesh or axis with other tensors as its simulated ranks."""

    def replace_rank(axis: Any, ranks: Iterator[Tensor]) -> Any:
        return replace(axis, rank=next(ranks)) if isinstance(axis, Simulated) else axis

    ranks = iter(contents[0][1])
    if isinstance(obj, Simulated):
        return replace_rank(obj, ranks)
    mesh = obj.bound_mesh if isinstance(obj, PartitionSpec) else obj
    mesh = replace(mesh, axes=tuple((name, replace_rank(axis, ranks)) for name, axis in mesh.axes))
    return obj.on(mesh) if isinstance(obj, PartitionSpec) else mesh


def _read_ranks(obj: Any) -> Contents:
    """Return the simulated ranks that an object holds."""
    ranks = find_simulated_ranks(obj)
    return [(list(range(len(ranks))), ranks)]


STATEFUL_ADAPTERS: dict[type, ObjectAdapter] = {
    # a run gets the caller's module itself, with other attributes for its length
    nn.Module: ObjectAdapter(
        _read_module,
        lambda module, contents: set_attributes(module, dict(zip(*contents[0], strict=True))),
        make_empty=lambda module: module,
        get_context=lambda module: module,
    ),
    Iterator: ObjectAdapter(
        lambda obj: [(["position"], [OpaqueState(read_position(obj))])], lambda obj, contents: None, _refuse_copy
    ),
    Simulated: ObjectAdapter(_read_ranks, _replace_ranks, get_context=lambda obj: obj),
}
"""The adapters of modules, iterators without a copy, and simulated ranks and their containers."""
