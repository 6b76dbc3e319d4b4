"""The schedule of one call: gathers that start before they are needed, and start again in backward.

A `Visit` is one gather of one unit, from the start of its all-gather until the gradient of its buffer is complete.
While one unit computes in forward, those that come next in ``spec.order`` are gathered, and in backward those that
forward left before it. All of this is for real process groups, outside of torch.func or under one torch.func.grad;
gathers elsewhere are data flow (`sharding.gather_unit`).

Every rank starts and waits in the same order, as long as it runs the same program.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from . import _torch
from .collectives import Reduce
from .layout import flat, unflatten_unit
from .mesh import Group
from .ops import Buffers, Chain, Step, Where, start
from .reductions import Reductions
from .sharding import reduce_unit
from .spec import PartitionSpec, Unit

__all__ = ["Schedule", "Visit"]

FROZEN_ALIVE = 2
"""How many frozen units stay gathered in a backward that retains its graph: no gradient tells when they have been used."""


def _step(op: str, axis: Group, *, in_place: bool = False) -> Step:
    where = Where(axis.size, axis.name)
    return lambda x, own: start(op, x, where, x if in_place else own)


class Schedule:
    """What is under way in one call and in its backward."""

    def __init__(
        self, shards: Mapping[str, Tensor], spec: PartitionSpec, reduce: Reduce, prefetch: int, in_flight: int
    ) -> None:
        self.shards = {key: _torch.base(shards[key]).detach() for key in spec.by_key}
        self.spec, self.mesh, self.reduce, self.prefetch = spec, spec.bound_mesh, reduce, prefetch
        self._axes = {name: axis for name, axis in self.mesh.axes if isinstance(axis, Group) and axis.size > 1}
        self.buffers = Buffers()
        self.reductions = Reductions(in_flight, self._over_replicas(()), self.buffers)
        self._order = spec.order
        self._positions: dict[str, list[int]] = {}
        for i, key in enumerate(self._order):
            self._positions.setdefault(key, []).append(i)
        self._position = -1
        self._visited: set[str] = set()
        self._open: set[str] = set()
        self._ahead: dict[str, Visit] = {}
        self._left: list[weakref.ref[Visit]] = []  # in the order in which forward left them
        self._here = -1  # where in it backward is
        self._frozen: deque[weakref.ref[Visit]] = deque()

    # --- what goes over the wire ---

    def split(self, unit: Unit) -> list[str]:
        """The axes over which the unit is split among several ranks, outermost first."""
        return [name for name in unit.p.axes if name in self._axes] if unit.numel else []

    def gather(self, unit: Unit, shard: Tensor) -> Chain:
        """Start to gather a unit."""
        steps = [_step(f"gather_{self.reduce}", self._axes[name]) for name in reversed(self.split(unit))]
        return Chain(shard, steps, self.buffers.take(self.spec.padded_numel(unit), shard) if steps else None)

    def _over_replicas(self, split: Sequence[str]) -> list[Step]:
        rest = [name for name in reversed(self.mesh.names) if name in self._axes and name not in split]
        return [_step(f"unvary_{self.reduce}", self._axes[name], in_place=True) for name in rest]

    def reduced(self, unit: Unit, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The reduced gradient of a unit's shard, or None where it will be in ``reductions``."""
        like = self.shards[unit.key]
        pieces = [
            like.new_zeros(param.numel) if grad is None else flat(grad, param)
            for grad, param in zip(grads, unit.params, strict=True)
        ]
        if padding := self.spec.padded_numel(unit) - unit.numel:
            pieces.append(like.new_zeros(padding))
        split = self.split(unit)
        if split:
            steps = [_step(f"scatter_{self.reduce}", self._axes[name]) for name in split]
            self.reductions.split(unit.key, pieces, [*steps, *self._over_replicas(split)])
        elif self._axes and unit.numel:
            self.reductions.replicated(unit.key, pieces)
        else:
            return torch.cat(pieces)
        return None

    # --- forward ---

    def enter(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The shards as the call is to use them: what is reduced in backward arrives at them together, at its end."""
        keys = [key for key in self.shards if shards[key].requires_grad]
        if not keys:
            return dict(shards)
        return {**shards, **dict(zip(keys, _Entry.apply(self, keys, *(shards[key] for key in keys)), strict=True))}

    def visit(self, unit: Unit) -> Visit:
        """The unit, gathered; the next ones are under way."""
        visit = self._ahead.pop(unit.key, None) or Visit(self, unit)
        self._visited.add(unit.key)
        self._open.add(unit.key)
        positions = self._positions.get(unit.key, [])
        i = bisect_right(positions, self._position)
        if i < len(positions):
            self._position = positions[i]
        for key in self._order[self._position + 1 :]:
            if len(self._ahead) >= self.prefetch:
                break
            done = key in self._open or key in self._ahead or (key in self._visited and not self.spec.runs)
            if not done and self.split(self.spec.by_key[key]):
                self._ahead[key] = Visit(self, self.spec.by_key[key])
        self.buffers.clear()
        visit.arrive()
        return visit

    def leave(self, visit: Visit) -> None:
        """Forward is done with the unit."""
        self._open.discard(visit.unit.key)
        visit.index = len(self._left)
        self._left.append(weakref.ref(visit))

    def end_forward(self) -> None:
        """Let go of what was gathered for nothing."""
        self._ahead.clear()
        self.buffers.clear()

    # --- backward ---

    def approach(self, visit: Visit) -> None:
        """Backward has come to this visit: gather it and, ahead of their use, those that forward left before it."""
        if self._here == visit.index:
            return
        for passed in self._left[visit.index + 1 : max(self._here, 0)]:
            if (other := passed()) is not None:
                other.chain = None
        self._here = visit.index
        visit.start_again()
        ahead = 0
        for earlier in reversed(self._left[: visit.index]):
            if ahead >= self.prefetch:
                break
            other = earlier()
            if other is not None and other.noted:
                other.start_again()
                ahead += 1
        self.buffers.clear()

    def bound_frozen(self, visit: Visit) -> None:
        """A frozen unit was gathered in backward: let the oldest of them go if they are too many."""
        if len(self._frozen) == FROZEN_ALIVE and (oldest := self._frozen.popleft()()):
            oldest.buffer = None
        self._frozen.append(weakref.ref(visit))


class Visit:
    """One gather of one unit: on its way, there, noted by what autograd saved, and gathered again in backward."""

    def __init__(self, schedule: Schedule, unit: Unit) -> None:
        self.schedule, self.unit = schedule, unit
        self.shard = schedule.shards[unit.key]
        self._version = _torch.version(self.shard)
        self.frees = unit.p.reshard and bool(schedule.split(unit))
        self.index = -1
        self.noted = False  # whether backward may ask for it
        self.trained = False
        self.full: Tensor | None = None
        self.buffer: Tensor | None = None  # what backward reads, from when it is gathered again to the reduction
        with _torch.beneath():
            self.chain: Chain | None = schedule.gather(unit, self.shard)

    def arrive(self) -> None:
        """Wait for the buffer."""
        assert self.chain is not None
        with _torch.beneath():
            self.full, self.chain = self.chain.result(), None

    def views(self, shard: Tensor) -> Sequence[Tensor]:
        """The unit's parameters; their gradient arrives at this shard."""
        assert self.full is not None
        self.trained = torch.is_grad_enabled() and shard.requires_grad
        return _Parameters.apply(shard, self) if self.trained else unflatten_unit(self.full, self.unit)

    def leave(self, *, keep: bool) -> None:
        """Forward is done with it: let the buffer go, or keep it for backward."""
        self.buffer = self.full if keep else None
        if self.frees and not keep:
            assert self.full is not None
            self.schedule.buffers.give(self.full)
        self.full = None
        self.schedule.leave(self)

    def start_again(self) -> None:
        """Start to gather it for backward, if it is not there and not under way."""
        if self.buffer is not None or self.chain is not None:
            return
        if _torch.version(self.shard) != self._version:
            raise RuntimeError(
                f"the shard of unit '{self.unit.key}' was modified in place between forward and backward: "
                f"expected version {self._version}, got {_torch.version(self.shard)}; update after backward"
            )
        with _torch.beneath():
            self.chain = self.schedule.gather(self.unit, self.shard)

    def view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of the buffer that autograd saved, gathered again if need be."""
        self.schedule.approach(self)
        if self.buffer is None:
            self.start_again()
            assert self.chain is not None
            with _torch.beneath():
                self.buffer, self.chain = self.chain.result(), None
            if not self.trained:
                self.schedule.bound_frozen(self)
        return self.buffer.as_strided(shape, stride, offset)

    def reduced(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of the shard from those of the parameters: every use of the buffer has been made."""
        if self.buffer is not None and self.frees:
            self.schedule.buffers.give(self.buffer)
        self.buffer = None
        present = [grad for grad in grads if grad is not None]
        if any(_torch.base(g) is not g or (torch.is_grad_enabled() and g.requires_grad) for g in present):
            pieces = [  # by data flow: someone may differentiate again
                self.shard.new_zeros(p.numel) if g is None else flat(g, p) for g, p in zip(grads, self.unit.params, strict=True)
            ]
            padding = self.shard.new_zeros(self.schedule.spec.padded_numel(self.unit) - self.unit.numel)
            return reduce_unit(torch.cat([*pieces, padding]), self.unit, self.schedule.mesh, reduce=self.schedule.reduce)
        with torch.no_grad():
            return self.schedule.reduced(self.unit, grads)


class _Parameters(torch.autograd.Function):
    """A unit's parameters, as views of the buffer of one visit."""

    @staticmethod
    def forward(shard: Tensor, visit: Visit) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert visit.full is not None
        return tuple(unflatten_unit(shard if visit.full is visit.shard else visit.full, visit.unit))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.visit = inputs[1]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.visit.reduced(grads), None


class _Entry(torch.autograd.Function):
    """The shards where they enter the call. Its backward is the last of the call's and adds what was reduced."""

    @staticmethod
    def forward(schedule: Schedule, keys: list[str], *shards: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.schedule, ctx.keys = inputs[:2]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with _torch.beneath():
            reduced = ctx.schedule.reductions.collect()
        out = [
            reduced.get(key) if grad is None else grad + reduced[key] if key in reduced else grad
            for key, grad in zip(ctx.keys, grads, strict=True)
        ]
        return None, None, *out
