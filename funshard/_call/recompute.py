"""A module with P(remat=...): backward runs it again, with everything that it is made of as arguments.

    Call -> recomputed_forwards -> call_recomputed (_transforms/_recompute) -> _RecomputedModule -> Call.make_inner -> forward

The first run and the ones of backward are calls of their own, on the module's part of the model.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.tree import join_path
from .._spec.options import RECOMPUTE_ALL, inner_calls, remat_of
from .._torch.phases import phase
from .._transforms._recompute.remat import call_recomputed
from .._transforms._recompute.snapshot import is_copied
from .._transforms.ambient import run_unrecorded
from .buffers import copy_buffer
from .compiled_unit import can_run_compiled, is_compiled
from .modes import Overlapped
from .module_state import MODULE_CONTAINERS, BoundModule, ModuleAttributes, Replaced, kept_attributes
from .running import Call, Override
from .schedule import GatheredUnit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_Inside = tuple[BoundModule, PartitionSpec]
_Own = Mapping[str, dict[str, Any]]
"""By a module's path, the attributes of which each run has its own copies."""


def recomputed_forwards(call: Call, before: ModuleAttributes) -> Iterator[Override]:
    """Yield the forwards of the modules with ``P(remat=...)``, which run again in backward, around their scopes."""
    for path in inner_calls(call.spec):
        module = call.bound.modules[path]
        yield module, "forward", _wrap_recomputed(call, path, before, module.forward)


def _wrap_recomputed(call: Call, path: str, before: ModuleAttributes, scoped: Callable[..., Any]) -> Callable[..., Any]:
    compiled = is_compiled(call.spec, path, before[call.bound.modules[path]])

    @functools.cache  # it may run often in one call
    def insides() -> _Inside:
        bound = call.bound.submodule(path)
        keys = {unit.key for owned in bound.owned.values() for unit, _ in owned.values()}
        return bound, call.spec._restrict_to_units(path, keys)

    @functools.wraps(scoped)
    def run(*args: Any, **kwargs: Any) -> Any:
        # in one run of a module around it this one may run again, in another not: what it reads counts alike
        if call.used_parameters is not None:
            call.used_parameters |= {unit.params[i].name for owned in insides()[0].owned.values() for unit, i in owned.values()}
        if call.is_inference or not _torch.needs_graph() or (compiled and can_run_compiled(call, path)):
            return scoped(*args, **kwargs)
        if not isinstance(call.mode, Overlapped) or not call.mode.is_at_call_level():
            return _recompute_module(call, insides(), before, (), args, kwargs)
        call.scopes.enter(call.units_at(path))
        try:
            gathered = [in_use.gathered_unit for in_use in call.scopes.innermost() if in_use.gathered_unit]
            return _recompute_module(call, insides(), before, gathered, args, kwargs)
        finally:
            call.scopes.leave()

    return run


def _recompute_module(
    outer: Call, inside: _Inside, before: ModuleAttributes, gathered: Sequence[GatheredUnit], args: Args, kwargs: Kwargs
) -> Any:
    """Return the result of a module that backward runs again. Only its arguments are kept, and what its remat saves.

    What the first run changes in its arguments, in the modules' attributes and buffers, and in place of parameters, is changed
    once; another run finds it as the first one did. ``before`` are the attributes of the model before ``outer``, ``gathered``
    the module's own units, where the schedule has gathered them.
    """
    bound, spec = inside
    buffers: dict[Tensor, list[str]] = {}
    for path, module in bound.modules.items():
        for attr, buffer in module._buffers.items():
            if buffer is not None:
                buffers.setdefault(buffer, []).append(join_path(path, attr))
    run = _RecomputedModule(outer, bound, before, list(buffers.values()), gathered)
    given = bound.replaced_parameters(before)
    now = dict(given)
    roots: dict[str, Any] = {
        "its parameters": bound.params_of(spec, outer.mode.params),
        "its buffers": [copy_buffer(buffer, buffer.dtype) for buffer in buffers],
        "its spec": spec,
        "what was put in the place of its parameters": now,
        "args": args,
        "kwargs": kwargs,
        "attribute": {
            path: {name: value for name, value in kept_attributes(module, before).items() if is_copied(value)}
            for path, module in bound.distinct.items()
        },
    }
    out, written, changes = call_recomputed(
        run,
        f"module '{bound.path}' with P(remat=True)",
        roots,
        list(bound.distinct.values()),
        remat=remat_of(outer.spec.by_path[bound.path]) or RECOMPUTE_ALL,
    )
    for path, (values, removed) in (changes or {}).items():
        vars(bound.distinct[path]).update(values)
        for name in removed:
            del vars(bound.distinct[path])[name]
    for i, buffer, is_new in written:
        before_it = list(buffers)[i]
        # a vmap around has batched all results, and can only write those into what it has batched
        if not is_new and _torch.is_batched(before_it) >= _torch.is_batched(buffer):
            _torch.overwrite(before_it, buffer, bump_version=i in run.bumped)
            continue
        for name in run.buffers[i]:
            path, _, attr = name.rpartition(".")
            # a graph would be handed on with the buffers, from one step to the next; one that is written to has no derivative
            kept = buffer if is_new and _torch.current_level() else buffer.detach()
            with torch.no_grad():
                bound.modules[path]._buffers[attr] = kept.clone() if _torch.has_internal_overlap(kept) else kept
    for (path, attr), tensor in now.items():
        if given.get((path, attr)) is not tensor:
            bound.modules[path]._parameters[attr] = tensor
    return out


class _RecomputedModule:
    """The module as a function of everything that it is made of. ``buffers`` are the names of each of its buffers."""

    def __init__(
        self, outer: Call, bound: BoundModule, before: ModuleAttributes, buffers: list[list[str]], units: Sequence[GatheredUnit]
    ) -> None:
        self._outer, self._bound, self.buffers = outer, bound, buffers
        # functional_call has replaced their forwards
        self._constants = {path: kept_attributes(module, before) for path, module in bound.distinct.items()}
        self._parameters = {module: before[module].get("_parameters") for module in bound.owned}  # a traced one has none
        self._first, self._last = True, False
        self._level = _torch.current_level()
        self._gathered_units = units
        # a backward that nobody comes back to runs it with these
        self._leases = [one.hold_for_inner_run() for one in units]
        self._read: list[str] = []
        self._written: dict[int, bool] = {}
        self.bumped: set[int] = set()
        """The buffers whose version the first run has moved; others may have changed all the same."""

    def __call__(
        self, params: Params, given: Sequence[Tensor], spec: PartitionSpec, new: Replaced, args: Args, kwargs: Kwargs, own: _Own
    ) -> tuple[Any, tuple[tuple[int, Tensor, bool], ...], dict[str, Any] | None]:
        """Return the module's result, the buffers that it has written, and the attributes that it has set and removed."""
        bound = self._bound
        copies = [copy_buffer(buffer, buffer.dtype) for buffer in given]
        versions = [_torch.version(copy) for copy in copies]
        now = {name: copy for copy, names in zip(copies, self.buffers, strict=True) for name in names}
        attributes = self._make_attributes(own)
        with phase("run" if self._first else "recompute", bound.path):
            params, gathered = self._insert_gathered(params)
            call = self._outer.make_inner(bound, params, spec, gathered)
            with call.install(now, attributes):
                for (path, attr), tensor in new.items():
                    bound.modules[path]._parameters[attr] = tensor
                before = [kept_attributes(module) for module in bound.distinct.values()]
                out = bound.modules[bound.path].forward(*args, **kwargs)
                new.update(bound.replaced_parameters(attributes))
                now_and_before = zip(bound.distinct.items(), before, strict=True)
                found = ((path, _find_changes(old, kept_attributes(module))) for (path, module), old in now_and_before)
                changes = {path: change for path, change in found if change}
            used = sorted(call.used_parameters or ())
        first, self._first = self._first, False
        written = {
            i: now[names[0]] is not copy
            for i, (copy, version, names) in enumerate(zip(copies, versions, self.buffers, strict=True))
            if now[names[0]] is not copy or _torch.version(copy) != version
        }
        if first:
            self._read = used
            self.bumped = {i for i, is_new in written.items() if not is_new}
            # kernels write running statistics without telling the version; those that vmap does not batch they refuse
            quiet = (i for i, x in enumerate(copies) if x.is_floating_point() and _may_be_written(given[i], x))
            self._written = dict.fromkeys(quiet, False) | written
        self._check(used, written, now)
        return out, tuple((i, now[self.buffers[i][0]], is_new) for i, is_new in self._written.items()), changes or None

    def _make_attributes(self, copied: _Own) -> ModuleAttributes:
        for path, constants in self._constants.items() if self._first else ():
            for name in copied[path]:
                del constants[name]  # which would be kept for later runs
        out: ModuleAttributes = {
            module: {name: value for name, value in vars(module).items() if name in MODULE_CONTAINERS}
            | self._constants[path]
            | copied[path]
            for path, module in self._bound.distinct.items()
        }
        for module, parameters in self._parameters.items():
            if parameters is not None:
                out[module] |= {"_parameters": parameters, "_buffers": module._buffers}
        return out

    def _check(self, used: list[str], written: Mapping[int, bool], now: Params) -> None:
        """Raise RuntimeError for a run that reads other parameters or writes other buffers than the first one."""
        name = f"module '{self._bound.path}' with P(remat=True)"
        if used != self._read:
            differ = min(set(used) ^ set(self._read))
            raise RuntimeError(
                f"{name} reads other parameters in one of its runs than in the first one: {differ!r} in one of them only; "
                "expected the same control flow in each run"
            )
        for i, is_new in written.items():
            if self._written.get(i) is not is_new:
                raise RuntimeError(
                    f"{name} writes its buffer '{self.buffers[i][0]}' in one of its runs otherwise than in the first one; "
                    "expected the same control flow in each run"
                )
            buffer = now[self.buffers[i][0]]
            if (buffer.requires_grad and not (is_new and self._level)) or (not is_new and _torch.has_tangent(buffer)):
                raise RuntimeError(
                    f"{name} puts a tensor into its buffer '{self.buffers[i][0]}' that has a derivative, which would be lost: "
                    "expected it detached, or in the result of the module"
                )

    def _insert_gathered(self, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters, full where the schedule has gathered them for the first and the last run, and their buffers."""
        params, buffers = dict(params), dict[str, Tensor]()
        for gathered in self._gathered_units if self._first or self._last else ():
            shard = params.pop(gathered.unit.key)
            if self._last:
                views = run_unrecorded(gathered.parameters_in_backward, shard)
            else:
                views = run_unrecorded(gathered.route.unflatten, gathered.buffer, gathered.unit)
                if shard.requires_grad:  # the first run has a graph, which the parameters are to be asked for as well
                    views = _LinkToShard.apply(shard, *views)
            names = (param.name for param in gathered.unit.params)
            params |= zip(names, views, strict=True)
            buffers[gathered.unit.key] = gathered.buffer
        return params, buffers

    @contextlib.contextmanager
    def last_run(self) -> Generator[None]:
        """Make the run inside the last one, by plain autograd's backward: units are gathered ahead and reduced behind."""
        self._last = bool(self._leases)
        try:
            with self._gathered_units[0].schedule.backward.inner_run() if self._last else contextlib.nullcontext():
                yield
        finally:
            self._last = False


def _find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]] | None:
    """Return the attributes that a run has set, and the names of those that it has deleted."""
    if before.keys() == now.keys() and all(map(operator.is_, before.values(), map(now.__getitem__, before))):
        return None
    new = {k: v for k, v in now.items() if before.get(k, before) is not v}
    return new, sorted(before.keys() - now.keys())


class _LinkToShard(_torch.Function):
    """Gathered parameters in a graph that begins with their shard, and that nobody goes back through."""

    @staticmethod
    def forward(shard: Tensor, *views: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(view.view_as(view) for view in views)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass


def _may_be_written(buffer: Tensor, copy: Tensor) -> bool:
    """Return whether a kernel may have written to the copy without telling its version."""
    if _torch.current_level():
        return _torch.is_batched(copy)
    return not (_torch.is_strided(buffer) and _torch.is_strided(copy) and _torch.shares_memory(buffer, copy))
