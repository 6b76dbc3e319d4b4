"""accumulate_steps: an optimizer that takes one step for the mean of k updates' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._spec.checks import check_mapping
from ..._units.layout import Params
from .._checks import break_message
from .._elementwise.checks import is_updated
from .._norms import upcast
from .host_values import read_count
from .pairs import AnyOptimizer, ComposedOptimizer, check_optimizer, check_state

__all__ = ["AccumulationState", "accumulate_steps"]


class AccumulationState(NamedTuple):
    """The state of `accumulate_steps`."""

    inner: Any
    """The optimizer's state, as after its last step."""
    num_summed: Tensor
    """The number of gradients in the sums, below k: int64, on the host, the same on all ranks."""
    sums: Params
    """The sums of the gradients since then, in float32 or a wider dtype: slices as the parameters."""


def accumulate_steps(optimizer: AnyOptimizer, k: int) -> ComposedOptimizer:
    """Return an optimizer that takes one step for every k updates, with the mean of their gradients.

    The others return the given parameters. For gradients that come one by one; `accumulate` takes micro-batches together, sums
    without keeping a sum between steps, and counts tokens. Whether it steps is a branch on the host, so inside `compile` and
    torch.compile the update breaks the graph.

    Args:
        optimizer: ``(init, update)``.
        k: The number of updates for one step, at least 1 (otherwise ValueError).

    Returns:
        A `ComposedOptimizer` with the state `AccumulationState`.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.accumulate_steps(fs.optim.from_torch(torch.optim.SGD, lr=1.0), 2)
        >>> params = {"": torch.zeros(2)}
        >>> state = init(params)
        >>> for g in (1.0, 3.0):
        ...     params, state = update({"": torch.full((2,), g)}, state, params)
        ...     print(params)
        {'': tensor([0., 0.])}
        {'': tensor([-2., -2.])}

    Source: ``optax.MultiSteps``.
    """
    check_optimizer("accumulate_steps", optimizer)
    if k < 1:
        raise ValueError(f"accumulate_steps: expected k of 1 or more, got {k}")
    begin, apply = optimizer

    def init(params: Mapping[str, Tensor], /) -> AccumulationState:
        sums = {key: torch.zeros_like(upcast(x)) for key, x in params.items() if is_updated(x)}
        return AccumulationState(begin(params), torch.zeros((), dtype=torch.int64), sums)

    def update(
        grads: Mapping[str, Tensor], state: AccumulationState, params: Mapping[str, Tensor], /, **rates: Any
    ) -> tuple[Params, AccumulationState]:
        check_mapping(grads, "grads")
        check_state("accumulate_steps", state, AccumulationState)
        for key in state.sums:
            if key not in grads:
                raise ValueError(
                    f"accumulate_steps: unit '{key}' has no gradient: expected those of all units, got {[*grads][:8]}"
                )
        count = read_count(state.num_summed, "accumulate_steps", planned=k - 1) + 1
        if count > k:
            raise ValueError(f"accumulate_steps: the state has {count - 1} gradients of a larger k: expected less than k={k}")
        sums = {key: total + upcast(grads[key]) for key, total in state.sums.items()}
        if count < k:
            return dict(params), AccumulationState(state.inner, state.num_summed + 1, sums)
        means = {key: (sums[key] / k).to(g.dtype) if key in sums else g for key, g in grads.items()}
        new, inner = apply(means, state.inner, params, **rates)
        zeros = {key: torch.zeros_like(total) for key, total in sums.items()}
        return dict(new), AccumulationState(inner, torch.zeros_like(state.num_summed), zeros)

    why = "whether it steps is a branch on the host"
    return ComposedOptimizer(init, _torch.disable_in_graph(break_message("accumulate_steps", why))(update))
