"""The measures and colours of the picture, and its short forms of numbers and names."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..events import Category, Phase
from ..table import format_bytes

__all__ = [
    "CATEGORY_COLORS",
    "EDGE",
    "LEFT",
    "PHASE_COLORS",
    "RIGHT",
    "STREAM_COLORS",
    "STRIP",
    "WIDTH",
    "find_prefix",
    "format_label",
    "format_numel",
    "format_short_bytes",
    "format_short_seconds",
    "round_up",
]

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
