"""accumulate: the gradients of many micro-batches, reduced one by one to slices or all together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._spec.checks import bind_spec
from .._spec.division import ReduceBy
from .._spec.spec import PartitionSpec
from .._transforms.grad import is_differentiated_outside
from .._units.accumulation import drop_unweighted
from .._units.layout import Params
from .in_place import MicrobatchRunner
from .microbatches import check_known, iterate_equally, split_first_batch
from .plan import AccumulationPlan, GradSums
from .weights import are_positive, check_weight_count, make_loss_scales, scale_loss, to_sum_dtype

__all__ = ["accumulate"]


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
    if not plan.full:
        batches = iterate_equally(batches, plan.spec.bound_mesh)
    check_known(known, microbatches, weights)
    in_place = not is_differentiated_outside((params, weights, known))
    scales = None if weights is None else make_loss_scales(weights, plan.params, plan.spec.bound_mesh, plan.reduction)
    plan = dataclasses.replace(plan, in_place=in_place, positive=are_positive(() if weights is None else weights))
    parts = (_accumulate_in_place if plan.in_place else _accumulate_recorded)(f, plan, batches, scales)
    if scales is not None:
        check_weight_count(scales, len(parts.values))
    value = plan.combine_values(parts.values, scales)
    return plan.finish_grads(parts, scales), ((value, parts.auxes) if has_aux else value)


def _accumulate_in_place(
    f: Callable[..., Any], plan: AccumulationPlan, batches: Iterable[Any], scales: Tensor | None
) -> GradSums:
    """Run the micro-batches by plain autograd, which nothing differentiates, and add up gradients in place."""
    runs = MicrobatchRunner(f, plan)
    for i, batch in enumerate(batches):
        runs.backward(runs.forward(batch, i, scales))
    return runs.parts


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
