"""Concatenate flat tensors, split them, and take them in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Chunk", "chunk_pieces", "chunk_slice", "concat_flat", "split_flat"]

Chunk = tuple[int, int]
"""``(number, count)``: which of ``count`` chunks of some elements."""


def chunk_slice(numel: int, chunk: int, chunks: int) -> slice:
    """Return the range of one chunk among ``numel`` elements."""
    return slice(numel * chunk // chunks, numel * (chunk + 1) // chunks)


def chunk_pieces(tensors: Sequence[Tensor], sizes: Sequence[int], chunk: Chunk) -> list[Tensor]:
    """Return one chunk of every piece; pieces of these sizes lie end to end in the tensors."""
    out: list[Tensor] = []
    left = iter(sizes)
    for tensor in tensors:
        end = 0
        while end < len(tensor):
            begin, end = end, end + next(left)
            out.append(tensor[begin:end][chunk_slice(end - begin, *chunk)])
    return [x for x in out if len(x)] or [tensors[0][:0]]


def concat_flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors. Inverse of `split_flat`.

    Go through 2-D: torch.cat drops empty 1-D tensors, and with them their vmap level. A rank that has only empty ones must
    still send what the others send.
    """
    return torch.cat([x[:, None] for x in tensors])[:, 0]


def split_flat(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split a flat tensor into pieces of these sizes. Through 2-D, so that derivatives go the way of `concat_flat`."""
    return [x[:, 0] for x in flat[:, None].split_with_sizes(list(sizes))]
