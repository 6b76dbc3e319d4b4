"""update_in_backward: each unit's optimizer update as soon as its gradient is there, while backward goes on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._call.schedule import find_entered_unit
from .._core.checks import bind_spec
from .._core.division import ReduceBy
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._transforms.grad import is_differentiated_outside
from .._units.accumulation import GradReceiver
from ..optim._norms import check_max_norm, global_norm, global_norm_from_squares, scale_to_norm, sum_of_squares
from .accumulate import MicrobatchRunner, accumulate, add_grad, replacement_key, start_batches
from .microbatches import check_weight_count, split_first_batch
from .plan import AccumulationPlan, GradSums

__all__ = ["StepResult", "update_in_backward"]

UnitUpdateFn = Callable[[Params, dict[str, Any], Params], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
"""``update(grads, state, params) -> (new params, new state)``, of some units or all, each by itself."""


class StepResult(NamedTuple):
    """The results of a step: params, state, the value of the loss, and the gradient's norm."""

    params: Params
    """The new shards, by unit key."""
    state: dict[str, Any]
    """The new state, by unit key."""
    value: Any
    """The value of the loss, as `accumulate` returns it; with ``has_aux`` ``(value, auxes)``."""
    norm: Tensor | None
    """The norm of the whole gradient before it was clipped; None without ``max_norm``."""


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
    clip: Literal["exact", "previous"] = "exact",
    norm: Tensor | None = None,
) -> StepResult:
    """Return params and state after ``update`` with the gradients of `accumulate`, of which few are alive at a time.

    The backward of the last micro-batch updates each unit once its gradient is complete, and frees the gradient. Equal to
    `accumulate`, `optim.clip_by_global_norm` and ``update``. See ``examples/guide/recipes.md``, "Updates in backward".

    Args:
        update: ``update(grads, state, params)``, called with dicts of one unit; it treats each unit by itself, as those of
            `optim.from_torch` do. With ``donate=True`` it overwrites: an error in backward leaves params half updated.
        f: As in `accumulate`, like the other arguments that are not described here.
        params: Shards, some or all.
        state: The optimizer's state, with the units' keys.
        microbatches: One batch is ``[batch]``: then no sum of gradients is alive either.
        spec: The spec of the shards.
        weights: As in `accumulate`.
        has_aux: As in `accumulate`.
        reduce: As in `accumulate`.
        reduce_axes: As in `accumulate`.
        max_norm: The norm to clip by. A norm that is not finite is the caller's to check, before the next step.
        clip: "exact" runs backward twice, first for the norm of the whole gradient. "previous" clips by ``norm``.
        norm: The norm that the step before returned, or None in the first step, which does not clip.

    Raises:
        ValueError, TypeError: As `accumulate`, and for a unit without state, an update that does not return its unit, and
            arguments of clipping that do not fit.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> loss = lambda params, x: fs.functional_call(model, params, x, spec=spec).sum()
        >>> init, update = fs.optim.from_torch(torch.optim.SGD, lr=1.0)
        >>> params = {"": torch.zeros(8)}
        >>> fs.update_in_backward(update, loss, params, init(params), [torch.tensor([[1.0, 2.0]])], spec=spec).params[""][:2]
        tensor([-1., -2.])

    Source: ``_apply_optimizer_in_backward`` (torch.distributed.optim); the updates by unit of GaLore and LOMO (Lv et al., Full
    Parameter Fine-tuning for Large Language Models with Limited Resources, 2023).
    """
    if clip not in ("exact", "previous"):
        raise ValueError(f"update_in_backward: clip: expected 'exact' or 'previous', got {clip!r}")
    if norm is not None and (max_norm is None or clip == "exact"):
        raise ValueError("update_in_backward: norm is that of the step before: expected max_norm= and clip='previous' with it")
    if max_norm is not None:
        check_max_norm("update_in_backward", max_norm)
    spec = bind_spec(spec)
    if not callable(update):
        raise TypeError(f"update_in_backward: update: expected the second of (init, update), got {type(update).__name__}")
    plan = AccumulationPlan.make(params, spec, "shards", has_aux, reduce, reduce_axes)
    _check_state_keys(state, plan.params)
    batches, known = split_first_batch(microbatches)
    if is_differentiated_outside((params, state, weights, known)):
        how: dict[str, Any] = {"weights": weights, "has_aux": has_aux, "reduce": reduce, "reduce_axes": reduce_axes}
        grads, value = accumulate(f, params, batches, spec=plan.spec, **how)
        now = None if max_norm is None else global_norm(grads, plan.spec)
        grads = _clip(grads, max_norm, now if clip == "exact" else norm, plan.spec)
        new = {key: _update_unit(update, key, g, state, params) for key, g in grads.items()}
        return _make_result(plan, new, value, now)
    plan, batches, scales = start_batches(plan, batches, known, weights)
    return _step_in_place(update, f, plan, state, batches, scales, max_norm, clip, norm)


def _step_in_place(
    update: UnitUpdateFn,
    f: Callable[..., Any],
    plan: AccumulationPlan,
    state: Mapping[str, Any],
    batches: Iterator[Any],
    scales: Tensor | None,
    max_norm: float | Tensor | None,
    clip: str,
    norm: Tensor | None,
) -> StepResult:
    """Run the step by plain autograd, which nothing differentiates."""
    batch, following = next(batches), next(batches, _NONE)
    runs = MicrobatchRunner(f, dataclasses.replace(plan, single=following is _NONE), scales)
    while following is not _NONE:
        runs.backward(runs.forward(batch))
        batch, following = following, next(batches, _NONE)
    last, clips = _LastBackward(runs), max_norm is not None
    loss = runs.forward(batch, last, retains_graph=clips and clip == "exact")
    if scales is not None:
        check_weight_count(scales, len(runs.sums.parts.values))
    new: dict[str, tuple[Tensor, Any]] = {}
    squares: Params = {}

    def measure(key: str, grad: Tensor) -> None:
        squares[key] = sum_of_squares(key, grad, plan.spec)

    def step(key: str, grad: Tensor) -> None:
        if clips and clip == "previous":
            measure(key, grad)
        new[key] = _update_unit(update, key, _clip({key: grad}, max_norm, norm, plan.spec)[key], state, plan.params)

    with torch.no_grad():
        if clips and clip == "exact":
            with _torch.keep_saved_tensors():
                last.backward(loss, measure, retain_graph=True)
            norm = global_norm_from_squares(squares, plan.params, plan.spec)
        last.backward(loss, step)
        if clips and clip == "previous":
            norm = global_norm_from_squares(squares, plan.params, plan.spec)
    value = plan.combine_values(runs.sums.parts.values, scales)
    return _make_result(plan, new, (value, runs.sums.parts.auxes) if plan.has_aux else value, norm)


def _make_result(plan: AccumulationPlan, new: Mapping[str, tuple[Tensor, Any]], value: Any, norm: Tensor | None) -> StepResult:
    return StepResult({key: new[key][0] for key in plan.params}, {key: new[key][1] for key in plan.params}, value, norm)


_NONE = object()


class _LastBackward(GradReceiver):
    """The backward of the last micro-batch: each unit's gradient goes on when all that is part of it is there."""

    def __init__(self, runs: MicrobatchRunner) -> None:
        self._runs, self._plan = runs, runs.plan
        self._sums = runs.sums.parts  # of the micro-batches before
        self._use: Callable[[str, Tensor], object] | None = None
        self._uses: Counter[str] = Counter()  # of each unit in the graph, that backward has not come to
        self._in_flight: Counter[str] = Counter()
        self._incomplete: set[str] = set()  # units whose gradients are complete where backward ends
        self._remaining: dict[str, Unit] = {}

    def backward(self, loss: Tensor, use: Callable[[str, Tensor], object], *, retain_graph: bool = False) -> None:
        """Hand each unit's gradient on. Where the graph is retained the sums are, too, for the backward to come."""
        self._use, self._keeps = use, retain_graph
        self._remaining = {unit.key: unit for unit in self._plan.spec if unit.key in self._plan.params}
        self._runs.sums.parts = GradSums()
        self._incomplete = set()
        handles = list(self._watch(loss))
        try:
            self._runs.backward(loss, retain_graph=retain_graph)
        finally:
            for handle in handles:
                handle.remove()
            self._runs.sums.parts, of_last = self._sums, self._runs.sums.parts
        for key in list(self._remaining):
            self._finish(key, of_last)

    def _watch(self, loss: Tensor) -> Iterator[Any]:
        leaves = {id(x): key for key, x in self._runs.given.items()}
        self._uses.clear()
        for node, following in _torch.iter_nodes(loss):
            uses = [find_entered_unit(other, i, self) for other, i in following]
            for other, _ in following:
                if (key := leaves.get(id(getattr(other, "variable", None)))) is not None and replacement_key(node) is None:
                    self._incomplete.add(key)
                if (key := replacement_key(other)) is not None and find_entered_unit(node, 0, self) is None:
                    self._incomplete.add(key)
            if some := [(j, key) for j, key in enumerate(uses) if key is not None]:
                self._uses.update(key for _, key in some)
                yield node.register_hook(lambda grads, _, some=some: self._on_use(some, grads))

    def _on_use(self, uses: Sequence[tuple[int, str]], grads: Sequence[Tensor | None]) -> None:
        """Count these uses of units as passed, and update each unit whose gradient is complete."""
        for j, key in uses:
            self._uses[key] -= 1
            if grads[j] is not None:
                self._incomplete.add(key)
            self._finish_if_complete(key)

    def expect(self, key: str) -> None:
        self._in_flight[key] += 1

    def cancel(self, key: str) -> None:
        self._in_flight[key] -= 1

    def receive(self, key: str, grad: Tensor) -> None:
        """Add that part, and hand the gradient on if it is complete."""
        self._runs.sums.check(key)
        self._in_flight[key] -= 1
        add_grad(self._runs.sums.parts.through, key, grad)
        self._finish_if_complete(key)

    def _finish_if_complete(self, key: str) -> None:
        if not (self._uses[key] or self._in_flight[key] or key in self._incomplete):
            self._finish(key, self._runs.sums.parts)

    def _finish(self, key: str, of_last: GradSums) -> None:
        """Hand a unit's gradient of all micro-batches on."""
        unit = self._remaining.pop(key)
        whole = GradSums()
        for mine, sums, last in zip(
            (whole.own, whole.through), (self._sums.own, self._sums.through), (of_last.own, of_last.through), strict=True
        ):
            if key in sums:
                mine[key] = sums[key].clone() if self._keeps else sums.pop(key)
            if key in last:
                add_grad(mine, key, last.pop(key))
        assert self._use is not None
        with torch.no_grad():
            self._use(key, self._plan.finish_grad(unit, whole, len(self._sums.values), self._runs.scales))


def _update_unit(
    update: UnitUpdateFn, key: str, grad: Tensor, state: Mapping[str, Any], params: Mapping[str, Tensor]
) -> tuple[Tensor, Any]:
    new, states = update({key: grad}, {key: state[key]}, {key: params[key]})
    for what, tree in (("param", new), ("state", states)):
        if not isinstance(tree, Mapping) or key not in tree:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"unit '{key}': expected the update to return a new {what} for it, got {tree!r:.80}")
    return new[key], states[key]


def _clip(grads: Params, max_norm: float | Tensor | None, norm: Tensor | None, spec: PartitionSpec) -> Params:
    """Clip parts of a gradient whose norm is given; return them as they are without a norm or a maximum."""
    return grads if max_norm is None or norm is None else scale_to_norm(grads, max_norm, norm, spec)


def _check_state_keys(state: object, params: Mapping[str, Tensor]) -> None:
    """Raise TypeError or ValueError unless the state is a dict with an entry for each unit."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"update_in_backward: state: expected a dict by unit key, got {type(state).__name__}; optimizers such as "
            "optim.chain and apply_if_finite need all gradients together: give those of accumulate to their update"
        )
    for key in params:
        if key not in state:
            raise ValueError(f"unit '{key}' has no state: expected that of init(params) or of a step, got {[*state][:8]}")
