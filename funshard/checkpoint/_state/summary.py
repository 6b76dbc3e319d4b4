"""What a rank writes of a state, once all ranks agree on what it is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._sharding.agree import fingerprint
from ..._spec.spec import PartitionSpec
from .._files.planners import Writes
from .._ranks.ranks import Ranks
from .describe import described
from .json_tree import written_tree
from .leaves import Leaf, Owned, Part, Scalar, Slice, Value, Whole, check_holds, names_of, to_json
from .tree import Node, containers, leaves

__all__ = ["Planned", "planned"]

Said: TypeAlias = tuple[str, dict[str, Any], dict[str, tuple[str, int, int]]]


@dataclass(frozen=True)
class Planned:
    """What a rank has to write of a state, and what it says of it to the others."""

    spec: PartitionSpec
    node: Node
    writes: Writes
    alike: dict[str, str]
    """What all ranks must have alike, by name."""
    own: dict[str, Any]
    """The plain values that are each rank's own, by name."""
    held: dict[str, tuple[str, int, int]]
    """Of what several ranks hold, by name: the unit, which slice this rank has, and a digest of it."""

    def said(self) -> Said:
        """What all ranks hear of it."""
        return hashlib.sha256(json.dumps(self.alike).encode()).hexdigest(), self.own, self.held

    def agreed(self, told: list[Said], ranks: Ranks) -> Any:
        """The structure of the state, if all ranks say the same; or else ValueError on all of them."""
        if any(digest != told[0][0] for digest, *_ in told):
            _raise_difference(ranks.gather(self.alike))
        _check_replicas([held for *_, held in told])
        owns = {name: [values[name] for _, values, _ in told] for name in self.own}
        return written_tree(self.node, self.spec, owns)


def planned(state: Any, spec: PartitionSpec, ranks: Ranks) -> Planned:
    """What this rank has to write. ValueError, TypeError for a state that cannot be saved."""
    node, values = described(state, spec)
    parts: list[Part] = []
    alike: dict[str, str] = dict(containers(node))
    own: dict[str, Any] = {}
    held: dict[str, tuple[str, int, int]] = {}
    with torch.no_grad():
        for leaf, value in zip(leaves(node), values, strict=True):
            if isinstance(value, Tensor):
                check_holds(value, f"state '{names_of(leaf)[0]}'")
            _add(leaf, value, spec, ranks, parts, alike, own)
            if isinstance(leaf, Slice) and spec.size(leaf.unit) < ranks.size:
                held[leaf.names[0][0]] = leaf.unit.key, leaf.index(spec), int(fingerprint(value.detach()))
        _refuse_twice([name for leaf in leaves(node) for name in names_of(leaf)])
        return Planned(spec, node, Writes(parts), alike, own, held)


def _add(
    leaf: Leaf, value: Any, spec: PartitionSpec, ranks: Ranks, parts: list[Part], alike: dict[str, str], own: dict[str, Any]
) -> None:
    match leaf:
        case Value(name, own=True):
            alike[name] = "each rank's own, no tensor"
            own[name] = value
        case Value(name):
            alike[name] = json.dumps(to_json(value, name))
        case Slice():
            alike[leaf.names[0][0]] = f"slices {leaf.dtype} of unit '{leaf.unit.key}'"
            if leaf.encoded:
                raise ValueError(
                    f"unit '{leaf.unit.key}' is at rest in {leaf.unit.at_rest}, which is made of the model that it was frozen "
                    "with: expected a state without it; save fs.partition(params, spec)[0]"
                )
            parts += leaf.parts(value, spec, ranks.rank, ranks.size)
        case Whole(own=True):
            alike[leaf.name] = f"each rank's own, of one shape on all, {list(leaf.shape)} {leaf.dtype}"
            parts += leaf.parts(value, spec, ranks.rank, ranks.size)
        case Owned():
            alike[leaf.names[0]] = f"of one rank, {list(leaf.shape)} {leaf.dtype}"
            parts += leaf.parts(value)
        case Whole() | Scalar():
            name = leaf.name if isinstance(leaf, Whole) else leaf.names[0][0]
            alike[name] = f"{list(value.shape)} {value.dtype} of digest {int(fingerprint(value.detach())):x}"
            parts += leaf.parts(value, spec, ranks.rank, ranks.size)


def _raise_difference(told: list[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for one in told for name in one):
        texts = [one.get(name, "nothing") for one in told]
        if rank := next((rank for rank, text in enumerate(texts) if text != texts[0]), 0):
            raise ValueError(
                f"state '{name}': expected the same on all ranks, got on rank 0 {texts[0]}, on rank {rank} {texts[rank]}; wrap "
                "what is each rank's own in checkpoint.per_rank, with one structure and shape on all or as a string "
                "(json.dumps), and save what is sharded by another spec with that"
            )


def _check_replicas(told: list[dict[str, tuple[str, int, int]]]) -> None:
    """ValueError, naming the unit, where replicas have drifted apart: each writes a part of what all of them hold."""
    for name in told[0]:
        first: dict[int, tuple[int, int]] = {}
        for rank, held in enumerate(told):
            key, index, digest = held[name]
            before, expected = first.setdefault(index, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"unit '{key}' of state '{name}': expected the same on all replicas, got others on rank {rank} than on "
                    f"rank {before}; average them first, as by fs.averaging.average"
                )


def _refuse_twice(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"state '{name}': two of its leaves have this name: expected names without such dots")
        seen.add(name)
