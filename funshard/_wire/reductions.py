"""The reductions of gradients that run while the rest of backward computes, and buckets of small tensors reduced as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .. import _torch
from .._core.layout import insert_padding, to_memory_order
from .._core.unit import Unit
from .._torch.tracing import phase
from .accumulation import GradReceiver
from .chain import BufferPool, CollectiveChain, RouteSteps, RouteTable
from .route import Route

BUCKET_BYTES = 2**22
"""The size at which a bucket is full and reduced: see examples/benchmarks/comm.py."""
BUCKET_BYTES_CUDA = 25 * 2**20
"""The same for gradients on CUDA, where a collective costs more to start: DistributedDataParallel's default."""
Running = tuple[Callable[[Tensor], Iterable[tuple[str, Tensor]]], CollectiveChain, Route]
"""A running reduction: the function from its result to the gradients in it by unit key, its chain, and their units' route."""


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


class ReductionQueue:
    """The reductions of one call's backward: split units one by one, replicated ones in buckets.

    ``in_flight`` is how many split units' whole gradients may be under way. A ``receiver`` gets gradients as they are reduced,
    and so many units and buckets may be under way. Without one, all are kept to the end.
    """

    def __init__(self, in_flight: int, buffers: BufferPool, receiver: GradReceiver | None = None) -> None:
        self._in_flight, self._buffers, self._receiver = in_flight, buffers, receiver
        self.reset()

    def reset(self) -> None:
        """Forget all that is under way."""
        self._unscattered: list[tuple[CollectiveChain, Tensor]] = []  # whole gradients not yet reduced to slices
        self._on_their_way: list[CollectiveChain] = []  # slices and buckets that a second axis, or the host, is to get
        self._running: list[Running] = []
        self._open_buckets: dict[object, tuple[Bucket, RouteSteps]] = {}  # by kind, with the steps of the last unit
        self._zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # padding for all units, as nobody writes to it

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None], shard: Tensor, routes: RouteTable) -> None:
        """Start to reduce a unit's gradient, given by parameter. To be called below all transforms."""
        steps = routes.steps[unit.key]
        route = steps.route
        zeros = self._padding_zeros(route, shard, routes) if route.longest_padding else shard
        pieces = flat_pieces(unit, grads, route, shard, zeros)
        if route.split_axes or not steps.reduce:
            self.reduce_split(unit.key, pieces, steps)
        else:
            self.reduce_replicated(unit.key, pieces, steps)

    def _padding_zeros(self, route: Route, like: Tensor, routes: RouteTable) -> Tensor:
        at = route.device or like.device, route.dtypes.param
        if at not in self._zeros:
            self._zeros[at] = like.new_zeros(routes.longest_padding, dtype=route.dtypes.param, device=route.device)
        return self._zeros[at]

    def reduce_split(self, key: str, pieces: Sequence[Tensor], steps: RouteSteps) -> None:
        """Start to reduce a unit's gradient, given in pieces, to slices. Older ones move on by a step."""
        route = steps.route
        self._advance_on_their_way()
        while len(self._unscattered) >= self._in_flight:
            chain, buffer = self._unscattered.pop(0)
            chain.advance()
            if chain.holds_input:
                self._on_their_way.append(chain)
            self._buffers.give(buffer)
            del buffer
        self._report_finished(self._in_flight)
        buffer = self._buffers.take(route.padded_numel, route.dtypes.reduce, pieces[0])
        sent = steps.prepare(_torch.concat_into(pieces, buffer))
        if sent is not buffer:  # but what stands for it
            self._buffers.give(buffer)
            buffer = sent
        chain = CollectiveChain(sent, steps.reduce)
        del sent
        if chain.is_pending:  # else the buffer is the result, of a unit that no other rank has a part of
            self._unscattered.append((chain, buffer))
        self._running.append((lambda grad: [(key, grad)], chain, route))

    def _advance_on_their_way(self) -> None:
        """Advance these chains, so that no more than those of the last gradients hold what they are made of."""
        for chain in self._on_their_way:
            chain.advance()
        self._on_their_way = [chain for chain in self._on_their_way if chain.holds_input]

    def _report_finished(self, most: int) -> None:
        """Hand what is finished to the receiver, if any, and wait until at most so many units and buckets are under way."""
        while self._receiver and self._running and (len(self._running) > most or not self._running[0][1].is_pending):
            finished = self._running.pop(0)
            self._on_their_way = [chain for chain in self._on_their_way if chain is not finished[1]]
            for key, grad in self._wait([finished]):
                self._receiver.receive(key, grad)

    def _wait(self, running: Sequence[Running]) -> list[tuple[str, Tensor]]:
        """Return reduced gradients in the shards' dtypes; wait once for those that are copied to the host."""
        grads = [(key, grad, route) for split, chain, route in running for key, grad in split(chain.result())]
        for device in {route.device for _, _, route in running if route.device is not None}:
            _torch.synchronize_copies(device)
        return [(key, grad.to(route.shard_dtype)) for key, grad, route in grads]

    def reduce_replicated(self, key: str, pieces: Sequence[Tensor], steps: RouteSteps) -> None:
        """Put the gradient of a unit that every rank keeps whole into the bucket of its kind; reduce a full bucket."""
        route = steps.route
        self._advance_on_their_way()
        most = (BUCKET_BYTES if pieces[0].device.type == "cpu" else BUCKET_BYTES_CUDA) / route.dtypes.reduce.itemsize
        bucket, _ = self._open_buckets.get(route.bucket_kind) or (Bucket(), steps)
        bucket.add(key, pieces, route.padded_numel)
        self._open_buckets[route.bucket_kind] = bucket, steps
        if bucket.numel >= most:
            self._report_finished(self._in_flight)
            self._reduce_bucket(*self._open_buckets.pop(route.bucket_kind))

    def _reduce_bucket(self, bucket: Bucket, steps: RouteSteps) -> None:
        with phase("reduce bucket", " ".join(key or "''" for key in bucket.keys)):
            dtype = steps.route.dtypes.reduce
            buffer = _torch.concat_into(bucket.pieces, bucket.pieces[0].new_empty(bucket.numel, dtype=dtype))
            bucket.pieces.clear()
            chain = CollectiveChain(steps.prepare(buffer), steps.reduce)
        self._running.append((bucket.split, chain, steps.route))
        if steps.route.device is not None:
            self._on_their_way.append(chain)

    def wait_all(self) -> dict[str, Tensor]:
        """Wait for everything that this run of backward started. Return gradients by unit key, summed over its gathers."""
        for bucket, steps in self._open_buckets.values():
            self._reduce_bucket(bucket, steps)
        self._report_finished(0)
        with phase("wait for reductions"):
            reduced = self._wait(self._running)
        self.reset()
        out: dict[str, Tensor] = {}
        for key, grad in reduced:
            out[key] = out[key] + grad if key in out else grad
        return out


def flat_pieces(unit: Unit, grads: Sequence[Tensor | None], route: Route, like: Tensor, zeros: Tensor) -> list[Tensor]:
    """Return the pieces that join to the gradient of a unit's buffer, from the gradients of its parameters."""
    pieces = [
        like.new_zeros(param.numel, dtype=route.dtypes.param, device=route.device)
        if grad is None
        else to_memory_order(grad, param).contiguous()
        for grad, param in zip(grads, unit.params, strict=True)
    ]
    return insert_padding(pieces, unit, route.padded_numel, zeros)
