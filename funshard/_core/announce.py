"""The announcement of a collective before it starts, to the check that `funshard.check` switches on.

`start_op` (ops.py) announces what it starts, and so does each function that starts a collective otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["RankError", "announce", "is_checked", "listen"]


class RankError(RuntimeError):
    """An error that `funshard.check` raises on all ranks: they disagree, one of them has raised, or one is missing."""


class Listener(Protocol):
    """A function that is called before a collective starts."""

    def __call__(self, op: str, group: str | Sequence[int], label: str, sent: Tensor | None, dtype: torch.dtype | None) -> None:
        """Compare with the other ranks. The arguments are those of `announce`."""
        ...


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Have this function called before each collective; None for no function."""
    global _listener
    _listener = listener


def is_checked() -> bool:
    """Return whether the check is on in this process."""
    return _listener is not None


def announce(
    op: str, group: str | Sequence[int], label: str = "", sent: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Announce a collective that this rank is about to start; nothing happens unless the check is on.

    Args:
        op: Its name in `OPS`, or such as "permute".
        group: The name of its process group, or the global ranks.
        label: What is sent, such as "unit 'blocks.0'".
        sent: A tensor of the dtype and the number of elements that all ranks have in common; None if they may differ.
        dtype: The dtype in which it is sent, if that is another one.

    Raises:
        RankError: On every rank, if another rank announces another collective, has raised, or is missing.
    """
    if _listener is not None:
        _listener(op, group, label, sent, dtype)
