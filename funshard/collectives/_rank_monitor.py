"""One process's part in the check of ranks: it compares collectives, reports errors, and hears of those of other ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
import sys
import sysconfig
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from .. import _torch
from .._core.announce import RankError
from .._torch import TORCH_FOLDER, is_compiler_file

if TYPE_CHECKING:
    from .._torch.groups import Store

__all__ = ["Channel", "Monitor", "describe_line", "find_error_line", "find_user_line", "name_ranks"]


# --- The line of user code that a thread runs: the innermost one outside of torch, funshard and Python's own library ---

_LIBRARIES = (TORCH_FOLDER, f"{Path(__file__).parents[1]}/", "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + "/"
_SITE_PACKAGES = ("/site-packages/", "/dist-packages/")


class UserLine(NamedTuple):
    """A line of user code. Code objects themselves are no keys of caches: Dynamo makes some that have no hash."""

    file: str
    number: int
    function: str


def _line_of(code: CodeType, number: int) -> UserLine:
    return UserLine(code.co_filename, number, getattr(code, "co_qualname", code.co_name))


@functools.lru_cache(maxsize=4096)
def _is_user_file(name: str) -> bool:
    """Return whether a file is neither of the libraries here nor of Python."""
    if name.startswith(_LIBRARIES):
        return False
    return not name.startswith(_STANDARD_LIBRARY) or any(part in name for part in _SITE_PACKAGES)


def find_user_line() -> UserLine | None:
    """Return the line that this thread runs for the user, or that the main thread runs.

    Backward of a model on an accelerator runs in a thread of autograd, which has no user code below it.
    """
    line = _find_in_stack(sys._getframe(1))
    if line is None and threading.current_thread() is not threading.main_thread():
        return _find_in_stack(_main_frame())
    return line


def _find_in_stack(frame: FrameType | None) -> UserLine | None:
    """Return the innermost line of user code at this frame or around it."""
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return _line_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def _main_frame() -> FrameType | None:
    """Return the frame that the main thread runs."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def find_error_line(traceback: TracebackType | None) -> str:
    """Return the innermost line of user code of an error, as `describe_line` does."""
    found = None
    while traceback is not None:
        if _is_user_file(traceback.tb_frame.f_code.co_filename):
            found = _line_of(traceback.tb_frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return describe_line(found)


@functools.lru_cache(maxsize=4096)
def describe_line(line: UserLine | None) -> str:
    """Return a line of code as "file:number in function: source"."""
    if line is None:
        return "no line of user code"
    source = linecache.getline(line.file, line.number).strip()
    return f"{line.file}:{line.number} in {line.function}" + (f": {source}" if source else "")


def describe_main_thread() -> tuple[str, bool]:
    """Return the line of user code that the main thread runs, and whether torch compiles something for it."""
    inner = frame = _main_frame()
    is_compiling = False
    while frame is not None:
        is_compiling |= is_compiler_file(frame.f_code.co_filename)
        frame = frame.f_back
    return describe_line(_find_in_stack(inner)), is_compiling


# --- The comparison of the next collective between the ranks of one process group, over the key-value store ---
#
# A rank writes what it is about to start, and adds a one and a digest of it to a sum that all ranks share. The rank that comes
# last sees in the sum whether all digests are equal, and sets a key that the others wait for. Whoever sets that key first
# decides. A rank that has an error sets it, too: so either all ranks start the collective, or none does.

_ONE = 1 << 47
"""The part of the sum that counts ranks. Below it, there is room for the digests of 32 bits of 32,768 ranks."""
_START = "start"
"""The value of the key that lets ranks start the collective; any other is an error."""


class AnnouncedStart(NamedTuple):
    """A collective that a rank is about to start."""

    sequence: int
    """The number of collectives that were compared on the channel before."""
    what: str
    line: str
    """The line of user code."""

    def describe(self) -> str:
        """Return the collective with its line."""
        return f"{self.what} ({self.line})"


class Channel:
    """The comparisons between some ranks.

    Args:
        store: The store of the rank's main thread.
        ranks: The global ranks, in rising order.
        rank: This process's global rank.
        prefix: Distinguishes the channels after an error from those before.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, prefix: str) -> None:
        self.ranks, self._store, self._rank = tuple(ranks), store, rank
        self.sequence = 0
        members = hashlib.blake2b(repr(self.ranks).encode(), digest_size=12).hexdigest()
        self._prefix = f"{prefix}/{members}"

    def compare(self, what: str, line: str) -> str:
        """Wait until all ranks are about to start a collective, and return an empty string, or an error if they differ."""
        n, store = self.sequence, self._store
        digest = hashlib.blake2b(f"{n} {what}".encode(), digest_size=4).digest()
        own = _ONE + int.from_bytes(digest, "little")
        store.set(self._announcement_key(self._rank), f"{n}\n{what}\n{line}")
        total = store.add(f"{self._prefix}/sum", own)
        count = total // _ONE
        if count == 1 and n > 1:  # all ranks have come here since, so none waits for that key any more
            store.delete_key(self._go_key(n - 2))
        if count < len(self.ranks):
            answer = store.get(self._go_key(n)).decode()
        else:
            if is_equal := total == own * len(self.ranks):
                store.set(f"{self._prefix}/sum", "0")
            answer = self.decide(n, _START if is_equal else self._describe_difference(), store)
        self.sequence = n + 1
        return "" if answer == _START else answer

    def decide(self, sequence: int, answer: str, store: Store) -> str:
        """Say that ranks start a collective, or what is wrong, unless some rank has said it before. Return what was said."""
        return store.compare_set(self._go_key(sequence), "", answer).decode()

    def stop(self, error: str, store: Store) -> None:
        """Have all ranks raise an error instead of starting the next collective."""
        self.decide(self.sequence, error, store)

    def read_announced(self, store: Store) -> dict[int, AnnouncedStart]:
        """Return the last start that each rank has announced, for those that have announced one."""
        records: dict[int, AnnouncedStart] = {}
        for rank in self.ranks:
            if store.check([key := self._announcement_key(rank)]):
                sequence, what, line = store.get(key).decode().split("\n", 2)
                records[rank] = AnnouncedStart(int(sequence), what, line)
        return records

    def _describe_difference(self) -> str:
        """Return the error that says what each rank was about to start."""
        by_record: defaultdict[str, list[int]] = defaultdict(list)
        for rank, record in self.read_announced(self._store).items():
            by_record[record.describe()].append(rank)
        each = "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in by_record.items())
        where = f"collective {self.sequence + 1} of {name_ranks(self.ranks)}"
        return f"fs.check: ranks disagree on {where}. Each was about to start: {each}"

    def _announcement_key(self, rank: int) -> str:
        return f"{self._prefix}/record/{rank}"

    def _go_key(self, sequence: int) -> str:
        """Return the store's key that decides whether ranks start this collective."""
        return f"{self._prefix}/go/{sequence}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words, such as "rank 1" or "ranks 0, 2"; many are abridged."""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# --- The ranks that do not come: which are missing where this rank waits, what they do, and when that is an error ---
#
# A rank that waits for long asks all ranks where they are. One that compiles is waited for; one that has left the check, has
# ended, or does not come within the limit is an error.

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


# --- One process's part in the check: it compares collectives, reports errors, and hears of those of other ranks ---
#
# The main thread waits for the other ranks in the store without a limit of its own. A thread beside it asks the store twice a
# second whether a rank has reported an error, and ends that wait. It also answers where this rank is when others wait for it,
# and says which ranks are missing when this one waits.

TICK = 0.5
"""Seconds between two looks at the store."""
FAREWELL = 5.0
"""The most seconds for which a rank with an error waits until the others know of it."""
_ERROR = 1 << 32
"""The part of the "alert" counter that counts errors. Below it are the ranks that ask where the others are."""


class Wait(NamedTuple):
    """The wait of the main thread for other ranks."""

    channel: Channel
    sequence: int
    what: str
    line: str
    begin: float
    check: int
    """The number of the check around it."""


class Monitor:
    """The check's connection of this process to the other ranks of the default process group."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.world = weakref.ref(world)
        self.rank, self.ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        self.error = ""
        """The error that this rank has heard of or reported; it is raised at the next collective, too."""
        self.timeout = 0.0
        self.check = 0
        """The number of checks that this process has entered."""
        self.wait: Wait | None = None
        self._epoch = 0  # the number of errors before: each has keys of its own
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._by_name: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._store, self._side_store = (self._connect() for _ in range(2))
        self._watch = SilenceWatch(self, self._side_store)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="funshard.check", daemon=True)
        self._thread.start()

    @staticmethod
    def _connect() -> Store:
        """Return a connection to the store that never times out."""
        return _torch.connect_store("funshard/check", timedelta(days=7))  # the thread ends a wait

    # --- main thread ---

    def ranks_of(self, group: str | Sequence[int]) -> tuple[int, ...]:
        """Return the global ranks of a process group, () if there is nobody to compare with."""
        if not isinstance(group, str):
            return tuple(group)
        if group not in self._by_name:
            found = _torch.resolve_group(group)
            is_fake = dist.get_backend(found) == "fake"
            self._by_name[group] = () if is_fake else tuple(dist.get_process_group_ranks(found))
        return self._by_name[group]

    def compare(self, what: str, ranks: tuple[int, ...], line: str) -> None:
        """Wait until all of these ranks are about to start the same collective.

        Raises:
            RankError: If they are not, one has raised, or one does not come.
        """
        if self.error:
            raise RankError(self.error)
        channel = self._channels.get(ranks)
        if channel is None:
            channel = self._channels[ranks] = Channel(self._store, ranks, self.rank, str(self._epoch))
        self.wait = Wait(channel, channel.sequence, what, line, time.monotonic(), self.check)
        try:
            error = channel.compare(what, line)
        except RuntimeError as lost:
            error = f"the store of the default process group has ended, with its process: {str(lost).splitlines()[0]}"
            error = self.error or f"fs.check: {error}"
        finally:
            self.wait = None
        if error:
            self.declare(error, self._store)
            raise RankError(self.error)

    def report(self, error: str) -> None:
        """Tell all ranks that this one has an error, if it is the first, and wait for a short time until they know."""
        if not self.error:
            self.declare(error, self._store)
        self._wait_for_all(f"{self._epoch}/heard")

    def leave(self, how: str) -> None:
        """Write down that this rank does not come to collectives of this check any more."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._epoch}/left/{self.rank}", f"{self.check}\n{how}")

    def wait_for_answers(self) -> None:
        """On rank 0, wait until all ranks know that they have come to the end: the store may end with its process."""
        key, end = f"{self._epoch}/past", time.monotonic() + FAREWELL
        count = self._store.add(key, 1)
        while self.rank == 0 and count < self.check * len(self.ranks) and time.monotonic() < end:
            count = self._store.add(key, 0)

    def forget_error(self) -> None:
        """Begin again after an error that all ranks have got."""
        if self.error:
            with self._lock:
                self._epoch += 1
                self.error = ""
                self._channels.clear()
                self.check = 0

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(FAREWELL)  # a thread that is left in a call of the store aborts an interpreter that ends

    def end_process(self) -> None:
        """Say that this process ends, and end the thread."""
        if self.world() is not None:  # else the store may be gone, which torch reports at length
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._epoch}/left/{self.rank}", f"{1 << 62}\nended")
                self._store.add("ended", 1)
                if self.rank == 0:
                    self._wait_for_all("ended")
        self.stop()

    def _wait_for_all(self, key: str) -> None:
        """Wait for a short time until all ranks have added to a counter: the store may end with this process."""
        end = time.monotonic() + FAREWELL
        with contextlib.suppress(RuntimeError):
            while self._store.add(key, 0) < len(self.ranks) and time.monotonic() < end:
                time.sleep(TICK / 20)

    # --- both threads ---

    def declare(self, error: str, store: Store) -> None:
        """Say that something is wrong, unless another rank has said it before."""
        epoch = self._epoch
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank: this rank hears of it alone
            error = store.compare_set(f"{epoch}/error", "", error).decode()
            store.add(f"{epoch}/alert", _ERROR)
        self.learn(error, store, epoch)

    def learn(self, error: str, store: Store, epoch: int) -> None:
        """Keep an error of this epoch, and have the other ranks raise it that wait for this one, or will."""
        with self._lock:
            if self.error or epoch != self._epoch:
                return
            self.error = error
            channels = [*self._channels.values()]
        with contextlib.suppress(RuntimeError):
            for channel in channels:
                channel.stop(error, store)
            if store.compare_set(f"{epoch}/error", "", error).decode() == error:
                store.add(f"{epoch}/alert", _ERROR)
            store.add(f"{epoch}/heard", 1)

    # --- the thread beside ---

    def _listen(self) -> None:
        """Look for errors and for silent ranks until the check ends: the thread's function."""
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            while not self._stopped.wait(TICK) and self.world() is not None:
                self._look()

    def _look(self) -> None:
        """Read a new error, if any, and look at who is waited for."""
        epoch, store = self._epoch, self._side_store
        alert = store.add(f"{epoch}/alert", 0)
        if alert >= _ERROR and not self.error:
            self.learn(store.get(f"{epoch}/error").decode(), store, epoch)
        self._watch.look(store, str(epoch), is_asked=alert % _ERROR > 0)
