"""update_in_backward: each unit's optimizer update as soon as its gradient is there, while backward goes on."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .. import _torch
from .._call.schedule import Schedule
from .._core.flow import ReduceBy
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._wire.accumulation import GradReceiver
from ..optim._norms import check_max_norm, global_norm_from_squares, scale_to_norm, sum_of_squares
from .accumulate import AccumulationPlan, GradSums, add_up, replacement_key

UnitUpdateFn = Callable[[Params, dict[str, Any], Params], tuple[Mapping[str, Tensor], Mapping[str, Any]]]


class StepResult(NamedTuple):
    """The results of a step: params, state, the value of the loss, and the gradient's norm."""

    params: Params  # the new shards, by unit key
    state: dict[str, Any]  # the new state, by unit key
    value: Any  # the value of the loss, as `accumulate` returns it; with ``has_aux`` ``(value, auxes)``
    norm: Tensor | None  # the norm of the whole gradient before it was clipped; None without ``max_norm``


def update_in_backward(
    update: UnitUpdateFn,
    f: Callable[..., Any],
    params: Mapping[str, Tensor],
    state: Mapping[str, Any],
    microbatches: Iterable[Any],
    *,
    spec: PartitionSpec,
    weights: Sequence[float | Tensor] | None = None,
    has_aux: bool = False,
    reduce: ReduceBy = "mean",
    reduce_axes: Iterable[str] | None = None,
    max_norm: float | Tensor | None = None,
    clip: Literal["previous"] | None = None,
    norm: Tensor | None = None,
) -> StepResult:
    """Return params and state after ``update`` with the gradients of `accumulate`, of which few are alive at a time.

    The backward of the last micro-batch updates each unit once its gradient is complete, and frees the gradient. Equal to
    `accumulate` and ``update``. See ``examples/guide/recipes.md``, "Updates in backward".

    Args:
        update: ``update(grads, state, params)``, called with dicts of one unit; it treats each unit by itself, as those of
            `optim.from_torch` do. With ``donate=True`` it overwrites: an error in backward leaves params half updated.
        f: As in `accumulate`.
        params: Shards, some or all.
        state: The optimizer's state, with the units' keys.
        microbatches: One batch is ``[batch]``: then no sum of gradients is alive either.
        spec: The spec of the shards.
        weights, has_aux, reduce, reduce_axes: As in `accumulate`.
        max_norm: The norm to clip by. A norm that is not finite is the caller's to check, before the next step.
        clip: "previous" with ``max_norm``: by ``norm``. Clipping by the norm of the gradient itself needs all of it:
            `accumulate`, `optim.clip_by_global_norm` and ``update``.
        norm: The norm that the step before returned, or None in the first step, which does not clip.

    Raises:
        ValueError, TypeError: As `accumulate`, and for a state, an update or arguments of clipping that do not fit.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> loss = lambda params, x: fs.functional_call(model, params, x, spec=spec).sum()
        >>> init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
        >>> params = {"": torch.zeros(8)}
        >>> fs.update_in_backward(update, loss, params, init(params), [torch.tensor([[1.0, 2.0]])], spec=spec).params[""][:2]
        tensor([-1., -2.])

    Source: ``_apply_optimizer_in_backward`` (torch.distributed.optim); LOMO (Lv et al., 2023).
    """
    if clip not in (None, "previous") or (max_norm is not None and clip is None):
        raise ValueError(
            f"update_in_backward: clip: expected 'previous' with max_norm=, got {clip!r}; to clip by the norm of this step's "
            "gradient, which needs all of it: accumulate, optim.clip_by_global_norm and update"
        )
    if max_norm is not None:
        check_max_norm("update_in_backward", max_norm)
    elif norm is not None:
        raise ValueError("update_in_backward: norm is that of the step before: expected max_norm= with it")
    plan = AccumulationPlan.make(params, microbatches, spec, weights, has_aux, reduce, reduce_axes)
    if not callable(update):
        raise TypeError(f"update_in_backward: update: expected the second of (init, update), got {type(update).__name__}")
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"update_in_backward: state: expected a dict by unit key, got {type(state).__name__}; optimizers such as "
            "optim.chain and apply_if_finite need all gradients together: give those of accumulate to their update"
        )
    for key in params:
        if key not in state:
            raise ValueError(f"unit '{key}' has no state: expected that of init(params) or of a step, got {[*state][:8]}")
    new: dict[str, tuple[Tensor, Any]] = {}
    squares: Params = {}

    def step(key: str, grad: Tensor) -> None:
        if max_norm is not None:
            squares[key] = sum_of_squares(key, grad, plan.spec)
        clipped = {key: grad} if max_norm is None or norm is None else scale_to_norm({key: grad}, max_norm, norm, plan.spec)
        params_and_state = update(clipped, {key: state[key]}, {key: plan.params[key]})
        for what, tree in zip(("param", "state"), params_and_state, strict=True):
            if not isinstance(tree, Mapping) or key not in tree:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"unit '{key}': expected the update to return a new {what} for it, got {tree!r:.80}")
        new[key] = params_and_state[0][key], params_and_state[1][key]

    sums = _UpdatingSums(plan, step)
    value = add_up(f, plan, sums)
    with torch.no_grad() if plan.in_place else contextlib.nullcontext():
        for key in [*sums.remaining]:
            sums.finish(key)
        now = None if max_norm is None else global_norm_from_squares(squares, plan.params, plan.spec)
    return StepResult({key: new[key][0] for key in params}, {key: new[key][1] for key in params}, value, now)


class _UpdatingSums(GradSums):
    """Sums that hand each unit's gradient on in the last backward, when all that is part of it is there."""

    def __init__(self, plan: AccumulationPlan, use: Callable[[str, Tensor], object]) -> None:
        super().__init__()
        self._plan, self._use, self._is_last = plan, use, False
        self._uses: Counter[str] = Counter()  # of each unit in the graph, that backward has not come to
        self._in_flight: Counter[str] = Counter()
        self._incomplete: set[str] = set()  # units whose gradients are complete where backward ends
        self.remaining = {unit.key: unit for unit in plan.units}

    def begin_last(self, loss: Tensor, given: Params) -> None:
        self._in_flight.clear()
        leaves = {id(x): key for key, x in given.items()}
        for node, following in _torch.iter_nodes([loss.grad_fn]):
            for other, _ in following:
                if (key := leaves.get(id(getattr(other, "variable", None)))) is not None and replacement_key(node) is None:
                    self._incomplete.add(key)
                if (key := replacement_key(other)) is not None and _find_entered_unit(node, 0, self) is None:
                    self._incomplete.add(key)
            entered = [_find_entered_unit(other, i, self) for other, i in following]
            if uses := [(j, key) for j, key in enumerate(entered) if key is not None]:
                self._uses.update(key for _, key in uses)
                node.register_hook(functools.partial(self._on_use, uses))
        self._is_last = True

    def _on_use(self, uses: Sequence[tuple[int, str]], grads: Sequence[Tensor | None], _: object) -> None:
        for j, key in uses:
            self._uses[key] -= 1
            if grads[j] is not None:
                self._incomplete.add(key)
            self._finish_if_complete(key)

    def expect(self, key: str) -> None:
        self._in_flight[key] += 1

    def receive(self, key: str, grad: Tensor) -> None:
        super().receive(key, grad)
        self._in_flight[key] -= 1
        self._finish_if_complete(key)

    def _finish_if_complete(self, key: str) -> None:
        if self._is_last and not (self._uses[key] or self._in_flight[key] or key in self._incomplete):
            with torch.no_grad():
                self.finish(key)

    def finish(self, key: str) -> None:
        """Hand a unit's gradient of all micro-batches on."""
        self._use(key, self._plan.finish_grad(self.remaining.pop(key), self))


def _find_entered_unit(node: object, i: int, receiver: GradReceiver) -> str | None:
    """Return the unit whose shard this result of a graph's node is, where a call begins whose gradients this receiver takes."""
    schedule = getattr(node, "schedule", None)
    if isinstance(node, BackwardCFunction) and isinstance(schedule, Schedule) and schedule.receiver is receiver:
        return cast("Any", node).keys[i]
    return None
