"""Parameters that a module reaches past its own attributes, such as ``self.weights = [self.linear.weight]``.

A call replaces what is in ``_parameters``. A list or another object of the module still holds the model's own tensor, whose
values are those from before training, or none. For the length of the call stand-ins replace such tensors and raise an error
where forward computes with them. What forward does not read, or makes itself as nn.LSTM does, is no error.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import _torch
from .._spec.spec import PartitionSpec
from .._spec.tree import join_path
from .bound_module import BoundModule
from .module_state import MODULE_CONTAINERS, own_tensors

__all__ = ["StandIns"]


class StandIns:
    """Stand-ins for the model's own parameters in other attributes of its modules.

    The caller restores the attributes of the modules; `restore` restores other objects.
    """

    def __init__(self, place: BoundModule, spec: PartitionSpec, given: Mapping[str, Tensor]) -> None:
        self._undo: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._names: Mapping[int, str] | None = None  # of the parameters that the call replaces, by storage
        known, model = spec._compute_once(_known_holders), place.modules[place.path]
        if (held := known.get(model)) == []:
            return
        self._names = _names_by_storage(place, spec, given)
        self._seen: dict[int, Any] = {}  # by the id of an object, what stands in its place
        found: list[tuple[str, str]] = []
        for path, attr in _attributes(place.modules) if held is None else held:
            attributes, before = vars(place.modules[path]), len(self._undo)
            value = attributes.get(attr)
            attributes[attr] = self._replace(value, join_path(path, attr))
            if attributes[attr] is not value or len(self._undo) > before:
                found.append((path, attr))
        if held is None:
            known[model] = found

    def restore(self) -> None:
        """Restore what was replaced in objects, but for what forward has written since."""
        for attributes, attr, before, now in self._undo:
            if attributes.get(attr) is now:
                attributes[attr] = before

    def _replace(self, value: Any, where: str, *, inside: bool = False) -> Any:
        """Return the value, or a copy of the container, with stand-ins; ``inside`` an object, look into no other object."""
        if type(value) in _ATOMIC_TYPES or isinstance(value, nn.Module | type):
            return value
        if isinstance(value, Tensor):
            return self._make_stand_in(value, where)
        if id(value) not in self._seen:
            self._seen[id(value)] = value  # a container may hold itself
            if isinstance(value, _CONTAINERS):
                self._seen[id(value)] = self._copy_container(value, where, inside=inside)
            elif not inside and (attributes := _user_attributes(value)):
                for attr, before in list(attributes.items()):
                    now = self._replace(before, f"{where}.{attr}", inside=True)
                    if now is not before:
                        attributes[attr] = now
                        self._undo.append((attributes, attr, before, now))
        return self._seen[id(value)]

    def _copy_container(self, value: Any, where: str, *, inside: bool) -> Any:
        """Return a copy of a container with stand-ins in it, or itself where there is none."""
        items = list(dict.items(value)) if isinstance(value, dict) else list(enumerate(value))
        new = {k: self._replace(x, f"{where}[{k!r}]", inside=inside) for k, x in items}
        changed = {k: new[k] for k, x in items if new[k] is not x}
        if not changed:
            return value
        if isinstance(value, tuple | set | frozenset):
            make: Any = getattr(value, "_make", type(value))  # of a named tuple
            return make(new.values())
        out = copy.copy(value)
        for k, x in changed.items():
            out[k] = x
        return out

    def _make_stand_in(self, tensor: Tensor, where: str) -> Tensor:
        """Return a tensor that raises when it is used if this one is, or was computed from, a parameter of the model."""
        inner = _torch.unwrap(tensor)
        if not self._names or inner.layout is not torch.strided or isinstance(tensor, _torch.StandIn):
            return tensor
        relation, name = "is", self._names.get(_torch.storage_id(inner))
        if name is None and inner.requires_grad and not inner.is_leaf:
            relation, name = "was computed from", self._find_source(inner)
        if name is None:
            return tensor
        return _torch.StandIn.replace(
            tensor,
            f"'{where}' {relation} the model's own parameter '{name}', with the values from before training and no gradient: "
            "functional_call replaces a parameter in the module that registers it, and nowhere else; expected forward to read "
            "it there, or to make the list, dict or object itself",
        )

    def _find_source(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter from which a module's tensor was computed, as a view in the memory before a cast."""
        assert self._names is not None
        nodes = (node for node, _ in islice(_torch.iter_nodes(tensor), _MAX_NODES))  # a state may have a graph of many calls
        leaves = (leaf for node in nodes if isinstance(leaf := getattr(node, "variable", None), Tensor))
        return next((name for leaf in leaves if (name := self._names.get(_torch.storage_id(leaf)))), None)


def _known_holders(spec: PartitionSpec) -> WeakKeyDictionary[nn.Module, list[tuple[str, str]]]:
    """Return a place to record, by model, which attributes hold parameters: found in the first call with a spec."""
    return WeakKeyDictionary()


def _attributes(modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, str]]:
    """Return all attributes of these modules but those of nn.Module itself, each once."""
    once = {module: path for path, module in reversed(list(modules.items()))}
    return [(path, attr) for module, path in once.items() for attr in vars(module) if attr not in _NN_MODULES]


def _names_by_storage(place: BoundModule, spec: PartitionSpec, given: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the names of the model's parameters that the call replaces, by storage."""
    ignored = {name for name in spec.ignored if name in given}
    return {
        _torch.storage_id(tensor): name
        for path, module in place.modules.items()
        for attr, tensor in own_tensors(module, "_parameters").items()
        if tensor is not None and ((name := join_path(path, attr)) in ignored or attr in place.owned[module])
    }


def _user_attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object, None unless its class is a user's own."""
    cls = type(value)
    if not cls.__dictoffset__ or cls.__module__.partition(".")[0] in ("builtins", "torch", "funshard"):
        return None
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


_MAX_NODES = 1000
_CONTAINERS = (list, tuple, dict, deque, set, frozenset)
_NN_MODULES = {*MODULE_CONTAINERS, "_parameters", "training", "forward"}
_ATOMIC_TYPES = frozenset({int, float, bool, str, bytes, complex, type(None)})
