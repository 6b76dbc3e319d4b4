"""Recomputation of the regions that `remat` traced in a compiled step: passes over the FX graph.

A traced graph has each operator of a region once, and whatever backward reads stays in memory until then. `mark_saved`
annotates what ``save=`` keeps, while operators are still those that were traced. `recompute` makes backward read copies of
the other operators, each before its first use, computed from the region's arguments and what is saved. It is torch's
remat_using_tags_for_fwd_loss_bwd_graph (torch 2.13, torch._functorch), extended to random numbers and several gradients in one
step. A node that nested regions contain belongs to the innermost.

Some values are always saved, so that no number can change: random numbers (inductor's seeds), results of collectives
(graph.py gathers a unit again) and of higher-order operators, sizes, and values that are read outside of the region.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .._spec.options import Remat
from .._torch.compiler import OpOverload, view_base
from .._transforms._recompute.saved_nodes import find_saved
from .._transforms._recompute.saved_results import NAME_KEY, REGION_KEY
from .graph import (
    annotate,
    find_phases,
    find_written,
    get_annotation,
    is_annotated,
    is_mutating,
    is_view,
    reachable_nodes,
)

_SAVED_KEY = "funshard_keep"
"""The annotation of a node whose value is saved."""


def mark_saved(graph: Graph, remats: Sequence[Remat]) -> None:
    """Annotate the nodes whose values a region saves, and erase the views that carry names."""
    for region, remat in enumerate(remats):
        for node in find_saved([node for node in graph.nodes if get_annotation(node, REGION_KEY) == region], remat):
            annotate(node, **{_SAVED_KEY: True})
    for node in list(graph.nodes):
        if get_annotation(node, NAME_KEY) is not None and is_view(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


# --- recomputation ---


def recompute(graph: Graph) -> None:
    """Make the phases after a region's own read recomputed values."""
    _Recomputation(graph).apply()


class _Recomputation:
    """The regions of a graph, and the copies of their nodes that later phases read."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.phases = graph, find_phases(graph)
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.first_writes = {view_base(x): self.position[node] for node in reversed(graph.nodes) for x in find_written(node)}
        self.regions: dict[Node, int] = {}
        for node in reversed(graph.nodes):
            if node.op != "call_function" or is_annotated(node):
                region = get_annotation(node, REGION_KEY)
            else:  # the compiler has inserted it: it is in the one region that uses it up to its phase
                region, *others = {self.regions.get(x) for x in node.users if self.phases[x] <= self.phases[node]} or {None}
                region = None if others else region
            if region is not None:
                self.regions[node] = region
        self.last_phases: dict[int, int] = {}
        """The last phase of each region's nodes. Later phases recompute it."""
        for node, region in self.regions.items():
            self.last_phases[region] = max(self.phases[node], self.last_phases.get(region, 0))
        self.saved = self._find_saved()
        self.copies: dict[tuple[int, int], dict[Node, Node]] = {}  # by region and phase

    def _find_saved(self) -> set[Node]:
        """Return the nodes whose values stay in memory: by choice, because they are impure, or for users outside."""
        saved: set[Node] = set()
        for node, region in self.regions.items():
            others = (x for x in node.users if self.regions.get(x) != region)
            if any(self.phases[x] <= self.last_phases[region] or x.op == "output" or is_mutating(x) for x in others):
                saved.update(reachable_nodes([node], lambda x: x.all_input_nodes if is_view(x) else ()), [node])
            if get_annotation(node, _SAVED_KEY) or not _is_pure(node):
                saved.add(node)
        return saved

    def apply(self) -> None:
        """Redirect each node that reads a region's values in a later phase."""
        for reader in list(self.graph.nodes):
            for region in dict.fromkeys(self.regions[x] for x in reader.all_input_nodes if x in self.regions):
                if region != self.regions.get(reader) and self.phases[reader] > self.last_phases[region]:
                    self._redirect_reader(reader, region)
        for node in reversed(self.graph.nodes):
            if node in self.regions and not node.users and _is_pure(node):
                self.graph.erase_node(node)

    def _redirect_reader(self, reader: Node, region: int) -> None:
        """Make a node read copies, and insert those that do not exist yet before it."""
        end, copies = self.position[reader], self.copies.setdefault((region, self.phases[reader]), {})

        def missing_inputs(node: Node) -> list[Node]:
            own = [x for x in node.all_input_nodes if self.regions.get(x) == region and x not in self.saved and x not in copies]
            return [x for x in own if all(self.first_writes.get(view_base(y), end) >= end for y in x.all_input_nodes)]

        for node in sorted(reachable_nodes([reader], missing_inputs), key=self.position.__getitem__):
            if is_view(node) and copies.keys().isdisjoint(node.all_input_nodes):
                continue  # a view of a value that stays in memory
            with self.graph.inserting_before(reader):
                copies[node] = self.graph.node_copy(node, lambda x: copies.get(x, x))
        for x in reader.all_input_nodes:
            if x in copies:
                reader.replace_input_with(x, copies[x])


def _is_pure(node: Node) -> bool:
    """Return whether a node computes tensors, the same at any time, without side effects."""
    if node.op != "call_function" or not any(isinstance(x, Tensor) for x in pytree.tree_leaves(node.meta.get("val"))):
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    if is_mutating(node) or node.target.namespace.startswith(("_c10d", "c10d", "funshard")):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags or _is_attention_without_dropout(node, node.target)


def _is_attention_without_dropout(node: Node, op: OpOverload) -> bool:
    """Return whether an operator is attention without dropout."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" in names and not given.get("dropout_p")
