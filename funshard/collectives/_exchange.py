"""Exchanges of values between ranks: each rank's values go to other ranks, and nothing is added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from .._core.announce import announce
from .._core.mesh import Axis, Simulated
from .._core.ops import OpContext, missing_group_error, start_exchange
from .._core.primitive import LinearFunction, LinearMap, apply
from ._counts import Counts, check_counts, resolve_counts
from ._functions import check_dim, check_divisible, gather_values


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Return slice j of rank i as slice i of rank j: jax.lax.all_to_all with ``tiled=True``.

    Type: ``[N*n, ...] -> [N*n, ...]``, or ``[N*n, m] -> [n, N*m]`` with ``split_dim=0, concat_dim=1``. Inverse and transpose:
    the same with ``split_dim`` and ``concat_dim`` swapped::

        rank 0  abc          adg
        rank 1  def    ->    beh
        rank 2  ghi          cfi

    Ulysses' attention exchanges a slice of the sequence with all heads for the whole sequence with a slice of the heads.
    `ragged_all_to_all` sends another number of rows to each rank.

    Args:
        x: The same shape on all ranks; ValueError if the axis does not divide ``split_dim``.
        axis: The mesh axis.
        split_dim: The dimension that is sliced.
        concat_dim: The dimension along which the received slices are joined.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.all_to_all(x, mesh["shard"]), 2)
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    split = check_divisible("all_to_all", x, axis, split_dim)
    concat = check_dim("all_to_all", x, concat_dim)
    if split == concat == 0:
        return apply("all_to_all", x, axis)
    n = x.shape[split] // axis.size
    pieces = apply("all_to_all", x.movedim(split, 0), axis).unflatten(0, (axis.size, n))  # by sender, then as in x
    return pieces.movedim(1, split + 1).movedim(0, concat).flatten(concat, concat + 1)


def permute(x: Tensor, axis: Axis, shift: int | None = None, *, perm: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """Return the tensor of the rank that sends to this one, or zeros where none does: jax.lax.ppermute.

    Type: ``[n] -> [n]``. Transpose: the inverse permutation. With ``shift=1``, and with ``perm=[(0, 1), (1, 2)]``::

        rank 0  a          c                      rank 0  a          0
        rank 1  b    ->    a                      rank 1  b    ->    a
        rank 2  c          b                      rank 2  c          b

    A shift is a step around a ring, as in ring attention. A ``perm`` without the last pair sends from each pipeline stage to
    the next one. All ranks of the axis call it, also those that send or receive nothing.

    Args:
        x: The same shape on all ranks.
        axis: The mesh axis.
        shift: Rank i sends to rank (i + shift) % N. 1 by default.
        perm: Instead of a shift: pairs of ranks (source, destination), the same on all ranks.

    Raises:
        ValueError: If a pair names no rank of the axis, or two pairs have the same source or the same destination.
        TypeError: If both ``shift`` and ``perm`` are given.

    Example:
        >>> import torch, funshard as fs
        >>> run = fs.testing.spmd(lambda mesh, x: fs.collectives.permute(x, mesh["shard"], shift=1), 3)
        >>> run(torch.tensor([1.0, 2.0, 3.0])).tolist()
        [3.0, 1.0, 2.0]
    """
    sources = _find_sources(axis.size, shift, perm)
    if isinstance(axis, Simulated):
        return _permute(x, axis.rank, sources, "")
    if sources == tuple(range(axis.size)):
        return x
    if max(sources) < 0:  # nobody sends: zeros, which are a function of x to autograd
        return _permute(x.view_as(x), None, sources, "")
    if not axis.name:
        raise missing_group_error(axis.size)
    return _permute(x.view_as(x), None, sources, axis.name)  # a view of x: see _primitive.apply


def _find_sources(size: int, shift: int | None, perm: Sequence[tuple[int, int]] | None) -> tuple[int, ...]:
    """Return the rank that each rank receives from, -1 for none."""
    if perm is None:
        shift = 1 if shift is None else shift
        return tuple((rank - shift) % size for rank in range(size))
    if shift is not None:
        raise TypeError("permute: expected a shift or a perm, got both")
    sources = [-1] * size
    for source, destination in perm:
        if not (0 <= source < size and 0 <= destination < size):
            raise ValueError(f"permute: expected pairs of ranks in 0..{size - 1}, got ({source}, {destination}) in {[*perm]}")
        if source in sources or sources[destination] >= 0:
            raise ValueError(
                f"permute: expected each rank once as a source and once as a destination at most, got {[*perm]}; "
                "broadcast sends to several ranks"
            )
        sources[destination] = source
    return tuple(sources)


@_torch.allow_in_graph
def _permute(x: Tensor, rank: Tensor | None, sources: tuple[int, ...], name: str) -> Tensor:
    return LinearFunction.apply(x, None, _permutation(tuple(sources), name), *(() if rank is None else (rank,)))


def _permutation(sources: tuple[int, ...], name: str) -> LinearMap:
    """Return the map on a process group (``name``), or on ranks stacked in dimension 0 (no name)."""
    size = len(sources)

    def run(x: Tensor, *_: Tensor) -> Tensor:
        if max(sources) < 0:
            return torch.zeros_like(x)
        return _send_on_group(x, sources, name) if name else _permute_stack(x, sources)

    def transpose() -> LinearMap:
        return _permutation(tuple(sources.index(rank) if rank in sources else -1 for rank in range(size)), name)

    return LinearMap(run, transpose, size)


def _send_on_group(x: Tensor, sources: tuple[int, ...], name: str) -> Tensor:
    """Send a tensor to the ranks that take it, and return the received one, zeros if none."""
    size, rank = len(sources), _torch.resolve_group(name).rank()
    send = [int(source == rank) for source in sources]
    receive = [int(sources[rank] == sender) for sender in range(size)]
    sent = x.unsqueeze(0) if any(send) else x.new_empty(0, *x.shape)
    announce("permute", name, sent=x)
    received = start_exchange(sent, OpContext(size, name), send, receive)()
    return received.squeeze(0) if any(receive) else torch.zeros_like(x, memory_format=torch.contiguous_format)


def _permute_stack(x: Tensor, sources: tuple[int, ...]) -> Tensor:
    zeros = torch.zeros_like(x[0])
    return torch.stack([x[source] if source >= 0 else zeros for source in sources])


# --- The exchange of another number of rows with each rank, as tokens go to their experts ---


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
    expected = f"at most {len(x)} rows to send, at most {size} to receive, and the counts of other ranks"
    _Require.apply(fits, f"counts: expected {expected}")
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
        if not _torch.is_tracing() and not _torch.is_fake(fits) and not fits.all():
            raise ValueError(f"ragged_all_to_all: {message}")
        return fits.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fits: Tensor, message: str) -> tuple[Tensor, int]:  # pyright: ignore
        return _Require.apply(fits, message), in_dims[0]
