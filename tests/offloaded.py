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
