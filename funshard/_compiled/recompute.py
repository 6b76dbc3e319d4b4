"""Regions of a compiled step, which are what `remat` traced, computed again for their derivatives: passes over plain FX.

A graph has each operator of a region once, and of what it makes that lives on which backward reads. `choose` notes what
``save=`` keeps, while operators are still those that were traced. With `recompute` backward reads copies: operators that make
what is not kept, again, from the region's arguments and what is kept, each before its first use. So what forward made dies
with forward. It is torch._functorch's remat_using_tags_for_fwd_loss_bwd_graph (torch 2.13), and does what that refuses: random
numbers, several gradients in one step, regions in regions.

In any case kept, so that no number can change, are random numbers (of inductor's, their seeds), what collectives give (a
unit is gathered again by passes.py), what higher-order operators give, sizes, and what is read outside of the region.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .._spec.remat import Chosen, Remat
from .._torch.compiler import OpOverload, original_op
from .._transforms._recompute.regions import NAME_KEY
from .graph import annotate, annotation, is_annotated, is_view, mutates, phases_of, reach, regions_of, writes

__all__ = ["choose", "recompute"]

_KEEP = "funshard_keep"
"""Annotation: the regions that keep what a node makes."""


def choose(graph: Graph, remats: Sequence[Remat]) -> None:
    """Note which of the regions keeps what, and take out the views that have the names."""
    chosen = [remat._choose_operators() for remat in remats]
    for node in list(graph.nodes):
        regions, name = regions_of(node), annotation(node, NAME_KEY)
        if name is not None and is_view(node):
            (named,) = node.all_input_nodes
            _keep(_maker(named), [r for r in regions if name in remats[r].names])
            node.replace_all_uses_with(named)
            graph.erase_node(node)
        elif regions and isinstance(node.target, OpOverload) and not is_view(node):
            _keep(node, [r for r in regions if _is_chosen(node, chosen[r])])


def _keep(node: Node, regions: Iterable[int]) -> None:
    annotate(node, **{_KEEP: (*(annotation(node, _KEEP) or ()), *regions)})


def _maker(node: Node) -> Node:
    """Return the node that allocated the memory of which this node is a view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_chosen(node: Node, chosen: Chosen) -> bool:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return chosen(original_op(node), tuple(args), dict(kwargs), node.meta.get("val"))


# --- what is computed again ---


def recompute(graph: Graph) -> None:
    """Let each phase after a region's own read what is computed again for it: outer regions first, inner ones run in theirs."""
    phases = phases_of(graph)
    regions = _regions(graph, phases)
    copied: dict[Node, tuple[int, ...]] = {}
    for depth in range(max(map(len, regions.values()), default=0)):
        _Depth(graph, depth, phases, regions, copied).apply()
    for node in reversed(graph.nodes):
        if node in regions and not node.users and _is_pure(node):
            graph.erase_node(node)


def _regions(graph: Graph, phases: Mapping[Node, int]) -> dict[Node, tuple[int, ...]]:
    """Return the regions of each node; a node of the compiler's is in the regions common to its users in its phase."""
    found: dict[Node, tuple[int, ...]] = {}
    for node in reversed(graph.nodes):
        regions = regions_of(node)
        if node.op == "call_function" and not is_annotated(node):
            around = [set(found.get(user, ())) for user in node.users if phases[user] <= phases[node]]
            regions = tuple(sorted(set.intersection(*around))) if around else ()
        if regions:
            found[node] = regions
    return found


@dataclass
class _Run:
    """What one run of a region does: forward's, or one in another run of a region around it."""

    region: int
    nodes: list[Node] = field(default_factory=list)
    phase: int = 0
    """The last one of its nodes: in those that follow it is computed again."""
    kept: set[Node] = field(default_factory=set)
    again: dict[int, dict[Node, Node]] = field(default_factory=dict)
    """By phase, what has been computed again for it."""


class _Depth:
    """The regions that are in so many others. ``copied`` are the phases that a node is computed again for, depth by depth."""

    def __init__(
        self,
        graph: Graph,
        depth: int,
        phases: dict[Node, int],
        regions: dict[Node, tuple[int, ...]],
        copied: dict[Node, tuple[int, ...]],
    ) -> None:
        self.graph, self.phases, self.regions, self.copied = graph, phases, regions, copied
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.written = {_maker(x): self.place[node] for node in reversed(graph.nodes) for x in writes(node)}
        self.run_of: dict[Node, _Run] = {}
        runs: dict[tuple[int, tuple[int, ...]], _Run] = {}
        for node in graph.nodes:
            if len(around := regions.get(node, ())) > depth:
                run = self.run_of[node] = runs.setdefault((around[depth], copied.get(node, ())), _Run(around[depth]))
                run.nodes.append(node)
                run.phase = max(run.phase, phases[node])
        for run in runs.values():
            run.kept = _kept(run, self.run_of, phases)

    def apply(self) -> None:
        """Each node that reads of a run in a later phase."""
        for reader in list(self.graph.nodes):
            read = {id(run): run for x in reader.all_input_nodes if (run := self.run_of.get(x))}
            for run in read.values():
                if run is not self.run_of.get(reader) and self.phases[reader] > run.phase:
                    self.read_again(reader, run)

    def read_again(self, reader: Node, run: _Run) -> None:
        """Let it read copies, which are made before it where they are not there yet."""
        phase, at = self.phases[reader], self.place[reader]
        again = run.again.setdefault(phase, {})

        def lacking(node: Node) -> list[Node]:
            own = [x for x in node.all_input_nodes if self.run_of.get(x) is run and x not in run.kept and x not in again]
            return [x for x in own if all(self.written.get(_maker(y), at) >= at for y in x.all_input_nodes)]

        for node in sorted(reach([reader], lacking), key=self.place.__getitem__):
            if is_view(node) and again.keys().isdisjoint(node.all_input_nodes):
                continue  # of what is there
            with self.graph.inserting_before(reader):
                again[node] = copy = self.graph.node_copy(node, lambda x: again.get(x, x))
            self.phases[copy], self.regions[copy] = self.phases[node], self.regions[node]
            self.copied[copy] = (*self.copied.get(node, ()), phase)
        for x in reader.all_input_nodes:
            if x in again:
                reader.replace_input_with(x, again[x])


def _kept(run: _Run, run_of: Mapping[Node, _Run], phases: Mapping[Node, int]) -> set[Node]:
    """Return the nodes of a run whose values stay in memory: by choice, because they are not pure, or for other users."""
    kept: set[Node] = set()
    for node in run.nodes:
        others = (x for x in node.users if run_of.get(x) is not run)
        if any(phases[x] <= run.phase or x.op == "output" or mutates(x) for x in others):
            kept.update(reach([node], lambda x: x.all_input_nodes if is_view(x) else ()), [node])
        if run.region in (annotation(node, _KEEP) or ()) or not _is_pure(node):
            kept.add(node)
    return kept


def _is_pure(node: Node) -> bool:
    """Whether it gives tensors, at any time the same, and does nothing else."""
    if node.op != "call_function" or not any(isinstance(x, Tensor) for x in pytree.tree_leaves(node.meta.get("val"))):
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    if mutates(node) or node.target.namespace.startswith(("_c10d", "c10d", "funshard")):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags or _drops_nothing(node, node.target)


def _drops_nothing(node: Node, op: OpOverload) -> bool:
    """Whether it is attention without dropout."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" in names and not given.get("dropout_p")
