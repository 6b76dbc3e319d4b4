"""The sum of the gradients of several modules that backward runs again with one gathered buffer.

The modules of one unit, or several runs of one module, may share a gather of forward. Where they are recomputed, each of their
backwards ends with gradients of its own. They are reduced together, after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .._units.accumulation import GradReceiver

if TYPE_CHECKING:
    from .gathered_unit import GatheredUnit

__all__ = ["RunGradients"]

Grads = Sequence[Tensor | None]


class RunGradients:
    """The sums of gradients, by gathered unit, of the recomputed runs whose backward has ended, within one backward pass.

    A receiver expects a unit's gradient as long as there is such a sum: backward may not come to the unit's last run, because
    the loss does not depend on it.
    """

    def __init__(self, receiver: GradReceiver | None) -> None:
        self._task, self._receiver = -1, receiver
        self._sums: dict[GatheredUnit, tuple[int, Grads]] = {}

    def add(self, gathered: GatheredUnit, grads: Grads, task: int) -> None:
        """Add the gradients of one run in the backward of this number, and reduce their sum after the last one."""
        if self._task != task:
            self._task, self._sums = task, {}
        runs, before = self._sums.get(gathered, (0, [None] * len(grads)))
        total = [g if b is None else b if g is None else b + g for b, g in zip(before, grads, strict=True)]
        if not runs and self._receiver:
            self._receiver.expect(gathered.unit.key)
        self._sums[gathered] = runs + 1, total
        if runs + 1 == gathered.recomputed_runs:
            self._reduce(gathered)

    def reduce_rest(self, task: int) -> None:
        """Reduce the sums of units some of whose runs that backward does not come to."""
        if self._task != task:
            self._sums = {}
        for gathered in list(self._sums):
            self._reduce(gathered)

    def _reduce(self, gathered: GatheredUnit) -> None:
        """Start to reduce a unit's sum: the receiver expects the reduced gradient instead."""
        _, total = self._sums.pop(gathered)
        gathered.reduce_grads(total)
        if self._receiver:
            self._receiver.cancel(gathered.unit.key)
