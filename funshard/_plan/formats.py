"""How a plan writes bytes, times and tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "format_numel", "format_rows", "format_seconds"]


def format_bytes(size: float, *, digits: int | None = None) -> str:
    """Format a number of bytes with a decimal unit, and two digits after the point or so many in all: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{_round(size, digits)} {unit}"
        size /= 1000
    return f"{_round(size, digits)} TB"


def format_seconds(seconds: float, *, digits: int | None = None) -> str:
    """Format a time as `format_bytes`: "12.3 ms"."""
    is_short = digits is not None and 0 < seconds < 1e-3
    unit, size = ("µs", 1e-6) if is_short else ("s", 1.0) if seconds >= 1 or (digits and not seconds) else ("ms", 1e-3)
    return f"{_round(seconds / size, digits)} {unit}"


def format_numel(numel: int) -> str:
    """Format a number of elements: "6.74 billion"."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if numel >= size:
            return f"{numel / size:.3g} {name}"
    return f"{numel:,}"


def _round(number: float, digits: int | None) -> str:
    return f"{number:.2f}" if digits is None else f"{float(f'{number:.{digits}g}'):g}"


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
