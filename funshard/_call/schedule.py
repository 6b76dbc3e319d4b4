"""The schedule of one call: units are gathered before they are needed, and reduced behind backward.

The life of a `GatheredUnit`, from the start of its all-gather until the gradient of its buffer is reduced:

    unshard  ->  wait  ->  parameters  ->  reshard  |  prefetch_again  ->  SavedView()  ->  reduce_grads
    (start)    (forward)                   (free)   |    (start)           (backward)       (free, reduce)

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py tells the same of FSDP2. Between forward and backward nothing holds the
buffer: autograd holds `SavedView`s, which name an empty `BackwardBuffer`. To free a buffer is to drop the reference to it.

    SavedView  --holds-->  BackwardBuffer  --holds-->  GatheredUnit  --knows-->  BackwardBuffer

The `Schedule` says when a unit starts. While one unit computes in forward, those that come next in ``spec.order`` are gathered,
and in backward those that forward resharded before it. This is for real process groups, outside of torch.func or under one
torch.func.grad. Elsewhere gathers are data flow (`flow.unshard_unit`), as are reductions that may be differentiated again.

Every rank starts and waits in the same order, as long as it runs the same program; `OrderCheck` compares that.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from .._core.flow import Reduction
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._core.unit import Unit
from .._torch.tracing import phase
from .._transforms.saved_tensors import hook_running_node, mark_graph_freed
from .._wire.accumulation import GradReceiver, drop_unweighted
from .._wire.chain import BufferPool, CollectiveChain, RouteTable, copy_secondary_slice, forgetting_on_error
from .._wire.flow import reduce_unit
from .._wire.mixed_layout import view_whole_elements
from .._wire.reductions import ReductionQueue, flat_pieces
from ..collectives._agree import OrderCheck

MAX_UNSHARDED_IN_BACKWARD = 2
"""The number of units that stay gathered in backward where no gradient tells their last use: frozen units, units that the
backward of a backward reads before it comes back to them, and all units that stacks of transforms read."""


def check_unmodified(key: str, shard: Tensor, version: int) -> None:
    """Raise RuntimeError, naming the unit, unless its shard has the version at which it was gathered."""
    if (now := _torch.version(shard)) != version:
        raise RuntimeError(
            f"the shard of unit '{key}' was modified in place between forward and backward: "
            f"expected version {version}, got {now}; update after backward"
        )


class BackwardBuffer:
    """A gathered buffer in backward; None while nobody has asked for it."""

    __slots__ = ("__weakref__", "buffer", "secondary", "unit")

    def __init__(self, unit: GatheredUnit) -> None:
        self.unit = unit
        self.buffer: Tensor | None = None
        self.secondary: Tensor | None = None  # the slice of forward's buffer that it is gathered from, if not the shard


class SavedView:
    """The shape, stride and offset of a view of a `BackwardBuffer`, saved in forward or in a backward that records itself.

    An object, not a closure, and its layout one that others share: there is one for each weight of each unit, and the garbage
    collector visits all of them.
    """

    __slots__ = ("backward_buffer", "by_backward", "dtype", "layout")

    def __init__(self, backward_buffer: BackwardBuffer, tensor: Tensor, buffer: Tensor, by_backward: bool) -> None:
        self.backward_buffer, self.by_backward = backward_buffer, by_backward
        self.dtype = tensor.dtype  # not the buffer's, where that is bytes
        typed = buffer if buffer.dtype is tensor.dtype else view_whole_elements(buffer, tensor.dtype)
        self.layout = _share(tensor.shape, tensor.stride(), tensor.storage_offset() - typed.storage_offset())

    def __call__(self) -> Tensor:
        """Return the view of backward's buffer that stands for the saved one; gather it again if it was freed."""
        backward_buffer, gathered = self.backward_buffer, self.backward_buffer.unit
        schedule, route = gathered.schedule, gathered.route
        if gathered.restoring != (run := schedule.backward.run_number()):  # once for its first view
            gathered.restoring = run
            schedule.prefetch_backward(gathered)
        if self.by_backward:
            schedule.backward.release_oldest_for(gathered)
        is_over = schedule.witness is not None and schedule.is_over()
        buffer = backward_buffer.buffer
        if buffer is None:
            buffer = gathered.wait_again()
        if torch.is_grad_enabled() and route.reshard_after_forward:
            hook_running_node({_torch.storage_id(buffer): gathered}, 0 if is_over else _torch.current_level())
        typed = buffer if self.dtype is buffer.dtype else view_whole_elements(buffer, self.dtype)
        shape, stride, offset = self.layout
        view = typed.as_strided(shape, stride, typed.storage_offset() + offset)
        return _torch.wrap_for_ended_level(view) if is_over else view


@functools.lru_cache(4096)
def _share(*layout: Any) -> tuple[Any, ...]:
    """Return the shape, stride and offset, the same objects for equal ones."""
    return layout


class BackwardPrefetch:
    """The units of a call in the order in which forward resharded them. Backward comes to the last one first."""

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self.run_number: Callable[[], int] = _torch.current_graph_task  # of this run of backward
        self._resharded: list[weakref.ref[GatheredUnit]] = []
        self._position, self._task = 0, -1  # in that list, of the run of backward with this number
        self._awaiting_release: deque[weakref.ref[GatheredUnit]] = deque()

    def append(self, gathered: GatheredUnit) -> None:
        """Add a unit that forward has resharded."""
        gathered.index = len(self._resharded)
        self._resharded.append(weakref.ref(gathered))

    @contextlib.contextmanager
    def inner_run(self) -> Generator[None]:
        """Count the runs of backward inside as parts of the running one."""
        before, number = self.run_number, self.run_number()
        self.run_number = lambda: number
        try:
            yield
        finally:
            self.run_number = before

    def advance_to(self, gathered: GatheredUnit) -> bool:
        """Gather this unit, and start to gather the next ones of backward. Return False if backward has been here before."""
        task = self.run_number()
        if self._task != task:
            self._task, self._position = task, len(self._resharded)
        if gathered.index >= self._position:  # the same unit, or one around it
            return False
        for passed in self._resharded[gathered.index + 1 : self._position]:
            other = passed()
            own = gathered.unit.paths  # a unit around it may come after it
            if other is not None and not any(is_within(path, around) for path in own for around in other.unit.paths):
                other.chain = None
        self._position = gathered.index
        if not gathered.is_trained:
            self.release_oldest_for(gathered)
        gathered.wait_again()
        ahead = 0
        for i in range(gathered.index - 1, -1, -1):
            if ahead >= self._prefetch:
                break
            if (other := self._resharded[i]()) is not None and other.prefetch_again():
                ahead += 1
        return True

    def release_oldest_for(self, gathered: GatheredUnit) -> None:
        """Free the oldest unit of those that no gradient tells the last use of, to make room for this one."""
        if any(ref() is gathered for ref in self._awaiting_release):
            return
        if len(self._awaiting_release) == MAX_UNSHARDED_IN_BACKWARD and (oldest := self._awaiting_release.popleft()()):
            oldest.release()
        self._awaiting_release.append(weakref.ref(gathered))


class CallInputs(NamedTuple):
    """The parameters that a call gathers, and how it gathers them and reduces their gradients."""

    params: Mapping[str, Tensor]
    spec: PartitionSpec
    """The spec of the parameters, bound to a mesh."""
    reduction: Reduction
    prefetch: int = 1
    """The number of units that are gathered ahead of their use."""
    in_flight: int = 1
    """The number of units whose gradients may be under reduction at once."""
    check_order: bool = True
    """Whether ranks compare the order of their collectives."""
    weight: Tensor | None = None
    """The weight of the micro-batch that the call is part of, if it may be 0: its gradients are then left out."""
    receiver: GradReceiver | None = None
    """The accumulation that takes gradients while backward runs."""


class Schedule:
    """The gathers and reductions of one call and of its backward; of its units those that are given as shards."""

    def __init__(self, inputs: CallInputs) -> None:
        shards, spec, self.reduction, prefetch, in_flight, self.check_order, self.weight, self.receiver = inputs
        if len(keys := spec.by_key.keys() & shards.keys()) < len(spec):
            spec = spec._restrict_to_units("", keys)
        self.shards = {key: _torch.unwrap(shards[key]).detach() for key in spec.by_key}
        self.witness = next((shard for shard in shards.values() if _torch.is_wrapped(shard)), None)
        self.spec = spec
        dtypes = tuple(shard.dtype for shard in self.shards.values())
        self.routes = spec._compute_once(RouteTable, dtypes, self.reduction, self.check_order)
        has_values = not (_torch.is_tracing() or any(map(_torch.is_fake, self.shards.values())))
        self.order_check = OrderCheck(is_on=self.routes.needs_order_check and has_values)
        self._has_backward = False  # whether a backward will end in the call's shards
        self.buffers = BufferPool()
        self.reductions = ReductionQueue(in_flight, self.buffers, self.receiver)
        self._reducing = -1  # the run of backward whose gradients these are
        self._run_sums: dict[GatheredUnit, tuple[int, Sequence[Tensor | None]]] = {}  # of some of a unit's inner runs
        self.backward = BackwardPrefetch(prefetch)
        self._order, self._position = spec.order, -1  # where forward is in that order
        self._prefetch = prefetch
        self._in_use: set[str] = set()
        self._ahead: dict[str, GatheredUnit] = {}
        self.gathered_keys: list[str] = []  # in the order of forward

    def enter(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shards as the call is to use them: their gradients reach them together, at the end of backward."""
        keys = [key for key in self.shards if shards[key].requires_grad]
        if not keys:
            return dict(shards)
        self._has_backward = True
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
        gathered.forward_buffer = gathered.wait()  # before the next ones start: they would share the wire
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

    @contextlib.contextmanager
    def forward(self) -> Generator[None]:
        """Have ranks compare what the forward inside has gathered, and free what was gathered ahead and not used."""
        try:
            yield
            with forgetting_on_error(self._ahead.clear):
                for key in self._ahead:
                    self.order_check.record(self.routes.steps[key].gather_groups, f"the end of forward without unit '{key}'")
                self.order_check.compare(self.routes.gather_groups, "the end of forward")
            self.order_check.compares_each = not self._has_backward
        finally:
            self._ahead.clear()
            self.buffers.clear()

    # --- backward ---

    def prefetch_backward(self, gathered: GatheredUnit) -> None:
        """Gather the unit that backward has come to and, ahead of their use, those that forward resharded before it."""
        if self.backward.advance_to(gathered):
            self.buffers.clear()

    def is_over(self) -> bool:
        """Return whether the transform in which the call was made has ended, as when the pullback of a vjp runs."""
        return self.witness is not None and _torch.is_dead(self.witness)

    def is_last_backward(self) -> bool:
        """Return whether this backward is the one that a torch.func.grad around the call ends with."""
        return _torch.is_last_backward(_torch.current_level()) and not self.is_over()

    def _begin_reductions(self) -> None:
        """Drop what another run of backward has left that did not end."""
        if self._reducing != (run := self.backward.run_number()):
            self._reducing = run
            self._run_sums.clear()
            self.reductions.reset()

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None], *, is_expected: bool = False) -> None:
        """Start to reduce a unit's gradient, given by parameter, which nobody differentiates."""
        self._begin_reductions()
        if self.receiver and not is_expected:
            self.receiver.expect(unit.key)
        steps = self.routes.steps[unit.key]
        self.order_check.record(steps.reduce_groups, f"the reduction of unit '{unit.key}'{steps.codec_label}")
        with _torch.below_transforms():
            self.reductions.reduce(unit, grads, self.shards[unit.key], self.routes)

    def add_run(self, gathered: GatheredUnit, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of one of a unit's inner runs, and reduce their sum after the last one."""
        self._begin_reductions()
        runs, before = self._run_sums.pop(gathered, (0, [None] * len(grads)))
        if not runs and self.receiver:
            self.receiver.expect(gathered.unit.key)  # until backward ends: the loss may not depend on the last run
        total = [g if b is None else b if g is None else b + g for b, g in zip(before, grads, strict=True)]
        if runs + 1 < gathered.inner_runs:
            self._run_sums[gathered] = runs + 1, total
        else:
            gathered.reduce_grads(total, is_expected=True)

    def wait_reductions(self, shard: Tensor) -> dict[str, Tensor]:
        """Return the reduced gradients of this backward, by unit key. ``shard`` is any of those that they belong to."""
        self._begin_reductions()
        for gathered in [*self._run_sums]:  # the loss does not depend on all runs
            _, total = self._run_sums.pop(gathered)
            gathered.reduce_grads(total, is_expected=True)
        with forgetting_on_error(self.reductions.reset):
            self.order_check.compare(self.routes.groups, "the end of backward")  # or some reduction might wait for ever
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


class GatheredUnit:
    """A unit that one call has gathered once in forward, and gathers again in backward."""

    def __init__(self, schedule: Schedule, unit: Unit) -> None:
        self.schedule, self.unit = schedule, unit
        self.shard = schedule.shards[unit.key]
        self.route = schedule.routes.steps[unit.key].route
        self.dtypes = self.route.view_dtypes
        self.index = -1  # its place among the units that forward has resharded
        self.forward_buffer: Tensor | None = None
        self._backward_buffer: Callable[[], BackwardBuffer | None] = lambda: None  # a weak reference, if anything holds one
        self.chain: CollectiveChain | None = None  # the gather, while it is under way
        self.is_trained = False
        self.inner_runs = 0  # of modules that forward ran with this buffer, and that backward runs again
        self._version = _torch.version(self.shard)
        self.restoring = -2  # the run of backward that reads its views
        self.unshard()

    # --- forward ---

    def unshard(self) -> None:
        """Start to gather the buffer: from the shards, or from the slices of it that forward has kept."""
        if self.route.has_own_buffer:
            schedule, backward_buffer = self.schedule, self._backward_buffer()
            secondary, steps = backward_buffer and backward_buffer.secondary, schedule.routes.steps[self.unit.key]
            with phase("gather", self.unit.key), _torch.below_transforms():
                if secondary is None:
                    self.chain = steps.start(self.shard, schedule.buffers)
                else:
                    self.chain = steps.start_from_secondary(secondary, schedule.buffers)
                groups = steps.gather_groups if secondary is None else steps.gather_secondary_groups
                schedule.order_check.record(groups, f"the gather of unit '{self.unit.key}'")

    def wait(self) -> Tensor:
        """Wait for the gather, and return the buffer; the shard itself if it needs none."""
        if not self.route.has_own_buffer:
            return self.shard
        chain, self.chain = self.chain, None
        assert chain is not None
        self.schedule.order_check.finish()
        with phase("wait for", self.unit.key), _torch.below_transforms():
            return chain.result()

    def parameters(self, shard: Tensor) -> Sequence[Tensor]:
        """Return the unit's parameters in forward; their gradient goes to this shard."""
        self.is_trained = torch.is_grad_enabled() and shard.requires_grad
        return self._view_parameters(shard)

    def _view_parameters(self, shard: Tensor, *, is_inner: bool = False) -> Sequence[Tensor]:
        """Return the parameters as views of the buffer, with the shard's graph if gradients are wanted."""
        if torch.is_grad_enabled() and shard.requires_grad:
            return _Unflatten.apply(shard, self, is_inner and self.inner_runs > 1)
        return self.route.unflatten(self.buffer, self.unit)

    @property
    def buffer(self) -> Tensor:
        """The gathered buffer, of forward or of backward; it must not have been freed."""
        if self.forward_buffer is not None:
            return self.forward_buffer
        backward_buffer = self._backward_buffer()
        buffer = backward_buffer.buffer if backward_buffer else None
        assert buffer is not None
        return buffer

    def reshard(self, *, keep_for_backward: bool) -> None:
        """End the unit's use in forward: free the buffer but for the slice to keep, or hand it to backward."""
        assert self.forward_buffer is not None
        backward_buffer = self._backward_buffer()
        if keep_for_backward and backward_buffer:
            backward_buffer.buffer = self.forward_buffer
        elif self.route.reshard_after_forward:
            if backward_buffer and self.route.secondary_axes:
                backward_buffer.secondary = copy_secondary_slice(self.forward_buffer, self.route, self.schedule.spec.bound_mesh)
            self.schedule.buffers.give(self.forward_buffer)
        self.forward_buffer = None
        self.schedule.add_resharded(self)

    # --- between forward and backward ---

    def hold_for_backward(self) -> BackwardBuffer:
        """Return what to hold for as long as backward may ask for the buffer."""
        backward_buffer = self._backward_buffer()
        if backward_buffer is None:
            backward_buffer = BackwardBuffer(self)
            self._backward_buffer = weakref.ref(backward_buffer)
        return backward_buffer

    def hold_for_inner_run(self) -> BackwardBuffer:
        """Return what a module holds that backward recomputes with this buffer."""
        backward_buffer = self.hold_for_backward()
        self.inner_runs += 1
        if not self.route.reshard_after_forward:
            backward_buffer.buffer = self.forward_buffer
        return backward_buffer

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> SavedView:
        """Return what autograd keeps instead of this view of the buffer."""
        return SavedView(self.hold_for_backward(), tensor, self.buffer, by_backward)

    # --- backward ---

    def prefetch_again(self) -> bool:
        """Start to gather the buffer for backward unless it is there or under way. Return False if nobody will ask for it."""
        backward_buffer = self._backward_buffer()
        if backward_buffer is None or backward_buffer.buffer is not None or self.chain is not None:
            return backward_buffer is not None
        check_unmodified(self.unit.key, self.shard, self._version)
        self.unshard()
        return True

    def wait_again(self) -> Tensor:
        """Return the buffer in backward; gather it if it was freed."""
        backward_buffer = self.hold_for_backward()
        if backward_buffer.buffer is None:
            self.prefetch_again()
            backward_buffer.buffer = self.wait()
        return backward_buffer.buffer

    def parameters_in_backward(self, shard: Tensor) -> Sequence[Tensor]:
        """Return the unit's parameters for backward to recompute its module with."""
        self.schedule.prefetch_backward(self)
        self.wait_again()
        return self._view_parameters(shard, is_inner=True)

    def release(self) -> None:
        """Free backward's buffer; another use gathers it again."""
        backward_buffer = self._backward_buffer()
        if backward_buffer and backward_buffer.buffer is not None:
            if self.route.has_own_buffer:
                self.schedule.buffers.give(backward_buffer.buffer)
            backward_buffer.buffer = None

    def reduce_grads(self, grads: Sequence[Tensor | None], *, is_expected: bool = False) -> Tensor | None:
        """Free the buffer and reduce the gradients. Return that of the shard where it may be differentiated again.

        With ``is_expected`` the receiver has been told of the gradient.
        """
        self.release()
        schedule, route = self.schedule, self.route
        if (weight := schedule.weight) is not None:
            grads = [grad if grad is None else drop_unweighted(grad, weight) for grad in grads]
        with phase("reduce", self.unit.key):
            own = [_torch.unwrap_level(g) if g is not None else None for g in grads] if schedule.is_last_backward() else grads
            if not _torch.any_tracked(own):
                schedule.reduce(self.unit, own, is_expected=is_expected)
                return None
            zeros = self.shard.new_zeros(route.longest_padding, dtype=route.dtypes.param, device=route.device)
            pieces = flat_pieces(self.unit, grads, route, self.shard, zeros)
            return reduce_unit(
                torch.cat([piece.reshape(-1) for piece in pieces]),
                self.unit,
                schedule.spec.bound_mesh,
                schedule.reduction,
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
        if ctx.adds and not _torch.any_tracked(grads):
            ctx.gathered.schedule.add_run(ctx.gathered, grads)
            return None, None, None
        return ctx.gathered.reduce_grads(grads), None, None
