"""Differentiable collectives over a mesh axis, and the axis that is a batch dimension of torch.vmap."""

from .._core.mesh import Axis, Mesh, ProcessAxis, Simulated
from ._exchange import all_to_all, permute, ragged_all_to_all
from ._functions import (
    Reduce,
    all_reduce,
    broadcast,
    gather_slices,
    gather_values,
    reduce_scatter,
    scatter,
    sum_over,
    sum_shards,
    unvary,
    vary,
)
from ._world import axis_rank, global_rank, members

__all__ = [
    "Axis", "Mesh", "ProcessAxis", "Reduce", "Simulated", "all_reduce", "all_to_all", "axis_rank", "broadcast", "gather_slices",
    "gather_values", "global_rank", "members", "permute", "ragged_all_to_all", "reduce_scatter", "scatter", "sum_over",
    "sum_shards", "unvary", "vary",
]  # fmt: skip
