"""Regions: the nodes of a traced step that are to be recomputed for its derivatives, annotated for passes over the graph.

Inside torch.compile a function is traced once, and its derivatives with it: nothing runs again. The trace of a `remat` is
annotated with its region, and _compiled/recompute.py computes that again in the graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from torch import Tensor

from ... import _torch
from ..._spec.options import Remat, Save

REGION_PREFIX, NAME_KEY = "funshard_region_", "funshard_name"
"""Keys of annotations: the first, with a number, on all that a region traces; the second on a view of a named tensor."""


_COLLECTING = threading.local()


@contextlib.contextmanager
def collect_regions(regions: list[Remat] | None = None) -> Generator[None]:
    """Collect the regions of what is traced within this context: an inner one has a larger number than those around it."""
    before = current_regions()
    _COLLECTING.regions = [] if regions is None else regions
    try:
        yield
    finally:
        _COLLECTING.regions = before


def current_regions() -> list[Remat] | None:
    """Return where regions are collected now."""
    return getattr(_COLLECTING, "regions", None)


@_torch.assume_constant
def is_collecting_regions() -> bool:
    """Return whether there is such a place."""
    return current_regions() is not None


@contextlib.contextmanager
def mark_region(remat: Remat) -> Generator[None]:
    """Annotate what torch.compile traces within this context as a region."""
    number = _enter_region(remat.save)  # Dynamo may know only the fields of a Remat that was made in what is traced
    with contextlib.nullcontext() if number < 0 else _torch.annotate_graph(**{f"{REGION_PREFIX}{number}": True}):
        yield


def mark_name(x: Tensor, name: str) -> Tensor:
    """Return a tensor annotated with a name if an open region saves it."""
    if not _is_name_saved(name):
        return x
    with _torch.annotate_graph(**{NAME_KEY: name}):
        return x.view_as(x)


@_torch.assume_constant
def _enter_region(save: Save | None) -> int:
    if (regions := current_regions()) is None:
        return -1
    regions.append(Remat(save))
    return len(regions) - 1


@_torch.assume_constant
def _is_name_saved(name: str) -> bool:
    return any(name in remat.names for remat in current_regions() or ())
