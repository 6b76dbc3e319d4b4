"""The four ways in which a call has its units, and which of them a call takes: `choose`.

| mode | when | gathers | what autograd keeps of a weight | reductions |
|---|---|---|---|---|
| `Scheduled` | process groups; no transform, or one torch.func.grad | ahead of use | how to have it again | behind backward |
| `Stacked` | several of grad, vjp, jvp | where used | the same, for each level | where the gradient is |
| `Flow` | vmap, simulated ranks, forward mode, recording | where used | the weight | where the gradient is |
| in_graph.py | inside torch.compile | the whole tree at once | what the compiler likes | where the compiler likes |

In all of them a unit is `Gathered` when its module is entered, and let go when that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .. import _torch
from .._spec.checks import find_full_params
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms.saved_tensors import RestorableBuffer
from .._units.accumulation import GradReceiver
from .._units.flow import gather_unit
from .._units.layout import unflatten_unit
from .casting import cast_params
from .nested import Nested
from .options import CallOptions
from .schedule import Schedule, Visit
from .watch import Watch

__all__ = ["Flow", "Gathered", "Mode", "Scheduled", "Stacked", "choose", "given"]


class Gathered:
    """A unit that is there: its parameters, the transforms it was gathered under, and its visit if the schedule has it."""

    __slots__ = ("frees", "level", "storage", "unit", "views", "visit", "watch")

    def __init__(
        self, unit: Unit, views: Sequence[Tensor], watch: Watch, *, frees: bool, level: int, visit: Visit | None = None
    ) -> None:
        self.unit, self.views, self.watch, self.visit, self.level, self.frees = unit, views, watch, visit, level, frees
        self.storage = 0  # of the buffer, where saved tensors in it are to be replaced


class Mode(Protocol):
    """How a call has its units."""

    params: Mapping[str, Tensor]
    """The shards as the call is to use them."""
    live: dict[int, RestorableBuffer] | None
    """The buffers whose saved views are replaced, by storage; None where autograd keeps what it saves."""

    def gather(self, unit: Unit) -> Gathered:
        """The unit, there."""
        ...

    def leave(self, gathered: Gathered, *, keep: bool) -> None:
        """Let go of it, or leave its buffer to backward."""
        ...

    def end_forward(self) -> None:
        """No more units are needed."""
        ...

    def check_forward(self) -> None:
        """Have ranks compare what forward has gathered, if that was not compared before each gather."""
        ...


def choose(
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    reduction: Reduction,
    options: CallOptions,
    receiver: GradReceiver | None,
    *,
    again: bool,
    replaces: bool,
) -> Scheduled | Stacked | Flow:
    """The mode of a call that is not compiled. ``receiver`` takes gradients as they are reduced.

    Not ``again``: what runs is itself run again for its derivatives, which need keep nothing. Unless it ``replaces`` what
    autograd saves, that stays: a checkpoint around the call does so itself.
    """
    if _schedulable(params, spec):
        schedule = Schedule(params, _sharded(params, spec), reduction, options, receiver)
        return Scheduled(schedule, params, spec, reduction, replaces)
    if again and replaces and torch.is_grad_enabled() and _nestable(spec):
        return Stacked(params, spec, reduction, options.check_order)
    return Flow(params, spec, reduction, options.check_order)


def _schedulable(params: Mapping[str, Tensor], spec: PartitionSpec) -> bool:
    """Whether gathers and reductions may run ahead and behind: nothing batches them or differentiates them twice."""
    if _torch.in_forward_ad() or not _torch.can_replace_saved_tensors():
        return False
    if spec.bound_mesh.is_simulated:
        return False
    return not _torch.current_level() or not any(
        _torch.unwrap(params[unit.key]).requires_grad for unit in spec if unit.key in params
    )


def _nestable(spec: PartitionSpec) -> bool:
    """Whether what the transforms that run save can be gathered again by each of them."""
    return (
        _torch.current_level() > 0
        and not spec.bound_mesh.is_simulated
        and _torch.has_only_derivatives()
        and not _torch.is_traced()
    )


def _sharded(params: Mapping[str, Tensor], spec: PartitionSpec) -> PartitionSpec:
    """The part of the spec whose units ``params`` holds as shards."""
    keys = spec.by_key.keys() & params.keys()
    return spec if len(keys) == len(spec) else spec._restrict("", keys)


def given(params: Mapping[str, Tensor], spec: PartitionSpec) -> dict[str, Gathered]:
    """The units whose full parameters are in ``params``, by key: nothing gathers them, and no mode knows of them."""
    full = ((unit, find_full_params(params, unit)) for unit in spec if unit.key not in params)
    return {
        unit.key: Gathered(unit, cast_params(views, unit), Watch(unit, views), frees=unit.p.reshard, level=0)
        for unit, views in full
        if views
    }


class Flow:
    """Gathers that are nodes of the graph, where a unit is used."""

    live: dict[int, RestorableBuffer] | None = None

    def __init__(self, params: Mapping[str, Tensor], spec: PartitionSpec, reduction: Reduction, check_order: bool) -> None:
        self.params, self.spec, self._reduction, self._check_order = params, spec, reduction, check_order

    def gather(self, unit: Unit) -> Gathered:
        """The unit, gathered as data flow."""
        return self._gathered(unit, self._buffer(unit, self._way(unit)))

    def _way(self, unit: Unit) -> Callable[[Tensor], Tensor]:
        """From the unit's shard to its buffer, differentiable."""
        # not this mode, which what is in a graph would hold
        mesh, reduction, check_order = self.spec.bound_mesh, self._reduction, self._check_order
        return lambda shard: gather_unit(shard, unit, mesh, reduction, unit.p.precision, check_order=check_order)

    def _buffer(self, unit: Unit, way: Callable[[Tensor], Tensor]) -> Tensor:
        buffer = way(self.params[unit.key])
        if _torch.in_forward_ad() and self.spec.size(unit) == 1:
            buffer = buffer.clone()  # forward may write to it, and so to its tangent, which is the caller's
        return buffer

    def _gathered(self, unit: Unit, buffer: Tensor) -> Gathered:
        watch = Watch(unit, (buffer,))
        return Gathered(unit, unflatten_unit(buffer, unit), watch, frees=unit.p.reshard, level=_torch.current_level())

    def leave(self, gathered: Gathered, *, keep: bool) -> None:
        """Whoever still holds the buffer decides."""
        if self.live:
            self.live.pop(gathered.storage, None)

    def end_forward(self) -> None:
        """Nothing is under way."""

    def check_forward(self) -> None:
        """Every gather was compared before it started."""


class Stacked(Flow):
    """The same, and what each level saves of a weight is how it gathers that again."""

    def __init__(self, params: Mapping[str, Tensor], spec: PartitionSpec, reduction: Reduction, check_order: bool) -> None:
        super().__init__(params, spec, reduction, check_order)
        self._level = _torch.current_level()
        self._nested = Nested()
        self.live = self._nested.live

    def gather(self, unit: Unit) -> Gathered:
        """The unit, gathered as data flow and known to the levels' graphs."""
        way = self._way(unit)
        buffer = self._buffer(unit, way)
        gathered = self._gathered(unit, buffer)
        shard = self.params[unit.key]
        if unit.p.reshard and not _torch.shares_storage(buffer, shard) and _torch.current_level() == self._level:
            gathered.storage = self._nested.gathered(unit.key, shard, buffer, way)
        return gathered


class Scheduled:
    """Gathers ahead of their use, in forward and in backward, and reductions behind it."""

    def __init__(
        self,
        schedule: Schedule,
        params: Mapping[str, Tensor],
        spec: PartitionSpec,
        reduction: Reduction,
        replaces: bool,
    ) -> None:
        self.schedule, self._level = schedule, _torch.current_level()
        self.params = schedule.enter(params) if torch.is_grad_enabled() else params
        self.live: dict[int, RestorableBuffer] | None = None
        if torch.is_grad_enabled() and schedule.routes.has_resharded_units and replaces:
            self.live = {}
        self._flow = Flow(self.params, spec, reduction, schedule.check_order)

    def gather(self, unit: Unit) -> Gathered:
        """The unit, with the next ones under way; inside of a transform that began in forward, as data flow."""
        if not self.is_here():
            return self._flow.gather(unit)
        visit = self.schedule.visit(unit)
        watch = Watch(unit, (visit.buffer,))
        views = visit.parameters(self.params[unit.key])
        gathered = Gathered(unit, views, watch, frees=visit.route.reshard_after_forward, level=self._level, visit=visit)
        if visit.route.reshard_after_forward and self.live is not None:
            gathered.storage = _torch.storage_id(visit.buffer)
            self.live[gathered.storage] = visit
        return gathered

    def is_here(self) -> bool:
        """Whether what runs is in the transforms of the call, and in no other."""
        return _torch.current_level() == self._level

    def leave(self, gathered: Gathered, *, keep: bool) -> None:
        """Its buffer is let go, or is backward's where that may ask for it."""
        if self.live:
            self.live.pop(gathered.storage, None)
        if gathered.visit:
            gathered.visit.leave(keep=keep and gathered.storage != 0)

    def end_forward(self) -> None:
        """What was gathered for nothing is let go."""
        self.schedule.end_forward()

    def check_forward(self) -> None:
        """Have ranks compare what forward has gathered."""
        self.schedule.check_forward()
