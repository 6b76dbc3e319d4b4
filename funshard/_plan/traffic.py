"""What a step sends, by mesh axis and kind of collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .events import Collective, Event
from .hardware import Hardware

__all__ = ["Traffic", "sum_traffic"]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind that a rank takes part in along one mesh axis in a step."""

    axis: str
    op: str
    """"all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"."""
    count: int
    input_bytes: int
    output_bytes: int
    sent_bytes: int
    """The bytes that this rank sends over the axis."""
    seconds: float
    """Their time, hidden behind computation or not."""


def sum_traffic(events: Iterable[Event], hardware: Hardware) -> tuple[Traffic, ...]:
    """Return the sums of a step's collectives."""
    found: dict[tuple[str, str], list[Collective]] = {}
    for event in events:
        if (one := event.collective) is not None:
            found.setdefault((one.axis, one.op), []).append(one)
    return tuple(
        Traffic(
            axis,
            op,
            len(some),
            sum(one.input_bytes for one in some),
            sum(one.output_bytes for one in some),
            sum(one.sent_bytes for one in some),
            sum(map(hardware.collective_seconds, some)),
        )
        for (axis, op), some in found.items()
    )
