"""Counts of the rows that ranks send each other, which ranks compare before they send anything.

gloo ends the process where two ranks expect different numbers of bytes of each other, and NCCL waits for ever.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _torch
from .._core.mesh import ProcessAxis
from ._sequence import get_host_group, is_comparable

__all__ = ["Counts", "check_counts", "resolve_counts"]

Counts = Sequence[int] | Tensor
"""A number of rows for each rank of an axis."""


def resolve_counts(
    x: Tensor, axis: ProcessAxis, send: Counts, receive: Counts | None, size: int | None
) -> tuple[list[int], list[int]]:
    """Return how many rows this rank sends to each rank, and receives from each.

    Raises:
        ValueError: On every rank, if the counts of some rank are wrong or differ from another's.
        RuntimeError: If counts that come from data would be constants of a recorded graph.
    """
    if not isinstance(send, Tensor) and receive is not None and not isinstance(receive, Tensor):
        if _torch.is_in_graph() or _torch.is_traced():
            check_counts(x, axis.size, send, receive, size)
            return [*send], [*receive]
    elif not _torch.is_in_graph() and _torch.is_traced():
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
        is_alone = n == 1 or not is_comparable(axis.name)
        error, send, receive = "", [0] * n, None
        try:
            send = _counts_to_list("send_counts", send_counts)
            receive = None if receive_counts is None else _counts_to_list("receive_counts", receive_counts)
            check_counts(x, n, send, receive, size)
        except ValueError as wrong:
            if is_alone:
                raise
            error, send, receive = str(wrong), [0] * n, None
        if is_alone and n > 1:  # every rank is taken to send what this one does
            return send, [send[here]] * n if receive is None else receive
        unknown, kind = [-1] * n, zlib.crc32(repr((x.dtype, [*x.shape[1:]])).encode())
        row = [bool(error), kind, -1 if size is None else size, *send, *(unknown if receive is None else receive)]
        group = None if is_alone else get_host_group(axis.name)
        rows = [row] if group is None else group.all_gather(torch.tensor(row, device="cpu")).tolist()
        if group is not None and any(other[0] for other in rows):
            errors = zip(group.ranks, group.all_gather_object(error), strict=True)
            raise ValueError("; ".join(f"rank {rank}: {text}" for rank, text in errors if text))
        if error := _find_difference(rows, (0,) if group is None else group.ranks):
            raise ValueError(f"ragged_all_to_all: {error}")
        return send, [other[3 + here] for other in rows]


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


def _find_difference(rows: Sequence[Sequence[int]], names: Sequence[int]) -> str:
    """Return how the counts of ranks contradict each other, or an empty string.

    Args:
        rows: For each rank: whether it has an error, its kind of rows, its size, its counts to and from every rank.
        names: The ranks in the world.
    """
    n = len(rows)
    if len({row[1] for row in rows}) > 1:
        return "expected rows of the same dtype and shape on all ranks"
    for j, receiver in enumerate(rows):
        total = sum(row[3 + j] for row in rows)
        if 0 <= receiver[2] < total:
            return f"size: expected room for the {total} rows that rank {names[j]} receives, got {receiver[2]}"
        for i, sender in enumerate(rows):
            if receiver[3 + n + i] not in (-1, sender[3 + j]):
                return (
                    f"rank {names[i]} sends {sender[3 + j]} rows to rank {names[j]}, which expects {receiver[3 + n + i]}: "
                    "expected receive_counts that are the other ranks' send_counts; leave them out, or get them by "
                    "all_to_all(send_counts, axis)"
                )
    return ""
