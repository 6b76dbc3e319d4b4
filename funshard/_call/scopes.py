"""Scopes: the units that are gathered while forward runs, and the runs of modules that they are freed after.

A unit is gathered when its module is entered (or, used from outside, when first touched), and freed when the module that was
running then is left. To free is to drop the reference: what user code still holds stays readable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from .. import _torch
from .._core.unit import Unit
from .._transforms.ambient import RUNNING, run_unrecorded
from .modes import Inline, UnitInUse, units_given_full
from .write_watch import write_error

_VIEW_ERRORS = ("is a view and is being modified inplace", "another view of its base has been modified inplace")
"""Words of torch's errors for a write to a parameter, the second where a compiler traces it."""


class UnitScopes:
    """The units in use in one call, by the run of a module that gathered them; the first scope is the call's own.

    After a run, units with ``reshard=True`` are freed at the next gather, and others at the end of the call.
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

    def gather(self, unit: Unit) -> UnitInUse:
        """Return the unit; gather it unless it is in use."""
        if RUNNING.names != self._inside:
            name = RUNNING.names[-1]
            instead = next(text for kind, text in _INSTEAD.items() if name.startswith(kind))
            raise RuntimeError(
                f"unit '{unit.key}' is read inside of {name}, which does not own it: there it would have no gradient; "
                f"expected {instead}"
            )
        hooks = _torch.current_saved_tensor_hooks(False)
        if (hook := hooks[0] if hooks else None) is not self.hook or not torch.is_grad_enabled():
            self._refuse_checkpoints(unit, hook)
        gathered = self.active.get(unit.key)
        if gathered is not None and (not gathered.level or gathered.level <= _torch.current_level()):
            if gathered in self._pending:
                self._pending.remove(gathered)
                self._scopes[-1].append(gathered)
            return gathered
        self.free(self._pending)
        if self._written:
            raise write_error(*self._written)
        probe = torch.is_inference_mode_enabled() and not self._inference
        # a gather under no_grad or in inference mode must serve uses outside of it
        with torch.inference_mode(False) if probe else contextlib.nullcontext(), torch.set_grad_enabled(self._differentiable):
            gathered = run_unrecorded(self._mode.gather, unit)
        gathered.watch.views = gathered.views
        if self._exclude and not gathered.reshard:
            self._exclude(gathered.views)
        self.active[unit.key] = gathered
        self._scopes[-1].append(gathered)
        return gathered

    def _refuse_checkpoints(self, unit: Unit, hook: Callable[..., object] | None) -> None:
        """Raise RuntimeError if torch.utils.checkpoint inside the call runs a module with this unit."""
        inside = hook is not self._outer and hook is not None and hook.__module__ == "torch.utils.checkpoint"
        quiet = self._differentiable and not torch.is_grad_enabled()  # as in a reentrant checkpoint, or by the user's wish
        if inside or (quiet and _torch.count_reentrant_checkpoints() > self._outer_reentrant):
            raise RuntimeError(
                f"unit '{unit.key}': torch.utils.checkpoint inside functional_call would recompute with the module's own "
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
            self.free(self._pending, keep_for_backward=True)
            self.free(self._scopes[0], keep_for_backward=True)
            self.free(list(self.active.values()))
            if self._written and not interrupted:
                raise write_error(*self._written) from cause


_INSTEAD = {
    "module ": "the parameter among the arguments, or P(remat=True) for a module around both",
    "remat of ": (
        "P(remat=True) for the module that it runs, by itself or by functional_call; or the tensor alone among the arguments, "
        "as in fs.remat(F.linear)(x, self.weight)"
    ),
    "": "the tensor alone among the arguments, as in F.linear(x, weight)",
}
"""What to write instead of a recomputed function that reads a unit's parameter, by the beginning of the function's name."""
