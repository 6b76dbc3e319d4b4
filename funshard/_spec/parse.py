"""Values as people write them: by glob of parameter names, and sizes in bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from .._core.tree import Param

V = TypeVar("V")


def parse_globs(given: object) -> tuple[tuple[str, Any], ...] | None:
    """Return values by glob, given as a mapping or as its items, in hashable form; None for anything else."""
    items: Any = tuple(given.items()) if isinstance(given, Mapping) else given  # pyright: ignore
    is_pairs = isinstance(items, tuple) and all(isinstance(i, tuple) and len(i) == 2 and isinstance(i[0], str) for i in items)  # pyright: ignore
    return items if is_pairs else None  # pyright: ignore[reportUnknownVariableType]


def value_of(param: Param, values: Iterable[tuple[str, V]], option: str, what: str) -> V | None:
    """Return the value of the globs that match a parameter, None if none does; ValueError, naming it, for several values."""
    matching = {glob: value for glob, value in values if any(fnmatchcase(name, glob) for name in param.names)}
    if len({*matching.values()}) > 1:
        raise ValueError(
            f"parameter '{param.name}': {option} has {matching} for its names {list(param.names)}: expected {what}"
        )
    return next(iter(matching.values()), None)


def find_unmatched(globs: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the first glob that matches none of the names."""
    return next((glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)), None)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(size: float | str, what: str = "memory") -> int:
    """Return a number of bytes from "80GB", "512MiB" or a number.

    Raises:
        ValueError: For anything else, naming what has this size.
    """
    if not isinstance(size, str):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # None, NaN, infinity
            return int(size)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?I?)B?\s*", str(size).upper())
    if not isinstance(size, str) or match is None or match[2] not in _UNITS:
        raise ValueError(f"{what}: expected a number of bytes such as '80GB' or '512MiB', got {size!r}")
    return int(float(match[1]) * _UNITS[match[2]])
