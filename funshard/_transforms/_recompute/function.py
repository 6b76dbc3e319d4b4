"""A function that runs again for its derivatives: every run gets what the first one was given, and must end as it did.

What the function reaches is found before the first run (reachable.py). Each run gets copies of the objects that contain
tensors, with its own tensors in them, and of those that have changed since (snapshot.py). What the first run has changed is
then written into the caller's objects; tensors that it has left in them are results (snapshot.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ... import _torch
from ..._spec.options import Remat
from ..._torch import DATA
from ..grad import assume_differentiated, is_assumed_differentiated
from .ambient import AmbientState, compared_variables, context_variables, set_context_variables
from .code_reads import GRAD, QUERY_GETTERS, REGISTER_HOOK, ForbiddenFunctions, find_code_reads
from .reachable import TENSOR, ReachableObjects, attributes_equal, check_result_attributes, copy_attributes, with_attributes
from .saved_results import SavedResults
from .snapshot import RunInputs, RunOutcome, Snapshot

__all__ = ["RUNNING", "RecomputedFunction", "recomputing_names"]


# --- Checks of what a recomputed function reaches, and of the graph of its operands and results ---


def check_backward_hooks(objects: Iterable[object], name: str) -> None:
    """Raise RuntimeError for a module's backward hook: torch drops it inside forward mode, and another run would not."""
    for module in objects:
        hooks = (module._backward_pre_hooks, module._backward_hooks) if isinstance(module, nn.Module) else ()
        for hook in (hook for some in hooks for hook in some.values()):
            hook_name = getattr(hook, "__qualname__", type(hook).__name__)
            raise RuntimeError(
                f"{name} reaches a {type(module).__name__} with the backward hook {hook_name}, which in a stack of transforms "
                "torch calls for one of them or for none: expected an autograd.Function that changes the gradient, or the hook "
                "removed"
            )


def find_parameter(result: Tensor, objects: Iterable[object]) -> str:
    """Return a description of a module's parameter in the graph of a result; empty if none of these modules has one there."""
    nodes = [node for node, _ in _torch.iter_nodes(result)]
    return describe_parameter(
        {id(x) for node in nodes for x in (node, getattr(node, "variable", None)) if x is not None}, objects
    )


def describe_parameter(ids: set[int], objects: Iterable[object]) -> str:
    """Return a description of the first parameter of these modules that has, or whose node has, one of these ids."""
    for module in objects:
        for name, parameter in module._parameters.items() if isinstance(module, nn.Module) else ():
            if parameter is not None and (id(parameter) in ids or id(parameter.grad_fn) in ids):
                return f"parameter '{name}' of a {type(module).__name__}"
    return ""


def check_not_read(name: str, parameter: str) -> None:
    """Raise RuntimeError if the function of this name reads a parameter, of which this is a description."""
    if parameter:
        raise RuntimeError(
            f"{name} reads {parameter}, which is not one of its arguments and would have no gradient: expected "
            "fs.remat(lambda p, x: torch.func.functional_call(module, p, x)), or P(remat=True) of a unit"
        )


def has_grad(x: Tensor) -> bool:
    """Return whether an operand has a ``grad``."""
    x = _torch.unwrap(x)
    return (x.is_leaf or x.retains_grad) and x.grad is not None


def differentiates_operand(result: Tensor, xs: Sequence[Tensor]) -> bool:
    """Return whether the graph of a result ends in a tensor that shares memory with an operand, none of which has a graph."""
    memory = {_torch.storage_id(_torch.unwrap(x)) for x in xs if _torch.is_strided(_torch.unwrap(x))}
    leaves = (getattr(node, "variable", None) for node, _ in _torch.iter_nodes(result))
    return any(leaf is not None and _torch.is_strided(leaf) and _torch.storage_id(leaf) in memory for leaf in leaves)


# --- Tensors of the transforms around a run that the run reads without having been given them ---
#
# torch takes such a tensor for a constant: the run is below those transforms. So its derivative would be missing.

_DETACH = frozenset({torch.detach, torch.Tensor.detach})


class OuterTensors(TorchFunctionMode):
    """A mode that records the tensors of outer transforms that functions with tensors as results are given.

    Args:
        name: The function that runs, for errors.
        objects: What it reaches. Errors name parameters of modules among these.
    """

    def __init__(self, name: str, objects: Iterable[object]) -> None:
        super().__init__()
        self._name, self._objects, self._keys = name, objects, _torch.dispatch_keys()
        self._tensors: dict[int, Tensor] = {}  # by id

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if not any(map(_may_be_outer, (*args, *kwargs.values()))):  # nearly always
            return func(*args, **kwargs)
        level = _torch.current_level()
        outer = [x for x in _iter_tensors((*args, *kwargs.values())) if _torch.level_of(x) > level]
        for x in filter(_torch.is_batched, outer):
            self._refuse(x)
        out = func(*args, **kwargs)
        if outer and func not in _DETACH and next(_iter_tensors((out,)), None) is not None:
            self._tensors.update((id(x), x) for x in outer)
        return out

    def check(self) -> None:
        """Raise RuntimeError if a running transform differentiates one of the recorded tensors."""
        for x in self._tensors.values():
            # the levels of a tensor are those inside of another wrapper around it
            if _torch.tracking_levels(_torch.wrap_for_ended_level(x), self._keys):
                self._refuse(x)

    def _refuse(self, x: Tensor) -> NoReturn:
        """Raise RuntimeError for a tensor that is neither an argument nor reached from one."""
        check_not_read(self._name, describe_parameter({id(x)}, self._objects))
        raise RuntimeError(
            f"{self._name} reads a tensor of shape {list(x.shape)} that is neither an argument nor reached from one, as in a "
            "global or an attribute of a class, and that a transform around it has computed: there it would have no gradient; "
            "expected it among the arguments"
        )


def _may_be_outer(value: Any) -> bool:
    """Return whether a value is a tensor of a transform, or may contain one."""
    return _torch.is_wrapped(value) if isinstance(value, Tensor) else type(value) in (tuple, list)


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _iter_tensors(value)


# --- The runs of a function ---


class _Running(threading.local):
    """The recomputed functions that this thread runs."""

    names: tuple[str, ...] = ()
    in_stack = False


RUNNING = _Running()
"""The names are what `recomputing_names` returns, to be read for each parameter that forward reads."""


def recomputing_names() -> tuple[str, ...]:
    """Return the names of the recomputed functions that run now, the innermost last."""
    return RUNNING.names


class RecomputedFunction:
    """``call(*roots)`` as a function of all the tensors in its arguments, the same in every run."""

    def __init__(
        self, call: Callable[..., Any], name: str, roots: dict[str, Any], owned: Iterable[nn.Module], remat: Remat
    ) -> None:
        owned = list(owned)
        self._call, self.name, self._owned = call, name, set(owned)
        self._root_names = [*roots, "context"]
        self._root_names_after = ["its result", "the context variables that it left", *self._root_names]
        self._grad, self._forward_mode = torch.is_grad_enabled(), _torch.NoGradInForwardMode.is_active()
        self._attention = _torch.current_attention()
        reached = ReachableObjects([*roots.values(), context_variables()], self._owned)
        self._reached: ReachableObjects | None = reached  # until the first run has ended
        self._snapshot, self._constants = Snapshot(reached, self._owned), reached.constants
        levels = _torch.current_level() + _torch.is_in_forward_ad()  # plain autograd is another one, where it records
        levels += self._grad and any(_torch.unwrap(x).requires_grad for x in reached.tensors)
        self._in_stack = (_torch.current_level() > 0 and levels > 1) or RUNNING.in_stack
        if self._in_stack:
            check_backward_hooks(reached.objects, name)
        # (requires_grad, is_leaf) of each operand, if the function may ask; a stack of transforms refuses the question
        records = self._grad and not self._in_stack and not _torch.is_traced() and any(x.requires_grad for x in reached.tensors)
        has_grads = any(map(has_grad, reached.tensors))
        reads = find_code_reads(reached.objects)
        self._generators = reads.find_generators({id(obj) for obj in reached.objects})
        queries = reads.queries if records or has_grads else frozenset[str]()
        self._queries = queries - {"grad"} if records else frozenset[str]()
        self._may_read_grads = has_grads and "grad" in queries
        self._answers = [(x.requires_grad, x.is_leaf) for x in reached.tensors] if self._queries else None
        # most runs in a stack are of transforms, where the results of another run have other values
        saves = remat.save is not None and not self._in_stack and not _torch.is_traced()
        self._saved_results = SavedResults(remat, name, owned[0] if owned else roots["the function"]) if saves else None
        # a module has no closure: most name no variable, and then the mode would only cost time
        watches = _torch.current_level() and (not owned or reads.may_read_tensors())
        self._outer_tensors = OuterTensors(name, reached.objects) if watches else None
        self._is_last = self._is_graph_kept = False
        self._in_transform = _torch.current_level() > 0 or is_assumed_differentiated()  # later runs may be below it
        self._paths = [reached.path_of((TENSOR, i), self._root_names) for i in range(len(reached.tensors))]
        self._attributes = {i: dict(vars(x)) for i, x in enumerate(reached.tensors) if vars(x)}
        self._ambient: AmbientState | None = None
        self._changed: set[int] = set()
        self._first: RunOutcome | None = None
        self._left: tuple[ReachableObjects, RunOutcome] | None = None  # by the first run, until `finish`

    @property
    def tensors(self) -> list[Tensor]:
        """The operands, before the first run has ended."""
        assert self._reached is not None
        return list(self._reached.tensors)

    @property
    def has_changed_objects(self) -> bool:
        """Whether the first run has changed an object that the function reaches."""
        return bool(self._changed)

    @contextlib.contextmanager
    def last_run(self) -> Generator[None]:
        """Mark the run within this context as the last: plain autograd runs it for its gradient, and it never runs again."""
        self._is_last, self._is_graph_kept = True, _torch.is_graph_retained()
        try:
            with getattr(self._call, "last_run", contextlib.nullcontext)():
                yield
        finally:
            self._is_last = False

    def _save_or_reuse(self, xs: Sequence[Tensor], ambient: AmbientState) -> contextlib.AbstractContextManager[None]:
        """Save results of operators in the first run, and reuse them in the last one."""
        if self._saved_results is None or _torch.current_level() or not (self._first is None or self._is_last):
            return contextlib.nullcontext()
        if self._first is None:
            return self._saved_results.first_run(xs, ambient)
        return self._saved_results.last_run(xs, ambient, retained=self._is_graph_kept)

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Run the function, and return all tensors that can be reached afterwards and are no operands."""
        if self._answers is not None and not _torch.current_level():
            with torch.enable_grad():
                operands = zip(xs, self._answers, self._paths, strict=True)
                xs = tuple(self._with_answers(x, *answers, path) for x, answers, path in operands)
        if self._attributes:
            xs = tuple(with_attributes(x, self._attributes.get(i)) for i, x in enumerate(xs))
        versions = [(_torch.version(x), len(x._backward_hooks or ())) for x in xs]
        inputs = RunInputs(self._snapshot, xs, self._changed, self._reached, self.name)
        try:
            outcome, after = self._run(inputs, xs)
        except BaseException:
            if self._reached is not None:
                inputs.undo_changes(self._reached)
            raise
        finally:
            inputs.restore_modules()
        for x, (version, hooks), path in zip(xs, versions, self._paths, strict=True):
            if _torch.version(x) != version:
                raise RuntimeError(
                    f"{self.name} changed in place a tensor that it was given: {path}; expected it unchanged, because the "
                    "function runs again; change a copy"
                )
            if len(x._backward_hooks or ()) != hooks:
                raise RuntimeError(
                    f"{self.name} calls register_hook on a tensor that it was given, {path}, where the hook would miss the "
                    "gradient from outside: expected it on x.view_as(x), or where the tensor comes from"
                )
        for i, x in enumerate(xs):
            if (now := vars(x)) and not attributes_equal(now, self._attributes.get(i, {})):
                raise RuntimeError(
                    f"{self.name} sets an attribute of a tensor that it was given: {self._paths[i]} has {[*now]}; expected "
                    "the tensor unchanged, because the function runs again"
                )
        if self._first is None:
            self._changed = outcome.find_changed(self._snapshot)
            self._snapshot.check_copyable(self._changed, self.name)
            self._first, self._left = outcome, (after, outcome)
            return tuple(
                r.detach() for r in outcome.results
            )  # autograd writes on what a Function returns; it may be a constant
        if difference := outcome.find_difference(self._first, after, self._root_names_after):
            raise RuntimeError(f"{self.name} does not compute in every run what it computed in its first one: {difference}")
        return tuple(outcome.results)

    def _with_answers(self, x: Tensor, requires_grad: bool, is_leaf: bool, path: str) -> Tensor:
        """Return an operand that answers queries as the caller's tensor does: in the first run operands have no graph."""
        if self._first is None and requires_grad:
            x = x.detach().requires_grad_()
        if is_leaf and not x.is_leaf and self._queries & {"is_leaf", "grad_fn"}:
            raise RuntimeError(
                f"{self.name} may read is_leaf or grad_fn of {path}, which is a leaf, and is none where its gradient is "
                "differentiated again: expected it not to, or a view of the leaf (x.view_as(x))"
            )
        return x.view_as(x) if x.requires_grad and x.is_leaf and not is_leaf else x

    def _run(self, inputs: RunInputs, xs: Sequence[Tensor]) -> tuple[RunOutcome, ReachableObjects]:
        """Run the function in the surroundings of its first run. Return its outcome and the objects that it has reached."""
        before = RUNNING.names, RUNNING.in_stack
        RUNNING.names, RUNNING.in_stack = (*before[0], self.name), self._in_stack
        try:
            if self._ambient is None:
                self._ambient = AmbientState(xs, self._generators)
                saving = self._save_or_reuse(xs, self._ambient)
                with (
                    assume_differentiated(False),
                    torch.set_grad_enabled(self._grad),
                    set_context_variables(inputs.roots[-1]),
                    self._in_transforms(xs),
                    saving,
                    self._outer_tensors or contextlib.nullcontext(),
                ):
                    out, variables = self._call(*inputs.roots[:-1]), compared_variables()
                self._ambient.record_end()
            else:
                with assume_differentiated(self._in_transform), self._ambient.restored(), torch.set_grad_enabled(self._grad):
                    with self._in_transforms(xs), self._save_or_reuse(xs, self._ambient):
                        out, variables = contextvars.Context().run(self._run_in_context, inputs.roots)
                    self._ambient.check_end(self.name)
        finally:
            RUNNING.names, RUNNING.in_stack = before
        after = ReachableObjects([out, variables, *inputs.roots], self._owned, self._constants, inputs.objects)
        outcome = RunOutcome(after, inputs, xs)
        if self._first is None:
            self._check_deferred(out, outcome, after)
            self._check_results(outcome, after, xs)
            check_result_attributes(outcome.results, self.name)
        return outcome, after

    def _run_in_context(self, roots: Sequence[Any]) -> tuple[Any, dict[contextvars.ContextVar[Any], Any]]:
        """Run in a new context, where variables that only the first run has set are not set."""
        with set_context_variables(roots[-1]):
            return self._call(*roots[:-1]), compared_variables()

    @contextlib.contextmanager
    def _in_transforms(self, xs: Sequence[Tensor]) -> Generator[None]:
        """Run the function as all transforms around its first run expect."""
        # the last mode sees a function first, and by whose code it is called
        mode = _torch.NoGradInForwardMode() if self._forward_mode else contextlib.nullcontext()
        with mode, _torch.use_attention(self._attention), self._refuse_level_queries(), self._refuse_grads(xs):
            yield

    def _refuse_grads(self, xs: Sequence[Tensor]) -> contextlib.AbstractContextManager[object]:
        """Refuse to read the gradient that an operand had before the first run: the tensors of a run have none."""
        if not self._may_read_grads:
            return contextlib.nullcontext()
        message = f"{self.name} reads tensor.grad of one of its arguments, which no run is given: expected it as an argument"
        return ForbiddenFunctions({GRAD: message}, xs)

    def _refuse_level_queries(self) -> contextlib.AbstractContextManager[object]:
        """Refuse what concerns one derivative of a stack: which one that is differs between runs."""
        if not self._in_stack:
            return contextlib.nullcontext()
        end = f"which in a stack of transforms means one of them, and not the same one when {self.name} runs again"
        return ForbiddenFunctions(
            {
                DATA: f"{self.name} reads tensor.data, {end}: expected tensor.detach(), which means all of them",
                **{
                    getter: f"{self.name} reads tensor.{name}, {end}: expected it not to, or no remat"
                    for name, getter in QUERY_GETTERS.items()
                },
                REGISTER_HOOK: f"{self.name} calls tensor.register_hook, {end}: expected an autograd.Function, or no remat",
            }
        )

    def _check_deferred(self, out: Any, outcome: RunOutcome, after: ReachableObjects) -> None:
        """Raise TypeError for a generator or another new iterator that gives tensors later, when no run records them."""
        deferred = [out] if inspect.iscoroutine(out) or inspect.isasyncgen(out) else outcome.find_deferred(after)
        for obj in deferred:
            raise TypeError(
                f"{self.name} returns or stores a {type(obj).__name__}, which gives tensors after the function has ended, "
                "where they have no gradient: expected the tensors themselves, as in list(...)"
            )

    def _check_results(self, outcome: RunOutcome, after: ReachableObjects, xs: Sequence[Tensor]) -> None:
        """Raise RuntimeError for a result of the first run that has a derivative by another tensor than an operand."""
        for k, result in zip(outcome.result_indices, outcome.results, strict=True):
            tracked = self._grad and _torch.unwrap(result).requires_grad
            if tracked and any(_torch.unwrap(x).requires_grad for x in xs):
                tracked = self._answers is not None and not _torch.depends_only_on(result, xs)
            if tracked or _torch.level_of(result) > _torch.current_level():
                path = after.path_of((TENSOR, k), self._root_names_after)
                if self._answers is None and differentiates_operand(_torch.unwrap(result), xs):
                    raise RuntimeError(
                        f"{self.name} calls requires_grad_() on one of its arguments, or a tensor in its memory, and {path} "
                        "depends on that: a run without a graph cannot tell its derivatives from others; expected "
                        "the gradient by torch.func.grad, as of forces: torch.func.grad(self.energy)(x)"
                    )
                check_not_read(self.name, find_parameter(_torch.unwrap(result), after.objects))
                raise RuntimeError(
                    f"{self.name} reads a tensor of the running computation that is neither an argument nor reached from one "
                    f"({path} depends on it), where it would have no gradient: expected it among the arguments"
                )

    def finish(self, outputs: Sequence[Tensor]) -> Any:
        """Write what the first run has changed into the caller's objects, with these results, and return its result."""
        assert self._reached is not None
        assert self._left is not None
        (after, outcome), reached = self._left, self._reached
        if self._outer_tensors is not None:
            self._outer_tensors.check()
            self._outer_tensors = None
        outputs = copy_attributes(outcome.results, outputs)
        self._left = self._reached = None
        out, variables = outcome.write_back(after, reached, self._changed, outputs)
        outcome.results = []
        for var, value in variables.items():
            if var.get(variables) is not value:  # `variables` as the default, which no variable has as its value
                var.set(value)
        return out
