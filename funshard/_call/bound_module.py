"""The modules of a model in a call, and which unit owns each of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._spec.spec import PartitionSpec
from .._spec.tree import check_not_compiled, join_path
from .._spec.unit import Unit
from .module_state import MODEL_LOCK, GatheringParameters, ModuleAttributes, own_tensors

__all__ = ["BoundModule", "Replaced"]

Replaced = dict[tuple[str, str], Any]
"""The tensors, by path and attribute, that forward has set in place of a module's parameters."""

Owned = dict[nn.Module, Mapping[str, tuple[Unit, int]]]
"""For each module the unit and position in it of its own parameters, by attribute."""


@dataclass(frozen=True)
class BoundModule:
    """A module of a model: its path, all modules in it by each path, and the units that own their parameters."""

    path: str
    modules: Mapping[str, nn.Module]
    owned: Owned

    @property
    def scripted_parameters(self) -> Iterator[tuple[nn.Module, str, Unit, int]]:
        """The parameters of each ScriptModule, which reads no Python mapping: module, attribute, unit, position in it."""
        for module, owned in self.owned.items():
            if isinstance(module, torch.jit.ScriptModule):
                yield from ((module, attr, unit, i) for attr, (unit, i) in owned.items())

    @classmethod
    def bind(cls, model: nn.Module, spec: PartitionSpec) -> BoundModule:
        """Return a whole model. Raise ValueError unless the spec was made for it."""
        with MODEL_LOCK:
            modules = _find_modules(model, "")
            paths = spec._chosen
            for path, module in modules.items():
                check_not_compiled(path, module, in_place=path not in paths)
            return cls("", modules, _find_owners(modules, spec))

    def submodule(self, path: str) -> BoundModule:
        """Return one of its modules. Raise RuntimeError if forward has put other modules into it."""
        modules = _find_modules(self.modules[path], path)
        if new := [name for name, module in modules.items() if module not in self.owned]:
            raise RuntimeError(
                f"module '{new[0]}' ({type(modules[new[0]]).__name__}) was put there in forward, and P(remat=...) of '{path}' "
                "recomputes the modules of the spec alone: expected the same modules in every call; put it there before the "
                "spec is made, or leave remat out there"
            )
        return BoundModule(path, modules, {module: self.owned[module] for module in modules.values()})

    def modules_inside(self, path: str) -> list[nn.Module]:
        """Return the modules in one of its modules, that one first."""
        return [*_find_modules(self.modules[path], path).values()]

    def params_of(self, spec: PartitionSpec, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shards, or full parameters, of these units, and the ignored parameters of the module."""
        names = [name for unit in spec for name in (unit.key, *(name for param in unit.params for name in param.names))]
        params = {name: given[name] for name in names if name in given}
        for name in spec.ignored:
            path, _, attr = name.rpartition(".")
            if path in self.modules and (tensor := self.modules[path]._parameters.get(attr)) is not None:
                params[name] = tensor
        return params

    def replaced_parameters(self, before: ModuleAttributes) -> Replaced:
        """Return what forward has set in place of parameters until now."""
        out: Replaced = {}
        for path, module in self.modules.items():
            now = module._parameters
            if isinstance(now, GatheringParameters):
                out |= {(path, attr): tensor for attr, tensor in now.replaced_by_forward(before[module]["_parameters"]).items()}
        return out


def _find_modules(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return ``dict(module.named_modules(prefix=path, remove_duplicate=False))``, without a chain of generators for each."""
    found = {path: module}
    for name, child in module._modules.items():
        if child is not None:
            found |= _find_modules(child, join_path(path, name)) if child._modules else {join_path(path, name): child}
    return found


def _find_owners(modules: Mapping[str, nn.Module], spec: PartitionSpec) -> Owned:
    """Return the owners of these modules' parameters; raise ValueError unless they are those of the spec."""
    owners = spec._compute_once(_owners_by_path)
    parameters = {path: own_tensors(module, "_parameters") for path, module in modules.items()}
    for path, mine in owners.items():
        own = parameters.get(path, {})
        for attr, (unit, i) in mine.items():
            tensor, shape = own.get(attr), unit.params[i].shape
            if tensor is None or tensor.shape != shape:
                got = "none" if tensor is None else f"shape {list(tensor.shape)}"
                raise ValueError(
                    f"parameter '{join_path(path, attr)}' of unit '{unit.key}': expected shape {list(shape)} in the "
                    f"model, got {got}; was the model changed after the spec was made?"
                )
    owned: Owned = {}
    for path, module in modules.items():
        mine = owners.get(path, _NOTHING_OWNED)
        owned[module] = {**owned[module], **mine} if module in owned else mine
    ignored = (name.rpartition(".") for name in spec.ignored)
    left = {id(parameters[path].get(attr)) for path, _, attr in ignored if path in modules}
    for path, own in parameters.items():
        mine = owned[modules[path]]
        for attr, tensor in own.items():
            if attr not in mine and tensor is not None and id(tensor) not in left:
                raise ValueError(
                    f"parameter '{join_path(path, attr)}' is not in the spec: expected the model that it was made for; "
                    "was the model changed after the spec was made?"
                )
    return owned


_NOTHING_OWNED: Mapping[str, tuple[Unit, int]] = {}
"""The owners of a module without parameters of units."""


def _owners_by_path(spec: PartitionSpec) -> dict[str, dict[str, tuple[Unit, int]]]:
    """Return by module path and attribute the unit of every parameter, and its position there."""
    owners: dict[str, dict[str, tuple[Unit, int]]] = {}
    for unit in spec:
        for i, param in enumerate(unit.params):
            for path, attr in param.locations:
                owners.setdefault(path, {})[attr] = unit, i
    return owners
