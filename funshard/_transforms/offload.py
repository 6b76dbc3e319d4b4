"""offload: a function whose saved tensors are in host memory until backward.

Saved-tensor hooks around the function copy out what autograd saves, and fetch it a batch ahead. A tensor
stays on the device if moving it would free no memory, or if it is restored in another way: `OffloadHooks.is_moved`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._torch.phases import phase
from ._recompute.function import RUNNING
from .saved_tensors import RestorableBuffer, SavedTensorHooks, TensorRestorer, hook_running_node, unpack

__all__ = ["ActivationOffload", "choose_hooks", "choose_offload", "offload"]


# --- Host buffers: storages that are on the host between forward and backward, in batches that leave and return together ---
#
#     saved  ->  being copied out  ->  on the host  ->  being copied back  ->  used
#             (Copy)    (free_device_memory)    (prefetch)            (wait)
#
# An `OffloadBatch` is what one run of a unit or of an offloaded function saves. It is copied out as it is saved, and its device
# memory is freed when the next batch is complete, so its copies overlap with all of that one's computation. When backward
# reaches a batch, the previous one starts to come back. So two batches are on the device at any time: in forward the last
# complete one and the one that is being saved, in backward the one that is read and the previous one. Nothing waits for the
# last batch of a forward: it has not left when backward reads it.


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
    """The host buffers of one run of a unit or function, held by autograd's graph, as is the ``previous`` batch if any."""

    def __init__(self, queue: OffloadQueue, previous: OffloadBatch | None) -> None:
        self.queue, self.bytes = queue, 0
        self.previous: Callable[[], OffloadBatch | None] = weakref.ref(previous) if previous else _no_batch
        self.buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()

    def prefetch(self) -> None:
        """Start to copy all buffers back."""
        with _torch.below_transforms():
            for buffer in self.buffers:
                buffer.prefetch()

    def free_device_memory(self, *but: OffloadBatch | None) -> None:
        """Free the device memory of the buffers that are not in the batches ``but`` as well."""
        for buffer in set(self.buffers).difference(*(batch.buffers for batch in but if batch)):
            buffer.free_device_memory()


class OffloadQueue:
    """The batches of one thread in the order of forward. It holds the open one; the others it refers to weakly."""

    def __init__(self) -> None:
        self._open: OffloadBatch | None = None
        self._latest: Callable[[], OffloadBatch | None] = _no_batch
        self._reading: Callable[[], OffloadBatch | None] = _no_batch  # the one that backward has reached
        self._buffers: weakref.WeakValueDictionary[tuple[int, int, int], HostBuffer] = weakref.WeakValueDictionary()

    def add(self, source: Tensor, start: int, stop: int, host: torch.device, limit: float) -> tuple[HostBuffer, OffloadBatch]:
        """Start to copy these elements of a tensor's storage, in the open batch, which is complete with ``limit`` bytes."""
        key = _torch.storage_id(source), start, stop
        buffer = self._buffers.get(key)
        if buffer is None or buffer.storage() is None or not buffer.has_values_of(source):
            with _torch.below_transforms():
                buffer = self._buffers[key] = HostBuffer(source.detach().as_strided((stop - start,), (1,), start), host)
        batch = self._open = self._open or OffloadBatch(self, self._latest())
        batch.buffers.add(buffer)
        batch.bytes += (stop - start) * source.itemsize
        if batch.bytes >= limit:
            self.close_batch()
        return buffer, batch

    def close_batch(self) -> None:
        """Complete the open batch, and free the device memory of the one before it."""
        if self._open is None:
            return
        batch, self._open, self._latest = self._open, None, weakref.ref(self._open)
        if previous := batch.previous():
            previous.free_device_memory(batch)

    def read_batch(self, batch: OffloadBatch) -> None:
        """Fetch a batch that backward reads, and the previous one; free the one that backward has left."""
        if (left := self._reading()) is batch:
            return
        self._reading = weakref.ref(batch)
        batch.prefetch()
        if previous := batch.previous():
            previous.prefetch()
        if left:
            left.free_device_memory(batch, previous)


def _no_batch() -> None:
    """Return None, as a dead weak reference does."""


class _Queues(threading.local):
    """The queue of each thread."""

    def __init__(self) -> None:
        self.of_thread = OffloadQueue()


_QUEUES = _Queues()


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
        counter, offset = _torch.make_version_probe(inner), self.buffer.offset_of(tensor)
        now = {"counter": counter, "version": _torch.version(counter)}
        return replace(self, shape=tensor.shape, stride=tensor.stride(), offset=offset, **now)


# --- offload ---

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(frozen=True)
class OffloadTarget:
    """The tensors that move: those of at least ``at_least`` bytes, in batches of ``batch_bytes`` or of one run.

    Without a host those of accelerators move, to the CPU.
    """

    at_least: int = 1 << 20
    batch_bytes: float = math.inf
    host: torch.device | None = None


def offload(
    f: Callable[Args, Result], *, at_least: int = 1 << 20, load: int = 1 << 26, host: torch.device | str | None = None
) -> Callable[Args, Result]:
    """Wrap a function so that what autograd saves in it is in host memory until backward.

    Nothing waits for the copies: a batch, which is what one call saves, leaves while the next one is saved, and comes back
    when backward reaches the batch after it. So at most two batches are on the device. Small tensors, parameters, arguments
    without gradients, views of these, and gathered weights stay there. It holds under plain autograd at any order, and one
    torch.func.grad or vjp; other transforms and torch.utils.checkpoint around it only get the same values. Inside
    torch.compile the wrapper is ``f``. `P` with ``offload="activations"`` does this for a unit's module.

    Args:
        f: The function.
        at_least: The size in bytes from which a tensor moves.
        load: The size in bytes after which a batch is complete.
        host: Where tensors go; by default from accelerators to the CPU. ``"cpu"`` moves tensors of the CPU as well, to try it.

    Returns:
        A function with the signature and the results of ``f``.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is negative.
        RuntimeError: In backward if a saved tensor was changed in place since. In forward if ``f`` begins a torch.func
            transform, inside which torch refuses saved-tensor hooks: offload inside the transform.

    Example:
        >>> import torch, funshard as fs
        >>> f = fs.offload(lambda x: x.sin().exp().sum(), at_least=0, host="cpu")
        >>> torch.func.grad(f)(torch.zeros(3))
        tensor([1., 1., 1.])
    """
    for name, value in (("at_least", at_least), ("load", load)):
        if not isinstance(value, int) or isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"offload: {name}: expected a whole number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"offload: {name}: expected at least 0 bytes, got {value}")
    target = OffloadTarget(at_least, load, None if host is None else torch.device(host))

    @functools.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if _torch.is_in_graph() or not can_offload():
            return f(*args, **kwargs)
        outer = find_offload_hooks(_torch.current_pack_hook())
        module = f if isinstance(f, nn.Module) else getattr(f, "__self__", None)
        own = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
        held = (*(outer.held if outer else ()), storage_ids(own), constant_storages(args, kwargs))
        hooks = OffloadHooks(outer.restorable if outer else {}, target, held, over=outer.over if outer else 0)
        with hooks.activate(hooks.pack):
            return f(*args, **kwargs)

    return run


def can_offload() -> bool:
    """Return whether hooks of this library can replace what autograd saves, in this transform and inside those around it."""
    if not _torch.can_replace_saved_tensors() or not _torch.needs_graph() or _torch.is_tracing() or RUNNING.is_first:
        return False
    outer = _torch.current_pack_hook()
    return outer is None or isinstance(getattr(outer, "__self__", None), SavedTensorHooks)


def find_offload_hooks(pack: Callable[..., object] | None) -> OffloadHooks | None:
    """Return the hooks whose method a pack function is; None if they do not offload."""
    hooks = getattr(pack, "__self__", None)
    return hooks if isinstance(hooks, OffloadHooks) else None


def constant_storages(args: Any, kwargs: Any) -> set[int]:
    """Return the storages of the arguments without gradients, which the caller holds."""
    return storage_ids(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad)


def storage_ids(tensors: Iterable[Tensor]) -> set[int]:
    """Return the storages of these tensors."""
    inner = (_torch.unwrap(x) for x in tensors)
    return {_torch.storage_id(x) for x in inner if isinstance(x, nn.Parameter) or _is_flat_copyable(x)}


def _is_flat_copyable(x: Tensor) -> bool:
    """Return whether a flat copy of its storage has all its values."""
    x = _torch.unwrap(x)
    strided = (type(x) is Tensor or _torch.is_fake(x)) and x.layout is torch.strided
    return strided and not (x.is_conj() or x.is_neg() or x.is_quantized)


class OffloadHooks(SavedTensorHooks):
    """Hooks that move saved tensors to the host, if `SavedTensorHooks` does not replace them anyway."""

    def __init__(
        self, restorable: dict[int, RestorableBuffer], target: OffloadTarget, held: Iterable[set[int]], *, over: int = 0
    ) -> None:
        super().__init__(restorable, over=over)
        self.target, self.held, self._level = target, tuple(held), _torch.current_level()
        self._witness: Tensor | None = None
        if self._level:
            with _torch.below_transforms():
                empty = torch.empty(0)
            self._witness = _torch.wrap_at_level(empty, self._level)

    def pack(self, tensor: Tensor) -> TensorRestorer | _torch.Versioned:
        """Return what to keep instead of a tensor."""
        packed = super().pack(tensor)
        if not (type(packed) is tuple or isinstance(packed, Tensor)) or not self.is_moved(tensor):
            return packed
        inner = _torch.unwrap(tensor)
        start, stop = _storage_span(inner)
        whole = inner.untyped_storage().nbytes() // inner.itemsize
        if 2 * (stop - start) >= whole:
            start, stop = 0, whole
        host = self.target.host or torch.device("cpu")
        buffer, batch = _QUEUES.of_thread.add(inner, start, stop, host, self.target.batch_bytes)
        witness = self._witness if _torch.level_of(tensor) else None
        where = tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start
        return OffloadedTensor(buffer, batch, tensor.dtype, *where, buffer.counter, buffer.version, witness)

    def is_moved(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor moves to the host, see `offload`."""
        if not _is_flat_copyable(tensor) or _torch.is_in_forward_ad():
            return False
        inner = _torch.unwrap(tensor)
        if self.target.host is None and not _torch.is_accelerator(inner.device):
            return False
        if any(_torch.storage_id(inner) in held for held in self.held):
            return False
        start, stop = _storage_span(inner)
        if (stop - start) * inner.itemsize < max(self.target.at_least, 1):
            return False
        if self._level and (inner.requires_grad or _torch.current_level() > self._level):  # a level below records it
            return False
        return _torch.level_of(tensor) in (0, self._level) and not _torch.is_batched(tensor) and not _torch.is_leaf_view(tensor)

    @contextlib.contextmanager
    def activate(self, pack: Callable[[Tensor], object]) -> Generator[None]:
        """Return the same context; what is saved in it begins a batch."""
        _QUEUES.of_thread.close_batch()
        try:
            with _torch.saved_tensor_hooks(pack, unpack, what="offload: what is offloaded", instead=_INSTEAD):
                yield
        finally:
            _QUEUES.of_thread.close_batch()


_INSTEAD = "none inside of it; offload what is inside of the transform"


def _storage_span(x: Tensor) -> tuple[int, int]:
    """Return the first element of its storage that a tensor views, and the one after the last."""
    start = int(x.storage_offset())
    if not x.numel():
        return start, start
    return start, start + 1 + sum((int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True))


# --- P(offload="activations"): the modules of a call whose saved tensors are in host memory until backward ---
#
# The innermost unit decides. The model's own ``P(offload="activations")`` holds for what no other unit saves, and a unit in it
# that does not say so keeps what it saves on the device. An `offload` around the call holds for all units that say nothing.

Restorable = dict[int, RestorableBuffer] | None
DEFAULT_OFFLOAD = OffloadTarget()


class ActivationOffload:
    """The modules of a call that offload what they save, and the tensors that the call holds anyway and that stay."""

    def __init__(self, own: frozenset[str], around: OffloadHooks | None, params: Mapping[str, Tensor]) -> None:
        self._own, self._around = own, around
        self._held = storage_ids(params.values())

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave these tensors where they are for the length of the call."""
        self._held |= storage_ids(tensors)

    def hooks(self, path: str, restorable: Restorable, *held: set[int]) -> SavedTensorHooks:
        """Return the saved-tensor hooks for a run of the module at this path, which offload what is not ``held``."""
        target = DEFAULT_OFFLOAD if path in self._own else self._around.target if self._around else None
        if target is None:
            return SavedTensorHooks({} if restorable is None else restorable)
        around = self._around.held if self._around else ()
        return OffloadHooks({} if restorable is None else restorable, target, (*around, self._held, *held))

    def forwards(
        self, modules: Mapping[str, nn.Module], root: str, paths: Iterable[str], restorable: Restorable
    ) -> Iterator[tuple[nn.Module, str, Any]]:
        """Yield the forward of each of these modules but the root, with the hooks around it."""
        for path in paths:
            if path in modules and path != root and any(is_within(path, own) for own in self._own):
                yield modules[path], "forward", self._wrap_forward(path, modules[path], restorable)

    def _wrap_forward(self, path: str, module: nn.Module, restorable: Restorable) -> Callable[..., Any]:
        """Return the module's forward, which offloads the tensors that it saves where that is possible."""
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not can_offload():
                return forward(*args, **kwargs)
            hooks = self.hooks(path, restorable, storage_ids(module.buffers()), constant_storages(args, kwargs))
            with hooks.activate(hooks.pack):
                return forward(*args, **kwargs)

        return run


def choose_offload(
    params: Mapping[str, Tensor], spec: PartitionSpec, outer: Callable[..., object] | None, *, is_recomputing: bool
) -> ActivationOffload | None:
    """Return what a call offloads, None for nothing. ``outer`` packs what is saved around the call.

    In a run of a recomputed module, which ``is_recomputing``, backward soon reads what is saved.
    """
    own = spec._compute_once(_offloaded_paths)
    around = find_offload_hooks(outer)
    if not (own or around) or not can_offload():
        return None
    return ActivationOffload(own - {""} if is_recomputing else own, around, params)


def _offloaded_paths(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(path for path, p in spec.by_path.items() if "activations" in p.offloads)


def choose_hooks(restorable: Restorable, offload: ActivationOffload | None) -> SavedTensorHooks | None:
    """Return the saved-tensor hooks of a call's forward, None for none, which replace views of ``restorable`` buffers."""
    hooks = None if offload is None else offload.hooks("", restorable)
    if isinstance(hooks, OffloadHooks):
        return hooks
    return None if restorable is None else SavedTensorHooks(restorable)
