"""The views that autograd keeps instead of gathered weights, so that buffers can be freed between forward and backward.

    SavedView  --holds-->  BufferLease  --holds-->  GatheredUnit  --knows-->  BufferLease

When no saved view is left, the lease is freed, and with it the buffer of backward.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .. import _torch
from .._units.mixed_layout import view_whole_elements

__all__ = ["MAX_UNSHARDED_IN_BACKWARD", "BufferLease", "SavedView", "check_unmodified"]

MAX_UNSHARDED_IN_BACKWARD = 2
"""The number of units that stay gathered in backward where no gradient tells their last use: frozen units, units that the
backward of a backward reads before it comes back to them, and all units that stacks of transforms read."""


def check_unmodified(key: str, shard: Tensor, version: int) -> None:
    """Raise RuntimeError, naming the unit, unless its shard has the version at which it was gathered."""
    if (now := _torch.version(shard)) != version:
        raise RuntimeError(
            f"the shard of unit '{key}' was modified in place between forward and backward: "
            f"expected version {version}, got {now}; update after backward"
        )


class ViewRestorer(Protocol):
    """The unit that a lease belongs to."""

    def restore_view(self, saved: SavedView) -> Tensor:
        """Return the saved view; gather the buffer again if it was freed."""
        ...


class BufferLease:
    """A gathered buffer in backward; None while nobody has asked for it."""

    __slots__ = ("__weakref__", "buffer", "kept", "unit")

    def __init__(self, unit: ViewRestorer) -> None:
        self.unit = unit
        self.buffer: Tensor | None = None
        self.kept: Tensor | None = None  # the slice of forward's buffer that it is gathered from, if not the shard


class SavedView:
    """The shape, stride and offset in it of a view of a leased buffer, saved in forward or in a backward that records itself.

    An object, not a closure: there is one for each weight of each unit, and the garbage collector visits all of them.
    """

    __slots__ = ("by_backward", "dtype", "lease", "offset", "shape", "stride")

    def __init__(self, lease: BufferLease, tensor: Tensor, buffer: Tensor, by_backward: bool) -> None:
        self.lease, self.by_backward = lease, by_backward
        self.dtype = tensor.dtype  # not the buffer's, where that is bytes
        self.shape, self.stride = tensor.shape, tensor.stride()
        # a buffer of another gather may have margins, and begin elsewhere in its storage
        typed = buffer if buffer.dtype is tensor.dtype else view_whole_elements(buffer, tensor.dtype)
        self.offset = tensor.storage_offset() - typed.storage_offset()

    def __call__(self) -> Tensor:
        return self.lease.unit.restore_view(self)
