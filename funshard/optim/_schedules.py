"""Learning rates as functions of the step: cosine, linear, warmup and join, as in Optax, and torch's schedulers by a table."""

from __future__ import annotations

import bisect
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ._checks import break_message

Schedule = Callable[[int | Tensor], Any]
"""A function of the step, which counts from 0: of tensor operations for a tensor, and a number for a number."""


def read_value(x: Tensor, planned: Any) -> Any:
    """Return a number's value on the host, ``planned`` for a fake tensor; None if it is recorded or simulated ranks differ."""
    if _torch.is_in_graph() or _torch.is_tracing():
        return None
    values = _torch.unwrap(x)
    numbers = {planned} if _torch.is_fake(values) else {*values.reshape(-1).tolist()}
    return numbers.pop() if len(numbers) == 1 else None


def read_count(count: Tensor, who: str, *, planned: int = 0) -> int:
    """Return the value of a count of steps, as `read_value`; raise ValueError if it has none."""
    if (number := read_value(count, planned)) is None:
        raise ValueError(
            f"{who}: the count of steps in its state has no value where operators are recorded, nor where simulated ranks have "
            "others: expected the same count of steps on all ranks, and this update outside of what is recorded"
        )
    return number


def _of_any_step(f: Callable[[Tensor], Tensor]) -> Schedule:
    """Return the function for steps that are tensors, in float64, and for numbers."""

    def rate(step: int | Tensor) -> float | Tensor:
        return f(step.double()) if isinstance(step, Tensor) else f(torch.tensor(float(step), dtype=torch.float64)).item()

    return rate


def linear(init_value: float, end_value: float, transition_steps: int) -> Schedule:
    """Return a schedule from ``init_value`` to ``end_value`` in so many steps, and then ``end_value``.

    Args:
        init_value: The rate of step 0.
        end_value: The last rate.
        transition_steps: The number of steps between, at least 1.

    Example:
        >>> import funshard as fs
        >>> [fs.optim.linear(1.0, 0.0, 4)(step) for step in (0, 1, 9)]
        [1.0, 0.75, 0.0]

    Source: ``optax.linear_schedule``.
    """
    if transition_steps < 1:
        raise ValueError(f"linear: expected transition_steps of 1 or more, got {transition_steps}")
    rise = end_value - init_value
    return _of_any_step(lambda step: init_value + rise * step.clamp(max=transition_steps) / transition_steps)


def cosine(init_value: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Return a schedule from ``init_value`` to ``alpha init_value`` along half a period of a cosine, and then constant.

    Args:
        init_value: The rate of step 0.
        decay_steps: The number of steps to the last rate, at least 1.
        alpha: The last rate, as a part of the first.

    Example:
        >>> import funshard as fs
        >>> [round(fs.optim.cosine(1.0, 4)(step), 3) for step in (0, 1, 2, 9)]
        [1.0, 0.854, 0.5, 0.0]

    Source: ``optax.cosine_decay_schedule``.
    """
    if decay_steps < 1:
        raise ValueError(f"cosine: expected decay_steps of 1 or more, got {decay_steps}")

    def rate(step: Tensor) -> Tensor:
        decay = 0.5 * (1 + (math.pi * step.clamp(max=decay_steps) / decay_steps).cos())
        return init_value * ((1 - alpha) * decay + alpha)

    return _of_any_step(rate)


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Return one schedule after the other; each counts its steps from the boundary at which it begins.

    Args:
        schedules: Functions of the step.
        boundaries: The first step of each schedule but the first one, in rising order.

    Example:
        >>> import funshard as fs
        >>> rate = fs.optim.join([fs.optim.linear(0.0, 1.0, 2), fs.optim.linear(1.0, 0.0, 4)], [2])
        >>> [rate(step) for step in (0, 1, 2, 3)]
        [0.0, 0.5, 1.0, 0.75]

    Source: ``optax.join_schedules``.
    """
    begins = [0, *boundaries]
    if len(begins) != len(schedules) or any(a >= b for a, b in itertools.pairwise(begins)):
        raise ValueError(f"join: expected rising boundaries of all {len(schedules)} schedules but the first, got {boundaries}")

    def rate(step: int | Tensor) -> Any:
        known: Any = read_value(step, 0) if isinstance(step, Tensor) and step.device.type == "cpu" else step
        if isinstance(step, Tensor) and (known is None or known is step):  # recorded, batched, or on a device
            out: Any = math.nan
            for following, begin in zip(schedules, begins, strict=True):
                value = torch.as_tensor(following((step - begin).clamp(min=0)), dtype=torch.float64)
                out = torch.where(step >= begin, value, out)
            return out
        i = bisect.bisect(boundaries, known)  # the others may have ended, or not begun
        return schedules[i](step - begins[i])

    return rate


def warmup(schedule: Schedule, steps: int, init_value: float = 0.0) -> Schedule:
    """Return a schedule that rises from ``init_value`` to the first rate of another in so many steps, and then follows it.

    Args:
        schedule: The schedule that follows, with step 0 at the end of the warmup.
        steps: The number of steps of the warmup, at least 1.
        init_value: The rate of step 0.

    Example:
        >>> import funshard as fs
        >>> rate = fs.optim.warmup(fs.optim.cosine(1.0, 100), 4)
        >>> [rate(step) for step in (0, 2, 4)]
        [0.0, 0.5, 1.0]

    Source: ``optax.warmup_cosine_decay_schedule``.
    """
    return join([linear(init_value, float(schedule(0)), steps), schedule], [steps])


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
        `compile` takes its value as an argument. What depends on metrics or changes more than the rate is refused: CyclicLR
        and OneCycleLR need ``cycle_momentum=False``.

    Example:
        >>> import torch, funshard as fs
        >>> rate = fs.optim.schedule(torch.optim.lr_scheduler.StepLR, 0.5, step_size=2)
        >>> [rate(step) for step in range(4)]
        [0.5, 0.5, 0.05, 0.05]
    """
    name = getattr(scheduler, "__name__", str(scheduler))
    holder = torch.optim.Optimizer([torch.zeros(())], {"lr": lr})  # without momentum or any other option
    try:
        made = scheduler(holder, **options)
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
    (group,) = holder.param_groups
    rates = [float(group["lr"])]

    def rate(step: int | Tensor) -> float:
        at = read_count(step, f"schedule: {name}") if isinstance(step, Tensor) else step
        if at < 0:
            raise ValueError(f"schedule: {name}: expected a step from 0 on, got {at}")
        while len(rates) <= at:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of steps without one of the optimizer, and of torch's own SequentialLR
                    made.step()
            except Exception as error:  # such as that of OneCycleLR after its last step
                raise ValueError(f"schedule: {name}: expected a step below {len(rates)}, got {at}: {error}") from error
            rates.append(float(group["lr"]))
        return rates[at]

    return _torch.disable_in_graph(break_message("schedule", "torch's scheduler computes on the host"))(rate)
