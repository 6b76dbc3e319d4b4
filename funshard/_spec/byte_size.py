"""Sizes in bytes, as people write them."""

from __future__ import annotations

import contextlib
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(size: float | str, what: str = "memory") -> int:
    """Return a number of bytes from "80GB", "512MiB" or a number.

    Raises:
        ValueError: For anything else, naming what has this size.
    """
    if not isinstance(size, str):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # None, NaN, infinity
            return int(size)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?I?)B?\s*", str(size).upper())
    if not isinstance(size, str) or match is None or match[2] not in _UNITS:
        raise ValueError(f"{what}: expected a number of bytes such as '80GB' or '512MiB', got {size!r}")
    return int(float(match[1]) * _UNITS[match[2]])
