"""A module's insides, replaced for the length of a call and put back: parameters, buffers, attributes."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._spec.spec import PartitionSpec
from .._spec.tree import check_not_compiled, join_path
from .._spec.unit import Unit

__all__ = [
    "CHANGING",
    "CONTAINERS",
    "Attributes",
    "Parameters",
    "Place",
    "own_of",
    "restored",
    "this_thread",
]

Attributes = dict[nn.Module, dict[str, Any]]
"""Of each module what ``vars`` gives."""

Owned = dict[nn.Module, Mapping[str, tuple[Unit, int]]]
"""For each module the unit and position in it of its own parameters, by attribute."""

_KINDS = (dict, set)
CONTAINERS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, _KINDS) and name != "_parameters")
"""Where nn.Module keeps hooks, submodules and buffers, which forward may change in place (transformers 5 adds hooks)."""

CHANGING = threading.RLock()
"""Held while a model is being changed for a call and put back: other threads find it as it was, or with `Parameters`."""


def this_thread(caller: int | None = None) -> int:
    """The thread that runs. Autograd has threads of its own, in which a run of ``caller``'s is one of that thread."""
    return caller if caller and isinstance(threading.current_thread(), threading._DummyThread) else threading.get_ident()


class Parameters(dict[str, Any]):
    """A module's ``_parameters`` for the length of a call in a thread: reading one gathers its unit."""

    __slots__ = ("_owned", "_read", "path", "thread")

    def __init__(
        self,
        original: Mapping[str, Tensor | None],
        owned: Mapping[str, tuple[Unit, int]],
        read: Callable[[Unit, int], Tensor],
        thread: int,
        path: str,
    ) -> None:
        super().__init__(original)
        self._owned, self._read, self.thread, self.path = owned, read, thread, path

    def __getitem__(self, name: str) -> Any:
        owned = self._owned.get(name)
        return super().__getitem__(name) if owned is None else self._read(*owned)

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and value.requires_grad and super().get(name) is None:
            raise _made_in_forward(f"parameter '{join_path(self.path, name)}'")
        self._disown(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._disown(name)
        super().__delitem__(name)

    def _disown(self, name: str) -> None:
        if name in self._owned:  # which all calls share
            self._owned = {other: at for other, at in self._owned.items() if other != name}

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

    def put(self, original: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """What has been put here, with nothing gathered."""
        own = ((name, super(Parameters, self).__getitem__(name)) for name in self if name not in self._owned)
        return {name: value for name, value in own if value is not original.get(name, self)}


def _made_in_forward(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} is made in forward: a call puts the model back as it was, so it would be made again in each call and never "
        "trained; expected all of them made before the spec, in __init__ or by running the model once"
    )


@dataclass(frozen=True)
class Place:
    """A module of a model: its path, all modules in it by each of their paths, and which units own what of them."""

    path: str
    modules: Mapping[str, nn.Module]
    owned: Owned

    @property
    def scripted(self) -> Iterator[tuple[nn.Module, str, Unit, int]]:
        """The parameters that no mapping of Python's hands out: each ScriptModule's, by attribute, and where they are."""
        for module, owned in self.owned.items():
            if isinstance(module, torch.jit.ScriptModule):
                yield from ((module, attr, unit, i) for attr, (unit, i) in owned.items())

    @classmethod
    def of(cls, model: nn.Module, spec: PartitionSpec) -> Place:
        """The whole model; ValueError unless the spec was made for it."""
        with CHANGING:
            modules = _modules_in(model, "")
            for path, module in modules.items():
                check_not_compiled(path, module, in_place=True)
            return cls("", modules, _owners(modules, spec))

    def within(self, path: str) -> Place:
        """One of its modules."""
        modules = _modules_in(self.modules[path], path)
        return Place(path, modules, {module: self.owned[module] for module in modules.values()})


@contextlib.contextmanager
def restored(modules: Mapping[str, nn.Module], thread: int) -> Generator[Attributes]:
    """Within this, the modules may be changed; afterwards every attribute is what it was before, which it gives.

    Raises RuntimeError, naming the module, where another thread has one in a call, and where a module with parameters of its
    own to train was added.
    """
    added: list[nn.Module] = []
    with CHANGING:
        for path, module in modules.items():
            if isinstance(now := vars(module).get("_parameters"), Parameters) and now.thread != thread:
                raise RuntimeError(
                    f"module '{path}' is in a functional_call of another thread: expected one at a time, since what a module "
                    "reads is put into it meanwhile; give each thread a model of its own, or hold a lock around the call"
                )
        before: Attributes = {}
        contents: dict[int, tuple[Any, Any]] = {}  # of each container that is not empty, by its id: itself, and a copy
        scripted: dict[nn.Module, dict[str, Tensor | None]] = {}
        for module in modules.values():
            if module in before:
                continue
            before[module] = attributes = vars(module)
            object.__setattr__(module, "__dict__", attributes.copy())
            contents |= {id(one): (one, one.copy()) for one in _filled(attributes)}
            if isinstance(module, torch.jit.ScriptModule):  # whose own code asks no mapping of Python's
                scripted[module] = own_of(module, "_parameters") | own_of(module, "_buffers")
    try:
        yield before
    finally:
        with CHANGING:
            for module, attributes in before.items():
                for name, tensor in scripted.get(module, {}).items():
                    setattr(module, name, tensor)
                object.__setattr__(module, "__dict__", attributes)
                for container in _filled(attributes):
                    if id(container) not in contents:
                        added += _trained_modules(container, ())
                        container.clear()
            for container, content in contents.values():
                if container != content:
                    added += _trained_modules(container, content)
                    container.clear()
                    container.update(content)
    for module in added:
        if module not in before:
            raise _made_in_forward(f"module {type(module).__name__}, which has parameters to train,")


def _trained_modules(container: Any, before: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules that a module's dict of submodules has beside those of before, where they have parameters to train."""
    if isinstance(container, dict):
        new = [x for name, x in container.items() if isinstance(x, nn.Module) and name not in before]
        yield from (x for x in new if any(p.requires_grad for p in x.parameters()))


def _filled(attributes: dict[str, Any]) -> Sequence[Any]:
    """The containers among a module's attributes that are not empty."""
    try:
        containers = _containers(attributes)
    except KeyError:
        containers = [attributes.get(name) for name in CONTAINERS]
    return [one for one in containers if isinstance(one, _KINDS) and one] if any(containers) else ()


_containers: Callable[[dict[str, Any]], Sequence[Any]] = operator.itemgetter(*CONTAINERS)


def _modules_in(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """``dict(module.named_modules(prefix=path, remove_duplicate=False))``, without a chain of generators for each."""
    found = {path: module}
    for name, child in module._modules.items():
        if child is not None:
            found |= _modules_in(child, join_path(path, name)) if child._modules else {join_path(path, name): child}
    return found


def _owners(modules: Mapping[str, nn.Module], spec: PartitionSpec) -> Owned:
    places = spec._compute_once(_places)
    parameters = {path: own_of(module, "_parameters") for path, module in modules.items()}
    for path, mine in places.items():
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
        mine = places.get(path, _NONE)
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


_NONE: Mapping[str, tuple[Unit, int]] = {}


def _places(spec: PartitionSpec) -> dict[str, dict[str, tuple[Unit, int]]]:
    """By module path and attribute the unit and the position in it of every parameter."""
    places: dict[str, dict[str, tuple[Unit, int]]] = {}
    for unit in spec:
        for i, param in enumerate(unit.params):
            for path, attr in param.places:
                places.setdefault(path, {})[attr] = unit, i
    return places


def own_of(module: nn.Module, kind: str) -> dict[str, Tensor | None]:
    """A module's ``_parameters`` or ``_buffers``, to be read: those that are in it, and nothing is gathered for that."""
    mapping = vars(module).get(kind)
    if type(mapping) is dict:  # as they are, outside of calls
        return mapping
    if isinstance(module, torch.jit.ScriptModule):  # a traced one has none in its __dict__
        return dict(getattr(module, kind).items())
    return dict(dict.items(mapping or {}))
