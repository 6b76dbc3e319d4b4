"""The schedule of one call: gathers that start before they are needed, and start again in backward.

A `Visit` is one gather of one unit, from the start of its all-gather until the gradient of its buffer is complete.
While one unit computes in forward, those that come next in ``spec.order`` are gathered, and in backward those that
forward left before it. All of this is for real process groups, outside of torch.func or under one torch.func.grad;
gathers elsewhere are data flow (`travel.gather_unit`), as are reductions that may be differentiated again.

Every rank starts and waits in the same order, as long as it runs the same program.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from .._spec.codec import Form, packed, unpacked
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec, Unit
from .._transforms.saved import Note, ended, save_in_node
from .._units.chain import Buffers, Chain, routes
from .._units.flow import reduce_unit
from .._units.layout import ordered, spaced, unflatten_unit
from .._units.reductions import Reductions
from .._units.route import Route

__all__ = ["Schedule", "Visit"]

UNTOLD_ALIVE = 2
"""How many units stay gathered in backward where no gradient tells when they have been used: frozen ones, and those that
the backward of a backward reads before it comes back to them."""


class Schedule:
    """What is under way in one call and in its backward."""

    def __init__(
        self, shards: Mapping[str, Tensor], spec: PartitionSpec, reduction: Reduction, prefetch: int, in_flight: int
    ) -> None:
        self.shards = {key: _torch.base(shards[key]).detach() for key in spec.by_key}
        self._witness = next((shard for shard in shards.values() if _torch.is_wrapped(shard)), None)
        self.spec, self._prefetch = spec, prefetch
        self.reduction = reduction
        self.routes = spec.once(routes, tuple(shard.dtype for shard in self.shards.values()), reduction)
        self.buffers = Buffers()
        self.reductions = Reductions(in_flight, self.buffers)
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
        with contextlib.suppress(ValueError):  # it is not among those to come
            self._position = self._order.index(key, self._position + 1)
        places = range(bisect_right(self.routes.gathered, self._position), len(self.routes.gathered))
        nexts = (self._order[self.routes.gathered[i]] for i in places)
        unknown = (key for key in nexts if key not in self._open and key not in self._ahead)
        return list(dict.fromkeys(itertools.islice(unknown, max(self._prefetch - len(self._ahead), 0))))

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

    def task(self) -> int:
        """The number of this run of backward; what it runs inside itself is part of it."""
        return _torch.graph_task() if self._around is None else self._around

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
        if self._task != self.task():
            self._task, self._here = self.task(), len(self._left)
        if visit.index >= self._here:  # where it is, or back in a unit around the one where it was
            return
        for passed in self._left[visit.index + 1 : self._here]:
            if (other := passed()) is not None:
                other.chain = None
        self._here = visit.index
        if not visit.trained:
            self.hold(visit)
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
        return self._witness is not None and _torch.is_over(self._witness)

    def hold(self, visit: Visit) -> None:
        """Let the oldest of the units go that were gathered again where no gradient tells when they have been used."""
        if any(ref() is visit for ref in self._untold):
            return
        if len(self._untold) == UNTOLD_ALIVE and (oldest := self._untold.popleft()()):
            oldest.release()
        self._untold.append(weakref.ref(visit))

    def is_last(self) -> bool:
        """Whether this backward is the one that a torch.func.grad around the call ends with."""
        return _torch.is_last_backward(_torch.level()) and not self.is_over()

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Start to reduce a unit's gradient, given by parameter, which nobody differentiates."""
        route, steps = self.routes.of[unit.key], self.routes.steps[unit.key]
        with _torch.beneath():
            pieces = _pieces(unit, grads, route, self.shards[unit.key], self._zeros(route, self.shards[unit.key]))
            self.reductions.begin(self.task())
            if route.split:
                self.reductions.split(unit.key, pieces, route, steps)
            elif steps.reduce:
                self.reductions.replicated(unit.key, pieces, route, steps)
            else:
                buffer = _torch.joined(pieces, pieces[0].new_empty(route.padded, dtype=route.dtypes.reduce))
                self.reductions.done(unit.key, buffer.to(route.dtype))

    def _zeros(self, route: Route, like: Tensor) -> Tensor:
        """What padding is made of: for all units together, as nobody writes to it."""
        of = like.device, route.dtypes.param
        if route.widest and of not in self._padding:
            longest = max(route.widest for route in self.routes.of.values())
            self._padding[of] = like.new_zeros(longest, dtype=route.dtypes.param)
        return self._padding.get(of, like)

    def collect(self, shard: Tensor) -> dict[str, Tensor]:
        """The reduced gradients of this backward, by unit key. The shard is any of those that they are gradients of."""
        self.reductions.begin(self.task())
        with _torch.beneath():
            reduced = self.reductions.collect()
        self.buffers.clear()
        self._padding.clear()
        if not reduced or not self.is_last():
            return reduced
        return dict(zip(reduced, ended(shard, list(reduced.values())), strict=True))


def _pieces(unit: Unit, grads: Sequence[Tensor | None], route: Route, like: Tensor, zeros: Tensor) -> list[Tensor]:
    """What to join to the gradient of a unit's buffer."""
    pieces = (
        like.new_zeros(param.numel, dtype=route.dtypes.param) if grad is None else ordered(grad, param).contiguous()
        for grad, param in zip(grads, unit.params, strict=True)
    )
    return spaced(pieces, unit, route.padded, zeros)


class _Lease:
    """A gathered buffer in backward. What autograd saved in it holds the lease, and a visit only knows it."""

    __slots__ = ("__weakref__", "buffer")

    def __init__(self) -> None:
        self.buffer: Tensor | None = None


class Visit:
    """One gather of one unit: on its way, there, noted by what autograd saved, and gathered again in backward."""

    def __init__(self, schedule: Schedule, unit: Unit) -> None:
        self.schedule, self.unit = schedule, unit
        self.shard = schedule.shards[unit.key]
        self.route, self._steps = schedule.routes.of[unit.key], schedule.routes.steps[unit.key]
        self.index = -1  # its place among those that forward left
        self.full: Tensor | None = None  # in forward
        self._lease: weakref.ref[_Lease] | None = None  # in backward
        self.chain: Chain | None = None  # on its way
        self._form: Form = ()  # of what is on its way, where it is encoded
        self.trained = False
        self._version = _torch.version(self.shard)
        self._gather()

    def _gather(self) -> None:
        route = self.route
        with _torch.beneath():
            if not self.schedule.routes.connected and _torch.is_fake(self.shard):  # shapes can be computed
                self.chain = Chain(self.shard.new_empty(route.padded, dtype=route.dtypes.param), ())
            elif route.codec:
                sent, self._form = packed(route.codec.encoded(self.shard))
                self.chain = Chain(sent, self._steps.gather)
            else:
                own = None
                if route.split and not _torch.traced():
                    own = self.schedule.buffers.take(route.padded, route.dtypes.param, self.shard)
                casts = own is not None and len(route.split) == 1  # as it writes its own slice
                self.chain = Chain(self.shard if casts else self.shard.to(route.dtypes.param), self._steps.gather, own)

    def _arrived(self) -> Tensor:
        assert self.chain is not None
        route = self.route
        with _torch.beneath():
            chain, self.chain = self.chain, None
            full = chain.result()
            if route.codec and self._form:
                rows = full.view(route.padded // len(self.shard), -1)
                full = route.codec.decoded(unpacked(rows, self._form), len(self.shard)).to(route.dtypes.param)
            return full

    def arrive(self) -> None:
        """Wait for the buffer."""
        self.full = self._arrived()

    def parameters(self, shard: Tensor) -> Sequence[Tensor]:
        """The unit's parameters in forward; their gradient goes to this shard."""
        self.trained = torch.is_grad_enabled() and shard.requires_grad
        return self._views(shard)

    def parameters_again(self, shard: Tensor) -> Sequence[Tensor]:
        """The unit's parameters in backward, for its module to run again."""
        self.schedule.approach(self)
        self.again()
        return self._views(shard)

    def _views(self, shard: Tensor) -> Sequence[Tensor]:
        if torch.is_grad_enabled() and shard.requires_grad:
            return _Parameters.apply(shard, self)
        return unflatten_unit(self.buffer, self.unit)

    @property
    def dtype(self) -> torch.dtype:
        """The gathered buffer's."""
        return self.route.dtypes.param

    @property
    def buffer(self) -> Tensor:
        """The gathered buffer, while it is there."""
        lease = self._leased()
        buffer = self.full if self.full is not None else lease.buffer if lease else None
        assert buffer is not None
        return buffer

    def leave(self, *, keep: bool) -> None:
        """Forward is done with it: let the buffer go, or keep it for backward."""
        assert self.full is not None
        if keep and (lease := self._leased()):
            lease.buffer = self.full
        elif self.route.frees:
            self.schedule.buffers.give(self.full)
        self.full = None
        self.schedule.leave(self)

    def note(self) -> _Lease:
        """What to hold for as long as backward may ask for the buffer."""
        lease = self._leased() or _Lease()
        self._lease = weakref.ref(lease)
        return lease

    def hold(self) -> _Lease:
        """What a module holds that is to run again in backward, with this buffer."""
        lease = self.note()
        if not self.route.frees:
            lease.buffer = self.full
        return lease

    def _leased(self) -> _Lease | None:
        return self._lease() if self._lease else None

    def release(self) -> None:
        """Every use of the buffer has been made, or it is to be gathered once more."""
        lease = self._leased()
        if lease and lease.buffer is not None:
            if self.route.made:
                self.schedule.buffers.give(lease.buffer)
            lease.buffer = None

    def start_again(self) -> bool:
        """Start to gather it for backward, if it is not there or under way. False if nobody will ask for it."""
        lease = self._leased()
        if lease is None or lease.buffer is not None or self.chain is not None:
            return lease is not None
        if _torch.version(self.shard) != self._version:
            raise RuntimeError(
                f"the shard of unit '{self.unit.key}' was modified in place between forward and backward: "
                f"expected version {self._version}, got {_torch.version(self.shard)}; update after backward"
            )
        self._gather()
        return True

    def again(self) -> Tensor:
        """The buffer in backward, gathered again if need be."""
        lease = self.note()
        if lease.buffer is None:
            self.start_again()
            lease.buffer = self._arrived()
        return lease.buffer

    def noted(self, tensor: Tensor, *, by_backward: bool) -> Note:
        """How to have this view of the buffer again, that autograd saves in forward or in a backward that records itself."""
        return functools.partial(
            self._view, self.note(), tensor.shape, tensor.stride(), tensor.storage_offset(), by_backward=by_backward
        )

    def _view(
        self, _: _Lease, shape: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt, *, by_backward: bool
    ) -> Tensor:
        self.schedule.approach(self)
        if by_backward:
            self.schedule.hold(self)
        over = self.schedule.is_over()
        buffer = self.again()
        if torch.is_grad_enabled() and self.route.frees:
            save_in_node({_torch.storage_id(buffer): self}, 0 if over else _torch.level())
        view = buffer.as_strided(shape, stride, offset)
        return _torch.wrapped_for_dead(view) if over else view

    def reduced(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of the shard from those of the parameters, None where the schedule has it; the buffer is let go."""
        self.release()
        own = [_torch.lower(g) if g is not None else None for g in grads] if self.schedule.is_last() else grads
        if not any(g is not None and (_torch.is_wrapped(g) or _torch.is_tracked(g)) for g in own):
            self.schedule.reduce(self.unit, own)
            return None
        zeros = self.shard.new_zeros(self.route.widest, dtype=self.route.dtypes.param)
        pieces = _pieces(self.unit, grads, self.route, self.shard, zeros)
        buffer = torch.cat([piece.reshape(-1) for piece in pieces])  # it may be differentiated again
        mesh, reduction = self.schedule.spec.bound_mesh, self.schedule.reduction
        return reduce_unit(buffer, self.unit, mesh, reduction, self.unit.p.precision, self.shard.dtype)


class _Parameters(_torch.Function):
    """A unit's parameters, as views of the buffer of one visit."""

    @staticmethod
    def forward(shard: Tensor, visit: Visit) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(unflatten_unit(shard if visit.buffer is visit.shard else visit.buffer, visit.unit))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.visit = inputs[1]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.visit.reduced(grads), None


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
