"""The printed forms of a spec: a table with a row for each unit, or for several similar units; and its line in the log."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence

from .. import _torch
from .._core.mesh import Mesh
from .._core.spec import FORMATS, PartitionSpec, format_sizes
from .._torch.tracing import LOGGER

HEAD = ("unit", "P", "parameters", "numel", "padding", "bytes per rank")
MIN_MERGED_ROWS = 3
"""The least number of units, equal but for a number in their paths, that share a row."""


def format_table(spec: PartitionSpec) -> str:
    """Format a spec as a table: path, `P`, parameters, elements, padding and bytes per rank of every unit, and totals.

    Units that are alike but for numbers in their paths share a row, with how many they are before what each has:
    ``layers.{0..31}``.
    """
    sizes = spec.sizes or _world_sizes()
    known = all(axis in dict(sizes) for unit in spec.units for axis in unit.distinct_axes)
    bound = spec.on(dict(sizes)) if known else spec.on({axis: 1 for unit in spec.units for axis in unit.distinct_axes})
    cells: dict[str, tuple[str, ...]] = {}
    totals = [0, 0, 0, 0]
    for unit in spec.units:
        padding = bound.padded_numel(unit) - unit.numel
        length, dtype = bound.stored(unit)
        counts = [len(unit.params), unit.numel, padding, length * dtype.itemsize]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        cells[unit.key] = (str(unit.p), *(f"{c:,}" for c in counts))
    body = [(name, p, *(f"{n} x {c}" if n > 1 else c for c in counts)) for name, n, (p, *counts) in _merge_rows(cells)]
    mesh = format_sizes(sizes) if known else "unbound: as on one rank"
    rows = [HEAD, *body, ("total", mesh, *(f"{c:,}" for c in totals))]
    rest = [f"ignored: {', '.join(spec.ignored)}"] if spec.ignored else []
    return "\n".join([*format_rows(rows, names=2), *rest])


def format_rows(rows: Sequence[Sequence[str]], *, names: int = 1) -> list[str]:
    """Return the lines of a table whose first row is its head. All columns but the first ones, of names, are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [
        [x.ljust(w) if i < names else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))] for row in rows
    ]
    head, *lines = map("  ".join, padded)
    return [head, "-" * len(head), *lines]


def _world_sizes() -> tuple[tuple[str, int], ...]:
    """Return the axes of the world, or one axis of one rank before the process group exists, so that printing never raises."""
    try:
        return Mesh.world().sizes
    except RuntimeError:
        return (("shard", 1),)


def _merge_rows(rows: dict[str, tuple[str, ...]]) -> list[tuple[str, int, tuple[str, ...]]]:
    alike: dict[tuple[object, ...], list[str]] = {}
    for key, cells in rows.items():
        shape = tuple(None if part.isdecimal() else part for part in _split_key(key))
        alike.setdefault((shape, cells), []).append(key)
    out: list[tuple[str, int, tuple[str, ...]]] = []
    for keys in alike.values():
        name = _common_name(keys) if len(keys) >= MIN_MERGED_ROWS else None
        out += [(key or "''", 1, rows[key]) for key in keys] if name is None else [(name, len(keys), rows[keys[0]])]
    return out


def _split_key(key: str) -> list[str]:
    return re.split("([.:])", key)


def _common_name(keys: Sequence[str]) -> str | None:
    """Return one name for keys that differ in numbers only, None if no such name covers exactly these keys."""
    values = [set(part) for part in zip(*map(_split_key, keys), strict=True)]
    if len(keys) != math.prod(len(some) for some in values):
        return None
    return "".join(next(iter(some)) if len(some) == 1 else f"{{{_format_ranges(sorted(map(int, some)))}}}" for some in values)


def _format_ranges(numbers: Sequence[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(f"{a}" if a == b else f"{a}..{b}" for a, b in zip(starts, ends, strict=True))


def log_spec(spec: PartitionSpec) -> None:
    """Log a spec's summary at INFO, the first time that values are sharded by it."""
    if not _torch.is_in_graph() and LOGGER.isEnabledFor(logging.INFO):  # Dynamo traces no logging
        spec._compute_once(_log_spec)


def _log_spec(spec: PartitionSpec) -> bool:
    LOGGER.info("sharded by %r", spec)
    return True


FORMATS["table"] = format_table
