"""plan: what a training step holds, sends and takes on some hardware, as a table and a picture."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from .._core.checks import bind_spec, check_spec
from .._core.spec import PartitionSpec
from .._core.unit import P
from .._sharding.full import parse_bytes
from .._spec.table import format_rows
from .record import (
    CATEGORIES,
    Category,
    Event,
    Held,
    Phase,
    Traffic,
    UnitBytes,
    map_p,
    record_schedule,
    record_step,
    resolve_optimizer,
    unit_bytes,
)

# --- Hardware: the rates that turn bytes and FLOPs into seconds ---


@dataclass(frozen=True)
class Hardware:
    """The rates of one device and of its links, from which a plan computes times.

    The defaults are round figures for an H100 of 80 GB and a network of 400 Gbit/s for each device. Give measured ones for
    times to trust: the FLOP rate that a large matrix product reaches, and the bandwidth of a large all-gather on each axis.

    Args:
        memory: Bytes of device memory, such as ``"80GB"``.
        flops: Floating point operations per second.
        bandwidth: Bytes per second that a rank sends over each mesh axis, or one number for all axes.
        latency: Seconds that a collective takes beside its bytes.
        memory_bandwidth: Bytes per second of device memory, for the update.
        host_bandwidth: Bytes per second between host and device, for ``P(offload=...)``.

    Raises:
        ValueError: For a rate that is not positive.

    Example:
        >>> import funshard as fs
        >>> fs.Hardware(memory="24GB", bandwidth={"replicate": 12e9, "shard": 150e9}).memory
        24000000000
    """

    memory: int | str = "80GB"
    flops: float = 400e12
    bandwidth: float | Mapping[str, float] = field(default=50e9, hash=False)
    latency: float = 20e-6
    memory_bandwidth: float = 2e12
    host_bandwidth: float = 25e9

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", parse_bytes(self.memory))
        by_axis = self.bandwidth if isinstance(self.bandwidth, Mapping) else {"all": self.bandwidth}
        rates = {f"bandwidth of axis '{axis}'": rate for axis, rate in by_axis.items()}
        rates |= {name: getattr(self, name) for name in ("memory", "flops", "memory_bandwidth", "host_bandwidth")}
        for name, rate in rates.items():
            if not rate > 0:
                raise ValueError(f"Hardware: {name}: expected a positive number, got {rate!r}")
        if not self.latency >= 0:
            raise ValueError(f"Hardware: latency: expected at least 0 seconds, got {self.latency!r}")

    def seconds(self, event: Event) -> float:
        """Return the time that an event takes by itself; ValueError where the axis of its collective has no bandwidth.

        Args:
            event: One of ``Plan.events``.
        """
        if sent := event.collective:
            rate = self.bandwidth.get(sent.axis) if isinstance(self.bandwidth, Mapping) else self.bandwidth
            if rate is None:
                raise ValueError(f"Hardware: no bandwidth for axis '{sent.axis}': expected one of {dict(self.bandwidth)}")  # pyright: ignore
            return self.latency + sent.sent_bytes / rate
        rate = self.host_bandwidth if event.kind == "copy" else self.memory_bandwidth
        return event.flops / self.flops + event.moved_bytes / rate


# --- A plan: the fold of a step's events, what it prints, and other choices beside it ---


def replace_p(spec: PartitionSpec, p: P) -> PartitionSpec:
    """Return the spec with another `P` for its main units, of most elements; ``local``, ``at_rest`` and ``align`` stay."""
    numel = Counter[P]()
    for unit in spec:
        numel[unit.p] += unit.numel
    old = max(numel, key=numel.__getitem__, default=spec.root)
    new = dataclasses.replace(p, local=old.local, at_rest=old.at_rest, align=old.align)
    return map_p(spec, lambda one: new if one == old else one)


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch: a number, or tensors; 0 for None."""
    if batch is None or (type(batch) is int and batch > 0):
        return batch or 0
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    if not tensors:
        error = ValueError if isinstance(batch, int | float) else TypeError
        raise error(f"plan: batch: expected a number of tokens, at least 1, or tensors, or None, got {batch!r:.80}")
    integers = [x for x in tensors if not x.is_floating_point() and not x.is_complex()]
    return integers[0].numel() if integers else tensors[0].numel() // max(tensors[0].shape[-1] if tensors[0].dim() else 1, 1)


class Moment(NamedTuple):
    """An event of a step with what a rank holds after it, and when it runs, in seconds from the start of the step."""

    event: Event
    held: Held  # bytes by category
    time: float  # that computation has reached
    start: float
    end: float

    @property
    def total(self) -> int:
        """The bytes that are held."""
        return sum(self.held.values())


class Plan:
    """The memory, communication and time of a training step on one rank. `plan` makes it; ``print`` shows it as a table.

    Beside what is listed here it has ``spec``, ``hardware``, ``events``, ``units`` (by unit key the bytes between steps),
    ``at_rest`` (the bytes on the device between steps, by category), ``moments`` (of each event), ``peaks`` (the bytes of each
    phase when the most are held), ``traffic`` (a line for each mesh axis and kind of collective), ``seconds`` and
    ``exposed_seconds`` (the time of the step, and the part in which the device waits for collectives and copies), and
    ``tokens`` and ``batch_bytes`` of this rank's batch.

    The device computes, its network sends, and its host link copies. Memory follows the order of the program. A collective
    starts when the one before it and the computation that was started before it have ended, as NCCL's do; a computation starts
    when those that it is `Event.after` have ended.
    """

    def __init__(
        self,
        spec: PartitionSpec,
        hardware: Hardware,
        events: Sequence[Event],
        units: dict[str, UnitBytes],
        batch_bytes: int,
        **step: Any,
    ) -> None:
        self.spec, self.hardware, self.events, self.units, self.batch_bytes = spec, hardware, events, units, batch_bytes
        self.tokens = count_tokens(step["batch"])
        self.has_activations = step["step"] is not None
        self._step = step  # the arguments of `plan` for another spec
        there = [unit for unit in self.units.values() if not unit.on_host]
        self.at_rest: dict[Category, int] = {
            "parameters": sum(unit.parameters for unit in there),
            "optimizer": sum(unit.optimizer for unit in there),
            **({"activations": batch_bytes} if batch_bytes else {}),
        }
        self.moments: list[Moment] = []
        self.peaks: dict[Phase, Held] = {}
        held: Held = {**dict.fromkeys(CATEGORIES, 0), **self.at_rest}
        sums: dict[tuple[str, str], Traffic] = {}
        free, busy = {"compute": 0.0, "network": 0.0, "host": 0.0}, 0.0
        for event in events:
            held = {category: size + event.memory.get(category, 0) for category, size in held.items()}
            if event.phase not in self.peaks or sum(held.values()) > sum(self.peaks[event.phase].values()):
                self.peaks[event.phase] = held
            seconds = hardware.seconds(event)
            start = max([free[event.stream], free["compute"], *(self.moments[i].end for i in event.after)])
            time = start if event.stream == "compute" else free["compute"]
            free[event.stream] = start + seconds
            self.moments.append(Moment(event, held, time, start, start + seconds))
            if event.collective:
                key, one = (event.collective.axis, event.collective.op), dataclasses.replace(event.collective, seconds=seconds)
                sums[key] = sums[key] + one if key in sums else one
            busy += seconds if event.stream == "compute" else 0.0
        self.traffic = (*sums.values(),)
        self.seconds = max((moment.end for moment in self.moments), default=0.0)
        self.exposed_seconds = self.seconds - busy

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory between steps, of units with ``P(offload="params")``."""
        return sum(unit.parameters + unit.optimizer for unit in self.units.values() if unit.on_host)

    @property
    def peak(self) -> int:
        """The most bytes that are on the device at once."""
        return max(sum(held.values()) for held in self.peaks.values())

    @property
    def padding(self) -> int:
        """The elements of all buffers that are no parameter's."""
        return sum(unit.padding for unit in self.units.values())

    def compare(self, choices: Mapping[str, PartitionSpec | P]) -> dict[str, Plan]:
        """Return the plans of other choices for the same step, batch, optimizer and hardware, fastest first.

        Args:
            choices: By name a spec, on a mesh or else on this plan's, or a `P` for the units that have this plan's main one.
        """
        specs = {name: replace_p(self.spec, one) if isinstance(one, P) else check_spec(one) for name, one in choices.items()}
        bound = {name: spec if spec.sizes else spec.on(self.spec.bound_mesh) for name, spec in specs.items()}
        plans = {name: plan(spec, hardware=self.hardware, **self._step) for name, spec in bound.items()}
        return dict(sorted(plans.items(), key=lambda item: (item[1].seconds, item[1].peak)))

    def to_svg(self) -> str:
        """Return a picture as the text of an SVG file: memory, units and streams over the step."""
        numel, memory = sum(unit.numel for unit in self.spec), _Panel(92, 210, self.seconds)
        runs = memory._replace(top=memory.bottom + 8, height=44)
        streams = runs._replace(top=runs.bottom + 4, height=ROW * len(_find_spans(self)))
        title = f"A training step of one rank: {format_bytes(self.peak)} at the peak, {format_seconds(self.seconds)}"
        sizes = " x ".join(f"{name}={size:,}" for name, size in self.spec.bound_mesh.sizes)
        scale, word = next(((n, word) for n, word in ((1e9, " billion"), (1e6, " million")) if numel >= n), (1, ""))
        count = f"{numel / scale:.3g}{word}" if word else f"{numel:,}"
        facts = [f"mesh {sizes}", f"{count} parameters in {len(self.spec):,} unit{'s' * (len(self.spec) != 1)}"]
        facts.append(f"{self.tokens:,} tokens on a rank" if self.tokens else "without computation, which needs a batch")
        facts += [] if self.has_activations else ["without activations, which need step="]
        body = [
            _text(LEFT, 36, title, size=16, weight="bold"),
            _text(LEFT, 56, " · ".join(facts), ink="muted", size=12),
            *_draw_memory(memory, self.moments, int(self.hardware.memory)),
            *_draw_runs(runs, [moment for moment in self.moments if moment.event.stream == "compute"]),
            *_draw_streams(streams, self),
        ]
        return _document(streams.bottom + 17 + EDGE, title, body)

    def __str__(self) -> str:
        shown = CATEGORIES if self.has_activations else CATEGORIES[:-1]
        memory = [["bytes per rank", *shown, "total"]]
        for name, held in (("at rest", self.at_rest), *self.peaks.items()):
            memory.append([name, *(format_bytes(held.get(c, 0)) for c in shown), format_bytes(sum(held.values()))])
        notes = [] if self.has_activations else ["without activations: those need step="]
        if self.host_bytes:
            notes.append(f"{format_bytes(self.host_bytes)} in host memory")
        sizes = dict(self.spec.bound_mesh.sizes)
        traffic = [["axis", "collective", "count", "in", "out", "sent by a rank", "time"]]
        for one in self.traffic:
            nbytes = map(format_bytes, (one.input_bytes, one.output_bytes, one.sent_bytes))
            axis = f"{one.axis}={sizes[one.axis]}" if one.axis in sizes else one.axis
            traffic.append([axis, one.op, f"{one.count:,}", *nbytes, format_seconds(one.seconds)])
        without = "" if self.tokens else "; without computation: that needs batch="
        step = f"step: {format_seconds(self.seconds)}, {format_seconds(self.exposed_seconds)} of it waiting{without}"
        sent = format_rows(traffic) if len(traffic) > 1 else ["nothing is sent"]
        return "\n".join([*format_rows(memory), *notes, "", *sent, "", step, f"padding: {self.padding:,} elements"])

    def __repr__(self) -> str:
        return f"<Plan: {self.peak:,} bytes at the peak, {self.seconds:.4g} s, on {dict(self.spec.bound_mesh.sizes)}>"


def plan(
    spec: PartitionSpec,
    *,
    batch: Any = None,
    step: Callable[..., Any] | None = None,
    optimizer: object = "adamw",
    hardware: Hardware | None = None,
) -> Plan:
    """Return what one rank holds, sends and computes in a training step, before it runs.

    The mesh may have any sizes (``spec.on({"replicate": 32, "shard": 512})``), and no process group is needed.

    Without ``step`` `functional_call` runs on shapes, with a model that only reads its parameters, in the order of
    ``spec.order``. The update writes in place, as with ``donate=True``; nothing counts activations. With ``step`` the step runs
    once on fake tensors, on a process group of ranks in name only, and all that it allocates, computes and sends is counted.
    Indices that a model computes from its data, such as a router's, are spread evenly. See ``examples/guide/planning.md``.

    Args:
        spec: The spec, on a mesh.
        batch: This rank's number of tokens, or its batch: tensors of which the first one with integers has an element for each
            token, or else the first one a row. Without it, computation takes no time.
        step: ``step(params, state, batch, *, spec)``: the training step, which gives ``spec`` to `functional_call`. ``batch``
            are tensors.
        optimizer: The name of a class of torch.optim, such as "adamw", such a class, the pair ``(init, update)``, or None.
        hardware: The rates that times are computed from; a `Hardware` with its defaults if not given.

    Raises:
        ValueError: For simulated ranks, a batch of no tokens, an axis without a bandwidth, and an unknown optimizer.
        RuntimeError: With ``step``, if this process has a process group.
        NotImplementedError: With ``step``, for ``P(offload=...)`` where the batch is not on an accelerator.

    Example:
        >>> import torch, funshard as fs
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
        >>> plan = fs.plan(fs.by_type(torch.nn.Linear)(model).on({"shard": 8}))
        >>> plan.at_rest
        {'parameters': 4196864, 'optimizer': 8393728}
        >>> [(one.op, one.count, one.output_bytes) for one in plan.traffic]
        [('all_gather', 3, 50368512), ('reduce_scatter', 2, 4196864)]
    """
    spec = bind_spec(spec)
    if spec.bound_mesh.is_simulated:
        raise ValueError("plan: the spec is on simulated ranks: expected a mesh of processes, or sizes such as {'shard': 8}")
    if not isinstance(hardware, Hardware | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"plan: hardware: expected a Hardware such as fs.Hardware(memory='80GB'), or None, got {hardware!r}")
    init, tokens = resolve_optimizer(optimizer)[0], count_tokens(batch)
    units = unit_bytes(spec, init)
    events, size = record_step(step, spec, batch, init) if step else (record_schedule(spec, units, tokens), 0)
    return Plan(spec, hardware or Hardware(), events, units, size, batch=batch, step=step, optimizer=optimizer)


# --- Bytes and times as a plan writes them ---


def format_bytes(size: float, *, digits: int | None = None) -> str:
    """Format a number of bytes with a decimal unit, and two digits after the point or so many in all: "1.23 GB"."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{_round(size, digits)} {units[0]}"


def format_seconds(seconds: float, *, digits: int | None = None) -> str:
    """Format a time as `format_bytes`: "12.3 ms"."""
    is_short = digits is not None and 0 < seconds < 1e-3
    unit, size = ("µs", 1e-6) if is_short else ("s", 1.0) if seconds >= 1 or (digits and not seconds) else ("ms", 1e-3)
    return f"{_round(seconds / size, digits)} {unit}"


def _round(number: float, digits: int | None) -> str:
    return f"{number:.2f}" if digits is None else f"{float(f'{number:.{digits}g}'):g}"


# --- The picture of a plan as an SVG file: memory, units and streams over time ---

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


def _find_prefix(keys: Iterable[str]) -> str:
    """Return the path that all units but the root have in common, with its last dot, such as "model.layers."."""
    levels = zip(*(key.split(".")[:-1] for key in keys if key), strict=False)
    return "".join(f"{names[0]}." for names in itertools.takewhile(lambda names: len({*names}) == 1, levels))


# --- The memory of a rank over the step, as stacked areas ---


def _draw_memory(panel: _Panel, moments: Sequence[Moment], limit: int) -> Iterable[str]:
    """Yield the stacked areas of memory by category, a scale, a mark at the peak, and a legend with the bytes held then."""
    nothing = Moment(Event("memory", "forward", "", {}), {}, 0, 0, 0)
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
    prefix, free = _find_prefix(moment.event.unit for moment in moments), 0.0
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


def _find_spans(plan: Plan) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return when each stream is busy, by its name and colour; computation is always among them."""
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {("compute", COMPUTE): []}
    for moment in plan.moments:
        if moment.end > moment.start:
            spans.setdefault(STREAMS.get(moment.event.kind, ("compute", COMPUTE)), []).append((moment.start, moment.end))
    return spans


def _draw_streams(panel: _Panel, plan: Plan) -> Iterable[str]:
    """Yield a row for each stream, with its busy time at the right end, and the scale of time below."""
    for i, ((name, color), spans) in enumerate(_find_spans(plan).items()):
        y, boxes, start, end = panel.top + i * ROW, list[str](), 0.0, 0.0
        for first, last in [*spans, (math.inf, math.inf)]:
            if first - end > panel.total / WIDTH / 2:  # else the gap cannot be seen
                boxes += [_box(panel.x(start), y, panel.x(end), height=ROW - 4)] if end else []
                start = first
            end = last
        busy = format_seconds(sum(end - start for start, end in spans), digits=3)
        idle = f", {format_seconds(plan.exposed_seconds, digits=3)} idle" if name == "compute" else ""
        yield _text(LEFT - 8, y + 13, name, ink="muted", anchor="end")
        yield _group([_box(LEFT, y, LEFT + WIDTH, height=ROW - 4)], f'class="track" fill="{LIGHT["track"]}"')
        yield _group(boxes, f'fill="{color}"')
        yield _text(LEFT + WIDTH + RIGHT - EDGE, y + 13, busy + idle, anchor="end")
    tick = _round_up(panel.total / 8) if panel.total else 1.0
    for i in range(int(panel.total / tick * (1 + 1e-9)) + 1):
        x = panel.x(i * tick)
        yield _line(x, panel.bottom, x, panel.bottom + 4)
        yield _text(x, panel.bottom + 17, format_seconds(i * tick, digits=3), ink="muted", anchor="middle")
