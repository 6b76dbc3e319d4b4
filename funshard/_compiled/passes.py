"""The schedule of functional_call written into the graph of a compiled step: two passes over plain FX, and two operators.

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
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.eager_transforms import _autograd_grad  # pyright: ignore[reportAttributeAccessIssue]
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from .. import _torch
from ..collectives import _ops as ops

__all__ = ["Schedule", "note_phases"]


class Schedule(CustomGraphPass):
    """Both passes, as inductor takes them."""

    def __init__(self, notes: str, prefetch: int, in_flight: int) -> None:
        self.notes, self.prefetch, self.in_flight = notes, prefetch, in_flight

    def __call__(self, graph: Graph) -> None:
        """Change the graph."""
        _regather(graph)
        _read_first(graph)
        order = _Order(graph, self.prefetch, self.in_flight)
        order.apply()
        _own_operators(graph, order)
        graph.lint()

    def uuid(self) -> object:
        """The cache looks at a graph's code, not at the notes on its nodes, which decide what is gathered again."""
        return get_hash_for_files((__file__,)), self.notes, self.prefetch, self.in_flight


_PHASE, _RESHARD = "funshard_phase", "funshard_reshard"
_GRADIENTS = (_autograd_grad, torch.autograd.grad)


def note_phases(graph: Graph) -> str:
    """Note in Dynamo's graph how many gradients were taken before and at each node; all notes as a string.

    What AOTAutograd makes of a node, so all of a backward pass, gets the node's notes.
    """
    phase = 0
    for node in graph.nodes:
        phase += node.target in _GRADIENTS
        node.meta["custom"] = {**node.meta.get("custom", {}), _PHASE: phase}
    return repr([(_note(node, _PHASE), _note(node, _RESHARD)) for node in graph.nodes])


def _note(node: Node, key: str) -> Any:
    return node.meta.get("custom", {}).get(key)


# --- what is what in an ATen graph ---


def _op(node: Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def _waits(node: Node) -> bool:
    return _op(node).startswith("_c10d_functional.wait_tensor")


def _gathers(node: Node) -> bool:
    return _op(node).startswith("_c10d_functional.all_gather_into_tensor")


def _starts(node: Node) -> bool:
    return _op(node).startswith("_c10d_functional.") and not _waits(node)


def _light(node: Node) -> bool:
    """Whether it is a view or a cast: worth doing again rather than keeping."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False) or _op(node).startswith(_CASTS)


def _assembles(node: Node) -> bool:
    """Whether it may be between a gradient and its reduction, and be done as early as that."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return _light(node) or pointwise or _op(node).startswith(_ASSEMBLES)


def _mutates(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


_CASTS = ("aten._to_copy", "aten.clone", "prims.convert_element_type")
_ASSEMBLES = ("aten.cat", "aten.sum", "aten.zeros", "aten.new_zeros", "aten.full", "aten.constant_pad_nd")


@dataclass
class _Gathered:
    """A gathered unit in the graph: what makes it, what is seen of it, and the nodes that compute with it, in order."""

    wait: Node
    makes: list[Node]
    views: list[Node]
    uses: list[Node]

    @property
    def start(self) -> Node:
        return self.wait.all_input_nodes[0]


def _gathered(graph: Graph) -> list[_Gathered]:
    """Every gather of what is an input, or a view or cast of one."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    given: set[Node] = set()
    found: list[_Gathered] = []
    for node in graph.nodes:
        from_given = bool(node.all_input_nodes) and given.issuperset(node.all_input_nodes)
        if node.op in ("placeholder", "get_attr") or (from_given and (_light(node) or _gathers(node) or _waits(node))):
            given.add(node)
        if node not in given or not _waits(node) or not _gathers(node.all_input_nodes[0]):
            continue
        views = _reach([node], lambda n: [user for user in n.users if _light(user)])
        uses = {user for view in (node, *views) for user in view.users} - set(views)
        if not all(_gathers(use) for use in uses):  # else it is one of several axes
            makes = _reach([node], lambda n: [m for m in n.all_input_nodes if m.op == "call_function"])
            found.append(_Gathered(node, *(sorted(nodes, key=place.__getitem__) for nodes in (makes, views, uses))))
    return found


def _reach(nodes: Iterable[Node], further: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """The nodes that are reached by going further from these, without these."""
    seen: dict[Node, None] = {}
    front = list(nodes)
    while front:
        more = [node for node in further(front.pop()) if node not in seen]
        seen.update(dict.fromkeys(more))
        front += more
    return list(seen)


def _phases(graph: Graph) -> dict[Node, int]:
    """Each node's phase. A pass that replaces a node can lose its notes; the order of phases stays."""
    phase, phases = 0, {}
    for node in graph.nodes:
        phase = phases[node] = max(phase, _note(node, _PHASE) or 0)
    return phases


# --- the passes ---


def _regather(graph: Graph) -> None:
    """Give each phase its own gather of a unit, unless at most one other is used since the unit's last use."""
    phases, gathered = _phases(graph), _gathered(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for unit in gathered:
        if not _note(unit.wait, _RESHARD):
            continue
        others = [[place[use] for use in other.uses] for other in gathered if other is not unit]
        uses = [use for use in unit.uses if use.op != "output" and not _mutates(use)]
        again: _Again | None = None
        for before, use in itertools.pairwise(uses):
            between = range(place[before] + 1, place[use])
            if phases[use] > phases[before] and sum(any(i in between for i in other) for other in others) > 1:
                again = _Again(unit, use)
            if again:
                for node in use.all_input_nodes:
                    use.replace_input_with(node, again.copy(node))
    for view in (view for unit in gathered for view in reversed(unit.views)):
        if not view.users:
            graph.erase_node(view)


class _Again:
    """A second gather of a unit, before a node, and views of it where they are asked for."""

    def __init__(self, unit: _Gathered, before: Node) -> None:
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


def _read_first(graph: Graph) -> None:
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
        phases, gathered = _phases(graph), _gathered(graph)
        self.gathers = [node for unit in gathered for node in (*unit.makes, unit.wait, *unit.views)]
        self.when_needed = {*self.gathers, *filter(_waits, self.program)}
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
        for start in (node for node in self.program if _starts(node) and node not in self.when_needed):
            assembly = _reach([start], lambda node: [n for n in node.all_input_nodes if _assembles(n)])
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
            if _mutates(node):  # an input, which gathers read
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
        views = _reach(self.assembly[start], lambda node: [n for n in node.users if _light(n)])
        held = {*self.assembly[start], *views}
        for wait in filter(_waits, start.users):
            self.add(wait)
            after = _reach([wait], lambda node: [n for n in node.users if _assembles(n)])
            known = {*after, *held}
            for node in after:
                inputs = node.all_input_nodes
                if not held.isdisjoint(inputs) and all(n in known or n in self.ordered for n in inputs):
                    self.add(node)


# --- operators of our own ---


def _own_operators(graph: Graph, order: _Order) -> None:
    """Put them where the plain ones cost memory."""
    for node in graph.nodes:
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default and node in order.when_needed:
            shard = node.all_input_nodes[0].meta["val"]
            if _torch.backend(node.args[2], shard.device) == "gloo" and shard.dtype.is_floating_point:
                node.target = torch.ops.funshard.all_gather.default
        elif node.target is torch.ops.aten.cat.default and any(node in assembly for assembly in order.assembly.values()):
            node.target = torch.ops.funshard.cat.default


@torch.library.custom_op("funshard::all_gather", mutates_args=())
def _all_gather(shard: Tensor, size: int, name: str) -> Tensor:
    """Start gloo's gather as functional_call does, in place: its own needs the buffer twice. wait_tensor ends it."""
    full = shard.new_empty(size * len(shard), *shard.shape[1:])
    ops.start("gather_mean", shard, ops.Where(size, name), full)
    return full


@_all_gather.register_fake
def _(shard: Tensor, size: int, name: str) -> Tensor:
    return shard.new_empty(size * len(shard), *shard.shape[1:])


@torch.library.custom_op("funshard::cat", mutates_args=())
def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat that inductor does not see through: it would hold the whole buffer from the first piece on."""
    return torch.cat(tensors, dim)


@_cat.register_fake
def _(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(tensors, dim)
