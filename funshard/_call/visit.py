"""One gather of one unit in a schedule, from the start of its all-gather until the gradient of its buffer is complete.

    on its way  ->  there  ->  left  ->  saved  ->  on its way again  ->  there  ->  reduced
     (chain)       (full)    (leave)   (saved_as)       (chain)         (lease)    (reduced)

Between `left` and `on its way again` nothing of the buffer is held: autograd has a lease, which is empty, and how to fill it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from .._spec.codec import Form, packed
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms.saved import SavedAs, save_in_node
from .._units.chain import Buffers, Chain, Routes
from .._units.flow import reduce_unit
from .._units.host import arriving
from .._units.layout import ordered, spaced, unflatten_unit
from .._units.route import Route

__all__ = ["Visit", "pieces_of"]


def pieces_of(unit: Unit, grads: Sequence[Tensor | None], route: Route, like: Tensor, zeros: Tensor) -> list[Tensor]:
    """What to join to the gradient of a unit's buffer."""
    pieces = (
        like.new_zeros(param.numel, dtype=route.dtypes.param, device=route.device)
        if grad is None
        else ordered(grad, param).contiguous()
        for grad, param in zip(grads, unit.params, strict=True)
    )
    return spaced(pieces, unit, route.padded, zeros)


class Around(Protocol):
    """What a visit asks of the schedule that it is in."""

    shards: dict[str, Tensor]
    spec: PartitionSpec
    routes: Routes
    buffers: Buffers
    reduction: Reduction

    def approach(self, visit: Visit) -> None:
        """Backward has come to this visit."""
        ...

    def leave(self, visit: Visit) -> None:
        """Forward is done with it."""
        ...

    def keep_latest(self, visit: Visit) -> None:
        """No gradient will tell when it has been used."""
        ...

    def is_over(self) -> bool:
        """Whether the transform in which the call was made has ended."""
        ...

    def is_last(self) -> bool:
        """Whether the backward that runs is the one that a torch.func.grad around the call ends with."""
        ...

    def part_of_backward(self) -> contextlib.AbstractContextManager[None]:
        """Within this, backward runs a part of itself as a backward of its own."""
        ...

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Start to reduce a unit's gradient, given by parameter, which nobody differentiates."""
        ...


class _Lease:
    """A gathered buffer in backward. What autograd saved in it holds the lease, and a visit only knows it."""

    __slots__ = ("__weakref__", "buffer")

    def __init__(self) -> None:
        self.buffer: Tensor | None = None


class Visit:
    """One gather of one unit: on its way, there, noted by what autograd saved, and gathered again in backward."""

    def __init__(self, schedule: Around, unit: Unit) -> None:
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
        if not route.made:
            return
        with _torch.beneath():
            if not self.schedule.routes.connected and _torch.is_fake(self.shard):  # shapes can be computed
                self.chain = Chain(self.shard.new_empty(route.padded, dtype=route.dtypes.param, device=route.device), ())
            elif route.device is None:
                self.chain = self._started(self.shard)
            else:
                sent = self.shard.dtype if route.codec else route.dtypes.param
                piece, copy = arriving(self.shard, route.device, sent)
                with copy.after():  # and beside what is computed with the unit before
                    self.chain = self._started(piece)
                self.chain.after = copy

    def _started(self, piece: Tensor) -> Chain:
        """The gather of this slice."""
        route = self.route
        if route.form:
            self._form = route.form
            return Chain(piece if route.split or route.device else piece.clone(), self._steps.gather)
        if route.codec:
            sent, self._form = packed(route.codec.encoded(piece))
            return Chain(sent, self._steps.gather)
        own = None
        if route.split and not _torch.traced():
            own = self.schedule.buffers.take(route.padded, route.dtypes.param, piece)
        casts = own is not None and len(route.split) == 1  # as it writes its own slice
        return Chain(piece if casts else piece.to(route.dtypes.param), self._steps.gather, own)

    def _arrived(self) -> Tensor:
        route = self.route
        if not route.made:
            return self.shard
        assert self.chain is not None
        with _torch.beneath():
            chain, self.chain = self.chain, None
            full = chain.result()
            if route.codec and self._form:
                full = route.decoded(full, self._form)
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
        if self.full is not None:
            return self.full
        lease = self._leased()
        buffer = lease.buffer if lease else None
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

    def lease(self) -> _Lease:
        """What to hold for as long as backward may ask for the buffer."""
        lease = self._leased()
        if lease is None:
            lease = _Lease()
            self._lease = weakref.ref(lease)
        return lease

    def lease_for_rerun(self) -> _Lease:
        """What a module holds that is to run again in backward, with this buffer."""
        lease = self.lease()
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
        lease = self.lease()
        if lease.buffer is None:
            self.start_again()
            lease.buffer = self._arrived()
        return lease.buffer

    def saved_as(self, tensor: Tensor, *, by_backward: bool) -> SavedAs:
        """How to have this view of the buffer again, that autograd saves in forward or in a backward that records itself."""
        lease = self.lease()
        return functools.partial(self._view, lease, by_backward, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _view(
        self, lease: _Lease, by_backward: bool, shape: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt
    ) -> Tensor:
        self.schedule.approach(self)
        if by_backward:
            self.schedule.keep_latest(self)
        over = self.schedule.is_over()
        buffer = self.again() if lease.buffer is None else lease.buffer
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
        zeros = self.shard.new_zeros(self.route.widest, dtype=self.route.dtypes.param, device=self.route.device)
        pieces = pieces_of(self.unit, grads, self.route, self.shard, zeros)
        buffer = torch.cat([piece.reshape(-1) for piece in pieces])  # it may be differentiated again
        mesh, reduction = self.schedule.spec.bound_mesh, self.schedule.reduction
        return reduce_unit(buffer, self.unit, mesh, reduction, self.unit.p.precision, self.shard.dtype)


class _Parameters(_torch.LevelFunction):
    """A unit's parameters, as views of the buffer of one visit."""

    @staticmethod
    def forward(shard: Tensor, visit: Visit) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        buffer, level = visit.buffer, _torch.level()
        if not level:
            return tuple(unflatten_unit(shard if buffer is visit.shard else buffer, visit.unit))
        with _torch.beneath():
            views = unflatten_unit(buffer, visit.unit)
        return tuple(_torch.wrapped(view, level) for view in views)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.visit = inputs[1]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.visit.reduced(grads), None
