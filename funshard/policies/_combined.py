"""Policies that combine others."""

from __future__ import annotations

import functools

from .._spec.build import build
from .._spec.spec import PartitionSpec
from .._spec.tree import ModuleTree
from .._spec.unit import P
from ._exceptions import drop_ignored
from ._policy import NamedPolicy, Policy, format_call

__all__ = ["any_of", "override"]


def any_of(*policies: Policy) -> Policy:
    """Return the policy with the units of all policies (``_or_policy``); their order does not matter.

    Args:
        policies: The policies.

    Raises:
        ValueError: From the policy, if two of them want different `P` for one module; `override` says who is right.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.PReLU())
        >>> [unit.path for unit in fs.policies.any_of(fs.by_type(torch.nn.Linear), fs.by_path({"1": fs.P("shard")}))(model)]
        ['', '0', '1']
    """
    return NamedPolicy(format_call("any_of", *policies), functools.partial(_build_any_of, policies))


def _build_any_of(policies: tuple[Policy, ...], tree: ModuleTree) -> PartitionSpec:
    """Return the spec of all modules that some policy selects; raise ValueError where two select one with another `P`."""
    chosen: dict[str, P] = {}
    specs = [policy(tree) for policy in policies]
    if not specs:
        raise ValueError("any_of: expected at least one policy, got none")
    for path, p in (entry for spec in specs for entry in spec.selected):
        if chosen.setdefault(path, p) != p:
            raise ValueError(f"any_of: module '{path}' is selected as {chosen[path]} and as {p}; use override(base, extra)")
    roots = {spec.root for spec in specs}
    if "" not in chosen and len(roots) > 1:
        raise ValueError(f"any_of: module '' (the leftovers) is {' and '.join(sorted(map(str, roots)))}; use override")
    return build(drop_ignored(tree, specs), chosen, chosen.get("", specs[0].root))


def override(base: Policy, extra: Policy) -> Policy:
    """Return the policy with the units of ``base``, and those of ``extra`` added or in their place.

    Args:
        base: Its leftovers stay.
        extra: Its `P` win.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> policy = fs.policies.override(fs.by_type(torch.nn.Linear), fs.by_path({"1": fs.P()}))
        >>> {unit.path: unit.p for unit in policy(model)}
        {'0': P('shard'), '1': P()}
    """
    return NamedPolicy(format_call("override", base, extra), functools.partial(_build_override, base, extra))


def _build_override(base: Policy, extra: Policy, tree: ModuleTree) -> PartitionSpec:
    """Build a spec of the units of both policies; ``extra`` decides for modules that both choose, ``base`` for the root."""
    first, second = base(tree), extra(tree)
    return build(drop_ignored(tree, [first, second]), dict(first.selected) | dict(second.selected), first.root)
