"""What can be reached from some values: objects that a run may change, and tensors."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .. import _torch
from .kind import ATOMS, Parts
from .kinds import kind_of
from .special import read_own

__all__ = ["LEAF", "OBJECT", "TENSOR", "Reached", "Token", "alike", "read"]

LEAF, TENSOR, OBJECT = range(3)
Token = tuple[int, Any]
"""A constant, or the number of a tensor or an object."""


class Reached:
    """All that can be reached from some values, in the order in which it is found. ``own`` are modules without `OWN`."""

    def __init__(self, roots: Iterable[Any], own: Iterable[nn.Module] = ()) -> None:
        self.own = set(own)
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []
        self.parts: list[list[tuple[list[Any], list[Token]]]] = []
        self._index: dict[int, int] = {}  # of objects, by id
        self._tensors: dict[int, int] = {}
        self._from: list[tuple[int, Any]] = []  # where each object was found
        self._tensors_from: list[tuple[int, Any]] = []
        self.roots = [self._token(value, -1, i) for i, value in enumerate(roots)]
        for i, obj in enumerate(self.objects):  # which grows
            self.parts.append(
                [
                    (names, [self._token(v, i, n) for n, v in zip(names, values, strict=True)])
                    for names, values in read(obj, self.own)
                ]
            )

    def _token(self, value: Any, parent: int, name: Any) -> Token:
        cls = type(value)
        if cls in ATOMS or cls is _torch.StandIn:
            return LEAF, value
        if isinstance(value, Tensor):
            number = self._tensors.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
                self._tensors_from.append((parent, name))
            return TENSOR, number
        if kind_of(value) is None or (name == "_parameters" and isinstance(self.objects[parent], nn.Module)):
            return LEAF, value
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


def read(obj: Any, own: Iterable[nn.Module]) -> Parts:
    """What is in an object; of a module among ``own`` all but `OWN`."""
    kind = kind_of(obj)
    assert kind is not None
    return read_own(obj) if isinstance(obj, nn.Module) and obj in own else kind.read(obj)


def alike(a: Token, b: Token) -> bool:
    """Whether two tokens are the same; of constants that are no plain values it is enough that they have one type."""
    if a[0] != b[0]:
        return False
    x, y = a[1], b[1]
    if a[0] != LEAF or x is y:
        return x == y if a[0] != LEAF else True
    if type(x) is not type(y):
        return False
    return type(x) not in ATOMS or bool(x == y) or bool(x != x and y != y)
