"""Hardware: the rates that turn bytes and FLOPs into seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .events import Collective

__all__ = ["Hardware", "parse_bytes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(size: float | str) -> int:
    """Return a number of bytes from "80GB", "512MiB" or a number.

    Raises:
        ValueError: For anything else.
    """
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B?\s*", size.upper())
    if match is None:
        raise ValueError(f"memory: expected a number of bytes such as '80GB' or '512MiB', got {size!r}")
    return int(float(match[1]) * _UNITS[match[2]])


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
