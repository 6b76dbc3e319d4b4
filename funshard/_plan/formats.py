"""How a plan writes bytes, times and tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "format_rows", "format_seconds"]


def format_bytes(size: float) -> str:
    """Format a number of bytes with a decimal unit: "1.23 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def format_seconds(seconds: float) -> str:
    """Format a time: "12.3 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
