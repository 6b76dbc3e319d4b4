"""The check around a step: ranks compare every collective before it starts, and hear of each other's errors.

The main thread waits for a key in the store of the process group, without a limit of its own. A thread beside it writes twice
a second where this rank is, and sets that key if a rank has reported an error, or is missing: one that compiles is waited for;
one that has left the check, has ended, or does not come within the limit is an error.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.announce import RankError, listen
from .._torch import TORCH_FOLDER, is_compiler_file
from ._agree import is_comparable

if TYPE_CHECKING:
    from .._torch.groups import Store


# --- The line of user code that a thread runs: the innermost one outside of torch, funshard and Python's own library ---

_LIBRARIES = (TORCH_FOLDER, f"{Path(__file__).parents[1]}/", "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + "/"


@functools.lru_cache(maxsize=4096)
def _is_user_file(name: str) -> bool:
    return not name.startswith(_LIBRARIES) and (not name.startswith(_STANDARD_LIBRARY) or "-packages/" in name)


def _describe_line(lines: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first of these lines that is a user's as "file:number in function: source", '' if none is."""
    for frame, number in lines:
        name, code = frame.f_code.co_filename, frame.f_code
        if _is_user_file(name):
            source = linecache.getline(name, number).strip()
            return f"{name}:{number} in {getattr(code, 'co_qualname', code.co_name)}" + (f": {source}" if source else "")
    return ""


def _walk(frame: FrameType | None) -> Generator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _find_user_line() -> str:
    """Return the line that this thread runs for the user, or the main thread: threads of autograd have no user code below."""
    return _describe_line(_walk(sys._getframe(1))) or _describe_line(_walk(_main_frame())) or "no line of user code"


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words, such as "rank 1" or "ranks 0, 2"; many are abridged."""
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# --- One process's part in the check ---

TICK = 0.5  # seconds between two looks at the store
SLOW = 5.0  # after which a rank that waits warns, or a third of the limit if that is less
MUTE = 10.0  # after which a rank that writes nothing has ended or is stopped
FAREWELL = 5.0  # the most that a rank waits until the others have read what it leaves in the store, and for its thread
_START = "start"  # lets ranks start the collective; any other value is an error
_END = 1 << 62, 0  # a rank that ends has left every check
_LAG = 100  # collectives after which keys are deleted: nobody looks at those any more


def arrive(store: Store, key: str, size: int) -> str:
    """Count this rank; the last one of so many sets the key that others wait for, and returns it."""
    return store.compare_set(key, "", _START).decode() if store.add(f"{key}/count", 1) == size else ""


@dataclass
class Wait:
    """The wait of a rank for others: before a collective, or without ``ranks`` for a short time, until they know what it says.

    Whoever sets the ``key`` first decides: the last one that comes, or a rank that differs or has an error. So either all ranks
    start the collective, or none does.
    """

    key: str
    ranks: tuple[int, ...] = ()
    what: str = ""
    goal: str = ""  # what it waits for, with the line
    epoch: int = 0
    stale: str = ""  # a key of long ago, to be deleted
    check: int = 1  # the number of the check: a rank that has left it, or a later one, does not come
    begin: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)  # when this rank has looked last
    compiling: float = 0.0  # seconds in which a missing rank compiled
    beats: dict[int, tuple[str, float]] = field(default_factory=dict)  # the last one of each missing rank, and when it was new
    has_warned: bool = False

    def meet(self, store: Store, rank: int, where: str) -> str:
        """Wait until all ranks are about to start the collective; return an empty string, or an error if they differ."""
        first = store.compare_set(f"{self.key}/first", "", f"{rank}\n{self.what}\n{self.goal}").decode()
        other, what, goal = first.split("\n", 2)
        if int(other) == rank and self.stale:  # it waits anyway
            for name in ("", "/first", "/count"):
                store.delete_key(self.stale + name)
        if what != self.what:
            each = "; ".join(f"rank {number} {text}" for number, text in sorted([(int(other), goal), (rank, self.goal)]))
            answer = self.decide(store, f"fs.check: ranks disagree on {where}. Each was about to start: {each}")
        else:
            answer = arrive(store, self.key, len(self.ranks)) or store.get(self.key).decode()
        return "" if answer == _START else answer

    def decide(self, store: Store, error: str) -> str:
        """Say what is wrong, if anything, unless some rank has decided before; return what was decided."""
        return store.compare_set(self.key, "", error).decode() if error else ""

    def find_missing(self, store: Store, rank: int, limit: float) -> str:
        """Return an error that a rank has reported, or that of ranks that do not come; warn of slow ones."""
        now = time.monotonic()
        if not self.ranks:
            return "late" if now - self.begin > FAREWELL else ""
        if error := _read(store, f"{self.epoch}/error", ""):
            return error
        step, self.seen = now - self.seen, now
        begin, goal = f"fs.check: rank {rank} has waited", f"to start {self.goal}"
        is_compiling, is_mute, places = False, False, []
        for other in self.ranks:
            where = _read(store, f"where/{other}", "\n\n-1 0\n\nhas not entered fs.check()")
            beat, compiles, left, waits_for, doing = where.split("\n", 4)
            if waits_for == self.key or other == rank:
                continue
            if tuple(map(int, left.split())) >= (self.epoch, self.check):
                return f"{begin} {goal}, and rank {other} does not come: it {doing}"
            if other not in self.beats or self.beats[other][0] != beat:
                self.beats[other] = beat, now
            is_compiling |= compiles == "1"
            if beat and now - self.beats[other][1] > MUTE:
                is_mute, doing = True, f"does not answer: it has ended or is stopped; its last answer: it {doing}"
            places.append(f"rank {other}, which {doing}")
        self.compiling += step * is_compiling
        if not places or now - self.begin < min(SLOW, limit / 3):
            return ""
        text = f"{begin} {now - self.begin:.0f} s {goal} for {'; '.join(places)}"
        if now - self.begin - self.compiling > limit:
            return f"{text}. The limit is fs.check(timeout={limit:g})"
        if not is_mute and not self.has_warned:
            self.has_warned = True
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=1)
            except RuntimeWarning:  # a filter makes errors of warnings, which nobody would see in this thread
                print(text, file=sys.stderr, flush=True)
        return text if is_mute else ""


def _read(store: Store, key: str, default: str) -> str:
    return store.get(key).decode() if store.check([key]) else default


class Monitor:
    """The check's connection of this process to the other ranks of the default process group.

    The last one of ``timeouts`` is the limit of the innermost check.
    """

    def __init__(self, world: dist.ProcessGroup, timeouts: Sequence[float]) -> None:
        self.world, self._timeouts = weakref.ref(world), timeouts
        self.rank, self.ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        self.check = 0  # the number of checks that this process has entered
        self.left = -1, 0  # the epoch and number of the last check whose collectives it does not come to any more
        self._beat, self._heard = 0, -1  # the number of what it has published, and the epoch of the last error heard of
        self._epoch = 0  # the number of errors before: each has keys of its own
        self._error = -1, ""  # the last one that this rank has heard of or reported, with its epoch
        self._numbers: dict[tuple[int, ...], int] = {}  # of collectives that some ranks have compared
        self._by_name: dict[str, tuple[int, ...]] = {}
        self._wait: Wait | None = None
        self._store, self._side_store = (_torch.connect_store("funshard/check", timedelta(days=7)) for _ in range(2))
        self._stopped = threading.Event()
        self._publish(self._store)
        self._thread = threading.Thread(target=self._look_around, name="funshard.check", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str:
        """The error of this epoch, which is raised at the next collective, too."""
        epoch, text = self._error
        return text if epoch == self._epoch else ""

    def ranks_of(self, group: str | Sequence[int]) -> tuple[int, ...]:
        """Return the global ranks of a process group, () if there is nobody to compare with."""
        if not isinstance(group, str):
            return tuple(group)
        if group not in self._by_name:
            ranks = dist.get_process_group_ranks(_torch.resolve_group(group)) if is_comparable(group) else ()
            self._by_name[group] = tuple(ranks)
        return self._by_name[group]

    def compare(self, what: str, ranks: tuple[int, ...], line: str, *, is_end: bool = False) -> None:
        """Wait until all of these ranks are about to start the same collective; raise RankError if they are not."""
        if self.error:
            raise RankError(self.error)
        number = self._numbers[ranks] = self._numbers.get(ranks, 0) + 1
        prefix = f"{self._epoch}/{hashlib.blake2b(repr(ranks).encode(), digest_size=12).hexdigest()}"
        stale = f"{prefix}/{number - _LAG}" if number > _LAG else ""
        self._wait = wait = Wait(f"{prefix}/{number}", ranks, what, f"{what} ({line})", self._epoch, stale, self.check)
        if is_end:  # the wait is known first: at its end all ranks have left
            self.left = self._epoch, self.check
        try:
            error = wait.meet(self._store, self.rank, f"collective {number} of {_name_ranks(ranks)}")
        except RuntimeError as lost:
            text = f"fs.check: the store of the default process group has ended, with its process: {str(lost).splitlines()[0]}"
            error = self.error or text
        finally:
            self._wait = None
        if error:
            self._declare(error)
            raise RankError(self.error)

    def report(self, error: BaseException, trace: TracebackType | None) -> None:
        """Tell all ranks that this one has raised, if it is the first; wait for a short time until they know; begin anew."""
        if not self.error:
            first = (_torch.error_text(error).strip() or "no message").splitlines()[0][:500]
            line = _describe_line(reversed([*traceback.walk_tb(trace)])) or "no line of user code"
            self._declare(f"fs.check: rank {self.rank} raised {type(error).__name__}: {first} ({line})")
        self._wait_until_known(f"{self._epoch}/heard")
        self._epoch, self.check = self._epoch + 1, 0
        self._numbers.clear()

    def _declare(self, error: str) -> None:
        """Say that something is wrong, unless another rank has said it before, and keep what was said."""
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank: this rank hears of it alone
            error = self._store.compare_set(f"{self._epoch}/error", "", error).decode()
        self._error = self._epoch, error

    def compare_end(self, line: str) -> None:
        """Compare that all ranks have come to the end of the check, which this one then leaves."""
        self.compare(f"the end of fs.check(), block {self.check}", self.ranks, line, is_end=True)
        self._part(f"{self._epoch}/past/{self.check}")

    def _part(self, key: str) -> None:
        """Have the first rank, with which the store may end, wait until all know what they have compared."""
        with contextlib.suppress(RuntimeError):
            arrive(self._store, key, len(self.ranks))
        if self.rank == 0:
            self._wait_until_known(key)

    def _wait_until_known(self, key: str) -> None:
        self._wait = Wait(key)
        with contextlib.suppress(RuntimeError):
            self._store.get(key)
        self._wait = None

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(FAREWELL)  # a thread that is left in a call of the store aborts an interpreter that ends

    def end_process(self) -> None:
        """Say that this process ends, and end the thread."""
        if self.world() is not None and self._thread.is_alive():  # else the store may be gone, which torch reports at length
            self.left = _END
            with contextlib.suppress(RuntimeError):
                self._publish(self._store)
            self._part("ended")
        self.stop()

    def _look_around(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            while not self._stopped.wait(TICK) and self.world() is not None:
                self._publish(self._side_store)
                if wait := self._wait:
                    wait.decide(self._side_store, wait.find_missing(self._side_store, self.rank, self._timeouts[-1]))

    def _publish(self, store: Store) -> None:
        """Write where this rank is, and that it has heard of a new error."""
        epoch, left, wait = self._epoch, self.left, self._wait
        self._beat += 1
        frames = [*_walk(_main_frame())]
        is_compiling = wait is None and any(is_compiler_file(frame.f_code.co_filename) for frame, _ in frames)
        doing = f"{'compiles' if is_compiling else 'is'} at {_describe_line(frames) or 'no line of user code'}"
        doing = "has ended" if left == _END else f"waits to start {wait.goal}" if wait and wait.goal else doing
        key = wait.key if wait else ""
        store.set(f"where/{self.rank}", f"{self._beat}\n{int(is_compiling)}\n{left[0]} {left[1]}\n{key}\n{doing}")
        if self._heard < epoch and (error := _read(store, f"{epoch}/error", "")):
            self._error, self._heard = (epoch, error), epoch
            arrive(store, f"{epoch}/heard", len(self.ranks))


# --- `check` ---

VARIABLE = "FUNSHARD_CHECK"
TIMEOUT = 300.0
_NAMES = {
    "gather_mean": "all-gather", "gather_sum": "all-gather", "scatter_mean": "reduce-scatter (mean)",
    "scatter_sum": "reduce-scatter (sum)", "reduce_mean": "all-reduce (mean)", "reduce_sum": "all-reduce (sum)",
    "unvary_mean": "all-reduce (mean)", "unvary_sum": "all-reduce (sum)", "shards_to_sum": "all-reduce",
    "sum_to_shards": "all-reduce", "sum_to": "reduce", "all_to_all": "all-to-all",
}  # fmt: skip
"""The names of ops as torch calls the collective."""


class _State:
    """The check in this process: the limits of the blocks around what runs, and the connection to the other ranks."""

    def __init__(self) -> None:
        self.timeouts = [TIMEOUT]
        self.monitor: Monitor | None = None
        self.of_parent: Monitor | None = None  # in a forked child, which shares its connections

    def leave_to_parent(self) -> None:
        """Have a forked child say nothing to the other ranks, however it ends: it is no rank."""
        self.of_parent, self.monitor = self.monitor, None

    def find_monitor(self) -> Monitor | None:
        """Return the monitor of the default process group, None without one."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return None
        world = dist.group.WORLD
        assert world is not None
        if self.monitor is None or self.monitor.world() is not world:
            if dist.get_backend() == "fake":
                return None
            if self.monitor is not None:
                self.monitor.stop()
            try:
                self.monitor = Monitor(world, self.timeouts)
            except RuntimeError as error:
                raise RuntimeError(
                    f"fs.check: the store of the default process group gives no connection: {error}; expected one that "
                    "all ranks can reach, such as the TCPStore of torchrun"
                ) from error
        return self.monitor


_state = _State()
os.register_at_fork(after_in_child=_state.leave_to_parent)
atexit.register(lambda: _state.monitor and _state.monitor.end_process())


def _compare_on_ranks(op: str, group: str | Sequence[int], label: str, sent: Tensor | None, dtype: torch.dtype | None) -> None:
    if _torch.is_tracing() or (sent is not None and _torch.is_fake(sent)):
        return
    monitor = _state.find_monitor()
    if monitor is None or len(ranks := monitor.ranks_of(group)) < 2:
        return
    size = "" if sent is None else f" of {sent.numel():,} x {str(dtype or sent.dtype).removeprefix('torch.')}"
    monitor.compare(f"{_NAMES.get(op, op)}{size}{label and ', ' + label}", ranks, _find_user_line())


@contextlib.contextmanager
def check(timeout: float = TIMEOUT) -> Generator[None]:
    """Have ranks compare every collective before it starts, and stop together where one differs, raises or is missing.

    All ranks of the default process group enter it, around a step or a whole run; ``FUNSHARD_CHECK=1`` in the environment
    checks the whole process. Ranks compare the operation, unit, axis, dtype, size and number of each collective of funshard,
    over the store of the process group. A rank that only is slow gets a warning. See ``debugging.md``.

    The collectives in a graph of `fs.compile` are compared together, when the graph starts. Simulated ranks, fake tensors and
    a process without other ranks have nothing to compare. A check within another one only changes the limit.

    Args:
        timeout: Seconds to wait for a missing rank. The time in which it compiles does not count.

    Returns:
        A context manager, which is also a decorator.

    Raises:
        RuntimeError: On every rank: if ranks are about to start different collectives, with what each was about to start and
            the line of user code; if another rank raises, with its message; if a rank does not come within the limit or leaves
            the block earlier, with its name and where it is.
        ValueError: If the limit is not positive.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> spec = fs.policies.whole()(model)
        >>> params = fs.shard(model, spec)
        >>> with fs.check(timeout=60):
        ...     loss = fs.functional_call(model, params, (torch.ones(2),), spec=spec)
    """
    if not timeout > 0:
        raise ValueError(f"fs.check: timeout: expected a positive number of seconds, got {timeout!r}")
    is_outermost = len(_state.timeouts) == 1
    _state.timeouts.append(timeout)
    listen(_compare_on_ranks)
    try:
        if is_outermost and (monitor := _state.find_monitor()) is not None:
            monitor.check += 1
        yield
        if is_outermost and (monitor := _state.monitor) is not None and _state.find_monitor() is monitor:
            monitor.compare_end(_find_user_line())
    except BaseException as error:
        if is_outermost and _state.monitor is not None:
            _state.monitor.report(error, error.__traceback__)
        raise
    finally:
        _state.timeouts.pop()
        if len(_state.timeouts) == 1:
            listen(None)


def _start_from_environment() -> None:
    """Turn the check on for the whole process if ``FUNSHARD_CHECK=1``; raise ValueError unless the variable is 0 or 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0 or 1, got {value!r}")
    if value != "1":
        return
    _state.timeouts.append(TIMEOUT)  # as in a block without an end
    listen(_compare_on_ranks)
    show = sys.excepthook

    def report_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if _state.monitor is not None and not isinstance(error, RankError):
            _state.monitor.report(error, trace)
        return show(kind, error, trace)

    sys.excepthook = report_and_show


_start_from_environment()
