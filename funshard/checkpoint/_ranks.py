"""All ranks of a mesh, over a process group of their own: an error on one rank is raised on all."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist

from .. import _torch
from .._core.mesh import Mesh, ProcessAxis
from .._core.ops import announce
from .._core.spec import PartitionSpec
from ..collectives._agree import HostGroup, check_ranks_agree, hash_spec, host_groups
from ..collectives._world import check_spans_world, has_peers
from ._files import CheckpointError, SavedError

# --- Exchange a few bytes between all ranks of a process group, through its store, within a time limit ---

GRACE = 2.0
"""Seconds that an exchange has to report its failure after the time limit."""


def exchange_through_store(value: str, group: str, rank: int, size: int, timeout: timedelta) -> list[str]:
    """Return the value of every rank of a process group. Raises RuntimeError if a rank did not call this in time.

    The function starts no collective, which would wait for a missing rank longer than ``timeout``. The first rank collects the
    values and answers each rank under a name that this rank has just drawn. So a call that has failed on some ranks leaves
    nothing that the next call could take for an answer. Groups have different names.
    """
    announce("exchange through the store", group, "for a checkpoint")
    future: Future[list[str]] = Future()

    def run() -> None:
        try:
            future.set_result(_run_exchange(value, group, rank, size, timeout))
        except BaseException as error:
            future.set_exception(error)

    # a thread can be left behind: the store's own time limit does not end a wait for a stopped process that has the store
    threading.Thread(target=run, name="funshard.checkpoint.exchange", daemon=True).start()
    try:
        return future.result(timeout.total_seconds() + GRACE)
    except TimeoutError:
        text = f"the store of the process group did not answer within {timeout.total_seconds():g} s"
        raise RuntimeError(text) from None


def _run_exchange(value: str, group: str, rank: int, size: int, timeout: timedelta) -> list[str]:
    store, prefix, name = _torch.default_store(), f"funshard/checkpoint/{group}", uuid.uuid4().hex
    requests, answer = [f"{prefix}/from/{i}" for i in range(size)], f"{prefix}/to/{name}"
    own = json.dumps([name, value])
    store.set(requests[rank], own)
    try:
        if rank == 0:
            names, values = zip(*map(json.loads, _collect(store, requests, timeout)), strict=True)
            for each in names:
                store.set(f"{prefix}/to/{each}", json.dumps(values))
        store.wait([answer], timeout)
    except RuntimeError:
        store.compare_set(requests[rank], own, "")  # a late rank then waits for this rank's next call
        raise
    values = json.loads(store.get(answer))
    store.delete_key(answer)
    return values


def _collect(store: Any, keys: list[str], timeout: timedelta) -> list[bytes]:
    """Wait until no key has an empty value, return the values, and set all keys to empty ones."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        store.wait(keys, timedelta(seconds=max(0.001, end - time.monotonic())))
        if all(found := store.multi_get(keys)):
            break
        if time.monotonic() > end:
            raise RuntimeError(f"{sum(not value for value in found)} of {len(keys)} ranks did not come")
        time.sleep(0.005)
    for key in keys:
        store.set(key, "")
    return found


# --- The ranks of a mesh ---

TIMEOUT = 600.0
MAX_TIMEOUT = 1e9
"""The longest timeout in seconds, 30 years: threads and gloo wait for no longer one."""
MAX_SHOWN = 3
_FILE_ERRORS = (OSError, FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)
SHARED_ERRORS = {cls.__name__: cls for cls in (ValueError, TypeError, ImportError, MemoryError, SavedError, *_FILE_ERRORS)}
"""The classes of errors that all ranks raise as one rank raised them; other errors become a CheckpointError."""

T = TypeVar("T")
M = TypeVar("M")


class Ranks:
    """The ranks of a mesh in its row-major order. ``group`` is None if there is only one.

    They have a gloo group of their own, so that their messages do not come between the collectives of training. One that a
    thread in the background may use has another one. A lost rank is an error on the others after ``timeout``, and one that
    never calls after twice that time.
    """

    _last: ClassVar[int] = 0
    """The number of the last group that this process began to make: larger than those of all earlier groups of its members."""
    _numbers: ClassVar[dict[object, int]] = {}
    """The number of each key's group. A group is named by it: a failed attempt leaves its addresses under its name."""

    def __init__(self, spec: PartitionSpec, timeout: timedelta, call: Mapping[str, Any], *, in_background: bool) -> None:
        mesh = spec.bound_mesh
        self.rank, self.size = 0, 1
        self._group_ref: weakref.ref[HostGroup] | None = None
        if not has_peers(mesh):
            return
        self.size = math.prod(size for _, size in mesh.sizes)
        groups, key = host_groups(), ("checkpoint", tuple(axis for _, axis in mesh.axes), timeout, in_background)
        own = self._numbers[key] if key in groups else -1
        digest = hash_spec(spec)
        with self._explain_lost_rank():  # twice the time: a rank may be one timeout late that an earlier failure kept waiting
            rows = _gather_rows([dist.get_rank(), self._last, own, call, digest], mesh, 2 * timeout)
            members, lasts, numbers, calls, digests = map(list, zip(*rows, strict=True))
            _check_calls(calls)
            if any(other != digest for other in digests):
                check_ranks_agree(spec)
            self.rank = members.index(dist.get_rank())
            if own < 0 or any(number != own for number in numbers):  # one rank has no group, or another one
                Ranks._last = self._numbers[key] = 1 + max(lasts)
                name = f"checkpoint/{in_background=}/{self._last}"
                groups[key] = HostGroup(members, name, timeout, is_announced=not in_background)
        self._group_ref = weakref.ref(groups[key])

    @property
    def group(self) -> HostGroup | None:
        """The process group. Raises CheckpointError after it was destroyed."""
        if self._group_ref is None:
            return None
        if (group := self._group_ref()) is None:
            raise CheckpointError(
                "the process groups were destroyed before the checkpoint was complete: call wait() of what save has returned "
                "before torch.distributed.destroy_process_group"
            )
        return group

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, on every rank."""
        return self._exchange("all_gather_object", value, [value])

    def _exchange(self, method: str, value: Any, alone: Any) -> Any:
        if (group := self.group) is None:
            return alone
        with self._explain_lost_rank():
            return getattr(group, method)(value)

    def run(self, function: Callable[[], T], where: str) -> T:
        """Return the function's result on this rank. If it raises on any rank, all ranks raise an error that names the rank."""
        return self.run_and_exchange(function, where, lambda value: None)[0]

    def run_on_first(self, function: Callable[[], T], where: str) -> T:
        """Return on all ranks the result of a function that only the first runs. Its error is raised on all ranks."""
        return self.run_and_exchange(lambda: function() if self.rank == 0 else None, where, lambda value: value)[1][0]  # pyright: ignore[reportReturnType]

    def run_and_exchange(self, function: Callable[[], T], where: str, summarize: Callable[[T], M]) -> tuple[T, list[M]]:
        """Return a function's result, and ``summarize(result)`` of all ranks. The error of one rank is raised on all."""
        result, error = self._try(lambda: (value := function(), summarize(value)))
        every = self.gather((_error_text(error), result and result[1]))
        self._raise_errors([text for text, _ in every], where, error)
        assert result is not None
        return result[0], [message for _, message in every]  # pyright: ignore[reportReturnType]

    def run_and_finish(
        self, function: Callable[[], T], finish: Callable[[list[T]], None], where: str, unless_saved: str
    ) -> None:
        """Run a function on all ranks, and ``finish`` with all results on the first; the error of one is raised on all.

        ``unless_saved`` is a note for any error but a `SavedError`.
        """
        value, error = self._try(function)
        every: list[Any] = self._exchange("gather_object", own := (_error_text(error), value), [own])
        errors = [text for text, _ in every]
        if self.rank == 0 and not any(errors):
            _, error = self._try(lambda: finish([value for _, value in every]))
            errors = [_error_text(error)]
        errors = errors if any(errors) else []
        texts = self._exchange("broadcast_object", errors, errors)
        is_saved = any(text and text[0] == SavedError.__name__ for text in texts)
        self._raise_errors(texts, where if is_saved else f"{where}: {unless_saved}", error)

    def _try(self, function: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return function(), None
        except Exception as error:
            return None, error
        except BaseException:  # an interrupt, which the other ranks cannot hear of
            self._forget_group()
            raise

    def _raise_errors(self, texts: list[tuple[str, str] | None], where: str, own: Exception | None) -> None:
        errors = {rank: text for rank, text in enumerate(texts) if text is not None}
        if not errors:
            return
        (kind, text), *_ = errors.values()
        if len({*errors.values()}) == 1 and len(errors) == self.size and own is not None:
            raise own
        cls = SHARED_ERRORS.get(kind, CheckpointError)
        shown = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in list(errors.items())[:MAX_SHOWN])
        more = f" (and {len(errors) - MAX_SHOWN} more ranks)" if len(errors) > MAX_SHOWN else ""
        raise cls(f"{where}: {shown}{more}" if self.size > 1 else text) from own

    @contextlib.contextmanager
    def _explain_lost_rank(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self._forget_group()
            if not isinstance(error, RuntimeError):
                raise
            raise CheckpointError(
                f"one of the {self.size} ranks was lost, or did not answer in time, while they agreed on a checkpoint: "
                f"{str(error).splitlines()[0]}; every rank has to call this, also where one file is written"
            ) from error

    def _forget_group(self) -> None:
        """Use another group the next time, since a group that has failed once does not answer any more."""
        failed = self._group_ref and self._group_ref()
        if failed is not None and dist.is_initialized():
            groups = host_groups()
            for key in [key for key, group in groups.items() if group is failed]:
                del groups[key]


def connect_ranks(spec: PartitionSpec, where: str, timeout: float, *, in_background: bool = False, **options: object) -> Ranks:
    """Return the ranks of a bound spec's mesh, all of which call this with the same ``where`` and options.

    Raises ValueError on simulated ranks, on sizes without groups, within a transform, if the ranks' specs, functions or options
    differ, and for a mesh of only some ranks of the process group that does not say so.
    """
    if not 0 < timeout <= MAX_TIMEOUT:
        raise ValueError(f"{where}: timeout: expected a positive number of seconds, at most {MAX_TIMEOUT:g}, got {timeout!r}")
    is_connected = all(isinstance(axis, ProcessAxis) and axis.rank is not None for _, axis in spec.bound_mesh.axes)
    if not is_connected or not _torch.is_eager():
        raise ValueError(f"{where}: expected process groups, outside of transforms: simulated ranks are one process")
    check_spans_world(spec.bound_mesh, where)
    return Ranks(spec, timedelta(seconds=timeout), {"function": where, **options}, in_background=in_background)


def _check_calls(calls: list[dict[str, Any]]) -> None:
    for name, first in calls[0].items():
        if other := next((rank for rank, call in enumerate(calls) if call.get(name) != first), 0):
            raise ValueError(
                f"{calls[0]['function']}: expected one {name} on all ranks, got on rank 0 {first!r}, on rank {other} "
                f"{calls[other].get(name)!r}"
            )


def _gather_rows(own: list[Any], mesh: Mesh, timeout: timedelta) -> list[list[Any]]:
    """Return the rows of all ranks of the mesh in its row-major order, by an exchange along each axis."""
    rows = [own]
    for axis in (axis for _, axis in reversed(mesh.axes) if isinstance(axis, ProcessAxis) and axis.size > 1):
        texts = exchange_through_store(json.dumps(rows), axis.name, axis.rank or 0, axis.size, timeout)
        rows = [row for text in texts for row in json.loads(text)]
    return rows


def _error_text(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, _torch.error_text(error))
