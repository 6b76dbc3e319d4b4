"""A replacement for a tensor that must not be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["StandIn"]


class StandIn(Tensor):
    """A replacement for a tensor: it has its metadata, and raises a RuntimeError where it is computed with.

    Pinned by ``test_a_stand_in``.
    """

    _original: Tensor
    _message: str

    @classmethod
    def replace(cls, tensor: Tensor, message: str) -> StandIn:
        """Return a stand-in for the tensor, whose use raises an error with this message."""
        made = Tensor._make_subclass(cls, _EMPTY)  # as nn.Parameter is made, whatever mode there is
        made._original, made._message = tensor, message
        made._is_param = isinstance(tensor, torch.nn.Parameter)  # what isinstance asks for  # pyright: ignore[reportAttributeAccessIssue]
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS:
            return func(args[0]._original, *args[1:], **(kwargs or {}))
        raise RuntimeError(next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, StandIn))._message)

    def __repr__(self, **_: object) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"<{self._message}>"


_EMPTY = torch.empty(0)
_QUESTIONS: frozenset[Any] = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__]
    + [getattr(torch._C.TensorBase, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")]
)
