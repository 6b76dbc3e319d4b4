"""Asynchronous copies between a device and the host."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from .levels import is_wrapped
from .tracing import is_fake, is_traced

__all__ = ["AsyncCopy", "allocate_like", "is_accelerator", "is_pinned", "synchronize_copies"]


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has its own memory for values: neither the CPU nor the meta device."""
    return device.type not in ("cpu", "meta")


def allocate_like(
    like: Tensor, device: torch.device, *, dtype: torch.dtype | None = None, beside: torch.device | None = None
) -> Tensor:
    """Return uninitialized memory of a tensor's shape, and by default its dtype, on the device.

    Host memory is pinned if the tensor's device, or the one ``beside``, is an accelerator.
    """
    pinned = device.type == "cpu" and is_accelerator(beside or like.device) and not is_fake(like)
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=device, pin_memory=pinned)


class AsyncCopy:
    """A running copy from the host to a device or back, in a stream of its own.

    It starts after the work that is queued on the device. Both tensors are allocated, used and freed in the computing stream,
    which waits for the copy before that: by `wait`, or at the latest when this object is freed. So no record_stream is needed,
    which frees memory only when the host next looks, and a step's memory is the same each time. The host never waits.
    """

    __slots__ = ("_computes", "_done", "_stream")

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._done: torch.Event | None = None
        self._stream: torch.Stream | None = None
        device = target.device if is_accelerator(target.device) else source.device
        if not is_accelerator(device) or is_fake(source):
            target.copy_(source, non_blocking=True)
            return
        self._computes = torch.accelerator.current_stream(device)
        self._stream = _copy_stream(device, device == target.device)
        self._stream.wait_stream(self._computes)
        with self._stream:
            target.copy_(source, non_blocking=True)
        self._done = self._stream.record_event()

    def queue_behind(self) -> contextlib.AbstractContextManager[object]:
        """Return a context whose work is queued behind the copy, not behind what the device computes."""
        return contextlib.nullcontext() if self._stream is None else self._stream

    def wait(self) -> None:
        """Make the device's later computations wait for the copy."""
        if self._done is None:
            return
        self._computes.wait_event(self._done)
        now = torch.accelerator.current_stream(self._computes.device)
        if now != self._computes:
            now.wait_event(self._done)
        self._done = None

    def __del__(self) -> None:
        if self._done is not None:
            self._computes.wait_event(self._done)


def synchronize_copies(device: torch.device | None = None) -> None:
    """Block the host until copies from this device to the host are complete; without a device, all copies both ways."""
    if device is None:
        for stream in _STREAMS:
            stream.synchronize()
    elif is_accelerator(device):
        _copy_stream(device, False).synchronize()


_STREAMS: list[torch.Stream] = []


@functools.cache
def _copy_stream(device: torch.device, towards: bool) -> torch.Stream:
    """Return the stream of a device for copies in one direction, made at the first call."""
    _STREAMS.append(torch.Stream(device=device))
    return _STREAMS[-1]


def is_pinned(tensor: Tensor) -> bool:
    """Return whether the tensor is in pinned host memory; False in a transform and while operators are recorded."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not (is_wrapped(tensor) or is_fake(tensor) or is_traced()) and tensor.is_pinned()
