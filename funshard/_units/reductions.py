"""Gradients on their way to being reduced, while the rest of backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import _torch
from .accumulation import GradReceiver
from .chain import Buffers, Chain, Step, Steps
from .joining import BUCKET_BYTES, BUCKET_BYTES_CUDA, Bucket, Buckets
from .route import Route

__all__ = ["Reductions"]

_Kind = tuple[torch.dtype, torch.dtype, torch.device | None]
"""What replicated units that are reduced together have in common: dtypes reduced and of the shards, and where they are used."""


class Reductions:
    """What one call's backward reduces: split units one by one, replicated ones in buckets.

    ``in_flight`` is how many split units' whole gradients may be under way. Where there is a ``receiver``, it gets what is
    reduced, and no more units', or buckets, wait for each other than may be under way; without, all is kept to the end.
    """

    def __init__(self, in_flight: int, buffers: Buffers, receiver: GradReceiver | None = None) -> None:
        self._in_flight, self._buffers, self._receiver = in_flight, buffers, receiver
        self._task = -1
        self._forget()

    def _forget(self) -> None:
        self._whole: list[tuple[Chain, Tensor]] = []  # split units' gradients that are not reduced to slices yet
        self._leaving: list[Chain] = []  # slices, and buckets, on their way to the host
        self._on_host: dict[str, Route] = {}  # of whose units gradients go there
        self._slices: list[tuple[str, Chain]] = []
        self._full: list[tuple[Bucket, Chain]] = []
        self._filling: Buckets[_Kind] = Buckets()
        self._steps: dict[_Kind, Sequence[Step]] = {}  # which replicated units of a kind share

    def begin(self, task: int) -> None:
        """What follows is of the run of backward of this number; what another one left, that did not end, is forgotten."""
        if self._task != task:
            self._task = task
            self._forget()

    def split(self, key: str, pieces: Sequence[Tensor], route: Route, steps: Steps) -> None:
        """Start to reduce a unit's gradient, given in pieces, to slices. Older ones move on by a step."""
        self._leave(key, route)
        while len(self._whole) >= self._in_flight:
            chain, buffer = self._whole.pop(0)
            chain.advance()
            self._buffers.give(buffer)
            del buffer
        self._hand_on(self._in_flight)
        buffer = self._buffers.take(route.padded, route.dtypes.reduce, pieces[0])
        chain = Chain(_torch.concat_flat(pieces, buffer), steps.reduce)
        self._whole.append((chain, buffer))
        self._start(key, chain)
        if route.device is not None:
            self._leaving.append(chain)

    def _leave(self, key: str, route: Route) -> None:
        """What leaves for the host moves on by a step, so that no more than the last ones are still on the device."""
        if route.device is not None:
            self._on_host[key] = route
        if not self._leaving:
            return
        whole = {id(chain) for chain, _ in self._whole}
        for chain in self._leaving:
            if id(chain) not in whole:
                chain.advance()
        self._leaving = [chain for chain in self._leaving if chain.under_way]

    def done(self, key: str, grad: Tensor) -> None:
        """A unit's gradient that nobody else has a part of."""
        self._hand_on(self._in_flight)
        self._start(key, Chain(grad, ()))

    def _start(self, key: str, chain: Chain) -> None:
        self._slices.append((key, chain))
        if self._receiver:
            self._receiver.expect(key)

    def _hand_on(self, most: int) -> None:
        """Hand on what is there, and have no more than so many units, and buckets, on their way; if there is somebody to."""
        if not self._receiver:
            return
        while self._slices and (len(self._slices) > most or not self._slices[0][1].under_way):
            key, chain = self._slices.pop(0)
            self._arrived([(key, self._result(chain))], self._receiver)
        while len(self._full) > most:
            bucket, chain = self._full.pop(0)
            self._arrived(bucket.parts(self._result(chain)), self._receiver)

    def _result(self, chain: Chain) -> Tensor:
        """Wait for what is handed on, and hold it no longer."""
        self._leaving = [other for other in self._leaving if other is not chain]
        return chain.result()

    def _arrived(self, parts: Iterable[tuple[str, Tensor]], receiver: GradReceiver) -> None:
        for key, grad in self._there([*parts]):
            receiver.receive(key, grad)

    def _there(self, parts: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Reduced gradients; those that went to the host are there, for which it waits once, in the shards' dtypes."""
        routes = {key: self._on_host[key] for key, _ in parts if key in self._on_host}
        for device in {route.device for route in routes.values()}:
            _torch.synchronize_copies(device)
        return [(key, grad.to(routes[key].dtype) if key in routes else grad) for key, grad in parts]

    def replicated(self, key: str, pieces: Sequence[Tensor], route: Route, steps: Steps) -> None:
        """Put a unit's gradient, which every rank keeps whole, into the bucket of its kind; reduce that once it is full."""
        self._leave(key, route)
        kind = route.dtypes.reduce, route.dtype, route.device
        self._steps[kind] = steps.reduce
        if self._receiver:
            self._receiver.expect(key)
        most = (BUCKET_BYTES_CUDA if pieces[0].is_cuda else BUCKET_BYTES) / route.dtypes.reduce.itemsize
        if full := self._filling.add(kind, key, pieces, route.padded, most):
            self._hand_on(self._in_flight)
            self._reduce(full, kind)

    def _reduce(self, bucket: Bucket, kind: _Kind) -> None:
        buffer = _torch.concat_flat(bucket.pieces, bucket.pieces[0].new_empty(bucket.numel, dtype=kind[0]))
        bucket.pieces.clear()
        chain = Chain(buffer, self._steps[kind])
        self._full.append((bucket, chain))
        if kind[2] is not None:
            self._leaving.append(chain)

    def collect(self) -> dict[str, Tensor]:
        """Wait for everything that this run of backward started: the gradients by unit key, summed over visits."""
        for kind, bucket in self._filling.rest():
            self._reduce(bucket, kind)
        self._hand_on(0)
        parts = [(key, chain.result()) for key, chain in self._slices]
        for bucket, chain in self._full:
            parts += bucket.parts(chain.result())
        there = self._there(parts)
        self._forget()
        out: dict[str, Tensor] = {}
        for key, grad in there:
            out[key] = out[key] + grad if key in out else grad
        return out
