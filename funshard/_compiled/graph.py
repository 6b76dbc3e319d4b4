"""The ATen graph of a compiled step: its nodes, and passes over it, recomputation and the schedule of functional_call.

torch.compile makes one ATen graph of a step that takes gradients by torch.func: forward, backward and update, in the
order of the program. There every unit is gathered at the start, lives until its last use in backward, and is reduced at
the end. `schedule_nodes` gives the graph the schedule that functional_call has without the compiler:

- `_gather_again_in_backward`: a unit with ``P(reshard=True)`` that backward uses gets a second gather, unless at most one
  other unit is used in between: functional_call keeps the root unit and the last one as well.
- `_NodeOrder`: a gather starts where the unit before it is first used, and its wait is at its own unit's first use. A
  reduction starts as soon as its gradient is complete, and its wait is where the next one starts.

tests/compile/test_compile.py pins what is private in torch: `_GRAD_FUNCTIONS` and ``meta["custom"]``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .. import _torch
from .._call.compiled_backend import find_saved
from .._core import ops
from .._spec.options import Remat
from .._torch.compiler import FUNC_GRADIENT, OpOverload, annotate, get_annotation, is_view, view_base
from .._transforms._recompute.saved_results import NAME_KEY, REGION_KEY
from ..collectives._agree import check_sequence, is_comparable

_PHASE_KEY, _RESHARD_KEY = "funshard_phase", "funshard_reshard"
CHECK_ORDER_KEY, UNIT_KEY = "funshard_check_order", "funshard_unit"
_GRAD_FUNCTIONS = (FUNC_GRADIENT, torch.autograd.grad)
"""The functions that take a gradient, as Dynamo calls them in its graph."""


def annotate_phases(graph: Graph) -> str:
    """Annotate Dynamo's nodes with the number of gradients taken up to each, itself included. Return all as a string.

    AOTAutograd copies a node's annotations to the nodes that it makes from it, those of its backward included.
    """
    phase = 0
    for node in graph.nodes:
        phase += node.target in _GRAD_FUNCTIONS
        annotate(node, **{_PHASE_KEY: phase})
    notes = [node.meta.get("custom", {}) for node in graph.nodes]
    return repr([[(key, note[key]) for key in sorted(note) if key.startswith("funshard_")] for note in notes])


def is_annotated(node: Node) -> bool:
    """Return whether a node was traced; a node that a compiler pass has inserted may have no annotations."""
    return get_annotation(node, _PHASE_KEY) is not None


# --- kinds of nodes in an ATen graph ---


def _calls(node: Node, *ops: str) -> bool:
    """Return whether a node calls an operator whose name begins so."""
    return node.op == "call_function" and str(node.target).startswith(ops)


def is_wait(node: Node) -> bool:
    """Return whether a node waits for a collective."""
    return _calls(node, "_c10d_functional.wait_tensor")


def _is_all_gather(node: Node) -> bool:
    return _calls(node, "_c10d_functional.all_gather_into_tensor")


def is_collective_start(node: Node) -> bool:
    """Return whether a node starts a collective."""
    return _calls(node, "_c10d_functional.") and not is_wait(node)


def is_cheap(node: Node) -> bool:
    """Return whether a node is a view or a cast, which costs less to compute again than to keep."""
    return is_view(node) or _calls(node, *_CAST_OPS)


def is_assembly(node: Node) -> bool:
    """Return whether a node may assemble the input of a reduction from gradients, as early as these are complete."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and not _is_random(node)
    return is_cheap(node) or pointwise or _calls(node, *_ASSEMBLY_OPS)


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_mutating(node: Node) -> bool:
    """Return whether a node writes to one of its inputs."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def find_written(node: Node) -> Iterable[Node]:
    """Return the inputs that a node writes to."""
    return _torch.mutated_args(node.target, node.args, node.kwargs, Node) if isinstance(node.target, OpOverload) else ()


_CAST_OPS = ("aten._to_copy", "aten.clone", "prims.convert_element_type")
_ASSEMBLY_OPS = ("aten.cat", "aten.sum", "aten.zeros", "aten.new_zeros", "aten.full", "aten.constant_pad_nd")


@dataclass
class GatherNodes:
    """The nodes of one gather, in order: its inputs, producers of the buffer, its views and casts, and their users."""

    unit_key: object
    wait: Node
    sources: list[Node]
    producers: list[Node]
    views: list[Node]
    users: list[Node]


def find_gathers(graph: Graph) -> list[GatherNodes]:
    """Return the gathers of units, and of their tangents and cotangents."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    found: list[GatherNodes] = []
    for node in graph.nodes:
        if not _is_gathered(node) or (unit_key := get_annotation(node, UNIT_KEY)) is None:
            continue
        views = _find_views(node)
        users = {user for view in (node, *views) for user in view.users} - set(views)
        if not all(_is_all_gather(user) for user in users):  # else the gather over one of several axes
            producers = reachable_nodes([node], lambda n: filter(_is_moved, n.all_input_nodes))
            sources = {n for producer in producers for n in producer.all_input_nodes} - set(producers)
            nodes = (sources, producers, views, users)
            found.append(GatherNodes(unit_key, node, *(sorted(some, key=position.__getitem__) for some in nodes)))
    return found


def _find_views(gathered: Node) -> list[Node]:
    """Return the views and casts of a gathered value, and what the stages of its unit's way compute of it alone."""
    views: dict[Node, None] = {}
    front = [gathered]
    while front:
        for user in front.pop().users:
            is_stage = get_annotation(user, UNIT_KEY) is not None and not is_mutating(user) and not _is_random(user)
            is_derived = is_stage and all(n is gathered or n in views for n in user.all_input_nodes)
            if (is_cheap(user) or is_derived) and user not in views:
                views[user] = None
                front.append(user)
    return list(views)


def _is_gathered(node: Node) -> bool:
    return is_wait(node) and _is_all_gather(node.all_input_nodes[0])


def _is_moved(node: Node) -> bool:
    """Return whether a node changes where a value is, and not the value but for its dtype."""
    return node.op == "call_function" and (is_cheap(node) or _is_all_gather(node) or _is_gathered(node))


def reachable_nodes(nodes: Iterable[Node], neighbors: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return the nodes that are reachable from ``nodes`` by repeated calls of ``neighbors``."""
    seen: dict[Node, None] = {}
    front = list(nodes)
    while front:
        more = [node for node in neighbors(front.pop()) if node not in seen]
        seen.update(dict.fromkeys(more))
        front += more
    return list(seen)


def find_phases(graph: Graph) -> dict[Node, int]:
    """Return each node's phase. A node without annotations is in the phase of the node before it."""
    phase, phases = 0, {}
    for node in graph.nodes:
        phase = phases[node] = max(phase, get_annotation(node, _PHASE_KEY) or 0)
    return phases


# --- Recomputation: backward reads copies of the regions that `remat` traced ---
#
# A traced graph has each operator of a region once, and whatever backward reads stays in memory until then. `mark_saved`
# annotates what ``save=`` keeps, while operators are still those that were traced. `_Recomputation` makes backward read copies
# of the other operators, each before its first use, computed from the region's arguments and what is saved. It is torch's
# remat_using_tags_for_fwd_loss_bwd_graph (torch 2.13), extended to random numbers and several gradients in
# one step. A node that nested regions contain belongs to the innermost.
#
# Some values are always saved, so that no number can change: random numbers (inductor's seeds), results of collectives, which
# `_gather_again_in_backward` repeats, and of higher-order operators, sizes, and values that are read outside of the region.

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
    return not _is_random(node) or _is_attention_without_dropout(node, node.target)


def _is_attention_without_dropout(node: Node, op: OpOverload) -> bool:
    """Return whether an operator is attention without dropout."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" in names and not given.get("dropout_p")


# --- The schedule of functional_call ---


def schedule_nodes(graph: Graph, prefetch: int, in_flight: int) -> None:
    """Recompute regions in the phases after their own, and give the graph the schedule of functional_call."""
    _Recomputation(graph).apply()
    _gather_again_in_backward(graph)
    _clone_overwritten_inputs(graph)
    order = _NodeOrder(graph, prefetch, in_flight)
    order.apply()
    _compare_order(graph)
    _replace_operators(graph, order.late_nodes, order.assemblies.values())


def _gather_again_in_backward(graph: Graph) -> None:
    """Give each phase its own gather of a unit, unless at most one other is used since the unit's last use.

    A backward of a backward comes to each unit more than once, and each time is treated so.
    """
    phases, gathers = find_phases(graph), find_gathers(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    places: dict[object, list[int]] = {}
    for unit in gathers:
        places.setdefault(unit.unit_key, []).extend(position[user] for user in unit.users)
    for unit in (unit for unit in gathers if get_annotation(unit.wait, _RESHARD_KEY)):  # its buffer is freed between uses
        others = [some for key, some in places.items() if key != unit.unit_key]
        users = [user for user in unit.users if user.op != "output" and not is_mutating(user)]
        copy: Callable[[Node], Node] | None = None
        for before, user in itertools.pairwise(users):
            between = range(position[before] + 1, position[user])
            may_gather = phases[user] > phases[before] or phases[user] > phases[unit.wait] + 1
            if may_gather and sum(any(i in between for i in other) for other in others) > 1:
                copy = _copy_gather(unit, user)
            if copy:
                for node in user.all_input_nodes:
                    user.replace_input_with(node, copy(node))
    for view in dict.fromkeys(view for unit in gathers for view in reversed(unit.views)):  # one may be of two gathers
        if not view.users:
            graph.erase_node(view)


def _copy_gather(unit: GatherNodes, before: Node) -> Callable[[Node], Node]:
    """Return a function that copies a node of a gather, with what it needs of it, to before a node; others it returns."""
    originals, copies = {unit.wait, *unit.producers, *unit.views}, dict[Node, Node]()

    def copy(node: Node) -> Node:
        if node in originals and node not in copies:
            for needed in node.all_input_nodes:
                copy(needed)
            with before.graph.inserting_before(before):
                copies[node] = before.graph.node_copy(node, lambda n: copies.get(n, n))
        return copies.get(node, node)

    return copy


def _clone_overwritten_inputs(graph: Graph) -> None:
    """Clone each input that is both overwritten and copied into another input, before the first write.

    torch 2.13: inductor drops the program's own clone. Pinned by ``test_donated_values_move``.
    """
    writes = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    written = {write.all_input_nodes[0] for write in writes}
    for write in writes:
        into, value = write.args[:2]
        if isinstance(value, Node) and (read := view_base(value)) in written and read is not into:
            with graph.inserting_before(writes[0]):
                clone = graph.call_function(torch.ops.aten.clone.default, (value,))
            clone.meta = dict(value.meta)
            write.args = (into, clone, *write.args[2:])


class _NodeOrder:
    """A new order of a graph's nodes: the program's, except for gathers with their views, and reductions.

    It follows from the order of the program, never from that of a set, so it is the same on all ranks.
    """

    def __init__(self, graph: Graph, prefetch: int, max_in_flight: int) -> None:
        self.prefetch, self.max_in_flight = prefetch, max_in_flight
        *self.program, self.output = (node for node in graph.nodes if node.op != "placeholder")
        position = {node: i for i, node in enumerate(graph.nodes)}
        phases, gathers = find_phases(graph), find_gathers(graph)
        self.gather_nodes = [node for unit in gathers for node in (*unit.producers, unit.wait, *unit.views)]
        self.late_nodes = {*self.gather_nodes, *filter(is_wait, self.program)}
        """The nodes that are placed only where another node needs them."""
        # A unit has its turn at its first use in each phase, with its tangents, which starts the gathers for a later turn.
        first = {(phases[user], unit.wait): (user, unit) for unit in gathers for user in reversed(unit.users)}
        in_turn = sorted(first.items(), key=lambda item: position[item[1][0]])
        self.gathers: list[list[GatherNodes]] = []
        self.turns: dict[Node, list[int]] = {}
        for turn, (_, items) in enumerate(itertools.groupby(in_turn, lambda item: (item[0][0], item[1][1].unit_key))):
            self.gathers.append([])
            for _, (user, unit) in items:
                self.gathers[turn].append(unit)
                self.turns.setdefault(user, []).append(turn)
        self.waiting_turns: dict[Node, list[int]] = {}
        """The turns whose gathers lack only this node."""
        # A reduction starts when its last missing input is placed. Only nodes that assemble its input lie between.
        self.assemblies: dict[Node, list[Node]] = {}
        self.missing_counts: dict[Node, int] = {}
        self.reductions_of: dict[Node, list[Node]] = {}
        for start in (node for node in self.program if is_collective_start(node) and node not in self.late_nodes):
            assembly = reachable_nodes([start], lambda node: [n for n in node.all_input_nodes if is_assembly(n)])
            needed = dict.fromkeys(n for node in (start, *assembly) for n in node.all_input_nodes)
            missing = [n for n in needed if n.op == "call_function" and n not in assembly]
            self.assemblies[start], self.missing_counts[start] = assembly, len(missing)
            for node in missing:
                self.reductions_of.setdefault(node, []).append(start)
        self.placed: dict[Node, None] = {}
        self.in_flight: list[list[Node]] = []
        self.is_finishing = False

    def apply(self) -> None:
        """Reorder the graph."""
        for turn in range(self.prefetch):
            self.start_gather(turn)
        for node in self.program:
            if is_mutating(node):  # an input, which gathers read
                for gather_node in self.gather_nodes:
                    self.place(gather_node)
            if node not in self.late_nodes:
                self.place(node)
        for node in self.program:
            self.place(node)
        for node in self.placed:
            self.output.prepend(node)

    def start_gather(self, turn: int) -> None:
        """Place the starts of the gathers for this turn, if there are any, or have them placed once they can be."""
        for unit in self.gathers[turn] if turn < len(self.gathers) else ():
            missing = next((node for node in unit.sources if node not in self.placed and node.op == "call_function"), None)
            if missing is None:
                self.place(unit.wait.all_input_nodes[0])
            else:
                self.waiting_turns.setdefault(missing, []).append(turn)

    def place(self, node: Node) -> None:
        """Place a node after its inputs, and start the reductions that lacked only this node."""
        if node in self.placed or node.op == "placeholder":
            return
        for needed in node.all_input_nodes:
            self.place(needed)
        for turn in self.turns.get(node, ()):
            self.start_gather(turn + self.prefetch)
        self.placed[node] = None
        for turn in self.waiting_turns.pop(node, ()):
            self.start_gather(turn)
        for start in self.reductions_of.get(node, ()):
            self.missing_counts[start] -= 1
            if not self.missing_counts[start]:
                self.start_reduction(start)

    def start_reduction(self, start: Node) -> None:
        """Start a reduction, after finishing those beyond the limit. One that such a finish completes joins the same batch."""
        if not self.is_finishing:
            self.is_finishing = True
            self.in_flight.append([])
            while len(self.in_flight) > self.max_in_flight:
                for other in self.in_flight.pop(0):
                    self.finish_reduction(other)
            self.is_finishing = False
        self.in_flight[-1].append(start)
        self.place(start)

    def finish_reduction(self, start: Node) -> None:
        """Wait for a reduction, and place the last users of its input (on gloo: the sum of this rank's own part)."""
        views = reachable_nodes(self.assemblies[start], lambda node: [n for n in node.users if is_cheap(n)])
        held = {*self.assemblies[start], *views}
        for wait in filter(is_wait, start.users):
            self.place(wait)
            after = reachable_nodes([wait], lambda node: [n for n in node.users if is_assembly(n)])
            known = {*after, *held}
            for node in after:
                inputs = node.all_input_nodes
                if not held.isdisjoint(inputs) and all(n in known or n in self.placed for n in inputs):
                    self.place(node)


# --- operators where those of torch cost memory, and a comparison between ranks ---


def _replace_operators(graph: Graph, late_nodes: set[Node], assemblies: Iterable[list[Node]]) -> None:
    """Replace the gathers among ``late_nodes`` on gloo, and concatenations before reductions, by what needs less memory."""
    concatenations = {node for assembly in assemblies for node in assembly if node.target is torch.ops.aten.cat.default}
    for node in graph.nodes:
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default and node in late_nodes:
            shard = node.all_input_nodes[0].meta["val"]
            if _torch.backend_name(node.args[2], shard.device) == "gloo" and shard.dtype.is_floating_point:
                node.target = torch.ops.funshard.all_gather.default
        elif node in concatenations:
            node.target = torch.ops.funshard.cat.default


def _compare_order(graph: Graph) -> None:
    """Have ranks compare the collectives of a graph that gathers units, before its first operator."""
    names: dict[str, list[str]] = {}
    for node in filter(is_collective_start, graph.nodes):
        if not is_comparable(node.args[-1]):
            continue
        key = get_annotation(node, UNIT_KEY)
        names.setdefault(node.args[-1], []).append(str(node.target) + ("" if key is None else f" of unit '{key}'"))
    if not names or not any(get_annotation(node, CHECK_ORDER_KEY) for node in graph.nodes):
        return
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        done = graph.call_function(torch.ops.aten.empty.memory_format, ([1],), {"device": torch.device("cpu")})
        done.meta["val"] = torch.empty(1, device="meta")
        for group, started in names.items():
            graph.call_function(torch.ops.funshard.compare_order.default, (done, group, "\n".join(started)))


@torch.library.custom_op("funshard::compare_order", mutates_args=("done",))
def _run_compare_order(done: Tensor, group: str, names: str) -> None:
    """Compare the collectives of a graph between ranks. ``done`` is mutable only so that compilers keep the operator."""
    check_sequence(names.split("\n"), group, done)


@torch.library.custom_op("funshard::all_gather", mutates_args=())
def _gloo_all_gather(shard: Tensor, num_ranks: int, group: str) -> Tensor:
    """Start gloo's gather in place, as functional_call does, because torch's operator needs the buffer twice."""
    full = shard.new_empty(num_ranks * len(shard), *shard.shape[1:])
    ops.start_op("gather_mean", shard, ops.OpContext(num_ranks, group), full)
    return full


@_gloo_all_gather.register_fake
def _gloo_all_gather_fake(shard: Tensor, num_ranks: int, group: str) -> Tensor:
    return shard.new_empty(num_ranks * len(shard), *shard.shape[1:])


@torch.library.custom_op("funshard::cat", mutates_args=())
def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat that inductor does not see through: it would hold the whole buffer from the first piece on."""
    return torch.cat(tensors, dim)


_cat.register_fake(torch.cat)
