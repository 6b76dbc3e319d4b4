"""accumulate: the gradients of many micro-batches, reduced one by one to slices or all together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from .. import _torch
from .._core.checks import bind_spec
from .._core.division import ReduceBy
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._transforms.error_hints import add_hints
from .._transforms.grad import check_recorded, is_differentiated_outside
from .._units.accumulation import Accumulation, GradReceiver, drop_unweighted
from .microbatches import (
    are_positive,
    check_weight_count,
    iterate_equally,
    make_loss_scales,
    scale_loss,
    split_first_batch,
    sum_dtype,
    to_sum_dtype,
)
from .plan import AccumulationPlan, GradSums

__all__ = ["MicrobatchRunner", "accumulate", "add_grad", "replacement_key", "start_batches"]


# --- Micro-batches one after the other by plain autograd; gradients are added up as they arrive ---


class MicrobatchRunner:
    """The runs of a loss, by its factors, on the shards of a plan, and the sums of their values and gradients."""

    def __init__(self, f: Callable[..., Any], plan: AccumulationPlan, scales: Tensor | None) -> None:
        self._f, self.plan, self.scales = f, plan, scales
        self._within: Accumulation | None = None
        self.sums = _SumReceiver()
        check_recorded("accumulate or update_in_backward", plan.params)
        with torch.no_grad():
            shards = {key: p.detach() for key, p in plan.params.items()}
            entered = plan.make_replacements(shards)
        self.given = {key: _make_leaf(x, self.sums, key) for key, x in shards.items()}
        with torch.enable_grad():  # known to come from the shards, for a backward inside of the loss
            any_ = next(iter(self.given.values()), None)
            self.entered = {k: _Replacement.apply(self.given.get(k, any_), x, self.sums, k) for k, x in entered.items()}

    def forward(self, batch: Any, receiver: GradReceiver | None = None, *, retains_graph: bool = False) -> Tensor:
        """Return the scaled loss of the next micro-batch.

        Reduced gradients go to ``receiver``, or else to the sums. With ``retains_graph`` backward runs more than once.
        """
        i = len(self.sums.parts.values)
        if i and is_differentiated_outside(batch):
            raise ValueError(
                f"accumulate: micro-batch {i} requires grad and the first one does not: expected all of them or none; "
                "give a list"
            )
        weight = self.plan.possible_zero(self.scales, i)
        self.sums.weight = weight if self.plan.full else None  # what is reduced has parts of other ranks
        within = self.plan.make_context(self.given, self.entered, weight, receiver or self.sums, retains_graph=retains_graph)
        with within, torch.enable_grad():
            self.sums.in_loss = True
            loss, aux = self.plan.run_loss(self._f, self.given, batch)
            self.sums.in_loss = False
            self.sums.parts.values.append(loss.detach())
            self.sums.parts.auxes.append(pytree.tree_map_only(Tensor, Tensor.detach, aux))
            loss = loss if self.scales is None else scale_loss(loss, self.scales, i)
        self._within = within  # only now: after an error in the loss no backward would end this cycle
        return loss

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of the loss that `forward` returned last to the sums."""
        within, self._within = self._within, None  # it knows the receiver, which knows this object
        assert within is not None
        if loss.requires_grad and self.given:
            try:
                with within:  # for what remat and torch.utils.checkpoint run again
                    loss.backward(inputs=[*self.given.values()], retain_graph=retain_graph)
            except RuntimeError as error:
                raise add_hints(error)  # noqa: B904 - the same one
        if retain_graph:
            self._within = within


class _SumReceiver(GradReceiver):
    """The sums of gradients that have been reduced, unit by unit, while the rest of backward runs."""

    def __init__(self) -> None:
        self.parts = GradSums()
        self.in_loss = False
        self.weight: Tensor | None = None  # of full gradients, if it may be 0

    def check(self, key: str) -> None:
        """Raise RuntimeError for a gradient that arrives while the loss runs: it would be counted twice."""
        if self.in_loss:
            raise RuntimeError(
                f"'{key}': accumulate: backward inside of the loss, whose gradients would be added to those of the loss: "
                "expected a gradient as a value; take it by fs.grad"
            )

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


# --- accumulate ---


def accumulate(
    f: Callable[..., Any],
    params: Mapping[str, Tensor],
    microbatches: Iterable[Any],
    *,
    spec: PartitionSpec,
    keep: Literal["shards", "full"] = "shards",
    weights: Sequence[float | Tensor] | None = None,
    has_aux: bool = False,
    reduce: ReduceBy = "mean",
    reduce_axes: Iterable[str] | None = None,
) -> tuple[Params, Any]:
    """Compute the gradients and the value of the mean of ``f(params, microbatch)`` over all micro-batches and ranks.

    Equal to `grad_and_value` of that mean, at every order, in the memory of one micro-batch and a sum of gradients.
    See ``examples/guide/recipes.md``, "Accumulation", for when gradients are reduced.

    Args:
        f: Returns the scalar loss of a micro-batch, or ``(loss, aux)``, by `functional_call` with this spec.
        params: Shards, some or all (`partition`).
        microbatches: A list or generator. With "shards" all ranks need equally many, which they compare, and
            `pad_microbatches` gives; with "full" each rank's mean is over its own.
        spec: The spec of the shards.
        keep: "shards" reduces each micro-batch in its backward and adds up slices, in float32 at least. "full" gathers and
            reduces each unit once, with all full parameters and gradients in memory (``no_sync``).
        weights: A number or scalar tensor for each micro-batch, such as its number of tokens, for the mean by weight:
            ``sum_ri w_ri g_ri / sum_ri w_ri``. A micro-batch of weight 0 adds neither value nor gradient, even NaN, as of a
            mean over none. An invalid weight that the host cannot read without waiting makes every result NaN.
        has_aux: Whether ``f`` returns ``(loss, aux)``, whose aux is a tree: an object may hold detached tensors alone.
        reduce: "mean" or "sum" over the micro-batches of all ranks, or a divisor of that sum; not in `functional_call`.
        reduce_axes: The mesh axes to reduce over, as in `functional_call`, and not there.

    Returns:
        ``(grads, value)``, or ``(grads, (value, auxes))``: gradients in the shards' shapes and dtypes, this rank's own
        value, reduced alike, and a list.

    Raises:
        ValueError, TypeError: For arguments that do not fit the spec or each other, other numbers of micro-batches on other
            ranks, weights that are negative or not finite, a functional_call of these shards with another spec or its own
            reduction, and as `grad_and_value`.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> loss = lambda params, x: fs.functional_call(model, params, x, spec=spec).sum()
        >>> microbatches = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]]).unbind()
        >>> fs.accumulate(loss, fs.shard(model, spec), microbatches, spec=spec)[0][""][:2]
        tensor([2., 4.])
    """
    plan = AccumulationPlan.make(params, bind_spec(spec), keep, has_aux, reduce, reduce_axes)
    batches, known = split_first_batch(microbatches)
    plan = dataclasses.replace(plan, in_place=not is_differentiated_outside((params, weights, known)))
    plan, batches, scales = start_batches(plan, batches, known, weights)
    parts = (_accumulate_in_place if plan.in_place else _accumulate_recorded)(f, plan, batches, scales)
    if scales is not None:
        check_weight_count(scales, len(parts.values))
    value = plan.combine_values(parts.values, scales)
    return plan.finish_grads(parts, scales), ((value, parts.auxes) if has_aux else value)


def start_batches(
    plan: AccumulationPlan, batches: Iterable[Any], known: Sequence[Any], weights: Sequence[float | Tensor] | None
) -> tuple[AccumulationPlan, Iterator[Any], Tensor | None]:
    """Return the plan with what is known of the weights, the micro-batches as `iterate_equally`, and their losses' factors."""
    mesh = plan.spec.bound_mesh
    equal = iterate_equally(batches, mesh, weights, full=plan.full)
    if not known:
        raise ValueError("accumulate: expected one micro-batch at least, got none")
    if weights is None:
        return plan, equal, None
    if known is batches:  # a list
        check_weight_count(weights, len(known))
    scales = make_loss_scales(weights, plan.params, mesh, plan.reduction)
    return dataclasses.replace(plan, positive=are_positive(weights)), equal, scales


def _accumulate_in_place(
    f: Callable[..., Any], plan: AccumulationPlan, batches: Iterable[Any], scales: Tensor | None
) -> GradSums:
    """Run the micro-batches by plain autograd, which nothing differentiates, and add up gradients in place."""
    runs = MicrobatchRunner(f, plan, scales)
    for batch in batches:
        runs.backward(runs.forward(batch))
    return runs.sums.parts


def _accumulate_recorded(
    f: Callable[..., Any], plan: AccumulationPlan, batches: Iterable[Any], scales: Tensor | None
) -> GradSums:
    """Run the micro-batches as data flow, which transforms can differentiate, batch or record."""

    def one(given: Params, entered: Params, batch: Any, i: int) -> tuple[Tensor, tuple[Any, ...]]:
        with plan.make_context(given, entered, weight):
            loss, aux = plan.run_loss(f, given, batch)
        return (loss if scales is None else scale_loss(loss, scales, i)), ((loss, aux) if plan.has_aux else (loss,))

    parts, entered = GradSums(), plan.make_replacements(plan.params)
    for i, batch in enumerate(batches):
        weight = plan.possible_zero(scales, i)
        grads, (_, (value, *aux)) = torch.func.grad_and_value(one, (0, 1), has_aux=True)(plan.params, entered, batch, i)
        if plan.full:
            grads = grads[0], {name: drop_unweighted(grad, weight) for name, grad in grads[1].items()}
        for sums, new in zip((parts.own, parts.through), grads, strict=True):
            sums |= {key: sums[key] + to_sum_dtype(grad) if key in sums else to_sum_dtype(grad) for key, grad in new.items()}
        parts.values.append(value)
        parts.auxes.extend(aux)
    return parts
