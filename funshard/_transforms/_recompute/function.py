"""A function that runs again for its derivatives: every run gets what the first one was given, and must end as it did.

Its arguments are copied for each run (snapshot.py), with the run's own tensors in them. What the first run has changed in its
copies is then written into the caller's objects; tensors that it has left in them are results. All else is a constant.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import _torch
from ..._batchnorm import MESH, WEIGHT
from ..._spec.options import Remat
from ..._torch import DATA
from ..grad import assume_differentiated, is_assumed_differentiated
from ..saved_tensors import SavedTensorHooks
from .ambient import AmbientState, compared_variables, context_variables, set_context_variables
from .checks import (
    QUERY_GETTERS,
    REGISTER_HOOK,
    ForbiddenFunctions,
    OuterTensors,
    check_backward_hooks,
    check_not_read,
    describe_parameter,
)
from .saved_results import SavedResults
from .snapshot import (
    ATOMS,
    DeferredError,
    Merge,
    Snapshot,
    TensorName,
    find_difference,
    find_tensors,
    find_uncopied,
    is_copied,
    is_watched,
    load,
    walk,
)

__all__ = ["CALL_ATTRIBUTES", "RUNNING", "RecomputedFunction", "find_attribute_tensors", "recomputing_names", "set_attributes"]


class _Running(threading.local):
    """The recomputed functions that this thread runs."""

    names: tuple[str, ...] = ()
    in_stack = False
    is_first = False
    """Whether the innermost is in its first run, whose graph is not kept."""


RUNNING = _Running()
"""The names are what `recomputing_names` returns, to be read for each parameter that forward reads."""


def recomputing_names() -> tuple[str, ...]:
    """Return the names of the recomputed functions that run now, the innermost last."""
    return RUNNING.names


CALL_ATTRIBUTES = ("_parameters", "_buffers", "forward", MESH, WEIGHT)
"""The attributes of a module that functional_call replaces."""
_SKIPPED = frozenset({*CALL_ATTRIBUTES, "_modules"})
_HOOK_DICTS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)} - _SKIPPED
"""The names of a module's dicts of hooks; most are empty."""


def _read_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that forward may change, but for hooks that it has none of."""
    own = {k: v for k, v in vars(module).items() if k not in _SKIPPED and (k not in _HOOK_DICTS or v)}
    return own | {k: own[k].copy() for k in own.keys() & _HOOK_DICTS}


def find_attribute_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors in the attributes of a module, but for parameters, buffers and other modules."""
    return find_tensors(*_read_attributes(module).values())


def set_attributes(module: nn.Module, new: Mapping[str, Any]) -> None:
    """Replace the attributes that forward may change; dicts of hooks stay the same objects."""
    own, now = vars(module), _read_attributes(module)
    for name in now.keys() - new.keys():
        own[name].clear() if name in _HOOK_DICTS else own.pop(name)
    for name, value in new.items():
        if name in _HOOK_DICTS:
            hooks = value.copy()
            own[name].clear()
            own[name].update(hooks)
        elif name not in _SKIPPED:
            own[name] = value


def _is_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two modules' attributes are the same objects, in one order; False where hooks were copied."""
    return a is b or (len(a) == len(b) and all(map(operator.is_, a.values(), b.values())) and a.keys() == b.keys())


def _find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes that a run has set, and the names of those that it has deleted."""
    changed = {
        k: v
        for k, v in now.items()
        if (was := before.get(k, _MISSING)) is not v
        and not ((type(v) in ATOMS or k in _HOOK_DICTS) and type(was) is type(v) and was == v)
    }
    return changed, sorted(before.keys() - now.keys())


def _list_inside(obj: Any) -> dict[str, tuple[Any, int]]:
    """Return the attributes of an object, and how long the containers among them are."""
    return {k: (v, len(v) if isinstance(v, list | dict | set) else 0) for k, v in vars(obj).items()}  # pyright: ignore


def _find_change_inside(obj: Any, before: Mapping[str, tuple[Any, int]]) -> str:
    """Return the name of an attribute that has changed. A new one may be a cached property, unless it is a tensor."""
    for name, (value, length) in _list_inside(obj).items():
        was = before.get(name, (None if isinstance(value, Tensor) else value, length))
        same = was[0] is value or (type(value) in ATOMS and was[0] == value)
        if not same or was[1] != length:
            return name
    return ""


def _read_versions(module: nn.Module) -> list[tuple[int, int]]:
    """Return which buffers a module has, and how often each was changed in place."""
    return [(id(x), _torch.version(x)) for x in _own_tensors(module, "_buffers")]


def _own_tensors(module: nn.Module, kind: str) -> list[Tensor]:
    """Return a module's own parameters or buffers; nothing is gathered for that."""
    own = vars(module).get(kind)
    return [x for x in dict.values(own) if x is not None] if isinstance(own, dict) else []


_MISSING = object()
_IN_CONTEXT = (Tensor, list, dict, tuple, int, float, str)
"""The classes of values of context variables that each run gets a copy of."""


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
    """``call(*roots)`` as a function of all the tensors in its arguments, the same in every run."""

    def __init__(
        self, call: Callable[..., Any], name: str, roots: dict[str, Any], owned: Mapping[str, nn.Module], remat: Remat
    ) -> None:
        self._call, self.name, self._names = call, name, [*roots, "a context variable", "an attribute"]
        self._modules, self._module_names = list(owned.values()), list(owned)
        self._grad, self._forward_mode = torch.is_grad_enabled(), _torch.NoGradInForwardMode.is_active()
        self._attention = _torch.current_attention()
        self._attributes = [_read_attributes(module) for module in self._modules]
        copied = [{k: v for k, v in own.items() if type(v) not in ATOMS and is_copied(v)} for own in self._attributes]
        self._watched = [
            (i, k, v, _list_inside(v))
            for i, own in enumerate(self._attributes)
            for k, v in own.items()
            if type(v) not in ATOMS and is_watched(v)
        ]
        self._context = context_variables()
        variables = {k: v for k, v in compared_variables().items() if isinstance(v, _IN_CONTEXT)}
        self._constants = {id(x) for module in self._modules for x in _own_tensors(module, "_parameters")}
        left = pytree.tree_leaves([[*own.values()] for own in copied])
        self._forbidden = [x for x in left if isinstance(x, _torch.ForbiddenTensor)]  # no run computes with them
        self._constants.update(map(id, self._forbidden))
        self._before = self._freeze([*roots.values(), variables, {i: own for i, own in enumerate(copied) if own}])
        self._shared = [] if owned else [(m, dict(vars(m)), _read_versions(m)) for m in self._reached_modules()]
        tensors = self._before.tensors
        levels = _torch.current_level() + _torch.is_in_forward_ad()  # plain autograd is another one, where it records
        levels += self._grad and any(_torch.unwrap(x).requires_grad for x in tensors)
        self._in_stack = (_torch.current_level() > 0 and levels > 1) or RUNNING.in_stack
        if self._in_stack:
            check_backward_hooks(self._reached_modules(), name)
        self._records = self._grad and not self._in_stack and not _torch.is_traced() and any(x.requires_grad for x in tensors)
        self._flags = [x.requires_grad for x in tensors]
        # most runs in a stack are of transforms, where the results of another run have other values
        saves = remat.save is not None and not self._in_stack and not _torch.is_traced()
        self._saved_results = SavedResults(remat, name) if saves else None
        self._outer_tensors = OuterTensors(name, self._reached_modules()) if self._watches_outer_tensors() else None
        self._is_last = self._is_graph_kept = False
        self._in_transform = _torch.current_level() > 0 or is_assumed_differentiated()  # later runs may be below it
        self._tensor_attributes = {i: dict(vars(x)) for i, x in enumerate(tensors) if vars(x)}
        self._ambient: AmbientState | None = None
        self.has_changed_objects = False
        self._first: tuple[list[bytes], list[Any]] | None = None  # what the first run left, and its results' layouts
        self._left: Any = None  # the same, until `finish`
        self._foreign, self._foreign_name = list[weakref.ref[Tensor]](), ""

    def _watches_outer_tensors(self) -> bool:
        """Return whether to look for tensors of outer transforms: each time in a function, for a module in its first call."""
        if not _torch.current_level():
            return False
        if not self._modules:
            return True
        is_new = self._modules[0] not in _SEEN_MODULES
        _SEEN_MODULES.add(self._modules[0])
        return is_new

    def _reached_modules(self) -> Iterator[nn.Module]:
        """Return the modules that run, and all those that the arguments reach."""
        return (m for top in (*self._modules, *self._before.others) if isinstance(top, nn.Module) for m in top.modules())

    def _freeze(self, roots: list[Any]) -> Snapshot:
        """Return the snapshot of the arguments; raise TypeError for one that cannot be copied."""
        self._caller: list[Any] | None = roots
        with contextlib.suppress(Exception):
            return Snapshot([roots[:-1], roots[-1]], constants=self._constants, name=self.name)
        for own in roots[-1].values():
            for key in [key for key, value in own.items() if find_uncopied(value, "")]:
                del own[key]  # as a list of locks
        if not (path := find_uncopied(dict(zip(self._names, roots, strict=True)), "")):
            return Snapshot([roots[:-1], roots[-1]], constants=self._constants, name=self.name, by_value=False)
        raise TypeError(
            f"{self.name} was given an object that cannot be copied for another run, {path}: expected tensors, and containers "
            "of them"
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The operands, before the first run has ended."""
        return list(self._before.tensors)

    @contextlib.contextmanager
    def last_run(self) -> Generator[None]:
        """Mark the run within this context as the last: plain autograd runs it for its gradient, and it never runs again."""
        self._is_last, self._is_graph_kept = True, _torch.is_graph_retained()
        try:
            with getattr(self._call, "last_run", contextlib.nullcontext)():
                yield
        finally:
            self._is_last = False

    def _save_or_reuse(self, ambient: AmbientState) -> contextlib.AbstractContextManager[None]:
        """Save results of operators in the first run, and reuse them in the last one."""
        if self._saved_results is None or _torch.current_level() or not (self._first is None or self._is_last):
            return contextlib.nullcontext()
        if self._first is None:
            return self._saved_results.first_run(ambient)
        return self._saved_results.last_run(ambient, retained=self._is_graph_kept)

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Run the function, and return all tensors that can be reached afterwards and are no operands."""
        is_first, begins = self._first is None, set[Any]()
        if is_first and self._records and not _torch.current_level():
            xs = self._begin_graph(xs)
            begins = {x.grad_fn for x in xs} - {None}
        elif not is_first and self._grad and not _torch.current_level():  # no leaves, as in the first run
            xs = tuple([x.view_as(x) if x.requires_grad and x.is_leaf else x for x in xs])
        for i, attributes in self._tensor_attributes.items():
            xs = (*xs[:i], _with_attributes(xs[i], attributes), *xs[i + 1 :])
        versions = [(_torch.version(x), len(x._backward_hooks or ())) for x in xs]
        (arguments, held), made = load(self._before.parts, xs, self._before.others)
        given = [*arguments, held]
        targets = [{**own, **held[i]} if i in held else own for i, own in enumerate(self._attributes)]
        around = self._attributes if is_first else [*map(_read_attributes, self._modules)]
        try:
            self._set_attributes(around, targets)
            out, variables = self._run(given[:-2], given[-2], xs)
            now = [*map(_read_attributes, self._modules)]
            pairs = enumerate(zip(targets, now, strict=True))
            changes = {i: change for i, (a, b) in pairs if not _is_same(a, b) and any(change := _find_changes(a, b))}
            self._check_operands(xs, versions, given)
            new = {k: v for k, v in variables.items() if given[-2].get(k, _MISSING) is not v and isinstance(v, _IN_CONTEXT)}
            after = self._dump([arguments, held, [new, changes, out]], xs, made)
        finally:
            self._set_attributes(map(_read_attributes, self._modules), around)
        results = after.tensors[len(xs) :]
        layouts = [(x.dtype, x.shape, x.device) for x in results]
        if is_first:
            self._check_results(results, begins)
            self.has_changed_objects = bool(changes or new or after.parts[:2] != self._before.parts)
            self._first, self._left = (after.parts, layouts), (after, out, len(xs))
            return tuple(r.detach() for r in results)  # autograd writes on what a Function returns; it may be a constant
        if self._first != (after.parts, layouts) and (text := self._find_difference(after, layouts, len(xs))):
            raise RuntimeError(f"{self.name} does not compute in every run what it computed in its first one: {text}")
        return tuple(results)

    def _set_attributes(self, now: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> None:
        """Give the modules their attributes, which nearly always they have."""
        for module, own, attributes in zip(self._modules, now, new, strict=True):
            if not _is_same(own, attributes):
                set_attributes(module, attributes)

    def _begin_graph(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return operands that require grad as the caller's do, by nodes that lead to those where plain autograd has them."""
        with torch.enable_grad():
            given = zip(xs, self._before.tensors, self._flags, strict=True)
            sources = [x.detach().requires_grad_() if _torch.is_wrapped(t) else t for x, t, flag in given if flag]
            begun = iter(_BeginGraph.apply(self.name, *sources))
        return tuple(next(begun) if flag else x for x, flag in zip(xs, self._flags, strict=True))

    def _dump(self, parts: list[Any], xs: Sequence[Tensor], made: list[tuple[Any, int]]) -> Snapshot:
        """Return the snapshot of what a run has left; raise TypeError for what cannot be copied."""
        for by_value in (True, False):
            try:
                by_value = by_value and self._before.by_value
                return Snapshot(parts, xs, self._before.others, self._constants, made, is_after=True, by_value=by_value)
            except DeferredError as error:  # noqa: PERF203
                raise TypeError(
                    f"{self.name} returns or stores a {error}, which gives tensors after the function has ended, where they "
                    "have no gradient: expected the tensors themselves, as in list(...)"
                ) from None
            except Exception as error:
                last = error
        raise self._uncopied_result(last) from last

    def _uncopied_result(self, error: Exception) -> TypeError:
        return TypeError(f"{self.name} returns or stores an object that cannot be copied ({error}): expected tensors")

    def _run(self, roots: Sequence[Any], variables: dict[Any, Any], xs: Sequence[Tensor]) -> tuple[Any, dict[Any, Any]]:
        """Run the function in the surroundings of its first run. Return its result, and the context variables then."""
        before = RUNNING.names, RUNNING.in_stack, RUNNING.is_first
        RUNNING.names, RUNNING.in_stack = (*before[0], self.name), self._in_stack
        RUNNING.is_first = self._ambient is None
        try:
            if self._ambient is None:
                self._ambient = AmbientState(xs)
                saving = self._save_or_reuse(self._ambient)
                hooks = SavedTensorHooks({})  # those around would offload what nobody reads again
                with (
                    assume_differentiated(False),
                    torch.set_grad_enabled(self._grad),
                    set_context_variables(variables),
                    self._in_transforms(),
                    saving,
                    self._outer_tensors or contextlib.nullcontext(),
                    hooks.activate(hooks.pack) if _torch.current_pack_hook() else contextlib.nullcontext(),
                ):
                    out = self._call(*roots), compared_variables()
                self._ambient.record_end()
                return out
            with assume_differentiated(self._in_transform), self._ambient.restored(), torch.set_grad_enabled(self._grad):
                with self._in_transforms(), self._save_or_reuse(self._ambient):
                    # a new context, where variables that only the first run has set are not set
                    out = contextvars.Context().run(self._run_in_context, roots, {**self._context, **variables})
                self._ambient.check_end(self.name)
                return out
        finally:
            RUNNING.names, RUNNING.in_stack, RUNNING.is_first = before

    def _run_in_context(self, roots: Sequence[Any], variables: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        with set_context_variables(variables):
            return self._call(*roots), compared_variables()

    @contextlib.contextmanager
    def _in_transforms(self) -> Generator[None]:
        """Run the function as all transforms around its first run expect."""
        # the last mode sees a function first, and by whose code it is called
        mode = _torch.NoGradInForwardMode() if self._forward_mode else contextlib.nullcontext()
        with mode, _torch.use_attention(self._attention), self._refuse_level_queries():
            yield

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

    # --- checks ---

    def _check_operands(self, xs: Sequence[Tensor], versions: Sequence[tuple[int, int]], given: list[Any]) -> None:
        """Raise RuntimeError if a run has changed a tensor that it was given, or registered a hook on it."""
        for i, (x, (version, hooks)) in enumerate(zip(xs, versions, strict=True)):
            if _torch.version(x) != version:
                raise RuntimeError(
                    f"{self.name} changed in place a tensor that it was given: {self._path_of(x, given)}; expected it "
                    "unchanged, because the function runs again; change a copy"
                )
            if len(x._backward_hooks or ()) != hooks:
                raise RuntimeError(
                    f"{self.name} calls register_hook on a tensor that it was given, {self._path_of(x, given)}, where the hook "
                    "would miss the gradient from outside: expected it on x.view_as(x), or where the tensor comes from"
                )
            if (now := vars(x)) and not _attributes_equal(now, self._tensor_attributes.get(i, {})):
                raise RuntimeError(
                    f"{self.name} sets an attribute of a tensor that it was given: {self._path_of(x, given)} has {[*now]}; "
                    "expected the tensor unchanged, because the function runs again"
                )
        for i, key, obj, before in self._watched if self._first is None else ():
            if changed := _find_change_inside(obj, before):
                raise RuntimeError(
                    f"{self.name} changes '{changed}' of the {type(obj).__name__} in {self._module_names[i]}.{key}, which "
                    "each run would change again: expected the object among the arguments of forward, or a list or dict"
                )

        for module, before, versions in self._shared if self._first is None else ():
            now = {k: v for k, v in vars(module).items() if k not in _SKIPPED and k not in _HOOK_DICTS}
            changed = [k for k, v in now.items() if before.get(k, _MISSING) is not v]
            if changed or versions != _read_versions(module):
                raise RuntimeError(
                    f"{self.name} changes {repr(changed[0]) if changed else 'a buffer'} of a {type(module).__name__}, which "
                    "each run would change again: expected P(remat=True) of a unit, or its buffers among the arguments"
                )

    def _path_of(self, x: Tensor, given: list[Any]) -> str:
        """Return the path of a tensor in the arguments of a run."""
        return next((path for path, value in walk(dict(zip(self._names, given, strict=True))) if value is x), "a tensor")

    def _check_results(self, results: Sequence[Tensor], begins: set[Any]) -> None:
        """Find leaves that results have a derivative by and that are no operands: `finish` refuses those still there."""
        if any(_torch.level_of(r) > _torch.current_level() for r in results):
            self._refuse_foreign("")
        tracked = [x for r in results if (x := _torch.unwrap(r)).requires_grad] if self._grad else []
        nodes = _torch.find_nodes((x.grad_fn for x in tracked), begins) - begins
        leaves = [getattr(node, "variable", None) for node in nodes if not node.next_functions]
        leaves += [x for x in tracked if x.grad_fn is None]
        if foreign := [x for x in leaves if x is not None]:
            self._foreign = [*map(weakref.ref, foreign)]
            self._foreign_name = describe_parameter(set(map(id, (*foreign, *nodes))), self._reached_modules())
        for attributes in filter(None, map(vars, results)):
            for key, value in attributes.items():
                if find_tensors(value):
                    raise RuntimeError(
                        f"{self.name} sets the attribute '{key}' of a result to a tensor or an object with one, where it would "
                        "have no gradient: expected it returned beside the result"
                    )

    def _refuse_foreign(self, parameter: str) -> NoReturn:
        """Raise RuntimeError for a tensor, maybe a parameter, that a result depends on and that is no operand."""
        check_not_read(self.name, parameter)
        raise RuntimeError(
            f"{self.name} reads a tensor of the running computation that is neither an argument nor reached from one, where it "
            "would have no gradient: expected it among the arguments"
        )

    def _find_difference(self, now: Snapshot, layouts: list[Any], operands: int) -> str:
        """Return what differs from what the first run left, in words; empty for an object that is only shared otherwise."""
        assert self._first is not None
        outcomes: list[dict[str, Any]] = []
        for parts, own in ((self._first[0], self._first[1]), (now.parts, layouts)):
            names = [TensorName(i, "one of the tensors it was given") for i in range(operands)]
            names += [TensorName(i, f"{dtype} of shape {list(shape)}") for i, (dtype, shape, _) in enumerate(own)]
            try:
                (arguments, held, (variables, changes, out)), _ = load(parts, names, now.others)
            except Exception:
                return "it returns or stores other objects"
            stored = {f"{self._module_names[i]}.{k}": v for i, (values, _) in changes.items() for k, v in values.items()} | {
                f"context variable '{var.name}'": value for var, value in variables.items()
            }
            outcomes.append({"its result": out, **stored, **dict(zip(self._names, [*arguments, held], strict=True))})
        return find_difference(*outcomes)

    def finish(self, outputs: Sequence[Tensor]) -> Any:
        """Write what the first run has changed into the caller's objects, with these results, and return its result."""
        assert self._caller is not None
        if self._outer_tensors is not None:
            self._outer_tensors.check()
            self._outer_tensors = None
        (after, out, count), caller = self._left, self._caller
        outputs = _copy_attributes(after.tensors[count:], outputs)
        tensors = [*self._before.tensors, *outputs]
        self._left = self._caller = None
        self._before.tensors, self._watched, self._shared = [], [], []
        *_, variables, held = caller  # what later runs get copies of is not kept
        self._attributes = [
            {k: v for k, v in own.items() if k not in held.get(i, ())} for i, own in enumerate(self._attributes)
        ]
        self._context = {k: v for k, v in self._context.items() if k not in variables}
        if (
            self.has_changed_objects
            or (value := _replace(out, {id(x): y for x, y in zip(after.tensors, tensors, strict=True)})) is _MISSING
        ):
            value = self._write_back(after, tensors, caller)
        del after, out
        if any(leaf() is not None for leaf in self._foreign):
            self._refuse_foreign(self._foreign_name)
        return value

    def _write_back(self, after: Snapshot, tensors: Sequence[Tensor], caller: list[Any]) -> Any:
        """Write what the first run has changed into the caller's objects, and return its result."""
        merge = Merge()
        try:
            (arguments, held, (variables, changes, out)), _ = load(after.parts, tensors, after.others)
        except Exception as error:
            raise self._uncopied_result(error) from error
        merge(caller, [*arguments, held])
        for i, (values, removed) in changes.items():
            module = self._modules[i]
            own = {k: v for k, v in _read_attributes(module).items() if k not in removed}
            set_attributes(module, own | {k: merge(vars(module).get(k), v) for k, v in values.items()})
        for var, new in variables.items():
            var.set(merge(var.get(None), new))
        return merge(None, out)


def _replace(out: Any, tensors: Mapping[int, Tensor]) -> Any:
    """Return a result with other tensors, if it is made of tensors and tuples alone; else `_MISSING`."""
    if isinstance(out, Tensor):
        return tensors[id(out)]
    if type(out) is tuple:
        parts = tuple([_replace(x, tensors) for x in out])
        return _MISSING if any(x is _MISSING for x in parts) else parts
    return out if type(out) in ATOMS else _MISSING


# --- Attributes of Python that tensors have, such as ``y.tag = 1``: autograd gives and returns other tensors ---


def _with_attributes(x: Tensor, attributes: Mapping[str, Any]) -> Tensor:
    """Return an operand with these attributes: a view if it is the caller's tensor, which has others by now."""
    if _attributes_equal(vars(x), attributes):
        return x
    if vars(x):
        with torch.enable_grad():
            x = x.view_as(x)
    vars(x).update(attributes)
    return x


def _attributes_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two tensors have the same attributes, by identity, but for Dynamo's own and a running call's ``set_``."""
    names = {name for name in (*a, *b) if name != "set_" and not _torch.is_compiler_attribute(name)}
    return all(name in a and name in b and a[name] is b[name] for name in names)


def _copy_attributes(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, which autograd has made, with the first run's classes and attributes of Python."""
    out = [
        output.as_subclass(type(r)) if _torch.is_attribute_subclass(type(r)) else output
        for r, output in zip(results, outputs, strict=True)
    ]
    for result, output in zip(results, out, strict=True):
        vars(output).update(vars(result))
    return out
