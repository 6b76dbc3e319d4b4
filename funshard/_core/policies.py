"""Policies: pure functions from a module pytree to a partition spec.

After torch.distributed.fsdp.wrap; where these differ from their namesakes there (shared modules and tied parameters
are counted once, root options are never changed) tests/core/test_policies.py says so. `funshard.policies` has more of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from .checks import check_param_classes
from .spec import PartitionSpec, abridge
from .tree import ModuleTree, Param, is_within, join_path, module_tree, natural_key
from .unit import P, Unit


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
    """A policy that prints as the call that made it, but for options that are None or the default `P`.

    It is ``build(tree, *args, **options)``, a function without a closure: closures do not pickle.
    """

    name: str
    build: Callable[..., PartitionSpec]
    args: tuple[object, ...]
    options: Mapping[str, object]

    def __call__(self, model: nn.Module | ModuleTree, /) -> PartitionSpec:
        return self.build(module_tree(model), *self.args, **self.options)

    def __repr__(self) -> str:
        options = [f"{key}={value!r}" for key, value in self.options.items() if value not in (None, SHARD)]
        return f"{self.name}({', '.join([*map(_format_argument, self.args), *options])})"


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


def check_classes(what: str, classes: Iterable[object]) -> None:
    """Raise TypeError unless they are classes of modules."""
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{what}: expected subclasses of nn.Module, got {cls!r}")


def whole(p: P = SHARD) -> Policy:
    """Return the policy with the whole model as one unit.

    Args:
        p: The unit's `P`.

    Example:
        >>> import torch, funshard as fs
        >>> [unit.path for unit in fs.policies.whole()(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))]
        ['']
    """
    check_p("whole", p)
    return NamedPolicy("whole", functools.partial(build_with_leftovers, selected={}), (), {"p": p})


def by_type(*classes: type[nn.Module], p: P = SHARD) -> Policy:
    """Return the policy with a unit for every instance of the classes (ModuleWrapPolicy).

    Args:
        classes: Module classes, at least one.
        p: The `P` of all units.

    Raises:
        ValueError: Without classes; from the policy, for a model that has no module of them.
        TypeError: For something else than a module class.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> [unit.path for unit in fs.by_type(torch.nn.Linear)(model)]
        ['', '0']
    """
    if not classes:
        raise ValueError("by_type: expected at least one module class, got none; whole() makes one unit")
    check_classes("by_type", classes)
    check_p("by_type", p)
    return NamedPolicy("by_type", _build_by_type, classes, {"p": p})


def _build_by_type(tree: ModuleTree, *classes: type[nn.Module], p: P) -> PartitionSpec:
    chosen = {node.path: p for node in tree.nodes() if issubclass(node.cls, classes)}
    if not chosen:
        names = list(dict.fromkeys(node.cls.__name__ for node in tree.nodes()))
        raise ValueError(
            f"by_type: no module is of {', '.join(cls.__name__ for cls in classes)}: expected classes of the model's "
            f"modules, some of {names[:8]}; whole() makes one unit"
        )
    return build_with_leftovers(tree, chosen, p)


# --- The spec of a module from the paths that a policy selects ---


def build(tree: ModuleTree, selected: Mapping[str, P], root: P | None) -> PartitionSpec:
    """Return the spec in which each parameter belongs to the longest selected path above all its uses.

    ``root`` is the `P` of the leftovers; with None nothing may be left. Raises ValueError, naming the path, for a path
    that matches no module, a module selected under two paths with different `P`, and an uncovered parameter. Raises TypeError
    for a parameter of a class of its own.
    """
    named = {join_path(node.path, attr): x for node in tree.nodes() for attr, x in node.module._parameters.items()}
    check_param_classes({param.name: x for param in tree.all_params if (x := named.get(param.name)) is not None})
    chosen: dict[str, P] = {}
    for path, p in selected.items():
        if path not in tree.canonical:
            raise ValueError(f"path '{path}' matches no module: expected one of {abridge(tree.canonical)}")
        if chosen.setdefault(tree.canonical[path], p) != p:
            first = tree.canonical[path]
            raise ValueError(f"module '{path}' is also '{first}' and is selected twice: as {chosen[first]} and as {p}")
    first = {node.path: min(map(natural_key, node.names)) for node in tree.nodes()}
    leftovers = dataclasses.replace(root or P(), unit=None)
    members = _group_by_unit({"": leftovers, **dict(sorted(chosen.items(), key=lambda item: first[item[0]]))})
    unit_of = {path: name for name, (paths, _) in members.items() for path in paths if path in chosen}
    owned: dict[str, list[Param]] = {}
    for param in tree.all_params:
        owners = _enclosing_units(param, tree, unit_of)
        if not owners and root is None:
            raise ValueError(
                f"parameter '{param.name}' is in no unit: expected a selected path above all its uses, "
                f"got {abridge(chosen)}; select '' for the leftovers"
            )
        owner = owners[-1] if owners else ""
        _check_shared(param, tree, chosen, owner, members)
        owned.setdefault(owner, []).append(param)
    units = [unit for name, params in owned.items() for unit in _split_into_units(name, *members[name], params)]
    for option in dict.fromkeys(option for _, p in members.values() for option in p.options):
        option._check_units([unit for unit in units if option in unit.p.options])
    units.sort(key=lambda unit: (unit.path != "", first[unit.path]))  # parents first, in natural order
    entries = tuple(sorted(chosen.items(), key=lambda item: natural_key(item[0])))
    names = tuple(param.name for param in tree.all_params)
    return PartitionSpec(entries, leftovers, tuple(units), tree.ignored, names=names)


def _group_by_unit(selected: Mapping[str, P]) -> dict[str, tuple[tuple[str, ...], P]]:
    """Return, by unit name, the paths of the unit's modules and their common `P` without its ``unit`` label.

    Raises ValueError, naming both, for modules of one unit that have different `P` or lie inside of each other, and for
    names with a ``+``, by which two units would have one key.
    """
    groups: dict[tuple[bool, str], list[str]] = {}
    for path, p in selected.items():
        groups.setdefault((p.unit is None, p.unit or path), []).append(path)
    members: dict[str, tuple[tuple[str, ...], P]] = {}
    for paths in groups.values():
        name, p = "+".join(paths), selected[paths[0]]
        for i, path in enumerate(paths):
            if selected[path] != p:
                raise ValueError(
                    f"modules '{paths[0]}' and '{path}' are one unit as {p} and as {selected[path]}: expected one P"
                )
            if (around := next((other for other in paths[:i] if is_within(path, other)), None)) is not None:
                raise ValueError(
                    f"unit '{name}': module '{path}' is inside of '{around}': expected modules beside each other; the outer "
                    "one alone has the parameters of both"
                )
        if name in members or (len(paths) > 1 and any("+" in path for path in paths)):
            raise ValueError(f"unit '{name}' of modules {paths} may have another unit's key: expected no '+' in module names")
        members[name] = tuple(paths), dataclasses.replace(p, unit=None)
    return members


def _enclosing_units(param: Param, tree: ModuleTree, unit_of: Mapping[str, str]) -> list[str]:
    """Return the units, outermost first, whose modules enclose all uses of a parameter."""
    names = sorted(param.names, key=natural_key)  # whatever the order of registration
    chains = [[unit_of[path] for path in tree._enclosing_paths(name) if path in unit_of] for name in names]
    return [unit for unit in chains[0] if all(unit in chain for chain in chains)]


def _check_shared(
    param: Param, tree: ModuleTree, chosen: Mapping[str, P], owner: str, members: Mapping[str, tuple[tuple[str, ...], P]]
) -> None:
    """Raise ValueError where a selected module below the owner says that a shared parameter is local, and it does not."""
    paths, p = members[owner]
    for path in dict.fromkeys(path for name in param.names for path in tree._enclosing_paths(name)) if param.aliases else ():
        is_below = path in chosen and not any(is_within(own, path) for own in paths)
        if is_below and not {*chosen[path].mark(param).local} <= {*p.mark(param).local}:
            raise ValueError(
                f"parameter '{param.name}', also {list(param.aliases)}, is in unit '{owner}', above all its uses, and the "
                f"P(local={chosen[path].local}) of '{path}' says that it is local: expected local= in the P of '{owner}'"
            )


def build_with_leftovers(tree: ModuleTree, selected: Mapping[str, P], p: P) -> PartitionSpec:
    """Return the spec in which the leftovers have ``p``, too, but none of its local axes: those are of selected modules."""
    return build(tree, selected, dataclasses.replace(p, local=None) if selected else p)


def _split_into_units(name: str, paths: tuple[str, ...], p: P, params: list[Param]) -> Iterator[Unit]:
    """Yield a unit for each dtype, requires_grad and local axes of these parameters, with a suffix if there are several."""
    groups: dict[tuple[str, bool, tuple[str, ...]], list[Param]] = {}
    for param in sorted((p.mark(param) for param in params), key=lambda param: param.sort_key):
        local = tuple(axis for axis, _ in param.local)
        groups.setdefault((str(param.dtype).removeprefix("torch."), param.requires_grad, local), []).append(param)
    dtypes, kinds, locals_ = ({key[i] for key in groups} for i in range(3))
    for (dtype, trained, local), group in sorted(groups.items()):
        parts = ([dtype] if len(dtypes) > 1 else []) + (["frozen"] if len(kinds) > 1 and not trained else [])
        parts += ["+".join(local)] if len(locals_) > 1 and local else []
        homes = tuple(path for path in paths if any(is_within(own, path) for param in group for own in param.names))
        yield Unit(":".join([name, *parts]), homes[0], p, tuple(group), homes)
