"""What the tree of a state in a file may be: checked once when it is read, so that nothing that follows meets anything else."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn

from .._errors import DamagedError
from .containers import FACTORIES, MAPPINGS, SEQUENCES, TUPLES
from .leaves import DEEPEST, from_json
from .matrix_state import MATRIX, REST

__all__ = ["check_fields", "check_tree", "refuse"]

Path = tuple[str, ...]
LARGEST = 1 << 63
"""No tensor has as many elements."""


def refuse(where: str, expected: str, found: object) -> NoReturn:
    """Raise DamagedError that says what was expected and what is there."""
    raise DamagedError(f"{where}: expected {expected}, got {reprlib.repr(found)}")


def check_fields(data: Any, fields: dict[str, type], where: str) -> None:
    """Check that a dict has these fields, of exactly these types. Raises DamagedError otherwise."""
    if type(data) is not dict:
        refuse(where, "an object", data)
    for name, cls in fields.items():
        if name not in data:
            refuse(where, f"a field '{name}'", [*data])
        if type(data[name]) is not cls:
            refuse(f"{where}: field '{name}'", f"one of type {cls.__name__}", data[name])


def check_tree(data: Any, path: Path = ()) -> None:
    """Check a tree of `written_tree`. Raises DamagedError, naming the path in the state, for anything else."""
    kind, content = _node(data, path)
    if _is_container(data, path):
        for entry, child in _entries(data, path):
            check_tree(child, (*path, str(entry)))
    elif kind == "units":
        _check_units(content, path)
    elif kind == "tensor":
        shape, dtype, *flags = _items(content, 5, path)
        _check_tensor(shape, dtype, flags, path)
    elif kind == "values":
        if type(content) is not list or not content:
            refuse(_where(path), "the values of all ranks", content)
        for value in content:
            _plain(value, path)
    elif kind == "value":
        _plain(content, path)
    else:
        refuse(_where(path), "a container or a leaf", kind)


def _check_slot(data: Any, path: Path) -> None:
    """Check what a file has for one parameter, or a part of it."""
    kind, content = _node(data, path)
    if _is_container(data, path):
        for entry, child in _entries(data, path):
            _check_slot(child, (*path, str(entry)))
    elif kind == MATRIX:
        step, slices, owned = _items(content, 3, path)
        _check_slot(step, path)
        for part in (slices, owned):
            if not _is_container(part, path):
                refuse(_where(path), "a container", part)
        _check_slot(slices, path)
        for entry, child in _entries(owned, path):
            _, leaf = _node(child, (*path, str(entry)), "owned")
            shape, dtype, flag = _items(leaf, 3, path)
            _check_tensor(shape, dtype, [flag], path)
    elif kind == REST:
        for part in _items(content, 2, path):
            _check_slot(part, path)
    elif kind == "scalar":
        dtype, flag = _items(content, 2, path)
        _check_tensor([], dtype, [flag], path)
    elif kind == "slice":
        _check_tensor([], content, [], path)
    elif kind == "value":
        _plain(content, path)
    else:
        refuse(_where(path), "a container or a leaf of a unit", kind)


def _check_units(data: Any, path: Path) -> None:
    where = _where(path)
    check_fields(data, {"whole": bool, "params": list, "rest": list}, where)
    kind, of = data.get("kind", "dict"), data.get("of")
    if type(kind) is not str or kind not in MAPPINGS:
        refuse(where, f"one of {', '.join(MAPPINGS)}", kind)
    _check_of(kind, of, path)
    known: set[str] = set()
    for param in data["params"]:
        names, dtype, slot = _items(param, 3, path)
        if type(names) is not list or not names or any(type(name) is not str for name in names):
            refuse(where, "the names of a parameter", names)
        if known & {*names}:
            refuse(where, "each parameter once", names)
        known |= {*names}
        _plain({"dtype": dtype}, path)
        _check_slot(slot, (*path, names[0]))
    for entry, child in _pairs(data["rest"], path):
        check_tree(child, (*path, str(entry)))


# --- Parts of both. ---


def _where(path: Path) -> str:
    return f"state '{'.'.join(path)[:200]}'"


def _node(data: Any, path: Path, wanted: str = "") -> tuple[str, Any]:
    """Return the kind and the content of a node."""
    if len(path) > DEEPEST:
        refuse(_where(path), f"at most {DEEPEST} containers in each other", "more")
    if type(data) is not dict or not data or {*[*data][1:]} - {"of"}:
        refuse(_where(path), "an object of one kind", data)
    kind, content = next(iter(data.items()))
    if wanted and kind != wanted:
        refuse(_where(path), wanted, kind)
    return kind, content


def _is_container(data: Any, path: Path) -> bool:
    kind, _ = _node(data, path)
    return kind in SEQUENCES or kind in MAPPINGS or kind in TUPLES or kind == "other"


def _entries(data: dict[str, Any], path: Path) -> list[tuple[Any, Any]]:
    """Return what is in a container."""
    kind, content = next(iter(data.items()))
    _check_of(kind, data.get("of"), path)
    if kind in SEQUENCES:
        if type(content) is not list:
            refuse(_where(path), "a list", content)
        return [*enumerate(content)]
    pairs = _pairs(content, path)
    if kind in TUPLES and (names := tuple(entry for entry, _ in pairs)) != TUPLES[kind]._fields:
        refuse(_where(path), f"the fields {TUPLES[kind]._fields} of {kind}", names)
    return pairs


def _pairs(content: Any, path: Path) -> list[tuple[Any, Any]]:
    if type(content) is not list:
        refuse(_where(path), "a list of pairs", content)
    pairs = [(_plain(entry, path), child) for entry, child in (_items(pair, 2, path) for pair in content)]
    if len({entry for entry, _ in pairs}) < len(pairs):
        refuse(_where(path), "each key once", [entry for entry, _ in pairs])
    return pairs


def _check_of(kind: str, of: Any, path: Path) -> None:
    """Check what else makes a container what it is."""
    is_length = kind == "deque" and type(of) is int and 0 <= of < LARGEST
    is_factory = kind == "defaultdict" and type(of) is str and of in FACTORIES
    if of is not None and not is_length and not is_factory:
        refuse(_where(path), f"nothing else of a {kind} than that", of)


def _items(data: Any, count: int, path: Path) -> Sequence[Any]:
    if type(data) is not list or len(data) != count:
        refuse(_where(path), f"a list of {count}", data)
    return data


def _check_tensor(shape: Any, dtype: Any, flags: Sequence[Any], path: Path) -> None:
    if type(shape) is not list or any(type(size) is not int or not 0 <= size < LARGEST for size in shape):
        refuse(_where(path), "a shape", shape)
    if type(dtype) is not dict or [*dtype] != ["dtype"]:
        refuse(_where(path), "a dtype", dtype)
    _plain(dtype, path)
    if any(type(flag) is not bool for flag in flags):
        refuse(_where(path), "true or false", flags)


def _plain(value: Any, path: Path) -> Any:
    try:
        return from_json(value)
    except DamagedError as error:
        raise DamagedError(f"{_where(path)}: {error}") from error
