"""The simulation of a step's events: the bytes that are held after each, and when each starts and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from .events import CATEGORIES, Category, Event, Phase
from .hardware import Hardware

__all__ = ["Timeline"]

Held = dict[Category, int]


class Timeline:
    """A step's events on three streams: the device computes, its network sends, and its host link copies.

    Memory follows the order of the program. In time, a collective starts when the one before it has ended and so has the
    computation that was started before it, as NCCL's do; a computation starts when those that it is `Event.after` have ended.
    """

    def __init__(self, events: Sequence[Event], at_rest: Mapping[Category, int], hardware: Hardware) -> None:
        self.events, self.at_rest, self.hardware = events, at_rest, hardware

    def held(self) -> Iterator[Held]:
        """Yield the bytes by category that are held after each event."""
        held: Held = {**dict.fromkeys(CATEGORIES, 0), **self.at_rest}
        for event in self.events:
            for category, size in event.memory.items():
                held[category] += size
            yield held

    @cached_property
    def peaks(self) -> dict[Phase, Held]:
        """The bytes by category at the moment of each phase at which the most are held."""
        peaks: dict[Phase, Held] = {}
        for event, held in zip(self.events, self.held(), strict=True):
            if event.phase not in peaks or sum(held.values()) > sum(peaks[event.phase].values()):
                peaks[event.phase] = dict(held)
        return peaks

    @cached_property
    def peak(self) -> Held:
        """The bytes by category at the moment of the step at which the most are held."""
        return max(self.peaks.values(), key=lambda held: sum(held.values()))

    @cached_property
    def peaks_by_unit(self) -> dict[str, int]:
        """The most bytes that are held while each unit is worked on."""
        peaks: dict[str, int] = {}
        for event, held in zip(self.events, self.held(), strict=True):
            peaks[event.unit] = max(peaks.get(event.unit, 0), sum(held.values()))
        return peaks

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """When each event starts and ends, in seconds from the start of the step."""
        free = {"compute": 0.0, "network": 0.0, "host": 0.0}
        spans: list[tuple[float, float]] = []
        for event in self.events:
            stream = self.stream(event)
            start = max([free[stream], *(spans[i][1] for i in event.after)])
            if stream != "compute":
                start = max(start, free["compute"])
            end = start + self.seconds(event)
            free[stream] = end
            spans.append((start, end))
        return spans

    @staticmethod
    def stream(event: Event) -> str:
        """Return the stream that an event runs on."""
        return "network" if event.collective else "host" if event.kind == "copy" else "compute"

    def seconds(self, event: Event) -> float:
        """Return the time that an event takes by itself."""
        if event.collective:
            return self.hardware.collective_seconds(event.collective)
        rate = self.hardware.host_bandwidth if event.kind == "copy" else self.hardware.memory_bandwidth
        return event.flops / self.hardware.flops + event.moved_bytes / rate

    @cached_property
    def step_seconds(self) -> float:
        """The time of the step."""
        return max((end for _, end in self.spans), default=0.0)

    @cached_property
    def compute_seconds(self) -> float:
        """The time in which the device computes."""
        return sum(self.seconds(event) for event in self.events if self.stream(event) == "compute")

    @property
    def exposed_seconds(self) -> float:
        """The time in which the device waits for collectives and copies."""
        return self.step_seconds - self.compute_seconds
