"""What reverse mode records."""

from __future__ import annotations

from torch import Tensor
from torch._C._functorch import get_unwrapped

from .levels import is_wrapped

__all__ = ["is_recorded"]


def is_recorded(tensor: Tensor) -> bool:
    """Return whether torch.func.grad or vjp, or plain autograd, records operations on the tensor now.

    Forward mode does not. Pinned by ``test_what_reverse_mode_records``.
    """
    while is_wrapped(tensor):
        if tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad
