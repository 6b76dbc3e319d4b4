"""Policies that take something out of another: parameters that are ignored, classes in full precision."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch
from torch import nn

from .._spec.build import build
from .._spec.precision import Precision
from .._spec.spec import PartitionSpec
from .._spec.tree import ModuleTree, Param
from .._torch.layers import BatchNorm
from ._policy import (
    NamedPolicy,
    Policy,
    check_classes,
    check_modules,
    format_call,
    items_to_list,
    matches_module,
    matches_path,
)

__all__ = ["drop_ignored", "full_precision", "ignoring"]


def drop_ignored(tree: ModuleTree, specs: Iterable[PartitionSpec]) -> ModuleTree:
    """Return the tree without the parameters that any of the specs ignores."""
    names = {name for spec in specs for name in spec.ignored}
    return tree.without(lambda node: False, lambda param: param.name in names) if names else tree


def ignoring(
    policy: Policy, modules: Iterable[str | nn.Module | type[nn.Module]] = (), params: Iterable[str | nn.Parameter] = ()
) -> Policy:
    """Return the policy for the model without some modules and parameters.

    Ignored parameters are neither sharded nor synchronised; `functional_call` reads them from the model.

    Args:
        policy: The policy for the rest of the model.
        modules: Path patterns (see `by_path`), classes, or the modules themselves; all inside them is ignored too.
        params: Name patterns, or the parameters themselves.

    Raises:
        ValueError: From the policy, for a pattern that matches nothing, and if nothing remains.
        TypeError: For anything else among ``modules`` and ``params``.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> fs.policies.ignoring(fs.policies.whole(), modules=["0"])(model).ignored
        ('0.bias', '0.weight')
    """
    module_items, param_items = check_modules("ignoring", modules), items_to_list("ignoring: params", params)
    for item in param_items:
        if not isinstance(item, str | nn.Parameter):
            raise TypeError(f"ignoring: params: expected name patterns or parameters, got {type(item).__name__}")

    return NamedPolicy(
        format_call("ignoring", policy, module_items, param_items),
        functools.partial(_build_ignoring, policy, module_items, param_items),
    )


def _build_ignoring(policy: Policy, modules: list[object], params: list[object], tree: ModuleTree) -> PartitionSpec:
    """Build the policy's spec of the tree without the modules and parameters that match; refuse what matches nothing."""
    gone = {node.path for node in tree.nodes() for item in modules if matches_module(item, node)}
    names = {p.name for node in tree.nodes() for p in node.params for item in params if _matches_param(item, p, node)}
    for item in modules:
        if not any(matches_module(item, node) for node in tree.nodes()):
            raise ValueError(f"ignoring: modules: {item!r} matches no module: expected some of {list(tree.canonical)[:8]}")
    for item in params:
        if not any(_matches_param(item, p, node) for node in tree.nodes() for p in node.params):
            raise ValueError(f"ignoring: params: {item!r} matches no parameter of the model")
    if tree.path in gone:
        raise ValueError("ignoring: modules: the root '' is ignored: expected something left to shard")
    return policy(tree.without(lambda node: node.path in gone, lambda p: p.name in names))


def _matches_param(item: object, param: Param, owner: ModuleTree) -> bool:
    """Return whether a pattern matches a name of the parameter, or the item is the parameter itself."""
    if isinstance(item, str):
        return any(matches_path(item.split("."), name.split(".")) for name in param.names)
    own = owner.module._parameters
    return any(own.get(name.rpartition(".")[2]) is item for name in param.names)


def full_precision(policy: Policy, *classes: type[nn.Module]) -> Policy:
    """Return the policy with every instance of the classes as a unit in float32.

    For normalisation layers (``_module_classes_to_ignore`` of MixedPrecision). Inside a unit with a `Precision`, their inputs
    are cast to float32, and their outputs back to the dtype of the inputs.

    Args:
        policy: The policy for the rest. The new units have the `P` of the unit around them but for its precision.
        classes: Module classes; batch norm if none is given.

    Example:
        >>> import torch, funshard as fs
        >>> low = fs.P("shard", precision=fs.Precision(param=torch.bfloat16))
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> {unit.path: unit.p.precision.param for unit in fs.policies.full_precision(fs.policies.whole(low))(model)}
        {'': torch.bfloat16, '1': torch.float32}
    """
    check_classes("full_precision", classes)
    build_spec = functools.partial(_build_full_precision, policy, classes or (BatchNorm,))
    return NamedPolicy(format_call("full_precision", policy, *classes), build_spec)


def _build_full_precision(policy: Policy, classes: tuple[type[nn.Module], ...], tree: ModuleTree) -> PartitionSpec:
    """Build the policy's spec with modules of these classes as units, in float32 where their parameters are cast."""
    full = Precision(param=torch.float32, restore_outputs=True)
    spec = policy(tree)
    chosen = dict(spec.selected)
    kept = drop_ignored(tree, [spec])
    before = {"": spec.root, **chosen}
    for node in kept.nodes():
        if issubclass(node.cls, classes):
            around = before[[path for path in (*kept.dominators(node), node.path) if path in before][-1]]
            chosen[node.path] = dataclasses.replace(around, precision=full if around.precision else None, unit=None)
    return build(kept, chosen, spec.root)
