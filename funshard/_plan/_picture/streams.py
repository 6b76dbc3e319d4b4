"""The time of a step: its phases, the units that the device works on, and what is computed, gathered and reduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..events import Event
from ..table import format_seconds
from .moments import Moment
from .style import (
    EDGE,
    PHASE_COLORS,
    RIGHT,
    STREAM_COLORS,
    STRIP,
    format_label,
    format_short_seconds,
    round_up,
)
from .svg import Panel, draw_box, draw_group, draw_line, draw_text, has_room, measure_text

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["STREAM_ROW", "draw_phases", "draw_seconds", "draw_streams", "draw_units", "used_streams"]

STREAM_ROW = 22
"""The height of a stream's row, with the gap below it."""
_STREAM_BY_KIND: dict[str, str] = {"gather": "gathers", "reduce": "reductions", "exchange": "exchanges", "copy": "host copies"}
"""By kind of event. All others are computation."""


def draw_phases(panel: Panel, moments: Sequence[Moment]) -> Iterable[str]:
    """Yield a box for each phase of the step: forward, backward and update."""
    y = panel.top
    yield draw_text(panel.left - 8, y + 12, "phase", ink="muted", size=11, anchor="end")
    for i, j, start, end in _iter_runs(panel, moments, [moment.event.phase for moment in moments]):
        name = moments[i].event.phase
        yield draw_box(start, y, end - start - 1, STRIP, fill=PHASE_COLORS[name], title=name)
        if has_room(name, end - start, 11):
            yield draw_text((start + end) / 2, y + 12, name, ink="on-color", size=11, anchor="middle")
        elif j == len(moments):
            yield draw_text(end + 6, y + 12, name, size=11)


def draw_units(panel: Panel, moments: Sequence[Moment], prefix: str) -> Iterable[str]:
    """Yield a box for each unit that the device works on or waits for, and the names that have room below."""
    y, free, boxes, names = panel.top, panel.left, list[str](), list[str]()
    for i, _, start, end in _iter_runs(panel, moments, [moment.event.unit for moment in moments]):
        if end - start < 0.8:
            continue
        unit = moments[i].event.unit
        boxes.append(draw_box(start, y, end - start - 0.8, STRIP / 2, title=unit or "the root"))
        label, middle = format_label(unit, prefix), (start + end) / 2
        half = measure_text(label, 10) / 2
        if middle - half >= free:
            names.append(draw_text(middle, y + STRIP / 2 + 11, label, ink="muted", size=10, anchor="middle"))
            free = middle + half + 6
    yield draw_text(panel.left - 8, y + 8, "unit", ink="muted", size=11, anchor="end")
    yield draw_group(STREAM_COLORS["compute"], boxes)
    yield from names


def _iter_runs(panel: Panel, moments: Sequence[Moment], names: Sequence[str]) -> Iterator[tuple[int, int, float, float]]:
    """Yield ``(first, end, left, right)`` of each run of equal names: the indices of its moments, and its edges in a panel."""
    begin = 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[begin]:
            start = panel.x(moments[begin].time) if begin else panel.left
            yield begin, i, start, panel.right if i == len(names) else panel.x(moments[i].time)
            begin = i


def used_streams(plan: Plan) -> list[str]:
    """Return the names of the streams that a step uses; computation is always one of them."""
    used = {_stream_of(event) for event, (start, end) in zip(plan.events, plan.timeline.spans, strict=True) if end > start}
    return [name for name in STREAM_COLORS if name in used or name == "compute"]


def _stream_of(event: Event) -> str:
    """Return the name of the stream that an event runs on."""
    return _STREAM_BY_KIND.get(event.kind, "compute")


def draw_streams(plan: Plan, panel: Panel) -> Iterable[str]:
    """Yield a row for each stream, with its busy time at the right end."""
    for i, name in enumerate(used_streams(plan)):
        y, seconds, boxes = panel.top + i * STREAM_ROW, 0.0, list[str]()
        for label, start, end, busy in _merge_spans(plan, name, plan.seconds / panel.width / 2):
            seconds += busy
            width = max(panel.x(end) - panel.x(start), 0.5)
            boxes.append(draw_box(panel.x(start), y, width, STREAM_ROW - 4, title=f"{label}: {format_seconds(busy)}"))
        yield draw_text(panel.left - 8, y + 13, name, ink="muted", size=11, anchor="end")
        yield draw_box(panel.left, y, panel.width, STREAM_ROW - 4, fill="track")
        yield draw_group(STREAM_COLORS[name], boxes)
        idle = f", {format_short_seconds(plan.exposed_seconds)} idle" if name == "compute" else ""
        yield draw_text(panel.right + RIGHT - EDGE, y + 13, format_short_seconds(seconds) + idle, size=11, anchor="end")


def _merge_spans(plan: Plan, stream: str, gap: float) -> Iterator[tuple[str, float, float, float]]:
    """Yield ``(label, start, end, busy time)`` of a stream's boxes; merge neighbours of one label closer than ``gap``."""
    last = "", 0.0, 0.0, 0.0
    for event, (start, end) in zip(plan.events, plan.timeline.spans, strict=True):
        if end <= start or _stream_of(event) != stream:
            continue
        label = f"{event.kind} {event.unit or 'the root'}" + (f" over {event.collective.axis}" if event.collective else "")
        if label == last[0] and start - last[2] < gap:
            last = label, last[1], end, last[3] + end - start
        else:
            if last[0]:
                yield last
            last = label, start, end, end - start
    if last[0]:
        yield last


def draw_seconds(panel: Panel) -> Iterable[str]:
    """Yield the time axis below the streams."""
    tick = round_up(panel.total / 8) if panel.total else 1.0
    for i in range(int(panel.total / tick * (1 + 1e-9)) + 1):
        x = panel.x(i * tick)
        yield draw_line(x, panel.bottom, x, panel.bottom + 4)
        yield draw_text(x, panel.bottom + 17, format_short_seconds(i * tick), ink="muted", size=11, anchor="middle")
