"""A state as a tree of `Leaf`: which parts of it are sharded like the spec's units, and under which names they are stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

from ... import _torch
from ..._spec.spec import PartitionSpec
from ..._spec.tree import NAMESPACE, Param
from ...compress._powersgd import PowerSGD
from ...optim import MatrixState
from ...optim._option_numbers import find_option_numbers, is_slice
from .containers import FACTORIES, is_container, named, opened
from .leaves import DEEPEST, Owned, Scalar, Slice, Value, Whole, is_plain, to_json
from .tree import Branch, Node, Place, Units, dict_of, matrix_state, stored_names

__all__ = ["PerRank", "described", "per_rank"]


@dataclass(frozen=True)
class PerRank:
    """What `per_rank` gives."""

    tree: Any


def per_rank(tree: Any) -> PerRank:
    """What is each rank's own, such as the state of its random numbers, in a state for `save`: it is stored for every rank.

    Of the same structure and shapes on all ranks: what has others on each goes as a string, ``json.dumps(...)``. It comes
    back, without this, on as many of them; on another number `load` raises ValueError.

    Example:
        >>> import torch, funshard as fs
        >>> state = {"step": 3, "random": fs.checkpoint.per_rank(torch.get_rng_state())}
    """
    return PerRank(tree)


def described(state: Any, spec: PartitionSpec, path: tuple[str, ...] = (), *, wanted: bool = False) -> tuple[Node, list[Any]]:
    """``(the tree of the state, what its leaves are)``, in one order; ``path`` is what it is a part of.

    Raises ValueError, naming the unit, for a slice of another length than the spec's, TypeError for what cannot be saved; but
    for a container that no file can name, if the state is only what is ``wanted``.
    """
    values: list[Any] = []
    return _Describing(spec, values, wanted=wanted).node(state, path, own=False), values


class _Describing:
    def __init__(self, spec: PartitionSpec, values: list[Any], *, wanted: bool) -> None:
        self._spec, self._values, self._wanted = spec, values, wanted

    def node(self, value: Any, path: tuple[str, ...], *, own: bool, averaged: bool = False) -> Node:
        if isinstance(value, PerRank):
            return self.node(value.tree, path, own=True)
        if isinstance(value, Mapping) and not own and (units := self._units(value, path)):
            # of optimizers of matrices what is no matrix has other optimizers' state
            other = {key: x.fallback.get(key, {}) if isinstance(x, MatrixState) else x for key, x in value.items()}
            numbers = find_option_numbers(other, [key for key in value if key in units], self._spec, path)
            children = {
                key: self._of_unit(child, Place(self._spec.by_key[key], path, numbers))
                if key in units
                else self.node(child, (*path, str(key)), own=own)
                for key, child in value.items()
            }
            kind, of = self._named(value, path)
            return Units(".".join(path), children, len(units) == len(self._spec), kind or "dict", of)
        if is_container(value):
            self._named(value, path)
            found = opened(value)
            nodes: list[Node] = []
            for entry, child in zip(found.entries, found.children, strict=True):
                mean = isinstance(value, PowerSGD) and entry == "error"
                nodes.append(self.node(child, (*path, str(entry)), own=own or mean, averaged=averaged or mean))
            return Branch(found.kind, found.of, found.entries, tuple(nodes), found.make)
        self._values.append(value)
        name = ".".join(path)
        if isinstance(value, Tensor):
            return Whole(name, tuple(value.shape), value.dtype, _torch.is_accelerator(value.device), own, averaged)
        to_json(value, name)
        return Value(name, value, own)

    def _of_unit(self, value: Any, place: Place) -> Node:
        """What a mapping has at the key of a unit, or a part of that."""
        if isinstance(value, MatrixState):
            return self._of_matrices(value, place)
        if is_container(value):
            self._named(value, place.full)
            found = opened(value)
            named = zip(found.entries, found.children, strict=True)
            nodes = tuple(self._of_unit(child, place.at(str(entry))) for entry, child in named)
            return Branch(found.kind, found.of, found.entries, nodes, found.make)
        self._values.append(value)
        unit, names = place.unit, place.names
        if not isinstance(value, Tensor):
            to_json(value, ".".join(place.full))
            return Value(names[0][0], value, names=names)
        if value.dim() == 0 or id(value) in place.numbers:
            return Scalar(unit, names, value.dtype, _torch.is_accelerator(value.device))
        leaf = Slice(unit, names, value.dtype, of=place.of, alone=place.alone)
        if value.shape != (leaf.length(self._spec),) if leaf.alone else not is_slice(value, unit, self._spec):
            length, dtype = (leaf.length(self._spec), value.dtype) if leaf.alone else self._spec.stored(unit)
            raise ValueError(
                f"unit '{unit.key}' of state '{'.'.join(place.full)}': expected this rank's slice, "
                f"[{length}] {dtype}, or a number, got {list(value.shape)} {value.dtype}; was it made with another spec or "
                "mesh?"
            )
        encoded = unit.at_rest is not None and value.dtype == torch.uint8
        return replace(leaf, dtype=unit.dtype, encoded=True) if encoded else leaf

    def _of_matrices(self, state: MatrixState, place: Place) -> Branch:
        """Of an optimizer of matrices: slices that hold matrices alone, what their owners have, and the rest's."""
        params = {param.name: param for param in place.unit.params}
        matrices = tuple(params[name] for name in state.owned)
        step = self._of_unit(state.step, place.at("step"))
        of = place._replace(of=matrices)
        slices = {slot: self._of_unit(x, of.at("slices", slot)) for slot, x in state.slices.items()}
        owned = {
            name: dict_of({slot: self._owned(x, params[name], place.at("owned", slot)) for slot, x in values.items()})
            for name, values in state.owned.items()
        }
        rest: dict[str, Node] = {}
        for entry, child in state.fallback.items():
            alone = entry in params
            where = place._replace(of=(params[entry],), alone=True) if alone else place
            rest[entry] = self._of_unit(child, where.at("rest"))
        return matrix_state(step, slices, owned, rest)

    def _owned(self, value: Tensor, param: Param, place: Place) -> Owned:
        self._values.append(value)
        (names,) = stored_names([param], place.path, place.slot)
        here = value.dim() == 0 or len(value) > 0
        shape = tuple(value.shape if here else value.shape[1:])
        return Owned(names, shape, value.dtype, _torch.is_accelerator(value.device), here)

    def _units(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> frozenset[str]:
        """The keys of units that the mapping has, if it is sharded like them.

        So is one that has nothing for any of its units, as plain SGD's state.
        """
        keys = [key for key in value if isinstance(key, str) and key in self._spec.by_key]
        if keys and len(keys) == len(value) and all(type(value[key]) is dict and not value[key] for key in keys):
            return frozenset(keys)
        found = [(key, tensor) for key in keys for tensor in optree.tree_leaves(value[key], namespace=NAMESPACE)]
        vectors = [(key, tensor) for key, tensor in found if isinstance(tensor, Tensor) and tensor.dim() == 1]
        matrices = any(isinstance(value[key], MatrixState) for key in keys)
        if matrices or any(is_slice(tensor, self._spec.by_key[key], self._spec) for key, tensor in vectors):
            return frozenset(keys)
        if vectors and len(keys) == len(value) and all(isinstance(value[key], Tensor) for key in keys):
            key, tensor = vectors[0]
            raise ValueError(
                f"unit '{key}' of state '{'.'.join((*path, key))}': expected this rank's slice, "
                f"[{self._spec.stored(self._spec.by_key[key])[0]}], got {list(tensor.shape)}; was it made with another spec "
                "or mesh?"
            )
        return frozenset()

    def _named(self, value: Any, path: tuple[str, ...]) -> tuple[str, Any]:
        """As `named`. TypeError for a container that no file can hold, ValueError for one too deep in others."""
        if len(path) >= DEEPEST and not self._wanted:
            raise ValueError(f"state '{'.'.join(path[:8])}...': expected at most {DEEPEST} containers in each other, got more")
        kind, of = named(value)
        if bad := [key for key in value if not is_plain(key)] if isinstance(value, Mapping) and not self._wanted else []:
            raise TypeError(
                f"state '{'.'.join(path)}': expected keys that are strings, numbers, bytes or None, got {bad[0]!r} "
                f"({type(bad[0]).__name__})"
            )
        if not kind and type(value) is defaultdict and not self._wanted:
            raise TypeError(
                f"state '{'.'.join(path)}': expected a defaultdict of one of {', '.join(FACTORIES)}, which a file can name, "
                f"got one of {value.default_factory!r}: save dict(...) of it"
            )
        return kind, of
