"""Checks of what a recomputed function reads and calls: parameters, hooks, queries, and tensors of transforms around it."""

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


def describe_parameter(ids: set[int], modules: Iterable[nn.Module]) -> str:
    """Return the words for the first parameter of these modules that has, or whose node has, one of these ids."""
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) in ids or id(parameter.grad_fn) in ids):
                return f"parameter '{name}' of a {type(module).__name__}"
    return ""


def check_not_read(name: str, parameter: str) -> None:
    """Raise RuntimeError if the function of this name reads a parameter, of which this is a description."""
    if parameter:
        raise RuntimeError(
            f"{name} reads {parameter}, which is not one of its arguments and would have no gradient: expected "
            "fs.remat(lambda p, x: torch.func.functional_call(module, p, x)), or P(remat=True) of a unit"
        )


REGISTER_HOOK: Callable[..., Any] = torch.Tensor.register_hook
"""``tensor.register_hook``, which changes the gradient of one level."""

QUERY_GETTERS: Mapping[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")
}
"""The attributes that ask autograd, and the functions that a TorchFunctionMode sees for them."""


class ForbiddenFunctions(TorchFunctionMode):
    """A mode that refuses functions of tensors by a RuntimeError with its message, but for queries of torch and of funshard."""

    def __init__(self, messages: Mapping[Callable[..., Any], str]) -> None:
        super().__init__()
        self._messages = messages

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        message = self._messages.get(func)
        if message is not None:
            caller = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            if func not in _GETTERS or caller not in ("torch", "funshard"):
                raise RuntimeError(message)
        return func(*args, **(kwargs or {}))


_GETTERS = frozenset(QUERY_GETTERS.values())


# --- Tensors of the transforms around a run that the run reads without having been given them ---
#
# torch takes such a tensor for a constant: the run is below those transforms. So its derivative would be missing.

_DETACH = frozenset({torch.detach, torch.Tensor.detach})


class OuterTensors(TorchFunctionMode):
    """A mode that records the tensors of outer transforms that functions with tensors as results are given.

    Errors name what runs in it, and the parameters of the modules that it reaches.
    """

    def __init__(self, name: str, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._name, self._modules, self._keys = name, modules, _torch.dispatch_keys()
        self._tensors: dict[int, Tensor] = {}  # by id

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(map(_may_be_outer, (*args, *kwargs.values()))):  # nearly always
            return func(*args, **kwargs)
        level = _torch.current_level()
        outer = [x for x in _iter_tensors((*args, *kwargs.values())) if _torch.level_of(x) > level]
        for x in filter(_torch.is_batched, outer):
            self._refuse(x)
        out = func(*args, **kwargs)
        if outer and func not in _DETACH and next(_iter_tensors((out,)), None) is not None:
            self._tensors.update((id(x), x) for x in outer)
        return out

    def check(self) -> None:
        """Raise RuntimeError if a running transform differentiates one of the recorded tensors."""
        for x in self._tensors.values():
            # the levels of a tensor are those inside of another wrapper around it
            if _torch.tracking_levels(_torch.wrap_for_ended_level(x), self._keys):
                self._refuse(x)

    def _refuse(self, x: Tensor) -> NoReturn:
        check_not_read(self._name, describe_parameter({id(x)}, self._modules))
        raise RuntimeError(
            f"{self._name} reads a tensor of shape {list(x.shape)} that is neither an argument nor reached from one, as in a "
            "global or an attribute of a class, and that a transform around it has computed: there it would have no gradient; "
            "expected it among the arguments"
        )


def _may_be_outer(value: Any) -> bool:
    """Return whether a value is a tensor of a transform, or may contain one."""
    return _torch.is_wrapped(value) if isinstance(value, Tensor) else type(value) in (tuple, list)


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _iter_tensors(value)
