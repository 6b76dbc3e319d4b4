"""What a function was handed before its first run, what a run is given, and what it has left when it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .kinds import kind_of, set_attributes
from .reach import LEAF, OBJECT, TENSOR, Reached, Token, alike, read

__all__ = ["End", "Made", "Start"]


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

        def value(token: Token) -> Any:
            kind, x = token
            return x if kind == LEAF else xs[x] if kind == TENSOR else obj(x)

        def obj(i: int) -> Any:
            kind = self._kinds[i]
            assert kind is not None
            if objects[i] is None:
                if kind.blank is None:
                    objects[i] = kind.fill(self._likes[i], contents(i))
                else:
                    objects[i] = stands[i] if isinstance(stands[i], nn.Module) else self._blank(i, name)
            return objects[i]

        def contents(i: int) -> Any:
            return [(names, [value(token) for token in tokens]) for names, tokens in self.parts[i]]

        for i in sorted(other):
            obj(i)
        for i in sorted(other):
            kind = self._kinds[i]
            assert kind is not None
            if kind.blank is not None:
                if isinstance(objects[i], nn.Module):
                    made.saved.append((objects[i], dict(vars(objects[i]))))
                _write(objects[i], contents(i), self._own)
        made.roots, made.objects = [value(token) for token in self.roots], objects
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
                if not _same_names(names, names_now):
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


def _write(obj: Any, contents: Any, own: set[nn.Module]) -> None:
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
                _write(
                    found.objects[i],
                    [(names, [_found(token, found) for token in tokens]) for names, tokens in parts],
                    found.own,
                )


def _found(token: Token, found: Reached) -> Any:
    kind, x = token
    return x if kind == LEAF else found.tensors[x] if kind == TENSOR else found.objects[x]


class End:
    """What there was after a run: tensors are operands or results, objects those of before or new ones."""

    def __init__(self, after: Reached, made: Made, xs: Sequence[Tensor]) -> None:
        operands = {id(x): i for i, x in enumerate(xs)}
        self.old = {k: i for i, obj in enumerate(made.objects) if (k := after.number_of(obj)) is not None}
        self.numbers: list[int] = []  # of the results, among all tensors
        self.results: list[Tensor] = []
        self._tensors: list[tuple[bool, int]] = []
        for k, tensor in enumerate(after.tensors):
            i = operands.get(id(tensor))
            self._tensors.append((False, len(self.results)) if i is None else (True, i))
            if i is None:
                self.numbers.append(k)
                self.results.append(tensor)
        self.shapes = [(x.dtype, tuple(x.shape), x.device) for x in self.results]
        self.classes = [type(obj) for obj in after.objects]
        self.roots = [self._seen(token) for token in after.roots]
        self.parts = [[(names, [self._seen(t) for t in tokens]) for names, tokens in parts] for parts in after.parts]

    def changed(self, start: Start) -> set[int]:
        """Which of the objects that were handed to the run are not as they were."""
        return {i for k, i in self.old.items() if not _same(start.parts[i], self.parts[k])}

    def _seen(self, token: Token) -> Token:
        kind, x = token
        if kind == LEAF:
            return token
        if kind == TENSOR:
            return kind, self._tensors[x]
        return kind, (True, self.old[x]) if x in self.old else (False, x)

    def differs(self, first: End, after: Reached, labels: Sequence[str]) -> str:
        """What is not as it was after the first run; nothing if all is."""
        for label, a, b in zip(labels, first.roots, self.roots, strict=False):
            if not alike(a, b):
                return f"{label} was {_text(a, first)}, now it is {_text(b, self)}"
        for k, (one, two) in enumerate(zip(first.parts, self.parts, strict=False)):
            if first.classes[k] is not self.classes[k]:
                where = after.where((OBJECT, k), labels)
                return f"{where} was a {first.classes[k].__name__}, now it is a {self.classes[k].__name__}"
            for (names, tokens), (names_now, tokens_now) in zip(one, two, strict=False):
                if not _same_names(names, names_now):
                    where = after.where((OBJECT, k), labels)
                    return f"in {where} there were {_some(names)}, now there are {_some(names_now)}"
                for name, a, b in zip(names, tokens, tokens_now, strict=True):
                    if a[1] is not b[1] and not alike(a, b):
                        return f"{after.path(k, name, labels)} was {_text(a, first)}, now it is {_text(b, self)}"
        for k, was, now in zip(self.numbers, first.shapes, self.shapes, strict=False):
            if was != now:
                where = after.where((TENSOR, k), labels)
                return f"{where} was {was[0]} of shape {list(was[1])}, now it is {now[0]} of shape {list(now[1])}"
        return ""

    def put(self, after: Reached, found: Reached, changed: set[int], outputs: Sequence[Tensor]) -> Any:
        """The result, with what was changed written into what was found; these are the results."""
        made: dict[int, Any] = {}

        def value(token: Token) -> Any:
            kind, x = token
            if kind == LEAF:
                return x
            if kind == TENSOR:
                is_operand, i = self._tensors[x]
                return found.tensors[i] if is_operand else outputs[i]
            if x not in made:
                made[x] = obj(x)
            return made[x]

        def obj(k: int) -> Any:
            if k in self.old:
                return found.objects[self.old[k]]
            now = after.objects[k]
            kind = kind_of(now)
            assert kind is not None
            return now if kind.blank is not None else kind.fill(kind.like(now), contents(k))

        def contents(k: int) -> Any:
            return [(names, [value(token) for token in tokens]) for names, tokens in after.parts[k]]

        for k, now in enumerate(after.objects):
            kind = kind_of(now)
            if kind is None or kind.blank is None:
                continue
            if k in self.old:
                if self.old[k] in changed:
                    _write(found.objects[self.old[k]], contents(k), found.own)
            elif any(token[0] != LEAF for _, tokens in after.parts[k] for token in tokens):
                _write(now, contents(k), found.own)
        return value(after.roots[0])


def _same(before: Any, after: Any) -> bool:
    """Whether the tokens of before the run are those that were seen after it."""
    if len(before) != len(after):
        return False
    for (names, tokens), (names_now, tokens_now) in zip(before, after, strict=True):
        if not _same_names(names, names_now):
            return False
        for (kind, x), (kind_now, y) in zip(tokens, tokens_now, strict=True):
            if kind != kind_now:
                return False
            if not (x is y or alike((LEAF, x), (LEAF, y)) if kind == LEAF else y == (True, x)):
                return False
    return True


def _same_names(names: list[Any], others: list[Any]) -> bool:
    if len(names) != len(others):
        return False
    return all(not (a is not b and (isinstance(a, Tensor) or a != b)) for a, b in zip(names, others, strict=True))


def _some(names: list[Any]) -> str:
    return f"{len(names)} values" if len(names) > 8 or not all(isinstance(name, str) for name in names) else str(names)


def _text(token: Token, end: End) -> str:
    kind, x = token
    if kind == LEAF:
        return repr(x) if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"
    if kind == TENSOR:
        return "one of the tensors it was handed" if x[0] else f"a tensor of shape {list(end.shapes[x[1]][1])}"
    return "an object it was handed" if x[0] else f"a new {end.classes[x[1]].__name__}"
