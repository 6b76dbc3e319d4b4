"""The events of a step, and their costs on some hardware: the bytes that are held, the times, and what is sent."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from .._spec.byte_size import parse_bytes

# --- The events of a step: what each one holds, sends and computes ---

Category = Literal["parameters", "optimizer", "gathered", "gradients", "activations"]
Phase = Literal["forward", "backward", "update"]
EventKind = Literal["gather", "compute", "reduce", "exchange", "copy", "wait", "memory", "update"]
"""The action of an event. An exchange is a collective of the model's own; "memory" only allocates or frees."""

CATEGORIES: tuple[Category, ...] = ("parameters", "optimizer", "gathered", "gradients", "activations")


class Collective(NamedTuple):
    """One collective of a rank along one mesh axis."""

    op: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"
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
    memory: Mapping[Category, int]  # the bytes that it allocates, or frees where negative
    collective: Collective | None = None
    flops: int = 0
    moved_bytes: int = 0  # that it reads and writes: in device memory for an update, between host and device for a copy
    after: tuple[int, ...] = ()  # the indices of the collectives and copies that must end before it starts


# --- Hardware: the rates that turn bytes and FLOPs into seconds ---


@dataclass(frozen=True)
class Hardware:
    """The rates of one device and of its links, from which a plan computes times.

    The defaults are round figures for an H100 of 80 GB and a network of 400 Gbit/s for each device. Give measured ones for
    times to trust: the FLOP rate that a large matrix product reaches, and the bandwidth of a large all-gather on each axis.

    Args:
        memory: Bytes of device memory, such as ``"80GB"``.
        flops: Floating point operations per second.
        bandwidth: Bytes per second that a rank sends over each mesh axis, or one number for all axes.
        latency: Seconds that a collective takes beside its bytes.
        memory_bandwidth: Bytes per second of device memory, for the update.
        host_bandwidth: Bytes per second between host and device, for ``P(offload=...)``.

    Raises:
        ValueError: For a rate that is not positive.

    Example:
        >>> import funshard as fs
        >>> fs.Hardware(memory="24GB", bandwidth={"replicate": 12e9, "shard": 150e9}).memory
        24000000000
    """

    memory: int | str = "80GB"
    flops: float = 400e12
    bandwidth: float | Mapping[str, float] = field(default=50e9, hash=False)
    latency: float = 20e-6
    memory_bandwidth: float = 2e12
    host_bandwidth: float = 25e9

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", parse_bytes(self.memory))
        by_axis = self.bandwidth if isinstance(self.bandwidth, Mapping) else {"all": self.bandwidth}
        rates = {f"bandwidth of axis '{axis}'": rate for axis, rate in by_axis.items()}
        rates |= {name: getattr(self, name) for name in ("memory", "flops", "memory_bandwidth", "host_bandwidth")}
        for name, rate in rates.items():
            if not rate > 0:
                raise ValueError(f"Hardware: {name}: expected a positive number, got {rate!r}")
        if not self.latency >= 0:
            raise ValueError(f"Hardware: latency: expected at least 0 seconds, got {self.latency!r}")

    @property
    def memory_bytes(self) -> int:
        """The bytes of device memory."""
        return parse_bytes(self.memory)

    def collective_seconds(self, collective: Collective) -> float:
        """Return the time of one collective; ValueError where its axis has no bandwidth.

        Args:
            collective: One of ``Plan.events``.
        """
        rate = self.bandwidth.get(collective.axis) if isinstance(self.bandwidth, Mapping) else self.bandwidth
        if rate is None:
            raise ValueError(f"Hardware: no bandwidth for axis '{collective.axis}': expected one of {dict(self.bandwidth)}")  # pyright: ignore
        return self.latency + collective.sent_bytes / rate


# --- The simulation of a step's events: the bytes that are held after each, and when each starts and ends ---

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
    def spans(self) -> list[tuple[float, float]]:
        """When each event starts and ends, in seconds from the start of the step."""
        free = {"compute": 0.0, "network": 0.0, "host": 0.0}
        spans: list[tuple[float, float]] = []
        for event in self.events:
            stream = self.stream(event)
            start = max([free[stream], free["compute"] if stream != "compute" else 0.0, *(spans[i][1] for i in event.after)])
            free[stream] = start + self.seconds(event)
            spans.append((start, free[stream]))
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

    @property
    def exposed_seconds(self) -> float:
        """The time in which the device waits for collectives and copies."""
        return self.step_seconds - sum(self.seconds(event) for event in self.events if self.stream(event) == "compute")


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind that a rank takes part in along one mesh axis in a step."""

    axis: str
    op: str
    count: int
    input_bytes: int
    output_bytes: int
    sent_bytes: int  # by this rank over the axis
    seconds: float  # hidden behind computation or not


def sum_traffic(events: Iterable[Event], hardware: Hardware) -> tuple[Traffic, ...]:
    """Return the sums of a step's collectives."""
    found: dict[tuple[str, str], Traffic] = {}
    for one in (event.collective for event in events if event.collective):
        total = found.get((one.axis, one.op)) or Traffic(one.axis, one.op, 0, 0, 0, 0, 0.0)
        costs = 1, one.input_bytes, one.output_bytes, one.sent_bytes, hardware.collective_seconds(one)
        found[one.axis, one.op] = Traffic(one.axis, one.op, *map(operator.add, dataclasses.astuple(total)[2:], costs))
    return tuple(found.values())


# --- Bytes and times as a plan writes them ---


def format_bytes(size: float, *, digits: int | None = None) -> str:
    """Format a number of bytes with a decimal unit, and two digits after the point or so many in all: "1.23 GB"."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{_round(size, digits)} {units[0]}"


def format_seconds(seconds: float, *, digits: int | None = None) -> str:
    """Format a time as `format_bytes`: "12.3 ms"."""
    is_short = digits is not None and 0 < seconds < 1e-3
    unit, size = ("µs", 1e-6) if is_short else ("s", 1.0) if seconds >= 1 or (digits and not seconds) else ("ms", 1e-3)
    return f"{_round(seconds / size, digits)} {unit}"


def _round(number: float, digits: int | None) -> str:
    return f"{number:.2f}" if digits is None else f"{float(f'{number:.{digits}g}'):g}"
