"""The comparison of lines between ranks, such as the names of the collectives that each has started.

It goes over `HostGroup`s, sends two integers, and cannot come between the collectives that it is about. Where lines differ all
ranks exchange them, and raise one error.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.announce import RankError
from .._core.mesh import Mesh
from ._host_group import HostGroup, host_groups
from ._world import process_axes

__all__ = [
    "Comparison",
    "RankLines",
    "check_sequence",
    "find_difference",
    "find_host_groups",
    "finish_earlier_checks",
    "gather_from_ranks",
    "get_host_group",
    "is_comparable",
    "make_order_error",
]

REMEDY = (
    "Expected the same units in the same order on all ranks: run every unit on every rank (its output times 0 where it is not "
    "wanted), or choose units by numbers that all ranks have alike; check_order=False leaves this out"
)
"""The advice in an error about ranks that run different units."""
RankLines = list[tuple[int, list[str]]]
"""Ranks in the world, in rising order, each with its lines."""


class Comparison:
    """A comparison under way between ranks.

    Args:
        lines: This rank's lines, at least one.
        groups: The host groups of the ranks, for a mesh one for each axis: equal along each axis is equal everywhere.
        make_error: Returns the error, which all ranks raise, from the lines of all.
        label: Says what is compared, for `funshard.check`; the first line by default.
    """

    def __init__(
        self, lines: Sequence[str], groups: Sequence[HostGroup], make_error: Callable[[RankLines], Exception], label: str = ""
    ) -> None:
        self._work: dist.Work | None = None
        if not groups:
            return
        self._lines, self._make_error, self._label = [*lines], make_error, f"to compare {label or lines[0]}"
        self._groups = [*map(weakref.ref, groups)]  # destroy_process_group is to end them, and their threads
        digest = int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "little")
        self._own = [digest, -digest]  # the maxima over ranks only where all ranks have the same
        with _torch.below_transforms(), _torch.below_autograd():
            self._maxima = torch.tensor(self._own, device="cpu")
            self._work = groups[0].all_reduce_max(self._maxima, self._label)

    def finish(self) -> None:
        """Wait for the other ranks' lines. Raise the error on every rank if they differ."""
        if self._work is None:
            return
        with _torch.below_transforms(), _torch.below_autograd():
            groups = [group for ref in self._groups if (group := ref()) is not None]  # else their process group is gone
            try:
                self._work.wait()
                for group in groups[1:]:
                    group.all_reduce_max(self._maxima, self._label).wait()
            except RankError:
                raise
            except RuntimeError as error:
                raise _lost_rank_error(self._lines[-1]) from error
            if self._maxima.tolist() == self._own:
                return
            everyone = gather_from_ranks(self._lines, groups)
        raise self._make_error(everyone)

    def leave_to_next_call(self) -> None:
        """Have the next call of this rank wait for it."""
        _UNFINISHED.append(self)


_UNFINISHED: deque[Comparison] = deque()
"""Comparisons that the next call is to wait for, such as that of a stream's end."""


def finish_earlier_checks() -> None:
    """Wait for the comparisons that were left to the next call."""
    while _UNFINISHED:
        _UNFINISHED.popleft().finish()


def gather_from_ranks(value: Any, groups: Sequence[HostGroup]) -> list[tuple[int, Any]]:
    """Return the values of all ranks of these groups, as `RankLines`; a mesh has a group for each axis."""
    everyone = [(dist.get_rank() if groups else 0, value)]
    for group in groups:
        everyone = [one for some in group.all_gather_object(everyone) for one in some]
    return sorted(everyone, key=lambda one: one[0])


def find_difference(everyone: RankLines) -> tuple[int, tuple[int, str], tuple[int, str]]:
    """Return the number of the first line that differs, and two ranks with theirs; the first one is the first rank."""
    (rank, first), *others = everyone
    other, lines = next((one for one in others if one[1] != first), (rank, first))
    i = next((i for i in range(len(first)) if lines[i : i + 1] != first[i : i + 1]), len(first))
    expected, got = (x[i] if i < len(x) else "nothing more" for x in (first, lines))
    return i, (rank, expected), (other, got)


def make_order_error(everyone: RankLines, error: str, remedy: str = REMEDY) -> RuntimeError:
    """Return the error of ranks that start different collectives."""
    _, (rank, expected), (other, got) = find_difference(everyone)
    return RuntimeError(f"{error}: {expected} on rank {rank}, and {got} on rank {other}. {remedy}")


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
    finish_earlier_checks()
    Comparison(names, [get_host_group(group)], lambda everyone: make_order_error(everyone, error, remedy)).finish()


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
        try:
            groups[key] = HostGroup(dist.get_process_group_ranks(group), f"sequence of {name}", timeout)
        except RankError:
            raise
        except RuntimeError as error:
            raise _lost_rank_error("the first one") from error
    return groups[key]


def find_host_groups(mesh: Mesh) -> list[HostGroup]:
    """Return a host group for each mesh axis of several processes: an empty list while operators are recorded or compiled."""
    if _torch.is_in_graph() or _torch.is_traced() or _torch.is_fake(torch.empty(0, device="cpu")):
        return []
    return [get_host_group(axis.name) for axis in process_axes(mesh).values() if is_comparable(axis.name)]


def _lost_rank_error(line: str) -> RuntimeError:
    """Return the error of a rank whose others do not come to compare this line."""
    return RuntimeError(
        f"ranks are to compare what they have started, and one has not come to {line} within the process group's timeout, or "
        "has ended: expected all ranks to make the same calls; look at the first error of every rank, or run them in "
        "fs.check(), which says where each rank is"
    )
