"""The containers of a state: their children, how to build them, and their names in a file."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree

from ..._spec.tree import NAMESPACE
from ..._spec.unit_state import UnitState
from ...averaging import Averaging
from ...compress._powersgd import PowerSGD
from ...loss_scale import LossScale
from ...optim import AccumulationState, EmaState, FiniteState, MatrixState, QuantizedSlice, ScheduleState
from .plain_values import plain_from_json, plain_to_json

__all__ = [
    "FACTORIES",
    "MAPPINGS",
    "SEQUENCES",
    "TUPLES",
    "Builder",
    "Container",
    "container_to_json",
    "file_entries",
    "get_builder",
    "get_fields",
    "get_kind",
    "is_container",
    "open_container",
]

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


class Container(NamedTuple):
    """The parts of a container."""

    kind: str
    """Its name in a file, or "" if a file has none."""
    argument: Any
    """The length limit of a deque or the name of a defaultdict's factory."""
    entries: tuple[Any, ...]
    children: list[Any]
    build: Builder


def is_container(value: Any) -> bool:
    """Return whether a state takes a value apart; None is a plain value."""
    return type(value) is Counter or not (value is None or optree.tree_is_leaf(value, namespace=NAMESPACE))


def open_container(value: Any) -> Container:
    """Return the parts of a container."""
    kind, argument = get_kind(value)
    if kind in MAPPINGS:
        entries, children = tuple(value), list(value.values())
    elif kind in SEQUENCES:
        entries, children = tuple(range(len(value))), list(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        cls: Any = type(value)
        return Container(kind, argument, get_fields(cls), list(value), lambda children: cls(*children))
    else:
        unknown: Any = value
        children, metadata, entries, unflatten = optree.tree_flatten_one_level(unknown, namespace=NAMESPACE)
        return Container(kind, argument, tuple(entries), list(children), lambda children: unflatten(metadata, children))
    return Container(kind, argument, entries, children, get_builder(kind, argument, entries))


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
    """Return the function that builds a container that a file can name."""
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
    """Return the JSON data of a container from that of its children. Raises TypeError for a key that is no plain value."""
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
