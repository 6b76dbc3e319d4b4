"""The check that all ranks start the same collectives in the same order.

A process group pairs the n-th collective of one rank with the n-th of every other. Ranks that gather other units of one
size, or the same units in another order, get each other's slices, without an error from any backend. So ranks compare the
names of what they have started, over a `HostGroup`: it sends two integers, and cannot come between the collectives that it is
about.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from ._announce import RankError
from ._host_group import HostGroup, host_groups
from ._tag import REMEDY

__all__ = ["CollectiveSequence", "SequenceCheck", "check_sequence", "get_host_group", "is_comparable"]


class CollectiveSequence:
    """The names of the collectives that this rank has started since ranks last compared them."""

    def __init__(self) -> None:
        self._started: dict[str, list[str]] = {}
        _finish_earlier_checks()

    def record(self, groups: Iterable[str], name: str) -> None:
        """Note that a collective of this name is started on these process groups."""
        for group in groups:
            self._started.setdefault(group, []).append(name)

    def start_checks(self, error: str, groups: Iterable[str] = ()) -> list[SequenceCheck]:
        """Start to compare what was recorded, between the ranks of each process group, and forget it.

        Args:
            error: Says what ranks did where they differ.
            groups: The names of process groups to compare also if nothing was recorded on them.
        """
        started, self._started = self._started, {}
        started |= {group: [] for group in groups if group not in started}
        return [SequenceCheck(get_host_group(group), names, error) for group, names in started.items()]


_UNFINISHED: deque[SequenceCheck] = deque()
"""Comparisons under way that nobody has waited for, such as that of a forward without a backward: the next call does."""


def _finish_earlier_checks() -> None:
    """Wait for the comparisons of earlier calls that are not finished."""
    while _UNFINISHED:
        _UNFINISHED.popleft().finish()


class SequenceCheck:
    """A comparison under way between the ranks of a group.

    Args:
        group: The ranks' own group for this.
        names: What this rank has started, in order.
        error: Says what ranks did where they differ.
        remedy: Says what to do then.
    """

    def __init__(self, group: HostGroup, names: Sequence[str], error: str, remedy: str = REMEDY) -> None:
        self._group = weakref.ref(group)  # destroy_process_group is to end it, and its threads
        self._names, self._error, self._remedy = names, error, remedy
        digest = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")
        self._own = digest, -digest
        self._work: dist.Work | None = None
        # The maxima over ranks are a rank's own only where all ranks have the same.
        self._maxima = torch.tensor(self._own, device="cpu")
        self._work = group.all_reduce_max(self._maxima, f"to compare {(*names, 'that nothing was started')[0]}")

    def finish(self) -> None:
        """Wait for the other ranks' names.

        Raises:
            RuntimeError: On every rank of the group, if they differ.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        with _explain_timeout():
            work.wait()
        if self._is_different():
            raise RuntimeError(f"{self._error}: {self._find_difference()}. {self._remedy}")

    def __del__(self, unfinished: deque[SequenceCheck] = _UNFINISHED) -> None:
        if self._work is not None and (not self._work.is_completed() or self._is_different()):
            unfinished.append(self)

    def _is_different(self) -> bool:
        """Return whether some rank ran other collectives."""
        return tuple(self._maxima.tolist()) != self._own

    def _find_difference(self) -> str:
        """Return the first collective that differs, and where, by a gather of all names."""
        group = self._group()
        if group is None:
            return "their process group is gone"
        everyone: list[list[str]] = group.all_gather_object([*self._names])
        first = everyone[0]
        other = next(i for i, names in enumerate(everyone) if names != first)
        i = next(i for i in range(len(first) + 1) if first[i : i + 1] != everyone[other][i : i + 1])
        expected, got = (names[i] if i < len(names) else "nothing more" for names in (first, everyone[other]))
        return f"collective {i + 1} is {expected} on rank {group.ranks[0]}, and {got} on rank {group.ranks[other]}"


def check_sequence(
    names: Sequence[str],
    group: str,
    sent: Tensor,
    error: str = "ranks are about to exchange values of different units",
    remedy: str = REMEDY,
) -> None:
    """Compare the names of the collectives that each rank of a process group is about to start, and wait for that.

    Does nothing where nothing is sent, as while operators are recorded.

    Raises:
        RuntimeError: On every rank of the group, if they differ.
    """
    if _torch.is_traced() or _torch.is_fake(sent) or not is_comparable(group):
        return
    _finish_earlier_checks()
    SequenceCheck(get_host_group(group), names, error, remedy).finish()


def is_comparable(group: str) -> bool:
    """Return whether a process group has other processes: one of the backend "fake" has a size alone."""
    return dist.get_backend(_torch.resolve_group(group)) != "fake"


def get_host_group(name: str) -> HostGroup:
    """Return a process group's own host group: threads with a group each compare in any order.

    Its hosts connect at the first comparison.
    """
    groups = host_groups()
    key = "sequence", name
    if key not in groups:
        group = _torch.resolve_group(name)
        timeout = _torch.group_timeout(group)
        with _explain_timeout():
            groups[key] = HostGroup(dist.get_process_group_ranks(group), f"sequence of {name}", timeout)
    return groups[key]


@contextlib.contextmanager
def _explain_timeout() -> Generator[None]:
    """Say what it means that other ranks do not compare their collectives within the group's timeout."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            "ranks are to compare the collectives that they have started, and one has not within the process group's timeout, "
            "or has ended: expected all ranks to make the same calls; look at the first error of every rank"
        ) from error
