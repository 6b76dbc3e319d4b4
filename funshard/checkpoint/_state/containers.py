"""The containers of a state: what is in them, how they are made of it, and how a file names those that need no ``like``."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree

from ..._spec.tree import NAMESPACE
from ...averaging import Averaging
from ...compress._powersgd import PowerSGD
from ...loss_scale import LossScale
from ...optim import MatrixState
from .leaves import from_json, to_json

__all__ = ["FACTORIES", "Container", "Made", "contained", "is_container", "maker", "named", "opened", "to_file"]

Made = Callable[[list[Any]], Any]
SEQUENCES = {cls.__name__: cls for cls in (list, tuple, deque)}
MAPPINGS = {cls.__name__: cls for cls in (dict, OrderedDict, defaultdict, Counter)}
TUPLES = {cls.__name__: cls for cls in (Averaging, LossScale, MatrixState, PowerSGD)}
NAMED = SEQUENCES | MAPPINGS | TUPLES
"""What a file can name: exactly these classes, and none that inherits from them."""
FACTORIES = {cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple, OrderedDict, Counter, deque)}
"""Of a defaultdict, beside None."""


class Container(NamedTuple):
    """What is in a container: ``kind`` is its name in a file, "" for one that has none, ``of`` what else makes it one."""

    kind: str
    of: Any
    entries: tuple[Any, ...]
    children: list[Any]
    make: Made


def is_container(value: Any) -> bool:
    """Whether something is in it that a state has by itself; None is a plain value."""
    return type(value) is Counter or not (value is None or optree.tree_is_leaf(value, namespace=NAMESPACE))


def opened(value: Any) -> Container:
    """What is in a container."""
    kind, of = named(value)
    if kind in MAPPINGS:
        entries, children = tuple(value), list(value.values())
    elif kind in SEQUENCES:
        entries, children = tuple(range(len(value))), list(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        cls: Any = type(value)
        return Container(kind, of, tuple(cls._fields), list(value), lambda children: cls(*children))
    else:
        unknown: Any = value
        children, metadata, entries, unflatten = optree.tree_flatten_one_level(unknown, namespace=NAMESPACE)
        return Container(kind, of, tuple(entries), list(children), lambda children: unflatten(metadata, children))
    return Container(kind, of, entries, children, maker(kind, of, entries))


def named(value: Any) -> tuple[str, Any]:
    """``(kind, of)`` of a container."""
    cls = type(value)
    if NAMED.get(cls.__name__) is not cls:
        return "", None
    if cls is deque:
        return "deque", value.maxlen
    if cls is defaultdict and (factory := value.default_factory) is not None:
        name = getattr(factory, "__name__", "")
        return ("defaultdict", name) if FACTORIES.get(name) is factory else ("", None)
    return cls.__name__, None


def maker(kind: str, of: Any, entries: Sequence[Any]) -> Made:
    """How a container that a file has named is made of its children."""
    match kind:
        case "list":
            return list
        case "tuple":
            return tuple
        case "deque":
            return lambda xs: deque(xs, of)
        case "dict" | "OrderedDict":
            cls: Any = MAPPINGS[kind]
            return lambda xs: cls(zip(entries, xs, strict=True))
        case "Counter":
            return lambda xs: Counter(dict(zip(entries, xs, strict=True)))
        case "defaultdict":
            factory: Callable[[], Any] | None = FACTORIES[of] if of else None
            return lambda xs: defaultdict(factory, zip(entries, xs, strict=True))
        case _:
            return lambda xs: TUPLES[kind](*xs)


# --- In a file. ---


def to_file(kind: str, of: Any, entries: Iterable[Any], children: list[Any]) -> dict[str, Any]:
    """A container of what is already as in a file. TypeError for a key that is no plain value."""
    more = {} if of is None else {"of": of}
    if kind in SEQUENCES:
        return {kind: children} | more
    named = [to_json(entry, "a key of a dict") if kind else str(entry) for entry in entries]
    return {kind or "other": [list(pair) for pair in zip(named, children, strict=True)]} | more


def contained(data: Any) -> list[tuple[Any, Any]] | None:
    """``(entry, child)`` of what `to_file` gives; None for anything else."""
    (kind, content), *_ = data.items()
    if kind in SEQUENCES:
        return list(enumerate(content))
    if kind in NAMED or kind == "other":
        return [(from_json(entry), child) for entry, child in content]
    return None
