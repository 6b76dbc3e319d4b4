"""The schedule of one call: gathers that start before they are needed, and start again in backward.

A `Visit` is one gather of one unit, from the start of its all-gather until the gradient of its buffer is complete.
While one unit computes in forward, those that come next in ``spec.order`` are gathered, and in backward those that
forward left before it. All of this is for real process groups, outside of torch.func or under one torch.func.grad;
gathers elsewhere are data flow (`flow.gather_unit`), as are reductions that may be differentiated again.

Every rank starts and waits in the same order, as long as it runs the same program. Ranks compare that: what forward has
gathered is looked at when backward begins, and what backward has gathered and reduced when it ends.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from .. import _torch
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms.saved_tensors import mark_graph_freed
from .._units.accumulation import GradReceiver
from .._units.chain import BufferPool, make_route_table
from .._units.reductions import ReductionQueue
from .._units.route import Route
from ..collectives._sequence import CollectiveSequence, SequenceCheck
from .again import ALIVE
from .options import CallOptions
from .views import pieces_of
from .visit import Visit

__all__ = ["Schedule", "enters"]


class Schedule:
    """What is under way in one call and in its backward."""

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        spec: PartitionSpec,
        reduction: Reduction,
        options: CallOptions,
        receiver: GradReceiver | None,
    ) -> None:
        self.shards = {key: _torch.unwrap(shards[key]).detach() for key in spec.by_key}
        self._witness = next((shard for shard in shards.values() if _torch.is_wrapped(shard)), None)
        self.spec, self._prefetch, self.check_order = spec, options.prefetch, options.check_order
        self.reduction = reduction
        dtypes = tuple(shard.dtype for shard in self.shards.values())
        self.routes = spec._compute_once(make_route_table, dtypes, reduction, options.check_order)
        self.buffers = BufferPool(margins=self.routes.needs_order_check)
        self.receiver = receiver
        self.reductions = ReductionQueue(options.in_flight, self.buffers, receiver)
        self._sequence = CollectiveSequence() if self._compares() else None
        self._checks: list[SequenceCheck] = []  # of forward, started and not looked at
        self._in_forward = True
        self._trained = False  # whether backward will end in this call's shards
        self._order = spec.order
        self._position = -1  # in that order
        self._open: set[str] = set()
        self._ahead: dict[str, Visit] = {}
        self.visited: list[str] = []
        self._left: list[weakref.ref[Visit]] = []  # visits, in the order in which forward left them
        self._here, self._task = 0, -1  # where in that order which run of backward is
        self._around: int | None = None  # that run, while one inside it runs
        self._untold: deque[weakref.ref[Visit]] = deque()
        self._padding: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def enter(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The shards as the call is to use them: what is reduced in backward arrives at them together, at its end."""
        keys = [key for key in self.shards if shards[key].requires_grad]
        if not keys:
            return dict(shards)
        self._trained = True
        return {**shards, **dict(zip(keys, _Entry.apply(self, keys, *(shards[key] for key in keys)), strict=True))}

    # --- forward ---

    def visit(self, unit: Unit) -> Visit:
        """The unit, gathered; the next ones are under way."""
        visit = self._ahead.pop(unit.key, None) or Visit(self, unit)
        self._open.add(unit.key)
        self.visited.append(unit.key)
        following = self._following(unit.key)
        if not following:
            self.buffers.clear()
        visit.arrive()  # before the next ones start: they would share the wire
        for key in following:
            self._ahead[key] = Visit(self, self.spec.by_key[key])
        self.buffers.clear()
        return visit

    def _following(self, key: str) -> list[str]:
        """The units to gather ahead, now that forward has come to this one."""
        self._position = self._come_to(key)
        places, wanted = self.routes.gather_positions, self._prefetch - len(self._ahead)
        nexts: list[str] = []
        for i in range(bisect_right(places, self._position), len(places)):
            if len(nexts) >= wanted:
                break
            following = self._order[places[i]]
            if following not in self._open and following not in self._ahead and following not in nexts:
                nexts.append(following)
        return nexts

    def _come_to(self, key: str) -> int:
        """The place of this unit among those to come, or where forward was before."""
        try:
            return self._order.index(key, self._position + 1)
        except ValueError:
            return self._position

    def leave(self, visit: Visit) -> None:
        """Forward is done with the unit."""
        self._open.discard(visit.unit.key)
        visit.index = len(self._left)
        self._left.append(weakref.ref(visit))

    def end_forward(self) -> None:
        """Let go of what was gathered for nothing."""
        self._ahead.clear()
        self.buffers.clear()

    # --- do all ranks start the same collectives? ---

    def _compares(self) -> bool:
        return self.routes.needs_order_check and not _torch.is_traced() and not any(map(_torch.is_fake, self.shards.values()))

    def record_gather(self, key: str) -> None:
        """Note that the gather of this unit was started, for ranks to compare."""
        if self._sequence is None:
            return
        steps = self.routes.steps[key]
        tagged = steps.has_tags and self.shards[key].device.type == "cpu"
        self._sequence.record(steps.gather_groups, f"the gather of unit '{key}'", tagged=tagged)
        if not (self._in_forward or self._trained):  # no end of backward will be seen
            self._finish_checks(self._start_checks())

    def check_forward(self) -> None:
        """Have ranks compare what forward has gathered. Backward looks at the result; without one it is waited for here.

        Tagged gathers were compared when they ended. The end of backward compares them once more, with what follows.
        """
        self._in_forward = False
        checks = self._start_checks(tagged=not self._trained)
        if self._trained:
            self._checks = checks
        else:
            self._finish_checks(checks)

    def _start_checks(self, *, tagged: bool = True) -> list[SequenceCheck]:
        if self._sequence is None:
            return []
        error = "ranks ran different units, and were given each other's values: what this call computed is wrong"
        with _torch.below_transforms(), _torch.below_autograd():
            return self._sequence.start_checks(error, tagged=tagged)

    def _finish_checks(self, checks: list[SequenceCheck]) -> None:
        with _torch.below_transforms(), _torch.below_autograd():
            while checks:
                checks.pop().finish()

    # --- backward ---

    def task(self) -> int:
        """The number of this run of backward; what it runs inside itself is part of it."""
        return _torch.current_graph_task() if self._around is None else self._around

    @contextlib.contextmanager
    def part_of_backward(self) -> Generator[None]:
        """Within this, backward runs a part of itself as a backward of its own."""
        outer, self._around = self._around, self.task()
        try:
            yield
        finally:
            self._around = outer

    def approach(self, visit: Visit) -> None:
        """Backward has come to this visit: gather it and, ahead of their use, those that forward left before it."""
        if self._checks:
            self._finish_checks(self._checks)
        if self._task != self.task():
            self._task, self._here = self.task(), len(self._left)
        if visit.index >= self._here:  # where it is, or back in a unit around the one where it was
            return
        for passed in self._left[visit.index + 1 : self._here]:
            if (other := passed()) is not None:
                other.chain = None
        self._here = visit.index
        if not visit.trained:
            self.keep_latest(visit)
        visit.again()
        ahead = 0
        for i in range(visit.index - 1, -1, -1):
            if ahead >= self._prefetch:
                break
            if (other := self._left[i]()) is not None and other.start_again():
                ahead += 1
        self.buffers.clear()

    def is_over(self) -> bool:
        """Whether the transform in which the call was made has ended, as when the pullback of a vjp runs."""
        return self._witness is not None and _torch.is_dead(self._witness)

    def keep_latest(self, visit: Visit) -> None:
        """Let the oldest of the units go that were gathered again where no gradient tells when they have been used."""
        if any(ref() is visit for ref in self._untold):
            return
        if len(self._untold) == ALIVE and (oldest := self._untold.popleft()()):
            oldest.release()
        self._untold.append(weakref.ref(visit))

    def is_last(self) -> bool:
        """Whether this backward is the one that a torch.func.grad around the call ends with."""
        return _torch.is_last_backward(_torch.current_level()) and not self.is_over()

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Start to reduce a unit's gradient, given by parameter, which nobody differentiates."""
        route, steps = self.routes.by_key[unit.key], self.routes.steps[unit.key]
        if self._checks:
            self._finish_checks(self._checks)
        if self._sequence is not None:
            self._sequence.record(steps.reduce_groups, f"the reduction of unit '{unit.key}'", tagged=False)
        with _torch.below_transforms():
            pieces = pieces_of(unit, grads, route, self.shards[unit.key], self._zeros(route, self.shards[unit.key]))
            self.reductions.begin_backward(self.task())
            if route.split_axes:
                self.reductions.reduce_split(unit.key, pieces, route, steps)
            elif steps.reduce:
                self.reductions.reduce_replicated(unit.key, pieces, route, steps)
            else:
                buffer = _torch.concat_flat(pieces, pieces[0].new_empty(route.padded_numel, dtype=route.dtypes.reduce))
                self.reductions.add_unreduced(unit.key, buffer.to(route.shard_dtype))

    def _zeros(self, route: Route, like: Tensor) -> Tensor:
        """What padding is made of: for all units together, as nobody writes to it."""
        of = route.device or like.device, route.dtypes.param
        if route.longest_padding and of not in self._padding:
            longest = max(route.longest_padding for route in self.routes.by_key.values())
            self._padding[of] = like.new_zeros(longest, dtype=route.dtypes.param, device=route.device)
        return self._padding.get(of, like)

    def collect(self, shard: Tensor) -> dict[str, Tensor]:
        """The reduced gradients of this backward, by unit key. The shard is any of those that they are gradients of."""
        self.reductions.begin_backward(self.task())
        self._finish_checks(self._checks + self._start_checks())  # or some reduction might wait for ever
        with _torch.below_transforms():
            reduced = self.reductions.wait_all()
        self.buffers.clear()
        self._padding.clear()
        if not reduced or not self.is_last():
            return reduced
        return dict(zip(reduced, mark_graph_freed(shard, list(reduced.values())), strict=True))


class _Entry(_torch.Function):
    """The shards where they enter the call. Its backward is the last of the call's and adds what was reduced."""

    @staticmethod
    def forward(schedule: Schedule, keys: list[str], *shards: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, ctx.keys, ctx.shard, *_ = inputs  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        reduced = ctx.schedule.collect(ctx.shard)
        out = [
            reduced.get(key) if grad is None else grad + reduced[key] if key in reduced else grad
            for key, grad in zip(ctx.keys, grads, strict=True)
        ]
        return None, None, *out


def enters(node: object, i: int, receiver: GradReceiver) -> str | None:
    """The unit whose shard this result of a graph's node is: where a call begins that hands gradients to this receiver."""
    schedule = getattr(node, "schedule", None)
    if isinstance(node, BackwardCFunction) and isinstance(schedule, Schedule) and schedule.receiver is receiver:
        return cast("Any", node).keys[i]
    return None
