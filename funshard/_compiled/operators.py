"""Custom operators in the graph of a compiled step, where those of torch cost memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from .._core import ops as ops
from ..collectives._sequence import check_sequence, is_comparable
from .graph import CHECK_ORDER_KEY, UNIT_KEY, get_annotation, is_collective_start, is_mutating

__all__ = ["compare_order", "replace_operators"]


def replace_operators(graph: Graph, late_nodes: set[Node], assemblies: Iterable[list[Node]]) -> None:
    """Replace the gathers among ``late_nodes`` on gloo, and the concatenations, by operators that need less memory.

    Args:
        graph: The graph, which is changed.
        late_nodes: Nodes that run where their result is first used, in any phase.
        assemblies: The concatenations before reductions.
    """
    assembly_lists = list(assemblies)
    for node in graph.nodes:
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default and node in late_nodes:
            shard = node.all_input_nodes[0].meta["val"]
            if _torch.backend_name(node.args[2], shard.device) == "gloo" and shard.dtype.is_floating_point:
                node.target = torch.ops.funshard.all_gather.default
        elif node.target is torch.ops.aten.cat.default and any(node in assembly for assembly in assembly_lists):
            node.target = torch.ops.funshard.cat.default


def compare_order(graph: Graph) -> None:
    """Have ranks compare the collectives of a graph that gathers units, before its first operator."""
    names: dict[str, list[str]] = {}
    for node in filter(is_collective_start, graph.nodes):
        if not is_comparable(node.args[-1]):
            continue
        key = get_annotation(node, UNIT_KEY)
        subject = f"result {_result_index(node)}" if key is None else f"unit '{key}'"
        names.setdefault(node.args[-1], []).append(f"{node.target} of {subject}")
    if not names or not any(get_annotation(node, CHECK_ORDER_KEY) for node in graph.nodes):
        return
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        done = graph.call_function(torch.ops.aten.empty.memory_format, ([1],), {"device": torch.device("cpu")})
        done.meta["val"] = torch.empty(1, device="meta")
        for group, started in names.items():
            graph.call_function(torch.ops.funshard.compare_order.default, (done, group, "\n".join(started)))


def _result_index(start: Node) -> int:
    """Return the index of the graph's result or mutation that is the fewest operators away from a collective; -1 for none."""
    (output,) = (node for node in start.graph.nodes if node.op == "output")
    ends = [*output.all_input_nodes, *(node for node in start.graph.nodes if is_mutating(node))]
    level, seen = [start], {start}
    while level:
        if found := [ends.index(node) for node in level if node in ends]:
            return min(found)
        level = [user for node in level for user in node.users if user not in seen and not seen.add(user)]
    return -1


@torch.library.custom_op("funshard::compare_order", mutates_args=("done",))
def _compare_order(done: Tensor, group: str, names: str) -> None:
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
    """Return an empty buffer for the shards of all ranks of the group."""
    return shard.new_empty(num_ranks * len(shard), *shard.shape[1:])


@torch.library.custom_op("funshard::cat", mutates_args=())
def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat that inductor does not see through: it would hold the whole buffer from the first piece on."""
    return torch.cat(tensors, dim)


@_cat.register_fake
def _cat_fake(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(tensors, dim)
