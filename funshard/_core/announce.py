"""The announcement of a collective before it starts, to the check that `funshard.check` switches on.

`start_op` (ops.py) announces what it starts, and so does each function that starts a collective otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class RankError(RuntimeError):
    """An error that `funshard.check` raises on all ranks: they disagree, one of them has raised, or one is missing."""


Listener = Callable[[str, str | Sequence[int], str, Tensor | None, torch.dtype | None], None]
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Have this function called before each collective, with the arguments of `announce`; None for no function."""
    global _listener
    _listener = listener


def is_checked() -> bool:
    """Return whether the check is on in this process."""
    return _listener is not None


def announce(
    op: str, group: str | Sequence[int], label: str = "", sent: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Announce a collective that this rank is about to start; nothing happens unless the check is on.

    The ``group`` is the name of a process group, or global ranks; ``label`` says what is sent, and ``dtype`` in which dtype, if
    not in that of ``sent``: a tensor of as many elements on all ranks, None if they may differ. Raises RankError, on every
    rank, if another one announces another collective, has raised, or is missing.
    """
    if _listener is not None:
        _listener(op, group, label, sent, dtype)
