"""offload: a function whose saved tensors are in host memory until backward.

Saved-tensor hooks around the function copy out what autograd saves, and fetch it a batch ahead (host_buffers.py). A tensor
stays on the device if moving it would free no memory, or if it is restored in another way: `OffloadHooks.is_moved`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import _torch
from .host_buffers import OffloadedTensor, current_queue
from .saved_tensors import RestorableBuffer, SavedTensorHooks, TensorRestorer, unpack

__all__ = ["OffloadHooks", "OffloadTarget", "can_offload", "constant_storages", "find_offload_hooks", "offload", "storage_ids"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(frozen=True)
class OffloadTarget:
    """The tensors that move: those of at least ``at_least`` bytes, in batches of ``batch_bytes`` or of one run."""

    at_least: int = 1 << 20
    batch_bytes: float = math.inf
    host: torch.device | None = None

    def is_source(self, device: torch.device) -> bool:
        """Return whether tensors of this device move: of any device if a host is named."""
        return _torch.is_accelerator(device) if self.host is None else True


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
        if torch.compiler.is_compiling() or not can_offload():
            return f(*args, **kwargs)
        outer = find_offload_hooks(_torch.current_pack_hook())
        module = f if isinstance(f, nn.Module) else getattr(f, "__self__", None)
        own = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
        held = (*(outer.held if outer else ()), storage_ids(own), constant_storages(args, kwargs))
        hooks = OffloadHooks(outer.live if outer else {}, target, held, over=outer.over if outer else 0)
        with hooks.activate(hooks.pack):
            return f(*args, **kwargs)

    return run


def can_offload() -> bool:
    """Return whether hooks of this library can replace what autograd saves, in this transform and inside those around it."""
    if not _torch.can_replace_saved_tensors() or not _torch.needs_graph() or _torch.is_traced():
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
        self, live: dict[int, RestorableBuffer], target: OffloadTarget, held: Iterable[set[int]], *, over: int = 0
    ) -> None:
        super().__init__(live, over=over)
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
        buffer, batch = current_queue().add(inner, start, stop, host, self.target.batch_bytes)
        witness = self._witness if _torch.level_of(tensor) else None
        where = tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start
        return OffloadedTensor(buffer, batch, tensor.dtype, *where, buffer.counter, buffer.version, witness)

    def is_moved(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor moves to the host, see `offload`."""
        if not _is_flat_copyable(tensor) or _torch.is_in_forward_ad():
            return False
        inner = _torch.unwrap(tensor)
        if not self.target.is_source(inner.device) or any(_torch.storage_id(inner) in held for held in self.held):
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
        current_queue().close_batch()
        try:
            with _torch.saved_tensor_hooks(pack, unpack, who=_WHO):
                yield
        finally:
            current_queue().close_batch()


_WHO = "offload: what is offloaded", "none inside of it; offload what is inside of the transform"


def _storage_span(x: Tensor) -> tuple[int, int]:
    """Return the first element of its storage that a tensor views, and the one after the last."""
    start = int(x.storage_offset())
    if not x.numel():
        return start, start
    return start, start + 1 + sum((int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True))
