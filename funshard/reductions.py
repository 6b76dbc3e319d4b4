"""Gradients on their way to being reduced, while the rest of backward runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .wire import Buffers, Chain, Step

__all__ = ["BUCKET_BYTES", "Reductions"]

BUCKET_BYTES = 2**22
"""The gradients of replicated units are reduced together once they are so many: see examples/benchmarks/comm.py."""


class Reductions:
    """What one call's backward reduces: split units one by one, replicated ones in buckets.

    ``in_flight`` is how many split units' whole gradients may be under way.
    """

    def __init__(self, in_flight: int, buffers: Buffers) -> None:
        self._in_flight, self._buffers = in_flight, buffers
        self._task = -1
        self._forget()

    def _forget(self) -> None:
        self._whole: list[tuple[Chain, Tensor]] = []  # split units' gradients that are not reduced to slices yet
        self._slices: list[tuple[str, Chain]] = []
        self._buckets: list[tuple[list[str], list[int], Chain]] = []
        self._bucket: list[tuple[str, Sequence[Tensor], Sequence[Step]]] = []
        self._bucket_bytes = 0

    def begin(self, task: int) -> None:
        """What follows is of the run of backward of this number; what another one left, that did not end, is forgotten."""
        if self._task != task:
            self._task = task
            self._forget()

    def split(self, key: str, pieces: Sequence[Tensor], steps: Sequence[Step]) -> None:
        """Start to reduce a unit's gradient, given in pieces, to slices. Older ones move on by a step."""
        while len(self._whole) >= self._in_flight:
            chain, buffer = self._whole.pop(0)
            chain.advance()
            self._buffers.give(buffer)
            del buffer
        buffer = torch.cat(tuple(pieces), out=self._buffers.take(sum(map(len, pieces)), pieces[0]))
        chain = Chain(buffer, steps)
        self._whole.append((chain, buffer))
        self._slices.append((key, chain))

    def replicated(self, key: str, pieces: Sequence[Tensor], steps: Sequence[Step]) -> None:
        """Put a unit's gradient, which every rank keeps whole, into the bucket, and reduce that once it is full."""
        if self._bucket and self._bucket[0][1][0].dtype != pieces[0].dtype:
            self._empty_bucket()
        self._bucket.append((key, pieces, steps))
        self._bucket_bytes += sum(piece.nbytes for piece in pieces)
        if self._bucket_bytes >= BUCKET_BYTES:
            self._empty_bucket()

    def _empty_bucket(self) -> None:
        if not self._bucket:
            return
        keys = [key for key, _, _ in self._bucket]
        lengths = [sum(map(len, pieces)) for _, pieces, _ in self._bucket]
        steps = self._bucket[0][2]  # a replicated unit's are over all axes
        buffer = torch.cat([piece for _, pieces, _ in self._bucket for piece in pieces])
        self._bucket, self._bucket_bytes = [], 0
        self._buckets.append((keys, lengths, Chain(buffer, steps)))

    def collect(self) -> dict[str, Tensor]:
        """Wait for everything that this run of backward started: the gradients by unit key, summed over visits."""
        self._empty_bucket()
        parts = [(key, chain.result()) for key, chain in self._slices]
        for keys, lengths, chain in self._buckets:
            total = chain.result()
            parts += zip(keys, total.split(lengths) if len(keys) > 1 else [total], strict=True)
        self._forget()
        out: dict[str, Tensor] = {}
        for key, grad in parts:
            out[key] = out[key] + grad if key in out else grad
        return out
