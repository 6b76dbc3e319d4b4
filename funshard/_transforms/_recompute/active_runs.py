"""The runs of selective recomputation that are active in this thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from .value_numbering import ValueNumbering

__all__ = ["activate", "active_runs", "leave_finished_runs", "number_views", "run_unrecorded"]

Args = ParamSpec("Args")
Result = TypeVar("Result")

_THREAD = threading.local()
"""``runs``: the runs that are numbered in this thread, the innermost last."""


def active_runs() -> tuple[ValueNumbering, ...]:
    """Return the runs that are numbered now, the innermost last."""
    return getattr(_THREAD, "runs", ())


def leave_finished_runs() -> None:
    """Leave the modes of runs that need no more operators, because an active mode slows each operator down."""
    for run in reversed(active_runs()):
        run.leave_if_done()


def run_unrecorded(f: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Call ``f`` without saving or reusing results: it gathers parameters, which all ranks must do together."""
    before = [(run, run.paused) for run in active_runs()]
    for run, _ in before:
        run.paused = True
    try:
        return f(*args, **kwargs)
    finally:
        for run, paused in before:
            run.paused = paused


def number_views(tensors: Sequence[Tensor], key: str, source: Tensor | None) -> Sequence[Tensor]:
    """Return the tensors, numbered in the active runs as views of the unit ``key`` whose shard is ``source``."""
    for run in active_runs():
        if source is not None:
            run.number_views(tensors, key, source)
    return tensors


@contextlib.contextmanager
def activate(run: ValueNumbering) -> Generator[None]:
    """Make a run active within this context; it may leave its mode before the end."""
    before = active_runs()
    _THREAD.runs = (*before, run)
    try:
        with run:
            yield
    finally:
        _THREAD.runs = before
