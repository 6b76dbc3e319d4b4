"""The three modes in which a call gathers its units outside of torch.compile; `choose_mode` chooses one.

| mode | when | gathers | what autograd keeps of a weight | reductions |
|---|---|---|---|---|
| `Overlapped` | process groups; no transform, or one torch.func.grad | ahead of use | how to have it again | behind backward |
| `Inline`, `PerLevelGathers` | several of grad, vjp, jvp | where used | the same, for each level | where the gradient is |
| `Inline` | vmap, simulated ranks, forward mode, recording | where used | the weight | where the gradient is |
| compiled_call.py | inside torch.compile | the whole tree at once | what the compiler likes | where the compiler likes |

In all modes a unit is in use from when its module is entered until that is left: `UnitInUse`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import find_full_params
from .._core.ops import is_checked
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._transforms.saved_tensors import RestorableBuffer, TensorRestorer, hook_running_node
from .._wire.flow import unshard_unit, weigh_grad
from .._wire.mixed_layout import split_by_dtype, view_by_dtype
from .casting import cast_params
from .schedule import MAX_UNSHARDED_IN_BACKWARD, CallInputs, GatheredUnit, Schedule, check_unmodified

# --- Detection of writes by forward to the parameters that it reads: gathered copies, or the caller's own tensors ---

_comparing = 0
"""How many `compare_values` are active in this process."""


@contextlib.contextmanager
def compare_values() -> Generator[None]:
    """Compare the values of parameters with copies after forward, and restore them, within this context."""
    global _comparing
    _comparing += 1
    try:
        yield
    finally:
        _comparing -= 1


class WriteWatch:
    """The versions of the tensors that hold one unit's parameters, when the watch began.

    Versions tell of a write at no cost to a device, and miss one through ``.data``. So `funshard.check` and
    `funshard.testing.assert_exact` compare each parameter with a copy, and name the one that was changed.
    """

    __slots__ = ("_copies", "_is_wrapped", "_unit", "_versions", "_views")

    def __init__(self, unit: Unit, tensors: Sequence[Tensor], views: Sequence[Tensor] = ()) -> None:
        """Watch a unit's buffers, of which its parameters are views, or its parameters themselves."""
        self._unit, self._is_wrapped, self._views = unit, _torch.current_level() > 0, views  # ``weight.data =`` moves them
        self._versions = [] if _torch.is_tracing() else [(x, _torch.version(x)) for x in map(_torch.unwrap, tensors)]
        self._copies: list[tuple[Tensor, Tensor]] = []
        if self._versions and (_comparing or is_checked()):
            with _torch.below_transforms():
                watched = [_torch.unwrap(view).detach() for view in views] or [x for x, _ in self._versions]
                has_values = (x for x in watched if x.layout is torch.strided and not (x.is_meta or _torch.is_fake(x)))
                self._copies = [(x, x.clone()) for x in has_values]

    def find_write(self) -> str | None:
        """Return what has been written to since, None if nothing has. The values of before are restored from copies."""
        if self._copies:
            changed = [not _bits_equal(*pair) for pair in self._copies]
        else:
            changed = [_torch.version(now) != version for now, version in self._versions]
        if self._versions and not any(changed):
            storages = {_torch.storage_id(now) for now, _ in self._versions}
            views = [*map(_torch.unwrap, self._views)] if self._is_wrapped else self._views
            if not storages.issuperset(map(_torch.storage_id, views)):
                changed = [_torch.storage_id(view) not in storages for view in views]
        if not any(changed):
            return None
        with _torch.below_transforms():
            for now, copy in self._copies:
                now.copy_(copy)
        names = [param.name for param in self._unit.params]
        if len(changed) == len(names):
            names = [name for name, is_changed in zip(names, changed, strict=True) if is_changed]
        return f"parameter '{names[0]}'" if len(names) == 1 else f"one of the parameters {', '.join(map(repr, names))}"


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    with _torch.below_transforms():
        return torch.equal(a, b) or torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def write_error(unit: Unit, what: str) -> RuntimeError:
    """Return the error for what `WriteWatch.find_write` has found."""
    return RuntimeError(
        f"{what} of unit '{unit.key}' was changed in place in forward: expected it left alone, since what is "
        "gathered is let go again and what was given is yours, and has the change; compute with a new tensor "
        "(w = self.weight.clamp(-1, 1)), or change the shards between steps (weight clipping, and in the place of "
        "nn.Embedding's max_norm). fs.check() names the parameter"
    )


# --- Gathers that each level of transforms repeats ---


class PerLevelGathers:
    """The gathers of one call that the backwards of its transforms repeat."""

    def __init__(self) -> None:
        self.restorable: dict[int, RestorableBuffer] = {}  # by storage: what pack recognises
        # of a gather as a level sees it; weakly, as gathers hold this
        self._recent = deque[tuple[weakref.ref[_RepeatableGather], int, list[Tensor]]](maxlen=MAX_UNSHARDED_IN_BACKWARD)
        self.keys = _torch.dispatch_keys()
        with _torch.below_transforms():
            empty = torch.empty(0)
        levels = range(1, _torch.current_level() + 1)
        self._levels = [_torch.wrap_at_level(empty, level) for level in levels]  # to know when each is over

    def add(
        self, key: str, shard: Tensor, buffers: Sequence[Tensor], gather: Callable[[Tensor], list[Tensor]]
    ) -> tuple[int, ...]:
        """Add the gathered buffers, one for each dtype, of the unit of this key. Return their storages."""
        dtypes = tuple(buffer.dtype for buffer in buffers)
        storages = tuple(_torch.storage_id(_torch.unwrap(buffer)) for buffer in buffers)
        repeatable = _RepeatableGather(self, key, shard, _torch.version(shard), dtypes, gather)
        self.restorable |= dict.fromkeys(storages, repeatable)
        return storages

    def recent_buffer(self, gather: _RepeatableGather, level: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer of a dtype as a level sees it, gathered again unless it is among the last ones."""
        buffers = next((buffers for ref, at, buffers in self._recent if ref() is gather and at == level), None)
        if buffers is None:
            buffers = gather.unshard_again(level)
            self._recent.append((weakref.ref(gather), level, buffers))
        return buffers[gather.dtypes.index(dtype)]

    def is_over(self, level: int) -> bool:
        """Return whether the transform of this level has ended, as when the pullback of a vjp runs."""
        return level > 0 and _torch.is_dead(self._levels[level - 1])


@dataclass(eq=False)
class _RepeatableGather:
    """A gather that can be repeated as any level sees it."""

    call: PerLevelGathers
    key: str
    shard: Tensor
    version: int
    """The shard's, when it was gathered."""
    dtypes: tuple[torch.dtype, ...]
    gather: Callable[[Tensor], list[Tensor]]

    def unshard_again(self, level: int) -> list[Tensor]:
        """Gather the buffers as a level sees them. Raise RuntimeError if the shard was modified in place since."""
        check_unmodified(self.key, self.shard, self.version)
        with _torch.at_level(level), torch.set_grad_enabled(level >= 0):
            return self.gather(_torch.unwrap_to_level(self.shard, level))

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> TensorRestorer | None:
        """Return what the graph of a level keeps instead of this view of the buffer, None to keep the view."""
        level = _torch.level_of(tensor)
        if level < 0:
            return None
        view = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return functools.partial(self._restore_view, level, _torch.tracking_levels(tensor, self.call.keys), *view)

    def _restore_view(
        self,
        level: int,
        followed: frozenset[int],
        dtype: torch.dtype,
        shape: torch.Size,
        stride: tuple[int, ...],
        offset: int | torch.SymInt,
    ) -> Tensor:
        """Return the view as its level saw it, of the buffer gathered again."""
        over = self.call.is_over(level)
        below = max(followed, default=-1)
        buffer = self.call.recent_buffer(self, below, dtype)
        if torch.is_grad_enabled():
            hook_running_node({_torch.storage_id(_torch.unwrap(buffer)): self}, 0 if over else level)
        with _torch.at_level(below), torch.set_grad_enabled(below >= 0):
            view = buffer.as_strided(shape, stride, offset)
        view = _torch.wrap_for_ended_level(view) if over else _torch.wrap_at_level(view, level)
        now = _torch.tracking_levels(view, self.call.keys)
        if now != followed:
            raise RuntimeError(
                f"unit '{self.key}': a weight that forward saved is followed by derivatives of levels {sorted(followed)}, "
                f"gathered again by those of {sorted(now)}: expected the same; give the unit P(reshard=False)"
            )
        return view


# --- The modes ---


@dataclass(slots=True, eq=False)
class UnitInUse:
    """A unit whose parameters forward may read: a mode of the call has gathered it, or the caller gave it in full."""

    unit: Unit
    views: Sequence[Tensor]
    """The parameters, in the order of ``unit.params``."""
    watch: WriteWatch
    reshard: bool
    level: int = 0
    """The level of transforms that it was gathered under."""
    gathered_unit: GatheredUnit | None = None
    """The unit where the schedule has gathered it."""
    storages: tuple[int, ...] = ()
    """The buffers, where saved tensors in them are to be replaced."""
    is_read_ahead: bool = False
    """Whether it was gathered to be read, and its module has not run with it yet."""


def choose_mode(inputs: CallInputs, *, is_inner: bool, replaces: bool) -> Inline:
    """Return the mode of an uncompiled call: scheduled, gathered again by each level of transforms, or plain data flow.

    A call that ``is_inner``, which backward runs inside of another, need keep nothing for derivatives. ``replaces`` says
    whether saved weights are replaced: a checkpoint around the call would do that itself.
    """
    params, spec, *_ = inputs
    level, is_simulated = _torch.current_level(), spec.bound_mesh.is_simulated
    if _torch.can_replace_saved_tensors() and not is_simulated and not _torch.is_in_forward_ad():
        shards = (params[key] for key in spec.by_key if key in params)
        if not level or not any(_torch.unwrap(shard).requires_grad for shard in shards):  # which would be differentiated twice
            return Overlapped(inputs, Schedule(inputs), replaces=replaces)
    keeps_weights = is_inner or not replaces or not torch.is_grad_enabled() or is_simulated or _torch.is_tracing()
    regathers = level > 0 and not keeps_weights and _torch.has_only_derivatives()
    return Inline(inputs, PerLevelGathers() if regathers else None)


def units_given_full(params: Mapping[str, Tensor], spec: PartitionSpec, buffers: Mapping[str, Tensor]) -> dict[str, UnitInUse]:
    """Return the units whose full parameters are in ``params``, by key: nothing gathers them, and no mode knows of them.

    ``buffers`` are those of the units whose parameters are views of one.
    """
    return {
        unit.key: UnitInUse(
            unit,
            cast_params(full, unit),
            WriteWatch(unit, (buffers[unit.key],), full) if unit.key in buffers else WriteWatch(unit, full),
            reshard=bool(unit.p.reshard),
        )
        for unit in spec
        if unit.key not in params and (full := find_full_params(params, unit))
    }


class Inline:
    """Gathers as nodes of the graph, where a unit is used; with ``gathers`` the backwards of transforms repeat them."""

    schedule: Schedule | None = None
    """The gathers and reductions that are ahead and behind of their use, if there are such."""

    def __init__(self, inputs: CallInputs, gathers: PerLevelGathers | None = None) -> None:
        self.params, self.spec = inputs.params, inputs.spec
        self._options = inputs.reduction, inputs.weight, inputs.check_order
        self._level, self._gathers = _torch.current_level(), gathers
        # the buffers whose saved views are replaced, by storage; None where autograd keeps what it saves
        self.restorable = gathers.restorable if gathers else None

    def is_at_call_level(self) -> bool:
        """Return whether the running code is in the transforms of the call, and in no other."""
        return _torch.current_level() == self._level

    def gather(self, unit: Unit) -> UnitInUse:
        """Return the unit, gathered as data flow."""
        mesh, reduction, weight, check_order = self.spec.bound_mesh, *self._options

        def gather(shard: Tensor) -> list[Tensor]:  # without this mode, which what is in a graph would hold
            buffer = unshard_unit(shard, unit, mesh, reduction, check_order=check_order)
            return split_by_dtype(weigh_grad(buffer, weight), unit, shard.dtype)

        buffers = gather(shard := self.params[unit.key])
        if _torch.is_in_forward_ad() and self.spec.size(unit) == 1:
            buffers = [x.clone() for x in buffers]  # forward may write to it, and so to its tangent, which is the caller's
        views = view_by_dtype(buffers, unit, shard.dtype)
        watch = WriteWatch(unit, buffers, views)
        in_use = UnitInUse(unit, views, watch, reshard=bool(unit.p.reshard), level=_torch.current_level())
        if self._gathers and in_use.reshard and not _torch.shares_storage(buffers[0], shard) and self.is_at_call_level():
            in_use.storages = self._gathers.add(unit.key, shard, buffers, gather)
        return in_use

    def leave(self, in_use: UnitInUse, *, keep: bool) -> None:
        """End the use of a unit: what is saved from now on is of other tensors. Whoever holds its buffer keeps it."""
        if self.restorable:
            for storage in in_use.storages:
                self.restorable.pop(storage, None)


class Overlapped(Inline):
    """Gathers ahead of their use, in forward and in backward, and reductions behind it."""

    def __init__(self, inputs: CallInputs, schedule: Schedule, *, replaces: bool) -> None:
        super().__init__(inputs)
        self.schedule = schedule
        if torch.is_grad_enabled():
            self.params = schedule.enter(inputs.params)
            self.restorable = {} if schedule.routes.has_resharded_units and replaces else None

    def gather(self, unit: Unit) -> UnitInUse:
        """Return the unit, with the next ones under way; inside a transform that began in forward, gather it as data flow."""
        if self.schedule is None or not self.is_at_call_level():
            return super().gather(unit)
        gathered = self.schedule.gather(unit)
        views = gathered.parameters(self.params[unit.key])
        watch = WriteWatch(unit, (gathered.buffer,), views)
        reshard = gathered.route.reshard_after_forward
        in_use = UnitInUse(unit, views, watch, reshard=reshard, level=self._level, gathered_unit=gathered)
        if reshard and self.restorable is not None:
            in_use.storages = (storage := _torch.storage_id(gathered.buffer),)
            self.restorable[storage] = gathered
        return in_use

    def leave(self, in_use: UnitInUse, *, keep: bool) -> None:
        """End the use of a unit: free its buffer, or hand it to backward where that may ask for it."""
        super().leave(in_use, keep=keep)
        if in_use.gathered_unit:
            in_use.gathered_unit.reshard(keep_for_backward=keep and bool(in_use.storages))
