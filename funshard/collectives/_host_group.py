"""Process groups between hosts that torch.distributed's registry does not list.

``torch.distributed.new_group(use_local_synchronization=True)`` derives the name of a group from the number of groups that
this process has. Ranks that have made different numbers of groups then wait for each other for ever, and each group so made
changes the names of the user's next ones. A `HostGroup` is a plain gloo process group: its name depends on its ranks alone.
"""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.announce import announce


class HostGroup:
    """A gloo process group of these global ranks, which connects when it is made.

    The ``name``, equal on all of them, distinguishes groups of the same ranks. `funshard.check` compares what is announced: not
    the operations of a thread in the background.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta, *, is_announced: bool = True) -> None:
        digest = hashlib.blake2b(repr([*ranks]).encode(), digest_size=16).hexdigest()
        self.ranks = tuple(ranks)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._name, self._is_announced = name, is_announced
        self._announce("connection")
        self._group = _torch.make_unregistered_gloo(f"funshard/{name}/{digest}/", self.rank, self.size, timeout)

    def all_reduce_max(self, x: Tensor, label: str = "") -> dist.Work:
        """Start to replace a tensor by the largest values of all ranks. The label says for what, to `funshard.check`."""
        self._announce("all-reduce", label)
        options: Any = dist.AllreduceOptions()  # its stub does not say that the attribute takes ReduceOp.MAX
        options.reduceOp = dist.ReduceOp.MAX
        return self._group.allreduce([x], options)

    def all_gather_object(self, value: object) -> list[Any]:
        """Return every rank's value, by rank."""
        self._announce("all-gather")
        own, lengths = self._serialize(value)
        received, rows = _receive_buffers(lengths)
        self._group.allgather([rows], [own]).wait()
        return [*map(pickle.loads, received)]

    def gather_object(self, value: object) -> list[Any]:
        """Return every rank's value on the first rank, an empty list on the others."""
        self._announce("gather")
        own, lengths = self._serialize(value)
        options = dist.GatherOptions()
        options.rootRank = 0
        received, rows = _receive_buffers(lengths if self.rank == 0 else [])
        self._group.gather([rows] if rows else [], [own], options).wait()
        return [*map(pickle.loads, received)]

    def broadcast_object(self, value: object) -> Any:
        """Return the first rank's value on every rank."""
        self._announce("broadcast")
        buffer = bytearray(pickle.dumps(value)) if self.rank == 0 else bytearray()
        length = int(self._broadcast(torch.tensor(len(buffer))))
        buffer = buffer or bytearray(length)
        self._broadcast(torch.frombuffer(buffer, dtype=torch.uint8))
        return pickle.loads(buffer)

    def _announce(self, op: str, label: str = "") -> None:
        if self._is_announced:
            announce(op, self.ranks, f"between hosts, {label or f'for {self._name}'}")

    def _broadcast(self, x: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([x], options).wait()
        return x

    def _serialize(self, value: object) -> tuple[Tensor, list[int]]:
        """Return the value as bytes, padded to the longest of all ranks, and every rank's length."""
        raw = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.long) for _ in self.ranks]
        self._group.allgather([lengths], [torch.tensor([len(raw)])]).wait()
        sizes = [int(length) for length in lengths]
        return torch.nn.functional.pad(raw, (0, max(sizes) - len(raw))), sizes


def _receive_buffers(lengths: Sequence[int]) -> tuple[list[bytearray], list[Tensor]]:
    """Return a buffer for each pickle, and tensors of equal length that share their memory; pickle ignores the padding."""
    buffers = [bytearray(max(lengths)) for _ in lengths]
    return buffers, [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]


_GROUPS_OF_WORLD: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, HostGroup]] = weakref.WeakKeyDictionary()
"""The host groups of each default group, by key: destroy_process_group ends them, and their threads, together."""


def host_groups() -> dict[object, HostGroup]:
    """Return the host groups that live as long as the default process group, by their users' keys."""
    world = dist.group.WORLD
    assert world is not None
    return _GROUPS_OF_WORLD.setdefault(world, {})
