"""A module with P(remat=...): backward runs it again, with everything that it is made of as arguments.

    Call -> recomputed_forwards -> call_recomputed (_transforms/_recompute) -> _RecomputedModule -> Call.make_inner -> forward

The first run and the ones of backward are calls of their own, on the module's part of the model.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.tree import join_path
from .._spec.options import RECOMPUTE_ALL, inner_calls, remat_of
from .._torch.tracing import phase
from .._transforms._recompute.function import HANDED_ON
from .._transforms._recompute.remat import call_recomputed
from .._transforms._recompute.snapshot import is_copied
from .._transforms.ambient import run_unrecorded
from .._transforms.saved_tensors import BeginGraph
from .buffers import copy_buffer
from .compiled_unit import can_run_compiled, is_compiled
from .modes import Overlapped
from .module_state import MODULE_CONTAINERS, BoundModule, ModuleAttributes, Replaced, kept_attributes
from .running import Call, Override
from .schedule import GatheredUnit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_Inside = tuple[BoundModule, PartitionSpec]
_Buffers = dict[tuple[str, str], Any]
"""Buffers by the path of their module and their attribute; a run leaves each as it is then, and whether it is a new tensor."""
_Attributes = dict[str, dict[str, Any]]
"""By a module's path, the attributes of which each run has its own copies; a run adds those that it sets."""


class _Deleted:
    """The value of an attribute that a run has deleted."""


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
        call.scopes.refuse_hooks(f"module '{path}'", _torch.current_pack_hook())
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
    run = _RecomputedModule(outer, bound, before, gathered, (len(args), *kwargs))
    own_buffers = {(path, attr): b for path, m in bound.distinct.items() for attr, b in m._buffers.items() if b is not None}
    buffers: _Buffers = _copy_buffers(own_buffers)
    attributes = {path: {name: x for name, x in own.items() if is_copied(x)} for path, own in run.attributes.items()}
    roots: dict[str, Any] = {
        "its parameters": bound.params_of(spec, outer.mode.params),
        "its buffers": buffers,
        "its attributes": attributes,
        "its spec": spec,
        "what was put in the place of its parameters": (replaced := bound.replaced_parameters(before)),
        **{f"args[{i}]": x for i, x in enumerate(args)},
        **{f"kwargs[{key!r}]": x for key, x in kwargs.items()},
    }
    remat = remat_of(outer.spec.by_path[bound.path]) or RECOMPUTE_ALL
    out = call_recomputed(run, run.name, roots, [*bound.distinct.values()], remat=remat)
    for path, values in attributes.items():
        own = vars(bound.distinct[path])
        own.update((sys.intern(name), value) for name, value in values.items())  # as pickle, which compares runs, knows them
        for name in [name for name, value in values.items() if value is _Deleted]:
            del own[name]
    for (path, attr), (buffer, is_new) in buffers.items():
        own_buffer = bound.modules[path]._buffers[attr]
        # a vmap around has batched all results, and can only write those into what it has batched
        if not is_new and own_buffer is not None and _torch.is_batched(own_buffer) >= _torch.is_batched(buffer):
            if _is_written(own_buffer, buffer):
                _torch.overwrite(own_buffer, buffer)
            continue
        # a graph would be handed on with the buffers, from one step to the next; one that is written to has no derivative
        kept = buffer if is_new and _torch.current_level() else buffer.detach()
        with torch.no_grad():
            bound.modules[path]._buffers[attr] = kept.clone() if _torch.has_internal_overlap(kept) else kept
    for (path, attr), tensor in replaced.items():
        bound.modules[path]._parameters[attr] = tensor
    return out


class _RecomputedModule:
    """The module as a function of everything that it is made of: ``arguments`` are a number of args, and names of kwargs."""

    def __init__(
        self, outer: Call, bound: BoundModule, before: ModuleAttributes, units: Sequence[GatheredUnit], arguments: Args
    ) -> None:
        self._outer, self._bound, self._gathered_units, self._arguments = outer, bound, units, arguments
        self.name = f"module '{bound.path}' with P(remat=True)"
        # functional_call has replaced their forwards
        self.attributes = {path: kept_attributes(module, before) for path, module in bound.distinct.items()}
        self._parameters = {module: before[module]["_parameters"] for module in bound.distinct.values()}
        self._first, self._last, self._level = True, False, _torch.current_level()
        # a backward that nobody comes back to runs it with these
        self._leases = [one.hold_for_inner_run() for one in units]
        self._read = set[str]()

    def __call__(
        self, params: Params, buffers: _Buffers, own: _Attributes, spec: PartitionSpec, replaced: Replaced, *arguments: Any
    ) -> Any:
        """Return the result, and leave in the others what the run has made of them."""
        bound, (count, *keys) = self._bound, self._arguments
        copies = _copy_buffers(buffers)
        now = {join_path(*name): copy for name, copy in copies.items()}
        with phase("run" if self._first else "recompute", bound.path):
            hooks = {key: x._backward_hooks for key, x in params.items() if x._backward_hooks}  # of the first run
            params, gathered = self._insert_gathered(params)
            call = self._outer.make_inner(bound, params, spec, gathered)
            call.gradient_hooks = hooks
            with call.install(now, attributes := self._make_attributes(own)):
                for (path, attr), tensor in replaced.items():
                    bound.modules[path]._parameters[attr] = tensor
                before = [kept_attributes(module) for module in bound.distinct.values()]
                kwargs = dict(zip(keys, arguments[count:], strict=True))
                out = bound.modules[bound.path].forward(*arguments[:count], **kwargs)
                replaced.update(bound.replaced_parameters(attributes))
                for (path, module), old in zip(bound.distinct.items(), before, strict=True):
                    new = kept_attributes(module)
                    own[path] |= {name: value for name, value in new.items() if old.get(name, old) is not value}
                    own[path] |= dict.fromkeys(sorted(old.keys() - new.keys()), _Deleted)
        for name, buffer in now.items():  # also what was None
            path, _, attr = name.rpartition(".")
            buffers[path, attr] = buffer, (is_new := buffer is not copies.get((path, attr)))
            if (buffer.requires_grad and not (is_new and self._level)) or (not is_new and _torch.has_tangent(buffer)):
                raise RuntimeError(
                    f"{self.name} puts a tensor into its buffer '{name}' that has a derivative, which would be "
                    "lost: expected it detached, or in the result of the module"
                )
        used = call.used_parameters or set()
        self._read, self._first = used if self._first else self._read, False
        if used != self._read:
            raise RuntimeError(
                f"{self.name} reads other parameters in one of its runs than in the first one: {min(used ^ self._read)!r} in "
                "one of them only; expected the same control flow in each run"
            )
        return out

    def _make_attributes(self, copied: _Attributes) -> ModuleAttributes:
        for path, attributes in self.attributes.items() if self._first else ():
            for name in copied[path]:
                del attributes[name]  # which would be kept for later runs
        return {
            module: {name: value for name, value in vars(module).items() if name in MODULE_CONTAINERS}
            | {**self.attributes[path], **copied[path], "_parameters": self._parameters[module], "_buffers": module._buffers}
            for path, module in self._bound.distinct.items()
        }

    def _insert_gathered(self, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters, full where the schedule has gathered them, and in the first run the buffers of these units."""
        params, buffers = dict(params), dict[str, Tensor]()
        for gathered in self._gathered_units if self._first or self._last else ():
            shard = params.pop(gathered.unit.key)
            if self._last:
                views = run_unrecorded(gathered.parameters_in_backward, shard)
            else:
                views = run_unrecorded(gathered.route.unflatten, gathered.buffer, gathered.unit)
                if shard.requires_grad:  # the first run has a graph, which the parameters are to be asked for as well
                    _, *views = BeginGraph.apply(HANDED_ON.format(self.name), shard, *views)
                buffers[gathered.unit.key] = gathered.buffer
            names = (param.name for param in gathered.unit.params)
            params |= zip(names, views, strict=True)
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


def _copy_buffers(buffers: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    copies = {buffer: copy_buffer(buffer, buffer.dtype) for buffer in buffers.values()}  # one may be in several places
    return {name: copies[buffer] for name, buffer in buffers.items()}


def _is_written(buffer: Tensor, now: Tensor) -> bool:
    """Return whether a run has written to its lazy copy of a buffer, as kernels do without telling the version."""
    buffer, now = _torch.unwrap(buffer), _torch.unwrap(now)
    return not (_torch.is_strided(buffer) and _torch.is_strided(now) and _torch.shares_memory(buffer, now))
