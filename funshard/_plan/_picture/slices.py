"""The slices of parameters on the ranks: units to scale, padding hatched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..at_rest import count_per_slice
from .style import CATEGORY_COLORS, EDGE, RIGHT, STRIP, format_label
from .svg import Panel, draw_box, draw_copy, draw_group, draw_text, has_room

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["RANK_ROW", "count_rows", "draw_ranks"]

MOST_RANKS = 8
RANK_ROW = 20
"""The height of a rank's row, with the gap below it."""


def count_rows(plan: Plan) -> int:
    """Return the number of ranks whose slices the picture shows."""
    return min(_count_ranks(plan), MOST_RANKS)


def _count_ranks(plan: Plan) -> int:
    """Return the largest number of ranks that a unit is split over."""
    return max((unit.slices for unit in plan.units.values()), default=1)


def draw_ranks(plan: Plan, panel: Panel, prefix: str) -> Iterable[str]:
    """Yield a row with the slices of each of the first ranks; a row equal to an earlier one is a copy of it."""
    spec, right = plan.spec, panel.right + RIGHT - EDGE
    counts = [count_per_slice(unit, spec.size(unit), spec.shard_numel(unit)) for unit in spec]
    yield draw_text(panel.left, panel.top - 12, "Parameters on the ranks, unit by unit", is_bold=True)
    yield draw_text(right, panel.top - 12, "elements", ink="muted", size=11, anchor="end")
    drawn: dict[tuple[int, ...], int] = {}
    for rank in range(count_rows(plan)):
        y, numels = panel.top + RANK_ROW * rank, tuple(int(some[rank % len(some)]) for some in counts)
        name = f"rank {rank}" if _count_ranks(plan) > 1 else "each rank"
        yield draw_text(panel.left - 8, y + 12, name, ink="muted", size=11, anchor="end")
        yield draw_text(right, y + 12, f"{sum(numels):,}", size=11, anchor="end")
        if (first := drawn.setdefault(numels, rank)) < rank:
            yield draw_copy(f"rank{first}", RANK_ROW * (rank - first))
        else:
            yield draw_group("", _draw_slices(plan, panel, y, numels, prefix), name=f"rank{rank}")
    more = _count_ranks(plan) - count_rows(plan)
    note = f"hatched: padding, {plan.padding:,} elements" if plan.padding else "no padding"
    note = f"and {more:,} more ranks; {note}" if more else note
    yield draw_text(panel.left, panel.bottom, note, ink="muted", size=11)


def _draw_slices(plan: Plan, panel: Panel, y: float, numels: Sequence[int], prefix: str) -> Iterable[str]:
    """Yield a rank's slices, unit by unit: ``numels`` elements of parameters, and hatched padding up to the slice's end."""
    x, slices, padding, labels = panel.left, list[str](), list[str](), list[str]()
    for unit, numel in zip(plan.spec, numels, strict=True):
        length = plan.spec.shard_numel(unit)
        end, middle = x + panel.scale(length), x + panel.scale(numel)
        title = f"{unit.key or 'the root'}: {numel:,} of {length:,} elements"
        slices += [draw_box(x, y, middle - x, STRIP, title=title)] if numel else []
        padding += [draw_box(middle, y, end - middle, STRIP, title=title)] if numel < length else []
        label = format_label(unit.key, prefix)
        if has_room(label, middle - x, 10):
            labels.append(draw_text((x + middle) / 2, y + 12, label, ink="on-color", size=10, anchor="middle"))
        x = end
    yield draw_group(CATEGORY_COLORS["parameters"], slices, has_edges=len(numels) < panel.width / 4)
    if padding:
        yield draw_group("url(#padding)", padding)
    yield from labels
