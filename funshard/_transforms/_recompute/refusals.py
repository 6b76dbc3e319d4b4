"""Functions of tensors that a computation must not use, and the error where it does."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..._torch import DATA

__all__ = ["DATA", "REGISTER_HOOK", "RefusedFunctions"]

REGISTER_HOOK: Callable[..., Any] = torch.Tensor.register_hook
"""``tensor.register_hook``, which changes the gradient of one level."""


QUERY_GETTERS: Mapping[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")
}
"""What a TorchFunctionMode sees where code asks autograd about a tensor: torch's own and this library's does all the time."""


class RefusedFunctions(TorchFunctionMode):
    """Within this, each of these functions raises a RuntimeError with its message instead of running."""

    def __init__(self, messages: Mapping[Callable[..., Any], str]) -> None:
        super().__init__()
        self._messages = messages

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        message = self._messages.get(func)
        if message is not None and not (func in _ASKED and _is_own(sys._getframe(1))):
            raise RuntimeError(message)
        return func(*args, **(kwargs or {}))


_ASKED = frozenset(QUERY_GETTERS.values())


def _is_own(frame: types.FrameType) -> bool:
    """Return whether this is code of torch or of this library."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "funshard")
