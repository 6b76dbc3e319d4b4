"""One gather of one unit in a schedule, from the start of its all-gather until the gradient of its buffer is complete.

    on its way  ->  there  ->  left  ->  saved  ->  on its way again  ->  there  ->  reduced
     (chain)       (full)    (leave)   (make_restorer) (chain)         (lease)    (reduced)

Between `left` and `on its way again` nothing of the buffer is held: autograd has a lease, which is empty, and how to fill it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .. import _torch
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms.saved_tensors import hook_running_node
from .._units.chain import BufferPool, CollectiveChain, RouteTable
from .._units.flow import reduce_unit
from .._units.gather import start_gather
from .again import Lease, SavedView, check_unmodified
from .views import pieces_of, views_of

__all__ = ["Visit"]


class Around(Protocol):
    """What a visit asks of the schedule that it is in."""

    shards: dict[str, Tensor]
    spec: PartitionSpec
    routes: RouteTable
    buffers: BufferPool
    reduction: Reduction
    check_order: bool

    def approach(self, visit: Visit) -> None:
        """Backward has come to this visit."""
        ...

    def leave(self, visit: Visit) -> None:
        """Forward is done with it."""
        ...

    def record_gather(self, key: str) -> None:
        """Note that the gather of this unit was started, for ranks to compare."""
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


class Visit:
    """One gather of one unit: on its way, there, noted by what autograd saved, and gathered again in backward."""

    __slots__ = (
        "__weakref__", "_lease", "_version", "chain", "full", "index", "route", "schedule", "shard", "trained", "unit"
    )  # fmt: skip

    def __init__(self, schedule: Around, unit: Unit) -> None:
        self.schedule, self.unit = schedule, unit
        self.shard = schedule.shards[unit.key]
        self.route = schedule.routes.by_key[unit.key]
        self.index = -1  # its place among those that forward left
        self.full: Tensor | None = None  # in forward
        self._lease: weakref.ref[Lease] | None = None  # in backward
        self.chain: CollectiveChain | None = None  # on its way
        self.trained = False
        self._version = _torch.version(self.shard)
        self._gather()

    def _gather(self) -> None:
        if self.route.has_own_buffer:
            with _torch.below_transforms():
                self.chain = start_gather(self.shard, self.unit.key, self.schedule.routes, self.schedule.buffers)
                self.schedule.record_gather(self.unit.key)

    def _arrived(self) -> Tensor:
        if not self.route.has_own_buffer:
            return self.shard
        chain, self.chain = self.chain, None
        assert chain is not None
        with _torch.below_transforms():
            return chain.result()

    def arrive(self) -> None:
        """Wait for the buffer."""
        self.full = self._arrived()

    def parameters(self, shard: Tensor) -> Sequence[Tensor]:
        """The unit's parameters in forward; their gradient goes to this shard."""
        self.trained = torch.is_grad_enabled() and shard.requires_grad
        return views_of(self, shard)

    def parameters_again(self, shard: Tensor) -> Sequence[Tensor]:
        """The unit's parameters in backward, for its module to run again."""
        self.schedule.approach(self)
        self.again()
        return views_of(self, shard)

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
        elif self.route.reshard_after_forward:
            self.schedule.buffers.give(self.full)
        self.full = None
        self.schedule.leave(self)

    def lease(self) -> Lease:
        """What to hold for as long as backward may ask for the buffer."""
        lease = self._leased()
        if lease is None:
            lease = Lease(self)
            self._lease = weakref.ref(lease)
        return lease

    def lease_for_rerun(self) -> Lease:
        """What a module holds that is to run again in backward, with this buffer."""
        lease = self.lease()
        if not self.route.reshard_after_forward:
            lease.buffer = self.full
        return lease

    def _leased(self) -> Lease | None:
        return self._lease() if self._lease else None

    def release(self) -> None:
        """Every use of the buffer has been made, or it is to be gathered once more."""
        lease = self._leased()
        if lease and lease.buffer is not None:
            if self.route.has_own_buffer:
                self.schedule.buffers.give(lease.buffer)
            lease.buffer = None

    def start_again(self) -> bool:
        """Start to gather it for backward, if it is not there or under way. False if nobody will ask for it."""
        lease = self._leased()
        if lease is None or lease.buffer is not None or self.chain is not None:
            return lease is not None
        check_unmodified(self.unit.key, self.shard, self._version)
        self._gather()
        return True

    def again(self) -> Tensor:
        """The buffer in backward, gathered again if need be."""
        lease = self.lease()
        if lease.buffer is None:
            self.start_again()
            lease.buffer = self._arrived()
        return lease.buffer

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> SavedView:
        """What to keep in the place of this view of the buffer."""
        return SavedView(self.lease(), tensor, by_backward)

    def view(self, saved: SavedView) -> Tensor:
        """The view again, of the buffer in backward."""
        schedule = self.schedule
        schedule.approach(self)
        if saved.by_backward:
            schedule.keep_latest(self)
        over = schedule.is_over()
        buffer = saved.lease.buffer
        if buffer is None:
            buffer = self.again()
        if torch.is_grad_enabled() and self.route.reshard_after_forward:
            hook_running_node({_torch.storage_id(buffer): self}, 0 if over else _torch.current_level())
        view = buffer.as_strided(saved.shape, saved.stride, saved.offset)
        return _torch.wrap_for_ended_level(view) if over else view

    def reduced(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of the shard from those of the parameters, None where the schedule has it; the buffer is let go."""
        self.release()
        own = [_torch.unwrap_level(g) if g is not None else None for g in grads] if self.schedule.is_last() else grads
        if not _torch.any_tracked(own):
            self.schedule.reduce(self.unit, own)
            return None
        route = self.route
        zeros = self.shard.new_zeros(route.longest_padding, dtype=route.dtypes.param, device=route.device)
        pieces = pieces_of(self.unit, grads, route, self.shard, zeros)
        buffer = torch.cat([piece.reshape(-1) for piece in pieces])  # it may be differentiated again
        mesh, reduction = self.schedule.spec.bound_mesh, self.schedule.reduction
        return reduce_unit(
            buffer,
            self.unit,
            mesh,
            reduction,
            self.unit.p.precision,
            self.shard.dtype,
            check_order=self.schedule.check_order,
        )
