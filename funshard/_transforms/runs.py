"""What a function was handed before its first run, what a run is given, and what it has left when it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .kinds import kind_of
from .reach import LEAF, OBJECT, TENSOR, Reached, Token, alike, read
from .special import set_attributes

__all__ = ["Made", "Start", "same_names", "write"]


class _Again:
    """The objects of another run, with its tensors in the places of those of the first one.

    No functions in a function: those hold each other, and the tensors until the cycle collector runs.
    """

    def __init__(self, start: Start, xs: Sequence[Tensor], objects: list[Any], stands: Sequence[Any], name: str) -> None:
        self._start, self._xs, self._objects, self._stands, self._name = start, xs, objects, stands, name

    def value(self, token: Token) -> Any:
        kind, x = token
        return x if kind == LEAF else self._xs[x] if kind == TENSOR else self.obj(x)

    def obj(self, i: int) -> Any:
        if self._objects[i] is None:
            self._objects[i] = self._start.filled(i, self.contents, self._stands[i], self._name)
        return self._objects[i]

    def contents(self, i: int) -> Any:
        return [(names, [self.value(token) for token in tokens]) for names, tokens in self._start.parts[i]]


class Start:
    """What was reached before the first run, without the tensors, and without holding objects that may hold some later."""

    def __init__(self, found: Reached, own: set[nn.Module]) -> None:
        self._own = own
        self.roots, self.parts = found.roots, found.parts
        self._kinds = [kind_of(obj) for obj in found.objects]
        self._likes = [kind.like(obj) for kind, obj in zip(self._kinds, found.objects, strict=True) if kind]
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
            kind = self._kinds[i]
            assert kind is not None
            if kind.blank is not None and not isinstance(self._likes[i], nn.Module):
                self._blank(i, name)

    def filled(self, i: int, contents: Callable[[int], Any], stands: Any, name: str) -> Any:
        """This object for another run: made of its contents, or to be written into."""
        kind = self._kinds[i]
        assert kind is not None
        if kind.blank is None:
            return kind.fill(self._likes[i], contents(i))
        return stands if isinstance(stands, nn.Module) else self._blank(i, name)

    def _blank(self, i: int, name: str) -> Any:
        kind = self._kinds[i]
        assert kind is not None
        assert kind.blank is not None
        try:
            return kind.blank(self._likes[i])
        except TypeError as error:
            raise TypeError(
                f"{name} was handed an object of {self._classes[i].__name__} that it changes, or that holds tensors, and that "
                f"cannot be made anew for it to run again ({error}): pass tensors, or what is in it"
            ) from error

    def made(self, xs: Sequence[Tensor], changed: set[int], found: Reached | None, name: str, paths: Sequence[str]) -> Made:
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
        made = Made(name)
        objects: list[Any] = [None if i in other else obj for i, obj in enumerate(stands)]

        again = _Again(self, xs, objects, stands, name)
        for i in sorted(other):
            again.obj(i)
        for i in sorted(other):
            kind = self._kinds[i]
            assert kind is not None
            if kind.blank is not None:
                if isinstance(objects[i], nn.Module):
                    made.saved.append((objects[i], dict(vars(objects[i]))))
                write(objects[i], again.contents(i), self._own)
        made.roots, made.objects = [again.value(token) for token in self.roots], objects
        made.kept = [i for i in range(len(objects)) if i not in other]
        return made

    def _others(self, stands: list[Any]) -> set[int]:
        """Which of the objects are not as they were, or nobody knows."""
        out: set[int] = set()
        for i, parts in enumerate(self.parts):
            if stands[i] is None or type(stands[i]) is not self._classes[i]:
                out.add(i)
                continue
            now = read(stands[i], self._own)
            if len(now) != len(parts):
                out.add(i)
                continue
            for (names, tokens), (names_now, values) in zip(parts, now, strict=True):
                if not same_names(names, names_now):
                    out.add(i)
                    break
                for (kind, x), value_now in zip(tokens, values, strict=True):
                    if kind == TENSOR:
                        out.add(i)
                    elif kind == LEAF:
                        if x is not value_now and not alike((LEAF, x), (LEAF, value_now)):
                            out.add(i)
                    elif stands[x] is None and self._refs[x] is _nothing:
                        stands[x] = value_now  # a list, say: what stands in its place
                    elif stands[x] is not value_now:
                        out.add(i)
        return out


def _nothing() -> None:
    return None


def _reference(obj: Any) -> Callable[[], Any]:
    if isinstance(obj, nn.Module):
        return lambda: obj
    try:
        return weakref.ref(obj)
    except TypeError:
        return _nothing


def write(obj: Any, contents: Any, own: set[nn.Module]) -> None:
    """Have this in an object; modules but for ``own`` get all their attributes."""
    kind = kind_of(obj)
    assert kind is not None
    if isinstance(obj, nn.Module) and obj not in own:
        set_attributes(obj, dict(zip(*contents[0], strict=True)), ())
    else:
        kind.fill(obj, contents)


class Made:
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

    def undo(self, found: Reached) -> None:
        """What the run has changed in the caller's objects is as it was."""
        self.restore()
        for i in self.kept:
            kind, parts = kind_of(found.objects[i]), found.parts[i]
            if kind is not None and kind.blank is not None:
                write(
                    found.objects[i],
                    [(names, [_found(token, found) for token in tokens]) for names, tokens in parts],
                    found.own,
                )


def _found(token: Token, found: Reached) -> Any:
    kind, x = token
    return x if kind == LEAF else found.tensors[x] if kind == TENSOR else found.objects[x]


def same_names(names: list[Any], others: list[Any]) -> bool:
    """Whether what was seen has the same names in the same order: tensors by identity, others by value."""
    if len(names) != len(others):
        return False
    return all(not (a is not b and (isinstance(a, Tensor) or a != b)) for a, b in zip(names, others, strict=True))
