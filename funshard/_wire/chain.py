"""Chains of collectives: the steps of a spec's gathers and reductions, and their buffers."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable

import torch
from torch import Tensor

from .. import _torch
from .._core.flow import Reduction
from .._core.mesh import Mesh, ProcessAxis
from .._core.ops import PendingResult
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._spec.options import inner_calls
from ..collectives._agree import is_comparable
from .host import start_copy_to_device
from .route import Route, find_slice
from .stages import AllGather, Decode, Join, Move, Names, Replicas, Stage, StartStep, Transit


class BufferPool:
    """Freed buffers, for the next gather to fill: the fewer are allocated, the fewer pages fault.

    Only a buffer that nothing else holds is written over. Other devices than the CPU have allocators that do this.
    """

    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def give(self, buffer: Tensor) -> None:
        """Add a buffer that is no longer needed."""
        if buffer.device.type == "cpu":
            self._spare.append(buffer)

    def take(self, numel: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return a buffer of so many elements of this dtype, on another tensor's device, with anything in it."""
        while self._spare:
            buffer = self._spare.pop()
            if buffer.dtype == dtype and len(buffer) == numel and _torch.is_sole_holder(buffer):
                return buffer
            del buffer
        return like.new_empty(numel, dtype=dtype)

    def clear(self) -> None:
        """Drop all buffers, and wait for the collectives whose results are no longer referenced."""
        self._spare.clear()
        if sys.exc_info()[0] is None:
            wait_unclaimed()
        else:  # an error is on its way: what waits now might hang, or fail for the same cause
            _UNCLAIMED[:] = [weakref.ref(out) if isinstance(out, Tensor) else out for out in _UNCLAIMED]


_UNCLAIMED: list[Tensor | weakref.ref[Tensor]] = []
"""The outputs of running collectives whose chains were freed, or references to them.

The process group holds an output as long as it needs it. Pinned by ``test_gloo_holds_what_it_writes``.
"""


def wait_unclaimed() -> None:
    """Wait for the collectives whose chains were freed: one that is never waited for keeps its buffers for ever."""
    if not _UNCLAIMED:
        return
    with _torch.below_transforms():
        while _UNCLAIMED:
            out = _UNCLAIMED.pop()
            if (out := out if isinstance(out, Tensor) else out()) is not None:
                PendingResult((out,))()


@contextlib.contextmanager
def forgetting_on_error(drop: Callable[[], None]) -> Generator[None]:
    """Where ranks disagree, drop what is under way and wait for none of it: another rank will never start some."""
    try:
        yield
    except RuntimeError:
        drop()
        _UNCLAIMED.clear()
        raise


class CollectiveChain:
    """Collectives one after the other: the next starts when the one before is waited for. The first starts at once.

    To be made and waited for below all transforms. ``out`` is where the result of the last one goes, for the ops that
    `start_op` can give one.
    """

    copy: _torch.AsyncCopy | None = None
    """The copy of the slice to the device, which comes before the first collective, if there is one."""
    decode: Callable[[Tensor], Tensor] | None = None
    """The function from the last collective's output to the result, if they differ."""
    _finish: PendingResult | None = None

    def __init__(self, x: Tensor, steps: Iterable[StartStep], out: Tensor | None = None) -> None:
        wait_unclaimed()
        self._x, self._steps, self._out = x, deque(steps), out
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

    @property
    def holds_input(self) -> bool:
        """Whether waiting for the running collective frees its input, or starts the next: not of the last one in place."""
        return self._finish is not None and (bool(self._steps) or all(out is not self._x for out in self._finish.outs))

    def result(self) -> Tensor:
        """Wait for all of them and return the result."""
        while self._finish is not None:
            self.advance()
        if self.copy is not None:
            self.copy.wait()
        return self._x if self.decode is None else self.decode(self._x)

    def __del__(self, unwanted: list[Tensor | weakref.ref[Tensor]] = _UNCLAIMED) -> None:
        # Nobody wants it. Not to be waited for in here: after an error other ranks may never come.
        if self._finish is not None:
            unwanted.extend(self._finish.outs)


class RouteSteps:
    """A unit's route as the steps of its chains: those that gather it, and those that reduce its gradient.

    Stages that send nothing run before the first collective or after the last one.
    """

    def __init__(self, key: str, route: Route, *, has_groups: bool) -> None:
        names = Names(key, f"unit '{key}'" if route.split_axes else f"the bucket that ends with unit '{key}'")
        gathers = [stage for stage in route.stages if isinstance(stage, AllGather)]
        over = [stage for stage in reversed(route.stages) if isinstance(stage, AllGather | Replicas)]
        self.route, self._key, self._has_groups = route, key, has_groups
        self.gather_groups = tuple(stage.group or "" for stage in reversed(gathers))
        self.reduce_groups = tuple(stage.reduction_group for stage in over)
        self.gather_secondary_groups = tuple(x.group or "" for x in reversed(gathers) if x.axis in route.secondary_axes)
        self.codec_label = "".join(stage.codec_label for stage in gathers)  # how gradients are encoded; empty if they are not

        self._gathers = tuple(stage.start(names) for stage in gathers)
        self._gathers_of_secondary = tuple(stage.start(names) for stage in gathers if stage.axis in route.secondary_axes)
        stages = [stage for stage in route.stages if stage.changes_values]
        first = next((i for i, stage in enumerate(stages) if isinstance(stage, AllGather | Decode | Join)), len(stages))
        self._before_gathers = stages[:first]
        self._after_gathers = [stage for stage in stages[first:] if not isinstance(stage, AllGather)]
        self._gathered: tuple[int, torch.dtype] | None = None  # the size of what is gathered to a buffer of the pool
        if gathers and not any(isinstance(stage, Decode) for stage in stages):  # a chain drops what it has decoded
            layout, numel = route.layout, route.padded_numel
            self._gathered = (layout.sent_bytes * layout.num_slices, torch.uint8) if layout else (numel, route.dtypes.param)
        self._move = next((stage for stage in self._before_gathers if isinstance(stage, Move)), None)

        reduce: list[StartStep] = []
        self._before_reduce: list[Stage] = []
        for stage in reversed(route.stages):
            changes_grads = type(stage).transpose_ is not Stage.transpose_
            if changes_grads and reduce:
                reduce[-1] = _append(reduce[-1], stage)
            elif changes_grads:
                self._before_reduce.append(stage)
            if (step := stage.start_transpose(names)) is not None:
                reduce.append(step)
        self.reduce = tuple(reduce)

    def start(self, shard: Tensor, buffers: BufferPool) -> CollectiveChain:
        """Start to gather the unit from this rank's slice. To be called below all transforms."""
        if not self._has_groups and _torch.is_fake(shard):  # shapes can be computed
            return CollectiveChain(self.route.allocate(shard), ())
        if (move := self._move) is None or move.device is None:
            return self._start_gathers(shard, buffers)
        piece, copy = start_copy_to_device(shard, self._key, move.device, move.dtype)
        with copy.queue_behind():  # and beside what is computed with the unit before
            chain = self._start_gathers(piece, buffers)
        chain.copy = copy
        return chain

    def start_from_secondary(self, secondary: Tensor, buffers: BufferPool) -> CollectiveChain:
        """Start to gather the unit from the slices of its buffer that forward kept. As `start`."""
        route = self.route
        if not self._has_groups and _torch.is_fake(secondary):
            return CollectiveChain(route.allocate(secondary), ())
        numel, length = route.num_secondary * len(secondary), route.buffer_bytes // secondary.itemsize
        out = None if _torch.is_tracing() else buffers.take(numel, secondary.dtype, secondary)
        chain = CollectiveChain(secondary, self._gathers_of_secondary, out)
        if numel > length:
            chain.decode = lambda buffer: buffer.narrow(0, 0, length)
        return chain

    def _start_gathers(self, x: Tensor, buffers: BufferPool) -> CollectiveChain:
        """Return the chain of the gather of a slice on the device, or of what stands for it on the wire."""
        out = None
        if self._gathered is not None and not _torch.is_tracing():
            out = buffers.take(*self._gathered, x)
        if not self._before_gathers and not self._after_gathers:
            return CollectiveChain(x, self._gathers, out)
        transit = Transit()
        for i, stage in enumerate(self._before_gathers, 1):
            x = stage.apply_out(x, transit, out if i == len(self._before_gathers) and len(self._gathers) == 1 else None)
        chain = CollectiveChain(x, self._gathers, out)
        if self._after_gathers:
            chain.decode = functools.partial(self._finish, transit, buffers)
        return chain

    def _finish(self, transit: Transit, buffers: BufferPool, x: Tensor) -> Tensor:
        """Return the buffer from the result of the last gather."""
        for stage in self._after_gathers:
            out = None
            if isinstance(stage, Join) and stage.layout.is_padded and not _torch.is_tracing():
                out = buffers.take(stage.layout.buffer_bytes, torch.uint8, x)
            gathered, x = x, stage.apply_out(x, transit, out)
            if out is not None:
                buffers.give(gathered)
        return x

    def prepare(self, grad: Tensor) -> Tensor:
        """Return what is reduced of a unit's joined gradient, which may be written to."""
        for stage in self._before_reduce:
            grad = stage.transpose_(grad)
        return grad


def _append(step: StartStep, stage: Stage) -> StartStep:
    """Return a step whose result passes a stage for gradients."""
    return lambda x, out: step(x, out).then(stage.transpose_)


def copy_secondary_slice(buffer: Tensor, route: Route, mesh: Mesh) -> Tensor:
    """Return a copy of the slice of a gathered buffer that this rank keeps between forward and backward."""
    index = find_slice(route.secondary_axes, mesh) or 0  # sizes without ranks have shapes alone
    numel = -(-len(buffer) // route.num_secondary)
    with _torch.below_transforms(), _torch.below_autograd():
        piece = buffer[index * numel : (index + 1) * numel]
        secondary = piece.new_empty(numel)
        secondary[: len(piece)].copy_(piece)  # shorter at the end of bytes, which have no padding for this
        return secondary


class RouteTable:
    """Every unit's route by its key, as the steps of its chains on a spec's process groups; the shards have these dtypes."""

    def __init__(self, spec: PartitionSpec, dtypes: tuple[torch.dtype, ...], reduction: Reduction, check_order: bool) -> None:
        mesh, inner = spec.bound_mesh, {*inner_calls(spec)}
        groups = [axis for _, axis in mesh.axes if isinstance(axis, ProcessAxis)]
        connected = len(groups) == len(mesh.axes) and all(axis.name or axis.size == 1 for axis in groups)
        routes = {unit.key: Route.for_unit(unit, mesh, reduction, dtype) for unit, dtype in zip(spec, dtypes, strict=True)}
        self.steps = {key: RouteSteps(key, route, has_groups=connected) for key, route in routes.items()}

        def is_inside(key: str) -> bool:
            paths = spec.by_key[key].paths
            return any(is_within(path, around) for around in inner.difference(paths) for path in paths)

        self.gather_positions = tuple(  # in spec.order, of units that are gathered or copied, except those in `inner_calls`
            i for i, key in enumerate(spec.order) if (routes[key].split_axes or routes[key].device) and not is_inside(key)
        )
        self.needs_order_check = (  # that ranks compare the order of their collectives: it is asked for, and there are others
            check_order and connected and all(is_comparable(axis.name) for axis in groups if axis.size > 1)
        )
        gathers = [group for unit in self.steps.values() for group in unit.gather_groups]
        self.gather_groups = tuple(dict.fromkeys(gathers))
        self.groups = tuple(dict.fromkeys([*gathers, *(group for unit in self.steps.values() for group in unit.reduce_groups)]))
        self.has_resharded_units = any(route.reshard_after_forward for route in routes.values())
        self.longest_padding = max((route.longest_padding for route in routes.values()), default=0)
