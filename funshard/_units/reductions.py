"""Gradients on their way to being reduced, while the rest of backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import _torch
from .chain import Buffers, Chain, Step, Steps
from .route import Route

__all__ = ["BUCKET_BYTES", "Reductions"]

BUCKET_BYTES = 2**22
"""The gradients of replicated units are reduced together once they are so many: see examples/benchmarks/comm.py."""
BUCKET_BYTES_CUDA = 25 * 2**20
"""The same on CUDA, where a collective costs more to start: DistributedDataParallel's default."""


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
        self._leaving: list[Chain] = []  # slices, and buckets, on their way to the host
        self._from: set[torch.device] = set()
        self._dtypes: dict[str, torch.dtype] = {}
        self._slices: list[tuple[str, Chain]] = []
        self._buckets: list[tuple[_Bucket, Chain]] = []
        self._filling: dict[tuple[torch.dtype, torch.dtype, torch.device | None], _Bucket] = {}

    def begin(self, task: int) -> None:
        """What follows is of the run of backward of this number; what another one left, that did not end, is forgotten."""
        if self._task != task:
            self._task = task
            self._forget()

    def split(self, key: str, pieces: Sequence[Tensor], route: Route, steps: Steps) -> None:
        """Start to reduce a unit's gradient, given in pieces, to slices. Older ones move on by a step."""
        self._advance(key, route)
        while len(self._whole) >= self._in_flight:
            chain, buffer = self._whole.pop(0)
            chain.advance()
            self._buffers.give(buffer)
            del buffer
        buffer = self._buffers.take(route.padded, route.dtypes.reduce, pieces[0])
        chain = Chain(_torch.joined(pieces, buffer), steps.reduce)
        self._whole.append((chain, buffer))
        self._slices.append((key, chain))
        if route.device is not None:
            self._leaving.append(chain)

    def _advance(self, key: str, route: Route) -> None:
        """What leaves for the host moves on by a step, so that no more than the last ones are still on the device."""
        whole = {id(chain) for chain, _ in self._whole}
        for chain in self._leaving:
            if id(chain) not in whole:
                chain.advance()
        self._leaving = [chain for chain in self._leaving if chain.under_way]
        if route.device is not None:
            self._from.add(route.device)
            self._dtypes[key] = route.dtype

    def done(self, key: str, grad: Tensor) -> None:
        """A unit's gradient that nobody else has a part of."""
        self._slices.append((key, Chain(grad, ())))

    def replicated(self, key: str, pieces: Sequence[Tensor], route: Route, steps: Steps) -> None:
        """Put a unit's gradient, which every rank keeps whole, into the bucket of its dtypes; reduce that once it is full."""
        self._advance(key, route)
        of = route.dtypes.reduce, route.dtype, route.device
        # replicated units of these have the same steps
        bucket = self._filling.setdefault(of, _Bucket(steps.reduce, route.device is not None))
        bucket.add(key, pieces, route.padded)
        most = BUCKET_BYTES_CUDA if pieces[0].is_cuda else BUCKET_BYTES
        if bucket.numel * route.dtypes.reduce.itemsize >= most:
            self._reduce(self._filling.pop(of), route.dtypes.reduce)

    def _reduce(self, bucket: _Bucket, dtype: torch.dtype) -> None:
        buffer = _torch.joined(bucket.pieces, bucket.pieces[0].new_empty(bucket.numel, dtype=dtype))
        bucket.pieces.clear()
        self._buckets.append((bucket, Chain(buffer, bucket.steps)))
        if bucket.leaves:
            self._leaving.append(self._buckets[-1][1])

    def collect(self) -> dict[str, Tensor]:
        """Wait for everything that this run of backward started: the gradients by unit key, summed over visits."""
        for (dtype, *_), bucket in self._filling.items():
            self._reduce(bucket, dtype)
        parts = [(key, chain.result()) for key, chain in self._slices]
        for bucket, chain in self._buckets:
            total = chain.result()
            parts += zip(bucket.keys, total.split(bucket.lengths) if len(bucket.keys) > 1 else [total], strict=True)
        for device in self._from:  # once, for all that has gone to the host
            _torch.arrived(device)
        parts = [(key, grad.to(self._dtypes.get(key, grad.dtype))) for key, grad in parts] if self._from else parts
        self._forget()
        out: dict[str, Tensor] = {}
        for key, grad in parts:
            out[key] = out[key] + grad if key in out else grad
        return out


@dataclass
class _Bucket:
    """Gradients that are to be reduced together."""

    steps: Sequence[Step]
    leaves: bool
    """Whether it goes to the host."""
    keys: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    numel: int = 0

    def add(self, key: str, pieces: Sequence[Tensor], numel: int) -> None:
        self.keys.append(key)
        self.lengths.append(numel)
        self.pieces += pieces
        self.numel += numel
