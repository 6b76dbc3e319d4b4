"""The exchange of another number of rows with each rank, as tokens go to their experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from ._announce import announce
from ._counts import Counts, check_counts, resolve_counts
from ._exchange import all_to_all
from ._gather_values import gather_values
from ._mesh import Axis, Simulated
from ._ops import OpContext, missing_group_error, start_exchange
from ._primitive import LinearFunction, LinearMap, apply

__all__ = ["ragged_all_to_all"]


def ragged_all_to_all(
    x: Tensor, axis: Axis, send_counts: Counts, receive_counts: Counts | None = None, *, size: int | None = None
) -> Tensor:
    """Return the rows that every rank sends to this one, in rank order: as jax.lax.ragged_all_to_all.

    Type: ``[n, ...] -> [m, ...]``, where n is the sum of ``send_counts`` and m that of ``receive_counts``. Inverse and
    transpose: the same with the counts swapped::

        rank 0  abc  sends 1, 2, 0          ad  of 1, 1, 0
        rank 1  de   sends 1, 0, 1    ->    bc  of 2, 0, 0
        rank 2  f    sends 0, 0, 1          ef  of 0, 1, 1

    So tokens go to their experts: sorted by rank, ``send_counts`` by ``torch.bincount``, zeros among them.
    ``all_to_all(send_counts, axis)`` are the receive counts, by which the results go back.

    Ranks compare their counts before anything is sent, in forward alone: between hosts, and a tensor of counts on an
    accelerator is waited for. Counts that come from data interrupt a graph of torch.compile. Without ``receive_counts`` the
    hosts tell each other.

    Args:
        x: Rows for rank 0, then for rank 1, and so on. The same dtype and row shape on all ranks.
        axis: The mesh axis.
        send_counts: N ints, or a tensor of them: how many rows go to each rank.
        receive_counts: How many rows come from each rank.
        size: The number of rows of the result, if it is larger: zeros follow those received, and ``x`` may have more rows
            than are sent. Simulated ranks, which are one batch, need it: for tokens their number times the ranks is enough.

    Raises:
        ValueError: On all ranks: counts that are negative, do not add up, or are not those of the other ranks.
        RuntimeError: In make_fx and fs.compile, if counts come from data.

    Example:
        >>> import torch, funshard as fs
        >>> x, counts = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 2], [1, 1]])
        >>> def exchange(mesh, x, counts):
        ...     return fs.collectives.ragged_all_to_all(x, mesh["shard"], counts, size=4)
        >>> fs.testing.spmd(exchange, 2)(x, counts).tolist()
        [[3.0, 0.0, 0.0, 0.0], [1.0, 2.0, 4.0, 0.0]]
    """
    if isinstance(axis, Simulated):
        return _exchange_simulated(x, axis, send_counts, receive_counts, size)
    if axis.size > 1 and not axis.name:
        raise missing_group_error(axis.size)
    send, receive = resolve_counts(x, axis, send_counts, receive_counts, size)
    rows = sum(receive) if size is None else size
    return _exchange_rows(x.view_as(x), tuple(send), tuple(receive), rows, axis.name if axis.size > 1 else "")


@_torch.allow_in_graph
def _exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], size: int, name: str) -> Tensor:
    return LinearFunction.apply(x, None, _ragged_map(send, receive, len(x), size, name))


def _ragged_map(send: Sequence[int], receive: Sequence[int], rows: int, size: int, name: str) -> LinearMap:
    """Return the map from ``rows`` to ``size`` rows on a process group, or on one rank (no name)."""

    def run(x: Tensor) -> Tensor:
        if name:
            announce("ragged_all_to_all", name)
        x = x.narrow(0, 0, sum(send))
        out = start_exchange(x, OpContext(len(send), name), send, receive)() if name else x
        padding = size - sum(receive)
        return torch.cat([out, out.new_zeros(padding, *out.shape[1:])]) if padding else out

    return LinearMap(run, lambda: _ragged_map(receive, send, size, rows, name))


def _exchange_simulated(
    x: Tensor, axis: Simulated, send_counts: Counts, receive_counts: Counts | None, size: int | None
) -> Tensor:
    """Look each row up among those of all ranks, because ranks of one batch have the same number of rows."""
    n = axis.size
    if not isinstance(send_counts, Tensor):
        check_counts(x, n, send_counts, None, size)
        if size is None and len({*send_counts}) == 1:
            return all_to_all(x, axis)
    if size is None:
        raise ValueError(
            f"ragged_all_to_all: the {n} ranks of a simulated axis are one batch, in which all have the same number of rows: "
            "expected size=, with room for what any rank receives; zeros follow"
        )
    send = torch.as_tensor(send_counts, device=x.device)
    if send.shape != (n,) or send.is_floating_point():
        raise ValueError(f"ragged_all_to_all: send_counts: expected whole numbers of shape [{n}], got {[*send.shape]}")
    receive, starts = (apply("all_to_all", counts, axis) for counts in (send, send.cumsum(0) - send))
    ends = receive.cumsum(0)
    fits = (send >= 0).all() & (send.sum() <= len(x)) & (ends[-1] <= size)
    if receive_counts is not None:
        fits = fits & (receive == torch.as_tensor(receive_counts, device=x.device)).all()
    _require(fits, f"counts: expected at most {len(x)} rows to send, at most {size} to receive, and the counts of other ranks")
    rows = gather_values(x, axis)
    rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])  # the last one is the padding
    place = torch.arange(size, device=x.device)
    sender = (place[:, None] >= ends).sum(1).clamp(max=n - 1)
    index = sender * len(x) + (starts - ends + receive)[sender] + place
    return rows[torch.where(place < ends[-1], index, n * len(x))]


class _Require(_torch.Function):
    """The check of a condition whose values are those of all ranks together, below every transform."""

    @staticmethod
    def forward(fits: Tensor, message: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not _torch.is_traced() and not _torch.is_fake(fits) and not fits.all():
            raise ValueError(f"ragged_all_to_all: {message}")
        return fits.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fits: Tensor, message: str) -> tuple[Tensor, int]:  # pyright: ignore
        return _Require.apply(fits, message), in_dims[0]


def _require(fits: Tensor, message: str) -> None:
    _Require.apply(fits, message)
