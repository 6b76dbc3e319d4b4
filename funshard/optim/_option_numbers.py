"""Which vectors in the states of units are slices, and which a number for each of the options that a unit's parameters have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor

from .._spec.spec import PartitionSpec
from .._spec.tree import NAMESPACE
from .._spec.unit import Unit

__all__ = ["fits", "numbers_in"]

NUMBERS = ("step", "eta", "mu", "mu_product")
"""The numbers that torch's optimizers have."""


def fits(tensor: Tensor, unit: Unit, spec: PartitionSpec) -> bool:
    """Whether it is as long as this rank's slice of the unit."""
    length, dtype = spec.stored(unit)
    if unit.at_rest and tensor.dtype == dtype:
        return tensor.shape == (length,)
    return tensor.shape == (spec.shard_numel(unit),)


def numbers_in(state: Mapping[str, Any], keys: Iterable[str], spec: PartitionSpec, path: Sequence[str]) -> frozenset[int]:
    """The ids of vectors beside slices that are numbers: `optim.from_torch` has one for each of the unit's options.

    There are fewer of these than parameters in the unit, and in most units more elements in a slice. Where both have one
    length, what tells is a unit whose numbers have no dimension, which has them all so; then the same slot of other units;
    then the name, of those that torch's optimizers have. ValueError, naming the slot, where nothing does.
    """
    found: set[int] = set()
    told: dict[tuple[Any, ...], set[bool]] = defaultdict(set)  # of a slot, by units where it can be one thing only
    open_: list[tuple[Unit, tuple[Any, ...], Tensor]] = []
    for unit in map(spec.by_key.__getitem__, keys):
        paths, leaves = (f(state[unit.key], namespace=NAMESPACE) for f in (optree.tree_paths, optree.tree_leaves))
        slots = [(slot, x) for slot, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor) and x.dim() < 2]
        vectors = [(slot, x) for slot, x in slots if x.dim()]
        short = [id(x) for _, x in vectors if 1 < len(x) <= len(unit.params)]
        numbers = {id(x) for _, x in vectors if id(x) in short and not fits(x, unit, spec)}
        if len(numbers) == len(vectors):  # slices of another spec
            numbers = set[int]()
        found |= numbers
        for slot, x in slots:
            if x.dim() == 0 or id(x) in numbers:
                told[slot].add(True)
            elif fits(x, unit, spec):
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
                f"slice that is longer; give the unit fs.P(align={len(unit.params) + 1}), or more"
            )
        if said == {True}:
            found.add(id(x))
    return frozenset(found)
