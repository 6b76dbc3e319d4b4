"""A function that runs again for its derivatives: every run gets what the first one was given, and must end as it did.

Its arguments are copied for each run (snapshot.py), with the run's own tensors in them. What the first run has changed in its
copies is then written into the caller's objects; tensors that it has left in them are results. All else is a constant.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ... import _torch
from ..._spec.options import Remat
from ..ambient import (
    RUNNING,
    AmbientState,
    ForbiddenFunctions,
    OuterTensors,
    check_backward_hooks,
    messages_in_stack,
    refuse_outer,
)
from ..grad import assume_differentiated, is_assumed_differentiated
from ..saved_tensors import SavedTensorHooks
from .saved_results import SavedResults
from .snapshot import ATOMS, Snapshot, is_watched, write_back

_SEEN_MODULES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules whose first call in a transform has shown which tensors they read."""


class _BeginGraph(_torch.Function):
    """The operands of the first run, whose graph begins here and answers queries as the last run's: it has no derivative."""

    @staticmethod
    def forward(name: str, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(x.detach() for x in xs)  # no views, which torch lets no one change in place: `_check_operands` names them

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            f"{ctx.name} hands on a tensor by a global, or by an object that it was not given, where it has no gradient: "
            "expected it in the result, or in an object among the arguments"
        )


class RecomputedFunction:
    """``call(*roots.values())`` as a function of all the tensors in its arguments, the same in every run.

    ``modules`` are those that it runs, the outermost first. A root of theirs that pickle cannot copy is a constant.
    """

    def __init__(
        self, call: Callable[..., Any], name: str, roots: dict[str, Any], modules: Sequence[nn.Module], remat: Remat
    ) -> None:
        self._call, self.name, self._modules = call, name, modules
        roots = {"context variables": _read_variables(), **roots}
        self._names = [*roots]
        parameters: Iterable[Any] = (vars(module).get("_parameters") or {} for module in modules)
        self._constants = {id(x) for own in parameters for x in dict.values(own)}  # nn.GRU lists its own; nothing is gathered
        self._before = self._freeze(roots)
        self._grad, self._forward_mode = torch.is_grad_enabled(), _torch.NoGradInForwardMode.is_active()
        self._attention = _torch.current_attention()
        tensors, level, is_tracing = self._before.tensors, _torch.current_level(), _torch.is_tracing()
        self._flags = [x.requires_grad for x in tensors]
        # plain autograd is another level, where it records
        levels = level + _torch.is_in_forward_ad() + (self._grad and any(_torch.unwrap(x).requires_grad for x in tensors))
        self._in_stack = (level > 0 and levels > 1) or RUNNING.in_stack
        objects = {id(x): x for module in modules for x in vars(module).values() if is_watched(x)}
        others = (x for top in self._before.others if isinstance(top, nn.Module) for x in top.modules())
        objects |= {id(x): x for x in others if x not in modules}
        self._watched = [(x, _read_object(x)) for x in objects.values()]  # what all runs share, and one could change
        if self._in_stack:
            check_backward_hooks(self._reached_modules(), name)
        self._records = self._grad and not self._in_stack and not is_tracing and any(self._flags)
        # most runs in a stack are of transforms, where the results of another run have other values
        saves = remat.save is not None and not self._in_stack and not is_tracing
        self._saved_results = SavedResults(remat, name) if saves else None
        self._outer_tensors = None
        if level and not (modules and modules[0] in _SEEN_MODULES):  # each time in a function, for a module in its first call
            self._outer_tensors = OuterTensors(name, self._reached_modules())
            _SEEN_MODULES.update(modules[:1])
        self._in_transform = level > 0 or is_assumed_differentiated()  # later runs may be below it
        self._is_last = False
        self._ambient: AmbientState | None = None
        self.has_changed_objects = False
        self.constants: Sequence[bool] = ()
        """Of each result whether it has no graph, where the first run records one."""
        self._first: tuple[list[bytes], list[Any]] | None = None  # what the first run left, and its results' layouts
        self._left: Any = None  # the same, until `finish`
        self._foreign, self._foreign_ids = list[weakref.ref[Tensor]](), set[int]()

    def _reached_modules(self) -> Iterator[nn.Module]:
        """Return the modules that run, and all those that the arguments reach."""
        return (m for top in (*self._modules, *self._before.others) if isinstance(top, nn.Module) for m in top.modules())

    def _freeze(self, roots: dict[str, Any]) -> Snapshot:
        """Return the snapshot of the arguments; raise TypeError for one that cannot be copied."""
        with contextlib.suppress(Exception):
            return Snapshot(roots.values(), constants=self._constants, start=len(roots) - 1)
        for own in roots["attribute"].values() if self._modules else ():
            for key in [key for key, value in own.items() if _find_error(value)]:
                del own[key]  # as a list of locks
        for name, value in roots.items():
            if error := _find_error(value):
                raise TypeError(
                    f"{self.name} was given an object that cannot be copied for another run, {name} ({error}): expected "
                    "tensors, and containers of them"
                )
        return Snapshot(roots.values(), constants=self._constants, start=len(roots) - 1)

    @property
    def tensors(self) -> list[Tensor]:
        """The operands, before the first run has ended."""
        return list(self._before.tensors)

    @contextlib.contextmanager
    def last_run(self) -> Generator[None]:
        """Mark the run within this context as the last: plain autograd runs it for its gradient, and it never runs again."""
        self._is_last = True
        try:
            with getattr(self._call, "last_run", contextlib.nullcontext)():
                yield
        finally:
            self._is_last = False

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Run the function, and return all tensors that can be reached afterwards and are no operands."""
        is_first, begins = self._first is None, set[Any]()
        if is_first and self._records and not _torch.current_level():
            xs = self._begin_graph(xs)
            begins = {x.grad_fn for x in xs} - {None}
        elif not is_first and self._grad and not _torch.current_level():  # no leaves, as in the first run
            xs = tuple([x.view_as(x) if x.requires_grad and x.is_leaf else x for x in xs])
        versions = [(_torch.version(x), len(x._backward_hooks or ()), len(vars(x))) for x in xs]
        roots, loaded = self._before.load(xs)
        out = self._run(roots, xs)
        self._check_operands(xs, versions)
        try:
            after = Snapshot([*roots, out], xs, self._before.others, self._constants, len(roots) - 1)
        except Exception as error:
            raise self._uncopied_result(error) from error
        results = after.tensors[len(xs) :]
        layouts = [(x.dtype, x.shape, x.device) for x in results]
        if self._first is not None:
            if self._first != (after.parts, layouts):
                self._check_same(after.parts, layouts)
            return tuple(results)
        self._check_watched()
        self._check_results(results, begins)
        self.constants = [not x.requires_grad for x in results] if begins and not self._in_transform else ()
        self.has_changed_objects = after.parts[:-1] != self._before.parts
        self._first, self._left = (after.parts, layouts), (after.tensors, out, loaded)
        return tuple(r.detach() for r in results)  # autograd writes on what a Function returns; it may be a constant

    def _begin_graph(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return operands that require grad as the caller's do, by nodes that lead to those where plain autograd has them."""
        with torch.enable_grad():
            given = zip(xs, self._before.tensors, self._flags, strict=True)
            sources = [x.detach().requires_grad_() if _torch.is_wrapped(t) else t for x, t, flag in given if flag]
            begun = iter(_BeginGraph.apply(self.name, *sources))
        return tuple(next(begun) if flag else x for x, flag in zip(xs, self._flags, strict=True))

    def _run(self, roots: Sequence[Any], xs: Sequence[Tensor]) -> Any:
        """Run the function in the surroundings of its first run, and return its result."""
        variables, *arguments = roots
        with contextlib.ExitStack() as stack:
            is_first = self._ambient is None
            stack.enter_context(RUNNING.within(self.name, self._in_stack, is_first))
            if self._ambient is None:
                self._ambient = AmbientState(xs, [x for x in self._before.others if isinstance(x, torch.Generator)])
            else:
                stack.enter_context(self._ambient.restored())
            stack.enter_context(assume_differentiated(self._in_transform and not is_first))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._forward_mode:  # the last mode sees a function first, and by whose code it is called
                stack.enter_context(_torch.NoGradInForwardMode())
            stack.enter_context(_torch.use_attention(self._attention))
            if self._in_stack:
                stack.enter_context(ForbiddenFunctions(messages_in_stack(self.name)))
            if self._saved_results is not None and not _torch.current_level() and (is_first or self._is_last):
                stack.enter_context(self._saved_results.run(self._ambient, is_first=is_first))
            if is_first and self._outer_tensors:
                stack.enter_context(self._outer_tensors)
            if is_first and _torch.current_pack_hook():  # which would offload what nobody reads again
                hooks = SavedTensorHooks({})
                stack.enter_context(hooks.activate(hooks.pack))
            for var, value in variables.items():
                stack.callback(var.reset, var.set(value))
            out = self._call(*arguments)
            self._ambient.record_end() if is_first else self._ambient.check_end(self.name)
            return out

    # --- checks ---

    def _check_operands(self, xs: Sequence[Tensor], before: Sequence[tuple[int, int, int]]) -> None:
        """Raise RuntimeError if a run has changed a tensor that it was given, or set a hook or an attribute on it."""
        for i, (x, (version, hooks, attributes)) in enumerate(zip(xs, before, strict=True)):
            if len(vars(x)) != attributes:
                self._check_attributes(x)
            if _torch.version(x) != version:
                raise RuntimeError(
                    f"{self.name} changed in place a tensor that it was given: {self._name_of(i)}; expected it unchanged, "
                    "because the function runs again; change a copy"
                )
            if len(x._backward_hooks or ()) != hooks:
                raise RuntimeError(
                    f"{self.name} calls register_hook on a tensor that it was given, {self._name_of(i)}, where the hook "
                    "would miss the gradient from outside: expected it on x.view_as(x), or where the tensor comes from"
                )

    def _check_attributes(self, x: Tensor) -> None:
        """Raise RuntimeError for an attribute of a tensor that Dynamo has not set."""
        for key in () if _torch.is_fake(x) else vars(x):  # a fake tensor has its own
            if not key.startswith("_dynamo_"):
                raise RuntimeError(
                    f"{self.name} sets the attribute '{key}' of a tensor, which outside is another tensor: expected it "
                    "returned beside the result"
                )

    def _check_watched(self) -> None:
        """Raise RuntimeError if the first run has changed an object that all runs share; it may have added to it."""
        for x, before in self._watched:
            now = _read_object(x)
            added = {key for key in now.keys() - before.keys() if hasattr(getattr(type(x), key, property()), "__get__")}
            for key in [key for key in now.keys() | before.keys() if now.get(key) != before.get(key) and key not in added]:
                raise RuntimeError(
                    f"{self.name} changes '{key}' of a {type(x).__name__}, which each run would change again: expected "
                    "P(remat=True) of a unit for a module, and other objects among the arguments, or in a list"
                )
        self._watched = []

    def _name_of(self, operand: int) -> str:
        return self._names[bisect.bisect(self._before.ends, operand)]

    def _check_results(self, results: Sequence[Tensor], begins: set[Any]) -> None:
        """Find leaves that results have a derivative by and that are no operands: `finish` refuses those still there."""
        if any(_torch.level_of(r) > _torch.current_level() for r in results):
            refuse_outer(self.name, set(), ())
        tracked = [x for r in results if (x := _torch.unwrap(r)).requires_grad] if self._grad else []
        nodes = _torch.find_nodes((x.grad_fn for x in tracked), begins) - begins
        leaves = [getattr(node, "variable", None) for node in nodes if not node.next_functions]
        leaves += [x for x in tracked if x.grad_fn is None]
        for x in results:
            self._check_attributes(x)
        if foreign := [x for x in leaves if x is not None]:
            self._foreign, self._foreign_ids = [*map(weakref.ref, foreign)], set(map(id, (*foreign, *nodes)))

    def _check_same(self, parts: Sequence[bytes], layouts: Sequence[Any]) -> None:
        """Raise RuntimeError for a run that has left other bytes, or results of other layouts, than the first one."""
        assert self._first is not None
        changed = [x for x in itertools.zip_longest(self._first[1], layouts) if x[0] != x[1]]
        names = zip([*self._names, "its result"], parts, self._first[0], strict=True)
        words = [f"{x[0]} of shape {list(x[1])} on {x[2]}" if x else "absent" for x in next(iter(changed), ())]
        how = [f"a tensor was {words[0]}, now it is {words[1]}"] if words else []
        for text in [*how, *(f"{name} has other contents" for name, now, was in names if now != was)]:
            raise RuntimeError(f"{self.name} does not compute in every run what it computed in its first one: {text}")

    def _uncopied_result(self, error: Exception) -> TypeError:
        return TypeError(
            f"{self.name} returns, stores or changes an object that cannot be copied ({error}): expected tensors, and "
            "containers of them"
        )

    # --- what the first run has left ---

    def finish(self, outputs: Sequence[Tensor]) -> Any:
        """Write what the first run has changed into the caller's objects, with these results, and return its result."""
        if self._outer_tensors is not None:
            self._outer_tensors.check()
            self._outer_tensors = None
        after, out, loaded = self._left
        operands = self._before.tensors
        classes = map(type, after[len(operands) :])
        outputs = [y.as_subclass(c) if _torch.is_attribute_subclass(c) else y for c, y in zip(classes, outputs, strict=True)]
        tensors = {id(x): y for x, y in zip(after, [*operands, *outputs], strict=True)}
        try:
            value = _UNKNOWN if self.has_changed_objects else _replace(out, tensors)
            if value is _UNKNOWN:
                value = write_back(self._before, loaded, out, tensors, has_changes=self.has_changed_objects)
        except Exception as error:
            raise self._uncopied_result(error) from error
        self._left = self._before.pickler = None
        self._before.tensors = []
        del after, out, loaded
        if any(leaf() is not None for leaf in self._foreign):
            refuse_outer(self.name, self._foreign_ids, self._reached_modules())
        return value


_UNKNOWN = object()


def _replace(out: Any, tensors: dict[int, Tensor]) -> Any:
    """Return a result with other tensors, `_UNKNOWN` if it is not made of tensors, tuples and None alone."""
    if type(out) is tuple:
        parts = tuple([_replace(x, tensors) for x in out])
        return _UNKNOWN if any(x is _UNKNOWN for x in parts) else parts
    return None if out is None else tensors.get(id(out), _UNKNOWN)


def _read_variables() -> dict[contextvars.ContextVar[Any], Any]:
    """Return the context variables that hold dicts, by one of which transformers collects what its layers give."""
    values = contextvars.copy_context().items()
    return {var: value for var, value in values if type(value) is dict and not var.name.startswith("torch.")}


def _read_object(x: Any) -> dict[str, Any]:
    """Return the attributes of an object, by identity and length, and the versions of a module's buffers."""
    buffers = vars(x)["_buffers"].items() if isinstance(x, nn.Module) else ()
    versions = {key: _torch.version(buffer) for key, buffer in buffers if buffer is not None}
    own = vars(x).items()
    return versions | {
        key: value if type(value) in ATOMS else (id(value), len(value) if type(value) in (list, dict, set) else 0)
        for key, value in own
    }


def _find_error(value: Any) -> str:
    """Return why pickle cannot copy a value; empty if it can."""
    try:
        Snapshot([value])
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
