"""The nodes of a state's tree, the paths of what lies in it, and the state that is built of its leaves."""

from __future__ import annotations

import base64
import contextlib
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
import torch

from ..._core.tree import NAMESPACE, Param
from ..._core.unit import Unit
from ..._spec.unit_state import UnitState
from ...averaging import Averaging
from ...compress._powersgd import PowerSGD
from ...loss_scale import LossScale
from ...optim import AccumulationState, EmaState, FiniteState, MatrixState, QuantizedSlice, ScheduleState
from .._errors import DamagedError
from .leaves import Leaf, SliceLeaf

__all__ = ["FACTORIES", "MAPPINGS", "MAX_DEPTH", "SEQUENCES", "TUPLES", "ContainerNode", "Node", "StatePath", "UnitsNode"]
__all__ += ["build_state", "container_to_json", "file_entries", "get_fields", "get_kind", "is_container", "is_plain_value"]
__all__ += ["iter_leaves", "make_container_node", "make_dict_node", "make_matrix_state_node", "make_units_node"]
__all__ += ["describe_container", "parameter_slice", "plain_from_json", "plain_to_json", "stored_names", "walk"]


# --- Plain values (numbers, strings, bytes, dtypes, None) as JSON ---

PLAIN = (bool, int, float, str, type(None))
"""The classes whose values JSON holds as they are."""


def is_plain_value(value: object) -> bool:
    return type(value) in PLAIN or isinstance(value, bytes | torch.dtype)


def plain_to_json(value: object, name: str) -> Any:
    """Return a plain value as JSON data. Raises TypeError, with its name in the state, for any other value."""
    if isinstance(value, PLAIN) and type(value) in PLAIN:
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(
        f"state '{name}': expected a tensor, a number, a string, bytes, None or a container of such, got "
        f"{type(value).__module__}.{type(value).__qualname__}; a checkpoint holds no pickles: save the parts of the object, by "
        "its state_dict(), list(...), dict(...), .item() or torch.from_numpy(...)"
    )


def plain_from_json(data: Any) -> Any:
    """Return the plain value of JSON data. Inverse of `plain_to_json`. Raises DamagedError for any other data."""
    if type(data) in PLAIN:
        return data
    if type(data) is dict and len(data) == 1:
        ((kind, text),) = data.items()
        if kind == "bytes" and type(text) is str:
            with contextlib.suppress(ValueError):
                return base64.b64decode(text, validate=True)
        if kind == "dtype" and type(text) is str and isinstance(found := getattr(torch, text, None), torch.dtype):
            return found
    raise DamagedError(f"expected a number, a string, null, bytes or a dtype of this torch, got {reprlib.repr(data)}")


# --- The containers of a state: their children, how to build them, and their names in a file ---

Builder = Callable[[list[Any]], Any]
"""A function from the children of a container to the container."""
SEQUENCES = {cls.__name__: cls for cls in (list, tuple, deque)}
MAPPINGS = {cls.__name__: cls for cls in (dict, OrderedDict, defaultdict, Counter, UnitState)}
COMPOSED = (AccumulationState, EmaState, FiniteState, ScheduleState)
TUPLES = {cls.__name__: cls for cls in (Averaging, LossScale, MatrixState, PowerSGD, QuantizedSlice, *COMPOSED)}
STORED_FIELDS = {MatrixState: ("step", "slices", "owned", "rest")}
"""The names of fields in files, for classes whose attributes were renamed since version 0.1."""
NAMED = SEQUENCES | MAPPINGS | TUPLES
"""The classes that a file can name: exactly these, not their subclasses."""
FACTORIES = {cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple, OrderedDict, Counter, deque)}
"""The default factories of a defaultdict that a file can name, besides None."""


def is_container(value: Any) -> bool:
    """Return whether a state takes a value apart; None is a plain value."""
    return type(value) is Counter or not (value is None or optree.tree_is_leaf(value, namespace=NAMESPACE))


def describe_container(value: Any, describe_child: Callable[[Any, Any], Node]) -> ContainerNode:
    """Return the node of a container, whose children ``describe_child(entry, child)`` describes."""
    kind, argument = get_kind(value)
    build: Builder
    if kind in MAPPINGS or kind in SEQUENCES:
        entries = tuple(value) if kind in MAPPINGS else tuple(range(len(value)))
        children = value.values() if kind in MAPPINGS else value
        build = get_builder(kind, argument, entries)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        cls: Any = type(value)
        entries, children, build = get_fields(cls), value, lambda xs: cls(*xs)
    else:
        children, metadata, entries, unflatten = optree.tree_flatten_one_level(value, namespace=NAMESPACE)
        build = partial(unflatten, metadata)
    return ContainerNode(kind, argument, tuple(entries), tuple(map(describe_child, entries, children)), build)


def get_kind(value: Any) -> tuple[str, Any]:
    """Return a container's kind, "" if files do not know it, and what makes one beside its children, such as a maxlen."""
    cls = type(value)
    if NAMED.get(cls.__name__) is not cls:
        return "", None
    if isinstance(value, UnitState):
        return "UnitState", sorted(value.numbers)
    if cls is deque:
        return "deque", value.maxlen
    if cls is defaultdict and (factory := value.default_factory) is not None:
        name = getattr(factory, "__name__", "")
        return ("defaultdict", name) if FACTORIES.get(name) is factory else ("", None)
    return cls.__name__, None


def get_fields(cls: Any) -> tuple[str, ...]:
    """Return the names that the fields of a named tuple have in files."""
    fields: tuple[str, ...] = cls._fields
    return STORED_FIELDS.get(cls, fields)


def get_builder(kind: str, argument: Any, entries: Sequence[Any]) -> Builder:
    match kind:
        case "list":
            return list
        case "tuple":
            return tuple
        case "deque":
            return lambda xs: deque(xs, argument)
        case "dict" | "OrderedDict":
            cls: Any = MAPPINGS[kind]
            return lambda xs: cls(zip(entries, xs, strict=True))
        case "UnitState":
            return lambda xs: UnitState(zip(entries, xs, strict=True), argument)
        case "Counter":
            return lambda xs: Counter(dict(zip(entries, xs, strict=True)))
        case "defaultdict":
            factory: Callable[[], Any] | None = FACTORIES[argument] if argument else None
            return lambda xs: defaultdict(factory, zip(entries, xs, strict=True))
        case _:
            return lambda xs: TUPLES[kind](*xs)


# --- As JSON. ---


def container_to_json(kind: str, argument: Any, entries: Iterable[Any], children: list[Any]) -> dict[str, Any]:
    more = {} if argument is None else {"of": argument}
    if kind in SEQUENCES:
        return {kind: children} | more
    keys = [plain_to_json(entry, "a key of a dict") if kind else str(entry) for entry in entries]
    return {kind or "other": [list(pair) for pair in zip(keys, children, strict=True)]} | more


def file_entries(data: Any) -> list[tuple[Any, Any]] | None:
    """Return ``(entry, child)`` for the children of a container in JSON data, or None if the data is a leaf."""
    (kind, content), *_ = data.items()
    if kind in SEQUENCES:
        return list(enumerate(content))
    if kind in NAMED or kind == "other":
        return [(plain_from_json(entry), child) for entry, child in content]
    return None


# --- Nodes and paths ---

MAX_DEPTH = 100
"""The most containers inside each other that a state may have, since `load` builds them by recursion."""


@dataclass(frozen=True)
class ContainerNode:
    """A container: its children, and how it is built of them."""

    kind: str
    """Its name in a file, or "" if a file has none."""
    argument: Any
    """The length limit of a deque, the name of a defaultdict's factory, or the names of a `UnitState`'s numbers."""
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
    return make_container_node("dict", None, children)


def make_units_node(
    prefix: str, children: Mapping[str, Node], *, is_complete: bool, kind: str = "dict", argument: Any = None
) -> UnitsNode:
    return UnitsNode(**vars(make_container_node(kind, argument, children)), prefix=prefix, is_complete=is_complete)


def make_matrix_state_node(
    step: Node, slices: Mapping[str, Node], owned: Mapping[str, Node], fallback: Mapping[str, Node]
) -> ContainerNode:
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
