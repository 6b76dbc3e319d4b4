"""reduce_grads: gradients that are reduced when you say so. no_sync, gradient accumulation, uneven batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .._core.checks import bind_spec, check_buffers, check_mapping, find_full_params
from .._core.flow import ReduceBy, resolve_reduction
from .._core.layout import Params, flatten_unit
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._spec.codec import check_trainable
from .._wire.accumulation import drop_unweighted
from .._wire.flow import reduce_slice, reduce_unit
from ..collectives._functions import sum_over


def reduce_grads(
    grads: Mapping[str, Tensor],
    spec: PartitionSpec,
    *,
    reduce_axes: Iterable[str] | None = None,
    reduce: ReduceBy = "mean",
    weight: float | Tensor | None = None,
) -> Params:
    """Return the gradients of the shards, by unit key: the mean over ranks of each rank's own gradients.

    Differentiate with respect to ``unshard(params, spec)`` as often as you like, add up, and reduce once: ``no_sync``. The
    result equals the gradients of functional_call. They are reduced in the dtype of the unit's `Precision`, and returned in
    their own. Differentiable.

    Args:
        grads: Full gradients by parameter name, all of a unit's or none. Or, by unit key, gradients that were reduced over some
            axes and are now reduced over others: HSDP with one all-reduce for many micro-batches.
        spec: The spec of the parameters.
        reduce_axes: The mesh axes to reduce over, by default all.
        reduce: "mean", "sum", or the number to divide the sum by.
        weight: This rank's number of samples, if ranks have different ones: the result is ``sum_r w_r g_r / sum_r w_r`` over
            all ranks. With weight 0 the rank takes part and its gradients do not count, NaN included. Without ``reduce`` and
            ``reduce_axes``; to reduce while backward runs, multiply the loss by `weight_share`.

    Raises:
        ValueError: For gradients or axes that do not fit the spec, naming the path, before any communication.
        NotImplementedError: For a weight and a unit with local axes, where a rank's gradients have parts of others' losses.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.reduce_grads({"weight": torch.ones(2, 4)}, spec)
        {'': tensor([1., 1., 1., 1., 1., 1., 1., 1.])}
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    if weight is not None:
        if reduce != "mean" or reduce_axes is not None:
            raise ValueError(f"reduce_grads: expected weight= alone, got {reduce=} and {reduce_axes=} beside it")
        grads, reduce = _weigh(grads, spec, weight), "sum"
    full, slices = _split_units(grads, spec)
    reduction = resolve_reduction(reduce, mesh.names if reduce_axes is None else reduce_axes, mesh, full)
    for unit in slices:
        if split := [axis for axis in unit.p.axes if reduction.includes(axis)]:
            raise ValueError(
                f"unit '{unit.key}': a slice cannot be reduced over axis '{split[0]}', which the unit is split over: expected "
                "reduce_axes= without it, or full gradients by parameter name"
            )
    out: Params = {}
    for unit in full:
        buffer = flatten_unit(grads, unit, spec.padded_numel(unit))
        out[unit.key] = reduce_unit(buffer, unit, mesh, reduction)
    for unit in slices:
        out[unit.key] = reduce_slice(grads[unit.key], unit, mesh, reduction)
    return {unit.key: out[unit.key] for unit in spec if unit.key in out}


def weight_share(weight: float | Tensor, spec: PartitionSpec) -> Tensor:
    """Return ``w / sum_r w_r``, this rank's share of the total weight, or 0 if that is 0; a scalar in float32 at least.

    A weight that is negative or not finite makes the shares of all ranks NaN.

    A loss that is the mean over this rank's samples, times this, and ``reduce="sum"``, is the mean over all ranks' samples. A
    mean over none must not be 0/0 here: divide by ``max(n, 1)``, or use ``accumulate(f, params, [batch], weights=[n])``.

    Args:
        weight: This rank's number of samples or tokens, a number or a scalar tensor.
        spec: The spec, whose mesh has the ranks.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.weight_share(3, spec)
        tensor(1.)
    """
    mesh = bind_spec(spec).bound_mesh
    # a number is filled in on the device: a copy from the host would have to wait for it
    number = isinstance(weight, int | float)
    own = torch.full((), weight, device=mesh.device) if number else torch.as_tensor(weight, device=mesh.device)
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    own = torch.where((own >= 0) & own.isfinite(), own, torch.nan)  # of every rank, then: the host does not wait to read it
    total = sum_over(own, mesh)
    return torch.where(total == 0, 0, own / total)


def _weigh(grads: Mapping[str, Tensor], spec: PartitionSpec, weight: float | Tensor) -> Params:
    """Return gradients times this rank's share of the weight."""
    for unit in spec:
        if local := [axis for axis in unit.local_axes if spec.bound_mesh[axis].size > 1]:
            raise NotImplementedError(
                f"reduce_grads: weight=: unit '{unit.key}' is local over axis '{local[0]}', where gradients have parts of "
                "other ranks' losses: expected each rank's loss times weight_share(weight, spec), and reduce='sum'"
            )
    share = weight_share(weight, spec)
    shares = ((name, g, share.to(g.device)) for name, g in grads.items())
    return {name: drop_unweighted(g, s) * s.to(g.dtype) for name, g, s in shares}


def _split_units(grads: Mapping[str, Tensor], spec: PartitionSpec) -> tuple[list[Unit], list[Unit]]:
    check_mapping(grads)
    full = [unit for unit in spec if find_full_params(grads, unit) is not None]
    names = {name for unit in full for param in unit.params for name in param.names}
    slices = [unit for unit in spec if unit.key in grads]
    check_trainable((*full, *slices), "gradient")
    lengths = {unit.key: spec.shard_numel(unit) for unit in slices}
    check_buffers({key: g for key, g in grads.items() if key not in names}, spec, lengths)
    return full, slices
