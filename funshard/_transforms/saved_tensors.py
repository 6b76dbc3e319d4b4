"""What autograd keeps in the place of what it saves: of a gathered weight which view of what it is, else the tensor.

Saved-tensor hooks for the forward of a call, and for those nodes of its backwards that read what was kept so: where
backward records itself, such a node may save it once more.

torch.func.grad ends with a backward that records itself, although nobody can come back to it in that transform any more
(one around it has a record of its own). What its nodes would save there is most of what torch.func.grad holds beyond
plain autograd, and is not kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch

__all__ = ["RestorableBuffer", "SavedTensorHooks", "TensorRestorer", "hook_running_node", "mark_graph_freed", "unpack"]

TensorRestorer = Callable[[], Tensor]
"""Gives the saved tensor."""


class RestorableBuffer(_torch.HasDtype, Protocol):
    """A gathered buffer, of which autograd saves views."""

    def make_restorer(self, tensor: Tensor, *, by_backward: bool) -> TensorRestorer | None:
        """How to have this view of it again; None for one that is to be kept."""
        ...


class SavedTensorHooks:
    """What to keep, of what a forward saves or, ``by_backward``, a node of a backward.

    ``live`` are the gathered buffers that are there, by storage; ``over`` is a level at which nobody reads what is saved.
    """

    def __init__(self, live: dict[int, RestorableBuffer], *, by_backward: bool = False, over: int = 0) -> None:
        self.live, self.by_backward, self.over = live, by_backward, over

    def pack(self, tensor: Tensor) -> TensorRestorer | _torch.Versioned:
        """What to keep in the place of a tensor."""
        if self.over and _torch.level_of(tensor) == self.over:
            return _nothing
        inner = _torch.unwrap(tensor)
        source = _torch.find_viewed_buffer(inner, self.live)
        if source is not None and (note := source.make_restorer(tensor, by_backward=self.by_backward)) is not None:
            return note
        return _torch.pack_versioned(tensor, inner)

    def here(self, pack: Callable[[Tensor], object]) -> contextlib.AbstractContextManager[None]:
        """Within this, what autograd saves goes through ``pack``, which is its own: by that others know it."""
        return _torch.saved_tensor_hooks(pack, unpack)


def unpack(packed: Any) -> Tensor:
    """The tensor again."""
    if not (type(packed) is tuple or isinstance(packed, Tensor)):
        return packed()
    tensor = _torch.unpack_versioned(packed)
    if _torch.is_wrapped(tensor) and _reads_last(level := _torch.level_of(tensor)):
        hook_running_node({}, level)
    return tensor


def hook_running_node(live: Mapping[int, RestorableBuffer], level: int) -> None:
    """Hooks for what the running node of a backward saves from here on, to be called while it reads what was kept.

    ``level`` is that of the transform that made the node.
    """
    over = level if _reads_last(level) else 0
    hooks = getattr(_torch.current_pack_hook(), "__self__", None)
    if isinstance(hooks, SavedTensorHooks) and hooks.by_backward and hooks.over == over:  # it has read before
        hooks.live.update(live)
    else:
        _torch.push_saved_tensor_hooks(SavedTensorHooks(dict(live), by_backward=True, over=over).pack, unpack)


def _reads_last(level: int) -> bool:
    """Whether nobody comes back to what the running node saves at this level."""
    return _torch.is_last_backward(level) and not _torch.in_python_node()


def _nothing() -> Tensor:
    raise _freed()


def mark_graph_freed(of: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients that the last backward of a torch.func.grad gives without a graph, with one that says so. ``of`` has one."""
    return _FreedGraph.apply(of, *grads)


class _FreedGraph(_torch.Function):
    @staticmethod
    def forward(of: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _freed()


def _freed() -> RuntimeError:
    return RuntimeError(
        "the graph of a torch.autograd.grad(..., create_graph=True, retain_graph=False) inside a torch.func.grad was freed: "
        "expected retain_graph=True, or torch.func.grad inside as well"
    )
