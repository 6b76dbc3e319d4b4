"""What a function was handed before its first run, what a run is given, and what it has left when it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .adapter_lookup import find_adapter
from .reachable import CONSTANT, OBJECT, TENSOR, ReachableObjects, Token, read_contents, tokens_equal
from .special_adapters import set_attributes

__all__ = ["RunInputs", "Snapshot", "names_equal", "write_contents"]


class Snapshot:
    """What was reached before the first run, without the tensors, and without holding objects that may hold some later."""

    def __init__(self, found: ReachableObjects, own: set[nn.Module]) -> None:
        self._own = own
        self.roots, self.parts = found.roots, found.parts
        self.kinds = [find_adapter(obj) for obj in found.objects]
        self.likes = [kind.like(obj) for kind, obj in zip(self.kinds, found.objects, strict=True) if kind]
        self._refs = [_reference(obj) for obj in found.objects]
        self._classes = [type(obj) for obj in found.objects]
        self._users: list[list[int]] = [[] for _ in found.objects]
        self._holding: set[int] = set()
        for i, parts in enumerate(self.parts):
            for _, tokens in parts:
                for kind, number in tokens:
                    if kind == OBJECT:
                        self._users[number].append(i)
                    elif kind == TENSOR:
                        self._holding.add(i)

    def check_makeable(self, numbers: set[int], name: str) -> None:
        """TypeError for objects of these numbers that no other run could be given as they were."""
        for i in numbers:
            kind = self.kinds[i]
            assert kind is not None
            if kind.blank is not None and not isinstance(self.likes[i], nn.Module):
                self.blank(i, name)

    def blank(self, i: int, name: str) -> Any:
        """A new object of this number's class, with nothing in it yet. TypeError where none can be made."""
        kind = self.kinds[i]
        assert kind is not None
        assert kind.blank is not None
        try:
            return kind.blank(self.likes[i])
        except TypeError as error:
            raise TypeError(
                f"{name} was handed an object of {self._classes[i].__name__} that it changes, or that holds tensors, and that "
                f"cannot be made anew for it to run again ({error}): pass tensors, or what is in it"
            ) from error

    def made(
        self, xs: Sequence[Tensor], changed: set[int], found: ReachableObjects | None, name: str, paths: Sequence[str]
    ) -> RunInputs:
        """All of it with these tensors: what is still as it was, and copies of the rest."""
        stands = [ref() for ref in self._refs] if found is None else list(found.objects)
        other = set(self._holding) | changed
        if found is None:
            other |= self._others(stands)
        todo = list(other)
        while todo:
            for user in self._users[todo.pop()]:
                if user not in other:
                    other.add(user)
                    todo.append(user)
        made = RunInputs(name)
        objects: list[Any] = [None if i in other else obj for i, obj in enumerate(stands)]
        making = _Making(self, xs, stands, objects, name)
        for i in sorted(other):
            making.obj(i)
        for i in sorted(other):
            kind = self.kinds[i]
            assert kind is not None
            if kind.blank is not None:
                if isinstance(objects[i], nn.Module):
                    made.saved.append((objects[i], dict(vars(objects[i]))))
                write_contents(objects[i], making.contents(i), self._own)
        made.roots, made.objects = [making.value(token) for token in self.roots], objects
        made.kept = [i for i in range(len(objects)) if i not in other]
        return made

    def _others(self, stands: list[Any]) -> set[int]:
        """Which of the objects are not as they were, or nobody knows."""
        out: set[int] = set()
        for i, parts in enumerate(self.parts):
            if stands[i] is None or type(stands[i]) is not self._classes[i]:
                out.add(i)
                continue
            now = read_contents(stands[i], self._own)
            if len(now) != len(parts):
                out.add(i)
                continue
            for (names, tokens), (names_now, values) in zip(parts, now, strict=True):
                if not names_equal(names, names_now):
                    out.add(i)
                    break
                for (kind, x), value_now in zip(tokens, values, strict=True):
                    if kind == TENSOR:
                        out.add(i)
                    elif kind == CONSTANT:
                        if x is not value_now and not tokens_equal((CONSTANT, x), (CONSTANT, value_now)):
                            out.add(i)
                    elif stands[x] is None and self._refs[x] is _nothing:
                        stands[x] = value_now  # a list, say: what stands in its place
                    elif stands[x] is not value_now:
                        out.add(i)
        return out


class _Making:
    """The objects of one run while they are made. No closures: those that know each other hold all until they are collected."""

    def __init__(self, start: Snapshot, xs: Sequence[Tensor], stands: list[Any], objects: list[Any], name: str) -> None:
        self._start, self._xs, self._stands, self._objects, self._name = start, xs, stands, objects, name

    def value(self, token: Token) -> Any:
        kind, x = token
        return x if kind == CONSTANT else self._xs[x] if kind == TENSOR else self.obj(x)

    def obj(self, i: int) -> Any:
        kind = self._start.kinds[i]
        assert kind is not None
        if self._objects[i] is None:
            stands = self._stands[i]
            if kind.blank is None:
                self._objects[i] = kind.fill(self._start.likes[i], self.contents(i))
            else:
                self._objects[i] = stands if isinstance(stands, nn.Module) else self._start.blank(i, self._name)
        return self._objects[i]

    def contents(self, i: int) -> Any:
        return [(names, [self.value(token) for token in tokens]) for names, tokens in self._start.parts[i]]


def _nothing() -> None:
    return None


def _reference(obj: Any) -> Callable[[], Any]:
    if isinstance(obj, nn.Module):
        return lambda: obj
    try:
        return weakref.ref(obj)
    except TypeError:
        return _nothing


def write_contents(obj: Any, contents: Any, own: set[nn.Module]) -> None:
    """Have this in an object; modules but for ``own`` get all their attributes."""
    kind = find_adapter(obj)
    assert kind is not None
    if isinstance(obj, nn.Module) and obj not in own:
        set_attributes(obj, dict(zip(*contents[0], strict=True)), ())
    else:
        kind.fill(obj, contents)


class RunInputs:
    """What one run is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.roots: list[Any] = []
        self.objects: list[Any] = []
        self.kept: list[int] = []
        self.saved: list[tuple[nn.Module, dict[str, Any]]] = []

    def restore(self) -> None:
        """The modules are as they were before the run."""
        for module, attributes in reversed(self.saved):
            vars(module).clear()
            vars(module).update(attributes)
        self.saved.clear()

    def undo(self, found: ReachableObjects) -> None:
        """What the run has changed in the caller's objects is as it was."""
        self.restore()
        for i in self.kept:
            kind, parts = find_adapter(found.objects[i]), found.parts[i]
            if kind is not None and kind.blank is not None:
                write_contents(
                    found.objects[i],
                    [(names, [_found(token, found) for token in tokens]) for names, tokens in parts],
                    found.own,
                )


def _found(token: Token, found: ReachableObjects) -> Any:
    kind, x = token
    return x if kind == CONSTANT else found.tensors[x] if kind == TENSOR else found.objects[x]


def names_equal(names: list[Any], others: list[Any]) -> bool:
    """Whether what was seen has the same names in the same order: tensors by identity, others by value."""
    if len(names) != len(others):
        return False
    return all(not (a is not b and (isinstance(a, Tensor) or a != b)) for a, b in zip(names, others, strict=True))
