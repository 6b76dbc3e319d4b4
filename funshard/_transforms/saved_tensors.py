"""Saved-tensor hooks: what autograd keeps instead of the tensors it saves, such as which view of which gathered unit one is.

The hooks are around the forward of a call, and around those nodes of its backwards that read what was kept so, and may save it
again. torch.func.grad ends with a backward that records a graph, although nothing can differentiate it in that transform any
more. Tensors that its nodes save are most of what torch.func.grad holds beyond plain autograd: these hooks drop them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from .. import _torch

TensorRestorer = Callable[[], Tensor]
"""Returns the saved tensor."""


class RestorableBuffer(Protocol):
    """A gathered buffer whose views autograd saves, and which can be gathered again."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the buffer's views."""
        ...

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> TensorRestorer | None:
        """Return how to get this view of the buffer again; None to keep the tensor itself."""
        ...


class SavedTensorHooks:
    """The choice of what to keep of the tensors that a forward saves or, ``by_backward``, a node of a backward.

    ``restorable`` are the gathered buffers by storage. At the level ``over`` nothing reads what is saved.
    """

    def __init__(self, restorable: dict[int, RestorableBuffer], *, by_backward: bool = False, over: int = 0) -> None:
        self.restorable, self.by_backward, self.over = restorable, by_backward, over

    def pack(self, tensor: Tensor) -> TensorRestorer | _torch.Versioned:
        """Return what to keep instead of a tensor."""
        inner = tensor
        if _torch.is_wrapped(tensor):
            if self.over and _torch.level_of(tensor) == self.over:
                return _raise_freed
            inner = _torch.unwrap(tensor)
        if self.restorable and type(inner) in _torch.PLAIN_TYPES and inner.layout is torch.strided:
            buffer = self.restorable.get(_torch.storage_id(inner))
            # a view by shape, strides and offset alone
            if buffer is not None and inner.dtype in buffer.dtypes and not (inner.is_conj() or inner.is_neg()):
                restorer = buffer.make_restorer(tensor, by_backward=self.by_backward)
                if restorer is not None:
                    return restorer
        return _torch.pack_versioned(tensor, inner)

    def activate(self, pack: Callable[[Tensor], object]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which autograd saves through ``pack``, a bound method by which others find these hooks."""
        return _torch.saved_tensor_hooks(pack, unpack)


def unpack(packed: Any) -> Tensor:
    """Return the tensor that was saved."""
    if (kind := type(packed)) is not Tensor and kind is not tuple and not isinstance(packed, Tensor):
        return packed()
    tensor = _torch.unpack_versioned(packed)
    if kind is tuple and _torch.is_wrapped(tensor) and _is_last_reader(level := _torch.level_of(tensor)):
        hook_running_node({}, level)
    return tensor


def hook_running_node(restorable: Mapping[int, RestorableBuffer], level: int) -> None:
    """Push hooks for what the running node of a backward saves from now on; called while it reads what was kept.

    ``level`` is that of the transform that made the node.
    """
    over = level if _is_last_reader(level) else 0
    hooks = getattr(_torch.current_pack_hook(), "__self__", None)
    if isinstance(hooks, SavedTensorHooks) and hooks.by_backward and hooks.over == over:  # it has read before
        hooks.restorable.update(restorable)
    else:
        _torch.push_saved_tensor_hooks(SavedTensorHooks(dict(restorable), by_backward=True, over=over).pack, unpack)


def _is_last_reader(level: int) -> bool:
    """Return whether nothing will read what the running node saves at this level."""
    return _torch.is_last_backward(level) and not _torch.is_in_python_node()


_GRAPH_FREED = (
    "the graph of a torch.autograd.grad(..., create_graph=True, retain_graph=False) inside a torch.func.grad was freed: "
    "expected retain_graph=True, or torch.func.grad inside as well"
)


def _raise_freed() -> Any:
    raise RuntimeError(_GRAPH_FREED)


def mark_graph_freed(like: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Give gradients of the last backward of a torch.func.grad a graph like that of ``like``, which raises if it is used."""
    return BeginGraph.apply(_GRAPH_FREED, like, *grads)[1:]


class BeginGraph(_torch.Function):
    """Tensors whose graph begins here: it answers queries, and its backward raises a RuntimeError with this message."""

    @staticmethod
    def forward(message: str, *xs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(x.detach() for x in xs)  # no views, which torch lets no one change in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(ctx.message)
