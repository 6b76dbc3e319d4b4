"""Gradients on their way to being reduced, while the rest of backward runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _torch
from .._spec.accumulation import Arrivals
from .chain import Buffers, Chain, Step, Steps
from .joining import BUCKET_BYTES, BUCKET_BYTES_CUDA, Bucket, Buckets
from .route import Route

__all__ = ["Reductions"]


class Reductions:
    """What one call's backward reduces: split units one by one, replicated ones in buckets.

    ``in_flight`` is how many split units' whole gradients may be under way. Where there are ``arrivals``, these get what is
    reduced, and no more units', or buckets, wait for each other than may be under way; without, all is kept to the end.
    """

    def __init__(self, in_flight: int, buffers: Buffers, arrivals: Arrivals | None = None) -> None:
        self._in_flight, self._buffers, self._arrivals = in_flight, buffers, arrivals
        self._task = -1
        self._forget()

    def _forget(self) -> None:
        self._whole: list[tuple[Chain, Tensor]] = []  # split units' gradients that are not reduced to slices yet
        self._slices: list[tuple[str, Chain]] = []
        self._full: list[tuple[Bucket, Chain]] = []
        self._filling: Buckets[tuple[torch.dtype, torch.dtype]] = Buckets()
        self._steps: dict[tuple[torch.dtype, torch.dtype], Sequence[Step]] = {}  # replicated units of these dtypes share them

    def begin(self, task: int) -> None:
        """What follows is of the run of backward of this number; what another one left, that did not end, is forgotten."""
        if self._task != task:
            self._task = task
            self._forget()

    def split(self, key: str, pieces: Sequence[Tensor], route: Route, steps: Steps) -> None:
        """Start to reduce a unit's gradient, given in pieces, to slices. Older ones move on by a step."""
        while len(self._whole) >= self._in_flight:
            chain, buffer = self._whole.pop(0)
            chain.advance()
            self._buffers.give(buffer)
            del buffer
        self._hand_on(self._in_flight)
        buffer = self._buffers.take(route.padded, route.dtypes.reduce, pieces[0])
        chain = Chain(_torch.joined(pieces, buffer), steps.reduce)
        self._whole.append((chain, buffer))
        self._start(key, chain)

    def done(self, key: str, grad: Tensor) -> None:
        """A unit's gradient that nobody else has a part of."""
        self._hand_on(self._in_flight)
        self._start(key, Chain(grad, ()))

    def _start(self, key: str, chain: Chain) -> None:
        self._slices.append((key, chain))
        if self._arrivals:
            self._arrivals.started(key)

    def _hand_on(self, most: int) -> None:
        """Hand on what is there, and have no more than so many units, and buckets, on their way; if there is somebody to."""
        if not self._arrivals:
            return
        while self._slices and (len(self._slices) > most or self._slices[0][1].is_over):
            key, chain = self._slices.pop(0)
            self._arrivals.arrived(key, chain.result())
        while len(self._full) > most:
            bucket, chain = self._full.pop(0)
            for key, grad in bucket.parts(chain.result()):
                self._arrivals.arrived(key, grad)

    def replicated(self, key: str, pieces: Sequence[Tensor], route: Route, steps: Steps) -> None:
        """Put a unit's gradient, which every rank keeps whole, into the bucket of its dtypes; reduce that once it is full."""
        dtypes = dtype, _ = route.dtypes.reduce, route.dtype
        self._steps[dtypes] = steps.reduce
        if self._arrivals:
            self._arrivals.started(key)
        most = (BUCKET_BYTES_CUDA if pieces[0].is_cuda else BUCKET_BYTES) / dtype.itemsize
        if full := self._filling.add(dtypes, key, pieces, route.padded, most):
            self._hand_on(self._in_flight)
            self._reduce(full, *dtypes)

    def _reduce(self, bucket: Bucket, dtype: torch.dtype, shard: torch.dtype) -> None:
        buffer = _torch.joined(bucket.pieces, bucket.pieces[0].new_empty(bucket.numel, dtype=dtype))
        bucket.pieces.clear()
        self._full.append((bucket, Chain(buffer, self._steps[dtype, shard])))

    def collect(self) -> dict[str, Tensor]:
        """Wait for everything that this run of backward started: the gradients by unit key, summed over visits."""
        for dtypes, bucket in self._filling.rest():
            self._reduce(bucket, *dtypes)
        self._hand_on(0)
        parts = [(key, chain.result()) for key, chain in self._slices]
        for bucket, chain in self._full:
            parts += bucket.parts(chain.result())
        self._forget()
        out: dict[str, Tensor] = {}
        for key, grad in parts:
            out[key] = out[key] + grad if key in out else grad
        return out
