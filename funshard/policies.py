"""Policies: pure functions from a module pytree to a partition spec, some of which are made of others."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ._core.policies import SHARD, NamedPolicy, Policy, build, build_with_leftovers, by_type, check_classes, check_p, whole
from ._core.spec import PartitionSpec
from ._core.tree import ModuleTree, Param, natural_key
from ._core.unit import P
from ._gone import raise_gone
from ._spec.precision import Precision
from ._torch.modules import BatchNorm

__all__ = [
    "Policy", "always", "by_group", "by_path", "by_size", "by_type", "custom", "full_precision", "ignoring", "override",
    "whole",
]  # fmt: skip

__getattr__ = raise_gone(__name__)


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
    return NamedPolicy("always", _build_always, (), {"p": p})


def _build_always(tree: ModuleTree, p: P) -> PartitionSpec:
    return build_with_leftovers(tree, {node.path: p for node in tree.nodes() if node.params}, p)


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
    return NamedPolicy("by_size", functools.partial(_build_by_size, leaves=leaves, excluded=excluded), (min_numel,), {"p": p})


def _build_by_size(
    tree: ModuleTree, min_numel: float, leaves: tuple[type[nn.Module], ...], excluded: tuple[type[nn.Module], ...], p: P
) -> PartitionSpec:
    held: dict[str, dict[str, int]] = {node.path: {} for node in tree.nodes()}
    for param in tree.all_params:
        for path in tree.dominators(param):
            held[path][param.name] = param.numel
    descended: dict[str, ModuleTree] = {}
    for node in tree.nodes():
        if node is not tree and tree.dominators(node)[-1] not in descended:
            continue
        if sum(held[node.path].values()) >= min_numel and not issubclass(node.cls, leaves):
            descended[node.path] = node
    chosen: dict[str, P] = {}
    taken: set[str] = set()
    for path, node in reversed(descended.items()):  # children first
        left = sum(numel for name, numel in held[path].items() if name not in taken)
        if node is not tree and left >= min_numel and not issubclass(node.cls, excluded):
            chosen[path] = p
            taken |= held[path].keys()
    return build_with_leftovers(tree, chosen, p)


def custom(fn: Callable[[nn.Module], bool | Mapping[str, Any]], p: P = SHARD) -> Policy:
    """Return the policy with the units that a function selects (CustomPolicy).

    Args:
        fn: Of a module: True or False, or a dict of fields of `P` that override ``p``; an empty dict selects nothing. To mark
            modules where the model builds itself, let it read an attribute of yours.
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
    return NamedPolicy("custom", _build_custom, (fn,), {"p": p})


def _build_custom(tree: ModuleTree, fn: Callable[[nn.Module], bool | Mapping[str, Any]], p: P) -> PartitionSpec:
    chosen = {node.path: own for node in tree.nodes() if (own := _select_custom(fn, p, node)) is not None}
    return build_with_leftovers(tree, chosen, p)


def _select_custom(fn: Callable[[nn.Module], bool | Mapping[str, Any]], p: P, node: ModuleTree) -> P | None:
    result = fn(node.module)
    if isinstance(result, bool):
        return p if result else None
    if not isinstance(result, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"custom: module '{node.path}': expected {fn} to give a bool or a dict, got {result!r}")
    known = [f.name for f in dataclasses.fields(P)]
    if unknown := [name for name in result if name not in known]:
        raise ValueError(f"custom: module '{node.path}': P has no field '{unknown[0]}': expected some of {known}")
    try:
        return dataclasses.replace(p, **result) if result else None
    except (TypeError, ValueError) as error:
        raise type(error)(f"custom: module '{node.path}': {error}") from None


def _matches_path(pattern: list[str], path: list[str]) -> bool:
    """Return whether a pattern matches a path: ``*`` matches within a component, ``**`` any number of them."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches_path(pattern[1:], path[i:]) for i in range(len(path) + 1))
    fits = bool(path) and (path[0] == pattern[0] or fnmatch.fnmatchcase(path[0], pattern[0]))
    return fits and _matches_path(pattern[1:], path[1:])


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
    return NamedPolicy("by_path", _build_by_path, (dict(patterns),), {"p": p})


def _build_by_path(tree: ModuleTree, patterns: Mapping[str, P], p: P) -> PartitionSpec:
    best: dict[str, tuple[int, str]] = {}
    for pattern, value in patterns.items():
        hits = [path for path in tree.canonical if _matches_path(pattern.split("."), path.split("."))]
        if not hits:
            near = difflib.get_close_matches(pattern, tree.canonical, 3, 0.3) or list(tree.canonical)[:8]
            raise ValueError(f"by_path: pattern '{pattern}' matches no module: expected a path such as {near}")
        for path in hits:
            names = path.split(".")
            weight = sum(part in names or not {*"*?["} & {*part} for part in pattern.split("."))  # names, not wildcards
            other = best.get(path)
            if other is None or other[0] < weight:
                best[path] = weight, pattern
            elif other[0] == weight and patterns[other[1]] != value:
                raise ValueError(
                    f"by_path: module '{path}' is matched by '{other[1]}' ({patterns[other[1]]}) and by "
                    f"'{pattern}' ({value}): expected one, or one that is more literal"
                )
    return build(tree, {path: patterns[pattern] for path, (_, pattern) in best.items()}, p)


# --- Policies that take something out of another: parameters that are ignored, classes in full precision ---


def _drop_ignored(tree: ModuleTree, specs: Iterable[PartitionSpec]) -> ModuleTree:
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
    module_items, param_items = _check_modules("ignoring", modules), _items_to_list("ignoring: params", params)
    for item in param_items:
        if not isinstance(item, str | nn.Parameter):
            raise TypeError(f"ignoring: params: expected name patterns or parameters, got {type(item).__name__}")
    return NamedPolicy("ignoring", _build_ignoring, (policy, module_items, param_items), {})


def _build_ignoring(tree: ModuleTree, policy: Policy, modules: list[object], params: list[object]) -> PartitionSpec:
    gone, names = {node.path for node in _find_matching("ignoring: modules", modules, [*tree.nodes()])}, set[str]()
    for item in params:
        names |= (found := {p.name for node in tree.nodes() for p in node.params if _matches_param(item, p, node)})
        if not found:
            raise ValueError(f"ignoring: params: {item!r} matches no parameter of the model")
    if tree.path in gone:
        raise ValueError("ignoring: modules: the root '' is ignored: expected something left to shard")
    return policy(tree.without(lambda node: node.path in gone, lambda p: p.name in names))


def _matches_param(item: object, param: Param, owner: ModuleTree) -> bool:
    if isinstance(item, str):
        return any(_matches_path(item.split("."), name.split(".")) for name in param.names)
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
        >>> [unit.p.precision for unit in fs.policies.full_precision(fs.policies.whole(low))(model)]
        [Precision(param=torch.bfloat16), Precision(param=torch.float32, restore_outputs=True)]
    """
    check_classes("full_precision", classes)
    return NamedPolicy("full_precision", _build_full_precision, (policy, *classes), {})


def _build_full_precision(tree: ModuleTree, policy: Policy, *classes: type[nn.Module]) -> PartitionSpec:
    full = Precision(param=torch.float32, restore_outputs=True)
    spec = policy(tree)
    chosen = dict(spec.selected)
    kept = _drop_ignored(tree, [spec])
    before = {"": spec.root, **chosen}
    for node in kept.nodes():
        if issubclass(node.cls, classes or BatchNorm):
            around = before[[path for path in (*kept.dominators(node), node.path) if path in before][-1]]
            chosen[node.path] = dataclasses.replace(around, precision=full if around.precision else None, unit=None)
    return build(kept, chosen, spec.root)


# --- Policies that combine others ---


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
    return NamedPolicy("override", _build_override, (base, extra), {})


def _build_override(tree: ModuleTree, base: Policy, extra: Policy) -> PartitionSpec:
    first, second = base(tree), extra(tree)
    return build(_drop_ignored(tree, [first, second]), dict(first.selected) | dict(second.selected), first.root)


# --- by_group: units of several modules ---


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
    items = _check_modules("by_group", modules)
    check_p("by_group", p)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"by_group: size: expected a whole number of modules, at least 1, got {size!r}")
    return NamedPolicy("by_group", _build_groups, (items,), {"size": size, "p": p})


def _build_groups(tree: ModuleTree, items: list[object], p: P, size: int | None) -> PartitionSpec:
    # the root is beside no other module
    matched = _find_matching("by_group", items, [node for node in tree.nodes() if node is not tree])
    siblings: dict[str, list[str]] = {}
    for node in sorted(matched, key=lambda node: min(map(natural_key, node.names))):
        siblings.setdefault("" if size is None else node.path.rpartition(".")[0], []).append(node.path)
    chosen: dict[str, P] = {}
    for paths in siblings.values():
        length = size or len(paths)
        for group in (paths[i : i + length] for i in range(0, len(paths), length)):
            chosen |= dict.fromkeys(group, dataclasses.replace(p, unit="+".join(group) if len(group) > 1 else None))
    return build_with_leftovers(tree, chosen, p)


def _items_to_list(what: str, items: object) -> list[object]:
    """Return the items as a list; raise TypeError for a string, or anything that is not iterable."""
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise TypeError(f"{what}: expected an iterable, got {type(items).__name__}; put it in a list")
    return list(items)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _check_modules(policy: str, modules: object) -> list[object]:
    """Return the items as a list; raise TypeError unless they are path patterns, module classes or modules."""
    items = _items_to_list(f"{policy}: modules", modules)
    for item in items:
        if not isinstance(item, str | nn.Module) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise TypeError(f"{policy}: modules: expected path patterns, module classes or modules, got {type(item).__name__}")
    return items


def _find_matching(what: str, items: Iterable[object], nodes: list[ModuleTree]) -> list[ModuleTree]:
    """Return the modules that some item selects; raise ValueError, which says what it is for, for an item without any."""
    for item in items:
        if not any(_matches_module(item, node) for node in nodes):
            raise ValueError(f"{what}: {item!r} matches no module: expected some of {[node.path for node in nodes][:8]}")
    return [node for node in nodes if any(_matches_module(item, node) for item in items)]


def _matches_module(item: object, node: ModuleTree) -> bool:
    """Return whether an item selects a module: a pattern of its path, its class or a base class, or the module itself."""
    if isinstance(item, str):
        return any(_matches_path(item.split("."), path.split(".")) for path in node.names)
    return issubclass(node.cls, item) if isinstance(item, type) else node.module is item
