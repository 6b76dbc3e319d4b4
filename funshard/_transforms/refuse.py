"""Functions of tensors that a computation must not use, and the error where it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._torch import DATA

__all__ = ["DATA", "REGISTER_HOOK", "Refuse"]

REGISTER_HOOK: Callable[..., Any] = torch.Tensor.register_hook
"""``tensor.register_hook``, which changes the gradient of one level."""


class Refuse(TorchFunctionMode):
    """Within this, each of these functions raises a RuntimeError with its message instead of running."""

    def __init__(self, messages: Mapping[Callable[..., Any], str]) -> None:
        super().__init__()
        self._messages = messages

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (message := self._messages.get(func)) is not None:
            raise RuntimeError(message)
        return func(*args, **(kwargs or {}))
