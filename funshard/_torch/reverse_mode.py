"""What reverse mode records, and when its backward ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped

from .levels import is_wrapped

__all__ = ["hold_until_backward_ends", "is_recorded"]


def is_recorded(tensor: Tensor) -> bool:
    """Return whether torch.func.grad or vjp, or plain autograd, records operations on the tensor now.

    Forward mode does not. Pinned by ``test_what_reverse_mode_records``.
    """
    while is_wrapped(tensor):
        if tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad


def hold_until_backward_ends(held: Callable[[], None]) -> None:
    """Hold an object until the running backward ends, also by an error. The end without one calls it.

    Pinned by ``test_held_until_backward_ends``.
    """
    torch.autograd.Variable._execution_engine.queue_callback(held)  # pyright: ignore
