"""Whether all ranks start the same collectives in the same order.

A process group pairs the n-th collective of one rank with the n-th of every other. Ranks that gather other units of one
size, or the same units in another order, get each other's slices, without an error from any backend. So ranks compare the
names of what they have started, over a gloo group of their own: it sends two integers, between hosts, and cannot come
between the collectives that it is about.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from ._tag import REMEDY

__all__ = ["CollectiveSequence", "SequenceCheck", "check_sequence", "is_comparable"]


class CollectiveSequence:
    """The names of the collectives that this rank has started since ranks last compared them."""

    def __init__(self) -> None:
        self._started: dict[str, list[str]] = {}
        while _abandoned:
            _abandoned.popleft().finish()

    def record(self, groups: Iterable[str], name: str) -> None:
        """Note that a collective of this name is started on these process groups."""
        for group in groups:
            self._started.setdefault(group, []).append(name)

    def start_checks(self, error: str) -> list[SequenceCheck]:
        """Start to compare what was recorded, between the ranks of each process group, and forget it.

        Args:
            error: Says what ranks did where they differ.
        """
        started, self._started = self._started, {}
        return [SequenceCheck(_comparing(group), names, error) for group, names in started.items()]


_abandoned: deque[SequenceCheck] = deque()
"""Comparisons under way that nobody has waited for, such as that of a forward without a backward: the next call does."""


class SequenceCheck:
    """A comparison under way between the ranks of a group.

    Args:
        group: The ranks' own group for this.
        names: What this rank has started, in order.
        error: Says what ranks did where they differ.
    """

    def __init__(self, group: dist.ProcessGroup, names: Sequence[str], error: str) -> None:
        self._group = weakref.ref(group)  # destroy_process_group is to end it, and its threads
        self._names, self._error = names, error
        digest = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")
        self._own = digest, -digest
        self._most = torch.tensor(self._own)  # the maxima over ranks are a rank's own only where all ranks have the same
        self._work: dist.Work | None = group.allreduce([self._most], _maximum())

    def finish(self) -> None:
        """Wait for the other ranks' names.

        Raises:
            RuntimeError: On every rank of the group, if they differ.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        if self._differs():
            raise RuntimeError(f"{self._error}: {self._difference()}. {REMEDY}")

    def __del__(self, abandoned: deque[SequenceCheck] = _abandoned) -> None:
        if self._work is not None and (not self._work.is_completed() or self._differs()):
            abandoned.append(self)

    def _differs(self) -> bool:
        return tuple(self._most.tolist()) != self._own

    def _difference(self) -> str:
        group = self._group()
        if group is None:
            return "their process group is gone"
        everyone: list[list[str]] = [[]] * group.size()
        dist.all_gather_object(everyone, list(self._names), group=group)
        ranks = dist.get_process_group_ranks(group)
        first = everyone[0]
        other = next(i for i, names in enumerate(everyone) if names != first)
        i = next(i for i in range(len(first) + 1) if first[i : i + 1] != everyone[other][i : i + 1])
        expected, got = (names[i] if i < len(names) else "nothing more" for names in (first, everyone[other]))
        return f"collective {i + 1} is {expected} on rank {ranks[0]}, and {got} on rank {ranks[other]}"


def check_sequence(names: Sequence[str], group: str, sent: Tensor) -> None:
    """Compare the names of the collectives that each rank of a process group is about to start, and wait for that.

    Does nothing where nothing is sent, as while operators are recorded.

    Raises:
        RuntimeError: On every rank of the group, if they differ.
    """
    if _torch.traced() or _torch.is_fake(sent) or not is_comparable(group):
        return
    SequenceCheck(_comparing(group), names, "ranks are about to exchange values of different units").finish()


def is_comparable(group: str) -> bool:
    """Whether a process group has other processes: that of the backend "fake" has a size alone."""
    return dist.get_backend(_torch.group(group)) != "fake"


@functools.cache
def _maximum() -> dist.AllreduceOptions:
    options: Any = dist.AllreduceOptions()  # its stub lacks that the attribute takes ReduceOp.MAX
    options.reduceOp = dist.ReduceOp.MAX
    return options


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], str]] = weakref.WeakKeyDictionary()
"""The names of the groups that compare, by their ranks, of each default process group: they are destroyed with that."""


def _comparing(name: str) -> dist.ProcessGroup:
    """The group over which the ranks of a process group compare. Made by all of them when they first do."""
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(dist.get_process_group_ranks(_torch.group(name)))
    names = _groups.setdefault(world, {})
    if ranks not in names:
        local = len(ranks) < world.size()  # only these ranks come here
        made: Any = dist.new_group([*ranks], backend="gloo", use_local_synchronization=local)
        names[ranks] = made.group_name
    return _torch.group(names[ranks])
