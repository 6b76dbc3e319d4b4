"""The life of one gathered unit, from the start of its all-gather until the gradient of its buffer is reduced.

    unshard  ->  wait  ->  parameters  ->  reshard  |  prefetch_again  ->  restore_view  ->  reduce_grads
    (start)    (forward)                   (free)   |    (start)           (backward)        (free, reduce)

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py tells the same of FSDP2. Between forward and backward nothing holds the
buffer: autograd holds `SavedView`s, which name a `BufferLease` that is empty. To free a buffer is to drop the reference to it.
When the next unit starts is decided by the `Schedule`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from .._phases import phase
from .._spec.unit import Unit
from .._transforms.saved_tensors import hook_running_node
from .._units.accumulation import drop_unweighted
from .._units.chain import CollectiveChain, copy_kept_slice
from .._units.flow import reduce_unit
from .._units.mixed_layout import view_whole_elements
from .._units.reductions import flat_pieces
from .saved_weights import BufferLease, SavedView, check_unmodified

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["GatheredUnit"]


class GatheredUnit:
    """A unit that one call has gathered once in forward, and gathers again in backward."""

    __slots__ = (
        "__weakref__", "_lease", "_restoring", "_version", "chain", "dtypes", "forward_buffer", "index", "is_trained",
        "recomputed_runs", "route", "schedule", "shard", "unit",
    )  # fmt: skip

    def __init__(self, schedule: Schedule, unit: Unit) -> None:
        self.schedule, self.unit = schedule, unit
        self.shard = schedule.shards[unit.key]
        self.route = schedule.routes.by_key[unit.key]
        self.dtypes = self.route.view_dtypes
        self.index = -1  # its place among the units that forward has resharded
        self.forward_buffer: Tensor | None = None
        self._lease: weakref.ref[BufferLease] | None = None  # backward's buffer
        self.chain: CollectiveChain | None = None  # the gather, while it is under way
        self.is_trained = False
        self.recomputed_runs = 0  # of modules that forward ran with this buffer, and that backward runs again
        self._version = _torch.version(self.shard)
        self._restoring = -2  # the run of backward that reads its views
        self.unshard()

    # --- forward ---

    def unshard(self) -> None:
        """Start to gather the buffer: from the shards, or from the slices of it that forward has kept."""
        if self.route.has_own_buffer:
            schedule, lease = self.schedule, self._current_lease()
            kept, gather = lease and lease.kept, schedule.routes.steps[self.unit.key].gather
            with phase("gather", self.unit.key), _torch.below_transforms():
                if kept is None:
                    self.chain = gather.start(self.shard, schedule.buffers)
                else:
                    self.chain = gather.start_from_kept(kept, schedule.buffers)
                schedule.order_check.record_gather(self.unit.key, of_kept=kept is not None)

    def wait(self) -> None:
        """Wait for forward's buffer."""
        self.forward_buffer = self._wait_chain()

    def _wait_chain(self) -> Tensor:
        """Wait for the gather, and return the buffer; the shard itself if it needs none."""
        if not self.route.has_own_buffer:
            return self.shard
        chain, self.chain = self.chain, None
        assert chain is not None
        try:
            with phase("wait for", self.unit.key), _torch.below_transforms():
                return chain.result()
        except RuntimeError as error:
            if not any(words in _torch.error_text(error) for words in ("imed out", "timeout")):  # gloo's, by who notices first
                raise
            raise RuntimeError(
                f"unit '{self.unit.key}' was not gathered within the process group's timeout: another rank has not come to it, "
                "or has ended: expected all ranks to run the same units; fs.check() says where each rank is"
            ) from error

    def parameters(self, shard: Tensor) -> Sequence[Tensor]:
        """Return the unit's parameters in forward; their gradient goes to this shard."""
        self.is_trained = torch.is_grad_enabled() and shard.requires_grad
        return self._view_parameters(shard)

    def _view_parameters(self, shard: Tensor, *, recomputing: bool = False) -> Sequence[Tensor]:
        """Return the parameters as views of the buffer, with the shard's graph if gradients are wanted."""
        if torch.is_grad_enabled() and shard.requires_grad:
            return _Unflatten.apply(shard, self, recomputing and self.recomputed_runs > 1)
        return self.route.unflatten(self.buffer, self.unit)

    @property
    def buffer(self) -> Tensor:
        """The gathered buffer, of forward or of backward; it must not have been freed."""
        if self.forward_buffer is not None:
            return self.forward_buffer
        lease = self._current_lease()
        buffer = lease.buffer if lease else None
        assert buffer is not None
        return buffer

    def reshard(self, *, keep_for_backward: bool) -> None:
        """End the unit's use in forward: free the buffer but for the slice to keep, or hand it to backward."""
        assert self.forward_buffer is not None
        lease = self._current_lease()
        if keep_for_backward and lease:
            lease.buffer = self.forward_buffer
        elif self.route.reshard_after_forward:
            if lease and self.route.kept_axes:
                lease.kept = copy_kept_slice(self.forward_buffer, self.route, self.schedule.spec.bound_mesh)
            self.schedule.buffers.give(self.forward_buffer)
        self.forward_buffer = None
        self.schedule.add_resharded(self)

    # --- between forward and backward ---

    def lease(self) -> BufferLease:
        """Return what to hold for as long as backward may ask for the buffer."""
        lease = self._current_lease()
        if lease is None:
            lease = BufferLease(self)
            self._lease = weakref.ref(lease)
        return lease

    def lease_for_recompute(self) -> BufferLease:
        """Return what a module holds that backward recomputes with this buffer."""
        lease = self.lease()
        self.recomputed_runs += 1
        if not self.route.reshard_after_forward:
            lease.buffer = self.forward_buffer
        return lease

    def _current_lease(self) -> BufferLease | None:
        """Return the lease of the buffer while something holds it, else None."""
        return self._lease() if self._lease else None

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> SavedView:
        """Return what autograd keeps instead of this view of the buffer."""
        return SavedView(self.lease(), tensor, self.buffer, by_backward)

    # --- backward ---

    def prefetch_again(self) -> bool:
        """Start to gather the buffer for backward unless it is there or under way. Return False if nobody will ask for it."""
        lease = self._current_lease()
        if lease is None or lease.buffer is not None or self.chain is not None:
            return lease is not None
        check_unmodified(self.unit.key, self.shard, self._version)
        self.unshard()
        return True

    def wait_again(self) -> Tensor:
        """Return the buffer in backward; gather it if it was freed."""
        lease = self.lease()
        if lease.buffer is None:
            self.prefetch_again()
            lease.buffer = self._wait_chain()
        return lease.buffer

    def restore_view(self, saved: SavedView) -> Tensor:
        """Return the view of backward's buffer that stands for a saved one."""
        schedule = self.schedule
        if self._restoring != (run := schedule.backward.run_number()):  # once for its first view
            self._restoring = run
            schedule.prefetch_backward(self)
        if saved.by_backward:
            schedule.backward.release_oldest_for(self)
        is_over = schedule.is_over()
        buffer = saved.lease.buffer
        if buffer is None:
            buffer = self.wait_again()
        if torch.is_grad_enabled() and self.route.reshard_after_forward:
            hook_running_node({_torch.storage_id(buffer): self}, 0 if is_over else _torch.current_level())
        typed = buffer if saved.dtype is buffer.dtype else view_whole_elements(buffer, saved.dtype)
        view = typed.as_strided(saved.shape, saved.stride, typed.storage_offset() + saved.offset)
        return _torch.wrap_for_ended_level(view) if is_over else view

    def parameters_in_backward(self, shard: Tensor) -> Sequence[Tensor]:
        """Return the unit's parameters for backward to recompute its module with."""
        self.schedule.prefetch_backward(self)
        self.wait_again()
        return self._view_parameters(shard, recomputing=True)

    def release(self) -> None:
        """Free backward's buffer; another use gathers it again."""
        lease = self._current_lease()
        if lease and lease.buffer is not None:
            if self.route.has_own_buffer:
                self.schedule.buffers.give(lease.buffer)
            lease.buffer = None

    def reduce_grads(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Free the buffer and reduce the gradients of the parameters.

        Returns:
            The shard's gradient where it may be differentiated again; None where the schedule reduces it behind backward.

        """
        self.release()
        if (weight := self.schedule.weight) is not None:
            grads = [grad if grad is None else drop_unweighted(grad, weight) for grad in grads]
        with phase("reduce", self.unit.key):
            return self._reduce_grads(grads)

    def add_grads(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Do as `reduce_grads`, where backward runs several modules again with this buffer: once, after the last of them."""
        if _torch.any_tracked(grads):
            return self.reduce_grads(grads)
        self.schedule.run_gradients.add(self, grads, self.schedule.backward.run_number())
        return None

    def _reduce_grads(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Start to reduce the gradients and return None; return the reduced gradient at once where a transform tracks them."""
        schedule = self.schedule
        own = [_torch.unwrap_level(g) if g is not None else None for g in grads] if schedule.is_last_backward() else grads
        if not _torch.any_tracked(own):
            schedule.reduce(self.unit, own)
            return None
        route = self.route
        zeros = self.shard.new_zeros(route.longest_padding, dtype=route.dtypes.param, device=route.device)
        pieces = flat_pieces(self.unit, grads, route, self.shard, zeros)
        return reduce_unit(
            torch.cat([piece.reshape(-1) for piece in pieces]),
            self.unit,
            schedule.spec.bound_mesh,
            schedule.reduction,
            self.unit.p.precision,
            self.shard.dtype,
            check_order=schedule.check_order,
        )


class _Unflatten(_torch.LevelFunction):
    """A unit's parameters as views of its buffer, by one node of autograd for all of them."""

    @staticmethod
    def forward(shard: Tensor, gathered: GatheredUnit, adds: bool) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        buffer, level = gathered.buffer, _torch.current_level()
        if not level:
            return tuple(gathered.route.unflatten(shard if buffer is gathered.shard else buffer, gathered.unit))
        with _torch.below_transforms():
            views = gathered.route.unflatten(buffer, gathered.unit)
        return tuple(_torch.wrap_at_level(view, level) for view in views)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.gathered, ctx.adds = inputs  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        reduce = ctx.gathered.add_grads if ctx.adds else ctx.gathered.reduce_grads
        return reduce(grads), None, None
