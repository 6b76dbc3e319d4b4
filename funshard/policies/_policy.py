"""The parts of policies: how they print and pickle, what they check, how a pattern matches a path."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from .._core.spec import PartitionSpec
from .._core.tree import ModuleTree, module_tree
from .._core.unit import P

__all__ = [
    "SHARD",
    "NamedPolicy",
    "Policy",
    "check_classes",
    "check_modules",
    "check_p",
    "count_literal",
    "format_call",
    "items_to_list",
    "matches_module",
    "matches_path",
    "override_p",
]


class Policy(Protocol):
    """A pure function from a module, or its `module_tree`, to a `PartitionSpec`: which modules are units, and how.

    It reads the structure only, so a module on the meta device will do, and gives equal specs for equal trees. Any function
    of this signature is a policy. Those of this package print as the call that made them, and pickle if their arguments do.

    >>> import torch, funshard as fs
    >>> def blocks(model: torch.nn.Module | fs.ModuleTree) -> fs.PartitionSpec:
    ...     return fs.by_path({"0": fs.P("shard", remat=True)})(model)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> [unit.key for unit in fs.policies.override(fs.policies.whole(), blocks)(model)]
    ['', '0']
    """

    def __call__(self, model: nn.Module | ModuleTree, /) -> PartitionSpec:
        """Return the spec of a module, or of its tree."""
        ...


SHARD = P("shard")
"""The `P` of every policy that is given no other."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NamedPolicy:
    """A policy that prints as the call that made it.

    ``build`` is a module-level function with its arguments bound (functools.partial) and no closure: closures do not pickle.
    """

    text: str
    build: Callable[[ModuleTree], PartitionSpec]

    def __call__(self, model: nn.Module | ModuleTree, /) -> PartitionSpec:
        return self.build(module_tree(model))

    def __repr__(self) -> str:
        return self.text


def format_call(name: str, *args: object, p: P | None = None, **options: object) -> str:
    """Return a call much as it was written; options that are not None, and ``p`` where it is not the default."""
    given = [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join([*map(_format_argument, args), *given, *([f'p={p}'] if p is not None and p != SHARD else [])])})"


def _format_argument(item: object) -> str:
    """Return an argument in a policy's repr: classes and functions by name, modules and tensors by class."""
    if isinstance(item, type):
        return item.__name__
    if isinstance(item, nn.Module | torch.Tensor):
        return f"<{type(item).__name__}>"
    if isinstance(item, list):
        return f"[{', '.join(map(_format_argument, item))}]"
    return getattr(item, "__qualname__", None) or repr(item)


def check_p(where: str, p: object) -> None:
    """Raise TypeError unless it is a `P`."""
    if not isinstance(p, P):
        hint = f"; write P({p!r})" if isinstance(p, str | tuple) else ""
        raise TypeError(f"{where}: expected a P such as P('shard'), got {p!r}{hint}")


def override_p(p: P, fields: Mapping[str, Any], where: str) -> P:
    """Return the `P` with these fields replaced; raise ValueError that says where for an unknown one."""
    known = [f.name for f in dataclasses.fields(P)]
    for name in fields:
        if name not in known:
            raise ValueError(f"{where}: P has no field '{name}': expected some of {known}")
    try:
        return dataclasses.replace(p, **fields)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_classes(what: str, classes: Iterable[object]) -> None:
    """Raise TypeError unless they are classes of modules."""
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{what}: expected subclasses of nn.Module, got {cls!r}")


def items_to_list(what: str, items: object) -> list[object]:
    """Return the items as a list; raise TypeError for a string, or anything that is not iterable."""
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise TypeError(f"{what}: expected an iterable, got {type(items).__name__}; put it in a list")
    return list(items)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def check_modules(policy: str, modules: object) -> list[object]:
    """Return the items as a list; raise TypeError unless they are path patterns, module classes or modules."""
    items = items_to_list(f"{policy}: modules", modules)
    for item in items:
        if not isinstance(item, str | nn.Module) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise TypeError(f"{policy}: modules: expected path patterns, module classes or modules, got {type(item).__name__}")
    return items


def matches_module(item: object, node: ModuleTree) -> bool:
    """Return whether an item selects a module: a pattern of its path, its class or a base class, or the module itself."""
    if isinstance(item, str):
        return any(matches_path(item.split("."), path.split(".")) for path in node.names)
    return issubclass(node.cls, item) if isinstance(item, type) else node.module is item


def count_literal(pattern: str, path: str) -> int:
    """Return how many components of a pattern are names, not wildcards, for this path."""
    return sum(part in path.split(".") or not set("*?[") & set(part) for part in pattern.split("."))


def matches_path(pattern: list[str], path: list[str]) -> bool:
    """Return whether a pattern matches a path: ``*`` matches within a component, ``**`` any number of them."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(matches_path(pattern[1:], path[i:]) for i in range(len(path) + 1))
    fits = bool(path) and (path[0] == pattern[0] or fnmatch.fnmatchcase(path[0], pattern[0]))
    return fits and matches_path(pattern[1:], path[1:])
