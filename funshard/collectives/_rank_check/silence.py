"""The ranks that do not come: which are missing where this rank waits, what they do, and when that is an error.

A rank that waits for long asks all ranks where they are. One that compiles is waited for; one that has left the check, has
ended, or does not come within the limit is an error.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

from .channel import name_ranks
from .user_line import describe_main_thread

if TYPE_CHECKING:
    from ..._torch.groups import Store
    from .monitor import Monitor, Wait

__all__ = ["SilenceWatch"]

SLOW = 5.0
"""Seconds after which a rank that waits warns, or a third of the limit if that is less."""
MUTE = 10.0
"""Seconds after which a rank that does not answer has ended or is stopped."""


class _Answer(NamedTuple):
    """The last answer of a rank that was asked where it is."""

    number: str
    since: float
    """The time at which this rank saw the number first."""
    is_compiling: bool
    doing: str


class SilenceWatch:
    """The watch over one rank's waits, to be called at every tick of the monitor's thread."""

    def __init__(self, monitor: Monitor, store: Store) -> None:
        self._monitor, self._number = monitor, 0
        self._wait: Wait | None = None
        self._end_wait()
        self._answer(store)

    def look(self, store: Store, epoch: str, *, is_asked: bool) -> None:
        """Answer the ranks that ask, and look after the wait of the main thread."""
        if is_asked:
            self._answer(store)
        wait = self._monitor.wait
        if wait is None or wait is not self._wait:
            if self._asks_in is not None:
                store.add(f"{self._asks_in}/alert", -1)
            self._end_wait()
            self._wait = wait
            return
        records = wait.channel.read_announced(store)
        missing = [r for r in wait.channel.ranks if r not in records or records[r].sequence < wait.sequence]
        if not missing:
            return
        arrived = [rank for rank in wait.channel.ranks if rank not in missing]
        begin = f"fs.check: {name_ranks(arrived)} {'have' if len(arrived) > 1 else 'has'} waited"
        goal = f"to start {wait.what} ({wait.line})"
        for rank in missing:
            if where := self._find_left(rank, wait, store, epoch):
                self._monitor.declare(f"{begin} {goal}, and rank {rank} does not come: it has {where}", store)
                return
        self._look_at_slow(missing, f"{begin} {{:.0f}} s {goal}", wait, store, epoch)

    def _look_at_slow(self, missing: list[int], text: str, wait: Wait, store: Store, epoch: str) -> None:
        """Ask the missing ranks where they are; warn if they are slow, and stop all if one is beyond the limit."""
        now, limit = time.monotonic(), self._monitor.timeout
        waited, step, self._looked = now - wait.begin, now - self._looked, now
        if waited < min(SLOW, limit / 3):
            return
        if self._asks_in is None:
            store.add(f"{epoch}/alert", 1)
            self._asks_in, self._asked = epoch, now
            return
        answers = {rank: self._read_answer(rank, store, now) for rank in missing}
        if any(answer is not None and answer.is_compiling for answer in answers.values()):
            self._compiling += step
        mute = [rank for rank, answer in answers.items() if answer and now - max(answer.since, self._asked) > MUTE]
        text = text.format(waited) + " for " + "; ".join(_describe_rank(rank, answers[rank], rank in mute) for rank in missing)
        if waited - self._compiling > limit:
            self._monitor.declare(f"{text}. The limit is fs.check(timeout={limit:g})", store)
        elif mute:
            self._monitor.declare(text, store)
        elif not self._has_warned and now - self._asked > 1:
            self._has_warned = True
            _warn_now(text)

    def _end_wait(self) -> None:
        """Forget the wait that is over."""
        self._asks_in: str | None = None
        self._asked, self._looked, self._compiling = 0.0, time.monotonic(), 0.0
        self._has_warned = False
        self._answers: dict[int, _Answer] = {}

    def _answer(self, store: Store) -> None:
        """Write where this rank is, for those that wait for it."""
        self._number += 1
        line, is_compiling = describe_main_thread()
        wait = self._monitor.wait
        doing = f"waits to start {wait.what} ({wait.line})" if wait else f"{'compiles' if is_compiling else 'is'} at {line}"
        store.set(f"where/{self._monitor.rank}", f"{self._number}\n{int(is_compiling and not wait)}\n{doing}")

    def _read_answer(self, rank: int, store: Store, now: float) -> _Answer | None:
        """Return the last answer of a rank, None if it has entered no check."""
        if not store.check([f"where/{rank}"]):
            return None
        number, is_compiling, doing = store.get(f"where/{rank}").decode().split("\n", 2)
        old = self._answers.get(rank)
        since = old.since if old is not None and old.number == number else now
        self._answers[rank] = _Answer(number, since, is_compiling == "1", doing)
        return self._answers[rank]

    def _find_left(self, rank: int, wait: Wait, store: Store, epoch: str) -> str:
        """Return how a rank has left the check that this rank waits in; empty if it has not."""
        if not store.check([f"{epoch}/left/{rank}"]):
            return ""
        number, how = store.get(f"{epoch}/left/{rank}").decode().split("\n", 1)
        return how if int(number) >= wait.check else ""


def _describe_rank(rank: int, answer: _Answer | None, is_mute: bool) -> str:
    """Return a missing rank's answer in words."""
    if answer is None:
        return f"rank {rank}, which has not entered fs.check()"
    if is_mute:
        return f"rank {rank}, which does not answer: it has ended or is stopped; its last answer: it {answer.doing}"
    return f"rank {rank}, which {answer.doing}"


def _warn_now(text: str) -> None:
    """Warn now, in this thread: the main thread waits."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=1)
    except RuntimeWarning:  # a filter makes errors of warnings, which nobody would see in this thread
        print(text, file=sys.stderr, flush=True)
