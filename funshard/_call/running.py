"""A module on sharded parameters while it runs: the state of a functional_call.

For the length of the call every module's ``_parameters`` is a mapping that hands out views of the gathered buffer of the
owning unit, and gathers it if nobody has (scopes.py); and the ``forward`` of a unit's module gathers it before and lets it
go after, or runs it as one that is to be run again in backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _torch
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms._recompute.stateful_adapters import set_attributes
from .._units.accumulation import GradReceiver
from .buffers import install_buffers
from .casting import buffer_dtypes, cast_around
from .fittings import fittings
from .modes import Scheduled, choose
from .options import CallOptions
from .recompute import Replaced, params_of, recomputed, replaced
from .resting import hooks_around, resting
from .scopes import Scopes
from .swap import CHANGING, Attributes, Parameters, Place, restored, this_thread
from .unreplaced import Unreplaced

__all__ = ["Call"]


class Call:
    """The state of one functional_call, or of one run of a module in it that is recomputed."""

    def __init__(
        self,
        place: Place,
        params: Mapping[str, Tensor],
        spec: PartitionSpec,
        reduction: Reduction,
        options: CallOptions,
        receiver: GradReceiver | None = None,
        *,
        again: bool = True,
        thread: int | None = None,
    ) -> None:
        self.place, self.spec = place, spec
        self.valued = not any(tensor.is_meta for tensor in params.values())
        self.reduction = reduction
        self.thread = this_thread(thread)
        self.options = options
        outer = _torch.current_pack_hook()  # a checkpoint around the call recomputes it whole: leave that alone
        self.rests = resting(params, spec, outer, again=again)
        replaces = outer is None or self.rests is not None
        self.mode = choose(params, spec, reduction, options, receiver, again=again, replaces=replaces)
        self.scopes = Scopes(self.mode, params, spec, self.rests)
        self.inference = torch.is_inference_mode_enabled()
        self.used: set[str] | None = None if again else set()  # the parameters that a module to be run again has read
        self.lost: list[str] = []  # the buffers that forward has changed and nobody asked for
        self.normalized: Mapping[str, nn.Module] = {}  # the normalisation layers that have buffers, by path

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], buffers: dict[str, Tensor] | None, method: str | None) -> Any:
        """The model, or another of its methods than forward, called on the parameters."""
        with self.installed(buffers):
            run = getattr(self.place.modules[""], method or "__call__")
            return cast_around(run, self.spec.places[""].precision)(*args, **kwargs)

    @contextlib.contextmanager
    def installed(self, buffers: dict[str, Tensor] | None, attributes: Attributes | None = None) -> Generator[None]:
        """The modules with gathered parameters, and with other attributes where there are any; as they were afterwards."""
        hooks = contextlib.nullcontext()
        if (around := hooks_around(self.mode.live, self.rests)) is not None:
            self.scopes.hook = around.pack
            hooks = around.activate(around.pack)
        with contextlib.ExitStack() as stack:
            with CHANGING:
                before = stack.enter_context(restored(self.place.modules, self.thread))
                for module, others in (attributes or {}).items():
                    vars(module).clear()
                    vars(module).update(others)
                dtypes = None if attributes else buffer_dtypes(self.spec)  # a run inside finds them cast
                if attributes is None:
                    stack.callback(Unreplaced(self.place, self.spec, self.mode.params).restore)
                updated, changed, self.normalized = install_buffers(self.place.modules, buffers, dtypes, valued=self.valued)
                roots = self._install_parameters(attributes or before)
            try:
                with hooks, self.scopes.forward():
                    for unit in roots:
                        self.scopes.gather(unit)
                    for module, attr, unit, i in self.place.scripted:
                        setattr(module, attr, self.read(unit, i))
                    yield
            finally:
                self.mode.end_forward()
                if buffers is not None:
                    buffers.update(updated())
            self.mode.check_forward()
            self.lost = changed()

    def _install_parameters(self, before: Attributes) -> list[Unit]:
        """Put the gathering mappings and the scopes into the modules; the units of the place itself are left to the caller."""
        modules = self.place.modules
        read = self.read
        left = dict(self.place.owned)
        for path, module in modules.items():
            owned = left.pop(module, None)  # None at the second path of a module
            if owned is None or isinstance(module, torch.jit.ScriptModule):
                continue
            attributes = vars(module)
            attributes["_parameters"] = Parameters(attributes["_parameters"], owned, read, self.thread, path)
            if attributes.get("sparse") is True:  # nn.Embedding's: gradients go into a buffer, where zeros are as dear
                attributes["sparse"] = False
        for name in self.spec.ignored:
            if name in self.mode.params:
                path, _, attr = name.rpartition(".")
                modules[path]._parameters[attr] = cast("nn.Parameter", self.mode.params[name])
        again = self.spec.recomputed
        by_path: dict[str, list[Unit]] = {path: [] for path in again}
        for unit in self.spec:
            by_path.setdefault(unit.path, []).append(unit)
        for path, units in by_path.items():
            if path in again:
                vars(modules[path])["forward"] = self._recomputed(path, before, modules[path].forward, units)
            elif path in modules and path != self.place.path:
                vars(modules[path])["forward"] = self._scoped(modules[path].forward, units)
        for module, name, value in fittings(modules, self.spec, self.place.path):
            vars(module)[name] = value
        if self.rests:
            self.rests.install(modules, self.place.path, self.spec.paths, self.mode.live)
        return [] if self.place.path in again else by_path.get(self.place.path, [])

    def read(self, unit: Unit, i: int) -> Tensor:
        """The unit's i-th parameter."""
        if self.used is not None:
            self.used.add(unit.params[i].name)
        return self.scopes.gather(unit).views[i]

    def replaced(self, before: Attributes) -> Replaced:
        """What forward has put in the place of parameters, but for those that it has put back."""
        views = {id(view) for gathered in self.scopes.active.values() for view in gathered.views}
        found = replaced(self.place, before)
        return {where: tensor for where, tensor in found.items() if id(tensor) not in views}

    def _scoped(self, forward: Callable[..., Any], units: list[Unit]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.scopes.enter(units)
            try:
                return forward(*args, **kwargs)
            finally:
                self.scopes.leave()

        return run

    def _recomputed(self, path: str, before: Attributes, forward: Callable[..., Any], units: list[Unit]) -> Callable[..., Any]:
        scoped = self._scoped(forward, units)

        @functools.cache  # it may run often in one call
        def insides() -> tuple[Place, PartitionSpec]:
            place = self.place.within(path)
            return place, self.spec._restrict(path, {unit.key for owned in place.owned.values() for unit, _ in owned.values()})

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            # in one run of a module around it this one may run again, in another not: what it reads counts alike
            if self.used is not None:
                self.used |= {unit.params[i].name for owned in insides()[0].owned.values() for unit, i in owned.values()}
            if self.inference or not _torch.needs_graph():
                return scoped(*args, **kwargs)
            place, spec = insides()
            params = params_of(place, spec, self.mode.params)

            def inside(
                attributes: Attributes,
                params: Mapping[str, Tensor],
                spec: PartitionSpec,
                buffers: dict[str, Tensor],
                replaced: Replaced,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
            ) -> tuple[Any, list[str]]:
                call = Call(place, params, spec, self.reduction, self.options, again=False, thread=self.thread)
                with call.installed(buffers, attributes):
                    for (where, attr), tensor in replaced.items():
                        place.modules[where]._parameters[attr] = tensor
                    out = place.modules[path].forward(*args, **kwargs)
                    replaced.update(call.replaced(attributes))
                    after = {module: dict(vars(module)) for module in place.owned}
                for module, new in after.items():
                    set_attributes(module, new)
                return out, sorted(call.used or ())

            if not isinstance(self.mode, Scheduled) or not self.mode.is_here():
                return recomputed(inside, place, before, params, spec, (), args, kwargs, self.spec.places[path].remat)
            self.scopes.enter(units)
            try:
                visits = [gathered.visit for gathered in self.scopes.innermost() if gathered.visit]
                return recomputed(inside, place, before, params, spec, visits, args, kwargs, self.spec.places[path].remat)
            finally:
                self.scopes.leave()

        return run
