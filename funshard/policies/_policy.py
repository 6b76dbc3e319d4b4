"""What policies are made of: how they print, what they check, how a pattern matches a path."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .._spec.spec import PartitionSpec
from .._spec.tree import ModuleTree, module_tree
from .._spec.unit import P

__all__ = ["SHARD", "Called", "Policy", "called", "check_classes", "check_p", "literal", "matches"]

Policy = Callable[[nn.Module | ModuleTree], PartitionSpec]
"""From a module, or its tree, to a spec. Reads structure only; equal specs for equal trees."""

SHARD = P("shard")
"""The `P` of every policy that is given no other."""


@dataclass(frozen=True, eq=False, repr=False)
class Called:
    """A policy that prints as the call that made it."""

    text: str
    build: Callable[[ModuleTree], PartitionSpec]

    def __call__(self, model: nn.Module | ModuleTree) -> PartitionSpec:
        return self.build(module_tree(model))

    def __repr__(self) -> str:
        return self.text


def called(name: str, *args: object, p: P | None = None) -> str:
    """A call as it was written, more or less; ``p`` where it is not the default."""
    return f"{name}({', '.join([*map(_text, args), *([f'p={p}'] if p is not None and p != SHARD else [])])})"


def _text(item: object) -> str:
    if isinstance(item, type):
        return item.__name__
    if isinstance(item, nn.Module | torch.Tensor):
        return f"<{type(item).__name__}>"
    if isinstance(item, list):
        return f"[{', '.join(map(_text, item))}]"
    return getattr(item, "__qualname__", None) or repr(item)


def check_p(where: str, p: object) -> None:
    """TypeError unless it is a `P`."""
    if not isinstance(p, P):
        hint = f"; write P({p!r})" if isinstance(p, str | tuple) else ""
        raise TypeError(f"{where}: expected a P such as P('shard'), got {p!r}{hint}")


def check_classes(what: str, classes: Iterable[object]) -> None:
    """TypeError unless they are classes of modules."""
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{what}: expected subclasses of nn.Module, got {cls!r}")


def literal(pattern: str, path: str) -> int:
    """How many components of a pattern are names and no wildcards, of this path at least."""
    return sum(part in path.split(".") or not set("*?[") & set(part) for part in pattern.split("."))


def matches(pattern: list[str], path: list[str]) -> bool:
    """Whether the components of a pattern are those of a path: ``*`` within one of them, ``**`` for any number."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    fits = bool(path) and (path[0] == pattern[0] or fnmatch.fnmatchcase(path[0], pattern[0]))
    return fits and matches(pattern[1:], path[1:])
