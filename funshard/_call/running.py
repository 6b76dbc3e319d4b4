"""A module on sharded parameters while it runs: the state of a functional_call.

For the length of the call every module's ``_parameters`` is a mapping that hands out views of the gathered buffer of the
owning unit, and gathers the unit if it is not (`UnitScopes`). The ``forward`` of a unit's module gathers the unit before and
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
from .._core.tree import is_within
from .._core.unit import Unit
from .._spec.options import inner_calls
from .._transforms.ambient import RUNNING, run_unrecorded
from .._transforms.offload import choose_hooks, choose_offload
from .buffers import CallBuffers
from .modes import Inline, UnitInUse, choose_mode, units_given_full, write_error
from .module_state import MODEL_LOCK, BoundModule, GatheringParameters, ModuleAttributes, calling_thread, restore_modules
from .schedule import CallInputs

# --- Scopes: the units that are gathered while forward runs, and the runs of modules that they are freed after ---

_VIEW_ERRORS = ("is a view and is being modified inplace", "another view of its base has been modified inplace")
"""Words of torch's errors for a write to a parameter, the second where a compiler traces it."""


class UnitScopes:
    """The units in use in one call, by the run of a module that gathered them; the first scope is the call's own.

    A unit is gathered when its module is entered or, used from outside, when first touched, and freed when that module is left,
    or the one that was running then: with ``reshard=True`` at the next gather, and others at the end of the call. To free is to
    drop the reference: what user code still holds stays readable.
    """

    def __init__(self, mode: Inline, exclude: Callable[[Sequence[Tensor]], None] | None, buffers: Mapping[str, Tensor]) -> None:
        self._mode, self._exclude = mode, exclude  # the latter takes parameters that stay gathered
        self._differentiable, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.hook = self._outer = _torch.current_pack_hook()  # the first is what replaces saved tensors while forward runs
        self._outer_reentrant = _torch.count_reentrant_checkpoints()
        self._inside = RUNNING.names
        self.active = units_given_full(mode.params, mode.spec, buffers)
        self._scopes: list[list[UnitInUse]] = [[]]
        self._pending: list[UnitInUse] = []  # left, but not freed before the next gather, in case the forward ends here
        self._written: tuple[Unit, str] | None = None  # a parameter that forward has written to
        self.separate = set[str]()  # keys of units whose modules compute with tensors of calls inside of this one
        self._freed = set[str]()  # keys of units whose modules have computed with another gather's
        self._running = [True]  # until forward has ended; what is in a graph holds this alone

    def gather(self, unit: Unit, *, is_read: bool = False) -> UnitInUse:
        """Return the unit; gather it unless it is in use, for its module or because forward reads one of its parameters."""
        if RUNNING.names != self._inside:
            where = RUNNING.names[-1] if RUNNING.names else "another thread"
            raise RuntimeError(
                f"unit '{unit.key}' is read inside of {where}, which does not own it: there it would have no gradient; "
                "expected P(remat=True) for the module around both, or the tensor alone among the arguments, as in "
                "fs.remat(F.linear)(x, self.weight)"
            )
        hooks = _torch.current_saved_tensor_hooks(False)
        if (hook := hooks[0] if hooks else None) is not self.hook or not torch.is_grad_enabled():
            self.refuse_hooks(f"unit '{unit.key}'", hook)
        gathered = self.active.get(unit.key)
        if gathered is not None and (not gathered.level or gathered.level <= _torch.current_level()):
            if gathered in self._pending or (gathered.is_read_ahead and not is_read):  # it goes with the run that begins
                next(held for held in (self._pending, *self._scopes) if gathered in held).remove(gathered)
                self._scopes[-1].append(gathered)
                gathered.is_read_ahead &= is_read
            if is_read and gathered.gathered_unit and unit.key in self.separate:  # for its module, which has run
                _mark_separate(gathered)
            return gathered
        self.free(self._pending)
        if self._written:
            raise write_error(*self._written)
        probe = torch.is_inference_mode_enabled() and not self._inference
        # a gather under no_grad or in inference mode must serve uses outside of it
        with torch.inference_mode(False) if probe else contextlib.nullcontext(), torch.set_grad_enabled(self._differentiable):
            gathered = run_unrecorded(self._mode.gather, unit)
        if is_read and (unit.key in self._freed or unit.key in self.separate):
            _mark_separate(gathered)
        elif unit.key in self._freed and not _torch.is_in_graph():
            for view in gathered.views:
                if view.requires_grad:
                    _torch.add_gradient_hook(view, functools.partial(_refuse_gradient, self._running, unit.key))
        if self._exclude and not gathered.reshard:
            self._exclude(gathered.views)
        gathered.is_read_ahead = is_read
        self.active[unit.key] = gathered
        self._scopes[-1].append(gathered)
        return gathered

    def refuse_hooks(self, what: str, hook: Callable[..., object] | None) -> None:
        """Raise RuntimeError if the hook is torch.utils.checkpoint's, or in a transform another of forward's own."""
        own = getattr(hook, "__module__", "funshard") if hook is not self._outer else "funshard"
        if _torch.current_level() and not own.startswith(("funshard", "torch.utils.checkpoint")):
            raise RuntimeError(
                f"{what} is read within torch.autograd.graph.saved_tensors_hooks of forward's own, inside of torch.func, which "
                "has none: expected P(offload='activations') in their place, or a first derivative by fs.grad"
            )
        inside = own == "torch.utils.checkpoint"
        quiet = self._differentiable and not torch.is_grad_enabled()  # as in a reentrant checkpoint, or by the user's wish
        if inside or (quiet and _torch.count_reentrant_checkpoints() > self._outer_reentrant):
            raise RuntimeError(
                f"{what}: torch.utils.checkpoint inside functional_call would recompute with the module's own "
                "parameters, not with these: expected none; checkpoint the functional_call as a whole"
            )

    def free(self, many: list[UnitInUse], *, keep_for_backward: bool = False) -> None:
        """End the use of these units: free their buffers, or leave them to backward."""
        for gathered in many:
            if (what := gathered.watch.find_write()) and not self._written:
                self._written = gathered.unit, what
            if self.active.get(gathered.unit.key) is gathered:
                del self.active[gathered.unit.key]
            gathered.views = ()
            self._freed.add(gathered.unit.key)
            self._mode.leave(gathered, keep=keep_for_backward)
        many.clear()

    def enter(self, units: Sequence[Unit]) -> None:
        """Begin a module's run: gather its units. Those gathered from here on belong to this run, until `leave`."""
        self._scopes.append([])
        try:
            for unit in units:
                self.gather(unit)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """End the run that was entered last."""
        for gathered in self._scopes.pop():
            (self._pending if gathered.reshard else self._scopes[0]).append(gathered)

    def innermost(self) -> list[UnitInUse]:
        """Return the units gathered in the run that was entered last."""
        return self._scopes[-1]

    @contextlib.contextmanager
    def forward(self) -> Generator[None]:
        """Free all units after the forward that runs inside. Raise RuntimeError if forward wrote to a parameter."""
        cause: Exception | None = None
        interrupted = True
        try:
            yield
            interrupted = False
        except Exception as error:
            cause, interrupted = error, False
            text = _torch.error_text(error)
            if self.active and any(words in text for words in _VIEW_ERRORS):  # torch has refused it already
                unit = next(reversed(self.active.values())).unit
                self._written = self._written or (unit, f"a view, as {', '.join(repr(p.name) for p in unit.params)}")
            raise
        finally:
            self._running.clear()
            self.free(self._pending, keep_for_backward=True)
            self.free(self._scopes[0], keep_for_backward=True)
            self.free(list(self.active.values()))
            if self._written and not interrupted:
                raise write_error(*self._written) from cause


def _mark_separate(gathered: UnitInUse) -> None:
    for view, param in () if _torch.is_in_graph() else zip(gathered.views, gathered.unit.params, strict=True):
        if type(view) is Tensor:  # and not a fake one
            view.__class__, vars(view)["parameter"] = _torch.SeparateTensor, param.name


def _refuse_gradient(running: list[bool], key: str, _: Tensor | None) -> None:
    """Raise RuntimeError for a gradient, in forward, by a parameter whose unit was gathered before: it has another tensor."""
    if running:
        raise RuntimeError(
            f"unit '{key}': forward takes a gradient by a parameter of it, and it was freed and gathered again in this call: "
            "what was computed with it before would be missing; expected P(reshard=False) for the unit"
        )


# --- A call, what surrounds its forwards, and what watches it ---

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
        self.held: list[Any] | None = None  # what guards have found on the modules
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
        self.scopes.separate.update(inputs.spec._compute_once(_keys_of_inner_calls, bound.path, _torch.current_level() > 0))
        self.is_inference = torch.is_inference_mode_enabled()
        self.used_parameters: set[str] | None = set() if is_inner else None  # what the module has read
        self.gradient_hooks: Mapping[str, Mapping[int, Any]] = {}  # by unit, of the parameters that it reads

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
        schedule, hooks = self.mode.schedule, contextlib.nullcontext()
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
                of_call = CallBuffers(self.bound.modules, buffers, cast_by, self.has_values)
                run = ForwardRun(self, of_call, returned, before)
                self._install_parameters()
                for wrapper in self.wrappers:
                    for module, name, value in wrapper(self, attributes or before):
                        vars(module)[name] = value
                for guard in guards:
                    run.guards.append(guard(run))
                    stack.callback(run.guards[-1].restore)
            try:
                with schedule.forward() if schedule else contextlib.nullcontext(), hooks, self.scopes.forward():
                    for unit in () if self.bound.path in inner_calls(self.spec) else self.units_at(self.bound.path):
                        self.scopes.gather(unit)
                    yield run
            finally:
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

    def read(self, unit: Unit, i: int, *, for_module: bool = False) -> Tensor:
        """Return the unit's i-th parameter, as forward reads it or, before that, ``for_module`` that does."""
        view = self.scopes.gather(unit, is_read=not for_module).views[i]
        if self.used_parameters is not None:
            self.used_parameters.add(unit.params[i].name)
            if view.requires_grad and not isinstance(view, _torch.SeparateTensor) and not view._backward_hooks:
                for hook in self.gradient_hooks.get(unit.key, {}).values():
                    _torch.add_gradient_hook(view, hook)
        return view

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


def _keys_of_inner_calls(spec: PartitionSpec, path: str, in_transform: bool) -> tuple[str, ...]:
    """Return the keys of units in modules that are inner calls of the one at this path; compiled ones are in transforms."""
    inner = [other for other in inner_calls(spec) if other != path and (in_transform or not spec.by_run[other].compile)]
    return tuple(unit.key for unit in spec if any(is_within(own, other) for own in unit.paths for other in inner))


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
