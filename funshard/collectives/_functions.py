"""The differentiable collectives over a mesh axis, each with its transpose.

Every primitive is linear and acts on dimension 0. Its derivative is itself, its gradient is its *transpose*, and the
transpose has a transpose, so each is exact at every order. What the transpose is follows from there being two kinds of
values: those that came out of a gather count with their **mean** over ranks, those that are computed from shards alone
with their **sum**. In the type lines ``[n]`` is a rank's own value, ``S[n]`` one that is a shard, and the pictures show
three ranks.

_core/ops.py has the autograd Function of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from .. import _torch
from .._core.flow import take_slice
from .._core.mesh import Axis, Mesh, ProcessAxis
from .._core.ops import Label, apply
from ._agree import check_sequence

# --- The dimension of a tensor that a collective joins or slices: its checks, and the way to dimension 0 and back ---


def check_dim(what: str, x: Tensor, dim: int) -> int:
    """Return a dimension of a tensor, counted from 0.

    Raises:
        ValueError: If the tensor does not have it.
    """
    if x.dim() == 0:
        raise ValueError(f"{what}: expected at least one dimension, got a 0-dim tensor; use x.reshape(1)")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: expected a dimension in {-x.dim()}..{x.dim() - 1} of shape {tuple(x.shape)}, got {dim}")
    return dim % x.dim()


def check_divisible(what: str, x: Tensor, axis: Axis, dim: int = 0) -> int:
    """Return a dimension that the ranks of an axis divide, counted from 0.

    Raises:
        ValueError: If they do not, or the tensor does not have it.
    """
    at = check_dim(what, x, dim) if x.dim() else 0
    if x.dim() == 0 or x.shape[at] % axis.size:
        which = f"dimension {at}" if at else "first dimension"
        raise ValueError(f"{what}: expected a {which} that {axis.size} ranks divide, got {tuple(x.shape)}; pad it")
    return at


def apply_along(dim: int, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of tensors that acts on dimension 0 along another dimension."""
    return fn(x) if dim == 0 else fn(x.movedim(dim, 0)).movedim(0, dim)


# --- The collectives ---

Reduce = Literal["mean", "sum"]
"""The combination of values over ranks: their mean or their sum."""


def _check_reduce(reduce: str, x: Tensor | None = None) -> str:
    """Return ``reduce``, "mean" or "sum"; raise TypeError for the mean of an integer or bool tensor."""
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce: expected 'mean' or 'sum', got {reduce!r}")
    if reduce == "mean" and x is not None and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"a mean over ranks needs a floating point tensor, got {x.dtype}; use reduce='sum'")
    return reduce


def make_label(label: str) -> Label | None:
    """Return a label by which ranks compare their collectives first; None without one."""
    return Label(label, check_sequence) if label else None


def gather_slices(x: Tensor, axis: Axis, *, reduce: Reduce = "mean", label: str = "") -> Tensor:
    """Return the ranks' shards joined along dimension 0, in rank order. Inverse of `scatter`.

    For slices of one whole, such as a parameter's: gradients of the joined tensor are averaged. Use `gather_values` for values
    that each rank computes from its own batch, such as features: here their gradients would be wrong by the number of ranks.

    Type: ``S[n, ...] -> [N*n, ...]``. Transpose: `reduce_scatter` with the same ``reduce``::

        rank 0  a          abc                    backward   abc          a+d+g
        rank 1  b    ->    abc                               def    ->    b+e+h    (each / 3 for the mean)
        rank 2  c          abc                               ghi          c+f+i

    Args:
        x: This rank's slice, [n, ...].
        axis: The mesh axis.
        reduce: Of the transpose: "mean" or "sum".
        label: What is gathered. Ranks compare theirs first, here and in derivatives: RuntimeError if they differ.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.gather_slices(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]
    """
    check_dim("gather_slices", x, 0)
    return apply(f"gather_{_check_reduce(reduce)}", x, axis, label=make_label(label))


def reduce_scatter(x: Tensor, axis: Axis, *, reduce: Reduce = "mean", dim: int = 0, label: str = "") -> Tensor:
    """Return rank r's slice of the mean (or sum) over ranks.

    Type: ``[N*n, ...] -> S[n, ...]``. Transpose: `gather_slices`, without another factor. For activations, such as partial
    sums of a matrix product, take ``reduce="sum"``: the transpose of that is `gather_values`::

        rank 0  abc          a+d+g
        rank 1  def    ->    b+e+h    (each / 3 for the mean)
        rank 2  ghi          c+f+i

    Args:
        x: [N*n, ...]; ValueError if the axis does not divide the dimension.
        axis: The mesh axis.
        reduce: "mean" (TypeError for integers) or "sum".
        dim: The dimension that is sliced.
        label: As for `gather_slices`.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.reduce_scatter(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[2.0], [3.0]]
    """
    dim, op = check_divisible("reduce_scatter", x, axis, dim), f"scatter_{_check_reduce(reduce, x)}"
    return apply_along(dim, lambda x: apply(op, x, axis, label=make_label(label)), x)


def all_reduce(x: Tensor, axis: Axis, *, reduce: Reduce = "mean") -> Tensor:
    """Return the mean (or sum) over ranks, on every rank: for values that came out of a gather, such as a loss.

    Type: ``[n] -> [n]``. Transpose: itself. So averaging the loss inside ``grad`` changes nothing::

        rank 0  a          a+b+c
        rank 1  b    ->    a+b+c    (/ 3 for the mean)
        rank 2  c          a+b+c

    Args:
        x: [n], the same shape on all ranks.
        axis: The mesh axis.
        reduce: "mean" or "sum".

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.all_reduce(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[2.0, 3.0], [2.0, 3.0]]
    """
    return apply(f"reduce_{_check_reduce(reduce, x)}", x, axis)


def sum_over(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over all ranks of a mesh, by an `all_reduce` for each of its axes.

    Args:
        x: [n], the same shape on all ranks.
        mesh: The mesh.

    Example:
        >>> import torch, funshard as fs
        >>> fs.testing.spmd(lambda mesh, x: fs.collectives.sum_over(x, mesh), 2)(torch.tensor([1.0, 3.0])).tolist()
        [4.0, 4.0]
    """
    for name in mesh.names:
        x = all_reduce(x, mesh[name], reduce="sum")
    return x


def sum_shards(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum over ranks of values computed from shards, as for a global norm; its transpose is the mean over ranks.

    Type: ``S[n] -> [n]``. Transpose: the mean over ranks, which takes ``[n]`` back to ``S[n]``. The picture is
    `all_reduce`'s.

    Args:
        x: This rank's values, [n].
        axis: The mesh axis.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.sum_shards(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[4.0, 6.0], [4.0, 6.0]]
    """
    return apply("shards_to_sum", x, axis)


def vary(x: Tensor, axis: Axis, *, reduce: Reduce = "mean", label: str = "") -> Tensor:
    """Return the tensor itself, on its way into each rank's own computation (DDP's "gather").

    Type: ``one value on all ranks -> [n]``. Transpose: the mean (or sum) over ranks, whose transpose is ``vary``::

        rank 0  a          a                      backward   g          g+h+i
        rank 1  a    ->    a                                 h    ->    g+h+i   (/ 3)
        rank 2  a          a                                 i          g+h+i

    Args:
        x: A tensor that is the same on all ranks.
        axis: The mesh axis.
        reduce: Of the transpose: "mean" or "sum".
        label: As for `gather_slices`.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.vary(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [1.0, 2.0]])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
    """
    op = f"vary_{_check_reduce(reduce, x)}" if x.is_floating_point() or x.is_complex() else "vary_sum"
    return apply(op, x, axis, label=make_label(label))


def unvary(x: Tensor, axis: Axis, *, reduce: Reduce = "mean", label: str = "") -> Tensor:
    """Return the mean (or sum) over ranks of gradients for one value that is the same on all. Transpose of `vary`."""
    return apply(f"unvary_{_check_reduce(reduce, x)}", x, axis, label=make_label(label))


def broadcast(x: Tensor, axis: Axis, *, src: int = 0) -> Tensor:
    """Return rank ``src``'s tensor on every rank.

    Type: ``[n] -> [n]``. Transpose: the sum over ranks at ``src`` and zeros elsewhere::

        rank 0  a          a                      backward   g          g+h+i
        rank 1  b    ->    a                                 h    ->    0
        rank 2  c          a                                 i          0

    Args:
        x: [n], the same shape on all ranks.
        axis: The mesh axis.
        src: A rank of the axis (otherwise ValueError).

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.broadcast(x, mesh["shard"], src=1), 2)
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[3.0, 4.0], [3.0, 4.0]]
    """
    if not 0 <= src < axis.size:
        raise ValueError(f"broadcast: expected src in 0..{axis.size - 1}, got {src}")
    return apply("broadcast", x, axis, src)


def scatter(x: Tensor, axis: Axis, *, rank: int | None = None) -> Tensor:
    """Return this rank's slice of a tensor that is the same on all ranks, copied. Inverse of `gather_slices`.

    No communication. Type: ``one value on all ranks [N*n, ...] -> S[n, ...]``. Transpose: `gather_slices`, which also joins
    what is computed from the slices, each row by itself: with `gather_values` gradients would be N times too large::

        rank 0  abc          a
        rank 1  abc    ->    b
        rank 2  abc          c

    Args:
        x: [N*n, ...]; ValueError if the axis does not divide dimension 0.
        axis: The mesh axis.
        rank: Whose slice, by default this rank's.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.scatter(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [1.0, 2.0]])).tolist()
        [[1.0], [2.0]]
    """
    check_divisible("scatter", x, axis)
    return take_slice(x, axis, rank)


# --- Gather values that each rank computes from its own batch: the transpose is a sum, not the mean of slices ---


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
    if isinstance(axis, ProcessAxis) and axis.name and axis.size > 1 and not _torch.is_in_graph():
        what, remedy = f"gather_values of {[*x.shape]} {x.dtype}", "Expected one shape on all ranks: pad rows, and mask them"
        with _torch.below_transforms():
            check_sequence([what], axis.name, _torch.unwrap(x), "ranks are about to join values that do not fit", remedy)
    return apply_along(dim, lambda x: apply("gather_sum", x, axis), x)
