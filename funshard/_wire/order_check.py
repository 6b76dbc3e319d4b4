"""The check that all ranks start the same collectives: a call records the names of its own, and ranks compare them.

A process group pairs the n-th collective of one rank with the n-th of every other. Ranks that gather other units of one size,
or the same units in another order, get each other's slices, without an error from any backend. So ranks compare names when
forward ends, and again before gradients leave the call: a wrong number does not leave it. Where ranks start other numbers of
collectives, the process group itself times out, and `funshard.check`, which compares each one, says which rank differs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from torch import Tensor

from .. import _torch
from ..collectives._sequence import Comparison, finish_earlier_checks, get_host_group, make_order_error
from .chain import RouteTable

__all__ = ["OrderCheck"]

_make_error = functools.partial(make_order_error, error="ranks ran different units: what this call computed is wrong")


class OrderCheck:
    """The comparison of the collectives of one call and of its backward."""

    def __init__(self, routes: RouteTable, shards: Mapping[str, Tensor]) -> None:
        self._routes = routes
        self._is_on = routes.needs_order_check and not _torch.is_traced() and not any(map(_torch.is_fake, shards.values()))
        self._started: dict[str, list[str]] = {}  # names by process group, since ranks last compared them
        self._pending: list[Comparison] = []  # at most one for each process group
        self._is_forward = True
        self.has_backward = False  # whether a backward will end in the call's shards
        if self._is_on:
            finish_earlier_checks()

    def record_gather(self, key: str, *, of_kept: bool = False) -> None:
        """Record that the gather of this unit was started, ``of_kept`` slices or of shards."""
        if not self._is_on:
            return
        steps = self._routes.steps[key]
        self._record(steps.gather_kept_groups if of_kept else steps.gather_groups, f"the gather of unit '{key}'")
        if not (self._is_forward or self.has_backward):  # no end of backward will be seen
            self._start()

    def record_reduction(self, key: str) -> None:
        """Record that the reduction of this unit is about to start."""
        if not self._is_on:
            return
        steps = self._routes.steps[key]
        self._record(steps.reduce_groups, f"the reduction of unit '{key}'{steps.encoding}")

    def check_forward(self, unused: Iterable[str]) -> None:
        """Compare what forward has gathered and used, at its end. The ``unused`` units were gathered ahead."""
        for key in unused:
            self._record(self._routes.steps[key].gather_groups, f"the end of forward without unit '{key}'")
        self._record(self._routes.gather_groups, "the end of forward")
        self._is_forward = False
        self._start()
        self.finish()

    def check_backward(self) -> None:
        """Compare what was started since, at the end of backward."""
        self._record(self._routes.groups, "the end of backward")
        self._start()
        self.finish()

    def finish(self) -> None:
        """Wait for the other ranks' names.

        Raises:
            RuntimeError: On every rank, if they differ.
        """
        if self._pending:
            checks, self._pending = self._pending, []
            for check in checks:
                check.finish()

    def _record(self, groups: Iterable[str], name: str) -> None:
        """Record that a collective of this name is started on these process groups."""
        if self._is_on:
            for group in groups:
                self._started.setdefault(group, []).append(name)

    def _start(self) -> None:
        """Start to compare what was recorded, once ranks have compared what was recorded before."""
        self.finish()
        started, self._started = self._started, {}
        self._pending = [Comparison(names, [get_host_group(group)], _make_error) for group, names in started.items()]
