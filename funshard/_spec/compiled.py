"""Compile: how torch.compile compiles a unit's forward."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _torch

__all__ = ["Compile", "check_names"]


@dataclass(frozen=True)
class Compile:
    """Compilation of a unit's forward by torch.compile: ``P(compile=Compile(...))``; ``P(compile=True)`` is the default one.

    Modules of one structure share a compilation, as far as torch guards allow it. Gathers, reductions and what is saved for
    backward stay those of the eager schedule.

    >>> import torch, funshard as fs
    >>> fs.P("shard", compile=fs.Compile(backend="aot_eager"))
    P('shard', compile=Compile(backend='aot_eager'))

    Raises TypeError or ValueError for options of another kind.
    """

    backend: str | Callable[..., Any] = "inductor"
    """A backend of torch.compile."""
    mode: str | None = None
    """A mode of inductor, such as "max-autotune-no-cudagraphs"; not with ``options``."""
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """The backend's options."""
    dynamic: bool | None = None
    """Whether shapes are symbols from the first graph on (True), never (False), or when they have changed (None)."""
    fullgraph: bool = False
    """Whether a graph break is an error."""

    def __post_init__(self) -> None:
        if not (isinstance(self.backend, str) or callable(self.backend)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Compile: backend: expected a name or a function, got {self.backend!r}")
        if not isinstance(self.mode, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Compile: mode: expected a string or None, got {self.mode!r}")
        if not isinstance(self.dynamic, bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Compile: dynamic: expected True, False or None, got {self.dynamic!r}")
        if not isinstance(self.fullgraph, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Compile: fullgraph: expected True or False, got {self.fullgraph!r}")
        if not isinstance(self.options, Mapping | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Compile: options: expected a dict, got {self.options!r}")
        if self.mode and self.options:
            raise ValueError(f"Compile: expected a mode or options, got mode={self.mode!r} and options={self.options!r}")
        items = self.options.items() if isinstance(self.options, Mapping) else self.options
        object.__setattr__(self, "options", tuple(sorted(items)))

    def __repr__(self) -> str:  # the same on every rank
        backend = self.backend
        if not isinstance(backend, str):
            backend = getattr(backend, "__name__", type(backend).__name__)
        shown = {
            "backend": backend if backend != "inductor" else None,
            "mode": self.mode,
            "options": dict(self.options) or None,
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph or None,
        }
        return f"Compile({', '.join(f'{name}={value!r}' for name, value in shown.items() if value is not None)})"


def check_names(where: str, backend: object, mode: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a backend, a mode or options that torch.compile does not know; ``where`` begins the message."""
    known: Sequence[str] = ()
    if isinstance(backend, str) and backend not in (known := _torch.list_backends()):
        raise ValueError(_format_unknown_name(where, "backend", backend, known))
    if backend == "inductor" and mode is not None and mode not in (known := _torch.list_inductor_modes()):
        raise ValueError(_format_unknown_name(where, "mode", mode, known))
    for name in options if backend == "inductor" else ():
        if name.replace("-", "_") not in (known := _torch.list_inductor_options()):
            known = difflib.get_close_matches(name, known) or known[:5]
            raise ValueError(_format_unknown_name(where, "options", name, known))


def _format_unknown_name(where: str, what: str, given: str, known: Sequence[str]) -> str:
    """Return the message of the error for a backend, a mode or an option that torch.compile does not know."""
    return f"{where}: {what}: expected one of {', '.join(map(repr, known))}, got {given!r}"
