"""All ranks of a mesh, over a process group of their own: an error of one is an error of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from .. import _torch
from .._sharding.agree import check_ranks_agree, gather_texts, talks
from .._spec.spec import PartitionSpec
from ..collectives._mesh import Group, Mesh

__all__ = ["TIMEOUT", "CheckpointError", "Ranks", "ranks_of"]

TIMEOUT = 600.0
"""Seconds that ranks wait for one that is lost."""

T = TypeVar("T")
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
    )
}
"""What is raised as what it was on the rank that has raised it; all else as a CheckpointError."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or cannot be read: damaged, cut short, or not what was asked for."""


class Ranks:
    """The ranks of a mesh, counted row by row. ``group`` is None for a single one.

    The group is theirs alone and of gloo: what is said about a checkpoint does not come between the collectives of training,
    and that of a thread in the ``background`` not between those of its caller. A rank that is lost is an error of the others
    after ``timeout`` at most.
    """

    _groups: ClassVar[dict[tuple[object, ...], dist.ProcessGroup]] = {}

    def __init__(self, mesh: Mesh, timeout: timedelta, *, background: bool = False) -> None:
        self.rank, self.size = 0, 1
        self.group: dist.ProcessGroup | None = None
        if not talks(mesh):
            return
        device = mesh.device or torch.device("cpu")
        self.size = math.prod(size for _, size in mesh.sizes)
        key = (tuple(axis for _, axis in mesh.axes), timeout, background)
        self.group = self._groups.get(key)
        with self.lost():
            told = [text.split() for text in gather_texts(f"{dist.get_rank()} {_alive(self.group)}", mesh, device)]
        ranks = [int(rank) for rank, _ in told]
        self.rank = ranks.index(dist.get_rank())
        if any(alive == "False" for _, alive in told):
            local = self.size < dist.get_world_size()  # torch names such a group by how many this rank has
            made: Any = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=local)
            self.group = self._groups[key] = made

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with self.lost():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def to_first(self, value: T) -> list[T]:
        """Every rank's value on the first rank, [] on the others."""
        if self.group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.lost():
            dist.gather_object(value, found, group=self.group, group_dst=0)
        return found or []

    def from_first(self, values: list[T]) -> T:
        """This rank's one of the first rank's values."""
        if self.group is None:
            return values[0]
        found: list[Any] = [None]
        with self.lost():
            dist.scatter_object_list(found, values or None, group=self.group, group_src=0)
        return found[0]

    def together(self, do: Callable[[], T], where: str) -> T:
        """What it gives on this rank; if it raises on any rank, an error on all of them that says on which."""
        return self._tried(do, where, lambda value: None)[0]

    def on_first(self, do: Callable[[], T], where: str) -> T:
        """What it gives on the first rank, on all of them; its error too."""
        return self._tried(lambda: do() if self.rank == 0 else None, where, lambda value: value)[1][0]

    def _tried(self, do: Callable[[], T], where: str, said: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """``(what it gives here, what all ranks say of what it gave)``."""
        value, error, message = None, None, None
        try:
            value = do()
            message = said(value)
        except Exception as raised:
            error = raised
        except BaseException:  # an interrupt, which the others cannot be told
            self.forget()
            raise
        told = self.gather((None if error is None else (type(error).__name__, str(error)), message))
        self._raise({rank: text for rank, (text, _) in enumerate(told) if text is not None}, where, error)
        return value, [message for _, message in told]  # pyright: ignore[reportReturnType]

    def _raise(self, errors: dict[int, tuple[str, str]], where: str, own: Exception | None) -> None:
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
        for key in [key for key, group in self._groups.items() if group is self.group]:
            del self._groups[key]


def ranks_of(spec: PartitionSpec, where: str, timeout: float, *, background: bool = False) -> Ranks:
    """The ranks of a bound spec's mesh. ValueError on simulated ones, sizes alone, within a transform, and if specs differ."""
    known = all(isinstance(axis, Group) and axis.rank is not None for _, axis in spec.bound_mesh.axes)
    if not known or not _torch.plain():
        raise ValueError(f"{where}: expected process groups, outside of transforms: simulated ranks are one process")
    found = Ranks(spec.bound_mesh, timedelta(seconds=timeout), background=background)
    if found.size > 1 and not background:
        with found.lost():
            check_ranks_agree(spec)
    return found


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


def _alive(group: dist.ProcessGroup | None) -> bool:
    """Whether there is one, and its default group, and so itself, was not destroyed."""
    try:
        return group is not None and dist.is_initialized() and dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):
        return False
