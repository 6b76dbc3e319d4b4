"""The objects and tensors that can be reached from some values, as tokens that can be compared between runs."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ... import _torch
from .adapter_lookup import find_adapter
from .adapters import PLAIN_TYPES, Contents, ObjectAdapter
from .stateful_adapters import read_module_state

__all__ = ["CONSTANT", "OBJECT", "TENSOR", "ReachableObjects", "Token", "TokenPart", "names_equal", "read_contents"]
__all__ += ["tokens_equal"]

CONSTANT, TENSOR, OBJECT = range(3)
Token = tuple[int, Any]
"""``(CONSTANT, value)``, or the index of a tensor or an object: ``(TENSOR, i)``, ``(OBJECT, i)``."""
TokenPart = tuple[list[Any], list[Token]]
"""A part of an object's contents: names, and a token for each value."""


class ReachableObjects:
    """The objects that a run may change, and the tensors, in the order in which they are found.

    ``owned`` are modules whose `CALL_ATTRIBUTES` and submodules are not searched, ``constants`` the ids of tensors that are
    constants (None: `_find_registered`). ``more`` is searched last: what it leads to has another path where there is one.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        owned: Iterable[nn.Module],
        constants: frozenset[int] | None = None,
        more: Sequence[Any] = (),
    ) -> None:
        self.owned = set(owned)
        self.constants = constants or frozenset()
        self._search(roots, more)
        if constants is None and (registered := self._find_registered()):
            self.constants = registered
            self._search(roots, more)

    def _search(self, roots: Sequence[Any], more: Sequence[Any]) -> None:
        """Find all that the roots reach, then what the others reach besides."""
        self.tensors: list[Tensor] = []
        self.objects: list[Any] = []
        self.adapters: list[ObjectAdapter] = []  # of the objects
        self.contents: list[list[TokenPart]] = []
        self._object_indices: dict[int, int] = {}  # by id
        self._tensor_indices: dict[int, int] = {}
        self._object_parents: list[tuple[int, Any]] = []  # the object each one was found in, and its name there
        self._tensor_parents: list[tuple[int, Any]] = []
        self.roots = [self._token_of(value, -1, i) for i, value in enumerate(roots)]
        self._read_objects()
        for value in more:
            self._token_of(value, -1, len(roots))
        self._read_objects()

    def _read_objects(self) -> None:
        """Read the contents of the objects that were found and not read yet, and of those in them."""
        while (i := len(self.contents)) < len(self.objects):
            self.contents.append(
                [
                    (names, [self._token_of(v, i, n) for n, v in zip(names, values, strict=True)])
                    for names, values in read_contents(self.objects[i], self.adapters[i], self.owned)
                ]
            )

    def _find_registered(self) -> frozenset[int]:
        """Return the ids of registered parameters that other attributes of modules hold as well.

        They are constants there, as in ``_parameters``: nn.GRU has a list of its weights, which is stale in a call.
        """
        held = [i for i, x in enumerate(self.tensors) if type(x) is nn.Parameter and self._is_in_module(i)]
        if not held:
            return frozenset()
        mappings = (vars(obj)["_parameters"] for obj in self.objects if isinstance(obj, nn.Module))
        registered = {id(x) for mapping in mappings if isinstance(mapping, dict) for x in dict.values(mapping)}
        return frozenset(id(self.tensors[i]) for i in held) & registered

    def _is_in_module(self, i: int) -> bool:
        """Return whether a tensor was found inside a module."""
        parent = self._tensor_parents[i][0]
        while parent >= 0 and not isinstance(self.objects[parent], nn.Module):
            parent = self._object_parents[parent][0]
        return parent >= 0

    def _token_of(self, value: Any, parent: int, name: Any) -> Token:
        """Return a value's token; number it if it is a new tensor or object."""
        cls = type(value)
        if cls in PLAIN_TYPES or cls is _torch.StandIn:
            return CONSTANT, value
        if isinstance(value, Tensor):
            if id(value) in self.constants:
                return CONSTANT, value
            i = self._tensor_indices.setdefault(id(value), len(self.tensors))
            if i == len(self.tensors):
                self.tensors.append(value)
                self._tensor_parents.append((parent, name))
            return TENSOR, i
        adapter = find_adapter(value)
        if adapter is None or (name == "_parameters" and isinstance(self.objects[parent], nn.Module)):
            return CONSTANT, value
        i = self._object_indices.setdefault(id(value), len(self.objects))
        if i == len(self.objects):
            self.objects.append(value)
            self.adapters.append(adapter)
            self._object_parents.append((parent, name))
        return OBJECT, i

    def index_of(self, obj: object) -> int | None:
        """Return the index of an object; None if it was not reached."""
        return self._object_indices.get(id(obj))

    def value_of(self, token: Token) -> Any:
        """Return the constant, tensor or object that a token stands for."""
        kind, x = token
        return x if kind == CONSTANT else self.tensors[x] if kind == TENSOR else self.objects[x]

    def path_of(self, token: Token, root_names: Sequence[str]) -> str:
        """Return the path of a tensor or an object, such as ``args[0].layers[1].keys``."""
        parent, name = (self._tensor_parents if token[0] == TENSOR else self._object_parents)[token[1]]
        return self.path_in(parent, name, root_names)

    def path_in(self, parent: int, name: Any, root_names: Sequence[str]) -> str:
        """Return the path of an item of the object with index ``parent``; of a root if that is -1."""
        if parent < 0:
            return str(root_names[name]) if name < len(root_names) else "an object"
        obj = self.objects[parent]
        prefix = self.path_in(*self._object_parents[parent], root_names)
        if isinstance(obj, types.CellType | types.MethodType):
            return prefix
        if isinstance(obj, list | tuple | deque | dict):
            return f"{prefix}[{name!r}]"
        return f"{prefix}.{name}"


def read_contents(obj: Any, adapter: ObjectAdapter, owned: Iterable[nn.Module]) -> Contents:
    """Return what an object contains; of an owned module all but `CALL_ATTRIBUTES` and submodules."""
    return read_module_state(obj) if isinstance(obj, nn.Module) and obj in owned else adapter.read(obj)


def tokens_equal(a: Token, b: Token) -> bool:
    """Return whether two tokens are the same; constants of other than `PLAIN_TYPES` need only have the same type."""
    (kind, x), (other_kind, y) = a, b
    if kind != CONSTANT or other_kind != CONSTANT:
        return a == b
    if x is y or type(x) is not type(y):
        return x is y
    return type(x) not in PLAIN_TYPES or bool(x == y) or bool(x != x and y != y)


def names_equal(names: list[Any], others: list[Any]) -> bool:
    """Return whether two parts have the same names in the same order: tensors by identity, others by value."""
    if len(names) != len(others):
        return False
    return all(not (a is not b and (isinstance(a, Tensor) or a != b)) for a, b in zip(names, others, strict=True))
