"""Values for indices that a model computes from its data, such as each token's experts, where tensors have shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch

__all__ = ["MOST_VALUES", "fill_collective", "give_even_indices", "has_known_integers"]

MOST_VALUES = 2**20
"""The elements of the largest tensor with values that a planned step computes with."""

_RANKING = {"topk", "sort", "argmax", "argmin", "max", "min", "multinomial"}


def give_even_indices(name: str, args: Any, out: Any) -> Any:
    """Return an operator's results, with indices that it chose among spread evenly: a router then loads all experts alike."""
    if name not in _RANKING:
        return out
    many = isinstance(out, tuple | list)
    results: list[Any] = list(out) if many else [out]
    for i, x in enumerate(results):
        is_index = isinstance(x, Tensor) and x.dtype == torch.int64 and _torch.is_fake(x) and args[0].is_floating_point()
        if is_index or (name == "sort" and i == 1 and _torch.is_fake(x)):
            if x.numel() > MOST_VALUES:
                continue
            choices = max(_count_choices(name, args), 1)
            with _torch.real_tensors():
                results[i] = (torch.arange(x.numel(), device=x.device) % choices).view(x.shape)
    return tuple(results) if many else results[0]


def has_known_integers(name: str, out: Any) -> bool:
    """Return whether an operator without inputs makes a tensor of integers, such as positions: models look at their values."""
    known = name in ("arange", "full", "ones", "zeros") and isinstance(out, Tensor) and not out.is_floating_point()
    return known and not out.is_meta and not out.is_complex() and out.numel() <= MOST_VALUES


def _count_choices(name: str, args: Any) -> int:
    """Return how many elements an operator chose among."""
    dim = args[2] if name == "topk" and len(args) > 2 else args[1] if name != "topk" and len(args) > 1 else -1
    x = args[0]
    return x.shape[dim] if x.dim() and isinstance(dim, int) and not isinstance(dim, bool) else x.numel()


def fill_collective(op: str, sent: Tensor, out: Tensor, ranks: int) -> None:
    """Write what a collective gives where every rank has the values of this one."""
    if op == "all_reduce":
        out.mul_(ranks)
    elif op == "all_gather":
        out.copy_(torch.cat([sent] * ranks).view(out.shape))
    elif out.shape == sent.shape:
        out.copy_(sent)
