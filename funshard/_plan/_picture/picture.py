"""The picture of a plan: memory, units and streams on one scale of time, and the slices on the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..table import format_bytes, format_seconds
from .memory import draw_memory
from .moments import iter_moments
from .slices import RANK_ROW, count_rows, draw_ranks
from .streams import STREAM_ROW, draw_phases, draw_seconds, draw_streams, draw_units, used_streams
from .style import EDGE, LEFT, RIGHT, STRIP, WIDTH, find_prefix, format_numel
from .svg import Panel, draw_text, make_document

if TYPE_CHECKING:
    from ..plan import Plan

__all__ = ["draw_plan"]


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
