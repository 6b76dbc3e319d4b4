"""Micro-batches one after the other by plain autograd, whose gradients are added up as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._spec.accumulation import Arrivals
from .._transforms.explained import explained
from .._transforms.transforms import differentiated_outside, loss_and_aux
from .._units.layout import Params
from .plan import Parts, Plan
from .weights import scaled_by, widest

__all__ = ["Runs", "added"]


class Runs:
    """Runs of a loss on the shards of a plan, and the sums of what they give."""

    def __init__(self, f: Callable[..., Any], plan: Plan) -> None:
        self._f, self.plan = f, plan
        self.parts = Parts()
        with torch.no_grad():
            shards = {key: p.detach() for key, p in plan.params.items()}
            self.given = self._leaves(shards, lambda: self.parts.own)
            self.entered = self._leaves(plan.entered(shards), lambda: self.parts.through)

    def forward(self, batch: Any, i: int, scales: Tensor | None, arrivals: Arrivals | None = None) -> Tensor:
        """The loss of a micro-batch, scaled. Gradients go to the sums, or to ``arrivals`` where a unit's is reduced."""
        if i and differentiated_outside(batch):
            raise ValueError(
                f"accumulate: micro-batch {i} requires grad and the first one does not: expected all of them or none; "
                "give a list"
            )
        with self.plan.within(self.given, self.entered, arrivals or _Sums(self)), torch.enable_grad():
            loss, aux = loss_and_aux(self._f(dict(self.given), batch), self.plan.has_aux)
            self.parts.values.append(loss.detach())
            self.parts.auxes.append(pytree.tree_map_only(Tensor, Tensor.detach, aux))
            return loss if scales is None else scaled_by(loss, scales, i)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """The gradients of a loss, added to the sums."""
        leaves = [*self.given.values(), *self.entered.values()]
        if loss.requires_grad and leaves:
            try:
                loss.backward(inputs=leaves, retain_graph=retain_graph)
            except RuntimeError as error:
                raise explained(error)  # noqa: B904 - the same one

    def _leaves(self, tensors: Params, sums: Callable[[], Params]) -> Params:
        """The tensors for plain autograd, whose gradients are added to the sums as they arrive."""

        def leaf(key: str, x: Tensor) -> Tensor:
            def arrived(x: Tensor) -> None:
                grad, x.grad = x.grad, None
                if grad is not None:
                    added(sums(), key, grad if key in sums() else grad.clone(memory_format=torch.contiguous_format))

            x = x.detach().requires_grad_()
            x.register_post_accumulate_grad_hook(arrived)
            return x

        return {key: leaf(key, x) for key, x in tensors.items()}


class _Sums:
    """Adds up what has been reduced, unit by unit, while the rest of backward runs."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def started(self, key: str) -> None:
        """It is told when it is there."""

    def arrived(self, key: str, grad: Tensor) -> None:
        added(self._runs.parts.through, key, grad)


def added(sums: Params, key: str, grad: Tensor) -> None:
    """Add a gradient to a sum; the first one, which nobody else has, becomes it."""
    if key in sums:
        sums[key].add_(grad)
    else:
        sums[key] = grad.to(widest(grad.dtype))
