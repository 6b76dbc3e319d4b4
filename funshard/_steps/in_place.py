"""Micro-batches one after the other by plain autograd; gradients are added up as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from .. import _torch
from .._transforms.error_hints import add_hints
from .._transforms.grad import check_recorded, is_differentiated_outside
from .._units.accumulation import Accumulation, GradReceiver, drop_unweighted
from .._units.layout import Params
from .plan import AccumulationPlan, GradSums
from .weights import scale_loss, sum_dtype

__all__ = ["MicrobatchRunner", "add_grad", "replacement_key"]


class MicrobatchRunner:
    """The runs of a loss on the shards of a plan, and the sums of their values and gradients."""

    def __init__(self, f: Callable[..., Any], plan: AccumulationPlan) -> None:
        self._f, self.plan = f, plan
        self._within: Accumulation | None = None
        self._sums = _SumReceiver()
        check_recorded("accumulate or update_in_backward", plan.params)
        with torch.no_grad():
            shards = {key: p.detach() for key, p in plan.params.items()}
            entered = plan.make_replacements(shards)
        self.given = {key: _make_leaf(x, self._sums, key) for key, x in shards.items()}
        with torch.enable_grad():  # known to come from the shards, for a backward inside of the loss
            any_ = next(iter(self.given.values()), None)
            self.entered = {k: _Replacement.apply(self.given.get(k, any_), x, self._sums, k) for k, x in entered.items()}

    @property
    def parts(self) -> GradSums:
        """The sums of gradients, and the values so far."""
        return self._sums.parts

    @parts.setter
    def parts(self, parts: GradSums) -> None:
        self._sums.parts = parts

    def forward(
        self, batch: Any, i: int, scales: Tensor | None, receiver: GradReceiver | None = None, *, retains_graph: bool = False
    ) -> Tensor:
        """Return the scaled loss of a micro-batch.

        Reduced gradients go to ``receiver``, or else to the sums. With ``retains_graph`` backward runs more than once.
        """
        if i and is_differentiated_outside(batch):
            raise ValueError(
                f"accumulate: micro-batch {i} requires grad and the first one does not: expected all of them or none; "
                "give a list"
            )
        weight = self.plan.possible_zero(scales, i)
        self._sums.weight = weight if self.plan.full else None  # what is reduced has parts of other ranks
        within = self.plan.make_context(self.given, self.entered, weight, receiver or self._sums, retains_graph=retains_graph)
        with within, torch.enable_grad():
            self._sums.in_loss = True
            loss, aux = self.plan.run_loss(self._f, self.given, batch)
            self._sums.in_loss = False
            self.parts.values.append(loss.detach())
            self.parts.auxes.append(pytree.tree_map_only(Tensor, Tensor.detach, aux))
            loss = loss if scales is None else scale_loss(loss, scales, i)
        self._within = within  # only now: after an error in the loss no backward would end this cycle
        return loss

    def check(self, key: str) -> None:
        """Raise RuntimeError for a gradient that arrives while the loss runs: it would be counted twice."""
        self._sums.check(key)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of the loss that `forward` returned last to the sums."""
        within, self._within = self._within, None  # it knows the receiver, which knows this object
        assert within is not None
        leaves = [*self.given.values()]
        if loss.requires_grad and leaves:
            try:
                with within:  # for what remat and torch.utils.checkpoint run again
                    loss.backward(inputs=leaves, retain_graph=retain_graph)
            except RuntimeError as error:
                raise add_hints(error)  # noqa: B904 - the same one
        if retain_graph:
            self._within = within


class _SumReceiver:
    """The sums of gradients that have been reduced, unit by unit, while the rest of backward runs."""

    def __init__(self) -> None:
        self.parts = GradSums()
        self.in_loss = False
        self.weight: Tensor | None = None  # of full gradients, if it may be 0

    def check(self, key: str) -> None:
        """Raise RuntimeError for a gradient that arrives while the loss runs, as `MicrobatchRunner.check` says."""
        if self.in_loss:
            raise RuntimeError(
                f"'{key}': accumulate: backward inside of the loss, whose gradients would be added to those of the loss: "
                "expected a gradient as a value; take it by fs.grad"
            )

    def expect(self, key: str) -> None:
        """Do nothing: `receive` takes the gradient."""

    def cancel(self, key: str) -> None:
        """Do nothing: `receive` takes the gradient."""

    def receive(self, key: str, grad: Tensor) -> None:
        """Add part of a unit's gradient."""
        self.check(key)
        add_grad(self.parts.through, key, grad)


def _make_leaf(x: Tensor, sums: _SumReceiver, key: str) -> Tensor:
    """Return a leaf of a shard's values. Its gradients are added to the sums as they arrive."""

    def take_grad(x: Tensor) -> None:
        grad, x.grad = x.grad, None
        if grad is not None:
            sums.check(key)
            add_grad(sums.parts.own, key, grad, owned=False)

    x = x.detach().requires_grad_()
    x.register_post_accumulate_grad_hook(take_grad)
    return x


class _Replacement(_torch.Function):
    """A tensor that functional_call uses instead of a shard. Its gradient is added to the sums and goes no further."""

    @staticmethod
    def forward(shard: Tensor, value: Tensor, sums: _SumReceiver, key: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.data  # no view: Dynamo could not make one of it that is a Function's result

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, ctx.sums, ctx.key = inputs  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sums.check(ctx.key)
        if grad is not None:
            with torch.no_grad():
                add_grad(ctx.sums.parts.through, ctx.key, drop_unweighted(grad, ctx.sums.weight), owned=False)
        return None, None, None, None


def replacement_key(node: object) -> str | None:
    """Return the key of the replacement that this node of a graph made, None for other nodes."""
    return cast("Any", node).key if isinstance(getattr(node, "sums", None), _SumReceiver) else None


def add_grad(sums: Params, key: str, grad: Tensor, *, owned: bool = True) -> None:
    """Add a gradient to the unit's sum, in float32 or wider. The first becomes the sum, unless it is cast or not ``owned``."""
    if key in sums:
        sums[key].add_(grad)
    else:
        grad = grad if owned else grad.clone(memory_format=torch.contiguous_format)
        sums[key] = grad.to(sum_dtype(grad.dtype))
