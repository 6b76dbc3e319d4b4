"""A search of the code that a function reaches: what it asks of autograd, and which globals it reads."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import IOBase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ... import _torch
from .adapters import find_generator_adapter, read_cell
from .reachable import ReachableObjects, find_adapter

__all__ = ["GRAD", "QUERY_GETTERS", "REGISTER_HOOK", "ForbiddenFunctions", "GlobalWatch", "find_code_reads", "version_of"]


# --- Search for code that reads requires_grad, grad_fn or is_leaf of a tensor, or generators of random numbers in globals ---
#
# The first run of a `remat` has no graph, so such a query would have another answer than in the run for the gradient. Where
# this module finds a query, the first run records a graph as well. It reads code and runs none: that of the functions and
# methods that are reached, and of those that they name. It does not find a query by an operator of C, or in a function that
# a table holds; in the first run that is answered as for tensors without gradients.

REGISTER_HOOK: Callable[..., Any] = torch.Tensor.register_hook
"""``tensor.register_hook``, which changes the gradient of one level."""

QUERY_GETTERS: Mapping[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")
}
"""The attributes that ask autograd, and the functions that a TorchFunctionMode sees for them."""

GRAD: Callable[..., Any] = getattr(torch.Tensor, "grad").__get__  # noqa: B009
"""The getter of ``tensor.grad`` as a TorchFunctionMode sees it."""

_QUERIES = frozenset({*QUERY_GETTERS, "grad", "register_hook"})
FOREIGN_PACKAGES = frozenset({*sys.stdlib_module_names, "torch", "funshard", "numpy"})
"""Packages whose code and objects are not searched."""
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_CACHE_SIZE = 4096
_CACHE: dict[tuple[frozenset[types.CodeType], frozenset[type]], CodeReads] = {}


class ForbiddenFunctions(TorchFunctionMode):
    """A mode that refuses functions of tensors, except the queries of torch and of this library.

    Args:
        messages: By function, the message of the RuntimeError that it raises.
        operands: The tensors for which it raises; None for all.
    """

    def __init__(self, messages: Mapping[Callable[..., Any], str], operands: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._messages, self._operands = messages, operands

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        message = self._messages.get(func)
        if message is not None and not (func in _GETTERS and _is_own_code(sys._getframe(1))) and self._concerns(args):
            raise RuntimeError(message)
        return func(*args, **(kwargs or {}))

    def _concerns(self, args: tuple[Any, ...]) -> bool:
        """Return whether a call asks about one of the operands."""
        return self._operands is None or any(x is args[0] for x in self._operands)


_GETTERS = frozenset({GRAD, *QUERY_GETTERS.values()})


def _is_own_code(frame: types.FrameType) -> bool:
    """Return whether a frame runs code of torch or of this library."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "funshard")


@dataclass(frozen=True)
class CodeReads:
    """The attributes and variables that the code of functions reads, found without running it."""

    queries: frozenset[str]
    """Attributes of `QUERY_GETTERS`, ``grad`` or ``register_hook``. The code that reads them need not run."""
    variables: Sequence[Callable[[], Any]]
    """Functions that return the values of globals, attributes of classes, and closures of methods."""

    def may_read_tensors(self) -> bool:
        """Return whether one of the variables is a tensor or an object that can have attributes or items."""
        return any(isinstance(value := get(), Tensor) or find_adapter(value) is not None for get in self.variables)

    def find_generators(self, reached: Container[int]) -> list[Any]:
        """Return the generators of random numbers among the variables, except for those with these ids."""
        values = {id(value): value for get in self.variables if find_generator_adapter(type(value := get()))}
        return [value for key, value in values.items() if key not in reached]


def find_code_reads(objects: Sequence[Any]) -> CodeReads:
    """Return what the code of functions, or of methods of objects, reads.

    Args:
        objects: What a recomputed function can reach, itself included.
    """
    functions = [obj for obj in objects if isinstance(obj, types.FunctionType)]
    named = (value for obj in objects if isinstance(obj, types.CellType) for value in read_cell(obj)[0][1])
    key = frozenset(f.__code__ for f in functions), frozenset([*map(type, objects), *(x for x in named if isinstance(x, type))])
    if key not in _CACHE:
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        classes = {cls for cls in key[1] if cls.__module__.partition(".")[0] not in FOREIGN_PACKAGES}
        _CACHE[key] = _search_code(functions, classes)
    return _CACHE[key]


def _search_code(functions: list[types.FunctionType], classes: set[type]) -> CodeReads:
    """Return what the code of these functions and classes, and of all that they call, reads."""
    queries, names = set[str](), set[str]()
    variables: list[Callable[[], Any]] = []
    read_classes = set(classes)
    seen: set[types.CodeType] = set()
    todo = [*functions, *_find_methods(classes, {"forward", "__call__"})]
    while todo:
        f = todo.pop()
        if f.__code__ in seen or f.__globals__.get("__name__", "").partition(".")[0] in FOREIGN_PACKAGES:
            continue
        seen.add(f.__code__)
        found = set[str]()
        for code in _nested_codes(f.__code__):
            found.update(code.co_names)
            queries |= _read_queries(code)
        for get, value in _find_variables(f, found):
            if isinstance(value, types.FunctionType):
                todo.append(value)
            elif isinstance(value, type):
                read_classes.add(value)
            elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
                variables.append(get)
        todo += _find_methods(classes, found - names)
        names |= found
    bases = {base for cls in read_classes for base in cls.__mro__ if base.__module__.partition(".")[0] not in FOREIGN_PACKAGES}
    variables += [functools.partial(vars(base).get, name) for base in bases for name in names & vars(base).keys()]
    return CodeReads(frozenset(queries), variables)


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code and what is defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _nested_codes(value)


def _read_queries(code: types.CodeType) -> set[str]:
    """Return the queries that code reads and not only writes; one that it has as a string counts as read."""
    strings = {value for value in code.co_consts if isinstance(value, str) and value in _QUERIES}
    if _QUERIES.isdisjoint(code.co_names):
        return strings
    return strings | {step.argval for step in dis.get_instructions(code) if step.opname in _READS} & _QUERIES


def _find_variables(f: types.FunctionType, names: set[str]) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Yield getters, with values, of these globals, of these names in modules among those, and of what the closure holds."""
    mappings = [
        f.__globals__,
        *(vars(value) for name in names if isinstance(value := f.__globals__.get(name), types.ModuleType)),
    ]
    for mapping in mappings:
        yield from ((functools.partial(mapping.get, name), mapping[name]) for name in names if name in mapping)
    cells = [value for cell in f.__closure__ or () for value in read_cell(cell)[0][1]]
    for value in (*cells, getattr(f, "__wrapped__", None)):
        # others would be kept alive, and those of a function that is reached are reached as well
        if isinstance(value, types.FunctionType | type) or find_generator_adapter(type(value)):
            yield functools.partial(lambda value: value, value), value


def _find_methods(classes: Iterable[type], names: set[str]) -> Iterator[types.FunctionType]:
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


# --- A watch over the globals that a function reads: one that it changes would be another one where the function runs again ---

_MISSING = object()
_NESTING = 2  # of containers and objects in a variable that are searched for changes
_LENGTH = 1000  # of the longest container that is searched; of a longer one only the length is compared


@dataclass(frozen=True)
class GlobalWatch:
    """A context that raises RuntimeError if a function changes a global variable that its code reads, or its contents.

    Args:
        subject: What runs, for the error.
        hint: What the error says to do.
        variables: Functions that return the values of the variables.
    """

    subject: str
    hint: str
    variables: Sequence[Callable[[], Any]]
    _before: list[list[dict[Any, Any]]] = field(default_factory=list)  # of the runs in progress, the innermost last

    @classmethod
    def for_function(cls, function: object, subject: str, hint: str) -> GlobalWatch:
        """Return the watch over the variables that the code of a function reads."""
        return cls(subject, hint, find_code_reads(ReachableObjects([function], ()).objects).variables)

    def __enter__(self) -> None:
        self._before.append([dict(_list_contents(get())) for get in self.variables])

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        before = self._before.pop()
        if error is not None:
            return
        for get, was in zip(self.variables, before, strict=True):
            now = dict(_list_contents(get()))
            if any(not _is_same(value, now.get(path, _MISSING)) for path, value in was.items()):
                name = (*getattr(get, "args", ()), "it reads")[0]
                raise RuntimeError(
                    f"{self.subject} changes the global variable {name}, which it would change again where it runs again for "
                    f"derivatives: {self.hint}"
                )


def _list_contents(value: Any, nesting: int = _NESTING, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield, by path, the values to compare: a value, its nested contents, lengths and the version counters of tensors.

    A new attribute is no change: it may be a cached property.
    """
    yield path, value
    if isinstance(value, Tensor):
        yield (*path, "version"), version_of(value)
        return
    if isinstance(value, nn.Module):
        yield from (((*path, "buffers", i), version_of(buffer)) for i, buffer in enumerate(value.buffers()))
        nesting = min(nesting, 1)
    if not path and isinstance(value, Iterator) and not isinstance(value, IOBase):
        yield "next", object()  # differs at each reading, as the next item does
    if isinstance(value, list | tuple | dict | set | deque):
        yield (*path, "length"), len(value)  # pyright: ignore[reportUnknownArgumentType]
    if not nesting:
        return
    for name, item in _find_items(value):
        yield from _list_contents(item, nesting - 1, (*path, name))


def _find_items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield ``(name, item)`` of a container or of an object of the user's class; nothing for a long container."""
    if isinstance(value, dict):
        items = value.items() if len(value) <= _LENGTH else ()  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(value, list | tuple | deque):
        items = enumerate(value) if len(value) <= _LENGTH else ()  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(value, type) or type(value).__module__.partition(".")[0] in FOREIGN_PACKAGES:
        items = ()
    else:
        items = getattr(value, "__dict__", {}).items()
    yield from items  # pyright: ignore[reportUnknownVariableType]


def version_of(tensor: Tensor) -> int:
    """Return a tensor's count of in-place changes, -1 if its memory was donated."""
    try:
        return _torch.version(tensor)
    except RuntimeError:
        return -1


def _is_same(value: Any, now: Any) -> bool:
    """Return whether a value is the same object, or an equal number or string."""
    return value is now or (type(value) is type(now) and type(value) in (int, float, str) and value == now)
