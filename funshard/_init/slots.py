"""The parameters and buffers of a model on the meta device, and the functions that initialise them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._spec.tree import check_not_compiled, join_path
from .._torch.layers import find_reset

__all__ = ["InitFn", "Initialiser", "Slot", "find_initialisers", "find_slots", "format_slots"]

InitFn = Callable[[nn.Module], object]


@dataclass(eq=False)
class Slot:
    """A parameter or buffer that has a shape and no values: once, however many modules share it."""

    name: str
    path: str
    """The path of the first module that has it."""
    tensor: Tensor
    param: bool
    modules: list[nn.Module] = field(default_factory=list)
    """Every module that has it."""

    @property
    def kind(self) -> str:
        """The word for it in an error."""
        return "parameter" if self.param else "buffer"

    @property
    def owner(self) -> str:
        """The first module that has it, for an error."""
        return f"module '{self.path}' ({type(self.modules[0]).__name__})"

    @property
    def nbytes(self) -> int:
        """The size of its values in bytes."""
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def uses_nan(self) -> bool:
        """Whether NaN marks elements that nobody wrote. torch has no test for NaN in dtypes of 8 bits."""
        return (self.tensor.is_floating_point() or self.tensor.is_complex()) and self.tensor.itemsize > 1

    def empty(self, device: torch.device) -> Tensor:
        """Return memory for it, in its own order of the dimensions."""
        return torch.empty_like(self.tensor, device=device, requires_grad=False)

    def make_tensor(self, values: Tensor) -> Tensor:
        """Return a tensor on these values' memory, with the type and the attributes of the slot's own tensor."""
        put = nn.Parameter(values, self.tensor.requires_grad) if self.param else values.detach()
        vars(put).update(vars(self.tensor))
        return put


def find_slots(model: nn.Module) -> dict[int, Slot]:
    """Return the slots by the ids of their tensors, in the order of the modules.

    Raises:
        TypeError: For a ScriptModule, and for a tensor that is no dense nn.Parameter or buffer.
    """
    found: dict[int, Slot] = {}
    for path, module in model.named_modules():
        check_not_compiled(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"init: module '{path}' is a ScriptModule: expected one whose parameters Python can give it")
        for param, own in ((True, module._parameters), (False, module._buffers)):
            for attr, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                name = join_path(path, attr)
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


def find_initialisers(model: nn.Module, init_fn: InitFn | None) -> list[Initialiser]:
    """Return the initialisers in the order of ``nn.Module.apply``: ``init_fn`` of each module, or its reset_parameters."""
    paths = {module: path for path, module in model.named_modules()}

    def of(module: nn.Module) -> Callable[[], object] | None:
        return find_reset(module) if init_fn is None else functools.partial(init_fn, module)

    found = ((module, of(module)) for module in _children_first(model, set()))
    return [Initialiser(paths[module], module, run) for module, run in found if run is not None]


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules inside a module and then itself, each once."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def format_slots(slots: Iterable[Slot], most: int = 3) -> str:
    """Return the names of a few slots, for an error."""
    every = sorted(slot.name for slot in slots)
    return ", ".join(f"'{name}'" for name in every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
