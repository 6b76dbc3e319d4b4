"""Which tensors in the states of units are slices, and which hold one number for each of the options of a unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from .._core.spec import PartitionSpec
from .._core.tree import NAMESPACE
from .._core.unit import Unit
from .._spec.unit_state import UnitState

__all__ = ["find_option_numbers", "is_slice"]

NUMBERS = ("step", "eta", "mu", "mu_product")
"""Names of the numbers in the states of torch's optimizers."""


def is_slice(tensor: Tensor, unit: Unit, spec: PartitionSpec) -> bool:
    length, dtype = spec.stored(unit)
    if unit.at_rest and tensor.dtype == dtype:
        return tensor.shape == (length,)
    return tensor.shape == (spec.shard_numel(unit),)


def find_option_numbers(
    state: Mapping[str, Any],
    keys: Iterable[str],
    spec: PartitionSpec,
    path: Sequence[str],
    group_of_param: Mapping[str, int] | None = None,
) -> frozenset[int]:
    """Return the ids of tensors that are numbers, one for each of the unit's options, as `optim.from_torch` has them.

    A `UnitState` declares them. Shapes tell them in other states, which are of users' own ``(init, update)`` or of an older
    version: a unit has at most as many options as parameters, and most slices are longer. Where both have one length, a unit
    without any 0-D number decides; then the same slot of other units; then the names that torch's optimizers use. ValueError
    names the slot below ``path`` if nothing decides. ``group_of_param`` says which options each parameter has, if known.
    """
    found: set[int] = set()
    told: dict[tuple[Any, ...], set[bool]] = defaultdict(set)  # of a slot, by units where it can be one thing only
    open_: list[tuple[Unit, tuple[Any, ...], Tensor]] = []
    for unit in map(spec.by_key.__getitem__, keys):
        of_unit = state[unit.key]
        if isinstance(of_unit, UnitState):
            found |= {id(of_unit[name]) for name in of_unit.numbers}
            continue
        paths, leaves = (f(of_unit, namespace=NAMESPACE) for f in (optree.tree_paths, optree.tree_leaves))
        slots = [(slot, x) for slot, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor) and x.dim() < 2]
        vectors = [(slot, x) for slot, x in slots if x.dim()]
        groups = len({group_of_param[param.name] for param in unit.params}) if group_of_param else None
        lengths = range(2, len(unit.params) + 1) if groups is None else range(groups, groups + 1)
        short = [id(x) for _, x in vectors if len(x) in lengths and len(x) > 1]
        numbers = {id(x) for _, x in vectors if id(x) in short and not is_slice(x, unit, spec)}
        if groups is None and len(numbers) == len(vectors):  # slices of another spec
            numbers = set[int]()
        found |= numbers
        for slot, x in slots:
            if x.dim() == 0 or id(x) in numbers:
                told[slot].add(True)
            elif is_slice(x, unit, spec):
                if id(x) not in short or len(vectors) == 1 or len(slots) > len(vectors):
                    told[slot].add(False)
                else:
                    open_.append((unit, slot, x))
    for unit, slot, x in open_:
        said = told[slot] or ({True} if slot and slot[-1] in NUMBERS else {True, False})
        if len(said) > 1:
            raise ValueError(
                f"unit '{unit.key}' of state '{'.'.join(map(str, (*path, unit.key, *slot)))}': [{len(x)}] may be this rank's "
                f"slice, or numbers of parameters with different options, of which the unit has {len(unit.params)}: expected a "
                f"slice that is longer; give the unit fs.P(align={len(unit.params) + 1}), or more, or declare its numbers: "
                "fs.optim.UnitState(state, numbers)"
            )
        if said == {True}:
            found.add(id(x))
    return frozenset(found)
