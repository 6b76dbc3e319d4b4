"""A snapshot of the objects that a function reaches, the inputs of every run made from it, and the outcome of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ... import _torch
from .adapters import STATEFUL_ADAPTERS, ObjectAdapter, find_referents, set_attributes
from .reachable import CONSTANT, OBJECT, TENSOR, ReachableObjects, Token, names_equal, read_contents, tokens_equal

__all__ = ["RunInputs", "RunOutcome", "Snapshot"]


class Snapshot:
    """The contents of all reached objects before the first run, without the tensors.

    It holds no object that may hold a tensor later: it refers to them weakly, and knows what to make another one from.
    """

    def __init__(self, reached: ReachableObjects, owned: set[nn.Module]) -> None:
        self.owned = owned
        self.roots, self.contents = reached.roots, reached.contents
        self.adapters = reached.adapters
        self.contexts = [adapter.get_context(obj) for adapter, obj in zip(self.adapters, reached.objects, strict=True)]
        self._references = [_refer_to(obj) for obj in reached.objects]
        self._classes = [type(obj) for obj in reached.objects]
        self._holders: list[list[int]] = [[] for _ in reached.objects]  # the objects that contain each one
        self.with_tensors: set[int] = set()
        for i, contents in enumerate(self.contents):
            for _, tokens in contents:
                for kind, x in tokens:
                    if kind == OBJECT:
                        self._holders[x].append(i)
                    elif kind == TENSOR:
                        self.with_tensors.add(i)

    def check_copyable(self, indices: set[int], name: str) -> None:
        """Raise TypeError if one of these objects cannot be copied for another run of the function of this name."""
        for i in indices:
            if self.adapters[i].is_mutable and not isinstance(self.contexts[i], nn.Module):
                self.make_empty(i, name)

    def make_empty(self, i: int, name: str) -> Any:
        """Return a new object of the class of the i-th, with no contents; TypeError where none can be made."""
        make_empty = self.adapters[i].make_empty
        assert make_empty is not None
        try:
            return make_empty(self.contexts[i])
        except TypeError as error:
            raise TypeError(
                f"{name} was given a {self._classes[i].__name__} that it changes or may change, or that contains tensors, and "
                f"that cannot be copied for another run ({error}): pass tensors, or what the object contains"
            ) from error

    def get_current(self) -> list[Any]:
        """Return the objects as they are now; None for one that is gone or has no weak reference."""
        return [reference() for reference in self._references]

    def include_holders(self, indices: set[int]) -> set[int]:
        """Return these objects and all that contain them."""
        out, todo = set(indices), list(indices)
        while todo:
            holders = [holder for holder in self._holders[todo.pop()] if holder not in out]
            out.update(holders)
            todo += holders
        return out

    def find_changed(self, current: list[Any]) -> set[int]:
        """Return the indices of the objects that have changed since the first run, or that are gone."""
        out: set[int] = set()
        for i, contents in enumerate(self.contents):
            if current[i] is None or type(current[i]) is not self._classes[i]:
                out.add(i)
                continue
            contents_now = read_contents(current[i], self.adapters[i], self.owned)
            if len(contents_now) != len(contents):
                out.add(i)
                continue
            for (names, tokens), (names_now, values) in zip(contents, contents_now, strict=True):
                if not names_equal(names, names_now):
                    out.add(i)
                    break
                for (kind, x), value_now in zip(tokens, values, strict=True):
                    if kind == TENSOR:
                        out.add(i)
                    elif kind == CONSTANT:
                        if x is not value_now and not tokens_equal((CONSTANT, x), (CONSTANT, value_now)):
                            out.add(i)
                    elif current[x] is None and self._references[x] is _no_reference:
                        current[x] = value_now  # as a list, which has no weak reference: the one that is there now
                    elif current[x] is not value_now:
                        out.add(i)
        return out


def _no_reference() -> None:
    """Return None, as a dead weak reference does."""


def _refer_to(obj: Any) -> Callable[[], Any]:
    """Return a weak reference to an object, a strong one to a module, and one to None if the class takes none."""
    if isinstance(obj, nn.Module):
        return lambda: obj
    try:
        return weakref.ref(obj)
    except TypeError:
        return _no_reference


class RunInputs:
    """The objects that one run is given: copies of those with tensors, of changed ones, and of all that contain these.

    A class, because closures that refer to each other live until garbage is collected. ``xs`` are the tensors of the run.
    ``reached`` is None for a later run than the first, when any object may have changed or gone.
    """

    def __init__(
        self, snapshot: Snapshot, xs: Sequence[Tensor], changed: set[int], reached: ReachableObjects | None, name: str
    ) -> None:
        self._snapshot, self._xs, self._name = snapshot, xs, name
        self._current = snapshot.get_current() if reached is None else reached.objects
        changed = changed | (snapshot.find_changed(self._current) if reached is None else set())
        copied = sorted(snapshot.include_holders(snapshot.with_tensors | changed))
        self.objects = list(self._current)
        for i in copied:
            self.objects[i] = None
        self.shared = [i for i, obj in enumerate(self.objects) if obj is not None]  # the caller's own
        for i in copied:
            self._get_object(i)
        self._module_attributes: list[tuple[nn.Module, dict[str, Any]]] = []  # as they were before the run
        for i in copied:
            obj, adapter = self.objects[i], snapshot.adapters[i]
            if adapter.is_mutable:
                if isinstance(obj, nn.Module):
                    self._module_attributes.append((obj, dict(vars(obj))))
                write_contents(obj, adapter, self._get_contents(i), snapshot.owned)
        self.roots = [self._get_value(token) for token in snapshot.roots]

    def _get_value(self, token: Token) -> Any:
        """Return the value of a token: a constant, an operand or an object."""
        kind, x = token
        return x if kind == CONSTANT else self._xs[x] if kind == TENSOR else self._get_object(x)

    def _get_object(self, i: int) -> Any:
        """Return the object of this number, made at the first call if the run gets one of its own."""
        snapshot, adapter, current = self._snapshot, self._snapshot.adapters[i], self._current[i]
        if self.objects[i] is None:
            if not adapter.is_mutable:
                self.objects[i] = adapter.fill(snapshot.contexts[i], self._get_contents(i))
            else:
                self.objects[i] = current if isinstance(current, nn.Module) else snapshot.make_empty(i, self._name)
        return self.objects[i]

    def _get_contents(self, i: int) -> Any:
        return [(names, [self._get_value(token) for token in tokens]) for names, tokens in self._snapshot.contents[i]]

    def restore_modules(self) -> None:
        """Give the modules the attributes that they had before the run."""
        for module, attributes in reversed(self._module_attributes):
            vars(module).clear()
            vars(module).update(attributes)
        self._module_attributes.clear()

    def undo_changes(self, reached: ReachableObjects) -> None:
        """Undo what a run that failed has changed in the caller's objects."""
        self.restore_modules()
        for i in self.shared:
            if reached.adapters[i].is_mutable:
                contents = [(names, [reached.value_of(token) for token in tokens]) for names, tokens in reached.contents[i]]
                write_contents(reached.objects[i], reached.adapters[i], contents, reached.owned)


def write_contents(obj: Any, adapter: ObjectAdapter, contents: Any, owned: set[nn.Module]) -> None:
    """Replace what a mutable object contains; a module that is not owned gets all its attributes."""
    if isinstance(obj, nn.Module) and obj not in owned:
        set_attributes(obj, dict(zip(*contents[0], strict=True)), ())
    else:
        adapter.fill(obj, contents)


# --- The outcome of a run: its results, and its changes to the objects that it was given ---


class RunOutcome:
    """The objects and tensors that were reached after a run, as tokens that can be compared between runs.

    The token of a tensor is ``(TENSOR, (is_operand, i))``, of an operand or else a result; that of an object is
    ``(OBJECT, (is_input, i))``, of one that the run was given or else a new one.
    """

    def __init__(self, after: ReachableObjects, inputs: RunInputs, xs: Sequence[Tensor]) -> None:
        operands = {id(x): i for i, x in enumerate(xs)}
        self.input_indices = {k: i for i, obj in enumerate(inputs.objects) if (k := after.index_of(obj)) is not None}
        self.result_indices: list[int] = []  # of the results, among all tensors
        self.results: list[Tensor] = []
        self.tensors: list[tuple[bool, int]] = []
        for k, tensor in enumerate(after.tensors):
            i = operands.get(id(tensor), operands.get(id(_torch.unwrap_untracked(tensor))))
            self.tensors.append((False, len(self.results)) if i is None else (True, i))
            if i is None:
                self.result_indices.append(k)
                self.results.append(tensor)
        self.layouts = [(x.dtype, tuple(x.shape), x.device) for x in self.results]
        self.classes = [type(obj) for obj in after.objects]
        self.roots = [self._comparable(token) for token in after.roots]
        self.contents = [
            [(names, [self._comparable(t) for t in tokens]) for names, tokens in parts] for parts in after.contents
        ]

    def _comparable(self, token: Token) -> Token:
        """Return a token in a form that is equal in two runs: inputs by index, results by their own number."""
        kind, x = token
        if kind == CONSTANT:
            return token
        if kind == TENSOR:
            return kind, self.tensors[x]
        return kind, (True, self.input_indices[x]) if x in self.input_indices else (False, x)

    def find_deferred(self, after: ReachableObjects) -> list[Any]:
        """Return the iterators that the run has made and through which tensors can be reached."""
        new = (k for k, adapter in enumerate(after.adapters) if adapter is _ITERATOR and k not in self.input_indices)
        return [after.objects[k] for k in new if _refers_to_tensors(after.objects[k], after.owned)]

    def find_changed(self, snapshot: Snapshot) -> set[int]:
        """Return the indices of the input objects that the run has changed."""
        pairs = ((i, snapshot.contents[i], self.contents[k]) for k, i in self.input_indices.items())
        return {i for i, before, now in pairs if not _contents_equal(before, now)}

    def find_difference(self, first: RunOutcome, after: ReachableObjects, root_names: Sequence[str]) -> str:
        """Return what differs from the outcome of the first run, with its path; empty if nothing does."""
        for name, a, b in zip(root_names, first.roots, self.roots, strict=False):
            if not tokens_equal(a, b):
                return f"{name} was {_describe_token(a, first)}, now it is {_describe_token(b, self)}"
        for k, (before, now) in enumerate(zip(first.contents, self.contents, strict=False)):
            if first.classes[k] is not self.classes[k]:
                path = after.path_of((OBJECT, k), root_names)
                return f"{path} was a {first.classes[k].__name__}, now it is a {self.classes[k].__name__}"
            for (names, tokens), (names_now, tokens_now) in zip(before, now, strict=False):
                if not names_equal(names, names_now):
                    path = after.path_of((OBJECT, k), root_names)
                    return f"in {path} there were {_abridge_names(names)}, now there are {_abridge_names(names_now)}"
                for name, a, b in zip(names, tokens, tokens_now, strict=True):
                    if a[1] is not b[1] and not tokens_equal(a, b):
                        path = after.path_in(k, name, root_names)
                        return f"{path} was {_describe_token(a, first)}, now it is {_describe_token(b, self)}"
        for k, was, now in zip(self.result_indices, first.layouts, self.layouts, strict=False):
            if was != now:
                path = after.path_of((TENSOR, k), root_names)
                return f"{path} was {was[0]} of shape {list(was[1])}, now it is {now[0]} of shape {list(now[1])}"
        return ""

    def write_back(
        self, after: ReachableObjects, reached: ReachableObjects, changed: set[int], outputs: Sequence[Tensor]
    ) -> Any:
        """Write what the run has changed into the caller's objects, with ``outputs`` as results, and return two roots."""
        resolver = _OutcomeResolver(self, after, reached, outputs)
        for k, obj in enumerate(after.objects):
            i = self.input_indices.get(k)
            if not after.adapters[k].is_mutable or (i is not None and i not in changed):
                continue
            if i is not None or any(token[0] != CONSTANT for _, tokens in after.contents[k] for token in tokens):
                target = obj if i is None else reached.objects[i]
                write_contents(target, after.adapters[k], resolver.get_contents(k), reached.owned)
        return resolver.get_value(after.roots[0]), resolver.get_value(after.roots[1])


class _OutcomeResolver:
    """The resolver of a run's tokens to the caller's objects and tensors. A class for the reason of `RunInputs`."""

    def __init__(
        self, outcome: RunOutcome, after: ReachableObjects, reached: ReachableObjects, outputs: Sequence[Tensor]
    ) -> None:
        self._outcome, self._after, self._reached, self._outputs = outcome, after, reached, outputs
        self._objects: dict[int, Any] = {}

    def get_value(self, token: Token) -> Any:
        """Return the value of a token: a constant, a tensor or an object, made at the first call."""
        kind, x = token
        if kind == CONSTANT:
            return x
        if kind == TENSOR:
            is_operand, i = self._outcome.tensors[x]
            return self._reached.tensors[i] if is_operand else self._outputs[i]
        if x not in self._objects:
            self._objects[x] = self._get_object(x)
        return self._objects[x]

    def _get_object(self, k: int) -> Any:
        """Return the object of this number: an input, a mutable object itself, or an immutable one filled with its contents."""
        if k in self._outcome.input_indices:
            return self._reached.objects[self._outcome.input_indices[k]]
        obj, adapter = self._after.objects[k], self._after.adapters[k]
        return obj if adapter.is_mutable else adapter.fill(adapter.get_context(obj), self.get_contents(k))

    def get_contents(self, k: int) -> Any:
        """Return the contents of the object of this number."""
        return [(names, [self.get_value(token) for token in tokens]) for names, tokens in self._after.contents[k]]


_ITERATOR = STATEFUL_ADAPTERS[Iterator]


def _refers_to_tensors(iterator: Any, owned: set[nn.Module]) -> bool:
    """Return whether an iterator, or one inside it, holds tensors; parameters of ``owned`` modules do not count."""
    todo, seen = [iterator], [iterator]
    while todo:
        reached = ReachableObjects(find_referents(todo.pop()), owned)
        if reached.tensors:
            return True
        inner = (obj for obj, adapter in zip(reached.objects, reached.adapters, strict=True) if adapter is _ITERATOR)
        todo += (new := [obj for obj in inner if not any(obj is other for other in seen)])
        seen += new
    return False


def _contents_equal(before: Any, after: Any) -> bool:
    """Return whether the tokens of a snapshot are those of an outcome."""
    if len(before) != len(after):
        return False
    for (names, tokens), (names_now, tokens_now) in zip(before, after, strict=True):
        if not names_equal(names, names_now):
            return False
        for (kind, x), (kind_now, y) in zip(tokens, tokens_now, strict=True):
            if kind != kind_now:
                return False
            if not (x is y or tokens_equal((CONSTANT, x), (CONSTANT, y)) if kind == CONSTANT else y == (True, x)):
                return False
    return True


def _abridge_names(names: list[Any]) -> str:
    """Return a few names, or how many values there are."""
    return f"{len(names)} values" if len(names) > 8 or not all(isinstance(name, str) for name in names) else str(names)


def _describe_token(token: Token, outcome: RunOutcome) -> str:
    """Return the value of a token in words, for an error."""
    kind, x = token
    if kind == CONSTANT:
        return repr(x) if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"
    if kind == TENSOR:
        return "one of the tensors it was given" if x[0] else f"a tensor of shape {list(outcome.layouts[x[1]][1])}"
    return "an object it was given" if x[0] else f"a new {outcome.classes[x[1]].__name__}"
