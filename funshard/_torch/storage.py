"""Storages, versions, copies on write and to the host; and process groups by their names."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .levels import below_transforms, is_batched, is_wrapped, unwrap
from .tracing import allow_in_graph, is_fake, is_tracing


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as a writable view, valid while the tensor lives, without NumPy."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def overwrite(target: Tensor, source: Tensor) -> None:
    """Write values into a tensor, as kernels do with buffers: torch.func refuses ``copy_`` to what was made outside of it.

    Where vmap has batched one of them, ``copy_`` decides. Pinned by ``test_pure_form``.
    """
    if is_batched(target) or is_batched(source):
        target.copy_(source.detach())
        return
    with below_transforms():
        unwrap(target).copy_(unwrap(source))


def concat_into(pieces: Sequence[Tensor], out: Tensor) -> Tensor:
    """Concatenate contiguous tensors into a flat buffer of any dtype, by one kernel if they have one dtype.

    torch.cat needs flat tensors, and on CUDA casts each by its own kernel. Traced code has torch.cat, which compilers know.
    Pinned by ``test_joined``.
    """
    some = [piece if piece.dim() else piece.reshape(1) for piece in pieces if piece.numel()]
    if is_tracing() or len({piece.dtype for piece in some}) != 1:
        return torch.cat([piece.reshape(-1) for piece in some], out=out) if some else out
    torch.ops.aten._chunk_cat.out(some, 0, 1, out=out.view(1, -1))
    return out


storage_id: Callable[[Tensor], int] = torch._C._storage_address  # pyright: ignore[reportAttributeAccessIssue]
"""The identity of a live storage, also of fake and meta ones, without a Python object. Pinned by ``test_storage_id``."""


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have one storage, inside the wrappers of all transforms."""
    return storage_id(unwrap(a)) == storage_id(unwrap(b))


def is_sole_holder(tensor: Tensor) -> bool:
    """Return whether no view, other tensor or Python object holds the tensor's storage. Pinned by ``test_alone``."""
    return _count_references(tensor) == _ONE_REFERENCE


def _count_references(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of references to a tensor's storage, in C++ and in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ONE_REFERENCE = _count_references(torch.empty(1))
"""The references of a storage that has one tensor."""


def lazy_clone(tensor: Tensor) -> Tensor:
    """Return a copy that shares memory that torch has allocated until either is written to. See ``test_copies_on_write``."""
    try:
        return torch._lazy_clone(tensor)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError:
        return tensor.clone()


def view_as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.view(dtype)``, for which torch 2.11 has no batching rule. Pinned by ``test_reinterpreted``."""
    if torch.compiler.is_compiling():
        return _reinterpret_in_graph(tensor, dtype)
    return _Reinterpreted.apply(tensor, dtype) if is_batched(tensor) else tensor.view(dtype)


@allow_in_graph
def _reinterpret_in_graph(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return _Reinterpreted.apply(tensor, dtype)


class _Reinterpreted(torch.autograd.Function):
    """``x.view(dtype)`` with a batching rule, and without a derivative."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert in_dims[0] is not None
        rows = x.movedim(in_dims[0], 0)
        if not rows.numel():  # torch refuses to view most strides of empty tensors
            last = rows.shape[-1] * x.element_size() // dtype.itemsize
            return rows.new_empty((*rows.shape[:-1], last), dtype=dtype), 0
        return view_as_dtype(rows.contiguous(), dtype), 0


class _Donated(Tensor):
    """A tensor whose memory was moved to another one; its use raises RuntimeError."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor is used that was donated: an update wrote over it; expected what that update returned")

    def __repr__(self, **_: object) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "<a tensor that was donated>"


def take_storage(tensor: Tensor) -> Tensor:
    """Move the tensor's memory to a new tensor; later use of the old one raises RuntimeError. Pinned by ``test_taken_over``."""
    new = tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        tensor.set_()  # pyright: ignore[reportArgumentType, reportCallIssue]
    tensor.__class__ = _Donated
    return new


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor has one storage with strides and is no subclass, as `lazy_clone` needs."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


def memory_range(tensor: Tensor) -> tuple[int, int, int]:
    """Return the storage of a strided tensor that has elements, and where in it, in bytes, they begin and end."""
    begin: Any = tensor.storage_offset()  # an int, or a symbol where shapes are traced
    end = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return storage_id(tensor), begin * tensor.itemsize, end * tensor.itemsize


def has_internal_overlap(tensor: Tensor) -> bool:
    """Return whether indices share an element, as in a tensor that vmap has expanded: it cannot be written to."""
    inner = unwrap(tensor)
    return inner.layout is torch.strided and any(n > 1 and s == 0 for n, s in zip(inner.shape, inner.stride(), strict=True))


def shares_memory(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether neither the tensor nor its `lazy_clone` was passed to a kernel that might write, or to ``data_ptr``."""
    return torch._C._data_address(tensor) == torch._C._data_address(copy)  # pyright: ignore[reportAttributeAccessIssue]


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name, as the functional collectives find it. Pinned by ``test_groups_by_name``."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def backend_name(name: str, device: torch.device) -> str:
    """Return the backend of a group for a device's tensors: "gloo", "nccl", ... Pinned with `resolve_group`."""
    return resolve_group(name)._get_backend(device).name()


def version(tensor: Tensor) -> int:
    """Return how often the tensor was modified in place; 0 for inference tensors, which do not count it."""
    inner = unwrap(tensor) if is_wrapped(tensor) else tensor
    try:
        return inner._version
    except RuntimeError:
        if inner.is_inference():
            return 0
        raise


def make_version_probe(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that shares this one's `version`. Pinned by ``test_counter``."""
    with below_transforms():
        alike = unwrap(tensor).detach()
        alike.data = alike.new_empty(0)
    return alike


def shares_counter(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors count their modifications in place together.

    ``unsafe_chunk``, ``unsafe_split`` (in the cells of GRU and LSTM) and ``.data`` give tensors of the same storage with
    counters of their own. torch has no question for this, so the counter of ``a`` moves by one while that of ``b`` is read.
    Neither is a wrapper or an inference tensor. Pinned by ``test_shares_counter``.
    """
    now = a._version
    if b._version != now:
        return False
    _set_versions((a,), (now + 1,))
    try:
        return b._version == now + 1
    finally:
        _set_versions((a,), (now,))


_set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter  # pyright: ignore


def make_storage_info(file: str, offset: int, length: int) -> Any:
    """Return the location of an item in a checkpoint, in the class that is a part of torch's format. See ``test_stored_at``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # half a second, which only checkpoints need

    return _StorageInfo(file, offset, length)


def save_unchecked(tensor: Tensor, file: Any) -> None:
    """Write as torch.save does, but without its checksums, whose switch is one for all threads: ``test_saved_unchecked``."""
    writer = torch._C.PyTorchFileWriter(file, False, 64)  # pyright: ignore
    torch.serialization._save(tensor, writer, torch.serialization.pickle, 2, False)  # pyright: ignore
    writer.write_end_of_file()


# --- Copies between a device and the host, in streams of their own ---


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has its own memory for values: neither the CPU nor the meta device."""
    return device.type not in ("cpu", "meta")


def allocate_like(
    like: Tensor, device: torch.device, *, dtype: torch.dtype | None = None, beside: torch.device | None = None
) -> Tensor:
    """Return uninitialized memory of a tensor's shape, and by default its dtype, on the device.

    Host memory is pinned if the tensor's device, or the one ``beside``, is an accelerator.
    """
    pinned = device.type == "cpu" and is_accelerator(beside or like.device) and not is_fake(like)
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=device, pin_memory=pinned)


class AsyncCopy:
    """A running copy from the host to a device or back, in a stream of its own.

    It starts after the work that is queued on the device. Both tensors are allocated, used and freed in the computing stream,
    which waits for the copy before that: by `wait`, or at the latest when this object is freed. So no record_stream is needed,
    which frees memory only when the host next looks, and a step's memory is the same each time. The host never waits.
    """

    __slots__ = ("_computes", "_done", "_stream")

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._done: torch.Event | None = None
        self._stream: torch.Stream | None = None
        device = target.device if is_accelerator(target.device) else source.device
        if not is_accelerator(device) or is_fake(source):
            target.copy_(source, non_blocking=True)
            return
        self._computes = torch.accelerator.current_stream(device)
        self._stream = _copy_stream(device, device == target.device)
        self._stream.wait_stream(self._computes)
        with self._stream:
            target.copy_(source, non_blocking=True)
        self._done = self._stream.record_event()

    def queue_behind(self) -> contextlib.AbstractContextManager[object]:
        """Return a context whose work is queued behind the copy, not behind what the device computes."""
        return contextlib.nullcontext() if self._stream is None else self._stream

    def wait(self) -> None:
        """Make the device's later computations wait for the copy."""
        if self._done is None:
            return
        self._computes.wait_event(self._done)
        now = torch.accelerator.current_stream(self._computes.device)
        if now != self._computes:
            now.wait_event(self._done)
        self._done = None

    def __del__(self) -> None:
        if self._done is not None:
            self._computes.wait_event(self._done)


def synchronize_copies(device: torch.device | None = None) -> None:
    """Block the host until copies from this device to the host are complete; without a device, all copies both ways."""
    if device is None:
        for stream in _STREAMS:
            stream.synchronize()
    elif is_accelerator(device):
        _copy_stream(device, False).synchronize()


_STREAMS: list[torch.Stream] = []


@functools.cache
def _copy_stream(device: torch.device, towards: bool) -> torch.Stream:
    """Return the stream of a device for copies in one direction, made at the first call."""
    _STREAMS.append(torch.Stream(device=device))
    return _STREAMS[-1]


def is_pinned(tensor: Tensor) -> bool:
    """Return whether the tensor is in pinned host memory; False in a transform and while operators are recorded."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not (is_wrapped(tensor) or is_fake(tensor) or is_tracing()) and tensor.is_pinned()
