"""The states of a rank over the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..events import Category, Event

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["Moment", "iter_moments"]


class Moment(NamedTuple):
    """The bytes that a rank holds, by category, from the time at which its device reaches an event."""

    time: float
    event: Event
    held: dict[Category, int]


def iter_moments(plan: Plan) -> Iterator[Moment]:
    """Yield a moment for each event; one of another stream gets the time that computation has reached."""
    now = 0.0
    for event, held, (start, end) in zip(plan.events, plan.timeline.held(), plan.timeline.spans, strict=True):
        is_computed = plan.timeline.stream(event) == "compute"
        yield Moment(max(start, now) if is_computed else now, event, dict(held))
        now = end if is_computed else now
