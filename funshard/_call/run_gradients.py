"""The sum of the gradients of several modules that backward runs again with one gathered buffer.

The modules of one unit, or several runs of one module, may share a gather of forward. Where they are recomputed, each of their
backwards ends with gradients of its own. They are reduced together, after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .gathered_unit import GatheredUnit

__all__ = ["RunGradients"]

Grads = Sequence[Tensor | None]


class RunGradients:
    """The sums of gradients, by gathered unit, of the recomputed runs whose backward has ended, within one backward pass."""

    def __init__(self) -> None:
        self._task = -1
        self._sums: dict[GatheredUnit, tuple[int, Grads]] = {}

    def add(self, gathered: GatheredUnit, grads: Grads, task: int) -> Grads | None:
        """Add the gradients of one run in the backward of this number. Return their sum after the last one, else None."""
        if self._task != task:
            self._task, self._sums = task, {}
        runs, before = self._sums.pop(gathered, (0, [None] * len(grads)))
        total = [g if b is None else b if g is None else b + g for b, g in zip(before, grads, strict=True)]
        if runs + 1 == gathered.recomputed_runs:
            return total
        self._sums[gathered] = runs + 1, total
        return None

    def take_rest(self, task: int) -> list[tuple[GatheredUnit, Grads]]:
        """Return the sums of units some of whose runs that backward does not come to, and forget them."""
        sums, self._sums = self._sums, {}
        return [(gathered, total) for gathered, (_, total) in sums.items()] if self._task == task else []
