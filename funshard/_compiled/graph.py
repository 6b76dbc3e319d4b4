"""What is what in the ATen graph of a compiled step: its gathers, what reads them, and its phases."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .._torch.compiler import FUNC_GRADIENT, OpOverload
from .._transforms._recompute.regions import NAME_KEY, REGION_PREFIX

__all__ = [
    "RESHARD",
    "UNIT",
    "GatherNodes",
    "annotate",
    "annotate_phases",
    "annotation",
    "assembles",
    "gathered_units",
    "is_annotated",
    "is_cheap",
    "is_view",
    "mutates",
    "phases_of",
    "reach",
    "regions_of",
    "starts",
    "waits",
    "writes",
]

_PHASE, RESHARD, UNIT = "funshard_phase", "funshard_reshard", "funshard_unit"
_GRADIENTS = (FUNC_GRADIENT, torch.autograd.grad)


def annotate_phases(graph: Graph) -> str:
    """Note in Dynamo's graph how many gradients were taken before and at each node; all notes as a string.

    What AOTAutograd makes of a node, so all of a backward pass, gets the node's notes.
    """
    phase = 0
    for node in graph.nodes:
        phase += node.target in _GRADIENTS
        annotate(node, **{_PHASE: phase})
    keys = (_PHASE, RESHARD, UNIT, NAME_KEY)
    return repr([(*(annotation(node, key) for key in keys), regions_of(node)) for node in graph.nodes])


def annotate(node: Node, **notes: object) -> None:
    """Write these on the node."""
    node.meta["custom"] = {**node.meta.get("custom", {}), **notes}


def annotation(node: Node, key: str) -> Any:
    """Return the node's annotation under this key, None if the node has none."""
    return node.meta.get("custom", {}).get(key)


def is_annotated(node: Node) -> bool:
    """Whether it was traced: what a pass has put in the place of others may have no notes."""
    return annotation(node, _PHASE) is not None


def regions_of(node: Node) -> tuple[int, ...]:
    """Return the numbers of the regions that contain the node, the outermost first."""
    return tuple(
        sorted(int(key.removeprefix(REGION_PREFIX)) for key in node.meta.get("custom", {}) if key.startswith(REGION_PREFIX))
    )


# --- what is what in an ATen graph ---


def _op(node: Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def waits(node: Node) -> bool:
    """Whether it waits for a collective."""
    return _op(node).startswith("_c10d_functional.wait_tensor")


def _gathers(node: Node) -> bool:
    return _op(node).startswith("_c10d_functional.all_gather_into_tensor")


def starts(node: Node) -> bool:
    """Whether it starts a collective."""
    return _op(node).startswith("_c10d_functional.") and not waits(node)


def is_cheap(node: Node) -> bool:
    """Whether it is a view or a cast: worth doing again rather than keeping."""
    return is_view(node) or _op(node).startswith(_CASTS)


def is_view(node: Node) -> bool:
    """Whether it has no memory of its own: a view, or one of several results."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def assembles(node: Node) -> bool:
    """Whether it may be between a gradient and its reduction, and be done as early as that."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return is_cheap(node) or pointwise or _op(node).startswith(_ASSEMBLES)


def mutates(node: Node) -> bool:
    """Whether it writes to what it is given."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def writes(node: Node) -> list[Node]:
    """Return the nodes that the operator of this node writes to."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = node.target._schema.arguments
    given = {**{a.name: x for a, x in zip(arguments, node.args, strict=False)}, **node.kwargs}
    into = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    return [x for x in pytree.tree_leaves(into) if isinstance(x, Node)]


_CASTS = ("aten._to_copy", "aten.clone", "prims.convert_element_type")
_ASSEMBLES = ("aten.cat", "aten.sum", "aten.zeros", "aten.new_zeros", "aten.full", "aten.constant_pad_nd")


@dataclass
class GatherNodes:
    """A gathered unit in the graph: what makes it, what is seen of it, and the nodes that compute with it, in order."""

    wait: Node
    makes: list[Node]
    views: list[Node]
    uses: list[Node]

    @property
    def start(self) -> Node:
        """The node that starts the collective."""
        return self.wait.all_input_nodes[0]


def gathered_units(graph: Graph) -> list[GatherNodes]:
    """Every gather of what is an input, or a view or cast of one."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    given: set[Node] = set()
    found: list[GatherNodes] = []
    for node in graph.nodes:
        from_given = bool(node.all_input_nodes) and given.issuperset(node.all_input_nodes)
        if node.op in ("placeholder", "get_attr") or (from_given and (is_cheap(node) or _gathers(node) or waits(node))):
            given.add(node)
        if node not in given or not waits(node) or not _gathers(node.all_input_nodes[0]):
            continue
        views = reach([node], lambda n: [user for user in n.users if is_cheap(user)])
        uses = {user for view in (node, *views) for user in view.users} - set(views)
        if not all(_gathers(use) for use in uses):  # else it is one of several axes
            makes = reach([node], lambda n: [m for m in n.all_input_nodes if m.op == "call_function"])
            found.append(GatherNodes(node, *(sorted(nodes, key=place.__getitem__) for nodes in (makes, views, uses))))
    return found


def reach(nodes: Iterable[Node], further: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return the nodes that are reachable from ``nodes`` by repeated calls of ``further``."""
    seen: dict[Node, None] = {}
    front = list(nodes)
    while front:
        more = [node for node in further(front.pop()) if node not in seen]
        seen.update(dict.fromkeys(more))
        front += more
    return list(seen)


def phases_of(graph: Graph) -> dict[Node, int]:
    """Each node's phase. A pass that replaces a node can lose its notes; the order of phases stays."""
    phase, phases = 0, {}
    for node in graph.nodes:
        phase = phases[node] = max(phase, annotation(node, _PHASE) or 0)
    return phases
