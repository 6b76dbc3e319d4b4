"""Hardware: the rates that turn bytes and FLOPs into seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .._spec.byte_size import parse_bytes
from .events import Collective

__all__ = ["Hardware"]


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
        rates |= {"memory": self.memory_bytes, "flops": self.flops, "memory_bandwidth": self.memory_bandwidth}
        for name, rate in {**rates, "host_bandwidth": self.host_bandwidth}.items():
            if not rate > 0:
                raise ValueError(f"Hardware: {name}: expected a positive number, got {rate!r}")
        if self.latency < 0:
            raise ValueError(f"Hardware: latency: expected at least 0 seconds, got {self.latency!r}")

    @property
    def memory_bytes(self) -> int:
        """The bytes of device memory."""
        return parse_bytes(self.memory)

    def collective_seconds(self, collective: Collective) -> float:
        """Return the time of one collective.

        Args:
            collective: One of ``Plan.events``.

        Raises:
            ValueError: Where its axis has no bandwidth.
        """
        rate = self.bandwidth.get(collective.axis) if isinstance(self.bandwidth, Mapping) else self.bandwidth
        if rate is None:
            raise ValueError(f"Hardware: no bandwidth for axis '{collective.axis}': expected one of {dict(self.bandwidth)}")  # pyright: ignore
        return self.latency + collective.sent_bytes / rate
