"""Exchanges of values between ranks: each rank's values go to other ranks, and nothing is added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.mesh import Axis, ProcessAxis, Simulated
from .._core.ops import LinearFunction, LinearMap, OpContext, announce, apply, missing_group_error, start_exchange
from ._agree import get_host_group, is_comparable
from ._functions import check_dim, check_divisible, gather_values


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Return slice j of rank i as slice i of rank j: jax.lax.all_to_all with ``tiled=True``.

    Type: ``[N*n, ...] -> [N*n, ...]``, or ``[N*n, m] -> [n, N*m]`` with ``split_dim=0, concat_dim=1``. Inverse and transpose:
    the same with ``split_dim`` and ``concat_dim`` swapped::

        rank 0  abc          adg
        rank 1  def    ->    beh
        rank 2  ghi          cfi

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

    All ranks of the axis call it, also those that send or receive nothing.

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
        return _permute(x, axis.rank, sources)
    if sources == tuple(range(axis.size)):
        return x
    if max(sources) >= 0 and not axis.name:
        raise missing_group_error(axis.size)
    here = axis.rank or 0
    send = tuple(int(source == here) for source in sources)
    receive = tuple(int(sender == sources[here]) for sender in range(axis.size))
    name = axis.name if max(sources) >= 0 else ""
    return _exchange_rows("permute", x.unsqueeze(0), send, receive, 1, name).squeeze(0)


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
def _permute(x: Tensor, rank: Tensor, sources: tuple[int, ...]) -> Tensor:
    return LinearFunction.apply(x, None, _permutation(tuple(sources)), rank)


def _permutation(sources: tuple[int, ...]) -> LinearMap:
    """Return the map on ranks stacked in dimension 0."""

    def run(x: Tensor, _: Tensor) -> Tensor:
        zeros = torch.zeros_like(x[0])
        return torch.stack([x[source] if source >= 0 else zeros for source in sources])

    def transpose() -> LinearMap:
        return _permutation(tuple(sources.index(rank) if rank in sources else -1 for rank in range(len(sources))))

    return LinearMap(run, transpose, len(sources))


# --- The exchange of another number of rows with each rank, as tokens go to their experts ---


Counts = Sequence[int] | Tensor
"""A number of rows for each rank of an axis."""


def ragged_all_to_all(
    x: Tensor, axis: Axis, send_counts: Counts, receive_counts: Counts | None = None, *, size: int | None = None
) -> Tensor:
    """Return the rows that every rank sends to this one, in rank order: as jax.lax.ragged_all_to_all.

    Type: ``[n, ...] -> [m, ...]``, where n is the sum of ``send_counts`` and m that of ``receive_counts``. Inverse and
    transpose: the same with the counts swapped::

        rank 0  abc  sends 1, 2, 0          ad  of 1, 1, 0
        rank 1  de   sends 1, 0, 1    ->    bc  of 2, 0, 0
        rank 2  f    sends 0, 0, 1          ef  of 0, 1, 1

    Ranks compare their counts before anything is sent, in forward alone: between hosts, and a tensor of counts on an
    accelerator is waited for. Counts that come from data interrupt a graph of torch.compile.

    Args:
        x: Rows for rank 0, then for rank 1, and so on. The same dtype and row shape on all ranks.
        axis: The mesh axis.
        send_counts: N ints, or a tensor of them: how many rows go to each rank, as torch.bincount counts tokens.
        receive_counts: How many rows come from each rank; by default the hosts tell each other.
        size: The number of rows of the result, if it is larger: zeros follow those received, and ``x`` may have more rows
            than are sent. Simulated ranks, which are one batch, need it.

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
    is_traced = _torch.is_in_graph() or _torch.is_tracing()
    if is_traced and isinstance(send_counts, Sequence) and isinstance(receive_counts, Sequence):
        check_counts(x, axis.size, send_counts, receive_counts, size)
        send, receive = send_counts, receive_counts
    elif _torch.is_tracing() and not _torch.is_in_graph():
        raise RuntimeError(
            "ragged_all_to_all: the counts come from data, and a recorded graph would keep those of its example: expected "
            "lists of ints for send_counts and receive_counts; or send the same number of rows to each rank by all_to_all"
        )
    else:
        send, receive = _compare_counts(x, axis, send_counts, receive_counts, size)
    rows = sum(receive) if size is None else size
    name = axis.name if axis.size > 1 else ""
    # a view of x: see _core.ops.apply
    return _exchange_rows("ragged_all_to_all", x.view_as(x), tuple(send), tuple(receive), rows, name)


@_torch.allow_in_graph
def _exchange_rows(op: str, x: Tensor, send: Sequence[int], receive: Sequence[int], size: int, name: str) -> Tensor:
    return LinearFunction.apply(x, None, _ragged_map(op, send, receive, len(x), size, name))


def _ragged_map(op: str, send: Sequence[int], receive: Sequence[int], rows: int, size: int, name: str) -> LinearMap:
    """Return the map from ``rows`` to ``size`` rows on a process group, or on one rank (no name)."""

    def run(x: Tensor) -> Tensor:
        if name:
            announce(op, name, sent=x if op == "permute" else None)  # as large on all ranks
        x = x.narrow(0, 0, sum(send))
        out = start_exchange(x, OpContext(len(send), name), send, receive)() if name else x
        padding = size - sum(receive)
        return torch.cat([out, out.new_zeros(padding, *out.shape[1:])]) if padding else out

    return LinearMap(run, lambda: _ragged_map(op, receive, send, size, rows, name))


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
    _require(fits, f"at most {len(x)} rows to send, at most {size} to receive, and the counts of other ranks")
    rows = gather_values(x, axis)
    rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])  # the last one is the padding
    place = torch.arange(size, device=x.device)
    sender = (place[:, None] >= ends).sum(1).clamp(max=n - 1)
    index = sender * len(x) + (starts - ends + receive)[sender] + place
    return rows[torch.where(place < ends[-1], index, n * len(x))]


def _require(fits: Tensor, expected: str) -> None:
    """Raise ValueError unless a condition holds for all ranks together; a recorded graph does not check it."""
    if _torch.is_in_graph() or _torch.is_tracing():
        return
    with _torch.below_transforms():
        if not _torch.is_fake(fits := _torch.unwrap(fits)) and not fits.all():
            raise ValueError(f"ragged_all_to_all: counts: expected {expected}")


# --- Counts of the rows that ranks send each other, which they compare before they send anything ---
#
# gloo ends the process where two ranks expect different numbers of bytes of each other, and NCCL waits for ever.


def check_counts(x: Tensor, ranks: int, send: Sequence[int], receive: Sequence[int] | None, size: int | None) -> None:
    """Raise ValueError if this rank's counts are wrong by themselves."""
    check_dim("ragged_all_to_all", x, 0)
    for name, counts, rows in (("send_counts", send, len(x)), ("receive_counts", receive, size)):
        if counts is None:
            continue
        if len(counts) != ranks or any(isinstance(count, bool | float) or count < 0 for count in counts):
            raise ValueError(f"ragged_all_to_all: {name}: expected a number of rows for each of {ranks} ranks, got {counts}")
        if rows is not None and (sum(counts) > rows or (size is None and sum(counts) < rows)):
            bound = "" if size is None else "at most "
            raise ValueError(f"ragged_all_to_all: {name}: expected {bound}{rows} rows together, got {counts}")


class _Row(NamedTuple):
    error: str
    kind: tuple[str, list[int]]
    size: int | None
    send: list[int]
    receive: list[int] | None


@_torch.disable_in_graph("ranks compare the counts of ragged_all_to_all")
def _compare_counts(
    x: Tensor, axis: ProcessAxis, send_counts: Counts, receive_counts: Counts | None, size: int | None
) -> tuple[list[int], list[int]]:
    """Return the counts to send and to receive, compared between ranks; even ones where only shapes count."""
    n, here = axis.size, axis.rank or 0
    with _torch.below_transforms():
        if _torch.is_fake(_torch.unwrap(x)) or _torch.is_fake(torch.empty(0, device="cpu")):  # only shapes are asked for
            rows = len(x) if size is None else min(len(x), size)
            even = [rows * (i + 1) // n - rows * i // n for i in range(n)]
            send, receive = (even if c is None or isinstance(c, Tensor) else [*c] for c in (send_counts, receive_counts))
            return send, receive
        group = get_host_group(axis.name) if n > 1 and is_comparable(axis.name) else None
        error, send, receive = "", [0] * n, None
        try:
            send = _counts_to_list("send_counts", send_counts)
            receive = None if receive_counts is None else _counts_to_list("receive_counts", receive_counts)
            check_counts(x, n, send, receive, size)
        except ValueError as wrong:
            if group is None:
                raise
            error = str(wrong)
        if group is None and n > 1:  # every rank is taken to send what this one does
            return send, [send[here]] * n if receive is None else receive
        own = _Row(error, (str(x.dtype), [*x.shape[1:]]), size, send, receive)
        every: list[_Row] = group.all_gather_object(own) if group else [own]
        _check_rows(every, group.ranks if group else (0,))
        return send, [row.send[here] for row in every]


def _counts_to_list(name: str, counts: Counts) -> list[int]:
    """Return counts as a list; raise ValueError for floats, other shapes than [N], and counts under vmap."""
    if not isinstance(counts, Tensor):
        return [*counts]
    if counts.dim() != 1 or counts.is_floating_point():
        raise ValueError(
            f"ragged_all_to_all: {name}: expected whole numbers of shape [N], got {counts.dtype} {[*counts.shape]}"
        )
    if _torch.is_batched(counts):
        raise ValueError(
            f"ragged_all_to_all: {name} differ within a torch.vmap over a process group: expected the same counts for the "
            "whole batch; join what goes to a rank before, or send the same number of rows to each rank by all_to_all"
        )
    return _torch.unwrap(counts).tolist()


def _check_rows(rows: Sequence[_Row], ranks: Sequence[int]) -> None:
    if errors := [f"rank {rank}: {row.error}" for rank, row in zip(ranks, rows, strict=True) if row.error]:
        raise ValueError("; ".join(errors))
    if any(row.kind != rows[0].kind for row in rows):
        raise ValueError("ragged_all_to_all: expected rows of the same dtype and shape on all ranks")
    for j, receiver in enumerate(rows):
        total = sum(row.send[j] for row in rows)
        if receiver.size is not None and receiver.size < total:
            wanted = f"room for the {total} rows that rank {ranks[j]} receives"
            raise ValueError(f"ragged_all_to_all: size: expected {wanted}, got {receiver.size}")
        for i, sender in enumerate(rows):
            if receiver.receive is not None and receiver.receive[i] != sender.send[j]:
                raise ValueError(
                    f"ragged_all_to_all: rank {ranks[i]} sends {sender.send[j]} rows to rank {ranks[j]}, which expects "
                    f"{receiver.receive[i]}: expected receive_counts that are the other ranks' send_counts; leave them out, or "
                    "get them by all_to_all(send_counts, axis)"
                )
