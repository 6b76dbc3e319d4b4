"""A function that runs again for its derivatives: every run gets what the first one was given, and must end as it did.

Its arguments are copied for each run, as bytes beside which tensors, modules and classes stand by number: each run loads its
own objects, with its own tensors in them. Runs that leave equal bytes have done the same. What the first run has changed in
its copies is written into the caller's objects; tensors that it has left in them are results. All else is a constant.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

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
from ..saved_tensors import BeginGraph, SavedTensorHooks
from .saved_results import SavedResults
from .snapshot import ATOMS, Snapshot, is_watched, write_back

_SEEN_MODULES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules whose first call in a transform has shown which tensors they read."""


HANDED_ON = (
    "{} hands on a tensor by a global, or by an object that it was not given, where it has no gradient: expected it in the "
    "result, or in an object among the arguments"
)
"""The error of a graph that begins in the first run, whose tensors answer queries as those of the last run."""


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
        self._before = self._freeze(roots)
        self.tensors = tensors = self._before.tensors  # the operands, until `finish`
        self._grad, self._forward_mode = torch.is_grad_enabled(), _torch.NoGradInForwardMode.is_active()
        self._attention = _torch.current_attention()
        level, is_tracing = _torch.current_level(), _torch.is_tracing()
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
        self._in_transform = level > 0 or RUNNING.is_differentiated  # later runs may be below it
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
            return Snapshot(roots.values())
        for own in roots["its attributes"].values() if self._modules else ():
            for key in [key for key, value in own.items() if _find_error(value)]:
                del own[key]  # as a list of locks
        for name, value in roots.items():
            if error := _find_error(value):
                raise self._uncopied(f"was given an object that cannot be copied for another run, {name} ({error})")
        return Snapshot(roots.values())

    def check_second_derivative(self) -> None:
        """Raise RuntimeError for backward hooks of modules where the gradient is differentiated again."""
        check_backward_hooks(self._reached_modules(), self.name)

    def last_run(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the run, and its backward, by which plain autograd computes an undifferentiated gradient."""
        return getattr(self._call, "last_run", contextlib.nullcontext)()

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
            after = Snapshot([*roots, out], xs, self._before.others)
        except Exception as error:
            raise self._uncopied(f"returns, stores or changes an object that cannot be copied ({error})") from error
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
        """Return operands that require grad as the caller's do, by nodes that lead to those where plain autograd has them.

        Those of the first root, such as a module's parameters, have one node, and each argument its own: a gradient by one of
        them goes through no other.
        """
        out, given, end = list(xs), self._before.tensors, self._before.ends[1]
        flagged = [i for i, flag in enumerate(self._flags) if flag]
        with torch.enable_grad():
            for some in ([i for i in flagged if i < end], *([i] for i in flagged if i >= end)):
                sources = [xs[i].detach().requires_grad_() if _torch.is_wrapped(given[i]) else given[i] for i in some]
                for i, x in zip(some, sources and BeginGraph.apply(HANDED_ON.format(self.name), *sources), strict=True):
                    out[i] = x
                    _torch.add_gradient_hook(x, functools.partial(self._check_independent, i, flagged))
        return tuple(out)

    def _check_independent(self, operand: int, flagged: Sequence[int], _: Tensor | None) -> None:
        """Raise RuntimeError in a gradient by an operand, taken in the first run, that others are computed from outside."""
        if not (given := self._before.tensors):  # after it: the graph's own error says what to do
            return
        own = {*_torch.own_edges(given[operand])} or {(get_gradient_edge(given[operand]).node, 0)}
        if not own.isdisjoint(_torch.edges_in_graph(given[i] for i in flagged if i != operand)):
            raise RuntimeError(
                f"{self.name} differentiates by {self._name_of(operand)}, which others of its arguments are computed from: "
                "the gradient would miss that, since they are constants where it runs again; expected no remat"
            )

    def _run(self, roots: Sequence[Any], xs: Sequence[Tensor]) -> Any:
        """Run the function in the surroundings of its first run, and return its result."""
        variables, *arguments = roots
        with contextlib.ExitStack() as stack:
            is_first = self._ambient is None
            values = {"names": (*RUNNING.names, self.name), "in_stack": self._in_stack, "is_first": is_first}
            stack.enter_context(RUNNING.set(**values, is_differentiated=self._in_transform and not is_first))
            if self._ambient is None:
                self._ambient = AmbientState(xs, [x for x in self._before.others if isinstance(x, torch.Generator)])
            else:
                stack.enter_context(self._ambient.restored())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._forward_mode:  # the last mode sees a function first, and by whose code it is called
                stack.enter_context(_torch.NoGradInForwardMode())
            stack.enter_context(_torch.use_attention(self._attention))
            if self._in_stack:
                stack.enter_context(ForbiddenFunctions(messages_in_stack(self.name)))
            if self._saved_results is not None and not _torch.current_level() and not _torch.is_in_forward_ad():
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
        for key in () if _torch.is_fake(x) or isinstance(x, _torch.SeparateTensor) else vars(x):  # which have their own
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
        nodes = {node for node, _ in _torch.iter_nodes((x.grad_fn for x in tracked), begins)}
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
        for text in [*how, *(f"other contents in {name}" for name, now, was in names if now != was)]:
            raise RuntimeError(f"{self.name} does not compute in every run what it computed in its first one: {text}")

    def _uncopied(self, what: str) -> TypeError:
        return TypeError(f"{self.name} {what}: expected tensors, and containers of them")

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
            value = write_back(self._before, loaded, out, tensors, has_changes=self.has_changed_objects)
        except Exception as error:
            raise self._uncopied(f"returns, stores or changes an object that cannot be copied ({error})") from error
        self._before.clear_memo()
        self._left, self.tensors, self._before.tensors = None, [], []
        del after, out, loaded
        if any(leaf() is not None for leaf in self._foreign):
            refuse_outer(self.name, self._foreign_ids, self._reached_modules())
        return value


def _read_variables() -> dict[contextvars.ContextVar[Any], Any]:
    """Return the context variables that hold dicts, by one of which transformers collects what its layers give."""
    values = contextvars.copy_context().items()
    return {var: value for var, value in values if type(value) is dict and not var.name.startswith("torch.")}


def _read_object(x: Any) -> dict[str, Any]:
    """Return the attributes of an object, by identity and length, and the versions of a module's buffers."""
    buffers = vars(x)["_buffers"].items() if isinstance(x, nn.Module) else ()
    sizes = {key: (id(value), len(value) if type(value) in (list, dict, set) else 0) for key, value in vars(x).items()}
    atoms = {key: value for key, value in vars(x).items() if type(value) in ATOMS}
    return {key: _torch.version(buffer) for key, buffer in buffers if buffer is not None} | sizes | atoms


def _find_error(value: Any) -> str:
    try:
        Snapshot([value])
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
