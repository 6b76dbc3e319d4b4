"""The options of a functional_call that its schedule follows."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CallOptions"]


class CallOptions(NamedTuple):
    """How far gathers run ahead and reductions behind, and whether ranks compare what they start."""

    prefetch: int = 1
    """Units that are gathered ahead of their use."""
    in_flight: int = 1
    """Units whose gradients are being reduced."""
    check_order: bool = True
    """Whether ranks compare the order of their collectives."""
