"""Checks of what a recomputed function reads and calls: hooks, queries, and tensors that it was not given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import _torch


def check_backward_hooks(modules: Iterable[nn.Module], name: str) -> None:
    """Raise RuntimeError for a module's backward hook: torch drops it inside forward mode, and another run would not."""
    for module in modules:
        for hook in (*module._backward_pre_hooks.values(), *module._backward_hooks.values()):
            hook_name = getattr(hook, "__qualname__", type(hook).__name__)
            raise RuntimeError(
                f"{name} reaches a {type(module).__name__} with the backward hook {hook_name}, which in a stack of transforms "
                "torch calls for one of them or for none: expected an autograd.Function that changes the gradient, or the hook "
                "removed"
            )


REGISTER_HOOK: Callable[..., Any] = torch.Tensor.register_hook
"""``tensor.register_hook``, which changes the gradient of one level."""

_GETTERS = {getattr(torch.Tensor, name).__get__: name for name in ("requires_grad", "grad_fn", "is_leaf")}
"""The functions that a TorchFunctionMode sees for the attributes that ask autograd."""


def messages_in_stack(name: str) -> dict[Callable[..., Any], str]:
    """Return the errors for what concerns one derivative of a stack: which one that is differs between runs."""
    return {
        function: f"{name} reads tensor.{attribute}, which in a stack of transforms means one of them, and not the same one "
        f"when {name} runs again: expected it not to (detach() for .data, an autograd.Function for a hook), or no remat"
        for function, attribute in {_torch.DATA: "data", REGISTER_HOOK: "register_hook", **_GETTERS}.items()
    }


class ForbiddenFunctions(TorchFunctionMode):
    """A mode that refuses functions of tensors by a RuntimeError with its message, but for queries of torch and of funshard."""

    def __init__(self, messages: Mapping[Callable[..., Any], str]) -> None:
        super().__init__()
        self._messages = messages

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if (message := self._messages.get(func)) is not None:
            caller = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            if func not in _GETTERS or caller not in ("torch", "funshard"):
                raise RuntimeError(message)
        return func(*args, **(kwargs or {}))


def refuse_outer(name: str, ids: set[int], modules: Iterable[nn.Module]) -> NoReturn:
    """Raise RuntimeError for a tensor that the function of this name was not given: it, or its node, has one of these ids."""
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) in ids or id(parameter.grad_fn) in ids):
                raise RuntimeError(
                    f"{name} reads parameter '{key}' of a {type(module).__name__}, which is not one of its arguments and would "
                    "have no gradient: expected fs.remat(lambda p, x: torch.func.functional_call(module, p, x)), or "
                    "P(remat=True) of a unit"
                )
    raise RuntimeError(
        f"{name} reads a tensor of the running computation that is neither an argument nor reached from one, as in a global or "
        "an attribute of a class, where it would have no gradient: expected it among the arguments"
    )


class OuterTensors(TorchFunctionMode):
    """A mode that records the tensors of transforms around a run that functions with tensors as results are given.

    torch takes such a tensor for a constant, since the run is below those transforms: its derivative would be missing.
    """

    def __init__(self, name: str, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._name, self._modules, self._keys = name, modules, _torch.dispatch_keys()
        self._tensors: dict[int, Tensor] = {}  # by id

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, level = kwargs or {}, _torch.current_level()
        outer = [x for x in _iter_tensors((*args, *kwargs.values())) if _torch.is_wrapped(x) and _torch.level_of(x) > level]
        if any(map(_torch.is_batched, outer)):
            refuse_outer(self._name, set(map(id, outer)), self._modules)
        out = func(*args, **kwargs)
        if outer and func not in (torch.detach, torch.Tensor.detach) and any(True for _ in _iter_tensors((out,))):
            self._tensors.update((id(x), x) for x in outer)
        return out

    def check(self) -> None:
        """Raise RuntimeError if a running transform differentiates one of the recorded tensors."""
        for x in self._tensors.values():
            # the levels of a tensor are those inside of another wrapper around it
            if _torch.tracking_levels(_torch.wrap_for_ended_level(x), self._keys):
                refuse_outer(self._name, {id(x)}, self._modules)


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _iter_tensors(value)
