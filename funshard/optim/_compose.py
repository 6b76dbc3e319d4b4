"""chain, and its links: clipping, accumulation, averages, finite checks and rates by a schedule, as in Optax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # Dynamo traces it, and not optree

from .. import _torch
from .._core.checks import bind_spec, check_mapping, check_spec
from .._core.layout import Params
from .._core.mesh import check_spans_world
from .._core.spec import PartitionSpec
from .._slices.values import agree_finite, check_decay, find_nonfinite, is_inexact, select_if_finite, upcast, update_average
from .._torch.tracing import LOGGER
from ._checks import Optimizer, Pair, Tensors, break_message, check_tensors, check_trees, is_pair
from ._norms import check_max_norm, clip_by_global_norm
from ._schedules import read_count, read_value

Link = Callable[[Pair], Optimizer]  # a function from an optimizer to one around it


class Transformation(Optimizer):
    """A pair whose update returns gradients."""

    __slots__ = ()


def check_optimizer(who: str, optimizer: object) -> None:
    """Raise TypeError for a pair that returns gradients, and for anything else than a pair of functions."""
    if not is_pair(optimizer):
        raise TypeError(f"{who}: expected (init, update), such as fs.optim.from_torch(torch.optim.AdamW), got {optimizer!r}")
    if isinstance(optimizer, Transformation):
        raise TypeError(
            f"{who}: a gradient transformation returns gradients: expected an optimizer, whose update returns parameters; "
            "fs.optim.chain(transformation, optimizer) makes one"
        )


def _make_link(
    who: str, kind: type[Any], begin: Callable[[Any, Tensors], Any], step: Callable[..., tuple[Mapping[str, Tensor], Any]]
) -> Link:
    """Return the link of ``begin(inner state, params)`` and ``step(update, grads, state, params, **rates)``."""

    def link(optimizer: Pair) -> Optimizer:
        check_optimizer(who, optimizer)

        def init(params: Tensors, /) -> Any:
            return begin(optimizer[0](params), params)

        def update(grads: Tensors, state: Any, params: Tensors, /, **rates: Any) -> tuple[Params, Any]:
            check_tensors(grads, "grads")
            if not isinstance(state, kind):
                got = type(state).__name__
                raise TypeError(f"{who}: state: expected {kind.__name__}, as init(params) or an update returns, got {got}")
            new, after = step(optimizer[1], grads, state, params, **rates)
            return dict(new), after

        return Optimizer(init, update)

    return link


def chain(*links: Pair | Link) -> Optimizer:
    """Return gradient transformations and an optimizer, in this order, and what surrounds them, as one optimizer.

    A pair before the last one changes the gradients of the next pair. A function, as `ema` and `apply_if_finite` return, takes
    the optimizer of all that follows it and returns another. The state is the tuple of the pairs' states, in those of such
    functions; functions of an optimizer's own state, such as `checkpoint.optimizer_state_dict`, take its last entry.

    Args:
        *links: Pairs ``(init, update)``, functions of an optimizer, and the optimizer, which is last, and to which
            ``update(..., **rates)`` passes rates such as ``lr=``. Without it, of pairs such as `clip_gradients` returns, the
            result is such a pair.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> init, update = fs.optim.chain(fs.optim.ema(0.9), fs.optim.clip_gradients(spec, 2.5), fs.optim.sgd(1.0))
        >>> params = {"weight": torch.zeros(1, 2)}
        >>> update({"weight": torch.tensor([[3.0, 4.0]])}, init(params), params)[0]
        {'weight': tensor([[-1.5000, -2.0000]])}

    Source: ``optax.chain``.
    """
    if not links:
        raise ValueError("chain: expected transformations and an optimizer, got nothing")
    for i, link in enumerate(links[:-1]):
        if not (is_pair(link) or (callable(link) and not isinstance(link, type))):
            raise TypeError(f"chain: argument {i}: expected (init, update), or a function of an optimizer, got {link!r}")
        if isinstance(link, Optimizer) and not isinstance(link, Transformation):
            raise ValueError(
                f"chain: argument {i} of {len(links)} is an optimizer, which returns parameters: expected it last, after what "
                "changes the gradients"
            )
    if not is_pair(links[-1]):
        raise TypeError(f"chain: argument {len(links) - 1}: expected (init, update), got {links[-1]!r}")
    pairs: list[Any] = []
    for link in reversed(links):
        pairs = [link(pairs[0] if len(pairs) == 1 else _chain_pairs(pairs))] if callable(link) else [link, *pairs]
    return pairs[0] if callable(links[0]) else _chain_pairs(pairs)


def _chain_pairs(pairs: list[Pair]) -> Optimizer:
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

    return (Transformation if isinstance(pairs[-1], Transformation) else Optimizer)(init, update)


def clip_gradients(spec: PartitionSpec, max_norm: float | Tensor, *, p: float = 2.0) -> Optimizer:
    """Return `clip_by_global_norm` as a pair for `chain`, which changes gradients. It has no state.

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
    update = lambda grads, state, params, /: (clip_by_global_norm(grads, spec, max_norm, p=p)[0], state)  # noqa: E731
    return Transformation(lambda params, /: (), update)


class AccumulationState(NamedTuple):
    """The state of `accumulate_steps`: how many gradients, below k, are in the sums, of float32 at least."""

    inner: Any
    num_summed: Tensor
    sums: Params


def accumulate_steps(k: int) -> Link:
    """Return a link whose optimizer takes one step for every k updates, with the mean of their gradients.

    The others return the given parameters. For gradients that come one by one; `accumulate` takes micro-batches together.
    Whether it steps is a branch on the host, so inside `compile` and torch.compile the update breaks the graph.

    Args:
        k: The number of updates for one step, at least 1 (otherwise ValueError).

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.chain(fs.optim.accumulate_steps(2), fs.optim.sgd(1.0))
        >>> params = {"": torch.zeros(2)}
        >>> state = init(params)
        >>> for g in (1.0, 3.0):
        ...     params, state = update({"": torch.full((2,), g)}, state, params)
        ...     print(params)
        {'': tensor([0., 0.])}
        {'': tensor([-2., -2.])}

    Source: ``optax.MultiSteps``.
    """
    if k < 1 or k % 1:
        raise ValueError(f"accumulate_steps: k: expected a whole number from 1 on, got {k}")

    def begin(inner: Any, params: Tensors) -> AccumulationState:
        sums = {key: torch.zeros_like(upcast(x)) for key, x in params.items() if is_inexact(x)}
        return AccumulationState(inner, torch.zeros((), dtype=torch.int64), sums)

    def step(update: Any, grads: Tensors, state: AccumulationState, params: Tensors, **rates: Any) -> tuple[Tensors, Any]:
        check_trees(params, grads, params, state.sums)
        count = read_count(state.num_summed, "accumulate_steps", planned=k - 1) + 1
        if count > k:
            raise ValueError(f"accumulate_steps: the state has {count - 1} gradients of a larger k: expected less than k={k}")
        sums = {key: total + upcast(grads[key]) for key, total in state.sums.items()}
        if count < k:
            return params, AccumulationState(state.inner, state.num_summed + 1, sums)
        means = {key: (sums[key] / k).to(g.dtype) if key in sums else g for key, g in grads.items()}
        new, inner = update(means, state.inner, params, **rates)
        zeros = {key: torch.zeros_like(total) for key, total in sums.items()}
        return new, AccumulationState(inner, torch.zeros_like(state.num_summed), zeros)

    reason = break_message("accumulate_steps", "whether it steps is a branch on the host")
    return _make_link("accumulate_steps", AccumulationState, begin, _torch.disable_in_graph(reason)(step))


class EmaState(NamedTuple):
    """The state of `ema`: slices of the average, to evaluate with, and the number of steps taken."""

    inner: Any
    average: Params
    step: Tensor


def ema(decay: float | Callable[[Tensor], float | Tensor], *, dtype: torch.dtype | None = None) -> Link:
    """Return a link whose optimizer keeps a moving average of the parameters in its state.

    ``optax.ema`` is another one, of gradients: a transformation for `chain`.

    Args:
        decay: The weight of the average so far, in 0..1 (otherwise ValueError), or a function that returns it for the step, a
            0-D int64 tensor that counts from 0, such as ``lambda step: ((1 + step) / (10 + step)).clamp(max=0.999)``.
        dtype: The dtype of the average; by default that of the parameters, and float32 for narrower ones: bfloat16 would round
            each step of the average away.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.chain(fs.optim.ema(0.75), fs.optim.sgd(1.0))
        >>> params = {"": torch.zeros(2)}
        >>> update({"": torch.ones(2)}, init(params), params)[1].average
        {'': tensor([-0.2500, -0.2500])}
    """
    if not callable(decay):
        check_decay(decay)

    def begin(inner: Any, params: Tensors) -> EmaState:
        dtypes = {key: dtype or torch.promote_types(x.dtype, torch.float32) for key, x in params.items() if is_inexact(x)}
        average = {key: x.to(dtypes.get(key, x.dtype), copy=True) for key, x in params.items()}
        return EmaState(inner, average, torch.zeros((), dtype=torch.int64))

    def step(update: Any, grads: Tensors, state: EmaState, params: Tensors, **rates: Any) -> tuple[Tensors, Any]:
        new, inner = update(grads, state.inner, params, **rates)
        weight = decay(state.step) if callable(decay) else decay
        return new, EmaState(inner, update_average(state.average, new, weight), state.step + 1)

    return _make_link("ema", EmaState, begin, step)


class FiniteState(NamedTuple):
    """The state of `apply_if_finite`: how many steps were skipped since the last one that was not, and in all."""

    inner: Any
    consecutive: Tensor
    total: Tensor


def apply_if_finite(spec: PartitionSpec, *, max_consecutive: int | None = None) -> Link:
    """Return a link whose optimizer's step all ranks skip if a gradient on any of them is inf or NaN.

    A skipped step returns the given parameters and state, bit for bit, also of an optimizer with ``donate=True``: ranks agree
    before the update, by an all-reduce of one number for each mesh axis, which the host waits for. It is counted in the state,
    and logged at INFO by the logger "funshard" with this rank's units that are not finite. In a graph of `compile` the update
    of such a step runs, on ones as gradients, and its result is dropped.

    Args:
        spec: The spec of the gradients.
        max_consecutive: How many steps in a row may be skipped. One more is a FloatingPointError on all ranks, before anything
            changes; optax applies that step, which makes the parameters NaN. Not in a graph: read ``state.consecutive`` there.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> init, update = fs.optim.chain(fs.optim.apply_if_finite(spec), fs.optim.sgd(1.0))
        >>> params = {"weight": torch.ones(1, 2)}
        >>> update({"weight": torch.tensor([[torch.nan, 1.0]])}, init(params), params)[0]
        {'weight': tensor([[1., 1.]])}

    Source: ``optax.apply_if_finite``.
    """
    check_spec(spec)
    if max_consecutive is not None and max_consecutive < 0:
        raise ValueError(f"apply_if_finite: max_consecutive: expected a number from 0 on, or None, got {max_consecutive}")

    def begin(inner: Any, params: Tensors) -> FiniteState:
        device = next((x.device for x in params.values()), None)  # where the gradients are: a graph counts without a copy
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return FiniteState(inner, zero, zero.clone())

    def step(update: Any, grads: Tensors, state: FiniteState, params: Tensors, **rates: Any) -> tuple[Tensors, Any]:
        bound = bind_spec(spec)
        check_spans_world(bound.bound_mesh, "apply_if_finite")
        nonfinite = find_nonfinite({key: g.detach() for key, g in grads.items()}, bound)
        finite = agree_finite(nonfinite, bound)
        applies = read_value(finite, planned=True)
        if applies is None:
            if max_consecutive is not None:
                raise ValueError(
                    "apply_if_finite: max_consecutive: an error needs the host, which reads no value in a graph: expected "
                    "None, and a look at state.consecutive after the step"
                )
            # a dropped step gets ones, since NaN and zeros may reach derivatives, and copies of the rest, since it may donate
            safe = {key: torch.where(finite.to(g.device), g, torch.ones_like(g)) for key, g in grads.items()}
            given = dict(params), state.inner
            copied, inner = pytree.tree_map_only(Tensor, torch.clone, given)
            new, inner = update(safe, inner, copied, **rates)
            new, inner = select_if_finite(finite, (dict(new), inner), given)
            consecutive, total = state.consecutive.to(finite.device), state.total.to(finite.device)
            skipped = (~finite).to(total.dtype)
            return new, FiniteState(inner, (consecutive + 1) * skipped, total + skipped)
        if applies:
            new, inner = update(grads, state.inner, params, **rates)
            return new, FiniteState(inner, torch.zeros_like(state.consecutive), state.total)
        counted = FiniteState(state.inner, state.consecutive + 1, state.total + 1)
        in_a_row = read_count(counted.consecutive, "apply_if_finite")
        here = [] if _torch.is_batched(nonfinite) else [key for key, bad in zip(grads, nonfinite.tolist(), strict=True) if bad]
        where = f"in units {here[:8]}" if here else "on another rank"
        if max_consecutive is not None and in_a_row > max_consecutive:
            raise FloatingPointError(
                f"apply_if_finite: the gradients of {in_a_row} steps in a row were not finite, now {where}: expected at most "
                f"{max_consecutive}; nothing is changed: go on from a checkpoint, with another learning rate or other data"
            )
        message = "apply_if_finite: a step is skipped, %d in a row, %d in all: gradients are not finite %s"
        LOGGER.info(message, in_a_row, read_count(counted.total, "apply_if_finite"), where)
        return params, counted

    return _make_link("apply_if_finite", FiniteState, begin, step)


class ScheduleState(NamedTuple):
    """The state of `schedule_lr`: with the number of steps taken, int64, on the host, the same on all ranks."""

    inner: Any
    step: Tensor


def schedule_lr(rate: Callable[[Tensor], float | Tensor]) -> Link:
    """Return a link whose optimizer's update counts its steps and takes ``lr=rate(step)``.

    Args:
        rate: A function of the step, a 0-D int64 tensor that counts from 0, such as `schedule` returns. One of tensor
            operations, ``lambda step: 0.1 * 0.99**step``, can be part of a graph of `compile`. An ``lr=`` beside it is refused.

    Example:
        >>> import torch, funshard as fs
        >>> rate = fs.optim.schedule(torch.optim.lr_scheduler.StepLR, 0.5, step_size=1)
        >>> init, update = fs.optim.chain(fs.optim.schedule_lr(rate), fs.optim.sgd(0.5))
        >>> params = {"": torch.ones(2)}
        >>> params, state = update({"": torch.ones(2)}, init(params), params)
        >>> params, state.step
        ({'': tensor([0.5000, 0.5000])}, tensor(1))
    """

    def step(update: Any, grads: Tensors, state: ScheduleState, params: Tensors, **rates: Any) -> tuple[Tensors, Any]:
        if "lr" in rates:
            raise TypeError("schedule_lr: its schedule gives lr=: expected no other one, or the optimizer without schedule_lr")
        new, inner = update(grads, state.inner, params, lr=rate(state.step), **rates)
        return new, ScheduleState(inner, state.step + 1)

    begin = lambda inner, params: ScheduleState(inner, torch.zeros((), dtype=torch.int64))  # noqa: E731
    return _make_link("schedule_lr", ScheduleState, begin, step)
