"""The picture of a plan: memory over the step, ranks with their slices, and the timeline, as one SVG file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from .at_rest import count_per_slice
from .events import CATEGORIES, Category
from .table import format_bytes, format_seconds

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["draw_plan"]

WIDTH, LEFT, HEIGHT = 960, 110, 260
MOST_POINTS, MOST_RANKS = 600, 8
COLORS: dict[Category, str] = {
    "parameters": "#4477aa",
    "optimizer": "#66ccee",
    "gathered": "#228833",
    "gradients": "#ccbb44",
    "activations": "#ee6677",
}
STREAM_COLORS = {"compute": "#4477aa", "network": "#228833", "host": "#aa3377"}
COLLECTIVE_COLORS = {"reduce": "#ccbb44", "exchange": "#ee6677"}
PHASE_COLORS = {"forward": "#dddddd", "backward": "#bbbbbb", "update": "#dddddd"}


def draw_plan(plan: Plan) -> str:
    """Return a plan as the text of an SVG file: memory by category, ranks with units to scale, and streams over time."""
    body = [*_draw_memory(plan, 40), *_draw_ranks(plan, HEIGHT + 130)]
    ranks = min(_num_ranks(plan), MOST_RANKS)
    top = HEIGHT + 130 + 40 + 26 * ranks + 50
    body += _draw_timeline(plan, top)
    height = top + 150
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 30} {height}" '
            'font-family="sans-serif" font-size="12">',
            '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="6" height="6" fill="#ffffff"/><line x1="0" y1="0" x2="0" y2="6" stroke="#888888" stroke-width="3"/>'
            "</pattern></defs>",
            f'<rect width="100%" height="{height}" fill="#ffffff"/>',
            *body,
            "</svg>",
        ]
    )


def _svg_text(x: float, y: float, text: str, anchor: str = "start", *, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _svg_rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    hint = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(width, 0):.2f}" height="{height:.1f}"'
    return f'<rect x="{x:.2f}" y="{y:.1f}" {size} fill="{fill}">{hint}</rect>'


def _draw_memory(plan: Plan, top: float) -> Iterable[str]:
    """Yield the stacked area of memory over the events, with the phase and the unit below it."""
    samples = _sample_memory(plan)
    peak = max(plan.peak, 1)
    step = WIDTH / max(len(samples) - 1, 1)
    yield _svg_text(LEFT, top - 18, f"Memory of a rank over the step: {format_bytes(plan.peak)} at the peak", weight="bold")
    for part in range(5):
        y = top + HEIGHT - HEIGHT * part / 4
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#eeeeee"/>'
        yield _svg_text(LEFT - 6, y + 4, format_bytes(peak * part / 4), "end")
    below = [0.0] * len(samples)
    for category in CATEGORIES:
        above = [b + held[category] for b, (_, _, held) in zip(below, samples, strict=True)]
        if above != below:
            upper = [f"{LEFT + i * step:.1f},{top + HEIGHT * (1 - v / peak):.1f}" for i, v in enumerate(above)]
            lower = [f"{LEFT + i * step:.1f},{top + HEIGHT * (1 - v / peak):.1f}" for i, v in enumerate(below)]
            yield f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{COLORS[category]}"/>'
        below = above
    for i, (category, color) in enumerate(COLORS.items()):
        yield _svg_rect(LEFT + 480 + i * 96, top - 28, 10, 10, color)
        yield _svg_text(LEFT + 494 + i * 96, top - 19, category)
    yield from _draw_strips(samples, step, top + HEIGHT + 6)


Sample = tuple[str, str, dict[Category, int]]


def _sample_memory(plan: Plan) -> list[Sample]:
    """Return at most so many moments, each the fullest of its part of the events: phase, unit and bytes."""
    every = [(e.phase, e.unit, dict(held)) for e, held in zip(plan.events, plan.timeline.held(), strict=True)]
    size = -(-len(every) // MOST_POINTS) or 1
    parts = [every[i : i + size] for i in range(0, len(every), size)]
    return [max(part, key=lambda sample: sum(sample[2].values())) for part in parts]


def _draw_strips(samples: Sequence[Sample], step: float, top: float) -> Iterable[str]:
    """Yield the phases and the units of the samples as two rows of boxes."""
    for row, height in ((0, 16), (1, 14)):
        begin = number = 0
        for i in range(1, len(samples) + 1):
            if i < len(samples) and samples[i][row] == samples[begin][row]:
                continue
            name, x = str(samples[begin][row]), LEFT + begin * step
            width = (min(i, len(samples) - 1) - begin) * step
            color = PHASE_COLORS.get(name, "#eeeeee") if row == 0 else ("#c8d8e8", "#eef2f6")[number % 2]
            yield _svg_rect(x, top + 20 * row, width, height, color, name or "the root")
            if width > 7 * len(name or "''"):
                yield _svg_text(x + width / 2, top + 20 * row + 12, name or "''", "middle")
            begin, number = i, number + 1


def _num_ranks(plan: Plan) -> int:
    """Return over how many ranks the plan's units are split at most."""
    return max((unit.slices for unit in plan.units.values()), default=1)


def _draw_ranks(plan: Plan, top: float) -> Iterable[str]:
    """Yield a row for each slice, with units to scale and padding hatched."""
    spec, ranks = plan.spec, _num_ranks(plan)
    total = sum(spec.shard_numel(unit) for unit in spec) or 1
    shown = min(ranks, MOST_RANKS)
    more = f" (the first {shown} of {ranks:,})" if shown < ranks else ""
    yield _svg_text(LEFT, top, f"Units on the ranks that split them{more}; hatched: padding", weight="bold")
    for rank in range(shown):
        x, y = float(LEFT), top + 14 + 26 * rank
        yield _svg_text(LEFT - 6, y + 15, f"rank {rank}", "end")
        for i, unit in enumerate(spec):
            length, slices = spec.shard_numel(unit), spec.size(unit)
            real = int(count_per_slice(unit, slices, length)[rank % slices])
            width = WIDTH * length / total
            part = width * real / length if length else 0.0
            title = f"{unit.key or 'the root'}: {real:,} of {length:,} elements"
            yield _svg_rect(x, y, part, 20, ("#4477aa", "#88aacc")[i % 2], title)
            yield _svg_rect(x + part, y, width - part, 20, "url(#padding)", title)
            if width > 7 * len(unit.key or "''") and rank == 0:
                yield _svg_text(x + width / 2, y + 14, unit.key or "''", "middle")
            x += width


def _draw_timeline(plan: Plan, top: float) -> Iterable[str]:
    """Yield the streams over time: computation, collectives, and copies to and from the host."""
    timeline, total = plan.timeline, plan.seconds or 1.0
    waiting = f"{format_seconds(plan.seconds)}, {format_seconds(plan.exposed_seconds)} of it waiting"
    yield _svg_text(LEFT, top, f"Time of the step: {waiting}", weight="bold")
    rows = [name for name in STREAM_COLORS if name != "host" or plan.host_bytes]
    for row, name in enumerate(rows):
        yield _svg_text(LEFT - 6, top + 30 + 30 * row, name, "end")
        yield f'<rect x="{LEFT}" y="{top + 14 + 30 * row}" width="{WIDTH}" height="22" fill="#f6f6f6"/>'
    last: dict[str, tuple[str, float, float]] = {}
    boxes: list[tuple[str, str, float, float]] = []
    for event, (start, end) in zip(plan.events, timeline.spans, strict=True):
        stream = timeline.stream(event)
        if end <= start:
            continue
        name = f"{event.kind} {event.unit or 'the root'}" + (f" over {event.collective.axis}" if event.collective else "")
        label, begin, before = last.get(stream, (name, start, start))
        if label == name and start - before < total / 2000:
            last[stream] = name, begin, end
        else:
            boxes.append((stream, label, begin, before))
            last[stream] = name, start, end
    boxes += [(stream, *one) for stream, one in last.items()]
    for stream, label, start, end in boxes:
        if stream not in rows:
            continue
        color = COLLECTIVE_COLORS.get(label.partition(" ")[0], STREAM_COLORS[stream])
        x, width = LEFT + WIDTH * start / total, max(WIDTH * (end - start) / total, 0.3)
        yield _svg_rect(x, top + 14 + 30 * rows.index(stream), width, 22, color, f"{label}: {format_seconds(end - start)}")
    legend = (("computation", "#4477aa"), ("gathers", "#228833"), ("reductions", "#ccbb44"), ("the model's own", "#ee6677"))
    for i, (name, color) in enumerate(legend):
        yield _svg_rect(LEFT + 420 + i * 130, top - 9, 10, 10, color)
        yield _svg_text(LEFT + 434 + i * 130, top, name)
