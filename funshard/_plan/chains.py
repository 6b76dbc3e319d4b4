"""The collectives and copies of one unit as events: each starts when the one before has been waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .._spec.unit import Unit
from .._units.encoded_reduction import ROW_END, count_decoded_slices
from .._units.route import Route
from .events import Collective, EventKind, EventList, MemoryChange

__all__ = ["Chain", "ChainStep", "gather_kept_steps", "gather_steps", "reduce_steps"]


class ChainStep(NamedTuple):
    """A collective, or a copy of ``moved_bytes``, with what it allocates when it starts and frees when it is waited for."""

    kind: EventKind
    collective: Collective | None
    at_start: MemoryChange
    at_end: MemoryChange
    moved_bytes: int = 0
    decoded_bytes: int = 0
    """The bytes that are held for a moment when it is waited for, before ``at_end``: what is added up."""


class Chain:
    """Steps one after the other. The first starts at once."""

    def __init__(self, events: EventList, unit: str, steps: Iterable[ChainStep]) -> None:
        self._events, self._unit, self._steps = events, unit, deque(steps)
        self._running: tuple[int, ChainStep] | None = None
        self.advance()

    def advance(self) -> None:
        """Wait for the step that is under way, and start the next."""
        if self._running is not None:
            index, step = self._running
            decoded = step.decoded_bytes
            self._events.add("wait", self._unit, {"gradients": decoded} if decoded else step.at_end, after=(index,))
            if decoded:
                self._events.add("memory", self._unit, {"gradients": step.at_end["gradients"] - decoded})
            self._running = None
        if self._steps:
            step = self._steps.popleft()
            index = self._events.add(
                step.kind, self._unit, step.at_start, collective=step.collective, moved_bytes=step.moved_bytes
            )
            self._running = index, step

    def finish(self) -> None:
        """Wait for all steps."""
        while self._running is not None:
            self.advance()


def gather_steps(unit: Unit, route: Route, stored: int, sizes: Mapping[str, int]) -> list[ChainStep]:
    """Return the steps that gather a unit's buffer from a slice of ``stored`` bytes at rest."""
    if not route.has_own_buffer:
        return []
    slice_numel = route.padded_numel // route.num_slices
    piece = route.layout.sent_bytes if route.layout else slice_numel * route.dtypes.param.itemsize
    if route.codec:
        piece = stored if route.form else route.codec._describe_encoding(slice_numel, route.shard_dtype)[0]
    buffer = route.buffer_bytes
    sent = 0  # bytes allocated for what is sent: the slice in another form, or on another device
    steps: list[ChainStep] = []
    if route.device is not None:
        sent = stored if route.codec or route.layout else piece
        steps.append(ChainStep("copy", None, {"gathered": sent}, {}, sent))
    elif (
        (route.codec and not route.form)
        or (route.layout and route.split_axes)
        or (len(route.split_axes) > 1 and route.dtypes.param != route.shard_dtype)
    ):
        sent = piece
    for i, name in enumerate(reversed(route.split_axes)):
        into, piece = piece, piece * sizes[name]
        at_start = piece + (sent if i == 0 and route.device is None else 0)
        steps.append(
            ChainStep(
                "gather",
                Collective("all_gather", name, sizes[name], into, piece),
                {"gathered": at_start},
                {"gathered": -(sent if i == 0 else into)},
            )
        )
    if not route.split_axes and (route.device is None or route.codec or route.layout):  # a cast or a decoded copy
        return [*steps, ChainStep("memory", None, {"gathered": buffer}, {"gathered": -sent})]
    if route.codec or (route.layout and route.layout.is_padded):
        steps.append(ChainStep("memory", None, {"gathered": buffer}, {"gathered": -piece}))
    return steps


def gather_kept_steps(route: Route, sizes: Mapping[str, int]) -> list[ChainStep]:
    """Return the steps that gather a unit's buffer from the slices of it that forward kept."""
    piece = -(-route.buffer_bytes // route.num_kept)
    steps: list[ChainStep] = []
    for i, name in enumerate(reversed(route.kept_axes)):
        into, piece = piece, piece * sizes[name]
        collective = Collective("all_gather", name, sizes[name], into, piece)
        steps.append(ChainStep("gather", collective, {"gathered": piece}, {"gathered": -into if i else 0}))
    return steps


def reduce_steps(
    route: Route, numel: int, dtype: torch.dtype, sizes: Mapping[str, int], *, scatters: bool = True
) -> list[ChainStep]:
    """Return the steps that reduce a gradient of so many elements in the dtype of the reduction to slices in ``dtype``."""
    size = numel * route.dtypes.reduce.itemsize
    steps: list[ChainStep] = []
    if route.reduce_codec and scatters:
        (name,) = route.split_axes
        into = size // sizes[name]
        slice_numel = numel // sizes[name]
        sent = sizes[name] * (route.reduce_codec._describe_encoding(slice_numel, route.dtypes.reduce)[0] + ROW_END)
        collective = Collective("all_to_all", name, sizes[name], sent, sent)
        at_start: MemoryChange = {"gradients": 2 * sent - size}  # instead of the buffer that is encoded
        decoded = into * count_decoded_slices(sizes[name])
        steps.append(ChainStep("reduce", collective, at_start, {"gradients": into - 2 * sent}, decoded_bytes=decoded))
        size, scatters = into, False
    for name in route.split_axes if scatters else ():
        into, size = size, size // sizes[name]
        steps.append(
            ChainStep(
                "reduce",
                Collective("reduce_scatter", name, sizes[name], into, size),
                {"gradients": size},
                {"gradients": -into},
            )
        )
    steps += [
        ChainStep("reduce", Collective("all_reduce", name, sizes[name], size, size), {}, {}) for name in route.replica_axes
    ]
    result = size // route.dtypes.reduce.itemsize * dtype.itemsize
    if route.device is not None:
        steps.append(ChainStep("copy", None, {}, {"gradients": -size}, size))
    elif result != size:
        steps.append(ChainStep("memory", None, {"gradients": result}, {"gradients": -size}))
    return steps
