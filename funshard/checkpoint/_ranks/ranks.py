"""All ranks of a mesh, over a process group of their own: an error of one is an error of all."""

from __future__ import annotations

import copy
import json
import math
import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from ... import _torch
from ..._sharding.agree import check_ranks_agree, has_peers, hash_spec
from ..._spec.spec import PartitionSpec
from ...collectives._host_group import HostGroup, host_groups
from ...collectives._mesh import Mesh, ProcessAxis, check_spans_world
from .._errors import CheckpointError, SavedError
from .exchange import exchange

__all__ = ["TIMEOUT", "Ranks", "ranks_of"]

TIMEOUT = 600.0
"""Seconds that ranks wait for one that is lost."""

T = TypeVar("T")
M = TypeVar("M")
SHOWN = 3


TOLD = {
    cls.__name__: cls
    for cls in (
        ValueError,
        TypeError,
        MemoryError,
        OSError,
        FileExistsError,
        FileNotFoundError,
        NotADirectoryError,
        PermissionError,
        SavedError,
    )
}
"""What is raised as what it was on the rank that has raised it; all else as a CheckpointError."""


class Ranks:
    """The ranks of a mesh, counted row by row. ``group`` is None for a single one.

    The group is theirs alone and of gloo: what is said about a checkpoint does not come between the collectives of training,
    and that of a thread in the ``background`` not between those of its caller. A rank that is lost is an error of the others
    after ``timeout``, and one that does not come at all after twice that.
    """

    _last: ClassVar[int] = 0
    """The number of the last group that this process began to make: larger than those of all earlier groups of its members."""
    _numbers: ClassVar[dict[object, int]] = {}
    """The number of each key's group. A group is named by it: a failed attempt leaves its addresses under its name."""

    def __init__(self, spec: PartitionSpec, timeout: timedelta) -> None:
        mesh = spec.bound_mesh
        self.rank, self.size = 0, 1
        self._group_ref: weakref.ref[HostGroup] | None = None
        if not has_peers(mesh):
            return
        self.size, self._timeout = math.prod(size for _, size in mesh.sizes), timeout
        self._axes = tuple(axis for _, axis in mesh.axes)
        keys = [self._key(background=background) for background in (False, True)]
        known = [self._numbers[key] if key in host_groups() else -1 for key in keys]
        numbers = hash_spec(spec)
        with self.lost():  # twice the time: a rank may be one timeout late that an earlier failure left waiting
            told = _exchange_rows([dist.get_rank(), self._last, *known, *numbers], mesh, 2 * timeout)
            if any(row[4:] != numbers for row in told):
                check_ranks_agree(spec)
        self._members, last, *groups = ([row[i] for row in told] for i in range(4))
        self._next = 1 + max(last)
        self._known = dict(zip((False, True), groups, strict=True))
        self.rank = self._members.index(dist.get_rank())
        self._take_group(background=False)

    @property
    def group(self) -> HostGroup | None:
        """The process group. CheckpointError after it was destroyed."""
        if self._group_ref is None:
            return None
        if (group := self._group_ref()) is None:
            raise CheckpointError(
                "the process groups were destroyed before the checkpoint was complete: call wait() of what save has returned "
                "before torch.distributed.destroy_process_group"
            )
        return group

    def in_background(self) -> Ranks:
        """The same ranks, over another group."""
        found = copy.copy(self)
        if self._group_ref is not None:
            found._take_group(background=True)
        return found

    def _key(self, *, background: bool) -> tuple[object, ...]:
        return "checkpoint", self._axes, self._timeout, background

    def _take_group(self, *, background: bool) -> None:
        key, numbers = self._key(background=background), self._known[background]
        if min(numbers) < 0 or len({*numbers}) > 1:
            number = self._numbers[key] = self._next
            Ranks._last = max(self._last, number)
            with self.lost():
                host_groups()[key] = HostGroup(self._members, f"checkpoint/{background=}/{number}", self._timeout)
            self._known[background] = [number]
        self._group_ref = weakref.ref(host_groups()[key])

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if (group := self.group) is None:
            return [value]
        with self.lost():
            return group.all_gather_object(value)

    def to_first(self, value: T) -> list[T]:
        """Every rank's value on the first rank, [] on the others."""
        if (group := self.group) is None:
            return [value]
        with self.lost():
            return group.gather_object(value)

    def from_first(self, value: T) -> T:
        """The first rank's, on every rank; that it is False or empty costs the least."""
        if (group := self.group) is None:
            return value
        raw = torch.frombuffer(bytearray(pickle.dumps(value) if value else b"\0"), dtype=torch.uint8)
        with self.lost():
            length = int(group.broadcast(torch.tensor(len(raw) if value else 0)))
            if not length:
                return value if self.rank == 0 else type(value)()
            raw = group.broadcast(raw if self.rank == 0 else torch.empty(length, dtype=torch.uint8))
        return pickle.loads(bytes(raw.tolist()))

    def together(self, do: Callable[[], T], where: str) -> T:
        """What it gives on this rank; if it raises on any rank, an error on all of them that says on which."""
        return self.heard(do, where, lambda value: None)[0]

    def on_first(self, do: Callable[[], T], where: str) -> T:
        """What it gives on the first rank, on all of them; its error too."""
        return self.heard(lambda: do() if self.rank == 0 else None, where, lambda value: value)[1][0]  # pyright: ignore[reportReturnType]

    def heard(self, do: Callable[[], T], where: str, said: Callable[[T], M]) -> tuple[T, list[M]]:
        """``(what it gives here, what all ranks say of what it gave)``; the error of one is an error of all."""
        message: Any = None

        def told() -> T:
            nonlocal message
            value = do()
            message = said(value)
            return value

        value, error = self._tried(told)
        every = self.gather((_told(error), message))
        self._raise([text for text, _ in every], where, error)
        return value, [message for _, message in every]  # pyright: ignore[reportReturnType]

    def ended_by_first(self, do: Callable[[], T], end: Callable[[list[T]], None], where: str, unless_saved: str) -> None:
        """Each does something, and the first ends it with what all have got; the error of one is an error of all.

        ``unless_saved`` is added to what is said of any error but a `SavedError`.
        """
        value, error = self._tried(do)
        every: list[Any] = self.to_first((_told(error), value))
        errors = [text for text, _ in every]
        if self.rank == 0 and not any(errors):
            _, error = self._tried(lambda: end([value for _, value in every]))
            errors = [_told(error)]
        told = self.from_first(errors if any(errors) else [])
        saved = any(text and text[0] == SavedError.__name__ for text in told)
        self._raise(told, where if saved else f"{where}: {unless_saved}", error)

    def _tried(self, do: Callable[[], T]) -> tuple[T | None, Exception | None]:
        try:
            return do(), None
        except Exception as error:
            return None, error
        except BaseException:  # an interrupt, which the others cannot be told
            self.forget()
            raise

    def _raise(self, told: list[tuple[str, str] | None], where: str, own: Exception | None) -> None:
        errors = {rank: text for rank, text in enumerate(told) if text is not None}
        if not errors:
            return
        (kind, text), *_ = errors.values()
        if len({*errors.values()}) == 1 and len(errors) == self.size and own is not None:
            raise own
        cls = TOLD.get(kind, CheckpointError)
        shown = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in list(errors.items())[:SHOWN])
        more = f" (and {len(errors) - SHOWN} more ranks)" if len(errors) > SHOWN else ""
        raise cls(f"{where}: {shown}{more}" if self.size > 1 else text) from own

    def lost(self) -> _Lost:
        """Where an error of the process group is one that says that a rank was lost."""
        return _Lost(self)

    def forget(self) -> None:
        """Use another group the next time: one that has failed once answers nobody."""
        failed = self._group_ref and self._group_ref()
        if failed is not None and dist.is_initialized():
            groups = host_groups()
            for key in [key for key, group in groups.items() if group is failed]:
                del groups[key]


def ranks_of(spec: PartitionSpec, where: str, timeout: float) -> Ranks:
    """The ranks of a bound spec's mesh.

    Raises ValueError on simulated ones, sizes alone, within a transform, if specs differ, and for a mesh of only some ranks of
    the process group that is not said to be one.
    """
    known = all(isinstance(axis, ProcessAxis) and axis.rank is not None for _, axis in spec.bound_mesh.axes)
    if not known or not _torch.is_eager():
        raise ValueError(f"{where}: expected process groups, outside of transforms: simulated ranks are one process")
    check_spans_world(spec.bound_mesh, where)
    return Ranks(spec, timedelta(seconds=timeout))


def _exchange_rows(own: list[int], mesh: Mesh, timeout: timedelta) -> list[list[int]]:
    """The numbers of all ranks of the mesh, in its row-major order: an axis at a time."""
    rows = [own]
    for axis in (axis for _, axis in reversed(mesh.axes) if isinstance(axis, ProcessAxis) and axis.size > 1):
        told = exchange(json.dumps(rows), axis.name, axis.rank or 0, axis.size, timeout)
        rows = [row for text in told for row in json.loads(text)]
    return rows


def _told(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


class _Lost:
    """Says of an error of the group's that a rank is gone."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._ranks.forget()
        if isinstance(error, RuntimeError):
            raise CheckpointError(
                f"one of the {self._ranks.size} ranks was lost, or did not answer in time, while they agreed on a checkpoint: "
                f"{str(error).splitlines()[0]}; every rank has to call this, also where one file is written"
            ) from error
