"""The memory of a rank over the step, as stacked areas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..events import CATEGORIES, Category
from ..table import format_bytes
from .moments import Moment
from .style import CATEGORY_COLORS, EDGE, RIGHT, format_short_bytes, round_up
from .svg import Panel, draw_box, draw_line, draw_steps, draw_text

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["draw_memory"]

COLUMNS = 365


def draw_memory(plan: Plan, panel: Panel, moments: Sequence[Moment]) -> Iterable[str]:
    """Yield the stacked areas of memory by category, a scale, a mark at the peak, and a legend with the bytes held then."""
    tick = round_up(max(plan.peak, 1) / 5)
    most = math.ceil(plan.peak / tick) * tick or tick
    for i in range(round(most / tick) + 1):
        y = panel.bottom - panel.height * i * tick / most
        yield draw_line(panel.left, y, panel.right, y)
        yield draw_text(panel.left - 8, y + 4, format_short_bytes(i * tick), ink="muted", size=11, anchor="end")
    columns = _find_fullest(panel, moments)
    shown: list[Category] = [category for category in CATEGORIES if any(held[category] for held in columns)]
    for i in reversed(range(len(shown))):  # the lower ones are drawn over the upper ones
        heights = [panel.height * sum(held[category] for category in shown[: i + 1]) / most for held in columns]
        yield draw_steps(panel, heights, CATEGORY_COLORS[shown[i]])
    if (limit := plan.hardware.memory_bytes) <= most:
        y = panel.bottom - panel.height * limit / most
        yield draw_line(panel.left, y, panel.right, y, is_dashed=True)
        yield draw_text(panel.left + 4, y - 4, f"memory of the device: {format_bytes(limit)}", size=11, has_halo=True)
    if moments:
        peak = max(moments, key=lambda moment: sum(moment.held.values()))
        x = panel.x(peak.time)
        yield draw_line(x, panel.top - 6, x, panel.bottom, is_dashed=True)
        where = f"peak: {peak.event.phase} of {peak.event.unit or 'the root'}"
        yield draw_text(x, panel.top - 10, where, size=11, anchor="start" if x < panel.left + panel.width / 2 else "end")
        yield from _draw_held(panel, peak.held, shown)


def _draw_held(panel: Panel, held: dict[Category, int], shown: Sequence[Category]) -> Iterable[str]:
    """Yield the legend: each category with the bytes held at the peak, and their total."""
    x, right = panel.right + 14, panel.right + RIGHT - EDGE
    yield draw_text(x, panel.top + 10, "at the peak", ink="muted", size=11)
    for i, category in enumerate(reversed(shown)):
        y = panel.top + 32 + 20 * i
        yield draw_box(x, y - 9, 10, 10, fill=CATEGORY_COLORS[category])
        yield draw_text(x + 15, y, category, size=11)
        yield draw_text(right, y, format_short_bytes(held[category]), size=11, anchor="end")
    y = panel.top + 32 + 20 * len(shown)
    yield draw_line(x, y - 12, right, y - 12)
    yield draw_text(x + 15, y + 3, "total", size=11, is_bold=True)
    yield draw_text(right, y + 3, format_short_bytes(sum(held.values())), size=11, anchor="end", is_bold=True)


def _find_fullest(panel: Panel, moments: Sequence[Moment]) -> list[dict[Category, int]]:
    """Return, for each pixel column of a panel, the bytes by category at the column's fullest moment."""
    columns: list[dict[Category, int]] = [dict.fromkeys(CATEGORIES, 0)] * COLUMNS
    most, scale = [-1] * COLUMNS, COLUMNS / (panel.total or 1)
    for i, moment in enumerate(moments):
        end = moments[i + 1].time if i + 1 < len(moments) else panel.total
        size = sum(moment.held.values())
        first = min(int(moment.time * scale), COLUMNS - 1)
        for column in range(first, max(min(math.ceil(end * scale), COLUMNS), first + 1)):
            if size >= most[column]:
                columns[column], most[column] = moment.held, size
    return columns
