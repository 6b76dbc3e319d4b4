"""Regions: the nodes of a traced step that are to be recomputed for its derivatives, annotated for passes over the graph.

Inside torch.compile a function is traced once, and its derivatives with it: nothing runs again. The trace of a `remat` is
annotated with its region, and _compiled/recompute.py computes that again in the graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Generator

from torch import Tensor

from ... import _torch
from ..._spec.options import Remat, Save

__all__ = ["NAME_KEY", "REGION_PREFIX", "RecomputeRegions", "collect_regions", "current_regions", "is_collecting_regions"]
__all__ += ["mark_name", "mark_region", "missing_names_message"]

REGION_PREFIX, NAME_KEY = "funshard_region_", "funshard_name"
"""Keys of annotations: the first, with a number, on all that a region traces; the second on a view of a named tensor."""


class RecomputeRegions:
    """The regions of one traced call, by number: an inner one has a larger number than those around it."""

    def __init__(self) -> None:
        self.remats: list[Remat] = []
        self.problem = ""  # the message of an error that the caller raises after the trace
        self._open: list[tuple[int, set[str]]] = []

    def enter(self, remat: Remat) -> int:
        """Begin a region, and return its number."""
        self._open.append((len(self.remats), set()))
        self.remats.append(remat)
        return len(self.remats) - 1

    def leave(self, number: int, name: str) -> None:
        """End a region. Others that are open inside it are left over from a trace that Dynamo has given up."""
        while (last := self._open.pop())[0] > number:
            pass
        names = self.remats[number].names
        if names and not names & last[1]:
            self.problem = missing_names_message(name, names, last[1])

    def names_in(self, number: int) -> set[str]:
        """Return the names seen so far in an open region."""
        return next(seen for region, seen in self._open if region == number)

    def is_saved(self, name: str) -> bool:
        """Note a name that a tensor is given, and return whether an open region saves it."""
        for _, seen in self._open:
            seen.add(name)
        return any(name in self.remats[number].names for number, _ in self._open)


def missing_names_message(name: str, names: Collection[str], seen: Collection[str]) -> str:
    """Return the error message for a function that gives none of the names that are to be saved."""
    wanted, given = (", ".join(sorted(map(repr, some))) for some in (names, seen))
    expected = f"some of {given}" if seen else "funshard.checkpoint_name(x, name) in it"
    return f"{name} is to save {wanted}, and gave none of these names while it ran: expected {expected}"


_COLLECTING = threading.local()


@contextlib.contextmanager
def collect_regions(regions: RecomputeRegions | None = None) -> Generator[RecomputeRegions]:
    """Collect the regions of what is traced within this context: in ``regions``, if given."""
    before = current_regions()
    _COLLECTING.regions = regions = regions or RecomputeRegions()
    try:
        yield regions
    finally:
        _COLLECTING.regions = before


def current_regions() -> RecomputeRegions | None:
    """Return where regions are collected now."""
    return getattr(_COLLECTING, "regions", None)


@_torch.assume_constant
def is_collecting_regions() -> bool:
    """Return whether regions are collected now."""
    return current_regions() is not None


@contextlib.contextmanager
def mark_region(remat: Remat, name: str) -> Generator[None]:
    """Annotate what torch.compile traces within this context as a region; ``name`` is what errors call it."""
    number = _enter_region(remat.save)  # Dynamo may know only the fields of a Remat that was made in what is traced
    if number < 0:
        yield
        return
    with _torch.annotate_graph(**{f"{REGION_PREFIX}{number}": True}):
        yield
    _leave_region(number, name)


def mark_name(x: Tensor, name: str) -> Tensor:
    """Return a tensor annotated with a name if an open region saves it."""
    if not _is_name_saved(name):
        return x
    with _torch.annotate_graph(**{NAME_KEY: name}):
        return x.view_as(x)


@_torch.assume_constant
def _enter_region(save: Save | None) -> int:
    return -1 if (regions := current_regions()) is None else regions.enter(Remat(save))


@_torch.assume_constant
def _leave_region(number: int, name: str) -> None:
    regions = current_regions()
    assert regions is not None
    regions.leave(number, name)


@_torch.assume_constant
def _is_name_saved(name: str) -> bool:
    return (regions := current_regions()) is not None and regions.is_saved(name)
