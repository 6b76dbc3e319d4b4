"""The outcome of a run: its results, and its changes to the objects that it was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ... import _torch
from .iterators import find_referents
from .reachable import CONSTANT, OBJECT, TENSOR, ReachableObjects, Token, names_equal, tokens_equal
from .snapshot import RunInputs, Snapshot, write_contents
from .stateful_adapters import STATEFUL_ADAPTERS

__all__ = ["RunOutcome"]


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
