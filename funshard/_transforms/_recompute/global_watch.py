"""A watch over the globals that a function reads: one that it changes would be another one where the function runs again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import IOBase
from typing import Any

from torch import Tensor, nn

from ... import _torch
from .autograd_queries import FOREIGN_PACKAGES, find_code_reads
from .reachable import ReachableObjects

__all__ = ["GlobalWatch", "version_of"]

_MISSING = object()
_NESTING = 2  # of containers and objects in a variable that are searched for changes
_LENGTH = 1000  # of the longest container that is searched; of a longer one only the length is compared


@dataclass(frozen=True)
class GlobalWatch:
    """A context that raises RuntimeError if a function changes a global variable that its code reads, or its contents.

    Args:
        subject: What runs, for the error.
        hint: What the error says to do.
        variables: Functions that return the values of the variables.
    """

    subject: str
    hint: str
    variables: Sequence[Callable[[], Any]]
    _before: list[list[dict[Any, Any]]] = field(default_factory=list)  # of the runs in progress, the innermost last

    @classmethod
    def for_function(cls, function: object, subject: str, hint: str) -> GlobalWatch:
        """Return the watch over the variables that the code of a function reads."""
        return cls(subject, hint, find_code_reads(ReachableObjects([function], ()).objects).variables)

    def __enter__(self) -> None:
        self._before.append([dict(_list_contents(get())) for get in self.variables])

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        before = self._before.pop()
        if error is not None:
            return
        for get, was in zip(self.variables, before, strict=True):
            now = dict(_list_contents(get()))
            if any(not _is_same(value, now.get(path, _MISSING)) for path, value in was.items()):
                name = (*getattr(get, "args", ()), "it reads")[0]
                raise RuntimeError(
                    f"{self.subject} changes the global variable {name}, which it would change again where it runs again for "
                    f"derivatives: {self.hint}"
                )


def _list_contents(value: Any, nesting: int = _NESTING, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield, by path, the values to compare: a value, its nested contents, lengths and the version counters of tensors.

    A new attribute is no change: it may be a cached property.
    """
    yield path, value
    if isinstance(value, Tensor):
        yield (*path, "version"), version_of(value)
        return
    if isinstance(value, nn.Module):
        yield from (((*path, "buffers", i), version_of(buffer)) for i, buffer in enumerate(value.buffers()))
        nesting = min(nesting, 1)
    if not path and isinstance(value, Iterator) and not isinstance(value, IOBase):
        yield "next", object()  # differs at each reading, as the next item does
    if isinstance(value, list | tuple | dict | set | deque):
        yield (*path, "length"), len(value)  # pyright: ignore[reportUnknownArgumentType]
    if not nesting:
        return
    for name, item in _find_items(value):
        yield from _list_contents(item, nesting - 1, (*path, name))


def _find_items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield ``(name, item)`` of a container or of an object of the user's class; nothing for a long container."""
    if isinstance(value, dict):
        items = value.items() if len(value) <= _LENGTH else ()  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(value, list | tuple | deque):
        items = enumerate(value) if len(value) <= _LENGTH else ()  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(value, type) or type(value).__module__.partition(".")[0] in FOREIGN_PACKAGES:
        items = ()
    else:
        items = getattr(value, "__dict__", {}).items()
    yield from items  # pyright: ignore[reportUnknownVariableType]


def version_of(tensor: Tensor) -> int:
    """Return a tensor's count of in-place changes, -1 if its memory was donated."""
    try:
        return _torch.version(tensor)
    except RuntimeError:
        return -1


def _is_same(value: Any, now: Any) -> bool:
    """Return whether a value is the same object, or an equal number or string."""
    return value is now or (type(value) is type(now) and type(value) in (int, float, str) and value == now)
