"""What a run of a function has left when it ends, beside what another one has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ... import _torch
from .adapter_lookup import find_adapter
from .reachable import CONSTANT, OBJECT, TENSOR, ReachableObjects, Token, tokens_equal
from .snapshot import RunInputs, Snapshot, names_equal, write_contents

__all__ = ["RunOutcome"]


class RunOutcome:
    """What there was after a run: tensors are operands or results, objects those of before or new ones."""

    def __init__(self, after: ReachableObjects, made: RunInputs, xs: Sequence[Tensor]) -> None:
        operands = {id(x): i for i, x in enumerate(xs)}
        self.old = {k: i for i, obj in enumerate(made.objects) if (k := after.number_of(obj)) is not None}
        self.numbers: list[int] = []  # of the results, among all tensors
        self.results: list[Tensor] = []
        self.tensors: list[tuple[bool, int]] = []
        for k, tensor in enumerate(after.tensors):
            i = operands.get(id(tensor), operands.get(id(_torch.unwrap_untracked(tensor))))
            self.tensors.append((False, len(self.results)) if i is None else (True, i))
            if i is None:
                self.numbers.append(k)
                self.results.append(tensor)
        self.shapes = [(x.dtype, tuple(x.shape), x.device) for x in self.results]
        self.classes = [type(obj) for obj in after.objects]
        self.roots = [self._seen(token) for token in after.roots]
        self.parts = [[(names, [self._seen(t) for t in tokens]) for names, tokens in parts] for parts in after.parts]

    def changed(self, start: Snapshot) -> set[int]:
        """Which of the objects that were handed to the run are not as they were."""
        return {i for k, i in self.old.items() if not _same(start.parts[i], self.parts[k])}

    def _seen(self, token: Token) -> Token:
        kind, x = token
        if kind == CONSTANT:
            return token
        if kind == TENSOR:
            return kind, self.tensors[x]
        return kind, (True, self.old[x]) if x in self.old else (False, x)

    def differs(self, first: RunOutcome, after: ReachableObjects, labels: Sequence[str]) -> str:
        """What is not as it was after the first run; nothing if all is."""
        for label, a, b in zip(labels, first.roots, self.roots, strict=False):
            if not tokens_equal(a, b):
                return f"{label} was {_text(a, first)}, now it is {_text(b, self)}"
        for k, (one, two) in enumerate(zip(first.parts, self.parts, strict=False)):
            if first.classes[k] is not self.classes[k]:
                where = after.where((OBJECT, k), labels)
                return f"{where} was a {first.classes[k].__name__}, now it is a {self.classes[k].__name__}"
            for (names, tokens), (names_now, tokens_now) in zip(one, two, strict=False):
                if not names_equal(names, names_now):
                    where = after.where((OBJECT, k), labels)
                    return f"in {where} there were {_some(names)}, now there are {_some(names_now)}"
                for name, a, b in zip(names, tokens, tokens_now, strict=True):
                    if a[1] is not b[1] and not tokens_equal(a, b):
                        return f"{after.path(k, name, labels)} was {_text(a, first)}, now it is {_text(b, self)}"
        for k, was, now in zip(self.numbers, first.shapes, self.shapes, strict=False):
            if was != now:
                where = after.where((TENSOR, k), labels)
                return f"{where} was {was[0]} of shape {list(was[1])}, now it is {now[0]} of shape {list(now[1])}"
        return ""

    def put(
        self, after: ReachableObjects, found: ReachableObjects, changed: set[int], outputs: Sequence[Tensor]
    ) -> tuple[Any, Any]:
        """The first two roots, with what was changed written into what was found; these are the results."""
        putting = _Putting(self, after, found, outputs)
        for k, now in enumerate(after.objects):
            kind = find_adapter(now)
            if kind is None or kind.blank is None:
                continue
            if k in self.old:
                if self.old[k] in changed:
                    write_contents(found.objects[self.old[k]], putting.contents(k), found.own)
            elif any(token[0] != CONSTANT for _, tokens in after.parts[k] for token in tokens):
                write_contents(now, putting.contents(k), found.own)
        return putting.value(after.roots[0]), putting.value(after.roots[1])


class _Putting:
    """What a run has left, as it is handed out. No closures, as in runs.py."""

    def __init__(self, end: RunOutcome, after: ReachableObjects, found: ReachableObjects, outputs: Sequence[Tensor]) -> None:
        self._end, self._after, self._found, self._outputs = end, after, found, outputs
        self._made: dict[int, Any] = {}

    def value(self, token: Token) -> Any:
        kind, x = token
        if kind == CONSTANT:
            return x
        if kind == TENSOR:
            is_operand, i = self._end.tensors[x]
            return self._found.tensors[i] if is_operand else self._outputs[i]
        if x not in self._made:
            self._made[x] = self._obj(x)
        return self._made[x]

    def _obj(self, k: int) -> Any:
        if k in self._end.old:
            return self._found.objects[self._end.old[k]]
        now = self._after.objects[k]
        kind = find_adapter(now)
        assert kind is not None
        return now if kind.blank is not None else kind.fill(kind.like(now), self.contents(k))

    def contents(self, k: int) -> Any:
        return [(names, [self.value(token) for token in tokens]) for names, tokens in self._after.parts[k]]


def _same(before: Any, after: Any) -> bool:
    """Whether the tokens of before the run are those that were seen after it."""
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


def _some(names: list[Any]) -> str:
    return f"{len(names)} values" if len(names) > 8 or not all(isinstance(name, str) for name in names) else str(names)


def _text(token: Token, end: RunOutcome) -> str:
    kind, x = token
    if kind == CONSTANT:
        return repr(x) if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"
    if kind == TENSOR:
        return "one of the tensors it was handed" if x[0] else f"a tensor of shape {list(end.shapes[x[1]][1])}"
    return "an object it was handed" if x[0] else f"a new {end.classes[x[1]].__name__}"
