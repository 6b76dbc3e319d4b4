"""Describe a state as a tree: which parts are sharded like the spec's units, and under which names they are stored."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias

import optree
import torch
from torch import Tensor

from ... import _torch
from ..._core.spec import PartitionSpec
from ..._core.tree import NAMESPACE, Param
from ..._sharding.hashes import hash_bits
from ..._spec.local import stack_dims
from ..._spec.unit_state import UnitState
from ...compress._powersgd import PowerSGD
from ...optim import MatrixState, QuantizedSlice
from ...optim._checks import find_option_numbers, is_slice
from .._ranks import Ranks
from .json_tree import FALLBACK, tree_to_json
from .leaves import Leaf, OwnedLeaf, ScalarLeaf, SliceLeaf, TensorLeaf, TensorRange, ValueLeaf, check_storable, leaf_names
from .tree import (
    FACTORIES,
    MAX_DEPTH,
    ContainerNode,
    Node,
    StatePath,
    describe_container,
    get_kind,
    is_container,
    is_plain_value,
    iter_leaves,
    make_dict_node,
    make_matrix_state_node,
    make_units_node,
    plain_to_json,
    stored_names,
    walk,
)

__all__ = ["StateSummary", "describe", "per_rank", "summarize_state"]


@dataclass(frozen=True)
class PerRank:
    tree: Any


def per_rank(tree: Any) -> PerRank:
    """Mark a part of a state for `save` as each rank's own, so that it is stored for every rank.

    `load` returns the part of this rank, without the mark, on as many ranks as saved it.

    Args:
        tree: The part, such as the state of random numbers. All ranks give the same structure and shapes; a part whose
            structure differs can be given as a string, ``json.dumps(...)``.

    Returns:
        The marked part, for a state that `save` is given.

    Example:
        >>> import torch, funshard as fs
        >>> state = {"step": 3, "random": fs.checkpoint.per_rank(torch.get_rng_state())}
    """
    return PerRank(tree)


def describe(
    state: Any, spec: PartitionSpec, path: tuple[str, ...] = (), *, is_template: bool = False
) -> tuple[Node, list[Any]]:
    """Return the tree of a state, or of the part of one at ``path``, and the values of its leaves, as `iter_leaves` has them.

    A template, `load`'s ``like``, may have containers that no file can name. Raises ValueError, naming the unit, for a slice
    of another length than the spec's, and TypeError for a value that cannot be saved.
    """
    values: list[Any] = []
    return _Describer(spec, values, is_template=is_template).describe(state, path, is_per_rank=False), values


class _Describer:
    """A description of a state in the making: it describes the parts, and collects the values of their leaves."""

    def __init__(self, spec: PartitionSpec, values: list[Any], *, is_template: bool) -> None:
        self._spec, self._values, self._is_template = spec, values, is_template

    def describe(self, value: Any, path: tuple[str, ...], *, is_per_rank: bool, is_averaged: bool = False) -> Node:
        """Return the node of a part of the state."""
        if isinstance(value, PerRank):
            return self.describe(value.tree, path, is_per_rank=True)
        if isinstance(value, Mapping) and not is_per_rank and (units := self._unit_keys(value, path)):
            # In the state of an optimizer by matrix, only parameters that are no matrices have numbers for each option.
            elementwise = {key: x.fallback.get(key, {}) if isinstance(x, MatrixState) else x for key, x in value.items()}
            numbers = find_option_numbers(elementwise, [key for key in value if key in units], self._spec, path)
            children = {
                key: self._describe_unit(child, StatePath(self._spec.by_key[key], path, numbers))
                if key in units
                else self.describe(child, (*path, str(key)), is_per_rank=is_per_rank)
                for key, child in value.items()
            }
            kind, argument = self._check_container(value, path)
            is_complete = len(units) == len(self._spec)
            return make_units_node(".".join(path), children, is_complete=is_complete, kind=kind or "dict", argument=argument)
        if is_container(value):

            def describe_child(entry: Any, child: Any) -> Node:
                is_error = isinstance(value, PowerSGD) and entry == "error"
                flags = {"is_per_rank": is_per_rank or is_error, "is_averaged": is_averaged or is_error}
                return self.describe(child, (*path, str(entry)), **flags)

            return self._describe_container(value, path, describe_child)
        self._values.append(value)
        name = ".".join(path)
        if isinstance(value, Tensor):
            on_device = _torch.is_accelerator(value.device)
            return TensorLeaf(name, tuple(value.shape), value.dtype, on_device, is_per_rank, is_averaged)
        plain_to_json(value, name)
        return ValueLeaf(name, value, is_per_rank)

    def _describe_container(
        self, value: Any, path: tuple[str, ...], describe_child: Callable[[Any, Any], Node]
    ) -> ContainerNode:
        """Return the node of a container, whose children ``describe_child(entry, child)`` describes."""
        self._check_container(value, path)
        return describe_container(value, describe_child)

    def _describe_unit(self, value: Any, path: StatePath) -> Node:
        """Return the node of a unit's entry in a mapping by units, or of a part of it."""
        if isinstance(value, MatrixState):
            return self._describe_matrix_state(value, path)
        if isinstance(value, QuantizedSlice):
            return self._describe_container(
                value, path.error_path, lambda entry, child: self._describe_blocks(child, path.child(str(entry)))
            )
        if is_container(value):
            return self._describe_container(
                value, path.error_path, lambda entry, child: self._describe_unit(child, path.child(str(entry)))
            )
        self._values.append(value)
        unit, names = path.unit, path.names
        if not isinstance(value, Tensor):
            plain_to_json(value, ".".join(path.error_path))
            return ValueLeaf(names[0][0], value, names=names)
        if value.dim() == 0 or id(value) in path.numbers:
            return ScalarLeaf(unit, names, value.dtype, _torch.is_accelerator(value.device))
        leaf = SliceLeaf(unit, names, value.dtype, subset=path.subset, is_compact=path.is_compact)
        if value.shape != (leaf.numel(self._spec),) if leaf.is_compact else not is_slice(value, unit, self._spec):
            length, dtype = (leaf.numel(self._spec), value.dtype) if leaf.is_compact else self._spec.stored(unit)
            _raise_other_slice(unit.key, path.error_path, f"this rank's slice, [{length}] {dtype}, or a number", value)
        is_encoded = unit.at_rest is not None and value.dtype == torch.uint8
        return replace(leaf, dtype=unit.dtype, is_encoded=True) if is_encoded else leaf

    def _describe_blocks(self, value: Tensor, path: StatePath) -> SliceLeaf:
        """Return the leaf of codes or scales, each of which stands for as many elements of the unit's slice."""
        self._values.append(value)
        unit, numel = path.unit, self._spec.shard_numel(path.unit)
        block = numel // len(value) if value.dim() == 1 and len(value) and not numel % len(value) else 0
        if not block or unit.align % block:
            expected = f"a part of this rank's slice, of {numel} elements and in blocks that start at multiples of {unit.align}"
            _raise_other_slice(unit.key, path.error_path, expected, value)
        return SliceLeaf(unit, path.names if block == 1 else path.block_names, value.dtype, block=block)

    def _describe_matrix_state(self, state: MatrixState, path: StatePath) -> ContainerNode:
        """Return the node of an optimizer's state by matrix: slices and owned tensors of matrices, and the fallback's."""
        params = {param.name: param for param in path.unit.params}
        matrices = tuple(params[name] for name in state.owned)
        step = self._describe_unit(state.step, path.child("step"))
        of_matrices = path._replace(subset=matrices)
        slices = {slot: self._describe_unit(x, of_matrices.child("slices", slot)) for slot, x in state.slices.items()}
        owned = {
            name: make_dict_node(
                {slot: self._describe_owned(x, params[name], path.child("owned", slot)) for slot, x in values.items()}
            )
            for name, values in state.owned.items()
        }
        fallback: dict[str, Node] = {}
        for entry, child in state.fallback.items():
            of_entry = path._replace(subset=(params[entry],), is_compact=True) if entry in params else path
            fallback[entry] = self._describe_unit(child, of_entry.child(FALLBACK))
        return make_matrix_state_node(step, slices, owned, fallback)

    def _describe_owned(self, value: Tensor, param: Param, path: StatePath) -> OwnedLeaf:
        self._values.append(value)
        (names,) = stored_names([param], path.path, path.slot)
        is_here = value.dim() == 0 or len(value) > 0
        shape = tuple(value.shape if is_here else value.shape[1:])
        stack = stack_dims(param, shape, dict(self._spec.bound_mesh.sizes))
        return OwnedLeaf(names, shape, value.dtype, _torch.is_accelerator(value.device), is_here, stack)

    def _unit_keys(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> frozenset[str]:
        """Return the keys of units in a mapping that is sharded like them, or none.

        A `UnitState` or a `MatrixState` declares it. Otherwise a slice tells; a mapping whose units all have an empty dict, as
        the state of SGD without momentum, counts as sharded.
        """
        keys = [key for key in value if isinstance(key, str) and key in self._spec.by_key]
        if any(isinstance(value[key], UnitState | MatrixState) for key in keys):
            return frozenset(keys)
        if keys and len(keys) == len(value) and all(type(value[key]) is dict and not value[key] for key in keys):
            return frozenset(keys)
        found = [(key, tensor) for key in keys for tensor in optree.tree_leaves(value[key], namespace=NAMESPACE)]
        vectors = [(key, tensor) for key, tensor in found if isinstance(tensor, Tensor) and tensor.dim() == 1]
        if any(is_slice(tensor, self._spec.by_key[key], self._spec) for key, tensor in vectors):
            return frozenset(keys)
        if vectors and len(keys) == len(value) and all(isinstance(value[key], Tensor) for key in keys):
            key, tensor = vectors[0]
            length, _ = self._spec.stored(self._spec.by_key[key])
            _raise_other_slice(key, (*path, key), f"this rank's slice, [{length}]", tensor)
        return frozenset()

    def _check_container(self, value: Any, path: tuple[str, ...]) -> tuple[str, Any]:
        """Return `get_kind` of a container. Raises TypeError if no file can hold it, ValueError if it is nested too deep."""
        if len(path) >= MAX_DEPTH and not self._is_template:
            raise ValueError(
                f"state '{'.'.join(path[:8])}...': expected at most {MAX_DEPTH} containers in each other, got more"
            )
        kind, argument = get_kind(value)
        if (
            bad := [key for key in value if not is_plain_value(key)]
            if isinstance(value, Mapping) and not self._is_template
            else []
        ):
            raise TypeError(
                f"state '{'.'.join(path)}': expected keys that are strings, numbers, bytes or None, got {bad[0]!r} "
                f"({type(bad[0]).__name__})"
            )
        if not kind and type(value) is defaultdict and not self._is_template:
            raise TypeError(
                f"state '{'.'.join(path)}': expected a defaultdict of one of {', '.join(FACTORIES)}, which a file can name, "
                f"got one of {value.default_factory!r}: save dict(...) of it"
            )
        return kind, argument


def _raise_other_slice(key: str, path: tuple[str, ...], expected: str, found: Tensor) -> NoReturn:
    raise ValueError(
        f"unit '{key}' of state '{'.'.join(path)}': expected {expected}, got {list(found.shape)} {found.dtype}; was it made "
        "with another spec or mesh?"
    )


# --- Summarize what a rank writes of a state, and check that all ranks agree on it ---

RankMessage: TypeAlias = tuple[str, dict[str, Any], dict[str, tuple[str, int, int]]]
"""What a rank sends of its summary: a digest of ``common``, then ``per_rank`` and ``replicas``."""


@dataclass(frozen=True)
class StateSummary:
    """The parts of a state that this rank can write, and what the ranks compare of the state."""

    spec: PartitionSpec
    node: Node
    ranges: list[TensorRange] = field(default_factory=list)
    """The ranges of stored tensors that this rank holds."""
    common: dict[str, str] = field(default_factory=dict)
    """A text for each name that must be equal on all ranks."""
    per_rank: dict[str, Any] = field(default_factory=dict)
    """The plain values that are each rank's own, by name."""
    replicas: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """For each slice that several ranks hold, by name: the unit's key, the slice's number, and a digest of its values."""

    def message(self) -> RankMessage:
        """Return what the other ranks need of the summary."""
        return hashlib.sha256(json.dumps(self.common).encode()).hexdigest(), self.per_rank, self.replicas

    def check_agreement(self, messages: list[RankMessage], ranks: Ranks) -> Any:
        """Return the JSON tree of the state. Raises ValueError, on every rank, if the messages of the ranks disagree."""
        if any(digest != messages[0][0] for digest, *_ in messages):
            _raise_difference(ranks.gather(self.common))
        _check_replicas([replicas for *_, replicas in messages])
        every = {name: [values[name] for _, values, _ in messages] for name in self.per_rank}
        return tree_to_json(self.node, self.spec, every)

    def _add(self, leaf: Leaf, value: Any, ranks: Ranks) -> None:
        """Add a leaf: what all ranks must have in common, or each rank's own."""
        name = leaf_names(leaf)[0]
        if isinstance(value, Tensor):
            check_storable(value, f"state '{name}'")
        if isinstance(leaf, ValueLeaf):
            if leaf.is_per_rank:
                self.common[name] = "each rank's own, no tensor"
                self.per_rank[name] = leaf.value
            else:
                self.common[name] = json.dumps(plain_to_json(leaf.value, name))
            return
        match leaf:
            case SliceLeaf():
                self.common[name] = f"slices {leaf.dtype} of unit '{leaf.unit.key}'"
                if leaf.is_encoded:
                    raise ValueError(
                        f"unit '{leaf.unit.key}' is at rest in {leaf.unit.at_rest}, encoded from the frozen model: "
                        "expected a state without it; save fs.partition(params, spec)[0]"
                    )
                index, slices = leaf.slice_index(self.spec)
                if slices < ranks.size:
                    self.replicas[name] = leaf.unit.key, index, int(hash_bits(value.detach()))
            case TensorLeaf(is_per_rank=True):
                self.common[name] = f"each rank's own, of one shape on all, {list(leaf.shape)} {leaf.dtype}"
            case OwnedLeaf():
                self.common[name] = f"of its owners, {list(leaf.shape)} {leaf.dtype}"
            case _:
                self.common[name] = f"{list(value.shape)} {value.dtype} of digest {int(hash_bits(value.detach())):x}"
        self.ranges.extend(leaf.ranges(value, self.spec, ranks.rank, ranks.size))


def summarize_state(state: Any, spec: PartitionSpec, ranks: Ranks) -> StateSummary:
    """Return the summary of a state on this rank. Raises ValueError or TypeError for a state that cannot be saved."""
    node, values = describe(state, spec)
    summary = StateSummary(spec, node)
    for path, found in walk(node):
        if isinstance(found, ContainerNode):
            argument = "" if found.argument is None else f" of {found.argument}"
            summary.common[path] = f"a container, {found.kind or 'of a class of its own'}{argument}"
    with torch.no_grad():
        for leaf, value in zip(iter_leaves(node), values, strict=True):
            summary._add(leaf, value, ranks)
    names = Counter(name for leaf in iter_leaves(node) for name in leaf_names(leaf))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"state '{twice[0]}': two of its leaves have this name: expected names without such dots")
    return summary


def _raise_difference(every: list[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for one in every for name in one):
        texts = [one.get(name, "nothing") for one in every]
        if rank := next((rank for rank, text in enumerate(texts) if text != texts[0]), 0):
            raise ValueError(
                f"state '{name}': expected the same on all ranks, got on rank 0 {texts[0]}, on rank {rank} {texts[rank]}; wrap "
                "what is each rank's own in checkpoint.per_rank, with one structure and shape on all or as a string "
                "(json.dumps), and save what is sharded by another spec with that"
            )


def _check_replicas(every: list[dict[str, tuple[str, int, int]]]) -> None:
    """Check that replicas are equal, since each writes a part. Raises ValueError, naming the unit, otherwise."""
    for name in every[0]:
        first: dict[int, tuple[int, int]] = {}
        for rank, replicas in enumerate(every):
            key, index, digest = replicas[name]
            other, expected = first.setdefault(index, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"unit '{key}' of state '{name}': expected the same on all replicas, got others on rank {rank} than on "
                    f"rank {other}; average them first, as by fs.averaging.average"
                )
