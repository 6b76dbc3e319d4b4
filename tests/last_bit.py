"""Simulates another CPU: inexact float32 results differ by one in their last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class OtherLastBit(TorchDispatchMode):
    """Moves each float32 that an operator rounds to the next one, up or down; leaves exact results alone.

    A result is exact if the operator computes the same in float64. Operators inside ``torch.compile`` are not seen.
    """

    def __init__(self, *, up: bool) -> None:
        super().__init__()
        self.limit = torch.tensor(float("inf") if up else float("-inf"))
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace != "aten" or func._schema.is_mutable or func.is_view or is_random or not is_float32(out):
            return out
        exact = func(*tree_map(to_double, args), **tree_map(to_double, kwargs))
        if exact.dtype != torch.float64:  # a factory, or a conversion
            return out
        is_rounded = exact != out
        self.moved += int(is_rounded.sum())
        return torch.where(is_rounded, torch.nextafter(out, self.limit), out)


def is_float32(x: Any) -> bool:
    return type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"


def to_double(x: Any) -> Any:
    return x.double() if is_float32(x) else x
