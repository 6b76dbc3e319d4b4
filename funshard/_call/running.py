"""A module on sharded parameters while it runs: the state of a functional_call.

For the length of the call every module's ``_parameters`` is a mapping that hands out views of the gathered buffer of the
owning unit, and gathers the unit if it is not (scopes.py). The ``forward`` of a unit's module gathers the unit before and
frees it after, or runs as one that backward recomputes (recompute.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _torch
from .._spec.division import Reduction
from .._spec.options import Compile
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms._recompute.saved_results import leave_finished_runs
from .._units.accumulation import GradReceiver
from .activation_offload import choose_hooks, choose_offload
from .buffers import install_buffers
from .casting import buffer_dtypes, module_overrides, wrap_in_casts
from .compiled_unit import can_run_compiled, compile_forward, find_compiled
from .guards import AttributeWrites, StandIns
from .modes import Scheduled, choose_mode
from .module_state import MODEL_LOCK, BoundModule, GatheringParameters, ModuleAttributes, calling_thread, restore_modules
from .recompute import recompute_module
from .schedule import CallOptions
from .scopes import UnitScopes

__all__ = ["Call"]


class Call:
    """The state of one functional_call, or of one run of a module in it that is recomputed."""

    def __init__(
        self,
        place: BoundModule,
        params: Mapping[str, Tensor],
        spec: PartitionSpec,
        reduction: Reduction,
        options: CallOptions,
        receiver: GradReceiver | None = None,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        is_recomputing: bool = False,
        thread: int | None = None,
    ) -> None:
        self.place, self.spec = place, spec
        self.has_values = not any(tensor.is_meta for tensor in params.values())
        self.reduction = reduction
        self.thread = calling_thread(thread)
        self.options = options
        outer = _torch.current_pack_hook()  # a checkpoint around the call recomputes it whole: leave that alone
        self.offload = choose_offload(params, spec, outer, is_recomputing=is_recomputing)
        replaces = outer is None or self.offload is not None
        self.mode = choose_mode(params, spec, reduction, options, receiver, is_recomputing=is_recomputing, replaces=replaces)
        self.scopes = UnitScopes(self.mode, params, spec, self.offload, buffers or {})
        self.is_inference = torch.is_inference_mode_enabled()
        self.used_parameters: set[str] | None = set() if is_recomputing else None  # what the recomputed module has read
        self.compiled: Mapping[str, Compile] = {}  # how the modules of these paths are compiled
        self.discarded_buffers: list[str] = []  # the buffers that forward has changed and nobody asked for
        self.normalized: Mapping[str, nn.Module] = {}  # the normalisation layers that have buffers, by path

    @functools.cached_property
    def is_fake(self) -> bool:
        """Whether parameters are fake tensors."""
        return any(map(_torch.is_fake, self.mode.params.values()))

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buffers: dict[str, Tensor] | None,
        method: str | None,
        returned: Collection[str] = (),
    ) -> tuple[Any, dict[str, Any]]:
        """Call the model, or another of its methods than forward. Return the result, and the attributes of these globs."""
        with self.install(buffers, returned=returned) as results:
            run = getattr(self.place.modules[""], method or "__call__")
            results.append(wrap_in_casts(run, self.spec.by_path[""].precision)(*args, **kwargs))
        return results[0], results[1]

    @contextlib.contextmanager
    def install(
        self, buffers: dict[str, Tensor] | None, attributes: ModuleAttributes | None = None, returned: Collection[str] = ()
    ) -> Generator[list[Any]]:
        """Give the modules gathered parameters, and these attributes if any; restore the modules afterwards.

        Yield a list for the result of forward, to which the attributes that ``returned`` names are added.
        """
        hooks = contextlib.nullcontext()
        if (around := choose_hooks(self.mode.live, self.offload)) is not None:
            self.scopes.hook = pack = around.pack  # one bound method: it is compared by identity at each read
            hooks = around.activate(pack)
        writes: AttributeWrites | None = None
        results: list[Any] = []  # not of the call, which graphs hold
        with contextlib.ExitStack() as stack:
            with MODEL_LOCK:
                before = stack.enter_context(restore_modules(self.place.modules, self.thread))
                for module, others in (attributes or {}).items():
                    vars(module).clear()
                    vars(module).update(others)
                dtypes = None if attributes else buffer_dtypes(self.spec)  # a run inside finds them cast
                if attributes is None:
                    stack.callback(StandIns(self.place, self.spec, self.mode.params).restore)
                updated, changed, registered_again, self.normalized = install_buffers(
                    self.place.modules, buffers, dtypes, valued=self.has_values
                )
                roots = self._install_parameters(attributes or before)
                if attributes is None:
                    writes = AttributeWrites(self.place, self.spec)
                    stack.callback(writes.restore_containers)
            try:
                with hooks, self.scopes.forward():
                    for unit in roots:
                        self.scopes.gather(unit)
                    for module, attr, unit, i in self.place.scripted_parameters:
                        setattr(module, attr, self.read(unit, i))
                    yield results
            finally:
                self.mode.end_forward()
                if buffers is not None:
                    buffers.update(updated())
            self.mode.check_forward()
            self.discarded_buffers = changed()
            if writes:
                results.append(writes.find(returned))
                writes.check(results[0], results[1], registered_again())

    def _install_parameters(self, before: ModuleAttributes) -> list[Unit]:
        """Put the gathering mappings and the scopes into the modules. Return the place's own units for the caller to gather."""
        modules = self.place.modules
        read = self.read
        left = dict(self.place.owned)
        for path, module in modules.items():
            owned = left.pop(module, None)  # None at the second path of a module
            if owned is None or isinstance(module, torch.jit.ScriptModule):
                continue
            attributes = vars(module)
            attributes["_parameters"] = GatheringParameters(
                attributes["_parameters"], owned, read, self.is_view, self.thread, path
            )
            if attributes.get("sparse") is True:  # nn.Embedding's: gradients go into a buffer, where zeros are as dear
                attributes["sparse"] = False
        for name in self.spec.ignored:
            if name in self.mode.params:
                path, _, attr = name.rpartition(".")
                modules[path]._parameters[attr] = cast("nn.Parameter", self.mode.params[name])
        recomputed = self.spec.recomputed
        self.compiled = find_compiled(self.spec, modules)
        for path, options in self.compiled.items():
            if vars(modules[path]).get("_compiled_call_impl") is not None:
                vars(modules[path])["_compiled_call_impl"] = None
            vars(modules[path])["forward"] = compile_forward(self, path, options, before, modules[path].forward)
        by_path: dict[str, list[Unit]] = {path: [] for path in recomputed}
        for unit in self.spec:
            for path in unit.paths:
                by_path.setdefault(path, []).append(unit)
        for path, units in by_path.items():
            if path in recomputed:
                vars(modules[path])["forward"] = self._wrap_recomputed(path, before, modules[path].forward, units)
            elif path in modules and path != self.place.path:
                vars(modules[path])["forward"] = self._wrap_in_scope(modules[path].forward, units)
        for module, name, value in module_overrides(modules, self.spec, self.place.path, self.options.weight):
            vars(module)[name] = value
        if self.offload:
            self.offload.install(modules, self.place.path, self.spec.paths, self.mode.live)
        return [] if self.place.path in recomputed else by_path.get(self.place.path, [])

    def read(self, unit: Unit, i: int) -> Tensor:
        """Return the unit's i-th parameter."""
        if self.used_parameters is not None:  # recomputing
            self.used_parameters.add(unit.params[i].name)
            leave_finished_runs()
        return self.scopes.gather(unit).views[i]

    def make_inner(
        self, place: BoundModule, params: Mapping[str, Tensor], spec: PartitionSpec, buffers: Mapping[str, Tensor]
    ) -> Call:
        """Return the call in which a module of this one is recomputed; ``buffers`` are those of units given in full."""
        reduction, options, thread = self.reduction, self.options, self.thread
        return Call(place, params, spec, reduction, options, buffers=buffers, is_recomputing=True, thread=thread)

    def is_view(self, unit: Unit, i: int, tensor: object) -> bool:
        """Return whether a tensor is the unit's i-th parameter as it is gathered now."""
        gathered = self.scopes.active.get(unit.key)
        return gathered is not None and gathered.views[i] is tensor

    def _wrap_in_scope(self, forward: Callable[..., Any], units: list[Unit]) -> Callable[..., Any]:
        """Return the forward of the module at which these units are gathered and released."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.scopes.enter(units)
            try:
                return forward(*args, **kwargs)
            finally:
                self.scopes.leave()

        return run

    def _wrap_recomputed(
        self, path: str, before: ModuleAttributes, forward: Callable[..., Any], units: list[Unit]
    ) -> Callable[..., Any]:
        """Return the forward of a module with ``P(remat=...)``, which runs again in backward."""
        scoped = self._wrap_in_scope(forward, units)

        @functools.cache  # it may run often in one call
        def insides() -> tuple[BoundModule, PartitionSpec]:
            place = self.place.submodule(path)
            return place, self.spec._restrict_to_units(
                path, {unit.key for owned in place.owned.values() for unit, _ in owned.values()}
            )

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            # in one run of a module around it this one may run again, in another not: what it reads counts alike
            if self.used_parameters is not None:
                self.used_parameters |= {
                    unit.params[i].name for owned in insides()[0].owned.values() for unit, i in owned.values()
                }
            if self.is_inference or not _torch.needs_graph():
                return scoped(*args, **kwargs)
            if path in self.compiled and can_run_compiled(self, path, args, kwargs):
                return scoped(*args, **kwargs)
            place, spec = insides()
            if not isinstance(self.mode, Scheduled) or not self.mode.is_at_call_level():
                return recompute_module(self, place, spec, before, (), args, kwargs)
            self.scopes.enter(units)
            try:
                gathered = [in_use.gathered_unit for in_use in self.scopes.innermost() if in_use.gathered_unit]
                return recompute_module(self, place, spec, before, gathered, args, kwargs)
            finally:
                self.scopes.leave()

        return run
