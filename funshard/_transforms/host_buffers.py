"""Host buffers: storages that are on the host between forward and backward, in batches that leave and return together.

    saved  ->  being copied out  ->  on the host  ->  being copied back  ->  used
            (Copy)    (free_device_memory)    (prefetch)            (wait)

An `OffloadBatch` is what one run of a unit or of an offloaded function saves. It is copied out as it is saved, and its device
memory is freed when the next batch is complete, so its copies overlap with all of that one's computation. When backward
reaches a batch, the previous one starts to come back. So two batches are on the device at any time: in forward the last
complete one and the one that is being saved, in backward the one that is read and the previous one. Nothing waits for the
last batch of a forward: it has not left when backward reads it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import _torch
from .._phases import phase
from .saved_tensors import TensorRestorer, hook_running_node

__all__ = ["OffloadBatch", "OffloadQueue", "OffloadedTensor", "current_queue"]


class HostBuffer:
    """A copy on the host of a storage, or a span of one, which all saved views of it share."""

    def __init__(self, source: Tensor, host: torch.device) -> None:
        self.storage, self.dtype = weakref.ref(source.untyped_storage()), source.dtype
        self.counter, self.version = _torch.make_version_probe(source), _torch.version(source)
        self._start, self._device = int(source.storage_offset()), source.device
        self._on_device: Tensor | None = source
        self._is_fetched = False
        self._host = _torch.allocate_like(source, host)
        with phase("copy activations to the host"):
            self._copy = _torch.AsyncCopy(source, self._host)

    def has_values_of(self, source: Tensor) -> bool:
        """Return whether the copy has the values that a tensor of the same storage and span has now.

        Only a tensor that shares the version counter can tell: others may have been written to without a trace here.
        """
        return (
            self.dtype == source.dtype
            and self.version == _torch.version(source)
            and _torch.shares_counter(self.counter, source)
        )

    def offset_of(self, tensor: Tensor) -> int:
        """Return the offset of a view in this buffer, whether it is of the source's storage or of one that was fetched."""
        storage = self.storage()
        in_source = storage is not None and _torch.storage_id_of(storage) == _torch.storage_id(tensor)
        return int(tensor.storage_offset()) - (self._start if in_source else 0)

    def free_device_memory(self) -> None:
        """Drop the tensor on the device, as soon as it is copied."""
        self._copy.wait()
        self._on_device = None

    def prefetch(self) -> Tensor:
        """Start to copy the values back if they are not on the device, and return the tensor there."""
        if self._on_device is None:
            with phase("copy activations to the device"):
                self._on_device = _torch.allocate_like(self._host, self._device)
                self._copy, self._is_fetched = _torch.AsyncCopy(self._host, self._on_device), True
        return self._on_device

    def wait(self) -> Tensor:
        """Return the tensor on the device, with its values for what is computed from now on."""
        tensor = self.prefetch()
        if self._is_fetched:  # one that is still being copied out can be read
            self._copy.wait()
        return tensor


class OffloadBatch:
    """The host buffers of one run of a unit or function, held by autograd's graph."""

    def __init__(self, queue: OffloadQueue, previous: OffloadBatch | None) -> None:
        self.queue, self.bytes = queue, 0
        self._previous = weakref.ref(previous) if previous else _no_batch
        self._buffers: list[weakref.ref[HostBuffer]] = []

    def add(self, buffer: HostBuffer, nbytes: int) -> None:
        """Add a buffer of so many bytes; it may be in other batches as well."""
        self._buffers.append(weakref.ref(buffer))
        self.bytes += nbytes

    @property
    def previous(self) -> OffloadBatch | None:
        """The batch that was saved before this one, if the graph still holds it."""
        return self._previous()

    @property
    def buffers(self) -> Iterator[HostBuffer]:
        """The buffers that the graph still holds."""
        return (buffer for ref in self._buffers if (buffer := ref()) is not None)

    def prefetch(self) -> None:
        """Start to copy all buffers back."""
        with _torch.below_transforms():
            for buffer in self.buffers:
                buffer.prefetch()

    def free_device_memory(self, *but: OffloadBatch | None) -> None:
        """Free the device memory of the buffers that are not in the batches ``but`` as well."""
        others = set(itertools.chain.from_iterable(batch.buffers for batch in but if batch))
        for buffer in self.buffers:
            if buffer not in others:
                buffer.free_device_memory()


class OffloadQueue:
    """The batches of one thread in the order of forward. It holds the open one; the others it refers to weakly."""

    def __init__(self) -> None:
        self._open: OffloadBatch | None = None
        self._latest: Callable[[], OffloadBatch | None] = _no_batch
        self._reading: Callable[[], OffloadBatch | None] = _no_batch  # the one that backward has reached
        self._buffers: weakref.WeakValueDictionary[tuple[int, int, int, int], HostBuffer] = weakref.WeakValueDictionary()

    def add(self, source: Tensor, start: int, stop: int, host: torch.device, limit: float) -> tuple[HostBuffer, OffloadBatch]:
        """Start to copy these elements of a tensor's storage, in the open batch, which is complete with ``limit`` bytes."""
        buffer = self._find_or_copy(source, start, stop, host)
        if self._open is None:
            self._open = OffloadBatch(self, self._latest())
        batch = self._open
        batch.add(buffer, (stop - start) * source.itemsize)
        if batch.bytes >= limit:
            self.close_batch()
        return buffer, batch

    def _find_or_copy(self, source: Tensor, start: int, stop: int, host: torch.device) -> HostBuffer:
        """Return a copy of these elements with their present values; a new one if there is none."""
        for i in itertools.count():  # several: of tensors with version counters of their own, and of before a change
            key = _torch.storage_id(source), start, stop, i
            buffer = self._buffers.get(key)
            if buffer is None or buffer.storage() is None:
                with _torch.below_transforms():
                    buffer = self._buffers[key] = HostBuffer(source.detach().as_strided((stop - start,), (1,), start), host)
                return buffer
            if buffer.has_values_of(source):
                return buffer
        raise AssertionError

    def close_batch(self) -> None:
        """Complete the open batch, and free the device memory of the one before it."""
        if self._open is None:
            return
        batch, self._open, self._latest = self._open, None, weakref.ref(self._open)
        if batch.previous:
            batch.previous.free_device_memory(batch)

    def read_batch(self, batch: OffloadBatch) -> None:
        """Fetch a batch that backward reads, and the previous one; free the one that backward has left."""
        if (left := self._reading()) is batch:
            return
        self._reading = weakref.ref(batch)
        batch.prefetch()
        if batch.previous:
            batch.previous.prefetch()
        if left:
            left.free_device_memory(batch, batch.previous)


def _no_batch() -> None:
    """Return None, as a dead weak reference does."""


_QUEUES = threading.local()


def current_queue() -> OffloadQueue:
    """Return the queue of the thread that runs."""
    if not hasattr(_QUEUES, "queue"):
        _QUEUES.queue = OffloadQueue()
    return _QUEUES.queue


@dataclass(frozen=True)
class OffloadedTensor:
    """A saved tensor's place on the host, which autograd keeps instead of the tensor. Calling it returns the tensor."""

    buffer: HostBuffer
    batch: OffloadBatch
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    counter: Tensor
    """A tensor with the version counter of the saved one, without its memory."""
    version: int
    witness: Tensor | None
    """A tensor of the transform whose graph this is in; None for plain autograd's."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of the tensor, and of the views of it that can be restored."""
        return (self.dtype,)

    def __call__(self) -> Tensor:
        """Return the tensor on the device; RuntimeError if it was changed in place since it was saved."""
        _torch.unpack_versioned((self.counter, self.version), self.shape)
        self.batch.queue.read_batch(self.batch)
        level = _torch.level_of(self.witness) if self.witness is not None else 0
        over = self.witness is not None and _torch.is_dead(self.witness)
        with _torch.below_transforms():
            flat = self.buffer.wait()
            flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
            # a span that has not left the device is a view of its storage, with an offset of its own
            view = flat.as_strided(self.shape, self.stride, int(flat.storage_offset()) + self.offset)
        if torch.is_grad_enabled():
            hook_running_node({_torch.storage_id(view): self}, 0 if over else level)
        return _torch.wrap_for_ended_level(view) if over else _torch.wrap_at_level(view, level)

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> TensorRestorer | None:
        """Return the same for a view of it that a backward with a graph saves, so that it is not kept either."""
        inner = _torch.unwrap(tensor)
        if _torch.level_of(tensor) or inner.requires_grad != tensor.requires_grad or self.witness is not None:
            return None
        counter = _torch.make_version_probe(inner)
        where = tensor.shape, tensor.stride(), self.buffer.offset_of(tensor)
        return replace(self, shape=where[0], stride=where[1], offset=where[2], counter=counter, version=_torch.version(counter))
