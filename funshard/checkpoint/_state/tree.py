"""The nodes of a state's tree, the paths of what lies in it, and the state that is built of its leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._spec.tree import Param
from ..._spec.unit import Unit
from ...optim import MatrixState
from .containers import Builder, get_builder, get_fields
from .leaves import Leaf, SliceLeaf

__all__ = [
    "MAX_DEPTH",
    "ContainerNode",
    "Node",
    "StatePath",
    "UnitsNode",
    "build_state",
    "iter_leaves",
    "make_container_node",
    "make_dict_node",
    "make_matrix_state_node",
    "make_units_node",
    "parameter_slice",
    "stored_names",
    "walk",
]

MAX_DEPTH = 100
"""The most containers inside each other that a state may have, since `load` builds them by recursion."""


@dataclass(frozen=True)
class ContainerNode:
    """A container: its children, how it is built of them, and ``kind`` and ``argument`` as in `Container`."""

    kind: str
    argument: Any
    entries: tuple[Any, ...]
    children: tuple[Node, ...]
    build: Builder


@dataclass(frozen=True)
class UnitsNode(ContainerNode):
    """A mapping by the keys of units, and perhaps other keys. It comes back as a dict if a file has no name for its class."""

    prefix: str
    """Its path in the state."""
    is_complete: bool
    """Whether it has all units of the spec."""


Node = ContainerNode | Leaf


class StatePath(NamedTuple):
    """The path of a part of a unit's state."""

    unit: Unit
    path: tuple[str, ...]
    """The path of the mapping by units."""
    numbers: frozenset[int] = frozenset()
    """The ids of tensors that are numbers for each group of options, as `find_option_numbers` returns them."""
    slot: tuple[str, ...] = ()
    """The path within the unit's entry of the mapping."""
    subset: tuple[Param, ...] | None = None
    """The parameters that the part belongs to, or None for all of the unit's."""
    is_compact: bool = False
    """As in `SliceLeaf`."""

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters that the part belongs to."""
        return self.unit.params if self.subset is None else self.subset

    @property
    def error_path(self) -> tuple[str, ...]:
        """The path for an error: of the unit's key, not of its parameters."""
        return (*self.path, self.unit.key, *self.slot)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """For each of the parameters, the names under which the part is stored."""
        return stored_names(self.params, self.path, self.slot)

    @property
    def block_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of what has an element for each block of the parameters' elements in memory order, which they tell."""
        orders = [".order" + "".join(map(str, p.order)) if p.permuted else "" for p in self.params]
        return tuple(tuple(name + order for name in names) for names, order in zip(self.names, orders, strict=True))

    def child(self, *entries: str) -> StatePath:
        """Return the path of an entry in this part."""
        return self._replace(slot=(*self.slot, *entries))

    def common_value(self, found: Mapping[str, Any]) -> Any:
        """Return the JSON data that all of the unit's parameters have. Raises ValueError where they differ."""
        (first, value), *others = found.items()
        where = f"state '{'.'.join(self.path)}'" if self.path else "the state"
        for name, other in others:
            if repr(other) != repr(value):  # by repr, NaN equals NaN
                is_mixed = len({"QuantizedSlice" in repr(x) for x in (other, value)}) == 2
                hint = ", as those that were saved, and save what fs.optim.decode_state returns: it loads with any units"
                raise ValueError(
                    f"unit '{self.unit.key}' of {where}: expected one kind of state for all of its parameters, got others for "
                    f"'{name}' than for '{first}'; choose units that do not mix them{hint if is_mixed else ''}"
                )
        return value


def make_container_node(kind: str, argument: Any, children: Mapping[Any, Node]) -> ContainerNode:
    """Return the node of a container that a file can name, of its children by entry."""
    entries = tuple(children)
    return ContainerNode(kind, argument, entries, tuple(children.values()), get_builder(kind, argument, entries))


def make_dict_node(children: Mapping[str, Node]) -> ContainerNode:
    """Return the node of a dict."""
    return make_container_node("dict", None, children)


def make_units_node(
    prefix: str, children: Mapping[str, Node], *, is_complete: bool, kind: str = "dict", argument: Any = None
) -> UnitsNode:
    """Return the node of a mapping by the keys of units."""
    return UnitsNode(**vars(make_container_node(kind, argument, children)), prefix=prefix, is_complete=is_complete)


def make_matrix_state_node(
    step: Node, slices: Mapping[str, Node], owned: Mapping[str, Node], fallback: Mapping[str, Node]
) -> ContainerNode:
    """Return the node of a unit's `MatrixState`."""
    children = (step, make_dict_node(slices), make_dict_node(owned), make_dict_node(fallback))
    return make_container_node(MatrixState.__name__, None, dict(zip(get_fields(MatrixState), children, strict=True)))


def stored_names(params: Iterable[Param], path: Sequence[str], slot: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return, for each parameter, the names under which a part of its state is stored."""
    return tuple(tuple(".".join((*path, name, *slot)) for name in param.names) for param in params)


def parameter_slice(unit: Unit, path: Sequence[str] = ()) -> SliceLeaf:
    """Return the leaf of the unit's parameters, as the part of a state at this path."""
    return SliceLeaf(unit, stored_names(unit.params, path, ()), unit.dtype, unit.at_rest is not None)


def walk(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Node]]:
    """Yield ``(path, node)`` of a node and of all nodes below it, depth first."""
    yield ".".join(path), node
    if isinstance(node, ContainerNode):
        for entry, child in zip(node.entries, node.children, strict=True):
            yield from walk(child, (*path, str(entry)))


def iter_leaves(node: Node) -> Iterator[Leaf]:
    """Yield the leaves in the order of the values that `describe` returns."""
    return (found for _, found in walk(node) if not isinstance(found, ContainerNode))


def build_state(node: Node, values: Iterator[Any]) -> Any:
    """Return the state that has these values as leaves. Inverse of `describe`, without `per_rank`."""
    if isinstance(node, ContainerNode):
        return node.build([build_state(child, values) for child in node.children])
    return next(values)
