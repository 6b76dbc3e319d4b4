"""A snapshot of the objects that a function reaches before its first run, and the inputs of every run, made from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .adapters import ObjectAdapter
from .reachable import CONSTANT, OBJECT, TENSOR, ReachableObjects, Token, names_equal, read_contents, tokens_equal
from .stateful_adapters import set_attributes

__all__ = ["RunInputs", "Snapshot", "write_contents"]


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
