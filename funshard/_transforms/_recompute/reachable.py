"""What can be reached from some values: objects that a run may change, and tensors."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ... import _torch
from .adapter_lookup import find_adapter
from .adapters import PLAIN_TYPES, Contents
from .special_adapters import read_own

__all__ = ["CONSTANT", "OBJECT", "TENSOR", "ReachableObjects", "Token", "read_contents", "tokens_equal"]

CONSTANT, TENSOR, OBJECT = range(3)
Token = tuple[int, Any]
"""A constant, or the number of a tensor or an object."""


class ReachableObjects:
    """All that can be reached from some values, in the order in which it is found. ``own`` are modules without `OWN`.

    ``constants`` are the ids of tensors that are none of them: without any, see `_registered`. ``more`` are objects that are
    looked into at last, and have a path of their own only where nothing else leads to them.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        own: Iterable[nn.Module] = (),
        constants: frozenset[int] | None = None,
        more: Sequence[Any] = (),
    ) -> None:
        self.own = set(own)
        self.constants = constants or frozenset()
        self._find(roots, more)
        if constants is None and (registered := self._registered()):
            self.constants = registered
            self._find(roots, more)

    def _find(self, roots: Sequence[Any], more: Sequence[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []
        self.parts: list[list[tuple[list[Any], list[Token]]]] = []
        self._index: dict[int, int] = {}  # of objects, by id
        self._tensors: dict[int, int] = {}
        self._from: list[tuple[int, Any]] = []  # where each object was found
        self._tensors_from: list[tuple[int, Any]] = []
        self.roots = [self._token(value, -1, i) for i, value in enumerate(roots)]
        self._look_inside()
        for value in more:
            self._token(value, -1, len(roots))
        self._look_inside()

    def _look_inside(self) -> None:
        while (i := len(self.parts)) < len(self.objects):
            self.parts.append(
                [
                    (names, [self._token(v, i, n) for n, v in zip(names, values, strict=True)])
                    for names, values in read_contents(self.objects[i], self.own)
                ]
            )

    def _registered(self) -> frozenset[int]:
        """Return which of the tensors, by id, are parameters of modules reached that other attributes of modules hold as well.

        They are constants there, as in ``_parameters``: nn.GRU has a list of its weights, which is stale in a call.
        """
        held = [i for i, x in enumerate(self.tensors) if type(x) is nn.Parameter and self._is_in_module(i)]
        if not held:
            return frozenset()
        mappings = (vars(obj)["_parameters"] for obj in self.objects if isinstance(obj, nn.Module))
        registered = {id(x) for mapping in mappings if isinstance(mapping, dict) for x in dict.values(mapping)}
        return frozenset(id(self.tensors[i]) for i in held) & registered

    def _is_in_module(self, i: int) -> bool:
        parent = self._tensors_from[i][0]
        while parent >= 0 and not isinstance(self.objects[parent], nn.Module):
            parent = self._from[parent][0]
        return parent >= 0

    def _token(self, value: Any, parent: int, name: Any) -> Token:
        cls = type(value)
        if cls in PLAIN_TYPES or cls is _torch.StandIn:
            return CONSTANT, value
        if isinstance(value, Tensor):
            if id(value) in self.constants:
                return CONSTANT, value
            number = self._tensors.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
                self._tensors_from.append((parent, name))
            return TENSOR, number
        if find_adapter(value) is None or (name == "_parameters" and isinstance(self.objects[parent], nn.Module)):
            return CONSTANT, value
        number = self._index.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
            self._from.append((parent, name))
        return OBJECT, number

    def number_of(self, obj: object) -> int | None:
        """The number of an object."""
        return self._index.get(id(obj))

    def where(self, token: Token, roots: Sequence[str]) -> str:
        """The path of a tensor or an object, such as ``args[0].layers[1].keys``."""
        parent, name = (self._tensors_from if token[0] == TENSOR else self._from)[token[1]]
        return self.path(parent, name, roots)

    def path(self, parent: int, name: Any, roots: Sequence[str]) -> str:
        """The path of what has this name in an object; with ``roots`` for those."""
        if parent < 0:
            return str(roots[name]) if name < len(roots) else "an object"
        obj = self.objects[parent]
        before = self.path(*self._from[parent], roots)
        if isinstance(obj, types.CellType | types.MethodType):
            return before
        if isinstance(obj, list | tuple | deque | dict):
            return f"{before}[{name!r}]"
        return f"{before}.{name}"


def read_contents(obj: Any, own: Iterable[nn.Module]) -> Contents:
    """What is in an object; of a module among ``own`` all but `OWN`."""
    kind = find_adapter(obj)
    assert kind is not None
    return read_own(obj) if isinstance(obj, nn.Module) and obj in own else kind.read(obj)


def tokens_equal(a: Token, b: Token) -> bool:
    """Whether two tokens are the same; of constants that are no plain values it is enough that they have one type."""
    if a[0] != b[0]:
        return False
    x, y = a[1], b[1]
    if a[0] != CONSTANT or x is y:
        return x == y if a[0] != CONSTANT else True
    if type(x) is not type(y):
        return False
    return type(x) not in PLAIN_TYPES or bool(x == y) or bool(x != x and y != y)
