"""Chains of collectives: the steps of a spec's gathers and reductions, and their buffers."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from ..collectives._mesh import Axis, Mesh, ProcessAxis
from ..collectives._ops import OpContext, PendingResult, start_op
from ..collectives._sequence import is_comparable
from ..collectives._tag import MARGIN, UnitTag
from .encoded_reduction import start_encoded_reduction
from .host import make_host_copy_step
from .route import Route

__all__ = ["BufferPool", "CollectiveChain", "RouteSteps", "RouteTable", "StartStep", "gather_step", "make_route_table"]

StartStep = Callable[[Tensor, Tensor | None], PendingResult]
"""A function that starts one collective on a tensor, and writes the result into the second one, if there is one."""


class BufferPool:
    """Freed buffers, for the next gather to fill: the fewer are allocated, the fewer pages fault.

    Only a buffer that nothing else holds is written over. Other devices than the CPU have allocators that do this.
    """

    def __init__(self, *, margins: bool = False) -> None:
        self._spare: list[Tensor] = []
        self._margins = margins

    def give(self, buffer: Tensor) -> None:
        """Add a buffer that is no longer needed."""
        if buffer.device.type == "cpu":
            self._spare.append(buffer)

    def take(self, numel: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return a buffer of so many elements of this dtype, on another tensor's device, with anything in it.

        With ``margins`` it has room for tags on both sides, on the CPU.
        """
        while self._spare:
            buffer = self._spare.pop()
            if buffer.dtype == dtype and len(buffer) == numel and _torch.is_sole_holder(buffer):
                return buffer
            del buffer
        if not self._margins or like.device.type != "cpu" or _torch.is_traced() or _torch.is_fake(like):
            return like.new_empty(numel, dtype=dtype)
        margin = MARGIN // dtype.itemsize
        buffer = like.new_empty(numel + 2 * margin, dtype=dtype)
        return buffer.as_strided_((numel,), (1,), margin)  # a view would hold it, and it would never be taken again

    def clear(self) -> None:
        """Drop all buffers, and wait for the collectives whose results are no longer referenced."""
        self._spare.clear()
        if sys.exc_info()[0] is None:
            wait_unclaimed()
        else:  # an error is on its way: what waits now might hang, or fail for the same cause
            for _ in range(len(_UNCLAIMED)):
                out = _UNCLAIMED.popleft()
                _UNCLAIMED.append(weakref.ref(out) if isinstance(out, Tensor) else out)


_UNCLAIMED: deque[Tensor | weakref.ref[Tensor]] = deque()
"""The outputs of running collectives whose chains were freed, or references to them.

The process group holds an output as long as it needs it. Pinned by ``test_gloo_holds_what_it_writes``.
"""


def wait_unclaimed() -> None:
    """Wait for the collectives whose chains were freed: one that is never waited for keeps its buffers for ever."""
    if not _UNCLAIMED:
        return
    with _torch.below_transforms():
        while _UNCLAIMED:
            out = _UNCLAIMED.popleft()
            if (out := out if isinstance(out, Tensor) else out()) is not None:
                PendingResult((out,), lambda out: out)()


class CollectiveChain:
    """Collectives one after the other: the next starts when the one before is waited for. The first starts at once.

    To be made and waited for below all transforms. ``own`` is where the result of the last one goes, for the ops that
    `start_op` can give one.
    """

    copy: _torch.AsyncCopy | None = None
    """The copy of the slice to the device, which comes before the first collective, if there is one."""
    decode: Callable[[Tensor], Tensor] | None = None
    """The function from the last collective's output to the result, if they differ."""
    _finish: PendingResult | None = None

    def __init__(self, x: Tensor, steps: Iterable[StartStep], own: Tensor | None = None) -> None:
        wait_unclaimed()
        self._x, self._steps, self._out = x, deque(steps), own
        self.advance()

    def advance(self) -> None:
        """Wait for the collective that is under way and start the next."""
        with _torch.below_autograd():
            if self._finish is not None:
                finish, self._finish = self._finish, None
                self._x = finish()
            if self._steps:
                step = self._steps.popleft()
                self._finish = step(self._x, None if self._steps else self._out)

    @property
    def is_pending(self) -> bool:
        """Whether a collective is running."""
        return self._finish is not None

    def result(self) -> Tensor:
        """Wait for all of them and return the result."""
        while self._finish is not None:
            self.advance()
        if self.copy is not None:
            self.copy.wait()
        return self._x if self.decode is None else self.decode(self._x)

    def __del__(self, unwanted: deque[Tensor | weakref.ref[Tensor]] = _UNCLAIMED) -> None:
        # Nobody wants it. Not to be waited for in here: after an error other ranks may never come.
        if self._finish is not None:
            unwanted.extend(self._finish.outs)


class RouteSteps(NamedTuple):
    """A unit's route as the steps of its chains."""

    gather: tuple[StartStep, ...]
    reduce: tuple[StartStep, ...]
    gather_groups: tuple[str, ...]
    """The names of the process groups of ``gather``."""
    reduce_groups: tuple[str, ...]
    gather_kept: tuple[StartStep, ...]
    """The steps that gather its buffer from the slices that forward has kept of it."""
    gather_kept_groups: tuple[str, ...]

    @classmethod
    def for_route(cls, key: str, route: Route, mesh: Mesh, tag: UnitTag | None = None) -> RouteSteps:
        """Return the steps of a unit over the mesh's process groups. With a ``tag`` ranks compare what they send."""
        split, rest = ([_group(mesh[name]) for name in names] for names in (route.split_axes, route.replica_axes))
        unit = f"unit '{key}'" if split else f"the bucket that ends with unit '{key}'"
        split_labels, rest_labels = (
            [f"{unit} over '{name}'" for name in names] for names in (route.split_axes, route.replica_axes)
        )
        scatter, reduce = f"scatter_{route.reduce_op}", f"unvary_{route.reduce_op}"
        slices = [_reduce_step(scatter, axis, label, tag) for axis, label in zip(split, split_labels, strict=True)]
        if route.reduce_codec:
            slices = [_exchange_step(route, split[0], split_labels[0], tag)]
        sums = [_reduce_step(reduce, axis, label) for axis, label in zip(rest, rest_labels, strict=True)]
        gathers = [gather_step(axis, label, tag) for axis, label in zip(split, split_labels, strict=True)]
        out = () if route.device is None else (make_host_copy_step(key, route.result_dtype),)
        return cls(
            tuple(reversed(gathers)),
            (*_add_division([*slices, *sums], route), *out),
            tuple(axis.name for axis in split),
            tuple(axis.reduction_name or axis.name for axis in (*split, *rest)),
            tuple(step for step, name in reversed([*zip(gathers, route.split_axes, strict=True)]) if name in route.kept_axes),
            tuple(_group(mesh[name]).name for name in route.kept_axes),
        )


@dataclass(frozen=True)
class RouteTable:
    """Every unit's route by its key, and the steps of its chains."""

    by_key: dict[str, Route]
    steps: dict[str, RouteSteps]
    gather_positions: tuple[int, ...]
    """The positions in ``spec.order`` of units that are gathered or copied, except those inside of recomputed modules."""
    has_groups: bool
    """Whether every axis has a process group."""
    needs_order_check: bool
    """Whether ranks compare the order of their collectives: it is asked for, and there are other ranks."""
    gather_groups: tuple[str, ...]
    """The names of the process groups of all gathers."""
    has_resharded_units: bool
    """Whether the buffer of any unit is freed between forward and backward."""


def make_route_table(
    spec: PartitionSpec, dtypes: tuple[torch.dtype, ...], reduction: Reduction, check_order: bool
) -> RouteTable:
    """Return the routes of a spec's units, whose shards have these dtypes, on its process groups."""
    mesh, recomputed = spec.bound_mesh, spec.recomputed
    routes = {
        unit.key: Route.for_unit(unit, mesh, reduction, unit.p.precision, dtype)
        for unit, dtype in zip(spec, dtypes, strict=True)
    }

    def inside(key: str) -> bool:
        unit = spec.by_key[key]
        return any(path not in unit.paths and unit.is_inside(path) for path in recomputed)

    groups = [axis for _, axis in mesh.axes if isinstance(axis, ProcessAxis)]
    connected = len(groups) == len(mesh.axes) and all(axis.name or axis.size == 1 for axis in groups)
    compares = check_order and connected and all(is_comparable(axis.name) for axis in groups if axis.size > 1)
    keys = tuple(routes)
    steps = {k: RouteSteps.for_route(k, routes[k], mesh, UnitTag(keys, i) if compares else None) for i, k in enumerate(keys)}
    return RouteTable(
        routes,
        steps,
        tuple(i for i, key in enumerate(spec.order) if (routes[key].split_axes or routes[key].device) and not inside(key)),
        connected,
        compares,
        tuple(dict.fromkeys(group for unit in steps.values() for group in unit.gather_groups)),
        any(route.reshard_after_forward for route in routes.values()),
    )


def _group(axis: Axis) -> ProcessAxis:
    """Return the axis, which must not be simulated."""
    assert isinstance(axis, ProcessAxis)
    return axis


def gather_step(axis: ProcessAxis, label: str, tag: UnitTag | None = None) -> StartStep:
    """Return the start of a gather along an axis."""
    context = OpContext(axis.size, axis.name, tag=tag, label=label)
    return lambda x, own: start_op("gather_mean", x, context, own)


def _reduce_step(op: str, axis: ProcessAxis, label: str, tag: UnitTag | None = None) -> StartStep:
    """Return a function that starts a reduction; ``unvary...`` operations write into their input, unless traced."""
    context = OpContext(axis.size, axis.reduction_name or axis.name, tag=tag, label=label)
    in_place = op.startswith("unvary")
    return lambda x, own: start_op(op, x, context, (None if _torch.is_traced() else x) if in_place else own)


def _exchange_step(route: Route, axis: ProcessAxis, label: str, tag: UnitTag | None) -> StartStep:
    """Return a function that starts the reduction of encoded slices to this rank's own."""
    assert route.reduce_codec is not None
    how = f" encoded by {route.reduce_codec}"  # ranks compare it: other codecs may send as many bytes
    tag = tag and UnitTag(tag.keys, tag.index, how)
    context = OpContext(axis.size, axis.reduction_name or axis.name, tag=tag, label=label + how)
    start = functools.partial(start_encoded_reduction, codec=route.reduce_codec, context=context)
    numel, dtype, mean = route.padded_numel // axis.size, route.dtypes.reduce, route.reduce_op == "mean"
    return lambda x, own: start(x, numel=numel, dtype=dtype, mean=mean)


def _add_division(steps: list[StartStep], route: Route) -> tuple[StartStep, ...]:
    """Return the steps with divisions before the first and after the last, in place, and a cast at the end.

    NCCL's PREMUL_SUM would divide as it sends, but functional collectives name an op by a string, which has no place for its
    factor: "Unrecognized reduce_op: premul_sum" in torch 2.11 to 2.13.
    """
    before, after, dtype = route.divide_before, route.divide_after, route.result_dtype
    if steps and before == after == 1 and route.dtypes.reduce == dtype:
        return tuple(steps)
    if not steps:
        return () if before == after == 1 else (lambda x, own: PendingResult((), lambda: x.div_(before * after).to(dtype)),)
    first, last = steps[0], steps[-1]
    if before != 1:
        steps = [lambda x, own: first(x.div_(before), own), *steps[1:]]
        last = steps[-1]

    def end(x: Tensor, own: Tensor | None) -> PendingResult:
        return last(x, own).then(lambda out: (out.div_(after) if after != 1 else out).to(dtype))

    return (*steps[:-1], end)
