"""offload: a function whose saved tensors are in host memory until backward.

Saved-tensor hooks around the function copy out what plain autograd saves, and fetch it a batch ahead. torch's ``save_on_cpu``
copies each saved tensor by itself, weights too, and waits in backward. Here the views of a storage share one copy, and what
would free no memory stays on the device: `OffloadHooks`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.tree import is_within
from .._torch.tracing import phase
from .ambient import RUNNING
from .saved_tensors import RestorableBuffer, SavedTensorHooks, TensorRestorer, unpack

# --- Host buffers: storages that are on the host between forward and backward, in batches that leave and return together ---
#
#     saved  ->  being copied out  ->  on the host  ->  being copied back  ->  used
#             (Copy)    (free_device_memory)    (prefetch)            (wait)
#
# A batch is copied out as it is saved, and its device memory is freed when the next batch is complete. When backward reaches a
# batch, the previous one starts to come back. So two batches are on the device at any time, and copies overlap with computing.


class HostBuffer:
    """A copy on the host of a storage, which all saved views of it share."""

    def __init__(self, source: Tensor, host: torch.device) -> None:
        self.counter, self.version = _torch.make_version_probe(source), _torch.version(source)
        self._storage, self._device = weakref.ref(source.untyped_storage()), source.device
        self._on_device: Tensor | None = source
        self._is_fetched = False
        self._host = _torch.allocate_like(source, host)
        with phase("copy activations to the host"):
            self._copy = _torch.AsyncCopy(source, self._host)

    def has_values_of(self, source: Tensor) -> bool:
        """Return whether the copy has the values that a tensor of the same storage has now, as its version counter tells."""
        is_unchanged = self._storage() is not None and self.version == _torch.version(source)
        return is_unchanged and _torch.shares_counter(self.counter, source)

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
    """The host buffers of one run of a unit or function, held by autograd's graph, as is the previous batch if any."""

    def __init__(self, previous: OffloadBatch | None) -> None:
        self.bytes, self.is_open, self._is_read = 0, True, False
        self.buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._previous = weakref.ref(previous or self)

    def _previous_buffers(self) -> set[HostBuffer]:
        previous = self._previous()
        return set(previous.buffers if previous else ())

    def close(self) -> None:
        """Complete this batch, and free the device memory of the one before it."""
        if self.is_open:
            self.is_open = False
            for buffer in self._previous_buffers().difference(self.buffers):
                buffer.free_device_memory()

    def read(self) -> None:
        """Start to copy back all buffers of this batch, which backward has reached, and those of the previous one."""
        if not self._is_read:
            self._is_read = True
            for buffer in (*self.buffers, *self._previous_buffers()):
                buffer.prefetch()


class OffloadQueue(threading.local):
    """This thread's last batch, which may be open; and its host buffers by their storages."""

    def __init__(self) -> None:
        self._latest: OffloadBatch | None = None
        self._buffers: weakref.WeakValueDictionary[tuple[Any, ...], HostBuffer] = weakref.WeakValueDictionary()

    def add(self, source: Tensor, target: OffloadTarget) -> tuple[HostBuffer, OffloadBatch]:
        """Start to copy a tensor's storage to the host, in the open batch."""
        key, numel = (_torch.storage_id(source), source.dtype), source.untyped_storage().nbytes() // source.itemsize
        buffer = self._buffers.get(key)
        if buffer is None or not buffer.has_values_of(source):
            with torch.no_grad():
                flat = source.detach().as_strided((numel,), (1,), 0)
                buffer = self._buffers[key] = HostBuffer(flat, target.host or torch.device("cpu"))
        batch = self._latest
        if batch is None or not batch.is_open:
            batch = self._latest = OffloadBatch(batch)
        batch.buffers.add(buffer)
        batch.bytes += numel * source.itemsize
        if batch.bytes >= target.batch_bytes:
            batch.close()
        return buffer, batch

    def close_batch(self) -> None:
        """Complete the open batch."""
        if self._latest is not None:
            self._latest.close()


_QUEUE = OffloadQueue()


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

    A batch, which is what one call saves, leaves while the next one is saved, and comes back when backward reaches the batch
    after it: two are on the device. Small tensors, parameters, arguments without gradients, views of these, and gathered
    weights stay there. In torch.func's transforms, torch.utils.checkpoint and torch.compile it is ``f``.

    Args:
        f: The function.
        at_least: The size in bytes from which a tensor moves.
        load: The size in bytes after which a batch is complete.
        host: Where tensors go; by default from accelerators to the CPU. ``"cpu"`` moves tensors of the CPU as well, to try it.

    Returns:
        A function with the signature and the results of ``f``.

    Raises:
        TypeError, ValueError: A size is no whole number, or negative.
        RuntimeError: A saved tensor was changed in place before backward; or ``f`` begins a torch.func transform.

    Example:
        >>> import torch, funshard as fs
        >>> f = fs.offload(lambda x: x.sin().exp().sum(), at_least=0, host="cpu")
        >>> fs.grad(f)(torch.zeros(3))
        tensor([1., 1., 1.])
    """
    for name, value in (("at_least", at_least), ("load", load)):
        if not isinstance(value, int) or isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"offload: {name}: expected a whole number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"offload: {name}: expected at least 0 bytes, got {value}")
    target = OffloadTarget(at_least, load, None if host is None else torch.device(host))

    @_torch.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if _torch.is_in_graph() or not can_offload():
            return f(*args, **kwargs)
        outer = find_hooks(_torch.current_pack_hook())
        held = outer.held if isinstance(outer, OffloadHooks) else ()
        module = f if isinstance(f, nn.Module) else getattr(f, "__self__", None)
        own = module.buffers() if isinstance(module, nn.Module) else ()
        return OffloadHooks(outer.restorable if outer else {}, target, held).run(f, own, args, kwargs)

    return run


def can_offload() -> bool:
    """Return whether plain autograd records what is computed now, and hooks of others replace nothing of it."""
    if _torch.current_level() or not _torch.needs_graph() or _torch.is_tracing() or RUNNING.is_first:
        return False
    outer = _torch.current_pack_hook()
    return outer is None or find_hooks(outer) is not None


def find_hooks(pack: Callable[..., object] | None) -> SavedTensorHooks | None:
    """Return the hooks whose method a pack function is; None if they are not of this library."""
    hooks = getattr(pack, "__self__", None)
    return hooks if isinstance(hooks, SavedTensorHooks) else None


def _storage_ids(tensors: Iterable[object]) -> set[int]:
    return {_torch.storage_id(x) for x in tensors if isinstance(x, Tensor) and _is_flat_copyable(x)}


def _is_flat_copyable(x: Tensor) -> bool:
    """Return whether a flat copy of its storage has all its values."""
    return _torch.is_plain(x) and not (_torch.is_wrapped(x) or x.is_conj() or x.is_neg() or x.is_quantized)


class OffloadHooks(SavedTensorHooks):
    """Hooks that move saved tensors to the host, but for the storages ``held``, unless `SavedTensorHooks` replaces them."""

    def __init__(
        self, restorable: dict[int, RestorableBuffer], target: OffloadTarget | None, held: Iterable[set[int]] = ()
    ) -> None:
        super().__init__(restorable)
        self.target, self.held = target, tuple(held)

    @contextlib.contextmanager
    def activate(self, pack: Callable[[Tensor], object]) -> Generator[None]:
        """Return the same context; what is saved in it is a batch."""
        _QUEUE.close_batch()
        try:
            instead = "none inside of it; offload what is inside of the transform"
            with _torch.saved_tensor_hooks(pack, unpack, what="offload: what is offloaded", instead=instead):
                yield
        finally:
            _QUEUE.close_batch()

    def run(self, f: Callable[..., Result], own: Iterable[Tensor], args: Any, kwargs: Any) -> Result:
        """Call a function in this context; its own tensors, and arguments without gradients, which the caller holds, stay."""
        constants = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad)
        self.held = *self.held, _storage_ids(own), _storage_ids(constants)
        with self.activate(self.pack):
            return f(*args, **kwargs)

    def pack(self, tensor: Tensor) -> TensorRestorer | _torch.Versioned:
        """Return what to keep instead of a tensor."""
        packed = super().pack(tensor)
        is_kept = type(packed) is tuple or isinstance(packed, Tensor)
        if self.target is None or not is_kept or not self._is_moved(tensor, self.target):
            return packed
        buffer, batch = _QUEUE.add(tensor, self.target)
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())

        def restore() -> Tensor:
            _torch.unpack_versioned((buffer.counter, buffer.version), shape)
            with _torch.below_transforms():
                batch.read()
                return buffer.wait().as_strided(shape, stride, offset)

        return restore

    def _is_moved(self, tensor: Tensor, target: OffloadTarget) -> bool:
        if not _is_flat_copyable(tensor) or _torch.is_in_forward_ad() or _torch.is_leaf_view(tensor):
            return False
        if target.host is None and not _torch.is_accelerator(tensor.device):
            return False
        is_large = tensor.numel() * tensor.itemsize >= max(target.at_least, 1)
        return is_large and not any(_torch.storage_id(tensor) in held for held in self.held)


# --- P(offload="activations"): the modules of a call whose saved tensors are in host memory until backward ---
#
# The innermost unit decides. The model's own ``P(offload="activations")`` holds for what no other unit saves, and a unit in it
# that does not say so keeps what it saves on the device. An `offload` around the call holds for all units that say nothing.

Restorable = dict[int, RestorableBuffer] | None
DEFAULT_OFFLOAD = OffloadTarget()


class CallOffload(OffloadHooks):
    """The hooks of a call, and of its modules: those at the paths ``own`` offload, others in them do as ``around`` the call."""

    def __init__(
        self, own: frozenset[str], around: OffloadTarget | None, target: OffloadTarget | None, held: Iterable[set[int]]
    ) -> None:
        super().__init__({}, target, held)
        self._own, self._around = own, around

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave these tensors where they are for the length of the call."""
        self.held[-1].update(_storage_ids(tensors))

    def forwards(
        self, modules: Mapping[str, nn.Module], root: str, paths: Iterable[str], restorable: Restorable
    ) -> Iterator[tuple[nn.Module, str, Any]]:
        """Yield the forward of each of these modules but the root, with the hooks around it."""
        for path in paths:
            if path in modules and path != root and any(is_within(path, own) for own in self._own):
                target = DEFAULT_OFFLOAD if path in self._own else self._around
                yield modules[path], "forward", self._wrap_forward(modules[path], restorable, target)

    def _wrap_forward(self, module: nn.Module, restorable: Restorable, target: OffloadTarget | None) -> Callable[..., Any]:
        forward, buffers = module.forward, {} if restorable is None else restorable

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return OffloadHooks(buffers, target, self.held).run(forward, module.buffers(), args, kwargs)

        return run


def choose_offload(
    params: Mapping[str, Tensor], spec: PartitionSpec, outer: Callable[..., object] | None, *, is_inner: bool
) -> CallOffload | None:
    """Return what a call offloads, None for nothing. ``outer`` packs what is saved around the call.

    In a call ``is_inner`` to another, which backward runs, it soon reads what is saved.
    """
    hooks, own = find_hooks(outer), spec._compute_once(_offloaded_paths)
    around, held = (hooks.target, hooks.held) if isinstance(hooks, OffloadHooks) else (None, ())
    if not (own or around) or not can_offload():
        return None
    target = DEFAULT_OFFLOAD if "" in own and not is_inner else around
    return CallOffload(own - {""} if is_inner else own, around, target, (*held, _storage_ids(params.values())))


def _offloaded_paths(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(path for path, p in spec.by_path.items() if "activations" in p.offloads)


def choose_hooks(restorable: Restorable, offload: CallOffload | None) -> SavedTensorHooks | None:
    """Return the saved-tensor hooks of a call's forward, None for none, which replace views of ``restorable`` buffers."""
    if offload and offload.target:
        offload.restorable = {} if restorable is None else restorable
        return offload
    return None if restorable is None else SavedTensorHooks(restorable)
