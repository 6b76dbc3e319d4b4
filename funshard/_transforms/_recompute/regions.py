"""Regions: what a step that fs.compile traces would run again for its derivatives, noted for the passes over its graph.

Inside torch.compile a function is traced once, and its derivatives with it: nothing runs again. What a `remat` traces is
annotated with its region, and whoever compiles the graph computes that again (_compiled/recompute.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Generator

from torch import Tensor

from ... import _torch
from ..._spec.remat import Remat, Save

__all__ = [
    "NAME_KEY",
    "REGION_PREFIX",
    "RecomputeRegions",
    "collect_regions",
    "current_regions",
    "is_collecting_regions",
    "mark_name",
    "mark_region",
    "missing_names_message",
]

REGION_PREFIX, NAME_KEY = "funshard_region_", "funshard_name"
"""Annotations: the first, with a number, of all that a region traces; the second of a view of what has a name, which it is."""


class RecomputeRegions:
    """The regions of what is traced in one call, by number: an inner one has a larger number than the ones around it."""

    def __init__(self) -> None:
        self.remats: list[Remat] = []
        self.problem = ""
        """What is wrong, for who called to raise."""
        self._open: list[tuple[int, set[str]]] = []

    def enter(self, remat: Remat) -> int:
        """The number of the region that begins here."""
        self._open.append((len(self.remats), set()))
        self.remats.append(remat)
        return len(self.remats) - 1

    def leave(self, number: int, name: str) -> None:
        """It ends here. Others that are open inside of it are left over from a trace that Dynamo has given up."""
        while (last := self._open.pop())[0] > number:
            pass
        names = self.remats[number].names
        if names and not names & last[1]:
            self.problem = missing_names_message(name, names, last[1])

    def is_kept(self, name: str) -> bool:
        """Whether an open one keeps what is given this name."""
        for _, seen in self._open:
            seen.add(name)
        return any(name in self.remats[number].names for number, _ in self._open)


def missing_names_message(name: str, names: Collection[str], seen: Collection[str]) -> str:
    """What is wrong where a run gives other names than those that are to be saved."""
    some = f"some of {_listed(seen)}" if seen else "funshard.checkpoint_name(x, name) in it"
    return f"{name} is to save {_listed(names)}, and gave none of these names while it ran: expected {some}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(map(repr, names)))


_COLLECTED = threading.local()


@contextlib.contextmanager
def collect_regions() -> Generator[RecomputeRegions]:
    """Within this, what is traced notes its regions here."""
    before = current_regions()
    _COLLECTED.now = regions = RecomputeRegions()
    try:
        yield regions
    finally:
        _COLLECTED.now = before


def current_regions() -> RecomputeRegions | None:
    """Where regions are noted now."""
    return getattr(_COLLECTED, "now", None)


@_torch.assume_constant
def is_collecting_regions() -> bool:
    """Whether anybody collects regions."""
    return current_regions() is not None


@contextlib.contextmanager
def mark_region(remat: Remat, name: str) -> Generator[None]:
    """What torch.compile traces within this is a region, which errors call so; nothing where nobody collects them."""
    number = _entered(remat.save)  # of the Remat Dynamo has only what it is made of, where it was made in what is traced
    if number < 0:
        yield
        return
    with _torch.annotate_graph(**{f"{REGION_PREFIX}{number}": True}):
        yield
    _left(number, name)


def mark_name(x: Tensor, name: str) -> Tensor:
    """``x`` by a name, where an open region is to keep it."""
    if not _is_kept(name):
        return x
    with _torch.annotate_graph(**{NAME_KEY: name}):
        return x.view_as(x)


@_torch.assume_constant
def _entered(save: Save | None) -> int:
    return -1 if (regions := current_regions()) is None else regions.enter(Remat(save))


@_torch.assume_constant
def _left(number: int, name: str) -> None:
    regions = current_regions()
    assert regions is not None
    regions.leave(number, name)


@_torch.assume_constant
def _is_kept(name: str) -> bool:
    return (regions := current_regions()) is not None and regions.is_kept(name)
