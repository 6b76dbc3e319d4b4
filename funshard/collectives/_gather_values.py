"""Gather values that each rank computes from its own batch: the transpose is a sum, not the mean of slices."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _torch
from ._dims import apply_along, check_dim
from ._mesh import Axis, ProcessAxis
from ._primitive import apply
from ._sequence import check_sequence

__all__ = ["gather_values"]


def gather_values(x: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Return the ranks' own values joined along a dimension, in rank order: features of each rank's batch, say.

    Type: ``[n, ...] -> [N*n, ...]``. Transpose: the sum over ranks of this rank's rows, because what one rank's value does
    to every rank's loss adds up: `reduce_scatter` with ``reduce="sum"``. Its transpose is ``gather_values`` again::

        rank 0  a          abc                    backward   abc          a+d+g
        rank 1  b    ->    abc                               def    ->    b+e+h
        rank 2  c          abc                               ghi          c+f+i

    The loss that compares rows of all ranks may cover all rows on every rank, or each rank's rows against all: the mean over
    ranks is the loss of the joined batch either way (see `recipes.md`). With `gather_slices` gradients would be too small; of
    `scatter`'s slices it is the right one, and here they would be too large, both by the number of ranks. On several mesh
    axes call it for one after the other, the innermost first. Hosts compare shapes first, except inside of torch.compile.

    Args:
        x: [n, ...], the same shape on all ranks: pad missing rows, and mask them. ValueError for a 0-dim tensor.
        axis: The mesh axis.
        dim: The dimension along which they are joined.

    Raises:
        RuntimeError: On every rank, if they have different shapes or dtypes.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.gather_values(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]
    """
    dim = check_dim("gather_values", x, dim)
    if isinstance(axis, ProcessAxis) and axis.name and axis.size > 1 and not torch.compiler.is_compiling():
        what, remedy = f"gather_values of {[*x.shape]} {x.dtype}", "Expected one shape on all ranks: pad rows, and mask them"
        with _torch.below_transforms():
            check_sequence([what], axis.name, _torch.unwrap(x), "ranks are about to join values that do not fit", remedy)
    return apply_along(dim, lambda x: apply("gather_sum", x, axis), x)
