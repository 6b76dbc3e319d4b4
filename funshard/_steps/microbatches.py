"""Micro-batches, as many on every rank, and the weights of their losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec
from .._core.flow import Reduction
from .._core.mesh import Mesh
from .._core.spec import PartitionSpec
from ..collectives._agree import Comparison, RankLines, find_difference, find_host_groups
from ..collectives._functions import all_reduce

# --- The weights of micro-batches, as factors of their losses ---


def _is_readable(weight: float | Tensor) -> bool:
    """Return whether the host can read a weight without waiting."""
    return not isinstance(weight, Tensor) or (_torch.is_eager() and weight.device.type == "cpu")


def _check_weights(weights: Sequence[float | Tensor] | None, count: int) -> None:
    """Raise TypeError or ValueError for another number, or what the host can read without waiting and is no weight."""
    if weights is not None and len(weights) != count:
        raise ValueError(f"accumulate: expected a weight for each of {count} micro-batches, got {len(weights)}")
    for i, weight in enumerate(() if weights is None else weights):
        if isinstance(weight, bool) or not isinstance(weight, int | float | Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"accumulate: weight {i}: expected a number or a scalar tensor, got {type(weight).__name__}")
        if isinstance(weight, Tensor) and weight.dim():
            raise ValueError(f"accumulate: weight {i}: expected a scalar, got shape {list(weight.shape)}")
        if _is_readable(weight) and not 0 <= weight < math.inf:
            raise ValueError(f"accumulate: weight {i}: expected a finite number from 0 on, got {float(weight)}")


def make_loss_scales(
    weights: Sequence[float | Tensor], params: Mapping[str, Tensor], mesh: Mesh, reduction: Reduction
) -> Tensor:
    """Return the factor of each micro-batch's loss: its weight; for a mean over the average weight of all ranks' micro-batches.

    A tensor that is no weight, and whose value the host cannot read without waiting for it, makes all scales NaN.
    """
    like = next(iter(params.values()), None)
    dtype = torch.float32 if like is None or like.is_complex() else sum_dtype(like.dtype)
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


def are_positive(weights: Sequence[float | Tensor]) -> tuple[bool, ...]:
    """Return, for each weight, whether the host knows without waiting that it is not 0."""
    return tuple(_is_readable(weight) and bool(weight > 0) for weight in weights)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add up in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def to_sum_dtype(x: Tensor) -> Tensor:
    """Return the tensor in the dtype to add up in."""
    return x.to(sum_dtype(x.dtype))


# --- Micro-batches on several ranks: as many on each, or made so by some of weight 0 ---


class PaddedMicrobatches(NamedTuple):
    """Micro-batches, as many as on every other rank, and their weights."""

    microbatches: list[Any]
    """This rank's own micro-batches, then repeated ones."""
    weights: list[float | Tensor]
    """The weight of each: 0 for a repeated one."""


def pad_microbatches(
    microbatches: Iterable[Any],
    weights: Sequence[float | Tensor] | None = None,
    *,
    spec: PartitionSpec,
    stand_in: Any = None,
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
        ValueError, TypeError: On every rank, if one has other numbers of weights and micro-batches, or neither a micro-batch
            nor a stand-in where another one has micro-batches. For a tensor or a mapping.

    Example:
        >>> import itertools, torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> params = fs.shard(model, spec)
        >>> loss = lambda params, x: fs.functional_call(model, params, x, spec=spec).sum()
        >>> example, batches = torch.zeros(1, 2), iter(torch.ones(3, 1, 2))
        >>> def next_step():
        ...     return fs.pad_microbatches(itertools.islice(batches, 2), spec=spec, stand_in=example)
        >>> while (step := next_step()).microbatches:
        ...     grads, value = fs.accumulate(loss, params, step.microbatches, spec=spec, weights=step.weights)
        ...     print(len(step.microbatches), step.weights)
        2 [1.0, 1.0]
        1 [1.0]

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
    """Raise TypeError for a tensor or a mapping, which is one batch, and for anything that is not iterable."""
    if isinstance(microbatches, PaddedMicrobatches):
        raise TypeError(f"{who}: expected microbatches of pad_microbatches' result, and weights= its weights, got both in one")
    if isinstance(microbatches, Tensor | Mapping) or not hasattr(microbatches, "__iter__"):
        raise TypeError(f"{who}: expected a list of micro-batches, or a generator, got {type(microbatches).__name__}")


def list_microbatches(
    microbatches: Iterable[Any], weights: Sequence[float | Tensor] | None, mesh: Mesh, *, full: bool
) -> Sequence[Any]:
    """Return the micro-batches as a list; raise ValueError on every rank if one has wrong weights, or too few for the others.

    Ranks compare them before the first one runs. With ``full`` gradients they may have different numbers.
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
    """Return the error of ranks that have other numbers of micro-batches than the first one."""
    if wrong := [f"{text} on rank {rank}" for rank, (text,) in everyone if text.startswith("accumulate: ")]:
        return ValueError(wrong[0])
    (rank, expected), (other, got) = find_difference(everyone)
    return ValueError(
        f"accumulate: expected as many micro-batches on every rank, got {expected} on rank {rank}, and {got} on rank {other}; "
        "fs.pad_microbatches adds some of weight 0"
    )
