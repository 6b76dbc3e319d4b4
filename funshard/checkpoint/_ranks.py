"""All ranks of a mesh: they exchange values through the store of the process group, and raise the error of one on all."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from .. import _torch
from .._core.layout import rank_along, rank_coords
from .._core.mesh import ProcessAxis, check_spans_world, process_axes
from .._core.ops import announce
from .._core.spec import PartitionSpec
from ..collectives._agree import check_ranks_agree, hash_spec
from ._directory import CheckpointError, SavedError

T = TypeVar("T")
M = TypeVar("M")
A = TypeVar("A")

# --- Values of ranks in the store ---

GRACE = 2.0
"""Seconds that a wait has to report its failure after the time limit."""
FAREWELL = 5.0
"""The most seconds that the first rank, with which the store may end, waits until the others have read its answer."""
MAX_PAUSE = 0.5
"""The most seconds between two looks at the store, which all ranks ask while the slowest one writes; at first 2% of a wait."""
PIECE = 4 << 20
"""The bytes of a value in the store: torch's TCPStore takes at most 8 MiB."""


def exchange(prefix: str, rank: int, size: int, value: Any, decide: Callable[[list[Any]], A], timeout: float) -> A:
    """Return on all ranks what the first one decides on the values of all. Raises CheckpointError if one does not come in time.

    A rank sends its value under a name that it has just drawn, and is answered under it: what a failed call leaves in the store
    is no answer to the next one.
    """
    store, name, key = _torch.default_store(), uuid.uuid4().hex, f"{prefix}/{rank}"
    others = [f"{prefix}/{i}" for i in range(1, size)]

    def ask() -> A:
        _put(store, name, value)
        store.set(key, name)
        try:
            _poll(lambda: not store.check([name]), timeout)  # the first rank has taken it
        except RuntimeError:
            store.compare_set(key, name, "")  # the first rank, if late, then waits for this rank's next call
            raise
        _poll(lambda: store.check([f"{name}/answer"]), timeout)
        return _take(store, f"{name}/answer")

    def collect() -> dict[str, Any]:
        _poll(lambda: store.check(others) and all(store.multi_get(others)), timeout)
        names = [sender.decode() for sender in store.multi_get(others)]
        for sender in others:
            store.delete_key(sender)
        return {f"{sender}/answer": _take(store, sender) for sender in names}

    def answer(keys: list[str], decided: A) -> None:
        for key in keys:
            _put(store, key, decided)
        with contextlib.suppress(RuntimeError):
            _poll(lambda: not any(store.check([key]) for key in keys), FAREWELL)

    try:
        if rank:
            return _call_within(2 * timeout, ask)
        values = _call_within(timeout, collect) if others else {}
        decided = decide([value, *values.values()])
        _call_within(FAREWELL, lambda: answer([*values], decided))
        return decided
    except RuntimeError as error:
        raise CheckpointError(
            f"one of the {size} ranks was lost, or did not answer in time, while they agreed on a checkpoint: "
            f"{str(error).splitlines()[0]}; every rank has to call this, also where one file is written"
        ) from error


def _put(store: Any, key: str, value: Any) -> None:
    raw = pickle.dumps(value)
    pieces = [raw[at : at + PIECE] for at in range(0, len(raw), PIECE)]
    for i, piece in enumerate(pieces):
        store.set(f"{key}/{i}", piece)
    store.set(key, str(len(pieces)))


def _take(store: Any, key: str) -> Any:
    keys = [f"{key}/{i}" for i in range(int(store.get(key)))]
    value = pickle.loads(b"".join(map(store.get, keys)))
    for each in (*keys, key):
        store.delete_key(each)
    return value


def _poll(is_done: Callable[[], bool], timeout: float) -> None:
    """Wait without a lock on the store, which other threads use. Raises RuntimeError after the time limit."""
    begin = time.monotonic()
    while not is_done():
        if (waited := time.monotonic() - begin) > timeout:
            raise RuntimeError(f"nothing came within {timeout:g} s")
        time.sleep(min(5e-4 + waited / 50, MAX_PAUSE))


def _call_within(timeout: float, function: Callable[[], T]) -> T:
    """Return a function's result. A thread is left behind where the process that has the store is stopped."""
    future: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="funshard.checkpoint.exchange", daemon=True).start()
    try:
        return future.result(timeout + GRACE)
    except futures.TimeoutError:
        raise RuntimeError(f"the store of the process group did not answer within {timeout:g} s") from None


# --- The ranks of a mesh ---

TIMEOUT = 600.0
MAX_TIMEOUT = 1e9
"""The longest timeout in seconds, 30 years: threads wait for no longer one."""
MAX_SHOWN = 3
_FILE_ERRORS = (OSError, FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)
SHARED_ERRORS = {cls.__name__: cls for cls in (ValueError, TypeError, ImportError, MemoryError, SavedError, *_FILE_ERRORS)}
"""The classes of errors that all ranks raise as one rank raised them; other errors become a CheckpointError."""
DECISION = -1
"""In the place of a rank: an error of what the first rank decides on the values of all."""


class Ranks:
    """The ranks of a bound spec's mesh in row-major order, for one call of a function, whose name and options all have alike.

    Its keys in the store have a name of their own. A lost rank is an error on the others after ``timeout``, and one that never
    calls after twice that time. Raises ValueError on simulated ranks, on sizes without groups, within a transform, if specs,
    functions or options of ranks differ, and for a mesh of only some ranks of the process group that does not say so.
    """

    def __init__(self, spec: PartitionSpec, where: str, timeout: float, **options: object) -> None:
        if not 0 < timeout <= MAX_TIMEOUT:
            raise ValueError(
                f"{where}: timeout: expected a positive number of seconds, at most {MAX_TIMEOUT:g}, got {timeout!r}"
            )
        mesh = spec.bound_mesh
        is_connected = all(isinstance(axis, ProcessAxis) and axis.rank is not None for _, axis in mesh.axes)
        if not is_connected or not _torch.is_eager():
            raise ValueError(f"{where}: expected process groups, outside of transforms: simulated ranks are one process")
        check_spans_world(mesh, where)
        self.rank, self.size = rank_along(mesh.names, mesh, rank_coords(mesh, None))
        self._timeout, self._world = timeout, weakref.ref(dist.group.WORLD) if self.size > 1 else None
        rows = [({"function": where, **options}, hash_spec(spec), uuid.uuid4().hex)]
        for axis in reversed(process_axes(mesh).values()):
            announce("exchange through the store", axis.name, "for a checkpoint")
            # twice the time: a rank may be one timeout late that an earlier failure kept waiting
            found = exchange(f"funshard/checkpoint/{axis.name}", axis.rank or 0, axis.size, rows, list, 2 * timeout)
            rows = [row for some in found for row in some]
        calls, digests, names = zip(*rows, strict=True)
        for name, first in calls[0].items():
            if other := next((rank for rank, each in enumerate(calls) if each.get(name) != first), 0):
                got = f"got on rank 0 {first!r}, on rank {other} {calls[other].get(name)!r}"
                raise ValueError(f"{calls[0]['function']}: expected one {name} on all ranks, {got}")
        if any(digest != digests[0] for digest in digests):
            check_ranks_agree(spec)
        self.name = names[0][:12]
        """A name that this call alone has, on all ranks."""

    def run(self, function: Callable[[], T], where: str) -> T:
        """Return the function's result on this rank. If it raises on any rank, all ranks raise an error that names the rank."""
        return self.decide(lambda: (function(), None), lambda _: None, where)[0]

    def run_on_first(self, function: Callable[[], T], where: str) -> T:
        """Return on all ranks the result of a function that only the first runs. Its error is raised on all ranks."""
        return self.decide(lambda: (None, function() if self.rank == 0 else None), lambda values: values[0], where)[1]  # pyright: ignore[reportReturnType]

    def decide(self, function: Callable[[], tuple[T, M]], decide: Callable[[list[M]], A], where: str) -> tuple[T, A]:
        """Return the first part of a function's result, and what the first rank decides on the second parts of all.

        The error of one rank is raised on all.
        """
        result: Any = (None, None)
        error: Exception | None = None
        try:
            result = function()
        except Exception as raised:
            error = raised

        def decide_unless_error(every: list[Any]) -> tuple[dict[int, tuple[str, str]], Any]:
            nonlocal error
            if errors := {rank: text for rank, (text, _) in enumerate(every) if text is not None}:
                return errors, None
            try:
                return {}, decide([value for _, value in every])
            except Exception as raised:
                error = raised
                return {DECISION: _error_text(raised)}, None

        own = error and _error_text(error), result[1]
        if self._world is None:
            errors, decided = decide_unless_error([own])
        elif (world := self._world()) is None or world is not dist.group.WORLD:
            raise CheckpointError(
                "the process groups were destroyed before the checkpoint was complete: call wait() of what save has returned "
                "before torch.distributed.destroy_process_group"
            )
        else:
            errors, decided = exchange(
                f"funshard/checkpoint/{self.name}", self.rank, self.size, own, decide_unless_error, self._timeout
            )
        if errors:
            self._raise_errors(errors, where, error)
        return result[0], decided

    def _raise_errors(self, errors: dict[int, tuple[str, str]], where: str, own: Exception | None) -> NoReturn:
        kind = next(iter(errors.values()))[0]
        if own is not None and {*errors.values()} == {_error_text(own)} and len(errors) == self.size:
            raise own
        ranks = [text if rank == DECISION else f"rank {rank}: {text}" for rank, (_, text) in errors.items()]
        more = f" (and {len(errors) - MAX_SHOWN} more ranks)" if len(errors) > MAX_SHOWN else ""
        where = where.partition(":")[0] if kind == SavedError.__name__ else where
        raise SHARED_ERRORS.get(kind, CheckpointError)(f"{where}: {'; '.join(ranks[:MAX_SHOWN])}{more}") from own


def _error_text(error: Exception) -> tuple[str, str]:
    return type(error).__name__, _torch.error_text(error)
