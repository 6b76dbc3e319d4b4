"""The check that all ranks start the same collectives: a call records its own, and ranks compare their records.

Ranks compare the gathers of forward, and which of them were used, when forward ends, and look at the result when backward
begins. The end of backward compares the rest. Slices that carry tags (collectives/_tag.py) are also compared by each gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from .. import _torch
from ..collectives._sequence import CollectiveSequence, SequenceCheck
from .chain import RouteTable

__all__ = ["OrderCheck"]


class OrderCheck:
    """The comparison of the collectives of one call and of its backward."""

    def __init__(self, routes: RouteTable, shards: Mapping[str, Tensor]) -> None:
        self._routes = routes
        is_real = not _torch.is_traced() and not any(map(_torch.is_fake, shards.values()))
        self._sequence = CollectiveSequence() if routes.needs_order_check and is_real else None
        self._pending: list[SequenceCheck] = []  # of forward
        self._is_forward = True
        self.has_backward = False  # whether a backward will end in the call's shards

    def record_gather(self, key: str, *, of_kept: bool = False) -> None:
        """Record that the gather of this unit was started, ``of_kept`` slices or of shards."""
        if self._sequence is None:
            return
        steps = self._routes.steps[key]
        self._sequence.record(steps.gather_kept_groups if of_kept else steps.gather_groups, f"the gather of unit '{key}'")
        if not (self._is_forward or self.has_backward):  # no end of backward will be seen
            self._finish(self._start())

    def record_unused(self, key: str) -> None:
        """Record that forward ends without the use of this unit, which was gathered ahead."""
        if self._sequence is not None:
            self._sequence.record(self._routes.steps[key].gather_groups, f"the end of forward without unit '{key}',")

    def record_reduction(self, key: str) -> None:
        """Record that the reduction of this unit is about to start."""
        self.finish_forward()
        if self._sequence is not None:
            self._sequence.record(self._routes.steps[key].reduce_groups, f"the reduction of unit '{key}'")

    def check_forward(self, *, has_run: bool) -> None:
        """Compare what forward has gathered and used.

        Args:
            has_run: Whether any unit was used. Then a backward looks at the result; without one it is waited for here.
        """
        self._is_forward = False
        self._pending = self._start(self._routes.gather_groups)
        if not (self.has_backward and has_run):
            self.finish_forward()

    def finish_forward(self) -> None:
        """Raise RuntimeError where ranks have gathered different units in forward."""
        if self._pending:
            self._finish(self._pending)

    def check_backward(self) -> None:
        """Compare everything that was started, at the end of backward."""
        self._finish(self._pending + self._start())

    def _start(self, groups: Iterable[str] = ()) -> list[SequenceCheck]:
        """Start to compare the order of collectives; return the running comparisons."""
        if self._sequence is None:
            return []
        error = "ranks ran different units: what this call computed is wrong"
        with _torch.below_transforms(), _torch.below_autograd():
            return self._sequence.start_checks(error, groups)

    def _finish(self, checks: list[SequenceCheck]) -> None:
        """Wait for comparisons, and raise the error of one that differs."""
        with _torch.below_transforms(), _torch.below_autograd():
            while checks:
                checks.pop().finish()
