"""Buckets of small tensors that are reduced as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 2**22
"""The size at which a bucket is full and reduced: see examples/benchmarks/comm.py."""
BUCKET_BYTES_CUDA = 25 * 2**20
"""The same for gradients on CUDA, where a collective costs more to start: DistributedDataParallel's default."""


class Bucket:
    """Tensors that are to be reduced as one, by key, each in one piece or in several."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        self.keys: list[str] = []
        self.pieces: list[Tensor] = []
        self._lengths: list[int] = []
        self.numel = 0
        """The number of elements of all of them."""
        for key, tensor in tensors:
            self.add(key, [tensor.reshape(-1)], tensor.numel())

    def add(self, key: str, pieces: Sequence[Tensor], numel: int) -> None:
        """Add a tensor of so many elements."""
        self.keys.append(key)
        self.pieces += pieces
        self._lengths.append(numel)
        self.numel += numel

    def concat(self) -> Tensor:
        """Return all of them, one after the other, of one dtype. Differentiable; a single piece is returned itself."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def split(self, total: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return the parts of the reduced bucket, by key, as 1-D views."""
        return zip(self.keys, total.split(self._lengths) if len(self.keys) > 1 else [total], strict=True)
