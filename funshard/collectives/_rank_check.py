"""The check around a step: ranks compare every collective before it starts, and hear of each other's errors."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.announce import RankError, listen
from ._rank_monitor import Monitor, find_error_line, find_user_line

__all__ = ["check"]


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
        self.is_always = False  # by the environment
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
                    f"fs.check: the store of the default process group gives no second connection: {error}; expected one that "
                    "all ranks can reach, such as the TCPStore of torchrun"
                ) from error
        return self.monitor


_state = _State()
os.register_at_fork(after_in_child=_state.leave_to_parent)


def _compare_on_ranks(op: str, group: str | Sequence[int], label: str, sent: Tensor | None, dtype: torch.dtype | None) -> None:
    """Compare a collective with the other ranks' before it starts."""
    if _torch.is_traced() or (sent is not None and _torch.is_fake(sent)):
        return
    monitor = _state.find_monitor()
    if monitor is None or len(ranks := monitor.ranks_of(group)) < 2:
        return
    size = "" if sent is None else f" of {sent.numel():,} x {str(dtype or sent.dtype).removeprefix('torch.')}"
    monitor.compare(f"{_NAMES.get(op, op)}{size}{label and ', ' + label}", ranks, find_user_line())


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
        if is_outermost and (monitor := _state.monitor) is not None:
            line = find_user_line()
            monitor.leave(f"left fs.check() ({line})")
            if _state.find_monitor() is monitor:
                monitor.compare_end(line)
    except BaseException as error:
        if is_outermost:
            _report(error, error.__traceback__)
        raise
    finally:
        _state.timeouts.pop()
        if len(_state.timeouts) == 1 and not _state.is_always:
            listen(None)


def _report(error: BaseException, traceback: TracebackType | None) -> None:
    """Tell the other ranks of an error, and be ready for another check."""
    if (monitor := _state.monitor) is not None:
        first = (_torch.error_text(error).strip() or "no message").splitlines()[0][:500]
        monitor.report(f"fs.check: rank {monitor.rank} raised {type(error).__name__}: {first} ({find_error_line(traceback)})")


def _start_from_environment() -> None:
    """Turn the check on for the whole process if ``FUNSHARD_CHECK=1``.

    Raises:
        ValueError: If the variable is something else than 0 or 1.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0 or 1, got {value!r}")
    if value != "1":
        return
    _state.is_always = True
    listen(_compare_on_ranks)
    show = sys.excepthook

    def report_and_show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        if not isinstance(error, RankError):
            _report(error, traceback)
        return show(kind, error, traceback)

    sys.excepthook = report_and_show


@atexit.register
def _stop() -> None:
    """End the monitor with the process."""
    if _state.monitor is not None:
        _state.monitor.end_process()


_start_from_environment()
