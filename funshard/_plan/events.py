"""The events of a training step: what each one holds, sends and computes. Memory, time and pictures are read from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["CATEGORIES", "PHASES", "Category", "Collective", "Event", "EventKind", "EventList", "MemoryChange", "Phase"]

Category = Literal["parameters", "optimizer", "gathered", "gradients", "activations"]
"""The use of a tensor's memory."""

Phase = Literal["forward", "backward", "update"]
"""The part of a step."""

EventKind = Literal["gather", "compute", "recompute", "reduce", "exchange", "copy", "wait", "memory", "update"]
"""The action of an event. An exchange is a collective of the model's own; "memory" only allocates or frees."""

CATEGORIES: tuple[Category, ...] = ("parameters", "optimizer", "gathered", "gradients", "activations")
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


class Collective(NamedTuple):
    """One collective of a rank along one mesh axis."""

    op: str
    """"all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"."""
    axis: str
    ranks: int
    input_bytes: int
    output_bytes: int

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sends, and receives, by a ring: an all-reduce does so twice."""
        whole = max(self.input_bytes, self.output_bytes)
        return whole * (self.ranks - 1) // self.ranks * (2 if self.op == "all_reduce" else 1)


class Event(NamedTuple):
    """One event of a step, in the order in which the program starts them."""

    kind: EventKind
    phase: Phase
    unit: str
    memory: Mapping[Category, int]
    """The bytes that it allocates, or frees where negative, by category."""
    collective: Collective | None = None
    flops: int = 0
    moved_bytes: int = 0
    """The bytes that it reads and writes: of device memory for an update, between host and device for a copy."""
    after: tuple[int, ...] = ()
    """The indices of the collectives and copies that must end before it starts."""


MemoryChange = Mapping[Category, int]
"""By category, the bytes that an event allocates, or frees where negative."""


class EventList:
    """The events of a step, in the order in which the program starts them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.phase: Phase = "forward"

    def add(
        self,
        kind: EventKind,
        unit: str,
        memory: MemoryChange | None = None,
        *,
        collective: Collective | None = None,
        flops: int = 0,
        moved_bytes: int = 0,
        after: tuple[int, ...] = (),
    ) -> int:
        """Add an event and return its index."""
        self.events.append(Event(kind, self.phase, unit, memory or {}, collective, flops, moved_bytes, after))
        return len(self.events) - 1
