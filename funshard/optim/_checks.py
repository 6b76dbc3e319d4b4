"""What optimizers of all kinds share: checks of learning rates and of memory that an update writes, and numbers in states."""

from __future__ import annotations

import itertools
import numbers
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import optree
from torch import Tensor

from .. import _torch
from .._core.checks import check_mapping
from .._core.spec import PartitionSpec
from .._core.tree import NAMESPACE
from .._core.unit import Unit
from .._spec.unit_state import UnitState

__all__ = ["StateMapping", "Tensors", "break_message", "check_rate", "check_tensors", "find_option_numbers", "is_slice"]
__all__ += ["named_tensors", "refuse_pickle", "refuse_shared_memory", "same_pair"]


Pair = TypeVar("Pair")
Tensors = Mapping[str, Tensor]
"""A tree that is only read: by unit key or parameter name."""
StateMapping = Mapping[str, Tensors]
"""An elementwise state that is only read: by unit key and name."""


def check_rate(lr: object, what: str, *, optional: bool = True) -> None:
    """Raise TypeError, with ``what`` as its subject, unless ``lr`` is a number, a tensor or, if ``optional``, None."""
    if not isinstance(lr, numbers.Real | Tensor) and not (optional and lr is None):
        raise TypeError(
            f"{what}: expected a number or a tensor of one, got {type(lr).__name__}; a schedule is a function of the step: "
            "give update(..., lr=schedule(step)). torch's schedulers write into a torch optimizer, and here is none"
        )


def refuse_pickle(self: object) -> NoReturn:
    """Raise TypeError: the ``__reduce__`` of a pair of functions. A copy of a pair is the pair."""
    raise TypeError(
        f"{type(self).__name__}: a pair of functions of this process does not pickle: make it in the function that "
        "mp.spawn runs; its state, the parameters and the spec do pickle"
    )


def same_pair(optimizer: Pair, memo: object = None, /) -> Pair:
    """Return the pair: its ``__copy__`` and ``__deepcopy__``."""
    return optimizer


def break_message(name: str, why: str) -> str:
    """Return the reason that torch.compile gives where an update breaks its graph."""
    return f"{name}'s update cannot be part of a graph: {why}. Compile the gradients, and call update outside"


def named_tensors(grads: Tensors, state: StateMapping, params: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name for an error, tensor)`` for every tensor of the trees."""
    yield from ((f"params['{key}']", tensor) for key, tensor in params.items())
    yield from ((f"grads['{key}']", tensor) for key, tensor in grads.items())
    yield from ((f"state['{key}']['{name}']", t) for key, values in state.items() for name, t in values.items())


def refuse_shared_memory(tensors: Iterable[tuple[str, Tensor]], by: str = "donate=True") -> None:
    """Raise ValueError if two of the tensors overlap in memory that will be written."""
    bases = ((what, _torch.unwrap(tensor)) for what, tensor in tensors)
    ranges = sorted((*_torch.memory_range(base), what) for what, base in bases if base.numel())
    for (storage, _, end, what), (other, begin, _, second) in itertools.pairwise(ranges):
        if storage == other and begin < end:
            raise ValueError(f"{what} and {second} share memory, which {by} writes: expected tensors of their own")


def check_tensors(tree: Tensors, what: str) -> None:
    """Raise TypeError, naming the key, unless this is a mapping of tensors."""
    check_mapping(tree, what)
    for key, x in tree.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = "; an unused parameter has gradient zeros" if x is None else ""
            raise TypeError(f"{what}: '{key}': expected a tensor, got {type(x).__name__}{hint}")


# --- Which tensors in the states of units are slices, and which hold one number for each of the options of a unit ---


NUMBERS = ("step", "eta", "mu", "mu_product")
"""Names of the numbers in the states of torch's optimizers."""


def is_slice(tensor: Tensor, unit: Unit, spec: PartitionSpec) -> bool:
    """Return whether the tensor is as long as this rank's slice of the unit."""
    length, dtype = spec.stored(unit)
    if unit.is_encoded and tensor.dtype == dtype:
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
