"""Learning rate schedules of torch as functions of the step, and an optimizer that follows one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._core.layout import Params
from .._checks import break_message
from .pairs import AnyOptimizer, ComposedOptimizer, check_optimizer, check_state, read_count

__all__ = ["ScheduleState", "schedule", "schedule_lr"]

FIRST_RATES = 1024
"""How many steps' rates are computed first; then always twice as many, so that each step costs two of the scheduler's."""


class _RateHolder(torch.optim.Optimizer):
    """An optimizer for a scheduler to set the rate of: it has no momentum or other option, and its step does nothing."""

    def __init__(self, lr: float) -> None:
        super().__init__([torch.zeros(())], {"lr": lr})

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: torch's schedulers warn where no step comes before theirs."""


def schedule(scheduler: Callable[..., Any], lr: float, **options: Any) -> Callable[[int | Tensor], float]:
    """Return the learning rates of a torch scheduler as a function of the step, which counts from 0.

    ``scheduler(optimizer, **options)`` of torch computes them, so they are the same bits. Composite schedulers come from a
    function: ``lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ...], milestones=[100])``.

    Args:
        scheduler: A class of torch.optim.lr_scheduler, or a function of an optimizer that returns such a scheduler. Its rates
            depend on the step alone.
        lr: The learning rate that the optimizer has.
        **options: The scheduler's arguments.

    Returns:
        ``rate(step)``, for `schedule_lr` or ``update(..., lr=rate(step))``. It reads the step on the host, so a graph of
        `compile` takes its value as an argument.

    Raises:
        TypeError: The scheduler depends on metrics, as ReduceLROnPlateau.
        ValueError: Torch refuses an option, or the scheduler changes more than the rate: CyclicLR and OneCycleLR need
            ``cycle_momentum=False``. ``rate`` raises it for a step that the scheduler does not have.

    Example:
        >>> import torch, funshard as fs
        >>> rate = fs.optim.schedule(torch.optim.lr_scheduler.StepLR, 0.5, step_size=2)
        >>> [rate(step) for step in range(4)]
        [0.5, 0.5, 0.05, 0.05]
    """
    name = getattr(scheduler, "__name__", str(scheduler))
    make = functools.partial(scheduler, **options)
    _begin_schedule(name, make, lr)
    compute = functools.lru_cache(maxsize=None)(functools.partial(_compute_rates, name, make, lr))

    def rate(step: int | Tensor) -> float:
        at = read_count(step, f"schedule: {name}") if isinstance(step, Tensor) else step
        if at < 0:
            raise ValueError(f"schedule: {name}: expected a step from 0 on, got {at}")
        rates, error = compute(max(FIRST_RATES, 1 << at.bit_length()))
        if at >= len(rates):
            raise ValueError(f"schedule: {name}: expected a step below {len(rates)}, got {at}: {error}") from error
        return rates[at]

    return _torch.disable_in_graph(break_message("schedule", "torch's scheduler computes on the host"))(rate)


def _begin_schedule(name: str, make: Callable[[torch.optim.Optimizer], Any], lr: float) -> tuple[_RateHolder, Any]:
    """Return a new optimizer and its scheduler; raise TypeError or ValueError if the scheduler needs more than the step."""
    holder = _RateHolder(lr)
    try:
        made = make(holder)
    except (TypeError, ValueError) as error:
        hint = "; a schedule is of the learning rate alone: give cycle_momentum=False" if "momentum" in str(error) else ""
        raise type(error)(f"schedule: {name}: {error}{hint}") from error
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            f"schedule: {name} depends on metrics, not on the step alone: keep a scheduler beside the run, such as on "
            "torch.optim.SGD([torch.zeros(())], lr=...), step it with a metric that is the same on all ranks, and give update "
            "lr=scheduler.get_last_lr()[0]"
        )
    if not (isinstance(made, torch.optim.lr_scheduler.LRScheduler) and made.optimizer is holder):
        raise TypeError(f"schedule: {name}: expected a scheduler of torch for the optimizer that it is given, got {made!r}")
    return holder, made


def _compute_rates(
    name: str, make: Callable[[torch.optim.Optimizer], Any], lr: float, count: int
) -> tuple[list[float], Exception | None]:
    """Return the rates of the first ``count`` steps, and the scheduler's error if it ends before."""
    holder, made = _begin_schedule(name, make, lr)
    (group,) = holder.param_groups
    rates = [float(group["lr"])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")  # torch's own SequentialLR gives it
        while len(rates) < count:
            holder.step()
            try:
                made.step()
            except Exception as error:  # such as that of OneCycleLR after its last step
                return rates, error
            rates.append(float(group["lr"]))
    return rates, None


class ScheduleState(NamedTuple):
    """The state of `schedule_lr`."""

    inner: Any
    """The optimizer's state."""
    step: Tensor
    """The number of steps taken: int64, on the host, the same on all ranks."""


def schedule_lr(optimizer: AnyOptimizer, rate: Callable[[Tensor], float | Tensor]) -> ComposedOptimizer:
    """Return an optimizer whose update counts its steps and takes ``lr=rate(step)``.

    Args:
        optimizer: ``(init, update)``, whose update has ``lr=``.
        rate: A function of the step, a 0-D int64 tensor that counts from 0, such as `schedule` returns. One of tensor
            operations, ``lambda step: 0.1 * 0.99**step``, can be part of a graph of `compile`.

    Returns:
        A `ComposedOptimizer` with the state `ScheduleState`. Its update refuses an ``lr=`` (TypeError) and passes others on.

    Example:
        >>> import torch, funshard as fs
        >>> sgd = fs.optim.from_torch(torch.optim.SGD)
        >>> rate = fs.optim.schedule(torch.optim.lr_scheduler.StepLR, 0.5, step_size=1)
        >>> init, update = fs.optim.schedule_lr(sgd, rate)
        >>> params = {"": torch.ones(2)}
        >>> params, state = update({"": torch.ones(2)}, init(params), params)
        >>> params, state.step
        ({'': tensor([0.5000, 0.5000])}, tensor(1))
    """
    check_optimizer("schedule_lr", optimizer)
    begin, apply = optimizer

    def init(params: Mapping[str, Tensor], /) -> ScheduleState:
        return ScheduleState(begin(params), torch.zeros((), dtype=torch.int64))

    def update(
        grads: Mapping[str, Tensor], state: ScheduleState, params: Mapping[str, Tensor], /, **rates: Any
    ) -> tuple[Params, ScheduleState]:
        if "lr" in rates:
            raise TypeError("schedule_lr: its schedule gives lr=: expected no other one, or the optimizer without schedule_lr")
        check_state("schedule_lr", state, ScheduleState)
        new, inner = apply(grads, state.inner, params, lr=rate(state.step), **rates)
        return dict(new), ScheduleState(inner, state.step + 1)

    return ComposedOptimizer(init, update)
