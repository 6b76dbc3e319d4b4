"""The schedule of one call: units are gathered before they are needed, and reduced behind backward.

`GatheredUnit` is the life of one unit; the schedule says when a unit starts it. While one unit computes in forward, those that
come next in ``spec.order`` are gathered, and in backward those that forward resharded before it. This is for real process
groups, outside of torch.func or under one torch.func.grad. Elsewhere gathers are data flow (`flow.gather_unit`), as are
reductions that may be differentiated again.

Every rank starts and waits in the same order, as long as it runs the same program; `OrderCheck` compares that.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from .. import _torch
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms.saved_tensors import mark_graph_freed
from .._units.accumulation import GradReceiver
from .._units.chain import BufferPool, make_route_table
from .._units.order_check import OrderCheck
from .._units.reductions import ReductionQueue
from .backward_prefetch import BackwardPrefetch
from .gathered_unit import GatheredUnit
from .run_gradients import RunGradients

__all__ = ["CallOptions", "Schedule", "find_entered_unit"]


class CallOptions(NamedTuple):
    """The options of a schedule: how far gathers run ahead and reductions behind, and whether ranks compare them."""

    prefetch: int = 1
    """The number of units that are gathered ahead of their use."""
    in_flight: int = 1
    """The number of units whose gradients may be under reduction at once."""
    check_order: bool = True
    """Whether ranks compare the order of their collectives."""
    weight: Tensor | None = None
    """The weight of the micro-batch that the call is part of, if it may be 0: its gradients are then left out."""


class Schedule:
    """The gathers and reductions of one call and of its backward."""

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
        self.spec, self.reduction, self.check_order, self.weight = spec, reduction, options.check_order, options.weight
        dtypes = tuple(shard.dtype for shard in self.shards.values())
        self.routes = spec._compute_once(make_route_table, dtypes, reduction, options.check_order)
        self.order_check = OrderCheck(self.routes, self.shards)
        self.buffers = BufferPool(margins=self.routes.needs_order_check)
        self.receiver = receiver
        self.reductions = ReductionQueue(options.in_flight, self.buffers, receiver)
        self.backward = BackwardPrefetch(options.prefetch)
        self.run_gradients = RunGradients(receiver)
        self._order, self._position = spec.order, -1  # where forward is in that order
        self._prefetch = options.prefetch
        self._in_use: set[str] = set()
        self._ahead: dict[str, GatheredUnit] = {}
        self.gathered_keys: list[str] = []  # in the order of forward

    def enter(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shards as the call is to use them: their gradients reach them together, at the end of backward."""
        keys = [key for key in self.shards if shards[key].requires_grad]
        if not keys:
            return dict(shards)
        self.order_check.has_backward = True
        return {**shards, **dict(zip(keys, _Entry.apply(self, keys, *(shards[key] for key in keys)), strict=True))}

    # --- forward ---

    def gather(self, unit: Unit) -> GatheredUnit:
        """Return the gathered unit; the next ones are under way."""
        gathered = self._ahead.pop(unit.key, None) or GatheredUnit(self, unit)
        self._in_use.add(unit.key)
        self.gathered_keys.append(unit.key)
        following = self._units_to_prefetch(unit.key)
        if not following:
            self.buffers.clear()
        gathered.wait()  # before the next ones start: they would share the wire
        for key in following:
            self._ahead[key] = GatheredUnit(self, self.spec.by_key[key])
        self.buffers.clear()
        return gathered

    def _units_to_prefetch(self, key: str) -> list[str]:
        """Return the units to gather ahead, now that forward has come to this one."""
        with contextlib.suppress(ValueError):  # it is not among those to come
            self._position = self._order.index(key, self._position + 1)
        places, wanted = self.routes.gather_positions, self._prefetch - len(self._ahead)
        nexts: list[str] = []
        for i in range(bisect_right(places, self._position), len(places)):
            if len(nexts) >= wanted:
                break
            following = self._order[places[i]]
            if following not in self._in_use and following not in self._ahead and following not in nexts:
                nexts.append(following)
        return nexts

    def add_resharded(self, gathered: GatheredUnit) -> None:
        """Record that forward is done with a unit: backward comes to it before those that were resharded earlier."""
        self._in_use.discard(gathered.unit.key)
        self.backward.append(gathered)

    def end_forward(self) -> None:
        """Free what was gathered ahead and not used."""
        for key in self._ahead:
            self.order_check.record_unused(key)
        self._ahead.clear()
        self.buffers.clear()

    # --- backward ---

    def prefetch_backward(self, gathered: GatheredUnit) -> None:
        """Gather the unit that backward has come to and, ahead of their use, those that forward resharded before it."""
        self.order_check.finish_forward()
        if self.backward.advance_to(gathered):
            self.buffers.clear()

    def is_over(self) -> bool:
        """Return whether the transform in which the call was made has ended, as when the pullback of a vjp runs."""
        return self._witness is not None and _torch.is_dead(self._witness)

    def is_last_backward(self) -> bool:
        """Return whether this backward is the one that a torch.func.grad around the call ends with."""
        return _torch.is_last_backward(_torch.current_level()) and not self.is_over()

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Start to reduce a unit's gradient, given by parameter, which nobody differentiates."""
        self.order_check.record_reduction(unit.key)
        self.reductions.begin_backward(self.backward.run_number())
        with _torch.below_transforms():
            self.reductions.reduce(unit, grads, self.shards[unit.key], self.routes)

    def wait_reductions(self, shard: Tensor) -> dict[str, Tensor]:
        """Return the reduced gradients of this backward, by unit key. ``shard`` is any of those that they belong to."""
        task = self.backward.run_number()
        self.reductions.begin_backward(task)
        self.run_gradients.reduce_rest(task)
        self.order_check.check_backward()  # or some reduction might wait for ever
        with _torch.below_transforms():
            reduced = self.reductions.wait_all()
        self.buffers.clear()
        if not reduced or not self.is_last_backward():
            return reduced
        return dict(zip(reduced, mark_graph_freed(shard, list(reduced.values())), strict=True))


class _Entry(_torch.Function):
    """The shards where they enter the call. Its backward is the call's last: it adds the reduced gradients."""

    @staticmethod
    def forward(schedule: Schedule, keys: list[str], *shards: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, ctx.keys, ctx.shard, *_ = inputs  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        reduced = ctx.schedule.wait_reductions(ctx.shard)
        out = [
            reduced.get(key) if grad is None else grad + reduced[key] if key in reduced else grad
            for key, grad in zip(ctx.keys, grads, strict=True)
        ]
        return None, None, *out


def find_entered_unit(node: object, i: int, receiver: GradReceiver) -> str | None:
    """Return the unit whose shard this result of a graph's node is, where a call begins whose gradients this receiver takes."""
    schedule = getattr(node, "schedule", None)
    if isinstance(node, BackwardCFunction) and isinstance(schedule, Schedule) and schedule.receiver is receiver:
        return cast("Any", node).keys[i]
    return None
