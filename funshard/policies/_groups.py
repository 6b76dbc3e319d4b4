"""by_group: units of several modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from torch import nn

from .._spec.build import build_with_leftovers
from .._spec.spec import PartitionSpec
from .._spec.tree import ModuleTree, natural_key
from .._spec.unit import P
from ._policy import SHARD, NamedPolicy, Policy, check_modules, check_p, format_call, matches_module

__all__ = ["by_group"]


def by_group(modules: Iterable[str | nn.Module | type[nn.Module]], *, size: int | None = None, p: P = SHARD) -> Policy:
    """Return the policy with units of several modules, which are gathered together (``fully_shard([a, b])``).

    The modules of a unit should run one after another. If forward gathers another unit between two of them, it frees their
    unit and gathers it again. The unit's key is the paths with ``+`` between them.

    Args:
        modules: Path patterns (see `by_path`), classes, or the modules themselves.
        size: The number of modules in a unit: modules with the same parent, in the order of their names. By default one unit
            has all of them.
        p: The `P` of the units. Its remat, casts and compilation are those of each module by itself.

    Raises:
        ValueError: For a ``size`` below 1. From the policy, for an item that matches no module, and for a module of a unit that
            is inside another one of it.
        TypeError: For anything else among ``modules``, or a ``p`` that is no `P`.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
        >>> [unit.key for unit in fs.policies.by_group([torch.nn.Linear], size=2)(model)]
        ['0+1', '2+3', '4']
    """
    items = check_modules("by_group", modules)
    check_p("by_group", p)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"by_group: size: expected a whole number of modules, at least 1, got {size!r}")
    return NamedPolicy(format_call("by_group", items, p=p, size=size), functools.partial(_build_groups, items, size, p))


def _build_groups(items: list[object], size: int | None, p: P, tree: ModuleTree) -> PartitionSpec:
    """Build the spec whose units are groups of the modules that match."""
    nodes = [node for node in tree.nodes() if node is not tree]  # which is beside no other module
    for item in items:
        if not any(matches_module(item, node) for node in nodes):
            raise ValueError(f"by_group: {item!r} matches no module: expected some of {[node.path for node in nodes][:8]}")
    matched = [node for node in nodes if any(matches_module(item, node) for item in items)]
    matched.sort(key=lambda node: min(map(natural_key, node.names)))
    siblings: dict[str, list[str]] = {}
    for node in matched:
        siblings.setdefault("" if size is None else node.path.rpartition(".")[0], []).append(node.path)
    chosen: dict[str, P] = {}
    for paths in siblings.values():
        length = size or len(paths)
        for group in (paths[i : i + length] for i in range(0, len(paths), length)):
            chosen |= dict.fromkeys(group, dataclasses.replace(p, unit="+".join(group) if len(group) > 1 else None))
    return build_with_leftovers(tree, chosen, p)
