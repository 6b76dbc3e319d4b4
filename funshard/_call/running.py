"""A module on sharded parameters while it runs: the state of a functional_call.

For the length of the call every module's ``_parameters`` is a mapping that hands out views of the gathered buffer of the
owning unit, and gathers the unit if it is not (scopes.py). The ``forward`` of a unit's module gathers the unit before and
frees it after. That is one of the `Wrapper`s of forwards, the others are options; what watches a call are its `Guard`s. Both
are listed in call.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._spec.options import inner_calls
from .._transforms.offload import choose_hooks, choose_offload
from .buffers import CallBuffers
from .modes import choose_mode
from .module_state import MODEL_LOCK, BoundModule, GatheringParameters, ModuleAttributes, calling_thread, restore_modules
from .schedule import CallInputs
from .scopes import UnitScopes

Override = tuple[nn.Module, str, Any]
"""A module, the name of an attribute, and its value for the length of a call."""

Wrapper = Callable[["Call", ModuleAttributes], Iterable[Override]]
"""What surrounds the forwards of a call's modules, where it is given the attributes of before the call.

Each of its forwards is set before it is asked for the next, and all of them before those of the next wrapper, which are
around them.
"""


class ForwardRun:
    """A run of forward in a call: its result, and what watches it. No call holds it, since graphs hold calls."""

    def __init__(self, call: Call, buffers: CallBuffers, returned: Collection[str], before: ModuleAttributes) -> None:
        self.call, self.buffers, self.returned, self.before = call, buffers, returned, before
        self.guards: list[Guard] = []
        self.held: list[Any] = []  # what guards have found on the modules
        self.out: Any = None
        self.attributes: dict[str, Any] = {}  # those of the globs in ``returned``


class Guard:
    """A check of one run of forward, made when the modules have all that the call gives them."""

    def __init__(self, run: ForwardRun) -> None:
        """Note what is to be compared or restored."""

    def check(self, run: ForwardRun) -> None:
        """Raise an error for what forward has done; the modules are as it has left them."""

    def restore(self) -> None:
        """Restore what forward has changed beside the modules' attributes, also after an error."""

    def report(self, run: ForwardRun, stacklevel: int) -> None:
        """Warn of what forward has done, and watch backward; the modules are as before the call."""


class Call:
    """The state of one functional_call, or of one run of a module in it that is recomputed."""

    def __init__(
        self,
        bound: BoundModule,
        inputs: CallInputs,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        is_inner: bool = False,
        thread: int | None = None,
        wrappers: Sequence[Wrapper] = (),
    ) -> None:
        self.bound, self.inputs, self.params, self.spec, self.wrappers = bound, inputs, inputs.params, inputs.spec, wrappers
        self.has_values = not any(tensor.is_meta for tensor in inputs.params.values())
        self.thread = calling_thread(thread)
        outer = _torch.current_pack_hook()  # a checkpoint around the call recomputes it whole: leave that alone
        self.offload = choose_offload(inputs.params, inputs.spec, outer, is_inner=is_inner)
        replaces = outer is None or self.offload is not None
        self.mode = choose_mode(inputs, is_inner=is_inner, replaces=replaces)
        self.scopes = UnitScopes(self.mode, self.offload and self.offload.exclude, buffers or {})
        self.is_inference = torch.is_inference_mode_enabled()
        self.used_parameters: set[str] | None = set() if is_inner else None  # what the module has read

    @functools.cached_property
    def is_fake(self) -> bool:
        """Whether parameters are fake tensors."""
        return any(map(_torch.is_fake, self.mode.params.values()))

    @contextlib.contextmanager
    def install(
        self,
        buffers: dict[str, Tensor] | None,
        attributes: ModuleAttributes | None = None,
        returned: Collection[str] = (),
        guards: Iterable[type[Guard]] = (),
    ) -> Generator[ForwardRun]:
        """Give the modules gathered parameters, and these attributes if any; restore the modules afterwards.

        Yield the run, which is to be told the result of forward.
        """
        hooks = contextlib.nullcontext()
        if (around := choose_hooks(self.mode.restorable, self.offload)) is not None:
            self.scopes.hook = pack = around.pack  # one bound method: it is compared by identity at each read
            hooks = around.activate(pack)
        with contextlib.ExitStack() as stack:
            with MODEL_LOCK:
                before = stack.enter_context(restore_modules(self.bound.modules, self.thread))
                for module, others in (attributes or {}).items():
                    vars(module).clear()
                    vars(module).update(others)
                cast_by = None if attributes else self.spec  # a run inside finds them cast
                of_call = CallBuffers(self.bound.modules, buffers, cast_by, valued=self.has_values)
                run = ForwardRun(self, of_call, returned, before)
                self._install_parameters()
                for wrapper in self.wrappers:
                    for module, name, value in wrapper(self, attributes or before):
                        vars(module)[name] = value
                for guard in guards:
                    run.guards.append(guard(run))
                    stack.callback(run.guards[-1].restore)
            try:
                with hooks, self.scopes.forward():
                    for unit in () if self.bound.path in inner_calls(self.spec) else self.units_at(self.bound.path):
                        self.scopes.gather(unit)
                    yield run
                if self.mode.schedule:
                    self.mode.schedule.check_forward()
            finally:
                if self.mode.schedule:
                    self.mode.schedule.end_forward()
                if buffers is not None:
                    buffers.update(run.buffers.updated())
            for guard in run.guards:
                guard.check(run)

    def _install_parameters(self) -> None:
        modules, owned = self.bound.modules, self.bound.owned
        for path, module in modules.items():
            own = module._parameters
            if type(own) is GatheringParameters and own.call is self:  # at its second path
                continue
            attributes = module.__dict__
            attributes["_parameters"] = given = GatheringParameters(own)
            given.call, given.path = self, path
            given.owned = given.owned_at_first = owned[module]
            if own and "sparse" in attributes and attributes["sparse"] is True:
                attributes["sparse"] = False  # nn.Embedding's: gradients go into a buffer, where zeros are as dear
        for name in self.spec.ignored:
            if name in self.mode.params:
                path, _, attr = name.rpartition(".")
                modules[path]._parameters[attr] = cast("nn.Parameter", self.mode.params[name])

    def units_at(self, path: str) -> Sequence[Unit]:
        """Return the units that are gathered where the module at this path begins."""
        return self.spec._compute_once(_units_by_path).get(path, ())

    def read(self, unit: Unit, i: int) -> Tensor:
        """Return the unit's i-th parameter."""
        if self.used_parameters is not None:
            self.used_parameters.add(unit.params[i].name)
        return self.scopes.gather(unit).views[i]

    def make_inner(
        self, bound: BoundModule, params: Mapping[str, Tensor], spec: PartitionSpec, buffers: Mapping[str, Tensor]
    ) -> Call:
        """Return the call in which a module of this one is recomputed; ``buffers`` are those of units given in full."""
        inputs = self.inputs._replace(params=params, spec=spec, receiver=None)
        return Call(bound, inputs, buffers=buffers, is_inner=True, thread=self.thread, wrappers=self.wrappers)

    def is_view(self, unit: Unit, i: int, tensor: object) -> bool:
        """Return whether a tensor is the unit's i-th parameter as it is gathered now."""
        gathered = self.scopes.active.get(unit.key)
        return gathered is not None and gathered.views[i] is tensor


def _units_by_path(spec: PartitionSpec) -> dict[str, list[Unit]]:
    by_path: dict[str, list[Unit]] = {path: [] for path in inner_calls(spec)}
    for unit in spec:
        for path in unit.paths:
            by_path.setdefault(path, []).append(unit)
    return by_path


def scoped_forwards(call: Call, _: ModuleAttributes) -> Iterator[Override]:
    """Yield the forwards of the modules at which units are gathered and released; the caller gathers those of the place."""
    modules, inner = call.bound.modules, inner_calls(call.spec)
    for path, units in call.spec._compute_once(_units_by_path).items():
        if path in inner or (path in modules and path != call.bound.path):
            yield modules[path], "forward", _wrap_in_scope(call.scopes, modules[path].forward, units)


def _wrap_in_scope(scopes: UnitScopes, forward: Callable[..., Any], units: Sequence[Unit]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        scopes.enter(units)
        try:
            return forward(*args, **kwargs)
        finally:
            scopes.leave()

    vars(run).update(getattr(forward, "__dict__", ()), __wrapped__=forward)  # as functools.wraps, which takes longer
    return run
