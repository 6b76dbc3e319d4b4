"""A gathered weight that autograd saves, had again in backward: what is kept in its place, and what it takes.

    SavedView  --holds-->  Lease  --holds-->  Visit  --knows-->  Lease

Once nobody is to ask for a view any more the lease goes, and with it the buffer, if one is there.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .. import _torch

__all__ = ["ALIVE", "Lease", "SavedView", "check_unmodified"]

ALIVE = 2
"""How many units stay gathered in backward where no gradient tells when they have been used: frozen ones, those that
the backward of a backward reads before it comes back to them, and all that stacks of transforms read."""


def check_unmodified(key: str, shard: Tensor, version: int) -> None:
    """RuntimeError, naming the unit, unless its shard is at the version at which it was gathered."""
    if (now := _torch.version(shard)) != version:
        raise RuntimeError(
            f"the shard of unit '{key}' was modified in place between forward and backward: "
            f"expected version {version}, got {now}; update after backward"
        )


class Asked(Protocol):
    """Whose buffer it is, and what is asked for a view of it."""

    def view(self, saved: SavedView) -> Tensor:
        """The view; the buffer is gathered again if need be."""
        ...


class Lease:
    """A gathered buffer in backward."""

    __slots__ = ("__weakref__", "buffer", "of")

    def __init__(self, of: Asked) -> None:
        self.of = of
        self.buffer: Tensor | None = None


class SavedView:
    """How to have this view of a leased buffer again, that is saved in forward or in a backward that records itself.

    One object and not a closure: there is one for each weight of each unit, and the garbage collector goes through all.
    """

    __slots__ = ("by_backward", "lease", "offset", "shape", "stride")

    def __init__(self, lease: Lease, tensor: Tensor, by_backward: bool) -> None:
        self.lease, self.by_backward = lease, by_backward
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def __call__(self) -> Tensor:
        return self.lease.of.view(self)
