"""A function that runs again for its derivatives: every run gets what the first one was given, and must end as it did.

Its arguments are copied for each run (snapshot.py), with the run's own tensors in them. What the first run has changed in its
copies is then written into the caller's objects; tensors that it has left in them are results. All else is a constant.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ... import _torch
from ..._spec.options import Remat
from ..._torch import DATA
from ..ambient import RUNNING, AmbientState, find_variables, set_variables
from ..checks import (
    QUERY_GETTERS,
    REGISTER_HOOK,
    ForbiddenFunctions,
    OuterTensors,
    check_backward_hooks,
    check_not_read,
    describe_parameter,
)
from ..grad import assume_differentiated, is_assumed_differentiated
from ..saved_tensors import SavedTensorHooks
from .saved_results import SavedResults
from .snapshot import (
    ATOMS,
    Snapshot,
    TensorText,
    find_difference,
    find_tensors,
    is_watched,
    load,
    merge,
    read_cell,
    take_snapshot,
)


def _read_object(x: Any) -> dict[str, tuple[Any, int]]:
    """Return the attributes of an object, with the length of each container, and a module's buffers with their versions."""
    own = {key: (value, len(value) if isinstance(value, list | dict | set) else 0) for key, value in vars(x).items()}  # pyright: ignore
    buffers = vars(x).get("_buffers") if isinstance(x, nn.Module) else {}
    return own | {key: (value, _torch.version(value)) for key, value in (buffers or {}).items() if value is not None}


def _read_default(x: Any, key: str, value: Any, length: int, *, is_empty: bool) -> tuple[Any, int]:
    """Return the value of a class for an attribute that a run has set, or the new one, which may be a cached property."""
    default = inspect.getattr_static(type(x), key, None)
    if default is not None and not hasattr(default, "__get__"):
        return default, 0
    return None if is_empty or isinstance(value, Tensor) or isinstance(x, nn.Module) else value, length


_MISSING = object()

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
    """``call(*roots)`` as a function of all the tensors in its arguments, the same in every run.

    ``owned`` are the modules that it runs, whose attributes are the last root: by module, and then by name.
    """

    def __init__(
        self, call: Callable[..., Any], name: str, roots: dict[str, Any], owned: Sequence[nn.Module], remat: Remat
    ) -> None:
        self._call, self.name, self._names, self._modules = call, name, ["context variables", *roots], owned
        self._grad, self._forward_mode = torch.is_grad_enabled(), _torch.NoGradInForwardMode.is_active()
        self._attention = _torch.current_attention()
        objects = {id(x): x for module in owned for x in vars(module).values() if is_watched(x)}
        self._shared_objects = objects.keys()
        self._before = self._freeze([find_variables(), *roots.values()])
        self._constants |= {id(x) for x in self._before.others if isinstance(x, _torch.ForbiddenTensor)}  # in this run alone
        own_modules = {*owned}
        watched = [*objects.values(), *(m for m in self._reached_modules() if m not in own_modules)]
        watched += filter(is_watched, self._before.others)  # sentinels
        self._watched = [(x, _read_object(x)) for x in watched]  # what all runs share, and one could change
        tensors = self._before.tensors
        levels = _torch.current_level() + _torch.is_in_forward_ad()  # plain autograd is another one, where it records
        levels += self._grad and any(_torch.unwrap(x).requires_grad for x in tensors)
        self._in_stack = (_torch.current_level() > 0 and levels > 1) or RUNNING.in_stack
        if self._in_stack:
            check_backward_hooks(self._reached_modules(), name)
        self._records = self._grad and not self._in_stack and not _torch.is_tracing() and any(x.requires_grad for x in tensors)
        self._flags = [x.requires_grad for x in tensors]
        # most runs in a stack are of transforms, where the results of another run have other values
        saves = remat.save is not None and not self._in_stack and not _torch.is_tracing()
        self._saved_results = SavedResults(remat, name) if saves else None
        self._outer_tensors = OuterTensors(name, self._reached_modules()) if self._watches_outer_tensors() else None
        self._is_last = False
        self._in_transform = _torch.current_level() > 0 or is_assumed_differentiated()  # later runs may be below it
        self._tensor_attributes = {i: dict(vars(x)) for i, x in enumerate(tensors) if vars(x)}
        self._ambient: AmbientState | None = None
        self.has_changed_objects = False
        self._first: tuple[list[bytes], list[Any]] | None = None  # what the first run left, and its results' layouts
        self._left: Any = None  # the same, until `finish`
        self._foreign, self._foreign_name = list[weakref.ref[Tensor]](), ""

    def _watches_outer_tensors(self) -> bool:
        """Return whether to look for tensors of outer transforms: each time in a function, for a module in its first call."""
        if not _torch.current_level() or not self._modules:
            return _torch.current_level() > 0
        is_new = self._modules[0] not in _SEEN_MODULES
        _SEEN_MODULES.add(self._modules[0])
        return is_new

    def _reached_modules(self) -> Iterator[nn.Module]:
        """Return the modules that run, and all those that the arguments reach."""
        return (m for top in (*self._modules, *self._before.others) if isinstance(top, nn.Module) for m in top.modules())

    def _freeze(self, roots: list[Any]) -> Snapshot:
        """Return the snapshot of the arguments; raise TypeError for one that cannot be copied."""
        self._caller: list[Any] | None = roots
        parameters: Iterable[Any] = (vars(module).get("_parameters") or {} for module in self._modules)
        self._constants = {id(x) for own in parameters for x in dict.values(own)}  # nothing is gathered for that
        parts = [roots[:-1], roots[-1]]
        with contextlib.suppress(Exception):
            return take_snapshot(parts, constants=self._constants, shared=self._shared_objects)
        for own in roots[-1].values() if self._modules else ():
            for key in [key for key, value in own.items() if _find_error(value)]:
                del own[key]  # as a list of locks
        for path, value in self._arguments(roots).items():
            if error := _find_error(value):
                raise TypeError(
                    f"{self.name} was given an object that cannot be copied for another run, {path} ({error}): expected "
                    "tensors, and containers of them"
                )
        return take_snapshot(parts, constants=self._constants, shared=self._shared_objects)

    def _arguments(self, roots: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments by the names that errors give them."""
        out: dict[str, Any] = {}
        for name, value in zip(self._names, roots, strict=False):
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple | list) else ()
            out |= {f"{name}[{key!r}]": item for key, item in items} or {name: value}
            if isinstance(value, types.FunctionType):
                cells = zip(value.__code__.co_freevars, map(read_cell, value.__closure__ or ()), strict=True)
                out = {f"'{key}' in {name}": content[0] for key, content in cells if content} | out
        return out

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
        if self._tensor_attributes:
            with torch.enable_grad():  # views, because the caller's tensors have other attributes by now
                xs = tuple([x.view_as(x) if i in self._tensor_attributes else x for i, x in enumerate(xs)])
            for i, attributes in self._tensor_attributes.items():
                vars(xs[i]).update(attributes)
        versions = [(_torch.version(x), len(x._backward_hooks or ())) for x in xs]
        (first, last), made = load(self._before, xs)
        out = self._run([*first, last], xs)
        self._check_operands(xs, versions, [*first, last])
        try:
            after = take_snapshot([first, last, out], xs, self._before.others, made, self._constants, self._shared_objects)
        except Exception as error:
            raise self._uncopied_result(error) from error
        results = after.tensors[len(xs) :]
        layouts = [(x.dtype, x.shape, x.device) for x in results]
        if is_first:
            self._check_results(results, begins)
            self.has_changed_objects = after.parts[:2] != self._before.parts
            self._first, self._left = (after.parts, layouts), (after, out, len(xs))
            return tuple(r.detach() for r in results)  # autograd writes on what a Function returns; it may be a constant
        if self._first != (after.parts, layouts) and (text := self._find_difference(after, layouts, len(xs))):
            raise RuntimeError(f"{self.name} does not compute in every run what it computed in its first one: {text}")
        return tuple(results)

    def _begin_graph(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return operands that require grad as the caller's do, by nodes that lead to those where plain autograd has them."""
        with torch.enable_grad():
            given = zip(xs, self._before.tensors, self._flags, strict=True)
            sources = [x.detach().requires_grad_() if _torch.is_wrapped(t) else t for x, t, flag in given if flag]
            begun = iter(_BeginGraph.apply(self.name, *sources))
        return tuple(next(begun) if flag else x for x, flag in zip(xs, self._flags, strict=True))

    def _uncopied_result(self, error: Exception) -> TypeError:
        return TypeError(
            f"{self.name} returns, stores or changes an object that cannot be copied ({error}): expected tensors, and "
            "containers of them"
        )

    def _run(self, arguments: Sequence[Any], xs: Sequence[Tensor]) -> Any:
        """Run the function in the surroundings of its first run, and return its result."""
        variables, *roots = arguments
        ambient, is_first = self._ambient, self._ambient is None
        before = RUNNING.names, RUNNING.in_stack, RUNNING.is_first
        RUNNING.names, RUNNING.in_stack, RUNNING.is_first = (*before[0], self.name), self._in_stack, is_first
        try:
            with contextlib.ExitStack() as stack:
                if ambient is None:
                    generators = (x for x in self._before.others if isinstance(x, torch.Generator))
                    self._ambient = ambient = AmbientState(xs, generators)
                else:
                    stack.enter_context(ambient.restored())
                stack.enter_context(assume_differentiated(self._in_transform and not is_first))
                stack.enter_context(torch.set_grad_enabled(self._grad))
                if self._forward_mode:  # the last mode sees a function first, and by whose code it is called
                    stack.enter_context(_torch.NoGradInForwardMode())
                stack.enter_context(_torch.use_attention(self._attention))
                if self._in_stack:
                    stack.enter_context(ForbiddenFunctions(self._messages_in_stack()))
                if self._saved_results is not None and not _torch.current_level() and (is_first or self._is_last):
                    stack.enter_context(self._saved_results.run(ambient, is_first=is_first))
                if is_first and self._outer_tensors:
                    stack.enter_context(self._outer_tensors)
                if is_first and _torch.current_pack_hook():  # which would offload what nobody reads again
                    hooks = SavedTensorHooks({})
                    stack.enter_context(hooks.activate(hooks.pack))
                with set_variables(variables, self.name):
                    out = self._call(*roots)
                ambient.record_end() if is_first else ambient.check_end(self.name)
                return out
        finally:
            RUNNING.names, RUNNING.in_stack, RUNNING.is_first = before

    def _messages_in_stack(self) -> dict[Callable[..., Any], str]:
        """Return the errors for what concerns one derivative of a stack: which one that is differs between runs."""
        end = f"which in a stack of transforms means one of them, and not the same one when {self.name} runs again"
        return {
            DATA: f"{self.name} reads tensor.data, {end}: expected tensor.detach(), which means all of them",
            REGISTER_HOOK: f"{self.name} calls tensor.register_hook, {end}: expected an autograd.Function, or no remat",
        } | {
            getter: f"{self.name} reads tensor.{name}, {end}: expected it not to, or no remat"
            for name, getter in QUERY_GETTERS.items()
        }

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
            self._check_attributes(x, self._tensor_attributes.get(i, {}))
        for shared, before in self._watched if self._first is None else ():
            for key, (value, length) in _read_object(shared).items():
                was, old_length = before.get(key) or _read_default(shared, key, value, length, is_empty=not before)
                if old_length != length or not (was is value or (type(value) in ATOMS and was == value)):
                    raise RuntimeError(
                        f"{self.name} changes '{key}' of a {type(shared).__name__}, which each run would change again: "
                        "expected P(remat=True) of a unit for a module, and other objects among the arguments, or in a list"
                    )

    def _check_attributes(self, x: Tensor, before: Mapping[str, Any]) -> None:
        """Raise RuntimeError for attributes of Python that a run has set on a tensor, but Dynamo's and a running call's."""
        for key, value in () if _torch.is_fake(x) else vars(x).items():  # a fake tensor has its own
            if before.get(key, _MISSING) is not value and key != "set_" and not _torch.is_compiler_attribute(key):
                raise RuntimeError(
                    f"{self.name} sets the attribute '{key}' of a tensor, which outside is another tensor: expected it "
                    "returned beside the result"
                )

    def _path_of(self, x: Tensor, given: list[Any]) -> str:
        arguments = self._arguments(given).items()
        return next((path for path, value in arguments if any(x is y for y in find_tensors(value))), "a tensor")

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
        for x in results:
            self._check_attributes(x, {})

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
        outcomes: list[list[Any]] = []
        for parts, own in ((self._first[0], self._first[1]), (now.parts, layouts)):
            texts = [TensorText(f"operand {i}") for i in range(operands)]
            texts += [TensorText(f"{dtype} of shape {list(shape)} on {device}") for dtype, shape, device in own]
            (first, last, out), _ = load(now._replace(parts=parts), texts)
            outcomes.append([out, *first, last])
        compared = zip(outcomes[0], outcomes[1], ("its result", *self._names), strict=True)
        return next((text for was, is_now, name in compared if (text := find_difference(was, is_now, name))), "")

    # --- what the first run has left ---

    def finish(self, outputs: Sequence[Tensor]) -> Any:
        """Write what the first run has changed into the caller's objects, with these results, and return its result."""
        assert self._caller is not None
        if self._outer_tensors is not None:
            self._outer_tensors.check()
            self._outer_tensors = None
        (after, out, count), caller = self._left, self._caller
        classes = map(type, after.tensors[count:])
        outputs = [y.as_subclass(c) if _torch.is_attribute_subclass(c) else y for c, y in zip(classes, outputs, strict=True)]
        tensors = [*self._before.tensors, *outputs]
        del classes
        self._left = self._caller = None
        self._watched = []
        self._before = self._before._replace(tensors=[])
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
        done: dict[int, tuple[Any, Any]] = {}
        try:
            (first, last, out), _ = load(after, tensors)
            merge(caller, [*first, last], done)
            return merge(None, out, done)
        except Exception as error:
            raise self._uncopied_result(error) from error


def _find_error(value: Any) -> str:
    """Return why pickle cannot copy a value; empty if it can."""
    try:
        take_snapshot([value])
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def _replace(out: Any, tensors: Mapping[int, Tensor]) -> Any:
    """Return a result with other tensors, if it is made of tensors and tuples alone; else `_MISSING`."""
    if isinstance(out, Tensor):
        return tensors[id(out)]
    if type(out) is tuple:
        parts = tuple([_replace(x, tensors) for x in out])
        return _MISSING if any(x is _MISSING for x in parts) else parts
    return out if type(out) in ATOMS else _MISSING
