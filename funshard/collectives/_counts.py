"""Counts of the rows that ranks send each other, which ranks compare before they send anything.

gloo ends the process where two ranks expect different numbers of bytes of each other, and NCCL waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.mesh import ProcessAxis
from ._agree import get_host_group, is_comparable

Counts = Sequence[int] | Tensor
"""A number of rows for each rank of an axis."""


def resolve_counts(
    x: Tensor, axis: ProcessAxis, send: Counts, receive: Counts | None, size: int | None
) -> tuple[list[int], list[int]]:
    """Return how many rows this rank sends to each rank, and receives from each; ValueError on all ranks if they differ."""
    if not isinstance(send, Tensor) and receive is not None and not isinstance(receive, Tensor):
        if _torch.is_in_graph() or _torch.is_tracing():
            check_counts(x, axis.size, send, receive, size)
            return [*send], [*receive]
    elif not _torch.is_in_graph() and _torch.is_tracing():
        raise RuntimeError(
            "ragged_all_to_all: the counts come from data, and a recorded graph would keep those of its example: expected "
            "lists of ints for send_counts and receive_counts; or send the same number of rows to each rank by all_to_all"
        )
    return _compare_counts(x, axis, send, receive, size)


def check_counts(x: Tensor, ranks: int, send: Sequence[int], receive: Sequence[int] | None, size: int | None) -> None:
    """Raise ValueError if this rank's counts are wrong by themselves."""
    if x.dim() == 0:
        raise ValueError("ragged_all_to_all: expected at least one dimension, got a 0-dim tensor; use x.reshape(1)")
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
