"""A mode in which torch's optimizers compute with tensors instead of Python numbers, so that a graph can be made of a step.

By themselves they read a count from a tensor (``Tensor.item``), and give its functions to operators as numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import _torch

__all__ = ["NumbersAsTensors"]


class NumbersAsTensors(TorchFunctionMode):
    """A mode in which ``item`` returns a 0-D tensor in float64, and operators take one instead of a Python number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item:
            return args[0].double()
        if func in _torch.PROFILER_OPS:  # the graph would have them
            return ()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x.dim() for x in tensors):
            args = tuple(map(_store_number, args))
            kwargs = {key: _store_number(x) for key, x in kwargs.items()}
        elif len(args) == 2 and len(tensors) == 2 and all(x.is_floating_point() for x in tensors):
            first, second = args  # a Python number takes the dtype of a tensor
            if second.dtype == torch.float64:
                return func(first, second.to(first.dtype), **kwargs)
            if first.dtype == torch.float64 and not func.__name__.endswith("_"):
                return func(first.to(second.dtype), second, **kwargs)
        function, name = _SCALED.get(func, (None, ""))
        if function is not None and isinstance(factor := kwargs.get(name), Tensor):
            wide = torch.promote_types(args[0].dtype, torch.float32)  # the kernels round once, at the end
            tensor, first, *others = (x.to(wide) for x in args)
            new = function(tensor, first * factor, *others)
            return args[0].copy_(new) if func.__name__.endswith("_") else new.to(args[0].dtype)
        return func(*args, **kwargs)


def _store_number(x: Any) -> Any:
    """Return a 0-D tensor in memory: inductor would compute an expression of it for each element again."""
    return x.as_strided((), ()) if isinstance(x, Tensor) and x.dim() == 0 else x


_SCALED: dict[Any, tuple[Callable[..., Tensor], str]] = {
    Tensor.add: (torch.add, "alpha"),
    Tensor.add_: (torch.add, "alpha"),
    Tensor.addcmul_: (torch.addcmul, "value"),
    Tensor.addcdiv_: (torch.addcdiv, "value"),
}
"""The operators by which torch's optimizers apply a factor, the functions without a factor, and its name."""
