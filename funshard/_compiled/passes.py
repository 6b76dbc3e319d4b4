"""The schedule of functional_call written into the graph of a compiled step: passes over plain FX, and two operators.

torch.compile makes one ATen graph of a step that takes gradients by torch.func: forward, backward and update, in the
order of the program. In it every unit is gathered at the start, lives until its last use in backward, and is reduced at
the end. Two passes make of it what functional_call does without the compiler:

- `_regather`: a unit with ``P(reshard=True)`` that is used again in backward gets a second gather for that, except
  what is needed again at once: with at most one other unit between, as functional_call keeps the root's and the last.
- `_Order`: a gather starts where the unit before it is first used, and is waited for where its own unit is; a reduction
  starts as soon as its gradient is complete, and is waited for when the next one starts.

What is private in torch: where a step takes a gradient (`_GRADIENTS`) and ``meta["custom"]``. tests/test_compile.py pins
each by what it is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from .._spec.remat import Remat
from .._torch.compiler import CustomGraphPass, get_hash_for_files
from . import graph as graph_file
from . import operators
from . import recompute as recompute_file
from .graph import (
    RESHARD,
    GatherNodes,
    annotation,
    assembles,
    gathered_units,
    is_cheap,
    mutates,
    phases_of,
    reach,
    starts,
    waits,
)
from .recompute import choose, recompute

__all__ = ["Choose", "GraphSchedule"]


class Choose(CustomGraphPass):
    """`choose`, as inductor takes it: before its own passes."""

    def __init__(self, remats: Sequence[Remat]) -> None:
        self.remats = remats

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        choose(graph, self.remats)
        graph.lint()

    def uuid(self) -> object:
        """None, so no cache, where a function chooses."""
        if any(callable(remat.save) for remat in self.remats):
            return None
        return get_hash_for_files((recompute_file.__file__,)), repr(self.remats)


class GraphSchedule(CustomGraphPass):
    """Both passes, and before them `recompute`, as inductor takes them: after its own."""

    def __init__(self, notes: str, prefetch: int, in_flight: int) -> None:
        self.notes, self.prefetch, self.in_flight = notes, prefetch, in_flight

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        recompute(graph)
        _regather(graph)
        _clone_overwritten_inputs(graph)
        order = _Order(graph, self.prefetch, self.in_flight)
        order.apply()
        operators.compare_order(graph)
        operators.use_own_operators(graph, order.when_needed, order.assembly.values())
        graph.lint()

    def uuid(self) -> object:
        """Return the cache key of this pass: the cache sees a graph's code, but not the annotations that the pass reads."""
        return (
            get_hash_for_files((__file__, graph_file.__file__, operators.__file__, recompute_file.__file__)),
            self.notes,
            self.prefetch,
            self.in_flight,
        )


# --- the passes ---


def _regather(graph: Graph) -> None:
    """Give each phase its own gather of a unit, unless at most one other is used since the unit's last use."""
    phases, gathered = phases_of(graph), gathered_units(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for unit in gathered:
        if not annotation(unit.wait, RESHARD):
            continue
        others = [[place[use] for use in other.uses] for other in gathered if other is not unit]
        uses = [use for use in unit.uses if use.op != "output" and not mutates(use)]
        anew: _UnshardAgain | None = None
        for before, use in itertools.pairwise(uses):
            between = range(place[before] + 1, place[use])
            if phases[use] > phases[before] and sum(any(i in between for i in other) for other in others) > 1:
                anew = _UnshardAgain(unit, use)
            if anew:
                for node in use.all_input_nodes:
                    use.replace_input_with(node, anew.copy(node))
    for view in (view for unit in gathered for view in reversed(unit.views)):
        if not view.users:
            graph.erase_node(view)


class _UnshardAgain:
    """A second gather of a unit, before a node, and views of it where they are asked for."""

    def __init__(self, unit: GatherNodes, before: Node) -> None:
        self.own, self.before = {unit.wait, *unit.makes, *unit.views}, before
        self.copies: dict[Node, Node] = {}

    def copy(self, node: Node) -> Node:
        if node not in self.own:
            return node
        if node not in self.copies:
            for needed in node.all_input_nodes:
                self.copy(needed)
            with self.before.graph.inserting_before(self.before):
                self.copies[node] = self.before.graph.node_copy(node, lambda n: self.copies.get(n, n))
        return self.copies[node]


def _clone_overwritten_inputs(graph: Graph) -> None:
    """Clone an input that is written to, where another is to get its old values, before the first is written to.

    torch 2.13: inductor drops the program's own clone. Pinned by ``test_donated_values_move``.
    """
    writes = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    written = {write.all_input_nodes[0] for write in writes}
    for write in writes:
        into, value = write.args[:2]
        read = value
        while isinstance(read, Node) and getattr(read.target, "is_view", False):
            read = read.args[0]
        if read in written and read is not into:
            with graph.inserting_before(writes[0]):
                clone = graph.call_function(torch.ops.aten.clone.default, (value,))
            clone.meta = dict(value.meta)
            write.args = (into, clone, *write.args[2:])


class _Order:
    """A new order of a graph's nodes: that of the program, but for gathers, what is seen of them, and reductions.

    It follows from the order of the program, never from that of a set, so it is the same on all ranks.
    """

    def __init__(self, graph: Graph, prefetch: int, in_flight: int) -> None:
        self.prefetch, self.in_flight = prefetch, in_flight
        *self.program, self.output = (node for node in graph.nodes if node.op != "placeholder")
        place = {node: i for i, node in enumerate(graph.nodes)}
        phases, gathered = phases_of(graph), gathered_units(graph)
        self.gathers = [node for unit in gathered for node in (*unit.makes, unit.wait, *unit.views)]
        self.when_needed = {*self.gathers, *filter(waits, self.program)}
        # At its first use in each phase a unit has its turn, and the gather for a later turn starts.
        first = {(unit.wait, phases[use]): (use, unit.start) for unit in gathered for use in reversed(unit.uses)}
        in_turn = sorted(first.values(), key=lambda turn: place[turn[0]])
        self.starts = [start for _, start in in_turn]
        self.turns: dict[Node, list[int]] = {}
        for turn, (use, _) in enumerate(in_turn):
            self.turns.setdefault(use, []).append(turn)
        # A reduction starts when what it lacks is there. Between the two is only what assembles its input.
        self.assembly: dict[Node, list[Node]] = {}
        self.lacks: dict[Node, int] = {}
        self.serves: dict[Node, list[Node]] = {}
        for start in (node for node in self.program if starts(node) and node not in self.when_needed):
            assembly = reach([start], lambda node: [n for n in node.all_input_nodes if assembles(n)])
            needed = dict.fromkeys(n for node in (start, *assembly) for n in node.all_input_nodes)
            lacking = [n for n in needed if n.op == "call_function" and n not in assembly]
            self.assembly[start], self.lacks[start] = assembly, len(lacking)
            for node in lacking:
                self.serves.setdefault(node, []).append(start)
        self.ordered: dict[Node, None] = {}
        self.flying: list[list[Node]] = []
        self.landing = False

    def apply(self) -> None:
        for turn in range(self.prefetch):
            self.gather(turn)
        for node in self.program:
            if mutates(node):  # an input, which gathers read
                for gather in self.gathers:
                    self.add(gather)
            if node not in self.when_needed:
                self.add(node)
        for node in self.program:
            self.add(node)
        for node in self.ordered:
            self.output.prepend(node)

    def gather(self, turn: int) -> None:
        if turn < len(self.starts):
            self.add(self.starts[turn])

    def add(self, node: Node) -> None:
        """Put a node in its place: after what it needs, before the reductions that lacked only it."""
        if node in self.ordered or node.op == "placeholder":
            return
        for needed in node.all_input_nodes:
            self.add(needed)
        for turn in self.turns.get(node, ()):
            self.gather(turn + self.prefetch)
        self.ordered[node] = None
        for start in self.serves.get(node, ()):
            self.lacks[start] -= 1
            if not self.lacks[start]:
                self.reduce(start)

    def reduce(self, start: Node) -> None:
        """Start a reduction, once no others are in flight than may be. One that follows on another flies with the next."""
        if not self.landing:
            self.landing = True
            self.flying.append([])
            while len(self.flying) > self.in_flight:
                for other in self.flying.pop(0):
                    self.land(other)
            self.landing = False
        self.flying[-1].append(start)
        self.add(start)

    def land(self, start: Node) -> None:
        """Wait for a reduction, and do what else needs its input (on gloo: add this rank's own part), which ends there."""
        views = reach(self.assembly[start], lambda node: [n for n in node.users if is_cheap(n)])
        held = {*self.assembly[start], *views}
        for wait in filter(waits, start.users):
            self.add(wait)
            after = reach([wait], lambda node: [n for n in node.users if assembles(n)])
            known = {*after, *held}
            for node in after:
                inputs = node.all_input_nodes
                if not held.isdisjoint(inputs) and all(n in known or n in self.ordered for n in inputs):
                    self.add(node)
