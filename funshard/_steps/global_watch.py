"""A watch over the globals that a step reads: one that it changes would be another one where the step runs again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._transforms._recompute.autograd_queries import find_code_reads
from .._transforms._recompute.reachable import ReachableObjects

__all__ = ["GlobalWatch"]

_CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True)
class GlobalWatch:
    """A context that raises RuntimeError if a step sets a global variable that its code reads, or its length changes."""

    variables: Sequence[Callable[[], Any]]
    _before: list[list[tuple[Any, int]]] = field(default_factory=list)  # of the steps that run, the innermost last

    @classmethod
    def of(cls, step: object) -> GlobalWatch:
        """Return the watch over the variables that the code of a step reads."""
        return cls(find_code_reads(ReachableObjects([step], ()).objects).variables)

    def _read(self) -> list[tuple[Any, int]]:
        values = (get() for get in self.variables)
        return [(value, len(value) if isinstance(value, _CONTAINERS) else 0) for value in values]  # pyright: ignore[reportUnknownArgumentType]

    def __enter__(self) -> None:
        self._before.append(self._read())

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        before = self._before.pop()
        if error is not None:
            return
        for get, (was, length), (now, length_now) in zip(self.variables, before, self._read(), strict=True):
            if was is not now or length != length_now:
                name = (*getattr(get, "args", ()), "it reads")[0]
                raise RuntimeError(
                    f"scan: step changes the global variable {name}, which it would change again where it runs again for "
                    "derivatives: expected it in the state or in y, or as an attribute of an object that step closes over"
                )
