"""What lies in flat tensors one after the other: put together, taken apart, and taken in shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Share", "apart", "joined", "part_of", "parts_of"]

Share = tuple[int, int]
"""Of elements that come in as many goes which, and how many they are."""


def part_of(numel: int, share: int, shares: int) -> slice:
    """Of so many elements those of a share, one of as many."""
    return slice(numel * share // shares, numel * (share + 1) // shares)


def parts_of(tensors: Sequence[Tensor], sizes: Sequence[int], share: Share) -> list[Tensor]:
    """The share of each of the pieces of these sizes that lie in the tensors one after the other."""
    out: list[Tensor] = []
    left = iter(sizes)
    for tensor in tensors:
        end = 0
        while end < len(tensor):
            begin, end = end, end + next(left)
            out.append(tensor[begin:end][part_of(end - begin, *share)])
    return [x for x in out if len(x)] or [tensors[0][:0]]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one dimension one after the other. Inverse of `apart`.

    By way of two: of those of one torch.cat leaves the empty ones out, and with them, under vmap, that they were batched. Some
    ranks have no others, and are to send what the others do.
    """
    return torch.cat([x[:, None] for x in tensors])[:, 0]


def apart(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """What lies in a flat tensor one after the other; derivatives go the way of `joined`."""
    return [x[:, 0] for x in flat[:, None].split_with_sizes(list(sizes))]
