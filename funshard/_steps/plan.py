"""The sums of an accumulation, and its reduction at the end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # which knows what a tree is, as torch.func does

from .. import _torch
from .._core.checks import check_shards
from .._core.division import ReduceBy, Reduction
from .._core.flow import resolve_reduction
from .._core.layout import Params, flatten_unit
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._spec.precision import resolve_dtypes
from .._transforms._recompute.snapshot import find_tensors
from .._transforms.grad import check_differentiable, run_loss
from .._units.accumulation import Accumulation, GradReceiver, drop_unweighted
from .._wire.flow import gather_unit, reduce_slice, reduce_unit
from .._wire.host import check_host_resident
from .._wire.mixed_layout import cast_views
from .microbatches import sum_dtype, to_sum_dtype

__all__ = ["AccumulationPlan", "GradSums"]


@dataclass(frozen=True)
class GradSums:
    """Sums of gradients, and the values of the micro-batches so far."""

    own: Params = dataclasses.field(default_factory=dict)
    """Gradients of the shards that do not pass through functional_call, such as those of penalties."""
    through: Params = dataclasses.field(default_factory=dict)
    """Gradients that pass through functional_call: slices by unit key, or full gradients by parameter name."""
    values: list[Tensor] = dataclasses.field(default_factory=list)
    auxes: list[Any] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class AccumulationPlan:
    """The checked options of an accumulation: how gradients are added up and reduced."""

    params: Params
    spec: PartitionSpec
    full: bool
    has_aux: bool
    reduction: Reduction
    in_place: bool = True
    """Whether nothing around the accumulation differentiates it."""
    positive: tuple[bool, ...] = ()
    """For each weight, whether it is known not to be 0."""
    single: bool = False
    """Whether there is only one micro-batch, whose reductions may all run behind its backward."""

    @classmethod
    def make(
        cls,
        params: Mapping[str, Tensor],
        spec: PartitionSpec,
        keep: str,
        has_aux: bool,
        reduce: ReduceBy,
        over: Iterable[str] | None,
    ) -> AccumulationPlan:
        """Check the arguments and make a plan."""
        if keep not in ("shards", "full"):
            raise ValueError(f"accumulate: keep: expected 'shards' or 'full', got {keep!r}")
        units = check_shards(params, spec, part=True)
        check_host_resident(params, spec)
        for name in params:
            if name not in spec.by_key:
                raise ValueError(f"parameter '{name}' is ignored by the spec: expected shards of its units; close over it")
        check_differentiable(params)
        reduction = resolve_reduction(reduce, over, spec.bound_mesh, units)
        return cls(dict(params), spec, keep == "full", has_aux, reduction)

    def make_replacements(self, shards: Params) -> Params:
        """Return what functional_call uses instead of these shards: full parameters for ``keep="full"``, else the shards."""
        if not self.full:
            return dict(shards)
        mesh, out = self.spec.bound_mesh, {}
        for unit in self._units():
            buffer = gather_unit(shards[unit.key], unit, mesh, self.reduction)
            views = cast_views(buffer, unit, shards[unit.key].dtype)
            out |= zip((param.name for param in unit.params), views, strict=True)
        return out

    @property
    def is_deferred(self) -> bool:
        """Whether reductions over the axes that a unit is not split over wait for the end."""
        return self.in_place and not self.full and not self.single

    def possible_zero(self, scales: Tensor | None, i: int) -> Tensor | None:
        """Return the scale of micro-batch ``i`` if it may be 0."""
        return None if scales is None or all(self.positive[i : i + 1]) else scales[i]

    def make_context(
        self,
        given: Params,
        entered: Params,
        weight: Tensor | None,
        receiver: GradReceiver | None = None,
        *,
        retains_graph: bool = False,
    ) -> Accumulation:
        """Return the context for a run of the loss, whose weight may be 0 unless it is None."""
        partial = Reduction(self.reduction.by, frozenset()) if self.is_deferred else self.reduction
        thread = 0 if _torch.is_in_graph() else threading.get_ident()
        is_weighted = bool(self.positive) and self._has_replicas()
        return Accumulation(
            self.spec, given, entered, partial, self.reduction, thread, receiver, retains_graph, weight, is_weighted
        )

    def _has_replicas(self, unit: Unit | None = None) -> bool:
        """Return whether gradients are reduced over several ranks, of a unit: over several that hold equal slices of it."""
        split = unit.distinct_axes if unit else ()
        return any(a.size > 1 and self.reduction.includes(name) and name not in split for name, a in self.spec.bound_mesh.axes)

    def run_loss(self, f: Callable[..., Any], given: Params, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss of a micro-batch and its aux. ValueError if ``f`` hooks a shard: calls bypass the hook."""
        loss = run_loss(f, self.has_aux, dict(given), batch)
        if not _torch.is_in_graph() and self.has_aux:
            _check_aux(loss[1])
        if not _torch.is_in_graph() and (hooked := [key for key, x in given.items() if _torch.has_hooks(x)]):
            raise ValueError(
                f"unit '{hooked[0]}': the loss has called register_hook on its shard, which does not see the "
                "gradients of functional_call here: expected no hook; change the gradients that come back, or in the update"
            )
        return loss

    def combine_values(self, values: Sequence[Tensor], scales: Tensor | None) -> Tensor:
        """Return this rank's mean or sum of the losses."""
        by, all_ = self.reduction.by, torch.stack([to_sum_dtype(value) for value in values])
        if scales is not None:
            all_ = drop_unweighted(all_, scales) * scales
        if by == "mean":
            count = len(values) if scales is None else torch.where((total := scales.sum()) == 0, 1, total)
        else:
            count = 1.0 if by == "sum" else by
        return (all_.sum() / count).to(values[0].dtype)

    def finish_grads(self, parts: GradSums, scales: Tensor | None) -> Params:
        """Reduce what is left, and return the gradients of the shards. The sums are freed."""
        out = {unit.key: self.finish_grad(unit, parts, len(parts.values), scales) for unit in self._units()}
        return {key: out[key] for key in self.params}

    def finish_grad(self, unit: Unit, parts: GradSums, count: int, scales: Tensor | None) -> Tensor:
        """Return the gradient of one unit's shard after ``count`` micro-batches."""
        count = count if self.reduction.by == "mean" else 1
        shard = self.params[unit.key]
        grad = self._reduce(unit, parts.through, shard, count)
        if (own := parts.own.pop(unit.key, None)) is not None:
            grad = grad + (own / count if scales is None else self._unweigh(unit, own / count, scales))
        return grad.to(shard.dtype)

    def _unweigh(self, unit: Unit, own: Tensor, scales: Tensor) -> Tensor:
        """Return the gradient of what the loss computes from the shard itself, without this rank's part of the weights.

        A rank without weight has left it out: its gradient is NaN. Of a sum on replicas, which would differ by it, it is a
        ValueError, or NaN in transforms. These make zeros where the loss does not use the shard, which stay zeros.
        """
        if self.reduction.by == "mean":
            share = scales.mean()  # of the weights, beside that of a rank on average
            return own / share if self.in_place else torch.where(share == 0, 0, own / share)
        if not self._has_replicas(unit):
            return own
        if self.in_place:
            raise ValueError(
                f"unit '{unit.key}': accumulate(weights=, reduce={self.reduction.by!r}): the loss uses the shard itself, as in "
                "a penalty, which each rank would scale by its own weights, so that replicas differ: expected reduce='mean', "
                "or the penalty's gradient added to the result"
            )
        return torch.where(own == 0, own, torch.nan)

    def _reduce(self, unit: Unit, through: Params, shard: Tensor, count: int) -> Tensor:
        """Return a unit's mean gradient over the micro-batches, reduced over the axes that backward did not reduce."""
        mesh, p, by = self.spec.bound_mesh, unit.p, self.reduction.by
        if self.full:
            full = {x.name: _pop_sum(through, x.name, shard, x.shape) for x in unit.params}
            grad, reduction, reduce = flatten_unit(full, unit, self.spec.padded_numel(unit)), self.reduction, reduce_unit
            del full
        else:
            grad = _pop_sum(through, unit.key, shard, shard.shape)
            rest = [name for name, axis in mesh.axes if axis.size > 1 and name not in p.axes and self.reduction.includes(name)]
            if not rest or not self.is_deferred:
                return grad / count
            reduction, reduce = Reduction("mean" if by == "mean" else "sum", frozenset(rest)), reduce_slice
        return reduce((grad / count).to(resolve_dtypes(p, shard.dtype).reduce), unit, mesh, reduction, shard.dtype)

    def _units(self) -> Iterator[Unit]:
        """Return the units with parameters in this step."""
        return (unit for unit in self.spec if unit.key in self.params)


def _check_aux(aux: Any) -> None:
    """Raise TypeError for an object in aux, no part of a tree, that holds a tensor with a graph: nothing would detach it."""
    for path, leaf in pytree.tree_flatten_with_path(aux)[0]:
        if not isinstance(leaf, Tensor) and not all(map(_torch.is_leaf, find_tensors(leaf))):
            raise TypeError(
                f"accumulate: aux{pytree.keystr(path)}: {type(leaf).__name__} holds a tensor that is not detached, and so the "
                "graph of its micro-batch until all have run: expected a tree of tensors, such as a dict, or tensor.detach()"
            )


def _pop_sum(sums: Params, key: str, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Take a sum out of ``sums``; zeros if nothing was added."""
    total, dtype = sums.pop(key, None), sum_dtype(like.dtype)
    return like.new_zeros(shape, dtype=dtype) if total is None else total.to(dtype)
