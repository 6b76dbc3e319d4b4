"""Policies that select modules by size, by a function, or by a mark that they bear."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from .._core.build import build_with_leftovers
from .._core.policies import (
    SHARD,
    NamedPolicy,
    Policy,
    _build_selected,
    check_classes,
    check_p,
    format_call,
    override_p,
)
from .._core.spec import PartitionSpec
from .._core.tree import ModuleTree
from .._core.unit import P

__all__ = ["always", "by_size", "custom", "mark", "marked"]

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
    return NamedPolicy(format_call("always", p=p), functools.partial(_build_selected, _p_if_has_params, p))


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
    return NamedPolicy(format_call("custom", fn, p=p), functools.partial(_build_selected, select, p))


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
    return NamedPolicy(format_call("marked", p=p), functools.partial(_build_selected, _select_marked, p))


def _select_marked(p: P, node: ModuleTree) -> P | None:
    """Return the `P` of a module that `mark` has marked, None for others."""
    overrides = vars(node.module).get(_MARK)
    return None if overrides is None else override_p(p, overrides, f"mark: module '{node.path}'")
