"""The modules of a model in a call: which unit owns each of their parameters, what forward reads, and how all is restored."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._batchnorm import MESH, WEIGHT
from .._core.spec import PartitionSpec
from .._core.tree import check_not_compiled, join_path
from .._core.unit import Unit

ModuleAttributes = dict[nn.Module, dict[str, Any]]
"""The attributes (``vars``) of each module."""

CALL_ATTRIBUTES = ("_parameters", "_buffers", "forward", MESH, WEIGHT)
"""The attributes of a module that functional_call replaces."""
_SKIPPED = frozenset({*CALL_ATTRIBUTES, "_modules"})

_CONTAINER_TYPES = (dict, set)
MODULE_CONTAINERS = tuple(
    name for name, value in vars(nn.Module()).items() if isinstance(value, _CONTAINER_TYPES) and name != "_parameters"
)
"""The attributes for hooks, submodules and buffers, which forward may change in place (transformers 5 adds hooks)."""


def kept_attributes(module: nn.Module, before: ModuleAttributes | None = None) -> dict[str, Any]:
    """Return a module's attributes but for what a call replaces, with a forward of its own from ``before`` the call."""
    own = {k: v for k, v in vars(module).items() if k not in _SKIPPED and (k not in MODULE_CONTAINERS or v)}
    return own | {"forward": before[module]["forward"]} if before and "forward" in before[module] else own


MODEL_LOCK = threading.RLock()
"""Held while a call changes or restores a model: other threads find it as it was, or with `GatheringParameters`."""


def calling_thread(caller: int | None = None) -> int:
    """Return the number of this thread. A thread of autograd's own counts as ``caller``, whose backward it runs."""
    return caller if caller and isinstance(threading.current_thread(), threading._DummyThread) else threading.get_ident()


class GatheringParameters(dict[str, Any]):
    """A module's ``_parameters`` for the length of a call in a thread: reading one gathers its unit."""

    __slots__ = ("call", "owned", "owned_at_first", "path")

    call: Any
    """The `Call` that reads. Set by whoever makes it of the module's own dict, as are the others: quicker than ``__init__``."""
    owned: Mapping[str, tuple[Unit, int]]
    owned_at_first: Mapping[str, tuple[Unit, int]]
    path: str

    def __getitem__(self, name: str) -> Any:
        if name in self.owned:
            return self.call.read(*self.owned[name])
        value = super().__getitem__(name)
        if name in self.owned_at_first and isinstance(value, nn.Parameter) and value.requires_grad:
            raise RuntimeError(
                f"parameter '{join_path(self.path, name)}' is replaced in forward by a new nn.Parameter, which ends its "
                "gradient, and the call puts the model back as it was: expected a tensor computed from it "
                "(w = 2 * self.weight), or the shards changed between steps"
            )
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and value.requires_grad and super().get(name) is None:
            raise _creation_error(f"parameter '{join_path(self.path, name)}'")
        owned = self.owned_at_first.get(name)
        if owned is not None and self.call.is_view(*owned, value):  # put back, as by an inner functional_call at its end
            self.owned = {**self.owned, name: owned}
            return
        self._disown(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._disown(name)
        super().__delitem__(name)

    def _disown(self, name: str) -> None:
        """Treat a parameter as the module's own from here on, not as one of a unit."""
        if name in self.owned:  # which all calls share
            self.owned = {other: at for other, at in self.owned.items() if other != name}

    def __iter__(self) -> Iterator[str]:  # overriding it keeps dict(self) from copying the originals underneath
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  that would call itself

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: object) -> Any:
        if not self:
            return dict, ()
        raise RuntimeError(
            f"module '{self.path}' is copied or pickled in forward, where a call puts its parameters and forward into it: "
            "expected copy.deepcopy, pickle or torch.save of the module before the call, or of its state_dict()"
        )

    def read_with(self, read: Callable[[Unit, int], Tensor]) -> dict[str, Any]:
        """Return a plain dict of all parameters, where this function reads those of units."""
        return {name: read(*self.owned[name]) if name in self.owned else value for name, value in super().items()}

    def replaced_by_forward(self, original: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Return what has been set here since; nothing is gathered for that."""
        own = ((name, super(GatheringParameters, self).__getitem__(name)) for name in self if name not in self.owned)
        return {name: value for name, value in own if value is not original.get(name, self)}


def _creation_error(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} is made in forward: a call puts the model back as it was, so it would be made again in each call and never "
        "trained; expected all of them made before the spec, in __init__ or by running the model once"
    )


@contextlib.contextmanager
def restore_modules(modules: Mapping[str, nn.Module], thread: int) -> Generator[ModuleAttributes]:
    """Restore the class and every attribute of the modules after they were changed inside. Yield the attributes of before.

    Raise RuntimeError, with the path, where another thread has a module in a call, or one with parameters was made or replaced.
    """
    changed: list[tuple[Any, Any]] = []
    with MODEL_LOCK:
        for path, module in modules.items():
            if type(now := module._parameters) is GatheringParameters and now.call.thread != thread:
                raise RuntimeError(
                    f"module '{path}' is in a functional_call of another thread: expected one at a time, since what a module "
                    "reads is put into it meanwhile; give each thread a model of its own, or hold a lock around the call"
                )
        before: ModuleAttributes = {module: module.__dict__ for module in modules.values()}
        classes = [*map(type, before)]  # torch.nn.utils.parametrize makes new ones
        containers = _find_containers(before.values())
        contents = {id(one): (one, one.copy()) for one in filter(None, containers) if isinstance(one, _CONTAINER_TYPES)}
        _set_attributes(before, map(dict.copy, before.values()))
    try:
        yield before
    finally:
        with MODEL_LOCK:
            _set_attributes(before, before.values())
            for module, cls in zip(before, classes, strict=True):
                if type(module) is not cls:
                    module.__class__ = cls
            filled = (one for one in filter(None, containers) if isinstance(one, _CONTAINER_TYPES))
            contents = {id(one): (one, type(one)()) for one in filled} | contents
            for container, content in contents.values():
                if container != content or [*container] != [*content]:  # or in another order
                    changed.append((content, container.copy()))
                    container.clear()
                    container.update(content)
    _check_submodules(modules, [(content, now) for content, now in changed if isinstance(now, dict)])


def _set_attributes(modules: Iterable[nn.Module], attributes: Iterable[dict[str, Any]]) -> None:
    deque(map(object.__setattr__, modules, itertools.repeat("__dict__"), attributes), maxlen=0)


def _check_submodules(modules: Mapping[str, nn.Module], changed: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Raise RuntimeError where these dicts, each as it was before and is now, lost or got modules with parameters."""
    left = {one for _, now in changed for value in now.values() for one in _with_parameters(value)}
    for old, now in ((old, now.get(name)) for before, now in changed for name, old in before.items()):
        if not left.issuperset(_with_parameters(old)):
            path = next(path for path, module in modules.items() if module is old)
            raise RuntimeError(
                f"module '{path}' is replaced in forward, {type(old).__name__} by {type(now).__name__}: the call would compute "
                "without its parameters, and put the model back as it was; expected it left alone, or the spec made afterwards"
            )
    for one in left.difference(modules.values()):
        if any(p is not None and p.requires_grad for p in own_tensors(one, "_parameters").values()):
            raise _creation_error(f"module {type(one).__name__}, which has parameters to train,")


def _with_parameters(value: Any) -> set[nn.Module]:
    modules = value.modules() if isinstance(value, nn.Module) else ()
    return {one for one in modules if {*own_tensors(one, "_parameters").values()} - {None}}


def _find_containers(attributes: Collection[dict[str, Any]]) -> list[Any]:
    """Return the containers among modules' attributes."""
    try:
        return [*itertools.chain.from_iterable(map(_get_containers, attributes))]
    except KeyError:
        return [own.get(name) for own in attributes for name in MODULE_CONTAINERS]


_get_containers: Callable[[dict[str, Any]], Sequence[Any]] = operator.itemgetter(*MODULE_CONTAINERS)


def own_tensors(module: nn.Module, kind: str) -> dict[str, Tensor | None]:
    """Return a module's ``_parameters`` or ``_buffers`` to be read; nothing is gathered for that."""
    mapping = vars(module).get(kind)
    if type(mapping) is dict:  # as they are, outside of calls
        return mapping
    return dict(dict.items(mapping or {}))


Replaced = dict[tuple[str, str], Any]
"""The tensors, by path and attribute, that forward has set in place of a module's parameters."""

Owned = dict[nn.Module, Mapping[str, tuple[Unit, int]]]
"""For each module the unit and position in it of its own parameters, by attribute."""


@dataclass(frozen=True)
class BoundModule:
    """A module of a model: its path, all modules in it by each path, the units that own their parameters, and these."""

    path: str
    modules: Mapping[str, nn.Module]
    owned: Owned
    own_parameters: Sequence[Tensor] = ()  # but for those that a call around this one replaces

    @functools.cached_property
    def distinct(self) -> dict[str, nn.Module]:
        """Each module by one of its paths."""
        return {path: module for module, path in {module: path for path, module in self.modules.items()}.items()}

    @classmethod
    def bind(cls, model: nn.Module, spec: PartitionSpec) -> BoundModule:
        """Return a whole model. Raise ValueError unless the spec was made for it, TypeError for a ScriptModule in it."""
        with MODEL_LOCK:
            modules = find_modules(model, "", {})
            for path in find_instances(modules, torch.jit.ScriptModule):
                raise TypeError(
                    f"module '{path}' is a ScriptModule, whose code reads its own parameters and not those of a call: expected "
                    "the module that torch.jit was given; P(compile=True) compiles it"
                )
            paths = spec.by_run
            for path, module in modules.items():
                if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
                    check_not_compiled(path, module, in_place=path not in paths)
            return cls("", modules, *_find_owners(modules, spec))

    def submodule(self, path: str) -> BoundModule:
        """Return one of its modules. Raise RuntimeError if forward has put other modules into it."""
        modules = find_modules(self.modules[path], path, {})
        if new := [name for name, module in modules.items() if module not in self.owned]:
            raise RuntimeError(
                f"module '{new[0]}' ({type(modules[new[0]]).__name__}) was put there in forward, and P(remat=...) of '{path}' "
                "recomputes the modules of the spec alone: expected the same modules in every call; put it there before the "
                "spec is made, or leave remat out there"
            )
        return BoundModule(path, modules, {module: self.owned[module] for module in modules.values()})

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


def find_modules(module: nn.Module, path: str, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return ``dict(module.named_modules(prefix=path, remove_duplicate=False))``, without generators: Dynamo traces it, too."""
    found[path] = module
    prefix = f"{path}." if path else ""
    for name, child in module._modules.items():
        if child is not None and child._modules:
            find_modules(child, prefix + name, found)
        elif child is not None:
            found[prefix + name] = child
    return found


def find_instances(modules: Mapping[str, nn.Module], kind: type[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of a class by path; it is not asked of each module but of each class, of which there are few."""
    classes = {cls for cls in {*map(type, modules.values())} if issubclass(cls, kind)}
    return {path: module for path, module in modules.items() if type(module) in classes} if classes else {}


def _find_owners(modules: Mapping[str, nn.Module], spec: PartitionSpec) -> tuple[Owned, list[Tensor]]:
    """Return the owners of these modules' parameters, and those that no call around replaces; raise ValueError for others."""
    owners = spec._compute_once(_owners_by_path)
    absent = ((path, nn.Module()) for path in owners.keys() - modules.keys())  # without parameters
    owned, tensors, others = Owned(), list[Tensor](), dict[str, Mapping[str, Tensor | None]]()
    seen: dict[int, tuple[Unit, int]] = {}  # by the id of a parameter
    for path, module in itertools.chain(modules.items(), absent):
        own = params if type(params := module._parameters) is dict else own_tensors(module, "_parameters")
        mine, found = owners.get(path, _NOTHING_OWNED), list[Tensor]() if type(params) is GatheringParameters else tensors
        for attr, at in mine.items():
            unit, i = at
            if (tensor := own.get(attr)) is None or tensor.shape != unit.params[i].shape:
                got = "none" if tensor is None else f"shape {list(tensor.shape)}"
                raise ValueError(
                    f"parameter '{join_path(path, attr)}' of unit '{unit.key}': expected shape {list(unit.params[i].shape)} in "
                    f"the model, got {got}; was the model changed after the spec was made?"
                )
            found.append(tensor)
            if (other := seen.setdefault(id(tensor), at)) is not at:
                raise ValueError(
                    f"parameter '{join_path(path, attr)}' of unit '{unit.key}' is the same as "
                    f"'{other[0].params[other[1]].name}' in the model, and two parameters in the spec: expected them tied "
                    "before the spec is made"
                )
        if len(own) > len(mine):
            others[path] = own
        owned[module] = {**before, **mine} if (before := owned.get(module)) else mine
    left = {id(others[path].get(attr)) for path, _, attr in (name.rpartition(".") for name in spec.ignored) if path in others}
    for path, own in others.items():
        for attr, tensor in own.items():
            if attr not in owned[modules[path]] and tensor is not None and id(tensor) not in left:
                raise ValueError(
                    f"parameter '{join_path(path, attr)}' is not in the spec: expected the model that it was made for; "
                    "was the model changed after the spec was made?"
                )
    return owned, tensors


_NOTHING_OWNED: Mapping[str, tuple[Unit, int]] = {}
"""The owners of a module without parameters of units."""


def _owners_by_path(spec: PartitionSpec) -> dict[str, dict[str, tuple[Unit, int]]]:
    owners: dict[str, dict[str, tuple[Unit, int]]] = {}
    for unit in spec:
        for i, param in enumerate(unit.params):
            at = unit, i  # one object for all of its locations
            for path, attr in param.locations:
                owners.setdefault(path, {})[attr] = at
    return owners
