"""Kinds of objects that are called: functions and their cells, bound methods, and functools.partial."""

from __future__ import annotations

import types
from typing import Any

from .adapters import Contents, ObjectAdapter

__all__ = ["CELL", "FUNCTION", "METHOD", "PARTIAL"]

METHOD = ObjectAdapter(
    lambda obj: [(["__func__", "__self__"], [obj.__func__, obj.__self__])],
    lambda obj: None,
    None,
    lambda _, parts: types.MethodType(*parts[0][1]),
)


def _make_partial(cls: Any, parts: Contents) -> Any:
    (_, (func, *args)), keywords, attributes = parts
    made = cls(func, *args, **dict(zip(*keywords, strict=True)))
    vars(made).update(zip(*attributes, strict=True))
    return made


PARTIAL = ObjectAdapter(
    lambda obj: [
        # arguments and keywords one by one: a partial copies their containers when it is made
        (["func", *(f"args[{i}]" for i in range(len(obj.args)))], [obj.func, *obj.args]),
        (list(obj.keywords), list(obj.keywords.values())),
        (list(vars(obj)), list(vars(obj).values())),
    ],
    type,
    None,
    _make_partial,
)


def _read_function(f: Any) -> Contents:
    """The dicts are the function's own: what is written into them is in the function."""
    return [
        (list(f.__code__.co_freevars), list(f.__closure__ or ())),
        (["__defaults__", "__kwdefaults__", "__dict__"], [f.__defaults__, f.__kwdefaults__, vars(f)]),
    ]


def _make_function(like: Any, parts: Contents) -> Any:
    cells, (defaults, keywords, attributes) = parts[0][1], parts[1][1]
    code, around, name = like
    made = types.FunctionType(code, around, name, defaults, tuple(cells))
    made.__kwdefaults__, made.__dict__ = keywords, attributes
    return made


FUNCTION = ObjectAdapter(_read_function, lambda f: (f.__code__, f.__globals__, f.__name__), None, _make_function)


def _read_cell(cell: Any) -> Contents:
    try:
        return [(["cell_contents"], [cell.cell_contents])]
    except ValueError:  # not set yet
        return [([], [])]


def _fill_cell(cell: Any, parts: Contents) -> None:
    for value in parts[0][1]:
        cell.cell_contents = value


CELL = ObjectAdapter(_read_cell, lambda cell: None, lambda _: types.CellType(), _fill_cell)
