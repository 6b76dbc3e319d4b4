"""What rests on the host between forward and backward: storages, in loads that leave and come back together.

    saved  ->  on its way out  ->  on the host  ->  on its way back  ->  used
    (rest)        (Copy)            (leave)            (come)           (view)

A `Load` is what one run of a unit saves, or of an offloaded function. It is copied out as it is saved, and its memory on the
device is let go when the next load is complete, so that its copies have all of that one's computation to run beside. When
backward comes to a load, the one before it in forward starts to come back. So of the loads, two are on the device at any time:
in forward the last complete one and the one that is being saved, in backward the one that is read and the one before it. The
last load of a forward has not left when backward reads it: nothing waits for it.
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
from .saved_tensors import TensorRestorer, hook_running_node

__all__ = ["OffloadBatch", "OffloadQueue", "OffloadedTensor", "current_queue"]


class HostBuffer:
    """The elements of a storage, or a span of them, that rest on the host; all saved views of them share this."""

    def __init__(self, source: Tensor, host: torch.device) -> None:
        self.storage, self.dtype = weakref.ref(source.untyped_storage()), source.dtype
        self.counter, self.version = _torch.make_version_probe(source), _torch.version(source)
        self._start, self._device = int(source.storage_offset()), source.device
        self._there: Tensor | None = source
        self._is_back = False
        self._host = _torch.allocate_like(source, host)
        self._copy = _torch.AsyncCopy(source, self._host)

    def holds(self, source: Tensor) -> bool:
        """Return whether what it copied is what this tensor of the same storage and span has now.

        Only a tensor that shares the version counter tells: another one may have been written to without a trace here.
        """
        return (
            self.dtype == source.dtype
            and self.version == _torch.version(source)
            and _torch.shares_counter(self.counter, source)
        )

    def offset_of(self, tensor: Tensor) -> int:
        """Return where in these elements a view of them begins, be they still in the source's storage or back in their own."""
        storage = self.storage()
        in_source = storage is not None and _torch.storage_id_of(storage) == _torch.storage_id(tensor)
        return int(tensor.storage_offset()) - (self._start if in_source else 0)

    def leave(self) -> None:
        """Let its memory on the device go."""
        self._copy.wait()
        self._there = None

    def come(self) -> Tensor:
        """Have it back on the device, or on its way."""
        if self._there is None:
            self._there = _torch.allocate_like(self._host, self._device)
            self._copy, self._is_back = _torch.AsyncCopy(self._host, self._there), True
        return self._there

    def arrived(self) -> Tensor:
        """Have it back on the device, for what is computed from here on."""
        there = self.come()
        if self._is_back:  # what is still on its way out can be read
            self._copy.wait()
        return there


class OffloadBatch:
    """What has been saved in one run of a unit. What autograd keeps holds it."""

    def __init__(self, of: OffloadQueue, before: OffloadBatch | None) -> None:
        self.line, self.bytes = of, 0
        self._before = weakref.ref(before) if before else _gone
        self._rests: list[weakref.ref[HostBuffer]] = []

    def add(self, rest: HostBuffer, nbytes: int) -> None:
        """Another one, of so many bytes, that may be in other loads as well."""
        self._rests.append(weakref.ref(rest))
        self.bytes += nbytes

    @property
    def before(self) -> OffloadBatch | None:
        """The load that was saved before it, if anything of that is still wanted."""
        return self._before()

    @property
    def rests(self) -> Iterator[HostBuffer]:
        """What is still wanted of it."""
        return (rest for ref in self._rests if (rest := ref()) is not None)

    def come(self) -> None:
        """Start to bring back what is not there."""
        with _torch.below_transforms():
            for rest in self.rests:
                rest.come()

    def leave(self, *but: OffloadBatch | None) -> None:
        """Let the device have the memory, but for what is also in others."""
        others = set(itertools.chain.from_iterable(load.rests for load in but if load))
        for rest in self.rests:
            if rest not in others:
                rest.leave()


class OffloadQueue:
    """The loads of one thread, one after the other. It knows them and holds none that is complete."""

    def __init__(self) -> None:
        self._open: OffloadBatch | None = None
        self._latest: Callable[[], OffloadBatch | None] = _gone
        self._here: Callable[[], OffloadBatch | None] = _gone  # where backward is
        self._rests: weakref.WeakValueDictionary[tuple[int, int, int, int], HostBuffer] = weakref.WeakValueDictionary()

    def add(self, source: Tensor, start: int, stop: int, host: torch.device, most: float) -> tuple[HostBuffer, OffloadBatch]:
        """These elements of a tensor's storage, on their way to the host, and the load that they are in.

        A load that has reached ``most`` bytes is complete.
        """
        rest = self._find(source, start, stop, host)
        if self._open is None:
            self._open = OffloadBatch(self, self._latest())
        load = self._open
        load.add(rest, (stop - start) * source.itemsize)
        if load.bytes >= most:
            self.complete()
        return rest, load

    def _find(self, source: Tensor, start: int, stop: int, host: torch.device) -> HostBuffer:
        """Return the copy of these elements of a tensor's storage, which is made if none holds what they are now."""
        for i in itertools.count():  # several: of tensors that count their changes apart, and of before a change
            key = _torch.storage_id(source), start, stop, i
            rest = self._rests.get(key)
            if rest is None or rest.storage() is None:
                with _torch.below_transforms():
                    rest = self._rests[key] = HostBuffer(source.detach().as_strided((stop - start,), (1,), start), host)
                return rest
            if rest.holds(source):
                return rest
        raise AssertionError

    def complete(self) -> None:
        """What is saved from here on is another load."""
        if self._open is None:
            return
        load, self._open, self._latest = self._open, None, weakref.ref(self._open)
        if load.before:
            load.before.leave(load)

    def come_to(self, load: OffloadBatch) -> None:
        """Backward reads this load: the one before it starts to come back, and where backward was is let go."""
        if (left := self._here()) is load:
            return
        self._here = weakref.ref(load)
        load.come()
        if load.before:
            load.before.come()
        if left:
            left.leave(load, load.before)


def _gone() -> None:
    return None


_LINES = threading.local()


def current_queue() -> OffloadQueue:
    """That of the thread that runs."""
    if not hasattr(_LINES, "line"):
        _LINES.line = OffloadQueue()
    return _LINES.line


@dataclass(frozen=True)
class OffloadedTensor:
    """What autograd keeps in the place of a tensor: where it rests, and which view of that it is."""

    rest: HostBuffer
    load: OffloadBatch
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    counter: Tensor
    """Of the version of what was saved, without its memory."""
    version: int
    witness: Tensor | None
    """A tensor of the transform whose graph this is in, None where it is plain autograd's."""

    def __call__(self) -> Tensor:
        _torch.unpack_versioned((self.counter, self.version), self.shape)
        self.load.line.come_to(self.load)
        level = _torch.level_of(self.witness) if self.witness is not None else 0
        over = self.witness is not None and _torch.is_dead(self.witness)
        with _torch.below_transforms():
            there = self.rest.arrived()
            there = there if there.dtype == self.dtype else there.view(self.dtype)
            # a span that has not left the device is a view of its storage, with an offset of its own
            view = there.as_strided(self.shape, self.stride, int(there.storage_offset()) + self.offset)
        if torch.is_grad_enabled():
            hook_running_node({_torch.storage_id(view): self}, 0 if over else level)
        return _torch.wrap_for_ended_level(view) if over else _torch.wrap_at_level(view, level)

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> TensorRestorer | None:
        """The same for a view of it that a backward saves which records itself, and which is then not kept either."""
        inner = _torch.unwrap(tensor)
        if _torch.level_of(tensor) or inner.requires_grad != tensor.requires_grad or self.witness is not None:
            return None
        counter = _torch.make_version_probe(inner)
        where = tensor.shape, tensor.stride(), self.rest.offset_of(tensor)
        return replace(self, shape=where[0], stride=where[1], offset=where[2], counter=counter, version=_torch.version(counter))
