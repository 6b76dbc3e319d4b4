"""Check the JSON tree of a state once when it is read, so that the code that uses it meets no other data."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn

from .._errors import DamagedError
from .containers import FACTORIES, MAPPINGS, SEQUENCES, TUPLES, get_fields
from .matrix_state import FALLBACK, MATRIX
from .plain_values import plain_from_json
from .tree import MAX_DEPTH

__all__ = ["check_fields", "check_tree", "raise_damaged"]

KeyPath = tuple[str, ...]
"""The keys that lead to a part of a state."""
MAX_NUMEL = 1 << 63
"""More than any size of a tensor."""


def raise_damaged(where: str, expected: str, found: object) -> NoReturn:
    """Raise DamagedError that says what was expected and what was found."""
    raise DamagedError(f"{where}: expected {expected}, got {reprlib.repr(found)}")


def check_fields(data: Any, fields: dict[str, type], where: str) -> None:
    """Check that data is a dict with these fields, of exactly these types. Raises DamagedError otherwise."""
    if type(data) is not dict:
        raise_damaged(where, "an object", data)
    for name, cls in fields.items():
        if name not in data:
            raise_damaged(where, f"a field '{name}'", [*data])
        if type(data[name]) is not cls:
            raise_damaged(f"{where}: field '{name}'", f"one of type {cls.__name__}", data[name])


def check_tree(data: Any, path: KeyPath = ()) -> None:
    """Check that data is a tree of `tree_to_json`. Raises DamagedError, with the path in the state, otherwise."""
    kind, content = _open_node(data, path)
    if _is_container(data, path):
        for entry, child in _check_entries(data, path):
            check_tree(child, (*path, str(entry)))
    elif kind == "units":
        _check_units(content, path)
    elif kind == "tensor":
        shape, dtype, *flags = _check_items(content, 5, path)
        _check_tensor_data(shape, dtype, flags, path)
    elif kind == "values":
        if type(content) is not list or not content:
            raise_damaged(_format_path(path), "the values of all ranks", content)
        for value in content:
            _check_plain(value, path)
    elif kind == "value":
        _check_plain(content, path)
    else:
        raise_damaged(_format_path(path), "a container or a leaf", kind)


def _check_slot(data: Any, path: KeyPath) -> None:
    """Check the data of one parameter in a unit's state, or of a part of it."""
    kind, content = _open_node(data, path)
    if _is_container(data, path):
        for entry, child in _check_entries(data, path):
            _check_slot(child, (*path, str(entry)))
    elif kind == MATRIX:
        step, slices, owned = _check_items(content, 3, path)
        _check_slot(step, path)
        for part in (slices, owned):
            if not _is_container(part, path):
                raise_damaged(_format_path(path), "a container", part)
        _check_slot(slices, path)
        for entry, child in _check_entries(owned, path):
            _, leaf = _open_node(child, (*path, str(entry)), "owned")
            shape, dtype, flag = _check_items(leaf, 3, path)
            _check_tensor_data(shape, dtype, [flag], path)
    elif kind == FALLBACK:
        for part in _check_items(content, 2, path):
            _check_slot(part, path)
    elif kind == "scalar":
        dtype, flag = _check_items(content, 2, path)
        _check_tensor_data([], dtype, [flag], path)
    elif kind == "slice":
        _check_tensor_data([], content, [], path)
    elif kind == "blocks":
        dtype, block = _check_items(content, 2, path)
        _check_tensor_data([], dtype, [], path)
        if type(block) is not int or not 1 < block < MAX_NUMEL:
            raise_damaged(_format_path(path), "a number of elements", block)
    elif kind == "value":
        _check_plain(content, path)
    else:
        raise_damaged(_format_path(path), "a container or a leaf of a unit", kind)


def _check_units(data: Any, path: KeyPath) -> None:
    """Raise DamagedError unless the data describe a state by unit."""
    where = _format_path(path)
    check_fields(data, {"whole": bool, "params": list, "rest": list}, where)
    kind = data.get("kind", "dict")
    if type(kind) is not str or kind not in MAPPINGS:
        raise_damaged(where, f"one of {', '.join(MAPPINGS)}", kind)
    _check_argument(kind, data.get("of"), path)
    known: set[str] = set()
    for param in data["params"]:
        names, dtype, slot = _check_items(param, 3, path)
        if type(names) is not list or not names or any(type(name) is not str for name in names):
            raise_damaged(where, "the names of a parameter", names)
        if known & {*names}:
            raise_damaged(where, "each parameter once", names)
        known |= {*names}
        _check_plain({"dtype": dtype}, path)
        _check_slot(slot, (*path, names[0]))
    for entry, child in _check_pairs(data["rest"], path):
        check_tree(child, (*path, str(entry)))


# --- Parts of trees and slots. ---


def _format_path(path: KeyPath) -> str:
    return f"state '{'.'.join(path)[:200]}'"


def _open_node(data: Any, path: KeyPath, wanted: str = "") -> tuple[str, Any]:
    """Return the kind and the content of a node, which is of the kind ``wanted`` if that is given."""
    if len(path) > MAX_DEPTH:
        raise_damaged(_format_path(path), f"at most {MAX_DEPTH} containers in each other", "more")
    if type(data) is not dict or not data or {*[*data][1:]} - {"of"}:
        raise_damaged(_format_path(path), "an object of one kind", data)
    kind, content = next(iter(data.items()))
    if wanted and kind != wanted:
        raise_damaged(_format_path(path), wanted, kind)
    return kind, content


def _is_container(data: Any, path: KeyPath) -> bool:
    """Return whether the data describe a container, not a leaf."""
    kind, _ = _open_node(data, path)
    return kind in SEQUENCES or kind in MAPPINGS or kind in TUPLES or kind == "other"


def _check_entries(data: dict[str, Any], path: KeyPath) -> list[tuple[Any, Any]]:
    """Return ``(entry, child)`` for the children of a container."""
    kind, content = next(iter(data.items()))
    _check_argument(kind, data.get("of"), path)
    if kind in SEQUENCES:
        if type(content) is not list:
            raise_damaged(_format_path(path), "a list", content)
        return [*enumerate(content)]
    pairs = _check_pairs(content, path)
    if kind in TUPLES and (names := tuple(entry for entry, _ in pairs)) != get_fields(TUPLES[kind]):
        raise_damaged(_format_path(path), f"the fields {get_fields(TUPLES[kind])} of {kind}", names)
    return pairs


def _check_pairs(content: Any, path: KeyPath) -> list[tuple[Any, Any]]:
    """Return ``(entry, child)`` pairs with distinct plain entries."""
    if type(content) is not list:
        raise_damaged(_format_path(path), "a list of pairs", content)
    pairs = [(_check_plain(entry, path), child) for entry, child in (_check_items(pair, 2, path) for pair in content)]
    if len({entry for entry, _ in pairs}) < len(pairs):
        raise_damaged(_format_path(path), "each key once", [entry for entry, _ in pairs])
    return pairs


def _check_argument(kind: str, argument: Any, path: KeyPath) -> None:
    """Check the argument of a container, as in `Container`."""
    is_length = kind == "deque" and type(argument) is int and 0 <= argument < MAX_NUMEL
    is_factory = kind == "defaultdict" and type(argument) is str and argument in FACTORIES
    is_numbers = kind == "UnitState" and type(argument) is list and all(type(name) is str for name in argument)
    if (argument is not None or kind == "UnitState") and not (is_length or is_factory or is_numbers):
        raise_damaged(_format_path(path), f"no other argument of a {kind}", argument)


def _check_items(data: Any, count: int, path: KeyPath) -> Sequence[Any]:
    """Return a list of ``count`` items."""
    if type(data) is not list or len(data) != count:
        raise_damaged(_format_path(path), f"a list of {count}", data)
    return data


def _check_tensor_data(shape: Any, dtype: Any, flags: Sequence[Any], path: KeyPath) -> None:
    """Raise DamagedError unless these are a shape, a dtype and flags."""
    if type(shape) is not list or any(type(size) is not int or not 0 <= size < MAX_NUMEL for size in shape):
        raise_damaged(_format_path(path), "a shape", shape)
    if type(dtype) is not dict or [*dtype] != ["dtype"]:
        raise_damaged(_format_path(path), "a dtype", dtype)
    _check_plain(dtype, path)
    if any(type(flag) is not bool for flag in flags):
        raise_damaged(_format_path(path), "true or false", flags)


def _check_plain(value: Any, path: KeyPath) -> Any:
    """Return a plain value from its JSON; raise DamagedError with its path if that is damaged."""
    try:
        return plain_from_json(value)
    except DamagedError as error:
        raise DamagedError(f"{_format_path(path)}: {error}") from error
