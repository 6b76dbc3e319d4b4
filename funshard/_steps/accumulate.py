"""accumulate: the gradients of many micro-batches, reduced one by one to slices or all together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._spec.division import ReduceBy
from .._spec.spec import PartitionSpec, bind_spec
from .._transforms.grad import is_differentiated_outside
from .._units.layout import Params
from .in_place import MicrobatchRunner
from .plan import AccumulationPlan, GradSums
from .weights import check_weight_count, make_loss_scales, scale_loss, to_sum_dtype

__all__ = ["accumulate", "split_first_batch"]


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
    """``(grads, value)``, or ``(grads, (value, auxes))``: those of the mean of ``f(params, microbatch)``, one after the other.

    Equal to `grad_and_value` of that mean, at every order, in the memory of one micro-batch and a sum of gradients.
    ``params`` are shards, some or all of them (`partition`, and close over the rest), and ``f`` gives the loss of one
    micro-batch of this rank, or ``(loss, aux)``, by `functional_call` with this spec. ``auxes`` is a list.

    With ``keep="shards"`` each micro-batch is reduced as its backward runs, and slices are added up, in float32 at least; on
    a mesh ("replicate", "shard") over the axes that a unit is split over, and over the others once, at the end. With
    ``keep="full"`` each unit is gathered once and reduced once for all micro-batches, and all full parameters and
    gradients are alive: ``no_sync``. Gradients are reduced in the dtype that the unit's `Precision` says, and come in the
    shards' own. A functional_call of other parameters than those that ``f`` is given, as of what it computes from them,
    or inside of `remat`, gathers and reduces for itself over all axes. Under another transform, or in torch.compile, "shards"
    reduces each micro-batch over all axes.

    ``weights`` are how much each micro-batch counts, such as its number of tokens: numbers, or scalar tensors. Then all is
    the mean by weight over the micro-batches of all ranks, ``sum_ri w_ri g_ri / sum_ri w_ri`` (one all-reduce of a scalar
    for each axis), and ``value`` is that of this rank's own. A loss of weight 0 counts for nothing, NaN neither, as
    cross_entropy's where all is ignored; but do not divide by 0 in it, which makes NaN of a gradient of 0. A weight that is
    negative or not finite is a ValueError; where the host cannot read it without waiting, everything is NaN.

    ``reduce`` is "mean", or "sum", of all micro-batches of all ranks, or what to divide that sum by; ``value`` is this
    rank's mean or sum, divided likewise. ``reduce_axes`` are the mesh axes to reduce over, as in `functional_call`. Both are
    said here and not there. ``microbatches`` may be a generator. With "shards" all ranks must have as many of them, or they
    wait for each other for ever; with "full" they need not: a rank's mean is of its own, and with weights all count alike.

    >>> import torch, funshard as fs
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> spec = fs.policies.whole()(model)
    >>> loss = lambda params, x: fs.functional_call(model, params, x, spec=spec).sum()
    >>> fs.accumulate(loss, fs.shard(model, spec), torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]]).unbind(), spec=spec)[0][""][:2]
    tensor([2., 4.])

    Raises ValueError or TypeError for params that are not shards of the spec, no micro-batch, another number of
    weights or negative ones, axes that do not fit, a functional_call of these shards with another spec or with a reduction
    of its own, and what `grad_and_value` raises.
    """
    plan = AccumulationPlan.make(params, bind_spec(spec), keep, has_aux, reduce, reduce_axes)
    batches, known = split_first_batch(microbatches)
    if weights is not None and known is microbatches:
        check_weight_count(weights, len(known))
    plan = dataclasses.replace(plan, in_place=not is_differentiated_outside((params, weights, known)))
    scales = None if weights is None else make_loss_scales(weights, plan.params, plan.spec.bound_mesh, plan.reduction)
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
        with plan.make_context(given, entered):
            loss, aux = plan.run_loss(f, given, batch)
        return (loss if scales is None else scale_loss(loss, scales, i)), ((loss, aux) if plan.has_aux else (loss,))

    parts, entered = GradSums(), plan.make_replacements(plan.params)
    for i, batch in enumerate(batches):
        grads, (_, (value, *aux)) = torch.func.grad_and_value(one, (0, 1), has_aux=True)(plan.params, entered, batch, i)
        for sums, new in zip((parts.own, parts.through), grads, strict=True):
            sums |= {key: sums[key] + to_sum_dtype(grad) if key in sums else to_sum_dtype(grad) for key, grad in new.items()}
        parts.values.append(value)
        parts.auxes.extend(aux)
    return parts


def split_first_batch(microbatches: Iterable[Any]) -> tuple[Iterable[Any], Any]:
    """Return the micro-batches, and those known before the first one runs: all of a list, the first of a generator."""
    if isinstance(microbatches, list | tuple):
        first: Any = microbatches
        rest: Iterable[Any] = ()
    elif isinstance(microbatches, Tensor | Mapping) or not hasattr(microbatches, "__iter__"):
        raise TypeError(f"accumulate: expected a list of micro-batches, or a generator, got {type(microbatches).__name__}")
    else:
        rest = iter(microbatches)
        first = list(itertools.islice(rest, 1))
    if not first:
        raise ValueError("accumulate: expected one micro-batch at least, got none")
    return (first if rest == () else itertools.chain(first, rest)), first
