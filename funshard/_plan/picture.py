"""The picture of a plan as an SVG file: memory, units and streams over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from .._core.spec import PartitionSpec
from .costs import CATEGORIES, Category, Event, Timeline, format_bytes, format_seconds

LEFT, WIDTH, RIGHT, EDGE = 92, 730, 178, 24
"""The widths of the names at the left, of what is to scale, of the figures at the right, and of the margin."""
STRIP, ROW = 16, 22
"""The height of a box, and of a row with the gap below it."""
COLUMNS = 365
"""The steps of the curves of memory."""

LIGHT = {"page": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "on-color": "#ffffff", "track": "#eef1f4", "grid": "#d1d9e0"}
DARK = {"page": "#0d1117", "ink": "#e6edf3", "muted": "#9198a1", "on-color": "#ffffff", "track": "#1c2128", "grid": "#3d444d"}
"""The colour of each role, which is the class of what has it."""
CATEGORY_COLORS: dict[Category, str] = {
    "parameters": "#0072b2",
    "optimizer": "#56b4e9",
    "gathered": "#007f5f",
    "gradients": "#e69f00",
    "activations": "#d994ba",
}
"""After the palette of Okabe and Ito, which readers with any colour vision tell apart; neighbours differ in lightness, too."""
EDGES = f'class="cut" stroke="{LIGHT["page"]}" stroke-width="0.6"'
COMPUTE = "#6e7781"
STREAMS = {
    "gather": ("gathers", CATEGORY_COLORS["gathered"]),
    "reduce": ("reductions", CATEGORY_COLORS["gradients"]),
    "exchange": ("exchanges", CATEGORY_COLORS["activations"]),
    "copy": ("host copies", "#d55e00"),
}
"""By kind of event the name and colour of a stream. All others are computation."""


# --- Parts of an SVG file: colours are attributes, which the style sheet overrides in dark mode ---


def _text(
    x: float, y: float, text: str, *, ink: str = "ink", size: float = 11, anchor: str = "start", weight: str = "normal"
) -> str:
    style = f'font-size="{size:g}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{ink}" fill="{LIGHT[ink]}" {style}>{escape(text)}</text>'


def _box(x: float, y: float, end: float, *, height: float = STRIP, fill: str = "", title: str = "") -> str:
    """Return a rectangle up to ``end``, in a colour or that of its group, with a tooltip."""
    color = f' fill="{fill}"' if fill else ""
    shape = f'<rect x="{x:.2f}" y="{y:g}" width="{max(end - x, 0):.2f}" height="{height:g}"{color}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def _group(boxes: Iterable[str], attributes: str) -> str:
    return "\n".join([f"<g {attributes}>", *boxes, "</g>"])


def _line(x: float, y: float, x2: float, y2: float, *, is_mark: bool = False) -> str:
    """Return a line of the grid, or a dashed mark."""
    role, dash = ("mark", ' stroke-dasharray="3 3"') if is_mark else ("grid", "")
    color = LIGHT["muted" if is_mark else "grid"]
    return f'<path d="M{x:.1f} {y:.1f}L{x2:.1f} {y2:.1f}" class="{role}" stroke="{color}"{dash} fill="none"/>'


def _document(height: float, title: str, body: Iterable[str]) -> str:
    dark = "".join(f".{role}{{{'stroke' if role == 'grid' else 'fill'}:{color}}}" for role, color in DARK.items())
    width, fonts = LEFT + WIDTH + RIGHT, "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
    dark += f".mark{{stroke:{DARK['muted']}}}.cut{{stroke:{DARK['page']}}}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" '
        f'font-family="{fonts}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>",
        f'<rect width="{width}" height="{height:g}" rx="8" class="page" fill="{LIGHT["page"]}"/>',
    ]
    return "\n".join([*head, *body, "</svg>\n"])


class _Panel(NamedTuple):
    """A part of the picture, and the value that its full width stands for."""

    top: float
    height: float
    total: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return LEFT + WIDTH * value / (self.total or 1)


def _round_up(size: float) -> float:
    """Return the smallest of 1, 2, 2.5 and 5 times a power of ten that is not below a size, for the ticks of a scale."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= size * (1 - 1e-9))


def find_prefix(keys: Iterable[str]) -> str:
    """Return the path that all units but the root have in common, with its last dot, such as "model.layers."."""
    levels = zip(*(key.split(".")[:-1] for key in keys if key), strict=False)
    return "".join(f"{names[0]}." for names in itertools.takewhile(lambda names: len({*names}) == 1, levels))


# --- The memory of a rank over the step, as stacked areas ---


class Moment(NamedTuple):
    """The bytes that a rank holds, by category, from the time at which its device reaches an event."""

    time: float
    event: Event
    held: Mapping[Category, int]
    total: int


def _iter_moments(timeline: Timeline) -> Iterator[Moment]:
    """Yield a moment for each event; one of another stream gets the time that computation has reached."""
    now = 0.0
    for event, held, (start, end) in zip(timeline.events, timeline.held, timeline.spans, strict=True):
        is_computed = event.stream == "compute"
        yield Moment(max(start, now) if is_computed else now, event, held, sum(held.values()))
        now = end if is_computed else now


def _draw_memory(panel: _Panel, moments: Sequence[Moment], limit: int) -> Iterable[str]:
    """Yield the stacked areas of memory by category, a scale, a mark at the peak, and a legend with the bytes held then."""
    nothing = Moment(0, Event("memory", "forward", "", {}), {}, 0)
    peak = max(moments, key=lambda moment: moment.total, default=nothing)
    tick = _round_up(max(peak.total, 1) / 5)
    most = math.ceil(peak.total / tick) * tick or tick
    for i in range(round(most / tick) + 1):
        y = panel.bottom - panel.height * i * tick / most
        yield _line(LEFT, y, LEFT + WIDTH, y)
        yield _text(LEFT - 8, y + 4, format_bytes(i * tick, digits=3), ink="muted", anchor="end")
    columns = [nothing] * COLUMNS  # of each its fullest moment
    for i, moment in enumerate(moments):
        end = moments[i + 1].time if i + 1 < len(moments) else panel.total
        first, last = (time * COLUMNS / (panel.total or 1) for time in (moment.time, end))
        for column in range(min(int(first), COLUMNS - 1), min(max(math.ceil(last), int(first) + 1), COLUMNS)):
            columns[column] = max(columns[column], moment, key=lambda one: one.total)
    shown: list[Category] = [category for category in CATEGORIES if any(moment.held.get(category) for moment in columns)]
    for i in reversed(range(len(shown))):  # the lower ones are drawn over the upper ones
        path = f"M{LEFT} {panel.bottom:g}"
        for column, moment in enumerate(columns):
            height = panel.height * sum(moment.held.get(category, 0) for category in shown[: i + 1]) / most
            path += f"V{panel.bottom - height:.1f}H{LEFT + (column + 1) * WIDTH / COLUMNS:g}"
        yield f'<path d="{path}V{panel.bottom:g}Z" fill="{CATEGORY_COLORS[shown[i]]}" {EDGES}/>'
    if limit <= most:
        y = panel.bottom - panel.height * limit / most
        yield _line(LEFT, y, LEFT + WIDTH, y, is_mark=True)
        yield _text(LEFT + 4, y - 4, f"memory of the device: {format_bytes(limit)}")
    x, right = panel.x(peak.time), LEFT + WIDTH + RIGHT - EDGE
    yield _line(x, panel.top - 6, x, panel.bottom, is_mark=True)
    where = f"peak: {peak.event.phase} of {peak.event.unit or 'the root'}"
    yield _text(x, panel.top - 10, where, anchor="start" if x < LEFT + WIDTH / 2 else "end")
    x = LEFT + WIDTH + 14
    yield _text(x, panel.top + 10, "at the peak", ink="muted")
    rows = [(category, CATEGORY_COLORS[category], peak.held[category], "normal") for category in reversed(shown)]
    for i, (name, color, size, weight) in enumerate([*rows, ("total", "none", peak.total, "bold")]):
        y = panel.top + 32 + 20 * i
        yield _box(x, y - 9, x + 10, height=10, fill=color)
        yield _text(x + 15, y, name, weight=weight)
        yield _text(right, y, format_bytes(size, digits=3), anchor="end", weight=weight)


# --- The time of a step: its phases, the units that the device works on, and what is computed, gathered and reduced ---


def _draw_runs(panel: _Panel, moments: Sequence[Moment]) -> Iterable[str]:
    """Yield a box for each phase of the step and, below, for each unit that the device works on or waits for."""
    prefix, free = find_prefix(moment.event.unit for moment in moments), 0.0
    yield _text(LEFT - 8, panel.top + 12, "phase", ink="muted", anchor="end")
    yield _text(LEFT - 8, panel.top + 28, "unit", ink="muted", anchor="end")
    for is_phase in (True, False):
        names = [moment.event.phase if is_phase else moment.event.unit for moment in moments]
        begins = [i for i, name in enumerate(names) if not i or name != names[i - 1]]
        edges = [LEFT, *(panel.x(moments[i].time) for i in begins[1:]), LEFT + WIDTH]
        for i, start, end in zip(begins, edges, edges[1:], strict=False):
            name, width, middle = names[i], end - start, (start + end) / 2
            label = name if is_phase else name.removeprefix(prefix) or "root"
            if is_phase:
                yield _box(start, panel.top, end - 1, fill=COMPUTE)
                if len(label) * 6.6 + 4 <= width:  # a character takes 0.6 of its size on average
                    yield _text(middle, panel.top + 12, label, ink="on-color", anchor="middle")
                elif i == begins[-1]:
                    yield _text(end + 6, panel.top + 12, label)
            elif width >= 0.8:
                yield _box(start, panel.top + 20, end - 0.8, height=STRIP / 2, fill=COMPUTE, title=name or "the root")
                if middle - len(label) * 3 >= free:
                    yield _text(middle, panel.top + 39, label, ink="muted", size=10, anchor="middle")
                    free = middle + len(label) * 3 + 6


def _find_spans(timeline: Timeline) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return when each stream is busy, by its name and colour; computation is always among them."""
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {("compute", COMPUTE): []}
    for event, (start, end) in zip(timeline.events, timeline.spans, strict=True):
        if end > start:
            spans.setdefault(STREAMS.get(event.kind, ("compute", COMPUTE)), []).append((start, end))
    return spans


def _draw_streams(panel: _Panel, timeline: Timeline) -> Iterable[str]:
    """Yield a row for each stream, with its busy time at the right end, and the scale of time below."""
    for i, ((name, color), spans) in enumerate(_find_spans(timeline).items()):
        y, boxes, start, end = panel.top + i * ROW, list[str](), 0.0, 0.0
        for first, last in [*spans, (math.inf, math.inf)]:
            if first - end > panel.total / WIDTH / 2:  # else the gap cannot be seen
                boxes += [_box(panel.x(start), y, panel.x(end), height=ROW - 4)] if end else []
                start = first
            end = last
        busy = format_seconds(sum(end - start for start, end in spans), digits=3)
        idle = f", {format_seconds(timeline.exposed_seconds, digits=3)} idle" if name == "compute" else ""
        yield _text(LEFT - 8, y + 13, name, ink="muted", anchor="end")
        yield _group([_box(LEFT, y, LEFT + WIDTH, height=ROW - 4)], f'class="track" fill="{LIGHT["track"]}"')
        yield _group(boxes, f'fill="{color}"')
        yield _text(LEFT + WIDTH + RIGHT - EDGE, y + 13, busy + idle, anchor="end")
    tick = _round_up(panel.total / 8) if panel.total else 1.0
    for i in range(int(panel.total / tick * (1 + 1e-9)) + 1):
        x = panel.x(i * tick)
        yield _line(x, panel.bottom, x, panel.bottom + 4)
        yield _text(x, panel.bottom + 17, format_seconds(i * tick, digits=3), ink="muted", anchor="middle")


def draw_plan(timeline: Timeline, spec: PartitionSpec, notes: Sequence[str]) -> str:
    """Return the text of an SVG file: memory by category, units and streams over time."""
    moments = [*_iter_moments(timeline)]
    memory = _Panel(92, 210, timeline.seconds)
    runs = memory._replace(top=memory.bottom + 8, height=44)
    streams = runs._replace(top=runs.bottom + 4, height=ROW * len(_find_spans(timeline)))
    peak = max(sum(held.values()) for held in timeline.peaks.values())
    title = f"A training step of one rank: {format_bytes(peak)} at the peak, {format_seconds(timeline.seconds)}"
    sizes, numel = " x ".join(f"{name}={size:,}" for name, size in spec.bound_mesh.sizes), sum(unit.numel for unit in spec)
    scale, word = next(((n, word) for n, word in ((1e9, " billion"), (1e6, " million")) if numel >= n), (1, ""))
    count = f"{numel / scale:.3g}{word}" if word else f"{numel:,}"
    facts = [f"mesh {sizes}", f"{count} parameters in {len(spec):,} unit{'s' * (len(spec) != 1)}", *notes]
    body = [
        _text(LEFT, 36, title, size=16, weight="bold"),
        _text(LEFT, 56, " · ".join(facts), ink="muted", size=12),
        *_draw_memory(memory, moments, int(timeline.hardware.memory)),
        *_draw_runs(runs, [moment for moment in moments if moment.event.stream == "compute"]),
        *_draw_streams(streams, timeline),
    ]
    return _document(streams.bottom + 17 + EDGE, title, body)
