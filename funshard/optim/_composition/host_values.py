"""Numbers and flags that the host reads, because Python branches on them: the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _torch

__all__ = ["read_count", "read_flag"]


def read_flag(flag: Tensor) -> bool | None:
    """Return a flag's value, True for a fake tensor; None while a compiler records, or if simulated ranks differ.

    `plan` runs a step with fake tensors, which have no values.
    """
    if torch.compiler.is_compiling() or _torch.is_traced():
        return None
    values = _torch.unwrap(flag)
    if _torch.is_fake(values):
        return True
    found = set[bool](values.reshape(-1).tolist())
    return found.pop() if len(found) == 1 else None


def read_count(count: Tensor, who: str, *, planned: int = 0) -> int:
    """Return a count of steps, ``planned`` for a fake tensor; raise ValueError if it has no value or ranks differ.

    A count has no value where operators are recorded. Simulated ranks share one.
    """
    values = _torch.unwrap(count).reshape(-1)
    if _torch.is_traced():
        raise ValueError(
            f"{who}: the count of steps in its state has no value where operators are recorded: record the gradients, and run "
            "this update outside"
        )
    if _torch.is_fake(values):
        return planned
    numbers = set[int](values.tolist())
    if len(numbers) != 1:
        raise ValueError(f"{who}: expected a state with the same count of steps on all ranks, got {sorted(numbers)}")
    return numbers.pop()
