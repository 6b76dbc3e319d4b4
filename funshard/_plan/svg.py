"""Parts of an SVG file, and the measures and colours of a plan's picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal, NamedTuple

from .events import Category, Phase
from .formats import format_bytes

__all__ = [
    "CATEGORY_COLORS",
    "EDGE",
    "LEFT",
    "PHASE_COLORS",
    "RIGHT",
    "STREAM_COLORS",
    "STRIP",
    "WIDTH",
    "Panel",
    "draw_box",
    "draw_copy",
    "draw_group",
    "draw_line",
    "draw_steps",
    "draw_text",
    "find_prefix",
    "format_label",
    "format_numel",
    "format_short_bytes",
    "format_short_seconds",
    "has_room",
    "make_document",
    "measure_text",
    "round_up",
]


Ink = Literal["ink", "muted", "on-color"]
"""The role of a text's colour: on the page, beside something more important, or on a coloured box."""

_LIGHT = {"page": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "on-color": "#ffffff", "track": "#eef1f4", "grid": "#d1d9e0"}
_DARK = {"page": "#0d1117", "ink": "#e6edf3", "muted": "#9198a1", "on-color": "#ffffff", "track": "#1c2128", "grid": "#3d444d"}
_CHARACTER = 0.6
"""The width of a character in font sizes, on average."""


class Panel(NamedTuple):
    """A rectangle of the picture, and the value that its full width stands for."""

    left: float
    top: float
    width: float
    height: float
    total: float

    @property
    def right(self) -> float:
        """The x coordinate of the right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The y coordinate of the bottom edge."""
        return self.top + self.height

    def scale(self, value: float) -> float:
        """Return the width that stands for a value."""
        return self.width * value / (self.total or 1)

    def x(self, value: float) -> float:
        """Return the x coordinate of a value."""
        return self.left + self.scale(value)

    def below(self, gap: float, height: float) -> Panel:
        """Return a panel of the same width below this one."""
        return self._replace(top=self.bottom + gap, height=height)


def make_document(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """Return the text of an SVG file; colours are attributes, which a style sheet overrides in dark mode."""
    dark = "".join(f".{role}{{{'stroke' if role == 'grid' else 'fill'}:{color}}}" for role, color in _DARK.items())
    dark += f".hatch{{stroke:{_DARK['muted']}}}.cut{{stroke:{_DARK['page']}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>",
            '<defs><pattern id="padding" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="5" height="5" class="track" fill="{_LIGHT["track"]}"/>'
            f'<path d="M1.5 0v5" class="hatch" stroke="{_LIGHT["muted"]}" stroke-width="1.6"/></pattern></defs>',
            f'<rect width="{width:g}" height="{height:g}" rx="8" class="page" fill="{_LIGHT["page"]}"/>',
            *body,
            "</svg>\n",
        ]
    )


def draw_text(
    x: float,
    y: float,
    text: str,
    *,
    ink: Ink = "ink",
    size: float = 12,
    anchor: str = "start",
    is_bold: bool = False,
    has_halo: bool = False,
) -> str:
    """Return a text with its start, middle or end at a point of its base line; a halo makes it legible on any colour."""
    style = "" if anchor == "start" else f' text-anchor="{anchor}"'
    style += ' font-weight="600"' if is_bold else ""
    style += f' stroke="{_LIGHT["page"]}" stroke-width="3" paint-order="stroke"' if has_halo else ""
    role = f"{ink} cut" if has_halo else ink
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" class="{role}" fill="{_LIGHT[ink]}"{style}>{escape(text)}</text>'
    )


def measure_text(text: str, size: float) -> float:
    """Return the approximate width of a text."""
    return len(text) * size * _CHARACTER


def has_room(text: str, width: float, size: float) -> bool:
    """Return whether a text fits into a width, with a small margin."""
    return measure_text(text, size) + 4 <= width


def draw_box(x: float, y: float, width: float, height: float, *, fill: str = "", title: str = "") -> str:
    """Return a rectangle in a colour, in the colour of a role, or in its group's, with a tooltip."""
    end = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect x="{x:.2f}" y="{y:g}" width="{max(width, 0):.2f}" height="{height:g}"{_fill_attributes(fill)}{end}'


def draw_group(fill: str, boxes: Iterable[str], *, name: str = "", has_edges: bool = False) -> str:
    """Return boxes of one colour as a group, with or without edges; ``name`` is what `draw_copy` refers to."""
    edges = f' class="cut" stroke="{_LIGHT["page"]}" stroke-width="0.8"' if has_edges else ""
    identity = f' id="{name}"' if name else ""
    return "\n".join([f"<g{identity}{_fill_attributes(fill)}{edges}>", *boxes, "</g>"])


def draw_copy(name: str, y: float) -> str:
    """Return a copy of a named group, moved down by ``y``."""
    return f'<use href="#{name}" y="{y:g}"/>'


def _fill_attributes(color: str) -> str:
    """Return the fill attributes of a colour, or of a role, whose colour differs in dark mode."""
    return f' class="{color}" fill="{_LIGHT[color]}"' if color in _LIGHT else f' fill="{color}"' if color else ""


def draw_line(x1: float, y1: float, x2: float, y2: float, *, is_dashed: bool = False) -> str:
    """Return a thin grid line, or a dashed line for a mark."""
    role, dash = ("hatch", ' stroke-dasharray="3 3"') if is_dashed else ("grid", "")
    color = _LIGHT["muted" if is_dashed else "grid"]
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{role}" stroke="{color}"{dash} fill="none"/>'


def draw_steps(panel: Panel, heights: Sequence[float], fill: str) -> str:
    """Return the filled area between a curve of steps of equal width and the bottom of a panel."""
    bottom, width = panel.bottom, panel.width / len(heights)
    ys = [f"{bottom - h:.1f}" for h in heights]
    path, at = f"M{panel.left:g} {bottom:g}V{ys[0]}", 0
    for i in range(1, len(ys)):
        if ys[i] != ys[at]:
            path, at = f"{path}H{panel.left + i * width:g}V{ys[i]}", i
    edge = f'class="cut" stroke="{_LIGHT["page"]}" stroke-width="0.6"'
    return f'<path d="{path}H{panel.right:g}V{bottom:g}Z" fill="{fill}" {edge}/>'


# --- The measures and colours of the picture, and its short forms of numbers and names ---

LEFT, WIDTH, RIGHT = 92, 730, 178
"""The widths of the names at the left, of what is to scale, and of the figures at the right."""
EDGE, STRIP = 24, 16

CATEGORY_COLORS: dict[Category, str] = {
    "parameters": "#0072b2",
    "optimizer": "#56b4e9",
    "gathered": "#007f5f",
    "gradients": "#e69f00",
    "activations": "#d994ba",
}
"""After the palette of Okabe and Ito, which readers with any colour vision tell apart; neighbours differ in lightness, too."""
STREAM_COLORS = {
    "compute": "#6e7781",
    "gathers": CATEGORY_COLORS["gathered"],
    "reductions": CATEGORY_COLORS["gradients"],
    "exchanges": CATEGORY_COLORS["activations"],
    "host copies": "#d55e00",
}
PHASE_COLORS: dict[Phase, str] = {"forward": "#818b98", "backward": "#59636e", "update": "#818b98"}


def find_prefix(keys: Iterable[str]) -> str:
    """Return the path that all units but the root have in common, with its last dot, such as "model.layers."."""
    parts = [key.split(".") for key in keys if key]
    common: list[str] = []
    for some in zip(*parts, strict=False):
        if len({*some}) > 1:
            break
        common.append(some[0])
    if parts and len(common) == min(map(len, parts)):  # a unit's own name stays
        common.pop()
    return "".join(f"{part}." for part in common)


def format_label(unit: str, prefix: str) -> str:
    """Return a unit's name without the common prefix; "root" for the root unit."""
    return unit.removeprefix(prefix) or "root"


def format_numel(numel: int) -> str:
    """Format a number of elements: "6.74 billion"."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if numel >= size:
            return f"{numel / size:.3g} {name}"
    return f"{numel:,}"


def format_short_bytes(size: float) -> str:
    """Format bytes with three digits: "35.2 GB"."""
    number, unit = format_bytes(size).split()
    return f"{float(number):.0f} {unit}" if float(number) >= 100 else f"{float(number):.3g} {unit}"


def format_short_seconds(seconds: float) -> str:
    """Format a time with three digits: "413 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or not seconds:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def round_up(size: float) -> float:
    """Return the smallest of 1, 2, 2.5 and 5 times a power of ten that is not below a size, for the ticks of a scale."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * part for part in (1, 2, 2.5, 5, 10) if power * part >= size * (1 - 1e-9))
