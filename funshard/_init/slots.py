"""What of a model is on the meta device, and which function of which module gives it values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._spec.tree import join, refuse_compiled
from .._torch.layers import find_reset

__all__ = ["InitFn", "Initialiser", "Slot", "initialisers", "sample", "slots_of"]

InitFn = Callable[[nn.Module], object]


@dataclass(eq=False)
class Slot:
    """A parameter or buffer that has a shape and no values: once, however many modules share it."""

    name: str
    path: str
    """The module that it is found in first."""
    tensor: Tensor
    param: bool
    modules: list[nn.Module] = field(default_factory=list)
    """All that it is in."""

    @property
    def kind(self) -> str:
        """What it is, to say."""
        return "parameter" if self.param else "buffer"

    @property
    def owner(self) -> str:
        """Its first module, to say."""
        return f"module '{self.path}' ({type(self.modules[0]).__name__})"

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def floats(self) -> bool:
        """Whether what nothing was written to is known by NaN, for which torch has no test in dtypes of 8 bits."""
        return (self.tensor.is_floating_point() or self.tensor.is_complex()) and self.tensor.itemsize > 1

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it, in its own order of the dimensions."""
        return torch.empty_like(self.tensor, device=device, requires_grad=False)

    def dressed(self, values: Tensor) -> Tensor:
        """These values, in the same memory, as its modules are to find them: with all that was noted on the tensor."""
        put = nn.Parameter(values, self.tensor.requires_grad) if self.param else values.detach()
        vars(put).update(vars(self.tensor))
        return put


def slots_of(model: nn.Module) -> dict[int, Slot]:
    """By the id of the tensor, in the order of the modules. TypeError for what is no dense nn.Parameter, and for scripts."""
    found: dict[int, Slot] = {}
    for path, module in model.named_modules():
        refuse_compiled(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"init: module '{path}' is a ScriptModule: expected one whose parameters Python can give it")
        for param, own in ((True, module._parameters), (False, module._buffers)):
            for attr, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                name = join(path, attr)
                if tensor.layout is not torch.strided or (param and type(tensor) is not nn.Parameter):
                    raise TypeError(f"init: '{name}': expected a dense nn.Parameter or buffer, got {type(tensor).__name__}")
                found.setdefault(id(tensor), Slot(name, path, tensor, param)).modules.append(module)
    return found


@dataclass(frozen=True, eq=False)
class Initialiser:
    """A function that gives a module's parameters and buffers their values, and maybe those of modules in it."""

    path: str
    module: nn.Module
    run: Callable[[], object]

    def __str__(self) -> str:
        return f"module '{self.path}' ({type(self.module).__name__})"


def initialisers(model: nn.Module, init_fn: InitFn | None) -> list[Initialiser]:
    """In the order of ``nn.Module.apply``, children first, each module once: ``init_fn`` of all, or who can reset itself."""
    paths = {module: path for path, module in model.named_modules()}

    def of(module: nn.Module) -> Callable[[], object] | None:
        return find_reset(module) if init_fn is None else functools.partial(init_fn, module)

    found = ((module, of(module)) for module in _children_first(model, set()))
    return [Initialiser(paths[module], module, run) for module, run in found if run is not None]


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def sample(slots: Iterable[Slot], most: int = 3) -> str:
    """A few of them, to show."""
    every = sorted(slot.name for slot in slots)
    return ", ".join(f"'{name}'" for name in every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
