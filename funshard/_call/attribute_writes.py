"""What forward writes to attributes of its modules, and into their dicts, lists and sets: put back, returned, or refused."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what attributes hold

from .. import _torch
from .._spec.spec import PartitionSpec
from .._spec.tree import join_path
from .backward_guard import find_tensors
from .bound_module import BoundModule

__all__ = ["AttributeWrites"]

_CONTAINERS = (dict, list, set, deque)
_SCALARS = (int, float, str)
_OF_NN_MODULE = {*vars(nn.Module()), "forward", "_flat_weights"}
"""The attributes of nn.Module itself, forward, and the list of weights that nn.LSTM makes anew."""


class AttributeWrites:
    """The attributes of the modules of a call, and the contents of containers in them, before forward.

    Which attributes hold containers is found in the first call of a model with a spec.
    """

    def __init__(self, place: BoundModule, spec: PartitionSpec) -> None:
        known, model = spec._compute_once(_known_containers), place.modules[place.path]
        if model not in known:
            known[model] = [(path, attr) for path, attr, value in _attributes(place.modules) if _may_change(value)]
        found: dict[int, Any] = {}
        for path, attr in known[model]:
            _collect_containers(vars(place.modules[path]).get(attr), found)
        self._entries = [(container, _entries(container)) for container in found.values()]
        self._modules = place.modules
        self._before = {path: vars(module).copy() for path, module in place.modules.items()}

    def restore_containers(self) -> None:
        """Give the containers what was in them before forward."""
        for container, entries in self._changed_containers():
            container.clear()
            if isinstance(container, dict):
                half = len(entries) // 2
                container.update(zip(entries[:half], entries[half:], strict=True))
            else:
                (container.update if isinstance(container, set) else container.extend)(entries)

    def check(self, result: Any, returned: Collection[str], replaced_buffers: Mapping[str, str]) -> None:
        """Raise RuntimeError for what nobody asked for where whoever reads it later would get another value, without a word.

        That is a tensor with a graph, but for

        - those of attributes that held weights: forward has put the call's there;
        - tensors where None or nothing was before, unless they are scalars: then the reader finds that;
        - scalars, and entries of containers, that the ``result`` of forward was computed from.

        And a number that goes with a buffer which is kept. ``replaced_buffers`` are, by path, the names of the caller's buffers
        that forward has registered again.
        """
        used: set[tuple[Any, int]] | None = None
        for path, attr, value in self._changed():
            if (name := join_path(path, attr)) in returned:
                continue
            before = self._before[path].get(attr)
            tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and _has_derivative(x)]
            tensors = [x for x in tensors if x.numel() == 1 or before is not None]
            if any(isinstance(x, nn.Parameter) for x in pytree.tree_leaves(before)):
                tensors = []
            elif tensors and (isinstance(before, _CONTAINERS) or all(x.numel() == 1 for x in tensors)):
                used = _torch.edges_in_graph(find_tensors(result)) if used is None else used
                tensors = [x for x in tensors if used.isdisjoint(_torch.own_edges(x))]
            if tensors:
                raise RuntimeError(
                    f"forward leaves a tensor with a graph in attribute '{attr}' of module '{path}', and the call puts that "
                    "back as it was before, so whoever reads it later would get another value and no gradient: expected "
                    f"attributes=('{name}',), which returns it, or the tensor detached, or in the result of forward"
                )
            if path in replaced_buffers and attr in self._before[path] and _is_scalar(value):
                raise RuntimeError(
                    f"forward sets attribute '{attr}' of module '{path}' and registers its buffer '{replaced_buffers[path]}' "
                    "again: the call keeps the buffer, which is in buffers=, and puts the attribute back as it was before; "
                    f"expected attributes=('{name}',), and the value set on the module before the next call, or no such buffer "
                    "in buffers="
                )

    def find(self, globs: Collection[str]) -> dict[str, Any]:
        """Return the attributes that these globs match, by dotted name; raise ValueError for a glob that matches none."""
        found = {join_path(path, attr): value for path, attr, value in _attributes(self._modules)} if globs else {}
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in found):
                raise ValueError(f"attributes: {glob!r} matches no attribute of a module after forward; expected '*.aux_loss'")
        matching = {name: value for name, value in found.items() if any(fnmatchcase(name, glob) for glob in globs)}
        return pytree.tree_map(lambda leaf: leaf, matching)  # other containers than those that are put back

    def _changed(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the attributes that forward has set, or whose containers it has changed: path, name, value."""
        for path, before in self._before.items():
            now = vars(self._modules[path])
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            by_hooks = _torch.attributes_of_hooks(self._modules[path])
            for attr, value in now.items():
                if value is not before.get(attr, before) and attr not in _OF_NN_MODULE and attr not in by_hooks:
                    yield path, attr, value
        if changed := {id(container) for container, _ in self._changed_containers()}:
            for path, attr, value in _attributes(self._modules):
                inside: dict[int, Any] = {}
                _collect_containers(value, inside)
                if not changed.isdisjoint(inside):
                    yield path, attr, value

    def _changed_containers(self) -> list[tuple[Any, list[Any]]]:
        """Return the containers that have other entries than before, with those of before, if there are tensors among them.

        Without tensors, logs of names or shapes stay, as in a call of the module itself: they hold nothing of the parameters.
        """
        changed: list[tuple[Any, list[Any]]] = []
        for container, before in self._entries:
            now = _entries(container)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                changed.append((container, before))
        leaves = pytree.tree_leaves([(_entries(container), before) for container, before in changed])
        return changed if any(isinstance(x, Tensor) for x in leaves) else []


def _known_containers(spec: PartitionSpec) -> WeakKeyDictionary[nn.Module, list[tuple[str, str]]]:
    """Return a place to record, by model, which attributes hold containers."""
    return WeakKeyDictionary()


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of modules, but for those of nn.Module itself: path, name, value."""
    for path, module in modules.items():
        yield from ((path, attr, value) for attr, value in vars(module).items() if attr not in _OF_NN_MODULE)


def _may_change(value: object) -> bool:
    """Return whether a value is a container, but for long tables of numbers and words, such as a vocabulary."""
    return isinstance(value, _CONTAINERS) and (len(value) < 100 or not all(isinstance(x, _SCALARS) for x in _entries(value)))


def _collect_containers(value: Any, found: dict[int, Any]) -> None:
    """Add a container, and those in it, by their ids."""
    if isinstance(value, _CONTAINERS) and id(value) not in found:
        found[id(value)] = value
        for entry in _entries(value):
            _collect_containers(entry, found)


def _entries(container: Any) -> list[Any]:
    """Return the entries of a container; of a dict its keys, then its values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _has_derivative(tensor: Tensor) -> bool:
    """Return whether reverse mode records the tensor, or forward mode has a tangent of it."""
    return not isinstance(tensor, _torch.StandIn) and (_torch.is_recorded(tensor) or _torch.has_tangent(tensor))


def _is_scalar(value: object) -> bool:
    """Return whether a value is a number or a word, which may say what a buffer holds."""
    return isinstance(value, _SCALARS) or (isinstance(value, Tensor) and value.numel() == 1)
