"""The events of a step, the hardware that they run on, and the bytes at rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.unit import P, Unit
from .._sharding.full import parse_bytes
from .._wire.host import is_host_resident
from ..optim import from_torch
from ..optim._checks import is_pair

# --- The events of a step: what each one holds, sends and computes ---

Category = Literal["parameters", "optimizer", "gathered", "gradients", "activations"]
Phase = Literal["forward", "backward", "update"]
EventKind = Literal["gather", "compute", "reduce", "exchange", "copy", "wait", "memory", "update"]
"""The action of an event. An exchange is a collective of the model's own; "memory" only allocates or frees."""

CATEGORIES: tuple[Category, ...] = ("parameters", "optimizer", "gathered", "gradients", "activations")
Held = dict[Category, int]


@dataclass(frozen=True)
class Traffic:
    """What a rank sends along one mesh axis by collectives of one kind: by that of an event, or by all of a step."""

    axis: str
    op: str  # "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"
    count: int
    input_bytes: int
    output_bytes: int
    sent_bytes: int  # by this rank over the axis, by a ring, which receives as many
    seconds: float = 0.0  # of the step's, hidden behind computation or not

    def __add__(self, other: Traffic) -> Traffic:
        sums: Any = (a + b for a, b in zip(astuple(self)[2:], astuple(other)[2:], strict=True))
        return Traffic(self.axis, self.op, *sums)


class Event(NamedTuple):
    """One event of a step, in the order in which the program starts them."""

    kind: EventKind
    phase: Phase
    unit: str
    memory: Mapping[Category, int]  # the bytes that it allocates, or frees where negative
    collective: Traffic | None = None
    flops: int = 0
    moved_bytes: int = 0  # that it reads and writes: in device memory for an update, between host and device for a copy
    after: tuple[int, ...] = ()  # the indices of the collectives and copies that must end before it starts

    @property
    def stream(self) -> str:
        """The stream that it runs on."""
        return "network" if self.collective else "host" if self.kind == "copy" else "compute"


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

    def seconds(self, event: Event) -> float:
        """Return the time that an event takes by itself; ValueError where the axis of its collective has no bandwidth.

        Args:
            event: One of ``Plan.events``.
        """
        if sent := event.collective:
            rate = self.bandwidth.get(sent.axis) if isinstance(self.bandwidth, Mapping) else self.bandwidth
            if rate is None:
                raise ValueError(f"Hardware: no bandwidth for axis '{sent.axis}': expected one of {dict(self.bandwidth)}")  # pyright: ignore
            return self.latency + sent.sent_bytes / rate
        rate = self.host_bandwidth if event.kind == "copy" else self.memory_bandwidth
        return event.flops / self.flops + event.moved_bytes / rate


# --- What a rank holds between steps ---

Init = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]
"""The function of an optimizer that returns its state before the first step."""


class UnitBytes(NamedTuple):
    """One unit at rest on one rank."""

    numel: int  # of its parameters, on all ranks together
    padding: int  # elements of its buffer that are no parameter's
    parameters: int  # bytes of this rank's slice as it is stored
    optimizer: int  # bytes of its optimizer state
    on_host: bool


def is_on_host(unit: Unit, spec: PartitionSpec) -> bool:
    """Return whether a unit lives in host memory and is used elsewhere: on any mesh but one of the CPU."""
    return is_host_resident(unit) and spec.bound_mesh.device_type != "cpu"


def resolve_optimizer(optimizer: object) -> tuple[Init | None, Any]:
    """Return ``(init, update)`` of an optimizer that is given by name, by class, or as that pair; Nones for None."""
    classes = {key.lower(): cls for key, cls in vars(torch.optim).items() if inspect.isclass(cls)}
    found = classes.get(optimizer.lower()) if isinstance(optimizer, str) else optimizer
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return cast("Any", from_torch(found, donate=True))
    if optimizer is None:
        return None, None
    if is_pair(found):
        return cast("Any", found)
    error = ValueError if isinstance(optimizer, str) else TypeError
    raise error(
        "optimizer: expected a name such as 'adamw', the name of a class of torch.optim, such a class, (init, update) as "
        f"fs.optim makes them, or None, got {optimizer!r}"
    )


def map_p(spec: PartitionSpec, change: Callable[[P], P]) -> PartitionSpec:
    """Return a spec with another `P` for each of its units."""
    units = tuple(replace(unit, p=change(unit.p)) for unit in spec.units)
    selected = tuple((path, change(p)) for path, p in spec.selected)
    return replace(spec, selected=selected, root=change(spec.root), units=units)


def make_shard(spec: PartitionSpec, unit: Unit, device: torch.device | None = None) -> Tensor:
    """Return an empty shard of a unit."""
    length, dtype = spec.stored(unit)
    return torch.empty(length, dtype=dtype, device=device)


def unit_bytes(spec: PartitionSpec, init: Init | None) -> dict[str, UnitBytes]:
    """Return what one rank holds of each unit between steps, from shapes alone: ``init`` runs on fake tensors."""
    with _torch.fake_mode():
        shards = {unit.key: make_shard(spec, unit) for unit in spec if not unit.at_rest}
        shards = {key: shard.requires_grad_(spec.by_key[key].requires_grad) for key, shard in shards.items()}
        states = init(shards) if init else {}
    optimizer = dict.fromkeys(spec.by_key, 0)
    for path, x in pytree.tree_flatten_with_path(states)[0]:
        key = next((part.key for part in path if isinstance(part, pytree.MappingKey) and part.key in optimizer), None)
        if key is not None and isinstance(x, Tensor) and x.dim() and spec.by_key[key].requires_grad:
            optimizer[key] += x.nbytes
    found: dict[str, UnitBytes] = {}
    for unit in spec:
        length, dtype = spec.stored(unit)
        sizes = unit.numel, spec.padded_numel(unit) - unit.numel, length * dtype.itemsize, optimizer[unit.key]
        found[unit.key] = UnitBytes(*sizes, is_on_host(unit, spec))
    return found


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
