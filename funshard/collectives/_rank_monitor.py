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
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from .. import _torch
from .._core.announce import RankError
from .._torch import TORCH_FOLDER, is_compiler_file

if TYPE_CHECKING:
    from .._torch.groups import Store

__all__ = ["Monitor", "Wait", "find_error_line", "find_user_line", "name_ranks"]


# --- The line of user code that a thread runs: the innermost one outside of torch, funshard and Python's own library ---

_LIBRARIES = (TORCH_FOLDER, f"{Path(__file__).parents[1]}/", "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + "/"


@functools.lru_cache(maxsize=4096)
def _is_user_file(name: str) -> bool:
    """Return whether a file is neither of the libraries here nor of Python."""
    return not name.startswith(_LIBRARIES) and (not name.startswith(_STANDARD_LIBRARY) or "-packages/" in name)


def _describe_line(frame: FrameType, number: int) -> str:
    """Return a line of code as "file:number in function: source"."""
    name, code = frame.f_code.co_filename, frame.f_code
    source = linecache.getline(name, number).strip()
    return f"{name}:{number} in {getattr(code, 'co_qualname', code.co_name)}" + (f": {source}" if source else "")


def _find_in_stack(frame: FrameType | None) -> str:
    """Return the innermost line of user code at this frame or around it; an empty string if there is none."""
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _describe_line(frame, frame.f_lineno)


def _main_frame() -> FrameType | None:
    """Return the frame that the main thread runs."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def find_user_line() -> str:
    """Return the line that this thread runs for the user, or that the main thread runs.

    Backward of a model on an accelerator runs in a thread of autograd, which has no user code below it.
    """
    return _find_in_stack(sys._getframe(1)) or _find_in_stack(_main_frame()) or "no line of user code"


def find_error_line(traceback: TracebackType | None) -> str:
    """Return the innermost line of user code of an error."""
    found = "no line of user code"
    while traceback is not None:
        if _is_user_file(traceback.tb_frame.f_code.co_filename):
            found = _describe_line(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _is_compiling() -> bool:
    """Return whether torch compiles something for the main thread."""
    frame = _main_frame()
    while frame is not None and not is_compiler_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words, such as "rank 1" or "ranks 0, 2"; many are abridged."""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# --- The comparison of the next collective between some ranks, over the key-value store ---
#
# A rank writes what it is about to start, and adds a one and a digest of it to a sum that all ranks share. The rank that comes
# last sees in the sum whether all digests are equal, and sets a key that the others wait for. Whoever sets that key first
# decides. A rank that has an error sets it, too: so either all ranks start the collective, or none does.

_ONE = 1 << 47
"""The part of the sum that counts ranks. Below it, there is room for the digests of 32 bits of 32,768 ranks."""
_START = "start"
"""The value of the key that lets ranks start the collective; any other is an error."""


@dataclass
class Wait:
    """The wait of the main thread for other ranks, before a collective."""

    ranks: tuple[int, ...]
    number: int
    """The number of collectives that these ranks have compared before."""
    what: str
    line: str
    """The line of user code."""
    epoch: int
    check: int = 0
    """The number of the check around it."""
    begin: float = field(default_factory=time.monotonic)
    seen: float = 0.0
    """When the thread has looked last."""
    compiling: float = 0.0
    """Seconds in which a missing rank compiled."""
    beats: dict[int, tuple[str, float]] = field(default_factory=dict)
    """The last number that each missing rank has written, and when it was new."""
    has_warned: bool = False

    def __post_init__(self) -> None:
        members = hashlib.blake2b(repr(self.ranks).encode(), digest_size=12).hexdigest()
        self._prefix = f"{self.epoch}/{members}"

    def meet(self, store: Store, rank: int) -> str:
        """Wait until all ranks are about to start the collective; return an empty string, or an error if they differ."""
        digest = hashlib.blake2b(f"{self.number} {self.what}".encode(), digest_size=4).digest()
        own = _ONE + int.from_bytes(digest, "little")
        store.set(f"{self._prefix}/record/{rank}", f"{self.number}\n{self.what}\n{self.line}")
        total = store.add(f"{self._prefix}/sum", own)
        if total // _ONE == 1 and self.number > 1:  # all ranks have come here since, so none waits for that key any more
            store.delete_key(f"{self._prefix}/go/{self.number - 2}")
        if total // _ONE < len(self.ranks):
            answer = store.get(f"{self._prefix}/go/{self.number}").decode()
        elif total == own * len(self.ranks):
            store.set(f"{self._prefix}/sum", "0")
            answer = self.decide(_START, store)
        else:
            answer = self.decide(self._describe_difference(store), store)
        return "" if answer == _START else answer

    def decide(self, answer: str, store: Store) -> str:
        """Say that ranks start the collective, or what is wrong, unless some rank has said it before; return what was said."""
        return store.compare_set(f"{self._prefix}/go/{self.number}", "", answer).decode()

    def read_record(self, rank: int, store: Store) -> tuple[int, str]:
        """Return the last collective that a rank was about to start: its number, -1 for none, and a description."""
        if not store.check([key := f"{self._prefix}/record/{rank}"]):
            return -1, ""
        number, what, line = store.get(key).decode().split("\n", 2)
        return int(number), f"{what} ({line})"

    def _describe_difference(self, store: Store) -> str:
        by_text: defaultdict[str, list[int]] = defaultdict(list)
        for rank in self.ranks:
            by_text[self.read_record(rank, store)[1]].append(rank)
        each = "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in by_text.items())
        where = f"collective {self.number + 1} of {name_ranks(self.ranks)}"
        return f"fs.check: ranks disagree on {where}. Each was about to start: {each}"


# --- One process's part in the check ---
#
# The main thread waits for the other ranks in the store without a limit of its own. A thread beside it writes twice a second
# where this rank is, and looks whether a rank has reported an error, or which ranks are missing where the main thread waits:
# one that compiles is waited for; one that has left the check, has ended, or does not come within the limit is an error.

TICK = 0.5
"""Seconds between two looks at the store."""
SLOW = 5.0
"""Seconds after which a rank that waits warns, or a third of the limit if that is less."""
MUTE = 10.0
"""Seconds after which a rank that writes nothing has ended or is stopped."""
FAREWELL = 5.0
"""The most seconds for which a rank with an error waits until the others know of it."""


class Monitor:
    """The check's connection of this process to the other ranks of the default process group.

    Args:
        world: The default process group.
        timeouts: The limits of the checks around what runs, of which the last one counts.
    """

    def __init__(self, world: dist.ProcessGroup, timeouts: Sequence[float]) -> None:
        self.world, self._timeouts = weakref.ref(world), timeouts
        self.rank, self.ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        self.error = ""
        """The error that this rank has heard of or reported; it is raised at the next collective, too."""
        self.check = 0
        """The number of checks that this process has entered."""
        self._epoch = 0  # the number of errors before: each has keys of its own
        self._numbers: dict[tuple[int, ...], int] = {}  # of collectives that some ranks have compared
        self._by_name: dict[str, tuple[int, ...]] = {}
        self._wait: Wait | None = None
        self._beat = 0
        self._lock = threading.Lock()
        self._store, self._side_store = (self._connect() for _ in range(2))
        self._look()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="funshard.check", daemon=True)
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
        number = self._numbers.get(ranks, 0)
        self._wait = Wait(ranks, number, what, line, self._epoch, self.check)
        try:
            error = self._wait.meet(self._store, self.rank)
        except RuntimeError as lost:
            error = f"the store of the default process group has ended, with its process: {str(lost).splitlines()[0]}"
            error = self.error or f"fs.check: {error}"
        finally:
            self._wait = None
        self._numbers[ranks] = number + 1
        if error:
            self._declare(error, self._store, self._epoch)
            raise RankError(self.error)

    def report(self, error: str) -> None:
        """Tell all ranks that this one has an error, if it is the first; wait for a short time until they know; begin anew."""
        if not self.error:
            self._declare(error, self._store, self._epoch)
        self._wait_for_count(f"{self._epoch}/heard", len(self.ranks))
        with self._lock:
            self._epoch, self.error, self.check = self._epoch + 1, "", 0
            self._numbers.clear()

    def leave(self, how: str) -> None:
        """Say that this rank does not come to collectives of this check any more."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._epoch}/left/{self.rank}", f"{self.check}\n{how}")

    def compare_end(self, line: str) -> None:
        """Compare that all ranks have come to the end of the check. The first one waits until all know: it has the store."""
        self.compare(f"the end of fs.check(), block {self.check}", self.ranks, line)
        self._store.add(f"{self._epoch}/past", 1)
        if self.rank == 0:
            self._wait_for_count(f"{self._epoch}/past", self.check * len(self.ranks))

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(FAREWELL)  # a thread that is left in a call of the store aborts an interpreter that ends

    def end_process(self) -> None:
        """Say that this process ends, and end the thread."""
        if self.world() is not None:  # else the store may be gone, which torch reports at length
            self.check = 1 << 62
            self.leave("ended")
            with contextlib.suppress(RuntimeError):
                self._store.add("ended", 1)
            if self.rank == 0:
                self._wait_for_count("ended", len(self.ranks))
        self.stop()

    def _wait_for_count(self, key: str, count: int) -> None:
        """Wait for a short time until all ranks have added to a counter: the store may end with this process."""
        end = time.monotonic() + FAREWELL
        with contextlib.suppress(RuntimeError):
            while self._store.add(key, 0) < count and time.monotonic() < end:
                time.sleep(TICK / 100)

    # --- both threads ---

    def _declare(self, error: str, store: Store, epoch: int) -> None:
        """Say that something is wrong, unless another rank has said it before, and keep what was said."""
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank: this rank hears of it alone
            error = store.compare_set(f"{epoch}/error", "", error).decode()
        with self._lock:
            if self.error or epoch != self._epoch:
                return
            self.error = error
        with contextlib.suppress(RuntimeError):
            store.add(f"{epoch}/heard", 1)

    # --- the thread beside ---

    def _watch(self) -> None:
        """Look for errors and for missing ranks until the check ends: the thread's function."""
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            while not self._stopped.wait(TICK) and self.world() is not None:
                self._look()

    def _look(self) -> None:
        """Write where this rank is, read a new error, if any, and look at who is waited for."""
        store, wait, epoch = self._side_store, self._wait, self._epoch
        self._beat += 1
        is_compiling = wait is None and _is_compiling()
        doing = f"waits to start {wait.what} ({wait.line})" if wait else "compiles at " if is_compiling else "is at "
        doing += "" if wait else _find_in_stack(_main_frame()) or "no line of user code"
        store.set(f"where/{self.rank}", f"{self._beat}\n{int(is_compiling)}\n{doing}")
        if not self.error and store.check([f"{epoch}/error"]):
            self._declare(store.get(f"{epoch}/error").decode(), store, epoch)
        if wait is None:
            return
        if not self.error and (error := self._find_missing(wait, store)):
            self._declare(error, store, wait.epoch)
        if self.error and wait.epoch == epoch:
            wait.decide(self.error, store)  # which ends the wait, on all ranks

    def _find_missing(self, wait: Wait, store: Store) -> str:
        """Return the error of ranks that do not come, an empty string as long as they may; warn of slow ones."""
        now, limit = time.monotonic(), self._timeouts[-1]
        step, wait.seen = now - (wait.seen or now), now
        missing = [rank for rank in wait.ranks if wait.read_record(rank, store)[0] < wait.number]
        if not missing:
            return ""
        arrived = [rank for rank in wait.ranks if rank not in missing]
        begin = f"fs.check: {name_ranks(arrived)} {'have' if len(arrived) > 1 else 'has'} waited"
        goal = f"to start {wait.what} ({wait.line})"
        for rank in missing:
            if store.check([key := f"{wait.epoch}/left/{rank}"]):
                number, how = store.get(key).decode().split("\n", 1)
                if int(number) >= wait.check:
                    return f"{begin} {goal}, and rank {rank} does not come: it has {how}"
        if now - wait.begin < min(SLOW, limit / 3):
            return ""
        is_compiling, is_mute, places = False, False, []
        for rank in missing:
            if not store.check([key := f"where/{rank}"]):
                places.append(f"rank {rank}, which has not entered fs.check()")
                continue
            number, compiles, doing = store.get(key).decode().split("\n", 2)
            since = wait.beats.get(rank, ("", now))[1] if wait.beats.get(rank, ("",))[0] == number else now
            wait.beats[rank] = number, since
            is_compiling |= compiles == "1"
            if now - since > MUTE:
                is_mute, doing = True, f"does not answer: it has ended or is stopped; its last answer: it {doing}"
            places.append(f"rank {rank}, which {doing}")
        wait.compiling += step * is_compiling
        text = f"{begin} {now - wait.begin:.0f} s {goal} for {'; '.join(places)}"
        if now - wait.begin - wait.compiling > limit:
            return f"{text}. The limit is fs.check(timeout={limit:g})"
        if not is_mute and not wait.has_warned:
            wait.has_warned = True
            _warn_now(text)
        return text if is_mute else ""


def _warn_now(text: str) -> None:
    """Warn now, in this thread: the main thread waits."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=1)
    except RuntimeWarning:  # a filter makes errors of warnings, which nobody would see in this thread
        print(text, file=sys.stderr, flush=True)
