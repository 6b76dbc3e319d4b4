"""Which bytes of a graph are alive when, counted from the order and the sizes of its nodes."""

from __future__ import annotations

import operator
from collections import Counter

from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["peak_of"]


def peak_of(graph: Graph) -> int:
    """The most bytes that nodes have made, besides the graph's inputs, and that are to be read at or after one."""
    last: dict[Node, int] = {}
    for i, node in enumerate(graph.nodes):
        last |= dict.fromkeys((_made(x) for x in (node, *node.all_input_nodes)), i)
    ends = Counter[int]()
    alive = most = 0
    for i, node in enumerate(graph.nodes):
        if node.op == "call_function" and _made(node) is node and isinstance(x := node.meta["val"], Tensor):
            alive += x.nbytes
            ends[last[node]] += x.nbytes
        most = max(most, alive)
        alive -= ends[i]
    return most


def _made(node: Node) -> Node:
    """The node whose memory this one shows."""
    while node.op == "call_function":
        (source, *_) = node.all_input_nodes or [node]
        several = node.target is operator.getitem and not getattr(source.target, "is_view", False)
        if several or not (node.target is operator.getitem or getattr(node.target, "is_view", False)):
            return node
        node = source
    return node
