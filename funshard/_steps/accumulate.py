"""accumulate: the gradients of many micro-batches, as many on every rank, reduced one by one or all together."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from .. import _torch
from .._core.checks import bind_spec, check_shards
from .._core.flow import ReduceBy, Reduction, resolve_reduction
from .._core.layout import Params, flatten_unit
from .._core.mesh import Mesh
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._slices.values import upcast
from .._transforms._recompute.snapshot import find_tensors
from .._transforms.error_hints import add_hints
from .._transforms.products import check_differentiable, check_recorded, is_differentiated_outside, run_loss
from .._wire.accumulation import Accumulation, GradReceiver, drop_unweighted
from .._wire.flow import reduce_slice, reduce_unit, unshard_unit
from .._wire.host import check_host_resident
from .._wire.mixed_layout import cast_views
from .._wire.route import Route
from ..collectives._agree import Comparison, RankLines, find_difference, find_host_groups
from ..collectives._functions import all_reduce

# --- The weights of micro-batches, as factors of their losses ---


def _is_readable(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) or (_torch.is_eager() and weight.device.type == "cpu")


def _check_weights(weights: Sequence[float | Tensor] | None, count: int) -> None:
    if weights is not None and len(weights) != count:
        raise ValueError(f"accumulate: expected a weight for each of {count} micro-batches, got {len(weights)}")
    for i, weight in enumerate(() if weights is None else weights):
        if isinstance(weight, bool) or not isinstance(weight, int | float | Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"accumulate: weight {i}: expected a number or a scalar tensor, got {type(weight).__name__}")
        if isinstance(weight, Tensor) and weight.dim():
            raise ValueError(f"accumulate: weight {i}: expected a scalar, got shape {list(weight.shape)}")
        if _is_readable(weight) and not 0 <= weight < math.inf:
            raise ValueError(f"accumulate: weight {i}: expected a finite number from 0 on, got {float(weight)}")


def _make_loss_scales(
    weights: Sequence[float | Tensor], params: Mapping[str, Tensor], mesh: Mesh, reduction: Reduction
) -> Tensor:
    """Return the factor of each micro-batch's loss: its weight; for a mean over the average weight of all ranks' micro-batches.

    A tensor that is no weight, and whose value the host cannot read without waiting for it, makes all scales NaN.
    """
    like = next(iter(params.values()), None)
    dtype = torch.float32 if like is None or like.is_complex() else torch.promote_types(like.dtype, torch.float32)
    device = mesh.device if like is None else like.device
    each = torch.stack([torch.as_tensor(weight, device=device).to(dtype) for weight in weights])
    each = torch.where((each >= 0).all() & (each < math.inf).all(), each, math.nan)
    if reduction.by != "mean":
        return each
    total, ranks = each.sum(), 1
    for name, axis in mesh.axes:
        if reduction.includes(name):
            total, ranks = all_reduce(total, axis, reduce="sum"), ranks * axis.size
    return torch.where(total == 0, 0, each * (ranks * len(weights)) / total)


# --- Micro-batches on several ranks: as many on each, or made so by some of weight 0 ---


class PaddedMicrobatches(NamedTuple):
    """Micro-batches, as many as on every other rank, and their weights."""

    microbatches: list[Any]  # this rank's own micro-batches, then repeated ones
    weights: list[float | Tensor]  # the weight of each: 0 for a repeated one


def pad_microbatches(
    microbatches: Iterable[Any], weights: Sequence[float | Tensor] | None = None, *, spec: PartitionSpec, stand_in: Any = None
) -> PaddedMicrobatches:
    """Add micro-batches of weight 0, until every rank has as many as the one with the most.

    For `accumulate` and `update_in_backward`, in which all ranks gather and reduce together. All ranks call this together.
    A repeated micro-batch changes neither the mean nor the statistics of `SyncBatchNorm`. It does count in buffers of this
    rank's own and in what the loss itself exchanges, as by `gather_values`, and it draws random numbers.

    Args:
        microbatches: A list or generator, of which this rank may have fewer than others, or none.
        weights: The weight of each, such as its number of tokens. None: 1 for each, the mean over all micro-batches.
        spec: The spec of the step. All ranks of its mesh agree on the number.
        stand_in: The micro-batch to repeat, of any values; None: the first one. A rank without micro-batches needs it.

    Returns:
        ``(microbatches, weights)``, both empty if no rank has a micro-batch.

    Raises:
        ValueError: On every rank, if one has other numbers of weights and micro-batches, or nothing to repeat.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1))
        >>> microbatches, weights = fs.pad_microbatches(torch.ones(2, 1, 2).unbind(), spec=spec, stand_in=torch.zeros(1, 2))
        >>> len(microbatches), weights  # more, of weight 0, if another rank has more
        (2, [1.0, 1.0])

    Source: the ``Join`` context manager of torch.distributed.algorithms.
    """
    mesh = bind_spec(spec).bound_mesh
    _check_iterable("pad_microbatches", microbatches)
    own = list(microbatches)
    given: list[float | Tensor] = [1.0] * len(own) if weights is None else list(weights)
    with _torch.below_transforms():
        maxima = torch.tensor([len(own), stand_in is None and not own, len(given) != len(own)], device="cpu")
        for group in find_host_groups(mesh):
            group.all_reduce_max(maxima, f"to compare {_LABEL}").wait()
        most, lacks, is_miscounted = maxima.tolist()
    if is_miscounted:
        hint = f"expected a weight for each micro-batch on every rank, got {len(given)} for {len(own)} on this one"
        raise ValueError(f"pad_microbatches: {hint}")
    if most and lacks:
        raise ValueError(
            f"pad_microbatches: this rank has {len(own)} micro-batches and another one {most}: expected, on each rank without "
            "any, a micro-batch to repeat, such as an earlier one: pass it as stand_in= on all ranks"
        )
    missing = most - len(own)
    repeated = own[0] if stand_in is None and own else stand_in
    return PaddedMicrobatches(own + [repeated] * missing, given + [0.0] * missing)


def _check_iterable(who: str, microbatches: object) -> None:
    if isinstance(microbatches, PaddedMicrobatches):
        raise TypeError(f"{who}: expected microbatches of pad_microbatches' result, and weights= its weights, got both in one")
    if isinstance(microbatches, Tensor | Mapping) or not hasattr(microbatches, "__iter__"):
        raise TypeError(f"{who}: expected a list of micro-batches, or a generator, got {type(microbatches).__name__}")


def _list_microbatches(
    microbatches: Iterable[Any], weights: Sequence[float | Tensor] | None, mesh: Mesh, *, full: bool
) -> Sequence[Any]:
    """Return the micro-batches as a list; raise ValueError on every rank if one has wrong weights, or too few for the others.

    Ranks compare them before the first one runs. With ``full`` parameters of all units they may have different numbers.
    """
    _check_iterable("accumulate", microbatches)
    batches = microbatches if isinstance(microbatches, list | tuple) else list(microbatches)
    text, failed = "" if full else f"{len(batches)} micro-batches", None
    try:
        _check_weights(weights, len(batches))
    except (TypeError, ValueError) as error:
        text, failed = str(error), error
    if weights is not None or not full:
        Comparison([text], find_host_groups(mesh), _make_difference_error, _LABEL).finish()
    if failed:  # on all ranks
        raise failed
    if not batches:
        raise ValueError("accumulate: expected one micro-batch at least, got none")
    return batches


_LABEL = "numbers of micro-batches"


def _make_difference_error(everyone: RankLines) -> ValueError:
    if wrong := [f"{text} on rank {rank}" for rank, (text,) in everyone if text.startswith("accumulate: ")]:
        return ValueError(wrong[0])
    (rank, expected), (other, got) = find_difference(everyone)
    return ValueError(
        f"accumulate: expected as many micro-batches on every rank, got {expected} on rank {rank}, and {got} on rank {other}; "
        "fs.pad_microbatches adds some of weight 0"
    )


# --- The plan: micro-batches, and how their gradients are added up and reduced ---


class GradSums(GradReceiver):
    """Sums of gradients, reduced ones as they arrive while backward runs, and the values of the micro-batches so far."""

    def __init__(self) -> None:
        self.own: Params = {}  # of the shards, not through functional_call, such as those of penalties
        self.through: Params = {}  # through functional_call: slices by unit key, or full gradients by parameter name
        self.values: list[Tensor] = []
        self.auxes: list[Any] = []
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
        self.check(key)
        _add_grad(self.through, key, grad)

    def begin_last(self, loss: Tensor, given: Params) -> None:
        """Note that the last backward follows, that of this loss, and the shards that the loss got."""


def _add_grad(sums: Params, key: str, grad: Tensor, *, owned: bool = True) -> None:
    """Add a gradient to the unit's sum, in float32 or wider. The first becomes the sum, unless it is cast or not ``owned``."""
    if key in sums:
        sums[key].add_(grad)
    else:
        sums[key] = upcast(grad if owned else grad.clone(memory_format=torch.contiguous_format))


@dataclass(frozen=True)
class AccumulationPlan:
    """The checked arguments of an accumulation: its micro-batches, and how gradients are added up and reduced."""

    params: Params
    spec: PartitionSpec
    full: bool
    has_aux: bool
    reduction: Reduction
    batches: Sequence[Any]
    scales: Tensor | None  # the factor of each micro-batch's loss, if there are weights
    possible_zeros: Sequence[Tensor | None]  # of these factors those that may be 0
    in_place: bool  # nothing around the accumulation differentiates it

    @classmethod
    def make(
        cls,
        params: Mapping[str, Tensor],
        microbatches: Iterable[Any],
        spec: PartitionSpec,
        weights: Sequence[float | Tensor] | None,
        has_aux: bool,
        reduce: ReduceBy,
        over: Iterable[str] | None,
        *,
        full: bool = False,
    ) -> AccumulationPlan:
        """Check the arguments, compare those of all ranks, and make a plan."""
        spec = bind_spec(spec)
        mesh = spec.bound_mesh
        units = check_shards(params, spec)
        check_host_resident(params, spec)
        for name in params:
            if name not in spec.by_key:
                raise ValueError(f"parameter '{name}' is ignored by the spec: expected shards of its units; close over it")
        check_differentiable(params)
        reduction = resolve_reduction(reduce, over, mesh, units)
        batches = _list_microbatches(microbatches, weights, mesh, full=full and len(params) == len(spec))
        scales = None if weights is None else _make_loss_scales(weights, params, mesh, reduction)
        in_place = not is_differentiated_outside((params, weights, batches))
        zeros: list[Tensor | None] = [None] * len(batches)
        if weights is not None and scales is not None:
            zeros = [None if _is_readable(weight) and weight > 0 else scales[i] for i, weight in enumerate(weights)]
        return cls(dict(params), spec, full, has_aux, reduction, batches, scales, zeros, in_place)

    @property
    def is_deferred(self) -> bool:
        """Whether reductions over the axes that a unit is not split over wait for the end; one alone runs behind backward."""
        return self.in_place and not self.full and len(self.batches) > 1

    @property
    def units(self) -> Iterator[Unit]:
        """The units with parameters in this step."""
        return (unit for unit in self.spec if unit.key in self.params)

    def make_replacements(self, shards: Params) -> Params:
        """Return what functional_call uses instead of these shards: full parameters for ``keep="full"``, else the shards."""
        if not self.full:
            return dict(shards)
        out: Params = {}
        for unit in self.units:
            buffer = unshard_unit(shards[unit.key], unit, self.spec.bound_mesh, self.reduction)
            views = cast_views(buffer, unit, shards[unit.key].dtype)
            out |= zip((param.name for param in unit.params), views, strict=True)
        return out

    def make_context(
        self, given: Params, entered: Params, weight: Tensor | None, receiver: GradReceiver | None = None
    ) -> Accumulation:
        """Return the context for a run of the loss, whose weight may be 0 unless it is None."""
        partial = Reduction(self.reduction.by, frozenset()) if self.is_deferred else self.reduction
        thread = 0 if _torch.is_in_graph() else threading.get_ident()
        is_weighted = self.scales is not None and self._has_replicas()
        return Accumulation(self.spec, given, entered, partial, self.reduction, thread, receiver, weight, is_weighted)

    def _has_replicas(self, unit: Unit | None = None) -> bool:
        """Return whether gradients are reduced over several ranks, of a unit: over several that hold equal slices of it."""
        split = unit.distinct_axes if unit else ()
        return any(a.size > 1 and self.reduction.includes(name) and name not in split for name, a in self.spec.bound_mesh.axes)

    def run_loss(self, f: Callable[..., Any], given: Params, i: int) -> tuple[Tensor, Tensor, Any]:
        """Return a micro-batch's loss, scaled and not, and its aux. ValueError if ``f`` hooks a shard, as calls bypass it."""
        loss, aux = run_loss(f, self.has_aux, dict(given), self.batches[i])
        if not _torch.is_in_graph():
            _check_aux(aux)
            for key in (key for key, x in given.items() if x._backward_hooks):
                raise ValueError(
                    f"unit '{key}': the loss has called register_hook on its shard, which does not see the gradients of "
                    "functional_call here: expected no hook; change the gradients that come back, or in the update"
                )
        return (loss if self.scales is None else drop_unweighted(loss, self.scales[i]) * self.scales[i]), loss, aux

    def combine_values(self, sums: GradSums) -> Any:
        """Return this rank's mean or sum of the losses; with aux ``(value, auxes)``."""
        by, scales, each = self.reduction.by, self.scales, torch.stack([*map(upcast, sums.values)])
        if scales is not None:
            each = drop_unweighted(each, scales) * scales
        if by == "mean":
            count = len(each) if scales is None else torch.where((total := scales.sum()) == 0, 1, total)
        else:
            count = 1.0 if by == "sum" else by
        value = (each.sum() / count).to(sums.values[0].dtype)
        return (value, sums.auxes) if self.has_aux else value

    def finish_grad(self, unit: Unit, sums: GradSums) -> Tensor:
        """Reduce what is left, and return the gradient of one unit's shard after all micro-batches. Its sums are freed."""
        count = len(self.batches) if self.reduction.by == "mean" else 1
        shard = self.params[unit.key]
        grad = self._reduce(unit, sums.through, shard, count)
        if (own := sums.own.pop(unit.key, None)) is not None:
            grad = grad + self._unweigh(unit, own / count)
        return grad.to(shard.dtype)

    def _unweigh(self, unit: Unit, own: Tensor) -> Tensor:
        """Return the gradient of what the loss computes from the shard itself, without this rank's part of the weights.

        A rank without weight has left it out: NaN. In transforms a sum on replicas, which would differ, is NaN but for zeros.
        """
        if self.scales is None:
            return own
        if self.reduction.by == "mean":
            share = self.scales.mean()  # of the weights, beside that of a rank on average
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
        dtype = Route.for_unit(unit, mesh, reduction, shard.dtype).dtypes.reduce
        return reduce((grad / count).to(dtype), unit, mesh, reduction, shard.dtype)


def _check_aux(aux: Any) -> None:
    """Raise TypeError for an object in aux, no part of a tree, that holds a tensor with a graph: nothing would detach it."""
    for path, leaf in pytree.tree_flatten_with_path(aux)[0]:
        if not isinstance(leaf, Tensor) and not all(map(_torch.is_leaf, find_tensors(leaf))):
            raise TypeError(
                f"accumulate: aux{pytree.keystr(path)}: {type(leaf).__name__} holds a tensor that is not detached, and so the "
                "graph of its micro-batch until all have run: expected a tree of tensors, such as a dict, or tensor.detach()"
            )


def _pop_sum(sums: Params, key: str, like: Tensor, shape: Sequence[int]) -> Tensor:
    total, dtype = sums.pop(key, None), torch.promote_types(like.dtype, torch.float32)
    return like.new_zeros(shape, dtype=dtype) if total is None else total.to(dtype)


# --- Micro-batches one after the other: by plain autograd, whose gradients are added up as they arrive, or as data flow ---


def _run_in_place(f: Callable[..., Any], plan: AccumulationPlan, sums: GradSums) -> None:
    """Add up values and gradients by plain autograd, which nothing differentiates."""
    check_recorded("accumulate or update_in_backward", plan.params)
    with torch.no_grad():
        shards = {key: p.detach() for key, p in plan.params.items()}
        entered = plan.make_replacements(shards)
    given = {key: _make_leaf(x, sums, key) for key, x in shards.items()}
    with torch.enable_grad():  # known to come from the shards, for a backward inside of the loss
        first = next(iter(given.values()), None)
        entered = {key: _Replacement.apply(given.get(key, first), x, sums, key) for key, x in entered.items()}
    for i in range(len(plan.batches)):
        _run_microbatch(f, plan, sums, given, entered, i)


def _run_microbatch(
    f: Callable[..., Any], plan: AccumulationPlan, sums: GradSums, given: Params, entered: Params, i: int
) -> None:
    weight = plan.possible_zeros[i]
    sums.weight = weight if plan.full else None  # what is reduced has parts of other ranks
    with plan.make_context(given, entered, weight, sums), torch.enable_grad():
        sums.in_loss = True
        loss, value, aux = plan.run_loss(f, given, i)
        sums.in_loss = False
        sums.values.append(value.detach())
        sums.auxes.append(pytree.tree_map_only(Tensor, Tensor.detach, aux))
        if not given or not loss.requires_grad:
            return
        del value, aux
        if i + 1 == len(plan.batches):
            sums.begin_last(loss, given)
        try:
            loss.backward(inputs=[*given.values()])
        except RuntimeError as error:
            raise add_hints(error)  # noqa: B904 - the same one


def _make_leaf(x: Tensor, sums: GradSums, key: str) -> Tensor:

    def take_grad(x: Tensor) -> None:
        grad, x.grad = x.grad, None
        if grad is not None:
            sums.check(key)
            _add_grad(sums.own, key, grad, owned=False)

    x = x.detach().requires_grad_()
    x.register_post_accumulate_grad_hook(take_grad)
    return x


class _Replacement(_torch.Function):
    """A tensor that functional_call uses instead of a shard. Its gradient is added to the sums and goes no further."""

    @staticmethod
    def forward(shard: Tensor, value: Tensor, sums: GradSums, key: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
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
                _add_grad(ctx.sums.through, ctx.key, drop_unweighted(grad, ctx.sums.weight), owned=False)
        return None, None, None, None


def replacement_key(node: object) -> str | None:
    """Return the key of the replacement that this node of a graph made, None for other nodes."""
    return cast("Any", node).key if isinstance(getattr(node, "sums", None), GradSums) else None


def _run_recorded(f: Callable[..., Any], plan: AccumulationPlan, sums: GradSums) -> None:
    """Add up values and gradients as data flow, which transforms can differentiate, batch or record."""

    def run(given: Params, entered: Params, i: int) -> tuple[Tensor, tuple[Any, ...]]:
        with plan.make_context(given, entered, weight):
            loss, value, aux = plan.run_loss(f, given, i)
        return loss, ((value, aux) if plan.has_aux else (value,))

    entered = plan.make_replacements(plan.params)
    for i in range(len(plan.batches)):
        weight = plan.possible_zeros[i]
        grads, (_, (value, *aux)) = torch.func.grad_and_value(run, (0, 1), has_aux=True)(plan.params, entered, i)
        if plan.full:
            grads = grads[0], {name: drop_unweighted(grad, weight) for name, grad in grads[1].items()}
        for total, new in zip((sums.own, sums.through), grads, strict=True):
            total |= {key: total[key] + upcast(x) if key in total else upcast(x) for key, x in new.items()}
        sums.values.append(value)
        sums.auxes.extend(aux)


def add_up(f: Callable[..., Any], plan: AccumulationPlan, sums: GradSums) -> Any:
    """Add up the gradients of a plan's micro-batches, and return the value."""
    (_run_in_place if plan.in_place else _run_recorded)(f, plan, sums)
    return plan.combine_values(sums)


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
    See ``examples/guide/recipes.md``, "Accumulation".

    Args:
        f: Returns the scalar loss of a micro-batch, or ``(loss, aux)``, by `functional_call` with this spec.
        params: Shards, some or all (`partition`).
        microbatches: A list, or a generator, which is read first. With "shards" all ranks need equally many, which they
            compare, and `pad_microbatches` gives; with "full" and all params each rank's mean is over its own.
        spec: The spec of the shards.
        keep: "shards" reduces each micro-batch in its backward and adds up slices, in float32 at least. "full" gathers and
            reduces each unit once, with all full parameters and gradients in memory (``no_sync``).
        weights: A number or scalar tensor for each micro-batch, such as its number of tokens, for the mean by weight:
            ``sum_ri w_ri g_ri / sum_ri w_ri``. A micro-batch of weight 0 adds neither value nor gradient, even NaN, as of a
            mean over none. An invalid weight that the host cannot read without waiting makes every result NaN.
        has_aux: Whether ``f`` returns ``(loss, aux)``, whose aux is a tree of tensors, which are detached.
        reduce: "mean" or "sum" over the micro-batches of all ranks, or a divisor of that sum; not in `functional_call`.
        reduce_axes: The mesh axes to reduce over, as in `functional_call`, and not there.

    Returns:
        ``(grads, value)``, or ``(grads, (value, auxes))``: gradients in the shards' shapes and dtypes, this rank's own
        value, reduced alike, and a list.

    Raises:
        ValueError, TypeError: For arguments that do not fit each other or those of other ranks, and as `grad_and_value`.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> loss = lambda params, x: fs.functional_call(model, params, x, spec=spec).sum()
        >>> microbatches = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]]).unbind()
        >>> fs.accumulate(loss, fs.shard(model, spec), microbatches, spec=spec)[0][""][:2]
        tensor([2., 4.])
    """
    if keep not in ("shards", "full"):
        raise ValueError(f"accumulate: keep: expected 'shards' or 'full', got {keep!r}")
    plan = AccumulationPlan.make(params, microbatches, spec, weights, has_aux, reduce, reduce_axes, full=keep == "full")
    sums = GradSums()
    value = add_up(f, plan, sums)
    grads = {unit.key: plan.finish_grad(unit, sums) for unit in plan.units}
    return {key: grads[key] for key in params}, value
