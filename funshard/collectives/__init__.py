"""Differentiable collectives over a mesh axis, and the axis that is a batch dimension of torch.vmap."""

from .._core.mesh import Axis, Mesh, ProcessAxis, members
from .._gone import raise_gone
from ._exchange import all_to_all, permute, ragged_all_to_all
from ._functions import all_reduce, broadcast, gather_slices, gather_values, reduce_scatter, scatter, sum_over, sum_shards, vary

__all__ = [
    "Axis", "Mesh", "ProcessAxis", "all_reduce", "all_to_all", "broadcast", "gather_slices", "gather_values", "members",
    "permute", "ragged_all_to_all", "reduce_scatter", "scatter", "sum_over", "sum_shards", "vary",
]  # fmt: skip

__getattr__ = raise_gone(__name__)
