"""The position of backward among the units that forward resharded, and the gathers ahead of it."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Generator

from .. import _torch
from .gathered_unit import GatheredUnit
from .saved_weights import MAX_UNSHARDED_IN_BACKWARD

__all__ = ["BackwardPrefetch"]


class BackwardPrefetch:
    """The units of a call in the order in which forward resharded them. Backward comes to the last one first."""

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._resharded: list[weakref.ref[GatheredUnit]] = []
        self._position, self._task = 0, -1  # in that list, of the run of backward with this number
        self._outer_task: int | None = None  # the run around the one that runs
        self._awaiting_release: deque[weakref.ref[GatheredUnit]] = deque()

    def append(self, gathered: GatheredUnit) -> None:
        """Add a unit that forward has resharded."""
        gathered.index = len(self._resharded)
        self._resharded.append(weakref.ref(gathered))

    def run_number(self) -> int:
        """Return the number of this run of backward. A run inside it counts as a part of it."""
        return _torch.current_graph_task() if self._outer_task is None else self._outer_task

    @contextlib.contextmanager
    def inner_run(self) -> Generator[None]:
        """Count the runs of backward inside as parts of the running one."""
        outer, self._outer_task = self._outer_task, self.run_number()
        try:
            yield
        finally:
            self._outer_task = outer

    def advance_to(self, gathered: GatheredUnit) -> bool:
        """Gather this unit, and start to gather the next ones of backward. Return False if backward has been here before."""
        task = self.run_number()
        if self._task != task:
            self._task, self._position = task, len(self._resharded)
        if gathered.index >= self._position:  # the same unit, or one around it
            return False
        for passed in self._resharded[gathered.index + 1 : self._position]:
            other = passed()
            if other is not None and not any(map(gathered.unit.is_inside, other.unit.paths)):  # one around it may come after it
                other.chain = None
        self._position = gathered.index
        if not gathered.is_trained:
            self.release_oldest_for(gathered)
        gathered.wait_again()
        ahead = 0
        for i in range(gathered.index - 1, -1, -1):
            if ahead >= self._prefetch:
                break
            if (other := self._resharded[i]()) is not None and other.prefetch_again():
                ahead += 1
        return True

    def release_oldest_for(self, gathered: GatheredUnit) -> None:
        """Free the oldest unit of those that no gradient tells the last use of, to make room for this one."""
        if any(ref() is gathered for ref in self._awaiting_release):
            return
        if len(self._awaiting_release) == MAX_UNSHARDED_IN_BACKWARD and (oldest := self._awaiting_release.popleft()()):
            oldest.release()
        self._awaiting_release.append(weakref.ref(gathered))
