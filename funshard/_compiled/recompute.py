"""Recomputation of the regions that `remat` traced in a compiled step: passes over the FX graph.

A traced graph has each operator of a region once, and whatever backward reads stays in memory until then. `mark_saved`
annotates what ``save=`` keeps, while operators are still those that were traced. `recompute` makes backward read copies of
the other operators, each before its first use, computed from the region's arguments and what is saved. It is torch's
remat_using_tags_for_fwd_loss_bwd_graph (torch 2.13, torch._functorch), extended to random numbers, several gradients in one
step, and nested regions.

Some values are always saved, so that no number can change: random numbers (inductor's seeds), results of collectives
(graph.py gathers a unit again) and of higher-order operators, sizes, and values that are read outside of the region.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .._spec.options import Remat
from .._torch.compiler import OpOverload, view_base
from .._transforms._recompute.saved_nodes import find_saved
from .._transforms._recompute.saved_results import NAME_KEY, REGION_PREFIX
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
"""The annotation with regions that save a node's value."""


def get_regions(node: Node) -> tuple[int, ...]:
    """Return the numbers of the regions that contain the node, the outermost first."""
    keys = node.meta.get("custom", {})
    return tuple(sorted(int(key.removeprefix(REGION_PREFIX)) for key in keys if key.startswith(REGION_PREFIX)))


def mark_saved(graph: Graph, remats: Sequence[Remat]) -> None:
    """Annotate each node with the regions that save its value, and erase the views that carry names."""
    for region, remat in enumerate(remats):
        for node in find_saved([node for node in graph.nodes if region in get_regions(node)], remat):
            annotate(node, **{_SAVED_KEY: (*(get_annotation(node, _SAVED_KEY) or ()), region)})
    for node in list(graph.nodes):
        if get_annotation(node, NAME_KEY) is not None and is_view(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


# --- recomputation ---


def recompute(graph: Graph) -> None:
    """Make the phases after a region's own read recomputed values: outer regions first, whose copies contain inner ones."""
    phases = find_phases(graph)
    regions = _find_regions(graph, phases)
    copied_for: dict[Node, tuple[int, ...]] = {}
    for depth in range(max(map(len, regions.values()), default=0)):
        _NestingDepth(graph, depth, phases, regions, copied_for).apply()
    for node in reversed(graph.nodes):
        if node in regions and not node.users and _is_pure(node):
            graph.erase_node(node)


def _find_regions(graph: Graph, phases: Mapping[Node, int]) -> dict[Node, tuple[int, ...]]:
    """Return the regions of each node. One that the compiler inserted is in the regions common to its users up to its phase."""
    found: dict[Node, tuple[int, ...]] = {}
    for node in reversed(graph.nodes):
        regions = get_regions(node)
        if node.op == "call_function" and not is_annotated(node):
            around = [set(found.get(user, ())) for user in node.users if phases[user] <= phases[node]]
            regions = tuple(sorted(set.intersection(*around))) if around else ()
        if regions:
            found[node] = regions
    return found


@dataclass
class _RegionRun:
    """The nodes of one run of a region: the traced one, or a copy of it inside a recomputed outer region."""

    region: int
    nodes: list[Node] = field(default_factory=list)
    phase: int = 0
    """The last phase of its nodes. Later phases recompute it."""
    saved: set[Node] = field(default_factory=set)
    copies: dict[int, dict[Node, Node]] = field(default_factory=dict)
    """The copies made for each phase, by original node."""


class _NestingDepth:
    """The runs of all regions at one nesting depth. ``copied_for`` has the phases for which a node was copied, by depth."""

    def __init__(
        self,
        graph: Graph,
        depth: int,
        phases: dict[Node, int],
        regions: dict[Node, tuple[int, ...]],
        copied_for: dict[Node, tuple[int, ...]],
    ) -> None:
        self.graph, self.phases, self.regions, self.copied_for = graph, phases, regions, copied_for
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.first_writes = {view_base(x): self.position[node] for node in reversed(graph.nodes) for x in find_written(node)}
        self.run_of: dict[Node, _RegionRun] = {}
        runs: dict[tuple[int, tuple[int, ...]], _RegionRun] = {}
        for node in graph.nodes:
            if len(nested := regions.get(node, ())) > depth:
                run = self.run_of[node] = runs.setdefault((nested[depth], copied_for.get(node, ())), _RegionRun(nested[depth]))
                run.nodes.append(node)
                run.phase = max(run.phase, phases[node])
        for run in runs.values():
            run.saved = _find_saved(run, self.run_of, phases)

    def apply(self) -> None:
        """Redirect each node that reads a run's values in a later phase."""
        for reader in list(self.graph.nodes):
            read = {id(run): run for x in reader.all_input_nodes if (run := self.run_of.get(x))}
            for run in read.values():
                if run is not self.run_of.get(reader) and self.phases[reader] > run.phase:
                    self.redirect_reader(reader, run)

    def redirect_reader(self, reader: Node, run: _RegionRun) -> None:
        """Make a node read copies, and insert those that do not exist yet before it."""
        phase, end = self.phases[reader], self.position[reader]
        copies = run.copies.setdefault(phase, {})

        def missing_inputs(node: Node) -> list[Node]:
            inputs = [x for x in node.all_input_nodes if self.run_of.get(x) is run and x not in run.saved and x not in copies]
            return [x for x in inputs if all(self.first_writes.get(view_base(y), end) >= end for y in x.all_input_nodes)]

        for node in sorted(reachable_nodes([reader], missing_inputs), key=self.position.__getitem__):
            if is_view(node) and copies.keys().isdisjoint(node.all_input_nodes):
                continue  # a view of a value that stays in memory
            with self.graph.inserting_before(reader):
                copies[node] = copy = self.graph.node_copy(node, lambda x: copies.get(x, x))
            self.phases[copy], self.regions[copy] = self.phases[node], self.regions[node]
            self.copied_for[copy] = (*self.copied_for.get(node, ()), phase)
        for x in reader.all_input_nodes:
            if x in copies:
                reader.replace_input_with(x, copies[x])


def _find_saved(run: _RegionRun, run_of: Mapping[Node, _RegionRun], phases: Mapping[Node, int]) -> set[Node]:
    """Return the nodes of a run whose values stay in memory: by choice, because they are impure, or for users outside."""
    saved: set[Node] = set()
    for node in run.nodes:
        others = (x for x in node.users if run_of.get(x) is not run)
        if any(phases[x] <= run.phase or x.op == "output" or is_mutating(x) for x in others):
            saved.update(reachable_nodes([node], lambda x: x.all_input_nodes if is_view(x) else ()), [node])
        if run.region in (get_annotation(node, _SAVED_KEY) or ()) or not _is_pure(node):
            saved.add(node)
    return saved


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
