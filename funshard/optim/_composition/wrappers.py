"""Optimizers made of others: chain, ema, accumulate_steps, apply_if_finite and schedule_lr, as in Optax."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from ... import _torch
from ..._core.checks import bind_spec, check_mapping, check_spec
from ..._core.layout import Params
from ..._core.spec import PartitionSpec
from ..._slices.finite import agree_finite, find_nonfinite, select_if_finite
from ..._slices.moving_average import check_decay, is_averaged, update_average
from ..._torch.phases import LOGGER
from ...collectives._world import check_spans_world
from .._by_matrix.optimizer import MatrixOptimizer
from .._checks import Tensors, break_message, check_tensors
from .._elementwise.optimizer import Optimizer
from .._elementwise.torch_optimizer import is_updated
from .._norms import check_max_norm, clip_by_global_norm, upcast
from .pairs import (
    AnyOptimizer,
    ComposedOptimizer,
    GradientTransformation,
    check_optimizer,
    check_state,
    is_pair,
    read_count,
    read_flag,
)

__all__ = ["AccumulationState", "EmaState", "FiniteState", "ScheduleState", "accumulate_steps", "apply_if_finite", "chain"]
__all__ += ["clip_gradients", "ema", "schedule", "schedule_lr"]


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

    def init(params: Tensors, /) -> AccumulationState:
        sums = {key: torch.zeros_like(upcast(x)) for key, x in params.items() if is_updated(x)}
        return AccumulationState(begin(params), torch.zeros((), dtype=torch.int64), sums)

    def update(grads: Tensors, state: AccumulationState, params: Tensors, /, **rates: Any) -> tuple[Params, AccumulationState]:
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


@overload
def chain(*pairs: GradientTransformation) -> GradientTransformation: ...  # pyright: ignore[reportOverlappingOverload]


@overload
def chain(*pairs: AnyOptimizer) -> ComposedOptimizer: ...


def chain(*pairs: AnyOptimizer) -> GradientTransformation | ComposedOptimizer:
    """Return gradient transformations and an optimizer, in this order, as one optimizer.

    The first result of each update is the gradients of the next one; the optimizer, which is last, returns the parameters. The
    state is the tuple of their states. `checkpoint.save` takes it as it is; functions that take an optimizer's own state, such
    as `checkpoint.optimizer_state_dict`, take its last entry.

    Args:
        *pairs: ``(init, update)``: transformations, `GradientTransformation` or functions of yours, and an optimizer. Without
            an optimizer the last one is a `GradientTransformation`, and so is the result.

    Returns:
        A `ComposedOptimizer`. ``update(grads, state, params, **rates)`` passes ``rates``, such as ``lr=``, to the optimizer.

    Raises:
        TypeError: An argument is no pair of functions.
        ValueError: An optimizer is not the last one; in ``update``, a state of another chain, or a transformation that returns
            other keys than those of its gradients.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> sgd = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
        >>> init, update = fs.optim.chain(fs.optim.clip_gradients(spec, 2.5), sgd)
        >>> params = {"weight": torch.zeros(1, 2)}
        >>> update({"weight": torch.tensor([[3.0, 4.0]])}, init(params), params)[0]
        {'weight': tensor([[-1.5000, -2.0000]])}

    Source: ``optax.chain``.
    """
    if not pairs:
        raise ValueError("chain: expected transformations and an optimizer, got nothing")
    for i, pair in enumerate(pairs):
        if not is_pair(pair):
            raise TypeError(f"chain: argument {i}: expected (init, update), got {pair!r}")
        if isinstance(pair, Optimizer | MatrixOptimizer | ComposedOptimizer) and i < len(pairs) - 1:
            raise ValueError(
                f"chain: argument {i} of {len(pairs)} is an optimizer, which returns parameters: expected it last, after what "
                "changes the gradients"
            )
    *transformations, (last_init, last_update) = pairs

    def init(params: Tensors, /) -> tuple[Any, ...]:
        return (*(begin(params) for begin, _ in transformations), last_init(params))

    def update(grads: Tensors, state: tuple[Any, ...], params: Tensors, /, **rates: Any) -> tuple[Params, tuple[Any, ...]]:
        check_mapping(grads, "grads")
        if not isinstance(state, tuple) or len(state) != len(pairs):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"{len(state)}" if isinstance(state, tuple) else type(state).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"chain: state: expected a tuple of {len(pairs)}, as init(params) returns, got {got}")
        new: list[Any] = []
        for i, ((_, transform), own) in enumerate(zip(transformations, state[:-1], strict=True)):
            changed, after = transform(grads, own, params)
            check_mapping(changed, f"chain: the gradients that transformation {i} returns")
            if changed.keys() != grads.keys():
                key = next(iter(changed.keys() ^ grads.keys()))
                raise ValueError(f"chain: transformation {i}: expected gradients of the same keys, got others: '{key}'")
            grads = changed
            new.append(after)
        result, after = last_update(grads, state[-1], params, **rates)
        return dict(result), (*new, after)

    return (GradientTransformation if isinstance(pairs[-1], GradientTransformation) else ComposedOptimizer)(init, update)


def clip_gradients(spec: PartitionSpec, max_norm: float | Tensor, *, p: float = 2.0) -> GradientTransformation:
    """Return `clip_by_global_norm` as a gradient transformation for `chain`. It has no state.

    Args:
        spec: The spec of the gradients.
        max_norm: The largest norm of all gradients together, >= 0 (otherwise ValueError).
        p: The order of the norm.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> init, update = fs.optim.clip_gradients(spec, 2.5)
        >>> grads = {"weight": torch.tensor([[3.0, 4.0]])}
        >>> update(grads, init(grads), grads)
        ({'weight': tensor([[1.5000, 2.0000]])}, ())
    """
    check_spec(spec)
    check_max_norm("clip_gradients", max_norm)

    def update(grads: Tensors, state: tuple[()], params: object, /) -> tuple[Params, tuple[()]]:
        return clip_by_global_norm(grads, spec, max_norm, p=p)[0], state

    return GradientTransformation(lambda params, /: (), update)


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

    def init(params: Tensors, /) -> EmaState:
        dtypes = {key: dtype or torch.promote_types(x.dtype, torch.float32) for key, x in params.items() if is_averaged(x)}
        average = {key: x.to(dtypes.get(key, x.dtype), copy=True) for key, x in params.items()}
        return EmaState(begin(params), average, torch.zeros((), dtype=torch.int64))

    def update(grads: Tensors, state: EmaState, params: Tensors, /, **rates: Any) -> tuple[Params, EmaState]:
        check_state("ema", state, EmaState)
        new, inner = apply(grads, state.inner, params, **rates)
        weight = decay(state.step) if callable(decay) else decay
        return dict(new), EmaState(inner, update_average(state.average, new, weight), state.step + 1)

    return ComposedOptimizer(init, update)


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

    def init(params: Tensors, /) -> FiniteState:
        device = next((x.device for x in params.values()), None)  # where the gradients are: a graph counts without a copy
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return FiniteState(begin(params), zero, zero.clone())

    def update(grads: Tensors, state: FiniteState, params: Tensors, /, **rates: Any) -> tuple[Params, FiniteState]:
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
    optimizer: AnyOptimizer, finite: Tensor, grads: Tensors, state: FiniteState, params: Tensors, rates: Mapping[str, Any]
) -> tuple[Params, FiniteState]:
    """Return the step's result if ``finite``, else what was given, without a branch on the host.

    A dropped step gets ones as gradients, because NaN and zeros may reach derivatives, and copies of the rest: it may donate.
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


# --- schedule, schedule_lr: learning rate schedules of torch as functions of the step, and an optimizer that follows one ---


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

    def init(params: Tensors, /) -> ScheduleState:
        return ScheduleState(begin(params), torch.zeros((), dtype=torch.int64))

    def update(grads: Tensors, state: ScheduleState, params: Tensors, /, **rates: Any) -> tuple[Params, ScheduleState]:
        if "lr" in rates:
            raise TypeError("schedule_lr: its schedule gives lr=: expected no other one, or the optimizer without schedule_lr")
        check_state("schedule_lr", state, ScheduleState)
        new, inner = apply(grads, state.inner, params, lr=rate(state.step), **rates)
        return dict(new), ScheduleState(inner, state.step + 1)

    return ComposedOptimizer(init, update)
