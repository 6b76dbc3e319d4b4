"""The events of a step from the spec alone: the schedule of `functional_call` on shapes, without the computation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.tree import Param, is_within
from .._spec.unit import Unit
from .._units.buckets import BUCKET_BYTES, BUCKET_BYTES_CUDA, OpenBuckets
from .._units.route import Route
from .at_rest import UnitBytes, is_on_host
from .chains import Chain, gather_kept_steps, gather_steps, reduce_steps
from .events import Event, EventKind, EventList

__all__ = ["count_tokens", "forecast", "unit_routes"]


# --- The modules that a step runs, as a tree: which units each one gathers, and whether backward runs it again ---


@dataclass(eq=False)
class ModuleRun:
    """One run of a module: its own units, and the runs of modules inside it, in the order of forward."""

    path: str
    units: list[Unit]
    inner: list[ModuleRun] = field(default_factory=list["ModuleRun"])
    is_recomputed: bool = False
    has_backward: bool = False
    """Whether backward comes to it: it, or what ran before it, is trained."""
    shared: tuple[Unit, ...] = ()
    """Those of its units that another run before it in the order of forward has, too, which ends their backward."""

    def params_of(self, unit: Unit) -> list[Param]:
        """Return the parameters of one of its units that its module has: all of them, unless the unit has other modules."""
        return [x for x in unit.params if len(unit.paths) == 1 or any(is_within(name, self.path) for name in x.names)]

    def walk(self) -> Iterator[ModuleRun]:
        """Yield this run and those inside it, in the order in which they begin."""
        yield self
        for run in self.inner:
            yield from run.walk()


def module_runs(spec: PartitionSpec) -> ModuleRun:
    """Return the run of the model, whose modules run in the order of ``spec.order``."""
    root = ModuleRun("", [unit for unit in spec if unit.path == ""])
    recomputed = set(spec.recomputed)
    root.is_recomputed = "" in recomputed
    stack = [root]
    above: dict[str, list[ModuleRun]] = {}  # by the path of a module that shares its units: the runs around it, and its own
    added: list[Unit] = []  # by the last key
    order = (*spec.order, *(key for key in spec.by_key if key not in spec.order))
    seen: Counter[str] = Counter()
    for key in order:
        unit = spec.by_key[key]
        if unit.path == "" or unit in added:
            continue
        seen[key] += 1
        modules = _modules_of_gather(unit, seen[key], order.count(key))
        added = []
        if inside := [path for path in above if path not in unit.paths and unit.is_inside(path)]:
            stack = [*above[max(inside, key=len)]]
        for module in modules:
            while not is_within(module, stack[-1].path) or module == stack[-1].path:
                stack.pop()
            around = [path for path in spec._chosen if path and is_within(module, path) and path != module]
            for path in sorted(around, key=len):
                if is_within(path, stack[-1].path) and path != stack[-1].path:
                    stack.append(_add_run(stack[-1], path, [], recomputed))
            units = [u for u in spec if module in u.paths]
            shared = tuple(u for u in units if u in added)
            added += units
            stack.append(_add_run(stack[-1], module, units, recomputed, shared))
            if len(unit.paths) > 1:
                above[module] = [*stack]
    _mark_backward(root, reached=False)
    return root


def _modules_of_gather(unit: Unit, number: int, gathers: int) -> tuple[str, ...]:
    """Return the modules that run after one of the gathers of a unit: one each, and after the last gather all that are left."""
    return unit.paths[number - 1 : number if number < gathers else None] or unit.paths


def _mark_backward(run: ModuleRun, *, reached: bool) -> bool:
    """Note of each run whether anything is trained up to its end; return that of this run."""
    reached = reached or any(unit.requires_grad for unit in run.units)
    for inner in run.inner:
        reached = _mark_backward(inner, reached=reached)
    run.has_backward = reached
    return reached


def _add_run(outer: ModuleRun, path: str, units: list[Unit], recomputed: set[str], shared: tuple[Unit, ...] = ()) -> ModuleRun:
    run = ModuleRun(path, units, is_recomputed=path in recomputed, shared=shared)
    outer.inner.append(run)
    return run


# --- The facts of a planned step that all its calls share ---


class StepFacts:
    """The facts of a step that all its calls share."""

    def __init__(
        self, spec: PartitionSpec, routes: Mapping[str, Route], tokens: int, bucket_bytes: int, prefetch: int = 1
    ) -> None:
        self.spec, self.routes, self.tokens, self.bucket_bytes = spec, routes, tokens, bucket_bytes
        self.sizes = dict(spec.bound_mesh.sizes)
        self.prefetch = prefetch
        self.events = EventList()

    def flops(self, run: ModuleRun, *, backward: bool = False) -> int:
        """Return the FLOPs of a module's own matrices: two for each element and token, for each product that runs."""
        matrices = [(unit, sum(x.numel for x in run.params_of(unit) if len(x.shape) > 1)) for unit in run.units]
        return sum(2 * numel * self.tokens * ((2 if unit.requires_grad else 1) if backward else 1) for unit, numel in matrices)

    def grad_bytes(self, unit: Unit, run: ModuleRun | None = None) -> int:
        """Return the bytes of the gradients of a unit's parameters, or of those that a run has, before they are reduced."""
        params = unit.params if run is None else run.params_of(unit)
        return self.routes[unit.key].param_bytes(unit, params) if unit.requires_grad else 0


# --- The events of a step from shapes alone: the schedule of `functional_call`, without the computation ---


class _Gathered:
    """A unit that a call has gathered in forward."""

    def __init__(self, unit: Unit, chain: Chain, nbytes: int) -> None:
        self.unit, self.chain, self.nbytes = unit, chain, nbytes
        self.is_there = True
        self.kept = 0
        """The bytes of the slice that is kept between forward and backward."""
        self.is_ahead = False
        """Whether backward has started to gather it and not come to it."""


class CallForecast:
    """One functional_call, or one run of a recomputed module inside it, and its backward.

    ``given`` are the units that the call around it has gathered.
    """

    def __init__(self, facts: StepFacts, root: ModuleRun, *, is_inner: bool = False) -> None:
        self._facts, self._events, self._root = facts, facts.events, root
        self._given = {unit.key for unit in root.units} if is_inner else set[str]()
        self._is_inner = is_inner
        self._order = [unit for run in self._gathering_runs(root) for unit in run.units if unit.key not in self._given]
        self._position = -1
        self._in_use: dict[str, _Gathered] = {}
        self._ahead: dict[str, _Gathered] = {}
        self._pending: list[_Gathered] = []
        self._to_the_end: list[_Gathered] = []
        self._resharded: list[_Gathered] = []
        self._backward_position = 0  # in that list
        self._unscattered: list[tuple[Chain, int]] = []
        self._partly_scattered: list[tuple[Chain, int]] = []  # and the axes that are left
        self._chains: list[Chain] = []
        self._buckets: OpenBuckets[Any] = OpenBuckets()
        self._bucket_chains: list[Chain] = []

    def _gathering_runs(self, run: ModuleRun) -> list[ModuleRun]:
        """Return the runs whose units this call gathers: none inside of recomputed modules."""
        inner = [] if run.is_recomputed and run is not self._root else run.inner
        if run is self._root and run.is_recomputed and not self._is_inner:
            inner = []
        return [run, *(one for other in inner for one in self._gathering_runs(other))]

    # --- forward ---

    def forward(self, kind: EventKind = "compute", *, keep: bool = True) -> None:
        """Add the events of forward. With ``keep`` the last units stay gathered for backward."""
        if self._root.is_recomputed and not self._is_inner:
            self._forward_recomputed(self._root)
        else:
            self._forward(self._root, kind)
        for gathered in [*self._pending, *self._to_the_end]:
            self._reshard(gathered, keep=keep)
        for gathered in self._ahead.values():
            gathered.chain.finish()
            self._free(gathered)
        self._pending, self._to_the_end, self._ahead = [], [], {}

    def _forward(self, run: ModuleRun, kind: EventKind) -> None:
        """Add the events of a module's forward and of those inside it."""
        own = [self._gather(unit) for unit in run.units if unit.key not in self._given]
        flops = self._facts.flops(run)
        self._events.add(kind, self._name(run), flops=0 if run.inner else flops)
        for inner in run.inner:
            if inner.is_recomputed:
                self._forward_recomputed(inner)
            else:
                self._forward(inner, kind)
        if run.inner:
            self._events.add(kind, self._name(run), flops=flops)
        self._end_run(own, run)

    def _forward_recomputed(self, run: ModuleRun) -> None:
        """Add the events of the forward of a module that is recomputed, which keeps nothing."""
        own = [self._gather(unit) for unit in run.units if unit.key not in self._given]
        CallForecast(self._facts, run, is_inner=True).forward(keep=False)
        self._end_run(own, run)

    def _end_run(self, own: list[_Gathered], run: ModuleRun) -> None:
        """Note that a module has run: the next gather reshards its units, the end of forward those that are kept."""
        for gathered in own:
            reshards = gathered.unit.p.reshard and run.path != ""
            (self._pending if reshards else self._to_the_end).append(gathered)

    @staticmethod
    def _name(run: ModuleRun) -> str:
        return run.units[0].key if run.units else run.path

    def _gather(self, unit: Unit) -> _Gathered:
        """Add the gather of a unit that is not in use yet, and start those that are prefetched."""
        gathered = self._in_use.get(unit.key)
        if gathered is not None:
            if gathered in self._pending:
                self._pending.remove(gathered)
            return gathered
        for other in self._pending:
            self._reshard(other, keep=False)
        self._pending = []
        gathered = self._ahead.pop(unit.key, None) or self._start_gather(unit)
        self._in_use[unit.key] = gathered
        following = self._units_to_prefetch(unit)
        gathered.chain.finish()
        for other in following:
            self._ahead[other.key] = self._start_gather(other)
        return gathered

    def _start_gather(self, unit: Unit, *, of_kept: bool = False) -> _Gathered:
        """Add the start of a unit's gather, ``of_kept`` slices or of shards."""
        facts, route = self._facts, self._facts.routes[unit.key]
        length, dtype = facts.spec.stored(unit)
        if of_kept:
            steps = gather_kept_steps(route, facts.sizes)
        else:
            steps = gather_steps(unit, route, length * dtype.itemsize, facts.sizes)
        chain = Chain(self._events, unit.key, steps)
        nbytes = route.buffer_bytes if route.has_own_buffer else 0
        return _Gathered(unit, chain, nbytes)

    def _units_to_prefetch(self, unit: Unit) -> list[Unit]:
        """Return the next units to prefetch after this one."""
        keys = [other.key for other in self._order]
        if unit.key in keys[self._position + 1 :]:
            self._position = keys.index(unit.key, self._position + 1)
        found: list[Unit] = []
        for other in self._order[self._position + 1 :]:
            if len(found) >= self._facts.prefetch - len(self._ahead):
                break
            route = self._facts.routes[other.key]
            busy = other.key in self._in_use or other.key in self._ahead or other in found
            if (route.split_axes or route.device) and not busy:
                found.append(other)
        return found

    def _reshard(self, gathered: _Gathered, *, keep: bool) -> None:
        """End a unit's use in forward: free the buffer, unless backward finds it there."""
        self._in_use.pop(gathered.unit.key, None)
        route = self._facts.routes[gathered.unit.key]
        if not keep and (route.reshard_after_forward or self._is_first_inner_run):
            if route.kept_axes and not self._is_first_inner_run and self._is_reached(gathered.unit):
                gathered.kept = -(-gathered.nbytes // route.num_kept)
                self._events.add("memory", gathered.unit.key, {"gathered": gathered.kept})
            self._free(gathered)
        self._resharded.append(gathered)

    @property
    def _is_first_inner_run(self) -> bool:
        return self._is_inner and self._events.phase == "forward"

    def _free(self, gathered: _Gathered) -> None:
        """Add the release of a gathered unit's buffer."""
        if gathered.is_there:
            gathered.is_there = gathered.is_ahead = False
            self._events.add("memory", gathered.unit.key, {"gathered": -gathered.nbytes})

    def _free_kept(self, gathered: _Gathered) -> None:
        """Add the release of the slice that was kept for backward."""
        if gathered.kept:
            self._events.add("memory", gathered.unit.key, {"gathered": -gathered.kept})
            gathered.kept = 0

    # --- backward ---

    def backward(self) -> None:
        """Add the events of backward, until all gradients are reduced."""
        self._backward_position = len(self._resharded)
        if self._root.is_recomputed and not self._is_inner:
            self._backward_recomputed(self._root)
        else:
            self._backward(self._root)
        for gathered in self._resharded:
            self._free(gathered)  # what backward did not come to
            self._free_kept(gathered)
        for kind, bucket in self._buckets.unfilled():
            self._reduce_bucket(kind, bucket.keys)
        for chain in [*self._chains, *self._bucket_chains]:
            chain.finish()

    def _backward(self, run: ModuleRun) -> None:
        """Add the events of a module's backward and of those inside it."""
        if not run.has_backward:
            return
        reads_inner_first = bool(run.inner) and run.path != ""
        if not reads_inner_first:
            self._arrive(run)
        flops, name = self._facts.flops(run, backward=True), self._name(run)
        grads = sum(self._facts.grad_bytes(unit, run) for unit in run.units)
        self._events.add("compute", name, {"gradients": grads}, flops=flops)
        for inner in reversed(run.inner):
            if inner.is_recomputed:
                self._backward_recomputed(inner)
            else:
                self._backward(inner)
        if reads_inner_first:
            self._arrive(run)
        if run.inner:
            self._events.add("compute", name)
        self._reduce(run)

    def _backward_recomputed(self, run: ModuleRun) -> None:
        """Add the events of a module that runs again in backward, then backward."""
        if not run.has_backward:
            return
        self._arrive(run)
        inner = CallForecast(self._facts, run, is_inner=True)
        inner.forward("recompute")
        inner.backward()
        self._reduce(run)

    def _arrive(self, run: ModuleRun) -> None:
        """Gather a module's units again where they were freed, and start to gather those that come next."""
        for unit in reversed(run.units):
            if unit.key in self._given:
                continue
            at = max((i for i, one in enumerate(self._resharded) if one.unit is unit), default=-1)
            gathered = self._resharded[at]
            is_behind = at >= self._backward_position
            for passed in () if is_behind else self._resharded[at + 1 : self._backward_position]:
                if passed.is_ahead and not any(map(unit.is_inside, passed.unit.paths)):
                    passed.chain.finish()
                    self._free(passed)
            self._gather_again(gathered)
            gathered.chain.finish()
            gathered.is_ahead = False
            if is_behind:
                continue
            self._backward_position = at
            for other in self._resharded[max(at - self._facts.prefetch, 0) : at][::-1]:
                self._gather_again(other)

    def _gather_again(self, gathered: _Gathered) -> None:
        """Start the gather that backward needs, unless the unit is there or backward does not reach it."""
        if not gathered.is_there and self._is_reached(gathered.unit):
            gathered.chain = self._start_gather(gathered.unit, of_kept=gathered.kept > 0).chain
            gathered.is_there = gathered.is_ahead = True

    def _is_reached(self, unit: Unit) -> bool:
        """Return whether backward reaches a module that uses the unit."""
        return any(run.has_backward for run in self._root.walk() if unit in run.units)

    def _reduce(self, run: ModuleRun) -> None:
        """Free a module's units, and start to reduce their gradients."""
        for unit in reversed(run.units):
            if unit.key in self._given or unit in run.shared:
                continue
            for gathered in self._resharded:
                if gathered.unit is unit:
                    self._free(gathered)
                    self._free_kept(gathered)
            if unit.requires_grad:
                self._reduce_unit(unit)

    def _reduce_unit(self, unit: Unit) -> None:
        """Add the reduction of a unit's gradients: into a bucket if it is replicated, else on its own."""
        facts, route = self._facts, self._facts.routes[unit.key]
        grads, buffer = facts.grad_bytes(unit), route.padded_numel * route.dtypes.reduce.itemsize
        if not route.split_axes and route.replica_axes:
            kind = route.bucket_kind
            most = facts.bucket_bytes / route.dtypes.reduce.itemsize
            if full := self._buckets.add(kind, unit.key, (), route.padded_numel, most):
                self._reduce_bucket(kind, full.keys)
            return
        for chain, _ in self._partly_scattered:
            chain.advance()
        self._partly_scattered = [(chain, axes - 1) for chain, axes in self._partly_scattered if axes > 1]
        while self._unscattered:
            older, axes = self._unscattered.pop(0)
            older.advance()
            if axes > 1:
                self._partly_scattered.append((older, axes - 1))
        self._events.add("memory", unit.key, {"gradients": buffer - grads})
        chain = Chain(self._events, unit.key, reduce_steps(route, route.padded_numel, unit.dtype, facts.sizes))
        self._chains.append(chain)
        if route.split_axes:
            self._unscattered.append((chain, len(route.split_axes) if route.device is None else 1))

    def _reduce_bucket(self, kind: object, keys: list[str]) -> None:
        """Add the reduction of a full bucket of these units."""
        facts, units = self._facts, [self._facts.spec.by_key[key] for key in keys]
        route, numel = facts.routes[keys[0]], sum(facts.routes[key].padded_numel for key in keys)
        buffer = numel * route.dtypes.reduce.itemsize
        self._events.add("memory", keys[-1], {"gradients": buffer - sum(map(facts.grad_bytes, units))})
        self._bucket_chains.append(Chain(self._events, keys[-1], reduce_steps(route, numel, units[0].dtype, facts.sizes)))


# --- The events of a step from the spec alone: its routes, its modules, and the update ---


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch: a number, or tensors; 0 for None."""
    if batch is None or isinstance(batch, int):
        return batch or 0
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    if not tensors:
        raise TypeError(f"plan: batch: expected a number of tokens, or tensors, got {batch!r:.80}")
    integers = [x for x in tensors if not x.is_floating_point() and not x.is_complex()]
    return integers[0].numel() if integers else tensors[0].numel() // max(tensors[0].shape[-1] if tensors[0].dim() else 1, 1)


def forecast(spec: PartitionSpec, units: dict[str, UnitBytes], tokens: int) -> list[Event]:
    """Return the events of a step from shapes alone."""
    on_cpu = spec.bound_mesh.device_type == "cpu"
    facts = StepFacts(spec, unit_routes(spec), tokens, BUCKET_BYTES if on_cpu else BUCKET_BYTES_CUDA)
    call = CallForecast(facts, module_runs(spec))
    call.forward()
    facts.events.phase = "backward"
    call.backward()
    facts.events.phase = "update"
    for unit in spec:
        if unit.requires_grad and not units[unit.key].on_host:
            grads = units[unit.key].parameters
            moved = 3 * units[unit.key].parameters + 2 * units[unit.key].optimizer
            facts.events.add("update", unit.key, moved_bytes=moved)
            facts.events.add("memory", unit.key, {"gradients": -grads})
    return facts.events.events


def unit_routes(spec: PartitionSpec) -> dict[str, Route]:
    """Return each unit's route; that of a unit on the host leads over a device, also where none is known."""
    routes: dict[str, Route] = {}
    for unit in spec:
        route = Route.for_unit(unit, spec.bound_mesh, Reduction(), unit.p.precision, spec.stored(unit)[1])
        if is_on_host(unit, spec):
            at = route.device or torch.device("cuda")
            route = dataclasses.replace(route, device=at, has_own_buffer=True, reshard_after_forward=bool(unit.p.reshard))
        routes[unit.key] = route
    return routes
