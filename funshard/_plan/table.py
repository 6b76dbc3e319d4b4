"""The printed form of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .events import CATEGORIES

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["format_bytes", "format_plan", "format_seconds"]


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


def format_plan(plan: Plan) -> str:
    """Format a plan: memory by phase, communication by axis, time, and what is worth knowing of the units."""
    return "\n".join([*_format_memory(plan), "", *_format_traffic(plan), "", *_format_facts(plan)])


def _format_memory(plan: Plan) -> list[str]:
    """Return the lines on the bytes that one rank holds."""
    rest = {category: plan.at_rest.get(category, 0) for category in CATEGORIES}
    shown = CATEGORIES if plan.has_activations else CATEGORIES[:-1]
    rows = [["bytes per rank", *shown, "total"]]
    for name, held in (("at rest", rest), *plan.peaks.items()):
        rows.append([name, *(format_bytes(held[c]) for c in shown), format_bytes(sum(held.values()))])
    notes = [] if plan.has_activations else ["without activations: those need step="]
    if plan.host_bytes:
        notes.append(f"{format_bytes(plan.host_bytes)} in host memory")
    return [*format_rows(rows), *notes]


def _format_traffic(plan: Plan) -> list[str]:
    """Return the lines on what is sent over each axis."""
    sizes = dict(plan.spec.bound_mesh.sizes)
    rows = [["axis", "collective", "count", "in", "out", "sent by a rank", "time"]]
    for one in plan.traffic:
        sizes_of = (one.input_bytes, one.output_bytes, one.sent_bytes)
        axis = f"{one.axis}={sizes[one.axis]}" if one.axis in sizes else one.axis
        rows.append([axis, one.op, f"{one.count:,}", *map(format_bytes, sizes_of), format_seconds(one.seconds)])
    return format_rows(rows) if len(rows) > 1 else ["nothing is sent"]


def _format_facts(plan: Plan) -> Iterable[str]:
    """Yield the lines on time and units."""
    without = "" if plan.tokens else "; without computation: that needs batch="
    yield f"step: {format_seconds(plan.seconds)}, {format_seconds(plan.exposed_seconds)} of it waiting{without}"
    low, high = plan.balance
    yield f"padding: {plan.padding:,} elements; parameters on a rank: {low:,} to {high:,}"
    if plan.units:
        yield f"largest unit: '{plan.largest_unit}' of {plan.units[plan.largest_unit].numel:,} elements"
