"""The ATen graph of a compiled step: the kinds of its nodes, the gathers of units, and its phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .. import _torch
from .._torch.compiler import FUNC_GRADIENT, OpOverload, annotate, get_annotation, is_view

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

    wait: Node
    sources: list[Node]
    producers: list[Node]
    views: list[Node]
    users: list[Node]

    @property
    def start(self) -> Node:
        """The node that starts the collective."""
        return self.wait.all_input_nodes[0]

    @property
    def unit_key(self) -> object:
        """The key of the unit."""
        return get_annotation(self.wait, UNIT_KEY)

    @property
    def needs_reshard(self) -> bool:
        """Whether the buffer is freed between its uses."""
        return bool(get_annotation(self.wait, _RESHARD_KEY))


def find_gathers(graph: Graph) -> list[GatherNodes]:
    """Return the gathers of units, and of their tangents and cotangents."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    found: list[GatherNodes] = []
    for node in graph.nodes:
        if not _is_gathered(node) or get_annotation(node, UNIT_KEY) is None:
            continue
        views = _find_views(node)
        users = {user for view in (node, *views) for user in view.users} - set(views)
        if not all(_is_all_gather(user) for user in users):  # else the gather over one of several axes
            producers = reachable_nodes([node], lambda n: filter(_is_moved, n.all_input_nodes))
            sources = {n for producer in producers for n in producer.all_input_nodes} - set(producers)
            nodes = (sources, producers, views, users)
            found.append(GatherNodes(node, *(sorted(some, key=position.__getitem__) for some in nodes)))
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
