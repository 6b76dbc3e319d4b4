"""ema: an optimizer that keeps a moving average of the parameters in its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._units.layout import Params
from ..._units.moving_average import check_decay, is_averaged, update_average
from .pairs import AnyOptimizer, ComposedOptimizer, check_optimizer, check_state

__all__ = ["EmaState", "ema"]


class EmaState(NamedTuple):
    """The state of `ema`."""

    inner: Any
    """The optimizer's state."""
    average: Params
    """The moving average: slices as the parameters, to evaluate with."""
    step: Tensor
    """The number of steps taken: int64, on the host, the same on all ranks."""


def ema(
    optimizer: AnyOptimizer, *, decay: float | Callable[[Tensor], float | Tensor], dtype: torch.dtype | None = None
) -> ComposedOptimizer:
    """Return an optimizer that keeps a moving average of the parameters in its state, as `averaging.ema` computes it.

    ``optax.ema`` is another one, of gradients: a transformation for `chain`.

    Args:
        optimizer: ``(init, update)``.
        decay: The weight of the average so far, in 0..1 (otherwise ValueError), or a function that returns it for the step, a
            0-D int64 tensor that counts from 0, such as ``lambda step: ((1 + step) / (10 + step)).clamp(max=0.999)``.
        dtype: The dtype of the average; by default that of the parameters, and float32 for narrower ones: bfloat16 would round
            each step of the average away.

    Returns:
        A `ComposedOptimizer` with the state `EmaState`, whose average begins as a copy of the parameters.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.ema(fs.optim.from_torch(torch.optim.SGD, lr=1.0), decay=0.75)
        >>> params = {"": torch.zeros(2)}
        >>> update({"": torch.ones(2)}, init(params), params)[1].average
        {'': tensor([-0.2500, -0.2500])}
    """
    check_optimizer("ema", optimizer)
    if not callable(decay):
        check_decay(decay)
    begin, apply = optimizer

    def init(params: Mapping[str, Tensor], /) -> EmaState:
        dtypes = {key: dtype or torch.promote_types(x.dtype, torch.float32) for key, x in params.items() if is_averaged(x)}
        average = {key: x.to(dtypes.get(key, x.dtype), copy=True) for key, x in params.items()}
        return EmaState(begin(params), average, torch.zeros((), dtype=torch.int64))

    def update(
        grads: Mapping[str, Tensor], state: EmaState, params: Mapping[str, Tensor], /, **rates: Any
    ) -> tuple[Params, EmaState]:
        check_state("ema", state, EmaState)
        new, inner = apply(grads, state.inner, params, **rates)
        weight = decay(state.step) if callable(decay) else decay
        return dict(new), EmaState(inner, update_average(state.average, new, weight), state.step + 1)

    return ComposedOptimizer(init, update)
