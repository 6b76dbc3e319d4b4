"""A rerun: a function that runs again, each time with what it was handed and could reach in its first run, and to the same end.

What it reaches is found before the first run (reach.py). Objects that hold tensors are copied for each run, with the
tensors of that run in them; in later runs so are those that the first run has changed, or anybody since. What the first run
has changed is then put into the caller's objects: tensors that it has left there are results.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import _torch
from ..._spec.remat import Remat
from .ambient import AmbientState
from .autograd_queries import find_autograd_queries
from .outcome import RunOutcome
from .reachable import TENSOR, ReachableObjects
from .refusals import DATA, QUERY_GETTERS, REGISTER_HOOK, RefusedFunctions
from .saved_results import SavedResults
from .snapshot import RunInputs, Snapshot

__all__ = ["RecomputedFunction", "recomputing_names"]


class _Running(threading.local):
    names: tuple[str, ...] = ()
    stacked = False


_RUNNING = _Running()


def recomputing_names() -> tuple[str, ...]:
    """The names of what runs now to run again, the innermost last."""
    return _RUNNING.names


class RecomputedFunction:
    """``call(*roots)`` as a function of all the tensors in its arguments, the same in every run."""

    def __init__(
        self, call: Callable[..., Any], name: str, roots: dict[str, Any], own: Iterable[nn.Module], remat: Remat
    ) -> None:
        self._call, self.name, self._own = call, name, set(own)
        self._labels = [*roots, "context"]
        self._labels_after = ["its result", "the context variables that it left", *self._labels]
        self._grad, self._forward_mode = torch.is_grad_enabled(), _torch.NoGradInForwardMode.is_active()
        levels = _torch.current_level() + _torch.in_forward_ad()  # of which plain autograd is another one, where it follows
        self._found: ReachableObjects | None = ReachableObjects(
            [*roots.values(), _variables()], self._own
        )  # until the first run has ended
        self._start, self._constants = Snapshot(self._found, self._own), self._found.constants
        levels += self._grad and any(_torch.unwrap(x).requires_grad for x in self._found.tensors)
        self._stacked = (_torch.current_level() > 0 and levels > 1) or _RUNNING.stacked
        if self._stacked:
            self._refuse_backward_hooks(self._found.objects)
        # (requires_grad, is_leaf) of each operand, where the function may ask; in a stack of transforms it is refused
        follows = (
            self._grad and not self._stacked and not _torch.is_traced() and any(x.requires_grad for x in self._found.tensors)
        )
        self._answers: list[tuple[bool, bool]] | None = None
        self._asked = find_autograd_queries(self._found.objects) if follows else frozenset[str]()
        if self._asked:
            self._answers = [(x.requires_grad, x.is_leaf) for x in self._found.tensors]
        # in a stack most runs are of transforms, in which what another has computed is something else
        self._kept = None if remat.save is None or self._stacked or _torch.is_traced() else SavedResults(remat, name)
        self._is_last = self._retained = False
        self._paths = [self._found.where((TENSOR, i), self._labels) for i in range(len(self._found.tensors))]
        self._surroundings: AmbientState | None = None
        self._changed: set[int] = set()
        self._first: RunOutcome | None = None
        self._left: tuple[ReachableObjects, RunOutcome] | None = None  # likewise

    @property
    def tensors(self) -> list[Tensor]:
        """The operands."""
        assert self._found is not None
        return list(self._found.tensors)

    def _refuse_backward_hooks(self, objects: Iterable[object]) -> None:
        """RuntimeError for a module's backward hook: torch drops it inside of forward mode, and a run again would not."""
        for module in objects:
            for hook in _backward_hooks_of(module) if isinstance(module, nn.Module) else ():
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise RuntimeError(
                    f"{self.name} reaches a {type(module).__name__} with the backward hook {name}, which in a stack of "
                    "transforms torch calls for one of them or for none: expected an autograd.Function that changes the "
                    "gradient, or the hook removed"
                )

    @contextlib.contextmanager
    def last_run(self) -> Generator[None]:
        """For the run that plain autograd makes for its gradient, which nobody comes back to for a derivative."""
        self._is_last, self._retained = True, _torch.is_graph_retained()
        try:
            with getattr(self._call, "last_run", contextlib.nullcontext)():
                yield
        finally:
            self._is_last = False

    def _watched(self, xs: Sequence[Tensor], surroundings: AmbientState) -> contextlib.AbstractContextManager[None]:
        """The first run keeps what the last one is handed."""
        if self._kept is None or _torch.current_level() or not (self._first is None or self._is_last):
            return contextlib.nullcontext()
        if self._first is None:
            return self._kept.first_run(xs, surroundings)
        return self._kept.last_run(xs, surroundings, retained=self._retained)

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        if self._answers is not None and not _torch.current_level():
            with torch.enable_grad():
                said = zip(xs, self._answers, self._paths, strict=True)
                xs = tuple(self._answering(x, *answers, path) for x, answers, path in said)
        versions = [_torch.version(x) for x in xs]
        made = self._start.made(xs, self._changed, self._found, self.name, self._paths)
        try:
            end, after = self._run(made, xs)
        except BaseException:
            if self._found is not None:
                made.undo(self._found)
            raise
        finally:
            made.restore()
        for x, version, path in zip(xs, versions, self._paths, strict=True):
            if _torch.version(x) != version:
                raise RuntimeError(
                    f"{self.name} changed a tensor in place that it was handed: {path}; expected it as it was, for it runs "
                    "again: change a copy of it"
                )
        if self._first is None:
            self._changed = end.changed(self._start)
            self._start.check_makeable(self._changed, self.name)
            self._first, self._left = end, (after, end)
            return tuple(r.detach() for r in end.results)  # autograd writes on what a Function returns, which may be a constant
        if difference := end.differs(self._first, after, self._labels_after):
            raise RuntimeError(f"{self.name} does not compute in every run what it computed in its first one: {difference}")
        return tuple(end.results)

    def _answering(self, x: Tensor, requires_grad: bool, is_leaf: bool, path: str) -> Tensor:
        """Return an operand of a run that says of itself what the caller's says: the first run has none with a graph."""
        if self._first is None and requires_grad:
            x = x.detach().requires_grad_()
        if is_leaf and not x.is_leaf and self._asked - {"requires_grad"}:
            raise RuntimeError(
                f"{self.name} may read is_leaf or grad_fn of {path}, which is a leaf, and is none where its gradient is "
                "differentiated again: expected it not to, or a view of the leaf (x.view_as(x))"
            )
        return x.view_as(x) if x.requires_grad and x.is_leaf and not is_leaf else x

    def _run(self, made: RunInputs, xs: Sequence[Tensor]) -> tuple[RunOutcome, ReachableObjects]:
        before, stacked = recomputing_names(), _RUNNING.stacked
        _RUNNING.names, _RUNNING.stacked = (*before, self.name), self._stacked
        try:
            if self._surroundings is None:
                self._surroundings = AmbientState(xs)
                watched = self._watched(xs, self._surroundings)
                with torch.set_grad_enabled(self._grad), _context(made.roots[-1]), self._in_stack(), watched:
                    out, left = self._call(*made.roots[:-1]), _variables()
                self._surroundings.ended()
            else:
                with self._surroundings.as_they_were(), torch.set_grad_enabled(self._grad):
                    with self._in_stack(), self._watched(xs, self._surroundings):
                        out, left = contextvars.Context().run(self._in_context, made.roots)
                    self._surroundings.check_end(self.name)
        finally:
            _RUNNING.names, _RUNNING.stacked = before, stacked
        after = ReachableObjects([out, left, *made.roots], self._own, self._constants, made.objects)
        end = RunOutcome(after, made, xs)
        if self._first is None:
            self._check_results(end, after, xs)
        return end, after

    def _in_context(self, roots: Sequence[Any]) -> tuple[Any, dict[contextvars.ContextVar[Any], Any]]:
        """Run again in a context of its own: what the first run has set, and nobody had before it, is not set there."""
        with _context(roots[-1]):
            return self._call(*roots[:-1]), _variables()

    @contextlib.contextmanager
    def _in_stack(self) -> Generator[None]:
        """Within this, the function runs as all transforms around its first run expect."""
        # the last mode sees a function first, and by whose code it is called
        with _torch.NoGradInForwardMode() if self._forward_mode else contextlib.nullcontext(), self._of_one_level():
            yield

    def _of_one_level(self) -> contextlib.AbstractContextManager[object]:
        """Refuses what means one derivative of a stack: which one is another question in a run again."""
        if not self._stacked:
            return contextlib.nullcontext()
        end = f"which in a stack of transforms means one of them, and not the same one when {self.name} runs again"
        return RefusedFunctions(
            {
                DATA: f"{self.name} reads tensor.data, {end}: expected tensor.detach(), which means all of them",
                **{
                    getter: f"{self.name} reads tensor.{name}, {end}: expected it not to, or no remat"
                    for name, getter in QUERY_GETTERS.items()
                },
                REGISTER_HOOK: f"{self.name} calls tensor.register_hook, {end}: expected an autograd.Function, or no remat",
            }
        )

    def _check_results(self, end: RunOutcome, after: ReachableObjects, xs: Sequence[Tensor]) -> None:
        """RuntimeError for what has a derivative in the first run by something else than an operand."""
        for k, result in zip(end.numbers, end.results, strict=True):
            tracked = self._grad and _torch.unwrap(result).requires_grad
            if tracked and any(_torch.unwrap(x).requires_grad for x in xs):
                tracked = self._answers is not None and not _torch.depends_only_on(result, xs)
            if tracked or _torch.level_of(result) > _torch.current_level():
                where = after.where((TENSOR, k), self._labels_after)
                if self._answers is None and _differentiates_itself(_torch.unwrap(result), xs):
                    raise RuntimeError(
                        f"{self.name} calls requires_grad_() on one of its arguments, or a tensor in its memory, and {where} "
                        "depends on that: in a run without a graph its derivatives are not to be told from others; expected "
                        "the gradient by torch.func.grad, as of forces: torch.func.grad(self.energy)(x)"
                    )
                raise RuntimeError(
                    f"{self.name} reads a tensor of the running computation that is neither an argument nor reached from one "
                    f"({where} depends on it), where it would have no "
                    "gradient: expected it among the arguments"
                )

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """The result of the first run, with these results in it; what it has changed is in the caller's objects."""
        assert self._found is not None
        assert self._left is not None
        (after, end), found = self._left, self._found
        self._left = self._found = None
        out, left = end.put(after, found, self._changed, outputs)
        end.results = []
        for var, value in left.items():
            if var.get(left) is not value:  # a default that nobody has
                var.set(value)
        return out


def _variables() -> dict[contextvars.ContextVar[Any], Any]:
    """Return all context variables that are set, with their values."""
    return dict(contextvars.copy_context().items())


def _backward_hooks_of(module: nn.Module) -> list[Any]:
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def _differentiates_itself(result: Tensor, xs: Sequence[Tensor]) -> bool:
    """Whether the graph of a result ends in a tensor that shares memory with an operand, none of which has a graph."""
    memory = {_torch.storage_id(_torch.unwrap(x)) for x in xs if _torch.is_strided(_torch.unwrap(x))}
    leaves = (getattr(node, "variable", None) for node, _ in _torch.iter_nodes(result))
    return any(leaf is not None and _torch.is_strided(leaf) and _torch.storage_id(leaf) in memory for leaf in leaves)


@contextlib.contextmanager
def _context(values: dict[contextvars.ContextVar[Any], Any]) -> Generator[None]:
    """Within this, context variables have these values."""
    tokens = [(var, var.set(value)) for var, value in values.items() if var.get(values) is not value]
    try:
        yield
    finally:
        for var, token in reversed(tokens):
            var.reset(token)
