"""apply_if_finite: an optimizer that skips steps whose gradients are not finite on some rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # traced by torch.compile, as optree is not

from ... import _torch
from ..._phases import LOGGER
from ..._spec.bind import bind_spec, check_spec
from ..._spec.checks import check_tensors
from ..._spec.spec import PartitionSpec
from ..._units.finite import agree_finite, find_nonfinite, select_if_finite
from ..._units.layout import Params
from ...collectives._mesh import check_spans_world
from .host_values import read_count, read_flag
from .pairs import AnyOptimizer, ComposedOptimizer, check_optimizer, check_state

__all__ = ["FiniteState", "apply_if_finite"]


class FiniteState(NamedTuple):
    """The state of `apply_if_finite`."""

    inner: Any
    """The optimizer's state, as after the last step that was not skipped."""
    consecutive: Tensor
    """The number of steps that were skipped since the last one that was not: int64."""
    total: Tensor
    """The number of all steps that were skipped: int64."""


def apply_if_finite(optimizer: AnyOptimizer, spec: PartitionSpec, *, max_consecutive: int | None = None) -> ComposedOptimizer:
    """Return an optimizer whose step all ranks skip if a gradient on any of them is inf or NaN.

    A skipped step returns the given parameters and state, bit for bit, also of an optimizer with ``donate=True``: ranks agree
    before the update, by an all-reduce of one number for each mesh axis, which the host waits for. It is counted in the state,
    and logged at INFO by the logger "funshard" with this rank's units that are not finite.

    In a graph of `compile` the update of such a step runs, on ones as gradients, and its result is dropped.
    `update_in_backward`, which updates each unit before it knows the others' gradients, refuses this optimizer.

    Args:
        optimizer: ``(init, update)``.
        spec: The spec of the gradients.
        max_consecutive: How many steps in a row may be skipped. One more is a FloatingPointError on all ranks, before anything
            changes; optax applies that step, which makes the parameters NaN. Not in a graph: read ``state.consecutive`` there.

    Returns:
        A `ComposedOptimizer` with the state `FiniteState`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> init, update = fs.optim.apply_if_finite(fs.optim.from_torch(torch.optim.SGD, lr=1.0), spec)
        >>> params = {"weight": torch.ones(1, 2)}
        >>> update({"weight": torch.tensor([[torch.nan, 1.0]])}, init(params), params)[0]
        {'weight': tensor([[1., 1.]])}

    Source: ``optax.apply_if_finite``.
    """
    check_spec(spec)
    check_optimizer("apply_if_finite", optimizer)
    if max_consecutive is not None and max_consecutive < 0:
        raise ValueError(f"apply_if_finite: max_consecutive: expected a number from 0 on, or None, got {max_consecutive}")
    begin, apply = optimizer

    def init(params: Mapping[str, Tensor], /) -> FiniteState:
        device = next((x.device for x in params.values()), None)  # where the gradients are: a graph counts without a copy
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return FiniteState(begin(params), zero, zero.clone())

    def update(
        grads: Mapping[str, Tensor], state: FiniteState, params: Mapping[str, Tensor], /, **rates: Any
    ) -> tuple[Params, FiniteState]:
        check_tensors(grads, "grads")
        check_state("apply_if_finite", state, FiniteState)
        bound = bind_spec(spec)
        check_spans_world(bound.bound_mesh, "apply_if_finite")
        nonfinite = find_nonfinite({key: g.detach() for key, g in grads.items()}, bound)
        finite = agree_finite(nonfinite, bound)
        applies = read_flag(finite)
        if applies is None and max_consecutive is not None:
            raise ValueError(
                "apply_if_finite: max_consecutive: an error needs the host, which reads no value in a graph: expected None, "
                "and a look at state.consecutive after the step"
            )
        if applies is None:
            return _select_step(optimizer, finite, grads, state, params, rates)
        if not applies:
            return dict(params), _count_skipped(state, nonfinite, [*grads], max_consecutive)
        new, inner = apply(grads, state.inner, params, **rates)
        return dict(new), FiniteState(inner, torch.zeros_like(state.consecutive), state.total)

    return ComposedOptimizer(init, update)


def _select_step(
    optimizer: AnyOptimizer,
    finite: Tensor,
    grads: Mapping[str, Tensor],
    state: FiniteState,
    params: Mapping[str, Tensor],
    rates: Mapping[str, Any],
) -> tuple[Params, FiniteState]:
    """Compute the step and return its result if ``finite``, else what was given, without a branch on the host.

    The dropped step gets ones as gradients: a NaN would reach derivatives, and so may zeros, by the root of a second moment.
    It gets copies of the rest, because it may donate.
    """
    safe = {key: torch.where(finite.to(g.device), g, torch.ones_like(g)) for key, g in grads.items()}
    given = dict(params), state.inner
    copied, inner = pytree.tree_map_only(Tensor, torch.clone, given)
    new, inner = optimizer[1](safe, inner, copied, **rates)
    new, inner = select_if_finite(finite, (dict(new), inner), given)
    consecutive, total = state.consecutive.to(finite.device), state.total.to(finite.device)
    skipped = (~finite).to(total.dtype)
    return new, FiniteState(inner, (consecutive + 1) * skipped, total + skipped)


def _count_skipped(state: FiniteState, nonfinite: Tensor, keys: list[str], max_consecutive: int | None) -> FiniteState:
    """Count and log a skipped step; return the state, or raise FloatingPointError if too many were skipped in a row."""
    counted = FiniteState(state.inner, state.consecutive + 1, state.total + 1)
    in_a_row = read_count(counted.consecutive, "apply_if_finite")
    if not LOGGER.isEnabledFor(logging.INFO) and (max_consecutive is None or in_a_row <= max_consecutive):
        return counted
    flags = [False] * len(keys) if _torch.is_batched(nonfinite) else nonfinite.tolist()
    here = [key for key, is_bad in zip(keys, flags, strict=True) if is_bad]
    where = f"in units {here[:8]}" if here else "on another rank"
    if max_consecutive is not None and in_a_row > max_consecutive:
        raise FloatingPointError(
            f"apply_if_finite: the gradients of {in_a_row} steps in a row were not finite, now {where}: expected at most "
            f"{max_consecutive}; nothing is changed: go on from a checkpoint, with another learning rate or other data"
        )
    LOGGER.info(
        "apply_if_finite: a step is skipped, %d in a row, %d in all: gradients are not finite %s",
        in_a_row,
        read_count(counted.total, "apply_if_finite"),
        where,
    )
    return counted
