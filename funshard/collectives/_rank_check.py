"""The check around a step: ranks compare every collective before it starts, and hear of each other's errors.

A rank waits for a key in the store of the process group, and looks twice a second whether a rank has reported an error, or is
missing: one that compiles is waited for; one that has left the check, has ended, or does not come within the limit is an error.
A thread beside it writes as often where this rank is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Generator, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.ops import RankError, listen
from .._core.spec import abridge
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


def _describe_line(lines: Iterable[tuple[CodeType, int]], otherwise: str = "no line of user code") -> str:
    """Return the first of these lines that is a user's as "file:number in function: source"."""
    for code, number in lines:
        if _is_user_file(name := code.co_filename):
            source = linecache.getline(name, number).strip()
            return f"{name}:{number} in {getattr(code, 'co_qualname', code.co_name)}" + (f": {source}" if source else "")
    return otherwise


def _walk(frame: FrameType | None) -> Generator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno  # not the frame: who holds that keeps its tensors
        frame = frame.f_back


def _main_lines() -> list[tuple[CodeType, int]]:
    return [*_walk(sys._current_frames().get(threading.main_thread().ident or 0))]


def _find_user_line() -> str:
    """Return the line that this thread runs for the user, or the main thread: threads of autograd have no user code below."""
    return _describe_line(_walk(sys._getframe(1)), "") or _describe_line(_main_lines())


# --- One process's part in the check ---

TICK = 0.5  # seconds between two looks at other ranks
FAREWELL = 5.0  # the most that a rank waits until the others have read what it leaves in the store, and for its thread
_START = "start"  # lets ranks start the collective; any other value is an error
_END = 1 << 62, 0  # a rank that ends has left every check
_LAG = 100  # collectives after which keys are deleted: nobody looks at those any more


def meet(store: Store, key: str, value: Sequence[object], size: int) -> list[Any]:
    """Return the value of the first rank that comes here; set the key if all of so many have come with that value.

    Whoever sets the key first decides, also a rank with an error: either all ranks start the collective, or none does.
    """
    first = json.loads(store.compare_set(f"{key}/first", "", json.dumps(value)))
    if first[1:2] == [*value[1:2]] and store.add(f"{key}/count", 1) == size:
        decide(store, key, _START)
    return first


def decide(store: Store, key: str, answer: str) -> str:
    """Set a key that ranks wait for, unless some rank has done so before; return what was decided."""
    return store.compare_set(key, "", answer).decode()


def _read(store: Store, key: str, default: str) -> str:
    return store.get(key).decode() if store.check([key]) else default


def _poll(store: Store, key: str) -> Generator[float]:
    """Yield the time now and then until a key is set."""
    pause = 1e-4
    while not store.check([key]):
        yield time.monotonic()
        time.sleep(pause)
        pause = min(1.5 * pause, TICK / 10)


class Monitor:
    """The check's connection of this process to the other ranks of the default process group.

    The last one of ``timeouts`` is the limit of the innermost check.
    """

    def __init__(self, world: dist.ProcessGroup, timeouts: Sequence[float]) -> None:
        self.world, self._timeouts = weakref.ref(world), timeouts
        self.rank, self.ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        self.check = 0  # the number of checks that this process has entered
        self.left = -1, 0  # the epoch and number of the last check whose collectives it does not come to any more
        self._heard = -1  # the epoch of the last error that it has heard of
        self._epoch = 0  # the number of errors before: each has keys of its own
        self._error = -1, ""  # the last one that this rank has heard of or reported, with its epoch
        self._numbers: dict[tuple[int, ...], int] = {}  # of collectives that some ranks have compared
        self._by_name: dict[str, tuple[int, ...]] = {}
        self._waits_for = "", ""  # the key, and what is to start, with the line
        self._store = _torch.connect_store("funshard/check", timedelta(days=7))
        self._stopped = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._publish_often, name="funshard.check", daemon=True)
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
        key, goal = f"{prefix}/{number}", f"{what} ({line})"
        self._waits_for = key, goal
        if is_end:  # the wait is known first: at its end all ranks have left
            self.left = self._epoch, self.check
        try:
            rank, other, its_goal = meet(self._store, key, [self.rank, what, goal], len(ranks))
            if rank == self.rank and number > _LAG:
                for name in ("", "/first", "/count"):
                    self._store.delete_key(f"{prefix}/{number - _LAG}{name}")
            if other != what:
                each = "; ".join(f"rank {at} {text}" for at, text in sorted([(rank, its_goal), (self.rank, goal)]))
                where = f"collective {number} of ranks {abridge(ranks)}"
                decide(self._store, key, f"fs.check: ranks disagree on {where}. Each was about to start: {each}")
            error = self._wait(key, goal, ranks)
        except RuntimeError as lost:
            text = f"fs.check: the store of the default process group has ended, with its process: {str(lost).splitlines()[0]}"
            error = self.error or text
        finally:
            self._waits_for = "", ""
        if error != _START:
            self._declare(error)
            raise RankError(self.error)

    def _wait(self, key: str, goal: str, ranks: tuple[int, ...]) -> str:
        """Return what was decided, once it is; or decide that ranks are missing."""
        begin = looked = time.monotonic()
        for now in _poll(self._store, key):
            if now - looked > TICK:
                looked = now
                error, compiles = self._find_missing(key, goal, ranks, now - begin)
                if error := _read(self._store, f"{self._epoch}/error", error):
                    return decide(self._store, key, error)
                begin = now if compiles else begin
        return self._store.get(key).decode()

    def _find_missing(self, key: str, goal: str, ranks: tuple[int, ...], seconds: float) -> tuple[str, bool]:
        """Return the error of ranks that do not come, empty if they may, and whether one of them compiles."""
        places: list[str] = []
        is_compiling, begin = False, f"fs.check: rank {self.rank} has waited"
        for other in ranks:
            where = _read(self._store, f"where/{other}", '[false, [-1, 0], "", "has not entered fs.check()"]')
            compiles, left, waits_for, doing = json.loads(where)
            if waits_for == key or other == self.rank:
                continue
            if tuple(left) >= (self._epoch, self.check):
                return f"{begin} to start {goal}, and rank {other} does not come: it {doing}", False
            is_compiling |= compiles
            places.append(f"rank {other}, which {doing}")
        limit = self._timeouts[-1]
        if not places or seconds < limit or is_compiling:
            return "", is_compiling
        text = f"{begin} {seconds:.0f} s to start {goal} for {'; '.join(places)}"
        return f"{text}. The limit is fs.check(timeout={limit:g})", False

    def report(self, error: BaseException, trace: TracebackType | None) -> None:
        """Tell all ranks that this one has raised, if it is the first; wait for a short time until they know; begin anew."""
        if not self.error:
            first = (_torch.error_text(error).strip() or "no message").splitlines()[0][:500]
            line = _describe_line(reversed([(frame.f_code, number) for frame, number in traceback.walk_tb(trace)]))
            self._declare(f"fs.check: rank {self.rank} raised {type(error).__name__}: {first} ({line})")
        self._wait_for_all(f"{self._epoch}/heard")
        self._epoch, self.check = self._epoch + 1, 0
        self._numbers.clear()

    def _declare(self, error: str) -> None:
        """Say that something is wrong, unless another rank has said it before, and keep what was said."""
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank: this rank hears of it alone
            error = decide(self._store, f"{self._epoch}/error", error)
        self._error = self._epoch, error

    def compare_end(self, line: str) -> None:
        """Compare that all ranks have come to the end of the check, which this one then leaves."""
        self.compare(f"the end of fs.check(), block {self.check}", self.ranks, line, is_end=True)
        self._part(f"{self._epoch}/past/{self.check}")

    def _part(self, key: str) -> None:
        """Have the first rank, with which the store may end, wait until all know what they have compared."""
        with contextlib.suppress(RuntimeError):
            meet(self._store, key, [], len(self.ranks))
        if self.rank == 0:
            self._wait_for_all(key)

    def _wait_for_all(self, key: str) -> None:
        begin = time.monotonic()
        with contextlib.suppress(RuntimeError):
            for now in _poll(self._store, key):
                if now - begin > FAREWELL:
                    break

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(FAREWELL)  # a thread that is left in a call of the store aborts an interpreter that ends

    def end_process(self) -> None:
        """Say that this process ends, and end the thread."""
        if self.world() is not None and self._thread.is_alive():  # else the store may be gone, which torch reports at length
            self.left = _END
            with contextlib.suppress(RuntimeError):
                self._publish()
            self._part("ended")
        self.stop()

    def _publish_often(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            while not self._stopped.wait(TICK) and self.world() is not None:
                self._publish()

    def _publish(self) -> None:
        """Write where this rank is, and that it has heard of a new error."""
        epoch, left, (key, goal) = self._epoch, self.left, self._waits_for
        lines = _main_lines()
        is_compiling = not key and any(is_compiler_file(code.co_filename) for code, _ in lines)
        doing = f"{'compiles' if is_compiling else 'is'} at {_describe_line(lines)}"
        doing = "has ended" if left == _END else f"waits to start {goal}" if key else doing
        self._store.set(f"where/{self.rank}", json.dumps([is_compiling, left, key, doing]))
        if self._heard < epoch and (error := _read(self._store, f"{epoch}/error", "")):
            self._error, self._heard = (epoch, error), epoch
            meet(self._store, f"{epoch}/heard", [], len(self.ranks))


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
    over the store of the process group. See ``debugging.md``.

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
