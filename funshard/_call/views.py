"""A unit's parameters as views of its gathered buffer, by one node of autograd for all of them; and their gradients' pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from .._spec.unit import Unit
from .._units.layout import insert_padding, to_memory_order, unflatten_unit
from .._units.route import Route

__all__ = ["pieces_of", "views_of"]


class Whole(Protocol):
    """A unit whose buffer is there."""

    unit: Unit
    shard: Tensor

    @property
    def buffer(self) -> Tensor:
        """The buffer, or the shard itself where that is it."""
        ...

    def reduced(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of the shard from those of the parameters; None where it goes another way."""
        ...


def views_of(whole: Whole, shard: Tensor) -> Sequence[Tensor]:
    """The unit's parameters; what they are differentiated by goes to this shard."""
    if torch.is_grad_enabled() and shard.requires_grad:
        return _Parameters.apply(shard, whole)
    return unflatten_unit(whole.buffer, whole.unit)


class _Parameters(_torch.LevelFunction):
    @staticmethod
    def forward(shard: Tensor, whole: Whole) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        buffer, level = whole.buffer, _torch.current_level()
        if not level:
            return tuple(unflatten_unit(shard if buffer is whole.shard else buffer, whole.unit))
        with _torch.below_transforms():
            views = unflatten_unit(buffer, whole.unit)
        return tuple(_torch.wrap_at_level(view, level) for view in views)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.whole = inputs[1]  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.whole.reduced(grads), None


def pieces_of(unit: Unit, grads: Sequence[Tensor | None], route: Route, like: Tensor, zeros: Tensor) -> list[Tensor]:
    """What to join to the gradient of a unit's buffer."""
    pieces = [
        like.new_zeros(param.numel, dtype=route.dtypes.param, device=route.device)
        if grad is None
        else to_memory_order(grad, param).contiguous()
        for grad, param in zip(grads, unit.params, strict=True)
    ]
    return insert_padding(pieces, unit, route.padded_numel, zeros)
