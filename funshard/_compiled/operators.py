"""Operators of our own in the graph of a compiled step, where the plain ones cost memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _torch
from ..collectives import _ops as ops

__all__ = ["own_operators"]


def own_operators(graph: Graph, when_needed: set[Node], assemblies: Iterable[list[Node]]) -> None:
    """Put them where the plain ones cost memory: for gathers at their turn, and where the input of a reduction is assembled."""
    joined = list(assemblies)
    for node in graph.nodes:
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default and node in when_needed:
            shard = node.all_input_nodes[0].meta["val"]
            if _torch.backend(node.args[2], shard.device) == "gloo" and shard.dtype.is_floating_point:
                node.target = torch.ops.funshard.all_gather.default
        elif node.target is torch.ops.aten.cat.default and any(node in assembly for assembly in joined):
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
