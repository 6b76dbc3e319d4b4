"""build: the spec of a module from the paths that a policy selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from .local import find_unmatched, mark_local
from .spec import PartitionSpec
from .table import abridge
from .tree import ModuleTree, Param, natural_key
from .unit import P, Unit

__all__ = ["build", "build_with_leftovers"]


def build(tree: ModuleTree, selected: Mapping[str, P], root: P | None) -> PartitionSpec:
    """Return the spec in which each parameter belongs to the longest selected path above all its uses.

    ``root`` is the `P` of the leftovers; with None nothing may be left. Raises ValueError, naming the path, for a path
    that matches no module, a module selected under two paths with different `P`, and an uncovered parameter.
    """
    chosen: dict[str, P] = {}
    for path, p in selected.items():
        if path not in tree.canonical:
            raise ValueError(f"path '{path}' matches no module: expected one of {abridge(tree.canonical)}")
        if chosen.setdefault(tree.canonical[path], p) != p:
            first = tree.canonical[path]
            raise ValueError(f"module '{path}' is also '{first}' and is selected twice: as {chosen[first]} and as {p}")
    owned: dict[str, list[Param]] = {}
    for param in tree.all_params:
        owners = [path for path in tree.dominators(param) if path in chosen]
        if not owners and root is None:
            raise ValueError(
                f"parameter '{param.name}' is in no unit: expected a selected path above all its uses, "
                f"got {abridge(chosen)}; select '' for the leftovers"
            )
        owned.setdefault(owners[-1] if owners else "", []).append(param)
    every = {"": root or P(), **chosen}
    for path, params in owned.items():
        _check_tied_local(path, every[path], params, chosen)
    units = [unit for path, params in owned.items() for unit in _split_into_units(path, every[path], params)]
    for p in dict.fromkeys(every.values()):
        if (glob := find_unmatched(p.local_axes, (x for path in owned if every[path] == p for x in owned[path]))) is not None:
            where, expected = "", "a glob of names such as '*.up.weight'"
            for path, params in owned.items():
                if name := next((name for param in params for name in param.names if fnmatchcase(name, glob)), None):
                    where = f", but '{name}' of unit '{path}', which has {every[path]}"
                    expected = "a policy that selects its module, too: what a policy leaves is replicated over local axes"
            raise ValueError(f"{p}: '{glob}' matches no parameter of its units{where}: expected {expected}")
    encoded = [path for path in owned if every[path].at_rest]
    if encoded and not any(unit.at_rest for unit in units):
        raise ValueError(
            f"unit '{encoded[0]}' is {every[encoded[0]]}, which is for what is frozen, and nothing is: expected "
            "requires_grad_(False) before the spec is made"
        )
    first = {node.path: min(map(natural_key, node.names)) for node in tree.nodes()}
    units.sort(key=lambda unit: (unit.path != "", first[unit.path]))  # parents first, in natural order
    entries = tuple(sorted(chosen.items(), key=lambda item: natural_key(item[0])))
    names = tuple(param.name for param in tree.all_params)
    return PartitionSpec(entries, root or P(), tuple(units), tree.ignored, names=names)


def _check_tied_local(owner: str, own: P, params: Iterable[Param], chosen: Mapping[str, P]) -> None:
    """Raise ValueError for a parameter that a selected module is local over and shares with modules outside of it."""
    for path, p in chosen.items():
        inside = f"{path}." if path else ""
        if not p.local_axes or f"{owner}.".startswith(inside):
            continue
        for param in params:
            is_inside = any(name.startswith(inside) for name in param.names)
            if is_inside and not {*mark_local(param, p.local_axes).local} <= {*mark_local(param, own.local_axes).local}:
                raise ValueError(
                    f"parameter '{param.name}', also {list(param.names[1:])}, is in unit '{owner}', above all its uses, and "
                    f"the {p} of '{path}' says that it is local: expected local= in the P of '{owner}'"
                )


def build_with_leftovers(tree: ModuleTree, selected: Mapping[str, P], p: P) -> PartitionSpec:
    """Return the spec in which the leftovers have ``p``, too, but none of its local axes: those are of selected modules."""
    return build(tree, selected, dataclasses.replace(p, local=None) if selected else p)


def _split_into_units(path: str, p: P, params: list[Param]) -> Iterator[Unit]:
    """Yield a unit for each dtype, requires_grad and local axes of a path's parameters, with a suffix if there are several."""
    groups: dict[tuple[str, bool, tuple[str, ...]], list[Param]] = {}
    for param in sorted((mark_local(param, p.local_axes) for param in params), key=lambda param: param.sort_key):
        local = tuple(axis for axis, _ in param.local)
        groups.setdefault((str(param.dtype).removeprefix("torch."), param.requires_grad, local), []).append(param)
    dtypes, kinds, locals_ = ({key[i] for key in groups} for i in range(3))
    for (dtype, trained, local), group in sorted(groups.items()):
        parts = ([dtype] if len(dtypes) > 1 else []) + (["frozen"] if len(kinds) > 1 and not trained else [])
        parts += ["+".join(local)] if len(locals_) > 1 and local else []
        yield Unit(":".join([path, *parts]), path, p, tuple(group))
