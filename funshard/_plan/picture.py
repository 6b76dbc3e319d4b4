"""The picture of a plan: memory, units and streams on one scale of time, and the slices on the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .at_rest import count_per_slice
from .events import CATEGORIES, Category, Event
from .formats import format_bytes, format_seconds
from .svg import (
    CATEGORY_COLORS,
    EDGE,
    LEFT,
    PHASE_COLORS,
    RIGHT,
    STREAM_COLORS,
    STRIP,
    WIDTH,
    Panel,
    draw_box,
    draw_copy,
    draw_group,
    draw_line,
    draw_steps,
    draw_text,
    find_prefix,
    format_label,
    format_numel,
    format_short_bytes,
    format_short_seconds,
    has_room,
    make_document,
    measure_text,
    round_up,
)

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["draw_plan"]


# --- The states of a rank over the time of a step ---


class Moment(NamedTuple):
    """The bytes that a rank holds, by category, from the time at which its device reaches an event."""

    time: float
    event: Event
    held: dict[Category, int]


def iter_moments(plan: Plan) -> Iterator[Moment]:
    """Yield a moment for each event; one of another stream gets the time that computation has reached."""
    now = 0.0
    for event, held, (start, end) in zip(plan.events, plan.timeline.held(), plan.timeline.spans, strict=True):
        is_computed = plan.timeline.stream(event) == "compute"
        yield Moment(max(start, now) if is_computed else now, event, dict(held))
        now = end if is_computed else now


# --- The memory of a rank over the step, as stacked areas ---

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


# --- The slices of parameters on the ranks: units to scale, padding hatched ---

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


# --- The time of a step: its phases, the units that the device works on, and what is computed, gathered and reduced ---

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


# --- The whole picture ---


def draw_plan(plan: Plan) -> str:
    """Return a plan as the text of an SVG file: memory by category, units and streams over time, ranks with their slices."""
    moments, prefix = [*iter_moments(plan)], find_prefix(plan.units)
    on_device = [moment for moment in moments if plan.timeline.stream(moment.event) == "compute"]
    memory = Panel(LEFT, 92, WIDTH, 210, plan.seconds)
    phases = memory.below(8, STRIP)
    units = phases.below(4, 24)
    streams = units.below(4, STREAM_ROW * len(used_streams(plan)))
    numel = sum(plan.spec.shard_numel(unit) for unit in plan.spec)
    ranks = streams.below(64, RANK_ROW * count_rows(plan) + 14)._replace(total=numel)
    body = [
        *_draw_head(plan),
        *draw_memory(plan, memory, moments),
        *draw_phases(phases, on_device),
        *draw_units(units, on_device, prefix),
        *draw_streams(plan, streams),
        *draw_seconds(streams),
        *draw_ranks(plan, ranks, prefix),
    ]
    return make_document(LEFT + WIDTH + RIGHT, ranks.bottom + EDGE, _make_title(plan), body)


def _make_title(plan: Plan) -> str:
    """Return the picture's title, with the peak memory and the time of a step."""
    return f"A training step of one rank: {format_bytes(plan.peak)} at the peak, {format_seconds(plan.seconds)}"


def _draw_head(plan: Plan) -> Iterable[str]:
    """Yield the title, and a line below it with the mesh, the parameters and the batch."""
    sizes = " x ".join(f"{name}={size:,}" for name, size in plan.spec.bound_mesh.sizes)
    numel, count = sum(unit.numel for unit in plan.units.values()), len(plan.units)
    facts = [f"mesh {sizes}", f"{format_numel(numel)} parameters in {count:,} unit{'s' * (count != 1)}"]
    facts.append(f"{plan.tokens:,} tokens on a rank" if plan.tokens else "without computation, which needs a batch")
    if not plan.has_activations:
        facts.append("without activations, which need step=")
    yield draw_text(LEFT, 36, _make_title(plan), size=16, is_bold=True)
    yield draw_text(LEFT, 56, " · ".join(facts), ink="muted")
