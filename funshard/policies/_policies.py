"""Policies that select modules by size, by a function, or by a mark that they bear."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from .._core.build import build, build_with_leftovers
from .._core.policies import SHARD, NamedPolicy, Policy, build_selected, check_classes, check_p, format_call
from .._core.spec import PartitionSpec
from .._core.tree import ModuleTree
from .._core.unit import P

__all__ = ["always", "by_path", "by_size", "count_literal", "custom", "mark", "marked", "matches_path", "override_p"]

_MARK = "_funshard_mark"
_Module = TypeVar("_Module", bound=nn.Module)


def always(p: P = SHARD) -> Policy:
    """Return the policy with a unit for every submodule that owns parameters (always_wrap_policy).

    Args:
        p: The `P` of all units.

    Example:
        >>> import torch, funshard as fs
        >>> [unit.path for unit in fs.policies.always()(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))]
        ['0', '1']
    """
    check_p("always", p)
    return NamedPolicy(format_call("always", p=p), functools.partial(build_selected, _p_if_has_params, p))


def _p_if_has_params(p: P, node: ModuleTree) -> P | None:
    """Return the `P` for a module with parameters of its own, None for another."""
    return p if node.params else None


def by_size(
    min_numel: float = int(1e8),
    *,
    force_leaf: Iterable[type[nn.Module]] = (nn.MultiheadAttention,),
    exclude: Iterable[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict),
    p: P = SHARD,
) -> Policy:
    """Return the policy with units of at least ``min_numel`` elements (size_based_auto_wrap_policy).

    Bottom up: elements that a unit inside a module took do not count. An element of a shared parameter counts once, for the
    modules that hold all its uses.

    Args:
        min_numel: The threshold, in elements of parameters.
        force_leaf: Classes of modules that are no units, nor are modules inside them.
        exclude: Classes of modules that are no units; modules inside them may be.
        p: The `P` of all units.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(9, 9))
        >>> [unit.path for unit in fs.by_size(50)(model)]
        ['', '1']
    """
    leaves, excluded = tuple(force_leaf), tuple(exclude)
    check_classes("by_size", (*leaves, *excluded))
    check_p("by_size", p)
    return NamedPolicy(
        format_call("by_size", min_numel, p=p), functools.partial(_build_by_size, min_numel, leaves, excluded, p)
    )


def _build_by_size(
    min_numel: float, force_leaf: tuple[type[nn.Module], ...], exclude: tuple[type[nn.Module], ...], p: P, tree: ModuleTree
) -> PartitionSpec:
    """Build the spec with a unit for each module that has ``min_numel`` elements besides those of the units inside it."""
    held: dict[str, dict[str, int]] = {node.path: {} for node in tree.nodes()}
    for param in tree.all_params:
        for path in tree.dominators(param):
            held[path][param.name] = param.numel
    descended: dict[str, ModuleTree] = {}
    for node in tree.nodes():
        if node is not tree and tree.dominators(node)[-1] not in descended:
            continue
        if sum(held[node.path].values()) >= min_numel and not issubclass(node.cls, force_leaf):
            descended[node.path] = node
    chosen: dict[str, P] = {}
    taken: set[str] = set()
    for path, node in reversed(descended.items()):  # children first
        left = sum(numel for name, numel in held[path].items() if name not in taken)
        if node is not tree and left >= min_numel and not issubclass(node.cls, exclude):
            chosen[path] = p
            taken |= held[path].keys()
    return build_with_leftovers(tree, chosen, p)


def custom(fn: Callable[[nn.Module], bool | Mapping[str, Any]], p: P = SHARD) -> Policy:
    """Return the policy with the units that a function selects (CustomPolicy).

    Args:
        fn: Of a module: True or False, or a dict of fields of `P` that override ``p``; an empty dict selects nothing.
        p: The `P` of the units.

    Raises:
        ValueError: From the policy, naming the path, for any other result of ``fn``.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> policy = fs.policies.custom(lambda module: {"reshard": False} if isinstance(module, torch.nn.Linear) else False)
        >>> {unit.path: unit.p for unit in policy(model)}
        {'': P('shard'), '0': P('shard', reshard=False)}
    """
    check_p("custom", p)
    select = functools.partial(_select_custom, fn)
    return NamedPolicy(format_call("custom", fn, p=p), functools.partial(build_selected, select, p))


def _select_custom(fn: Callable[[nn.Module], bool | Mapping[str, Any]], p: P, node: ModuleTree) -> P | None:
    """Return the `P` that the user's function chooses for a module, None for no unit."""
    result = fn(node.module)
    if isinstance(result, bool):
        return p if result else None
    if not isinstance(result, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"custom: module '{node.path}': expected {fn} to give a bool or a dict, got {result!r}")
    return override_p(p, result, f"custom: module '{node.path}'") if result else None


def mark(module: _Module, **overrides: Any) -> _Module:
    """Mark a module as a unit for `marked`: the functional ``wrap``, written where the model builds itself.

    Args:
        module: Gets one attribute. Marking it again adds to the overrides.
        overrides: Fields of `P` in which this unit differs from the policy.

    Returns:
        The module.

    Raises:
        ValueError: For a name that is no field of `P`.

    Example:
        >>> import torch, funshard as fs
        >>> block = fs.policies.mark(torch.nn.Linear(2, 2))
        >>> [unit.path for unit in fs.policies.marked()(torch.nn.Sequential(torch.nn.Linear(2, 2), block))]
        ['', '1']
    """
    override_p(SHARD, overrides, "mark")
    setattr(module, _MARK, {**getattr(module, _MARK, {}), **overrides})
    return module


def marked(p: P = SHARD) -> Policy:
    """Return the policy with the units that `mark` marked (``enable_wrap``, without its global state).

    Args:
        p: The `P` of the units, which their overrides change.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), fs.policies.mark(torch.nn.Linear(2, 2), reshard=False))
        >>> {unit.path: unit.p for unit in fs.policies.marked()(model)}
        {'': P('shard'), '1': P('shard', reshard=False)}
    """
    check_p("marked", p)
    return NamedPolicy(format_call("marked", p=p), functools.partial(build_selected, _select_marked, p))


def _select_marked(p: P, node: ModuleTree) -> P | None:
    """Return the `P` of a module that `mark` has marked, None for others."""
    overrides = vars(node.module).get(_MARK)
    return None if overrides is None else override_p(p, overrides, f"mark: module '{node.path}'")


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


def by_path(patterns: Mapping[str, P], p: P = SHARD) -> Policy:
    """Return the policy with a unit for every module whose path matches a pattern.

    Components match as wholes: ``blocks.1`` is not ``blocks.10``. If several patterns match a module, the one with most
    literal components rules; a component that is a module's very name is literal, whatever characters it has.

    Args:
        patterns: By path pattern the `P` of the units. ``*`` stands within one component, ``**`` for any number of them.
        p: The `P` of the root, without ``local``.

    Raises:
        ValueError: From the policy, for a pattern that matches no module, and for two equally good ones with different `P`.
        TypeError: If ``patterns`` is no dict of patterns and `P`.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> {unit.path: unit.p for unit in fs.by_path({"*": fs.P("shard"), "1": fs.P()})(model)}
        {'0': P('shard'), '1': P()}
    """
    check_p("by_path", p)
    if p.local and patterns:
        raise ValueError(f"by_path: p={p} is of what no pattern selects: expected local= in the P of patterns, '' for the root")
    if not isinstance(patterns, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"by_path: expected a dict of path patterns and P, got {type(patterns).__name__}")
    for pattern, value in patterns.items():
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"by_path: expected path patterns such as 'blocks.*', got {pattern!r}")
        check_p(f"by_path: pattern '{pattern}'", value)

    return NamedPolicy(format_call("by_path", dict(patterns), p=p), functools.partial(_build_by_path, dict(patterns), p))


def _build_by_path(patterns: Mapping[str, P], p: P, tree: ModuleTree) -> PartitionSpec:
    """Build the spec with the modules that patterns match as units: of several patterns, the most literal one counts."""
    best: dict[str, tuple[int, str]] = {}
    for pattern, value in patterns.items():
        hits = [path for path in tree.canonical if matches_path(pattern.split("."), path.split("."))]
        if not hits:
            near = difflib.get_close_matches(pattern, tree.canonical, 3, 0.3) or list(tree.canonical)[:8]
            raise ValueError(f"by_path: pattern '{pattern}' matches no module: expected a path such as {near}")
        for path in hits:
            weight = count_literal(pattern, path)
            other = best.get(path)
            if other is None or other[0] < weight:
                best[path] = weight, pattern
            elif other[0] == weight and patterns[other[1]] != value:
                raise ValueError(
                    f"by_path: module '{path}' is matched by '{other[1]}' ({patterns[other[1]]}) and by "
                    f"'{pattern}' ({value}): expected one, or one that is more literal"
                )
    return build(tree, {path: patterns[pattern] for path, (_, pattern) in best.items()}, p)


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
