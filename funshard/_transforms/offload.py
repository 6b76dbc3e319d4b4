"""offload: a function whose saved tensors rest on the host until backward.

Saved-tensor hooks around the function: what autograd saves is copied out, and comes back a load ahead (rests.py). What stays
is what would not give back memory, or has a way of its own: `Moving.moves`.
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
    """What rests where: of tensors of ``at_least`` so many bytes, in loads of ``load`` bytes or of one run."""

    at_least: int = 1 << 20
    load: float = math.inf
    host: torch.device | None = None

    def moves(self, device: torch.device) -> bool:
        """Whether what is on this device goes to the host: all of it where one is named."""
        return _torch.is_accelerator(device) if self.host is None else True


def offload(
    f: Callable[Args, Result], *, at_least: int = 1 << 20, load: int = 1 << 26, host: torch.device | str | None = None
) -> Callable[Args, Result]:
    """``f``, but what autograd saves in it rests in host memory until backward: equal to ``f`` in everything but memory.

    ``P(offload="activations")`` is this for the module of a unit. From an accelerator to pinned memory and back without that
    anything waits: what ``f`` saves leaves while the next load is saved, and starts to come back when backward comes to the
    load after it. A load is what one call of an offloaded function saves, or ``load`` bytes of it (and the tensor that reaches
    that), or what one unit saves. So two loads at most are on the device, of however many, and the last of a forward stays::

        forward   load k-1 leaves, load k is saved         peak: 2 loads, and what one computes with
        backward  load k is read, load k-1 comes back      peak: the same

    What stays on the device: what is smaller than ``at_least`` bytes; parameters, the leaves that are differentiated, arguments
    that nobody differentiates, and views of all of these, which the caller holds; gathered weights, which functional_call
    gathers again. A storage is copied once, however many views of it are saved: the whole of it where a view spans half of it
    or more, else that span.

    It holds under plain autograd, its double backward and a second backward (what was saved comes back each time), and under
    one torch.func.grad or vjp. In deeper stacks of transforms, under vmap and in forward mode memory stays as it is, as does
    what a torch.utils.checkpoint, or another's saved-tensor hooks, around it keep: values are the same at every order. Inside
    torch.compile it is ``f``: the compiler decides. Where the device is the host it is ``f`` too, unless a ``host`` is named
    (``"cpu"``, or any device): then all goes there, which is how to try it without an accelerator.

    Around a `remat`, what rests on the host are that one's arguments, and its insides run again. Inside of one, nothing is
    saved at first, and what its second run saves rests on the host until it is read.

    >>> import torch, funshard as fs
    >>> f = fs.offload(lambda x: x.sin().exp().sum(), at_least=0, host="cpu")
    >>> torch.func.grad(f)(torch.zeros(3))
    tensor([1., 1., 1.])

    Raises RuntimeError where a tensor that was saved has since been changed in place, as autograd does, and where ``f`` itself
    begins a torch.func transform, which torch refuses where saved tensors are replaced: put offload inside of that. ValueError
    or TypeError for sizes that are none.
    """
    for name, value in (("at_least", at_least), ("load", load)):
        if not isinstance(value, int) or isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"offload: {name}: expected a whole number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"offload: {name}: expected at least 0 bytes, got {value}")
    to = OffloadTarget(at_least, load, None if host is None else torch.device(host))

    @functools.wraps(f)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if torch.compiler.is_compiling() or not can_offload():
            return f(*args, **kwargs)
        around = find_offload_hooks(_torch.current_pack_hook())
        module = f if isinstance(f, nn.Module) else getattr(f, "__self__", None)
        own = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
        held = (*(around.held if around else ()), storage_ids(own), constant_storages(args, kwargs))
        hooks = OffloadHooks(around.live if around else {}, to, held, over=around.over if around else 0)
        with hooks.here(hooks.pack):
            return f(*args, **kwargs)

    return run


def can_offload() -> bool:
    """Whether what autograd saves from here on can be replaced by us, in this transform and inside of what is around."""
    if not _torch.can_replace_saved_tensors() or not _torch.needs_graph() or _torch.is_traced():
        return False
    outer = _torch.current_pack_hook()
    return outer is None or isinstance(getattr(outer, "__self__", None), SavedTensorHooks)


def find_offload_hooks(pack: Callable[..., object] | None) -> OffloadHooks | None:
    """Whose pack function it is, if what is saved moves."""
    hooks = getattr(pack, "__self__", None)
    return hooks if isinstance(hooks, OffloadHooks) else None


def constant_storages(args: Any, kwargs: Any) -> set[int]:
    """The storages of the arguments that nobody differentiates, which whoever calls holds."""
    return storage_ids(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad)


def storage_ids(tensors: Iterable[Tensor]) -> set[int]:
    """What these tensors hold."""
    inner = (_torch.unwrap(x) for x in tensors)
    return {_torch.storage_id(x) for x in inner if isinstance(x, nn.Parameter) or _plain(x)}


def _plain(x: Tensor) -> bool:
    """Whether a flat copy of its storage has all that it is."""
    x = _torch.unwrap(x)
    strided = (type(x) is Tensor or _torch.is_fake(x)) and x.layout is torch.strided
    return strided and not (x.is_conj() or x.is_neg() or x.is_quantized)


class OffloadHooks(SavedTensorHooks):
    """Hooks by which what is saved, and is not replaced anyway, rests on the host."""

    def __init__(
        self, live: dict[int, RestorableBuffer], to: OffloadTarget, held: Iterable[set[int]], *, over: int = 0
    ) -> None:
        super().__init__(live, over=over)
        self.to, self.held, self._level = to, tuple(held), _torch.current_level()
        self._witness: Tensor | None = None
        if self._level:
            with _torch.below_transforms():
                empty = torch.empty(0)
            self._witness = _torch.wrap_at_level(empty, self._level)

    def pack(self, tensor: Tensor) -> TensorRestorer | _torch.Versioned:
        """What to keep in the place of a tensor."""
        packed = super().pack(tensor)
        if not (type(packed) is tuple or isinstance(packed, Tensor)) or not self.moves(tensor):
            return packed
        inner = _torch.unwrap(tensor)
        start, stop = _span(inner)
        whole = inner.untyped_storage().nbytes() // inner.itemsize
        if 2 * (stop - start) >= whole:
            start, stop = 0, whole
        rest, load = current_queue().add(inner, start, stop, self.to.host or torch.device("cpu"), self.to.load)
        witness = self._witness if _torch.level_of(tensor) else None
        where = tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start
        return OffloadedTensor(rest, load, tensor.dtype, *where, rest.counter, rest.version, witness)

    def moves(self, tensor: Tensor) -> bool:
        """Whether a saved tensor is to rest on the host, see `offload`."""
        if not _plain(tensor) or _torch.in_forward_ad():
            return False
        inner = _torch.unwrap(tensor)
        if not self.to.moves(inner.device) or any(_torch.storage_id(inner) in held for held in self.held):
            return False
        start, stop = _span(inner)
        if (stop - start) * inner.itemsize < max(self.to.at_least, 1):
            return False
        if self._level and (inner.requires_grad or _torch.current_level() > self._level):  # a derivative below follows it
            return False
        return _torch.level_of(tensor) in (0, self._level) and not _torch.is_batched(tensor) and not _torch.is_leaf_view(tensor)

    @contextlib.contextmanager
    def here(self, pack: Callable[[Tensor], object]) -> Generator[None]:
        """The same; what is saved is one load of its own, or several."""
        current_queue().complete()
        try:
            with _torch.saved_tensor_hooks(pack, unpack, who=_WHO):
                yield
        finally:
            current_queue().complete()


_WHO = "offload: what is offloaded", "none inside of it; offload what is inside of the transform"


def _span(x: Tensor) -> tuple[int, int]:
    """The first element of its storage that a tensor sees, and the one after the last."""
    start = int(x.storage_offset())
    if not x.numel():
        return start, start
    return start, start + 1 + sum((int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True))
