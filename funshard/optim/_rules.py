"""sgd, adam, adamw, lion, rmsprop and adagrad: pure functions of tensors, for derivatives, batches and graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._slices.pieces import padding_mask
from . import _checks
from ._checks import Optimizer, OptionRanges, ParamOptions, State, StateMapping, Tensors

Rate = float | Tensor | Callable[[Tensor], float | Tensor]  # a learning rate, or a function of the step, from 0 on
Own = tuple[PartitionSpec | None, ParamOptions | None]  # the spec, and options of single parameters
Slots = dict[str, Tensor]
Step = tuple[Tensor, Slots]  # new param and new slots
Rule = Callable[..., Step]
"""``rule(grad, param, slots, step, lr, **options)``; the step, which counts from 1, is a 0-D float64 tensor."""


def _make_optimizer(
    name: str, rule: Rule, learning_rate: Rate, slots: dict[str, float], hyper: dict[str, Any], own: Own, counts: bool = True
) -> Optimizer:
    """Return the pair of a rule; ``slots`` are initial values, ``hyper`` its options, ``own`` the ``(spec, options)``."""
    spec, options = own
    if not callable(learning_rate):
        _checks.check_rate(learning_rate, f"{name}: learning_rate", optional=False)
    counts = counts or callable(learning_rate)
    _checks.check_nonnegative(name, **{key: x for key, x in hyper.items() if x is not None and not isinstance(x, Tensor)})
    for key, x in hyper.items():
        if key in ("b1", "b2", "decay") and isinstance(x, float | int) and not x < 1:
            raise ValueError(f"{name}: {key}: expected a number below 1, got {x}")

    def check(param: str, given: Mapping[str, Any]) -> None:
        _checks.check_options(f"{name}: options of '{param}'", given, ["lr", *hyper])
        if "lr" in given and not isinstance(learning_rate, float | int):
            raise ValueError(f"{name}: an lr among the options keeps its ratio to learning_rate: expected that to be a number")

    groups, ranges = _checks.option_ranges(name, spec, options, check)
    numbers = frozenset(["step"] if counts else [])

    def begin(key: str, x: Tensor) -> Tensors:
        if x.is_complex():
            raise TypeError(f"{name}: unit '{key}': expected real parameters, got {x.dtype}; optim.from_torch takes them")
        step = {"step": torch.zeros(())} if counts else {}
        return {slot: torch.full_like(x, value) for slot, value in slots.items()} | step

    def step(
        grads: Tensors, state: StateMapping, params: Tensors, lr: Any, found: Mapping[str, OptionRanges]
    ) -> tuple[Params, State]:
        if _torch.is_in_dynamo() and isinstance(lr, float):
            lr = torch.ones((), dtype=torch.float64) * lr  # a value of the graph, and no constant
        # in one piece, with the padding, where all options are the same
        updated = {key: x if len(x.groups) > 1 else x._replace(ranges=((*x.groups, ...),)) for key, x in found.items()}
        if spec is None and not _torch.is_in_dynamo():
            rate = lr if lr is not None else learning_rate
            ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            are_flat = all(x.dim() == 1 for x in params.values())
            if ranks > 1 and are_flat and isinstance(rate, Tensor) and _torch.has_derivative(rate):
                raise RuntimeError(
                    f"{name}: lr is differentiated on {ranks} ranks, of which each has a part of the derivative where a unit "
                    "is split, and all where it is replicated: expected spec=, by which it is whole for every unit, or a number"
                )
        share = _checks.share_options(spec)
        is_derived = not _torch.is_in_dynamo() and any(map(_torch.has_derivative, grads.values()))
        new_params, new_state = dict(params), {key: dict(values) for key, values in state.items()}
        for key, unit_ranges in updated.items():
            values, unit = state[key], None if spec is None else spec.by_key.get(key) or spec.by_name[key][0]
            mask = _find_padding(spec, unit, params[key]) if is_derived and spec is not None and unit is not None else None
            grad = grads[key] if mask is None else torch.where(mask, 1, grads[key])  # the root of a zero has no derivative
            rate = lr if lr is not None else learning_rate(values["step"]) if callable(learning_rate) else learning_rate
            rate = share(rate, () if unit is None else unit.distinct_axes)
            count = values["step"] + 1 if counts else torch.ones(())
            olds = {"": params[key], **{slot: values[slot] for slot in slots}}
            cuts = {slot: unit_ranges.split(x) for slot, x in olds.items()}
            parts: dict[str, list[Tensor]] = {slot: [] for slot in olds}
            for i, (group, grad_part) in enumerate(unit_ranges.split(grad)):
                given, own = dict(groups[group]), {slot: cut[i][1] for slot, cut in cuts.items()}
                part_rate = _checks.scale_lr(rate, given.pop("lr"), learning_rate) if "lr" in given else rate
                new, after = rule(grad_part, own.pop(""), own, count.double(), part_rate, **{**hyper, **given})
                for slot, x in {"": new, **after}.items():
                    parts[slot].append(x.to(olds[slot].dtype))
            made = {slot: unit_ranges.join(old, parts[slot]) for slot, old in olds.items()}
            made |= {} if mask is None else {slot: torch.where(mask, old, made[slot]) for slot, old in olds.items()}
            new_params[key] = made.pop("")
            new_state[key] |= made | ({"step": count} if counts else {})
        return new_params, new_state

    return _checks.make_elementwise(name, begin, step, {*slots, *numbers}, numbers, ranges)


def _find_padding(spec: PartitionSpec, unit: Unit, tensor: Tensor) -> Tensor | None:
    is_padded = unit.numel < spec.padded_numel(unit) and tensor.shape == (spec.shard_numel(unit),)
    return padding_mask(unit, spec, tensor.device) if is_padded else None


def _number(x: Any) -> Any:
    # in a graph in memory: inductor would compute an expression of it for each element again
    return x.as_strided((), ()) if isinstance(x, Tensor) and not x.dim() and _torch.is_in_dynamo() else x


def _add(x: Tensor, y: Tensor, factor: Any) -> Tensor:
    """Return ``x + factor * y``, rounded as torch's optimizers do."""
    return x + _number(factor) * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


def _lerp(x: Tensor, y: Tensor, weight: Any) -> Tensor:
    return torch.lerp(x, y, weight.to(x.dtype) if isinstance(weight, Tensor) else weight)


def _average_square(x: Tensor, grad: Tensor, decay: Any) -> Tensor:
    if isinstance(decay, Tensor):
        return x * decay + (1 - decay) * grad * grad
    return torch.addcmul(x * decay, grad, grad, value=1 - decay)


def sgd(
    learning_rate: Rate,
    momentum: float | None = None,
    nesterov: bool = False,
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
) -> Optimizer:
    """Return ``(init, update)`` of gradient descent: ``m = momentum m + g``, ``p = p - learning_rate m``.

    Args:
        learning_rate, spec, options: As in `adam`.
        momentum: The factor of the sum m; None for none.
        nesterov: Step along ``g + momentum m``.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.sgd(0.5)
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> update({"": torch.tensor([3.0, -4.0])}, init(params), params)[0]
        {'': tensor([-0.5000,  4.0000])}

    Source: ``optax.sgd``; equal to torch.optim.SGD.
    """
    if nesterov and momentum is None:
        raise ValueError("sgd: nesterov: expected a momentum with it, got none")
    slots = {} if momentum is None else {"momentum_buffer": 0.0}
    hyper = {"momentum": momentum, "nesterov": nesterov}
    return _make_optimizer("sgd", _step_sgd, learning_rate, slots, hyper, (spec, options), counts=False)


def _step_sgd(grad: Tensor, param: Tensor, slots: Slots, step: Tensor, lr: Any, *, momentum: Any, nesterov: bool) -> Step:
    if momentum is None:
        return _add(param, grad, -lr), {}
    buffer = slots["momentum_buffer"] * momentum + grad
    direction = _add(grad, buffer, momentum) if nesterov else buffer
    return _add(param, direction, -lr), {"momentum_buffer": buffer}


def adam(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
) -> Optimizer:
    """Return ``(init, update)`` of Adam: ``p = p - learning_rate m / (sqrt(v + eps_root) + eps)``, m and v bias-corrected.

    A pure function of tensors, for transforms and graphs. On eager tensors `from_torch` is faster and may donate.

    Args:
        learning_rate: A number, a 0-D tensor, or a function of the step, a 0-D tensor that counts from 0, such as `cosine`.
        b1, b2: The decays of the averages m of gradients and v of their squares.
        eps: Added to the root.
        eps_root: Added under the root. Without it, derivatives are NaN where all gradients of an element were 0.
        spec: The spec of the shards, for ``options``, and for derivatives: that of a shared learning rate is whole on every
            rank, and padding has none.
        options: ``options(name, param)`` replaces these for a parameter, such as ``{"eps": 1e-6}``; an ``lr`` keeps its
            ratio to ``learning_rate``. Needs ``spec``.

    Returns:
        An `Optimizer`, whose state has the names of torch.optim.Adam's. ``update(..., lr=)`` is a step's own learning rate.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.adam(0.5)
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> update({"": torch.tensor([3.0, -4.0])}, init(params), params)[0]
        {'': tensor([0.5000, 2.5000])}

    Source: ``optax.adam``; the same bits as torch.optim.Adam with ``foreach=True`` if ``eps_root`` is 0.
    """
    hyper = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
    return _make_optimizer("adam", _step_adamw, learning_rate, {"exp_avg": 0.0, "exp_avg_sq": 0.0}, hyper, (spec, options))


def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
) -> Optimizer:
    """Return ``(init, update)`` of AdamW: `adam`, and before it ``p = (1 - learning_rate weight_decay) p``.

    Args:
        learning_rate, b1, b2, eps, eps_root, spec, options: As in `adam`.
        weight_decay: The weight's decay, times the learning rate.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.adamw(0.5, weight_decay=0.1)
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> update({"": torch.tensor([3.0, -4.0])}, init(params), params)[0]
        {'': tensor([0.4500, 2.4000])}

    Source: ``optax.adamw``, whose default ``weight_decay`` is 1e-4; equal to torch.optim.AdamW, where it is 1e-2.
    """
    hyper = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "weight_decay": weight_decay}
    return _make_optimizer("adamw", _step_adamw, learning_rate, {"exp_avg": 0.0, "exp_avg_sq": 0.0}, hyper, (spec, options))


def _step_adamw(grad: Tensor, param: Tensor, slots: Slots, step: Tensor, lr: Any, **options: Any) -> Step:
    b1, b2, eps, eps_root = (options[name] for name in ("b1", "b2", "eps", "eps_root"))
    average = _lerp(slots["exp_avg"], grad, 1 - b1)
    square = _average_square(slots["exp_avg_sq"], grad, b2)
    correction = 1 - b2**step
    root = (square / _number(correction) + eps_root).sqrt() if eps_root else square.sqrt() / _number(correction.sqrt())
    decayed = param * _number(1 - lr * options.get("weight_decay", 0.0))
    return decayed - average * _number(lr / (1 - b1**step)) / (root + eps), {"exp_avg": average, "exp_avg_sq": square}


def lion(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
) -> Optimizer:
    """Return ``(init, update)`` of Lion: steps of the sign of ``b1 m + (1 - b1) g``, then ``m = b2 m + (1 - b2) g``.

    Args:
        learning_rate, spec, options: As in `adam`.
        b1: The weight of m in a step.
        b2: The decay of m.
        weight_decay: As in `adamw`.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.lion(0.5, weight_decay=0.1)
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> update({"": torch.tensor([3.0, -4.0])}, init(params), params)[0]
        {'': tensor([0.4500, 2.4000])}

    Source: ``optax.lion``; Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
    """
    hyper = {"b1": b1, "b2": b2, "weight_decay": weight_decay}
    return _make_optimizer("lion", _step_lion, learning_rate, {"exp_avg": 0.0}, hyper, (spec, options), counts=False)


def _step_lion(
    grad: Tensor, param: Tensor, slots: Slots, step: Tensor, lr: Any, *, b1: Any, b2: Any, weight_decay: Any
) -> Step:
    average = slots["exp_avg"]
    new = _add(param * _number(1 - lr * weight_decay), _lerp(average, grad, 1 - b1).sign(), -lr)
    return new, {"exp_avg": _lerp(average, grad, 1 - b2)}


def rmsprop(
    learning_rate: Rate,
    decay: float = 0.9,
    eps: float = 1e-8,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
) -> Optimizer:
    """Return ``(init, update)`` of RMSprop: ``p = p - learning_rate g / sqrt(v + eps)``, where v averages squares.

    Args:
        learning_rate, spec, options: As in `adam`.
        decay: The decay of v.
        eps: Added under the root.
        eps_in_sqrt: False adds eps to the root, as torch.optim.RMSprop does, to which it is then equal with ``alpha=decay``.
        centered: Take the square of the average gradient from v.
        momentum: The factor of a sum of steps; None for none.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.rmsprop(0.5, decay=0.0)
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> update({"": torch.tensor([3.0, -4.0])}, init(params), params)[0]
        {'': tensor([0.5000, 2.5000])}

    Source: ``optax.rmsprop``.
    """
    slots = {"square_avg": 0.0} | ({"grad_avg": 0.0} if centered else {})
    slots |= {} if momentum is None else {"momentum_buffer": 0.0}
    hyper = {"decay": decay, "eps": eps, "eps_in_sqrt": eps_in_sqrt, "momentum": momentum}
    return _make_optimizer("rmsprop", _step_rmsprop, learning_rate, slots, hyper, (spec, options))


def _step_rmsprop(
    grad: Tensor, param: Tensor, slots: Slots, step: Tensor, lr: Any, *, decay: Any, eps: Any, eps_in_sqrt: bool, momentum: Any
) -> Step:
    new = {"square_avg": _average_square(slots["square_avg"], grad, decay)}
    square = new["square_avg"]
    if "grad_avg" in slots:
        new["grad_avg"] = _lerp(slots["grad_avg"], grad, 1 - decay)
        square = torch.addcmul(square, new["grad_avg"], new["grad_avg"], value=-1)
    root = (square + eps).sqrt() if eps_in_sqrt else square.sqrt() + eps
    if momentum is None:
        return param - grad * _number(lr) / root, new
    new["momentum_buffer"] = slots["momentum_buffer"] * momentum + grad / root
    return _add(param, new["momentum_buffer"], -lr), new


def adagrad(
    learning_rate: Rate,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
    eps_in_sqrt: bool = True,
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
) -> Optimizer:
    """Return ``(init, update)`` of Adagrad: ``p = p - learning_rate g / sqrt(sum of squares + eps)``.

    Args:
        learning_rate, spec, options: As in `adam`.
        initial_accumulator_value: Where the sum begins.
        eps: Added under the root.
        eps_in_sqrt: False adds eps to the root, as torch.optim.Adagrad does, whose defaults are
            ``initial_accumulator_value=0`` and ``eps=1e-10``.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.optim.adagrad(0.5, 0.0)
        >>> params = {"": torch.tensor([1.0, 2.0])}
        >>> update({"": torch.tensor([3.0, -4.0])}, init(params), params)[0]
        {'': tensor([0.5000, 2.5000])}

    Source: ``optax.adagrad``.
    """
    hyper, slots = {"eps": eps, "eps_in_sqrt": eps_in_sqrt}, {"sum": initial_accumulator_value}
    _checks.check_nonnegative("adagrad", initial_accumulator_value=initial_accumulator_value)
    return _make_optimizer("adagrad", _step_adagrad, learning_rate, slots, hyper, (spec, options))


def _step_adagrad(grad: Tensor, param: Tensor, slots: Slots, step: Tensor, lr: Any, *, eps: Any, eps_in_sqrt: bool) -> Step:
    total = torch.addcmul(slots["sum"], grad, grad)
    root = (total + eps).sqrt() if eps_in_sqrt else total.sqrt() + eps
    return param - grad * _number(lr) / root, {"sum": total}
