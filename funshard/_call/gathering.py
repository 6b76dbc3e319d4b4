"""A module on sharded parameters while it runs: the state of a functional_call.

How a unit comes and goes. For the length of the call every module's ``_parameters`` is a mapping that hands out views
of the gathered buffer of the owning unit, and gathers it if nobody has. A unit is gathered when its module is entered
(or, used from outside, when first touched) and let go when the module that was running then is left. Letting go is
dropping a reference: nothing is ever resized or freed by hand, so whatever user code still holds stays readable.

What would hold the buffer until backward is autograd, which saves weights. Saved-tensor hooks put in their place how to
have them again: this view of that unit. When backward asks for it, the unit is gathered again, once, and let go when the
gradient of its buffer is complete, which is also when that gradient is reduce-scattered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _torch
from .._spec.accumulation import Arrivals
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._transforms.keep import known, unseen
from .._transforms.rerun import running
from .._transforms.special import set_attributes
from .buffers import install_buffers
from .casting import buffer_dtypes, cast_around
from .fittings import fittings
from .modes import Gathered, Scheduled, choose, given
from .recompute import Replaced, params_of, recomputed, replaced
from .resting import hooks_around, resting
from .swap import CHANGING, Attributes, Parameters, Place, restored, this_thread
from .watch import written_error

__all__ = ["Call"]


class Call:
    """The state of one functional_call, or of one run of a module in it that is recomputed."""

    def __init__(
        self,
        place: Place,
        params: Mapping[str, Tensor],
        spec: PartitionSpec,
        reduction: Reduction,
        prefetch: int,
        in_flight: int,
        arrivals: Arrivals | None = None,
        *,
        again: bool = True,
        thread: int | None = None,
    ) -> None:
        self.place, self.spec = place, spec
        self.reduction = reduction
        self.thread = this_thread(thread)
        self.ahead = prefetch, in_flight
        self.differentiable, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.outer = _torch.pack_hook()  # a checkpoint around the call recomputes it whole: leave that alone
        self.hook = self.outer  # what replaces saved tensors while forward runs
        self.outer_reentrant = _torch.reentrant_checkpoints()
        self.rests = resting(params, spec, self.outer, again=again)
        replaces = self.outer is None or self.rests is not None
        self.mode = choose(params, spec, reduction, self.ahead, arrivals, again=again, replaces=replaces)
        self.active = given(params, spec)
        self.written: tuple[Unit, str] | None = None  # a parameter that forward has written to
        self.scopes: list[list[Gathered]] = [[]]
        self.inside = running()
        self.used: set[str] | None = None if again else set()  # the parameters that a module to be run again has read
        self.pending: list[Gathered] = []  # left, but not freed before the next gather, in case the forward ends here
        self.lost: list[str] = []  # the buffers that forward has changed and nobody asked for

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], buffers: dict[str, Tensor] | None, method: str | None) -> Any:
        """The model, or another of its methods than forward, called on the parameters."""
        with self.installed(buffers):
            run = getattr(self.place.modules[""], method or "__call__")
            return cast_around(run, self.spec.places[""].precision)(*args, **kwargs)

    def gather(self, unit: Unit) -> Gathered:
        """The unit, gathered now or still alive."""
        if running() != self.inside:
            raise RuntimeError(
                f"unit '{unit.key}' is read inside of {running()[-1]}, which does not own it: there it would have no gradient; "
                "expected the parameter among the arguments, or P(remat=True) for a module around both"
            )
        if (hook := _torch.pack_hook()) is not self.hook or not torch.is_grad_enabled():
            self._refuse_checkpoints(unit, hook)
        gathered = self.active.get(unit.key)
        if gathered is not None and (not gathered.level or gathered.level <= _torch.level()):
            if gathered in self.pending:
                self.pending.remove(gathered)
                self.scopes[-1].append(gathered)
            return gathered
        self.free(self.pending)
        if self.written:
            raise written_error(*self.written)
        probe = torch.is_inference_mode_enabled() and not self.inference
        # a gather under no_grad or in inference mode must serve uses outside of it
        with torch.inference_mode(False) if probe else contextlib.nullcontext(), torch.set_grad_enabled(self.differentiable):
            gathered = unseen(self.mode.gather, unit)
        gathered.watch.views = known(gathered.views, unit.key, self.mode.params.get(unit.key))
        if self.rests and not gathered.frees:
            self.rests.hold(gathered.views)
        self.active[unit.key] = gathered
        self.scopes[-1].append(gathered)
        return gathered

    def _refuse_checkpoints(self, unit: Unit, hook: Callable[..., object] | None) -> None:
        inside = hook is not self.outer and hook is not None and hook.__module__ == "torch.utils.checkpoint"
        quiet = self.differentiable and not torch.is_grad_enabled()  # as in a reentrant checkpoint, or by the user's wish
        if inside or (quiet and _torch.reentrant_checkpoints() > self.outer_reentrant):
            raise RuntimeError(
                f"unit '{unit.key}': torch.utils.checkpoint inside functional_call would recompute with the module's own "
                "parameters, not with these: expected none; checkpoint the functional_call as a whole"
            )

    def free(self, many: list[Gathered], *, keep_for_backward: bool = False) -> None:
        """Let go of these, or leave their buffers to backward."""
        for gathered in many:
            if (what := gathered.watch.written()) and not self.written:
                self.written = gathered.unit, what
            if self.active.get(gathered.unit.key) is gathered:
                del self.active[gathered.unit.key]
            gathered.views = ()
            self.mode.leave(gathered, keep=keep_for_backward)
        many.clear()

    def enter(self, units: list[Unit]) -> None:
        """A module's run begins: its units are gathered, and what is gathered from here on is freed where it ends."""
        self.scopes.append([])
        try:
            for unit in units:
                self.gather(unit)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """The run that was entered last has ended."""
        for gathered in self.scopes.pop():
            (self.pending if gathered.frees else self.scopes[0]).append(gathered)

    @contextlib.contextmanager
    def installed(self, buffers: dict[str, Tensor] | None, attributes: Attributes | None = None) -> Generator[None]:
        """The modules with gathered parameters, and with other attributes where there are any; as they were afterwards."""
        hooks = contextlib.nullcontext()
        if (around := hooks_around(self.mode.live, self.rests)) is not None:
            self.hook = around.pack
            hooks = around.here(self.hook)
        with contextlib.ExitStack() as stack:
            with CHANGING:
                before = stack.enter_context(restored(self.place.modules, self.thread))
                for module, others in (attributes or {}).items():
                    vars(module).clear()
                    vars(module).update(others)
                dtypes = None if attributes else buffer_dtypes(self.spec)  # a run inside finds them cast
                updated, changed = install_buffers(self.place.modules, buffers, dtypes)
                roots = self._install_parameters(attributes or before)
            try:
                with hooks, self._unwritten():
                    for unit in roots:
                        self.gather(unit)
                    for module, attr, unit, i in self.place.scripted:
                        setattr(module, attr, self.read(unit, i))
                    yield
            finally:
                self.mode.end_forward()
                if buffers is not None:
                    buffers.update(updated())
            self.lost = changed()

    @contextlib.contextmanager
    def _unwritten(self) -> Generator[None]:
        """Within this, forward runs; what is gathered afterwards is let go. RuntimeError if it wrote to a parameter."""
        cause: Exception | None = None
        interrupted = True
        try:
            yield
            interrupted = False
        except Exception as error:
            cause, interrupted = error, False
            if self.active and "is a view and is being modified inplace" in str(error):  # torch has refused it already
                unit = next(reversed(self.active.values())).unit
                self.written = self.written or (unit, f"a view, as {', '.join(repr(p.name) for p in unit.params)}")
            raise
        finally:
            self.free(self.pending, keep_for_backward=True)
            self.free(self.scopes[0], keep_for_backward=True)
            self.free(list(self.active.values()))
            if self.written and not interrupted:
                raise written_error(*self.written) from cause

    def _install_parameters(self, before: Attributes) -> list[Unit]:
        """Put the gathering mappings and the scopes into the modules; the units of the place itself are left to the caller."""
        modules = self.place.modules
        read = self.read
        for module, owned in self.place.owned.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            attributes = vars(module)
            attributes["_parameters"] = Parameters(attributes["_parameters"], owned, read, self.thread)
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
        return self.gather(unit).views[i]

    def replaced(self, before: Attributes) -> Replaced:
        """What forward has put in the place of parameters, but for those that it has put back."""
        views = {id(view) for gathered in self.active.values() for view in gathered.views}
        found = replaced(self.place, before)
        return {where: tensor for where, tensor in found.items() if id(tensor) not in views}

    def _scoped(self, forward: Callable[..., Any], units: list[Unit]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.enter(units)
            try:
                return forward(*args, **kwargs)
            finally:
                self.leave()

        return run

    def _recomputed(self, path: str, before: Attributes, forward: Callable[..., Any], units: list[Unit]) -> Callable[..., Any]:
        scoped = self._scoped(forward, units)

        @functools.cache  # it may run often in one call
        def insides() -> tuple[Place, PartitionSpec]:
            place = self.place.within(path)
            return place, self.spec.within(path, {unit.key for owned in place.owned.values() for unit, _ in owned.values()})

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            # in one run of a module around it this one may run again, in another not: what it reads counts alike
            if self.used is not None:
                self.used |= {unit.params[i].name for owned in insides()[0].owned.values() for unit, i in owned.values()}
            if self.inference or not _torch.differentiates():
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
                call = Call(place, params, spec, self.reduction, *self.ahead, again=False, thread=self.thread)
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
            self.enter(units)
            try:
                visits = [gathered.visit for gathered in self.scopes[-1] if gathered.visit]
                return recomputed(inside, place, before, params, spec, visits, args, kwargs, self.spec.places[path].remat)
            finally:
                self.leave()

        return run
