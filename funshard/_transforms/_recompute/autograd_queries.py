"""Whether what runs again asks autograd about its tensors: by requires_grad, grad_fn or is_leaf.

The first run of a `remat` has no graph, so it would answer otherwise than the run for the gradient. Where this module finds
such a question, the first run records a graph as well. It reads code and runs none: functions and methods that are reached,
and those that they name. A question that it does not find (by an operator of C, or a function that a table holds) is answered
in the first run as for tensors that nobody differentiates.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["QUERY_ATTRIBUTES", "find_autograd_queries"]

QUERY_ATTRIBUTES = frozenset({"requires_grad", "grad_fn", "is_leaf"})

_FOREIGN = {*sys.stdlib_module_names, "torch", "funshard", "numpy"}
_MOST = 4096
_KNOWN: dict[tuple[frozenset[types.CodeType], frozenset[type]], frozenset[str]] = {}


def find_autograd_queries(objects: Sequence[Any]) -> frozenset[str]:
    """Return which of `ATTRIBUTES` functions, or methods of objects, load of anything, by the code that they name.

    Args:
        objects: What a function that runs again can reach, itself included.

    Returns:
        Their names. The code that loads them need not run.
    """
    functions = [obj for obj in objects if isinstance(obj, types.FunctionType)]
    key = frozenset(f.__code__ for f in functions), frozenset(map(type, objects))
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = _search(functions, {cls for cls in key[1] if cls.__module__.partition(".")[0] not in _FOREIGN})
    return _KNOWN[key]


def _search(functions: list[types.FunctionType], classes: set[type]) -> frozenset[str]:
    asked, names = set[str](), set[str]()
    seen: set[types.CodeType] = set()
    waiting = [*functions, *_methods(classes, {"forward", "__call__"})]
    while waiting:
        f = waiting.pop()
        if f.__code__ in seen or f.__globals__.get("__name__", "").partition(".")[0] in _FOREIGN:
            continue
        seen.add(f.__code__)
        found = set[str]()
        for code in _codes(f.__code__):
            found.update(code.co_names)
            asked |= _loaded(code)
        waiting += _named(f, found)
        waiting += _methods(classes, found - names)
        names |= found
    return frozenset(asked)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code and what is defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


def _loaded(code: types.CodeType) -> set[str]:
    """Return which of the attributes it reads, and not only writes; what it has as a string it may read."""
    strings = {value for value in code.co_consts if isinstance(value, str) and value in QUERY_ATTRIBUTES}
    if QUERY_ATTRIBUTES.isdisjoint(code.co_names):
        return strings
    return strings | {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_ATTR"} & QUERY_ATTRIBUTES


def _named(f: types.FunctionType, names: set[str]) -> Iterator[types.FunctionType]:
    """Yield the functions among its globals, in modules among those, and in its closure."""
    scope = [f.__globals__[name] for name in names if name in f.__globals__]
    modules = (value for value in scope if isinstance(value, types.ModuleType))
    inside = [vars(module)[name] for module in modules for name in names if name in vars(module)]
    cells = [cell.cell_contents for cell in f.__closure__ or () if _is_filled(cell)]
    for value in (*scope, *inside, *cells, getattr(f, "__wrapped__", None)):
        if isinstance(value, types.FunctionType):
            yield value


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _methods(classes: Iterable[type], names: set[str]) -> Iterator[types.FunctionType]:
    """Yield what classes define by these names."""
    for cls in classes:
        for base in cls.__mro__:
            if base is nn.Module or base is object:
                continue
            for name in names & vars(base).keys():
                value = vars(base)[name]
                value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(value, types.FunctionType):
                    yield value
