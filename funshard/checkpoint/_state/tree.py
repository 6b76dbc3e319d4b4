"""The tree that a state is described by: its nodes, where in it something is, its leaves, and the state made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._spec.tree import Param
from ..._spec.unit import Unit
from ...optim import MatrixState
from .containers import Made, maker
from .leaves import Leaf, Slice

__all__ = [
    "Branch",
    "Node",
    "Place",
    "Units",
    "build",
    "containers",
    "dict_of",
    "leaves",
    "matrix_state",
    "parameters",
    "stored_names",
]


@dataclass(frozen=True)
class Branch:
    """A container: its children, how it is made of them, and ``kind`` and ``of`` as in `Container`."""

    kind: str
    of: Any
    entries: tuple[Any, ...]
    children: tuple[Node, ...]
    make: Made


@dataclass(frozen=True)
class Units:
    """A mapping by the keys of units. ``children`` are of keys of units and of others, ``whole`` whether of all units.

    ``kind`` and ``of`` are as in `Container`; it comes back as a dict if a file has no name for it.
    """

    prefix: str
    children: Mapping[str, Node]
    whole: bool
    kind: str = "dict"
    of: Any = None


Node = Branch | Units | Leaf


class Place(NamedTuple):
    """Where in a state something is that belongs to a unit."""

    unit: Unit
    path: tuple[str, ...]
    """Of the mapping by units."""
    numbers: frozenset[int] = frozenset()
    """As `numbers_in` gives them."""
    slot: tuple[str, ...] = ()
    """In what the mapping has for the unit."""
    of: tuple[Param, ...] | None = None
    """To which of the unit's parameters it belongs, if not to all."""
    alone: bool = False
    """Whether it is what lies in the slice of one of them."""

    @property
    def params(self) -> tuple[Param, ...]:
        """To which it belongs."""
        return self.unit.params if self.of is None else self.of

    @property
    def full(self) -> tuple[str, ...]:
        """The path for an error."""
        return (*self.path, self.unit.key, *self.slot)

    def at(self, *entries: str) -> Place:
        """Deeper in it."""
        return self._replace(slot=(*self.slot, *entries))

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Under which it is stored, for each of the parameters."""
        return stored_names(self.params, self.path, self.slot)

    def alike(self, found: Mapping[str, Any]) -> Any:
        """What a file has for parameters of the unit, by name; ValueError unless it is the same for all of them."""
        (first, one), *others = found.items()
        where = f"state '{'.'.join(self.path)}'" if self.path else "the state"
        for name, other in others:
            if repr(other) != repr(one):  # by which NaN is NaN
                raise ValueError(
                    f"unit '{self.unit.key}' of {where}: expected one kind of state for all of its parameters, got others for "
                    f"'{name}' than for '{first}'; choose units that do not mix them"
                )
        return one


def dict_of(children: Mapping[str, Node]) -> Branch:
    """A dict."""
    return Branch("dict", None, tuple(children), tuple(children.values()), maker("dict", None, tuple(children)))


def matrix_state(step: Node, slices: Mapping[str, Node], owned: Mapping[str, Node], rest: Mapping[str, Node]) -> Branch:
    """What an optimizer of matrices has for a unit."""
    children = (step, dict_of(slices), dict_of(owned), dict_of(rest))
    return Branch("MatrixState", None, MatrixState._fields, children, maker("MatrixState", None, MatrixState._fields))


def stored_names(params: Iterable[Param], path: Sequence[str], slot: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The names under which what belongs to parameters is stored, for each of them."""
    return tuple(tuple(".".join((*path, name, *slot)) for name in param.names) for param in params)


def parameters(unit: Unit, path: Sequence[str] = ()) -> Slice:
    """The unit's parameters, as the part of a state at this path."""
    return Slice(unit, stored_names(unit.params, path, ()), unit.dtype, unit.at_rest is not None)


def leaves(node: Node) -> Iterator[Leaf]:
    """In the order of `described`."""
    if isinstance(node, Branch):
        for child in node.children:
            yield from leaves(child)
    elif isinstance(node, Units):
        for child in node.children.values():
            yield from leaves(child)
    else:
        yield node


def containers(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """``(path, what it is)`` of every container."""
    if not isinstance(node, Branch | Units):
        return
    yield ".".join(path), f"a container, {node.kind or 'of a class of its own'}" + ("" if node.of is None else f" of {node.of}")
    children = zip(node.entries, node.children, strict=True) if isinstance(node, Branch) else node.children.items()
    for entry, child in children:
        yield from containers(child, (*path, str(entry)))


def build(node: Node, values: Iterator[Any]) -> Any:
    """The state of these leaves. Inverse of `described`, but for `per_rank`, which is taken off."""
    if isinstance(node, Branch):
        return node.make([build(child, values) for child in node.children])
    if isinstance(node, Units):
        return maker(node.kind, node.of, tuple(node.children))([build(child, values) for child in node.children.values()])
    return next(values)
