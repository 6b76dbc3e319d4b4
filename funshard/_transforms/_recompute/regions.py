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
        self._names: list[str] = []
        self.seen: set[str] = set()
        """The names that tensors were given."""
        self.problem = ""

    def enter(self, remat: Remat, name: str) -> int:
        """Begin a region, which errors call ``name``, and return its number."""
        self.remats.append(remat)
        self._names.append(name)
        return len(self.remats) - 1

    def is_saved(self, name: str) -> bool:
        """Note a name that a tensor is given, and return whether a region saves it."""
        self.seen.add(name)
        return any(name in remat.names for remat in self.remats)

    def check(self) -> None:
        """Note and raise a ValueError for a region that is to save names, where none of them was given."""
        for name, remat in zip(self._names, self.remats, strict=True):
            if remat.names and not remat.names & self.seen:
                self.problem = missing_names_message(name, remat.names, self.seen)
                raise ValueError(self.problem)


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
    """Return whether there is such a place."""
    return current_regions() is not None


@contextlib.contextmanager
def mark_region(remat: Remat, name: str) -> Generator[None]:
    """Annotate what torch.compile traces within this context as a region; ``name`` is what errors call it."""
    number = _enter_region(remat.save, name)  # Dynamo may know only the fields of a Remat that was made in what is traced
    with contextlib.nullcontext() if number < 0 else _torch.annotate_graph(**{f"{REGION_PREFIX}{number}": True}):
        yield


def mark_name(x: Tensor, name: str) -> Tensor:
    """Return a tensor annotated with a name if an open region saves it."""
    if not _is_name_saved(name):
        return x
    with _torch.annotate_graph(**{NAME_KEY: name}):
        return x.view_as(x)


@_torch.assume_constant
def _enter_region(save: Save | None, name: str) -> int:
    return -1 if (regions := current_regions()) is None else regions.enter(Remat(save), name)


@_torch.assume_constant
def _is_name_saved(name: str) -> bool:
    return (regions := current_regions()) is not None and regions.is_saved(name)
