"""Offloading where the device is the host: all that may move does, and is counted."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import funshard as fs
from funshard._transforms import offload as host_buffers
from funshard._transforms.offload import OffloadTarget


class Copies:
    """How many storages, or spans of one, went to the host, how many came back, and how many are alive there."""

    def __init__(self) -> None:
        self.out = self.back = 0
        self.buffers: weakref.WeakSet[host_buffers.HostBuffer] = weakref.WeakSet()  # a thread of gloo's may drop some of them

    @property
    def alive(self) -> int:
        return len(self.buffers)

    def wait_for_none(self) -> bool:
        """Whether none is alive, now or once gloo's threads have let finished collectives go."""
        gc.collect()
        for _ in range(200):
            if not self.buffers:
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def counted() -> Iterator[Copies]:
    """What goes and comes within this."""
    copies, plain = Copies(), host_buffers.HostBuffer

    class Counted(plain):
        def __init__(self, source: Tensor, host: torch.device) -> None:
            super().__init__(source, host)
            copies.out += 1
            copies.buffers.add(self)

        def prefetch(self) -> Tensor:
            copies.back += self._on_device is None
            return super().prefetch()

    host_buffers.HostBuffer = Counted
    try:
        yield copies
    finally:
        host_buffers.HostBuffer = plain


@contextlib.contextmanager
def everywhere(at_least: int = 0) -> Iterator[Copies]:
    """Within this ``P(offload="activations")`` moves tensors of the CPU, to other memory of the CPU."""
    to, host_buffers.DEFAULT_OFFLOAD = host_buffers.DEFAULT_OFFLOAD, OffloadTarget(at_least, host=torch.device("cpu"))
    try:
        with counted() as copies:
            yield copies
    finally:
        host_buffers.DEFAULT_OFFLOAD = to


def moved(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``f`` offloaded from the CPU to the CPU, however little it saves."""
    return fs.offload(f, **{"at_least": 0, "host": "cpu"} | options)


class Told(torch.autograd.Function):
    """The tensor itself; writes into a log when forward and backward come to this block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], block: int) -> Tensor:
        log.append(f"forward {block}")
        ctx.log, ctx.block = log, block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"backward {ctx.block}")
        return g, None, None


class Where(TorchDispatchMode):
    """How much of storages of ``unit`` bytes or more is alive on the device ("meta") and on the host, in units: now, at most.

    Every copy between the two is noted and not made; the ``callers`` tensor is not counted.
    """

    def __init__(self, unit: int, callers: Tensor | None = None) -> None:
        super().__init__()
        self.unit, self.callers = unit, None if callers is None else callers.untyped_storage()._cdata
        self.storages: dict[str, dict[int, tuple[weakref.ref[Any], int]]] = {"meta": {}, "cpu": {}}
        self.peak = {"meta": 0.0, "cpu": 0.0}
        self.copies: list[tuple[str, bool]] = []
        """To which device each goes, and whether the host goes on meanwhile."""

    def now(self, device: str) -> float:
        self.storages[device] = {key: one for key, one in self.storages[device].items() if one[0]() is not None}
        return sum(size for _, size in self.storages[device].values()) / self.unit

    def see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage.nbytes() >= self.unit and storage._cdata != self.callers:
            seen = self.storages[x.device.type]
            if storage._cdata not in seen or seen[storage._cdata][0]() is None:
                seen[storage._cdata] = weakref.ref(storage), storage.nbytes()
        for device in self.peak:
            self.peak[device] = max(self.peak[device], self.now(device))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "copy_" and args[0].device != args[1].device:
            self.copies.append((args[0].device.type, (*args, False)[2] is True or kwargs.get("non_blocking", False)))
            return args[0]
        if name == "all_gather_into_tensor_out":  # of which meta tensors make another result
            return kwargs["out"]
        out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.see(x)
        return out


class Stream:
    """A stream that is a name: what is told to it, and to others to wait for it, in order."""

    device = torch.device("cpu")

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.copies = log, name, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.copies += 1
        self.log.append(f"copy {self.copies} {self.name}")
        return f"copy {self.copies}"

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
