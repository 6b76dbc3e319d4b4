"""Summarize what a rank writes of a state, and check that all ranks agree on it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._sharding.agree import hash_bits
from ..._spec.spec import PartitionSpec
from .._ranks.ranks import Ranks
from .describe import describe
from .json_tree import tree_to_json
from .leaves import Leaf, OwnedLeaf, SliceLeaf, TensorLeaf, TensorRange, ValueLeaf, check_storable, leaf_names
from .plain_values import plain_to_json
from .tree import ContainerNode, Node, iter_leaves, walk

__all__ = ["StateSummary", "summarize_state"]

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
    _check_distinct([name for leaf in iter_leaves(node) for name in leaf_names(leaf)])
    return summary


def _raise_difference(every: list[dict[str, str]]) -> None:
    """Raise ValueError for the first name whose text differs between the ranks."""
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


def _check_distinct(names: list[str]) -> None:
    """Raise ValueError if two leaves of a state have one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"state '{name}': two of its leaves have this name: expected names without such dots")
        seen.add(name)
