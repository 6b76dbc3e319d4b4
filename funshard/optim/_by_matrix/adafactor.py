"""adafactor: averages of squared gradients over rows and columns of whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._core.spec import PartitionSpec
from .._checks import Optimizer, Tensors, check_nonnegative, is_updated
from .._matrices.matrices import Matrices, matrices
from .._options import ParamOptions
from .optimizer import optimizer_from_rule, resolve_options
from .step import rule_from_update

__all__ = ["adafactor"]


def adafactor(
    learning_rate: float,
    spec: PartitionSpec | Matrices,
    *,
    decay_rate: float = 0.8,
    clipping_threshold: float = 1.0,
    eps: float | None = None,
    min_scale: float = 1e-3,
    weight_decay: float = 0.0,
    maximize: bool = False,
    options: ParamOptions | None = None,
    donate: bool = False,
) -> Optimizer:
    """Return ``(init, update)`` of Adafactor, for every parameter whole, on its owner.

    Of a matrix [..., n, m] the state has the averages over rows and over columns of squared gradients, of other parameters all
    of them. The step t has ``min(learning_rate, 1 / sqrt(t)) max(min_scale, rms(p))`` as its length.

    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018. Equal to
    torch.optim.Adafactor.

    Args:
        learning_rate: A number.
        spec: The spec, or `matrices` that select every parameter.
        decay_rate: The averages' weight of the new square is ``t ** -decay_rate``.
        clipping_threshold: Larger updates are scaled to this root mean square.
        eps: The smallest mean, and the smallest root of a square; by default that of the dtype.
        min_scale: The smallest scale of a parameter.
        weight_decay: Decoupled, as in AdamW.
        maximize: Take steps along the gradient, and not against it.
        options: ``options(name, param)``: a parameter's own ``lr`` or ``weight_decay``.
        donate: As in `by_matrix`.

    Raises:
        ValueError: An option is negative; in ``init``, a parameter is not among the matrices.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False))
        >>> init, update = fs.optim.adafactor(0.5, spec)
        >>> params, grads = fs.shard({"weight": torch.ones(2, 2)}, spec), fs.shard({"weight": torch.eye(2)}, spec)
        >>> fs.unshard(update(grads, init(params), params)[0], spec)["weight"].diagonal() < 1
        tensor([True, True])
    """
    given = {"decay_rate": decay_rate, "clipping_threshold": clipping_threshold, "min_scale": min_scale}
    check_nonnegative("adafactor", lr=learning_rate, weight_decay=weight_decay, **given)
    known = spec if isinstance(spec, Matrices) else matrices(spec, select=lambda name, param: True, gather_stacks=True)

    def init(param: Tensor) -> Tensors:
        step = {"step": torch.zeros(())}
        if param.dim() < 2:
            return step | {"variance": torch.zeros_like(param)}
        rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
        return step | {"row_var": param.new_zeros(rows), "col_var": param.new_zeros(columns)}

    def update(grad: Tensor, state: Tensors, param: Tensor, /, **rates: Any) -> tuple[Tensor, Tensors]:
        lr, weight_decay = rates["lr"], rates["weight_decay"]
        grad = -grad if maximize else grad
        smallest = torch.finfo(param.dtype).eps if eps is None else eps
        new: dict[str, Tensor] = {"step": state["step"] + 1}
        steps = new["step"].double()
        weight = (steps**-decay_rate).to(grad.device, grad.dtype)
        rate = torch.minimum(torch.as_tensor(lr, dtype=torch.float64, device=steps.device), 1 / steps**0.5)
        rate = rate.to(param.device) * (param.norm(2).double() / param.numel() ** 0.5).clamp(min=min_scale)
        if param.dim() < 2:
            square = new["variance"] = state["variance"].lerp(grad.square(), weight)
        else:
            rows, columns = (grad.norm(2, dim=dim, keepdim=True).square() / grad.shape[dim] for dim in (-1, -2))
            new["row_var"] = state["row_var"].lerp(rows, weight)
            new["col_var"] = state["col_var"].lerp(columns, weight)
            square = new["row_var"] @ new["col_var"] / new["row_var"].mean(dim=-2, keepdim=True).clamp(min=smallest)
        direction = square.clamp(min=smallest**2).rsqrt() * grad
        length = direction.norm(2).double() / (direction.numel() ** 0.5 * clipping_threshold)
        return (param * (1 - lr * weight_decay) - direction * (rate / length.clamp(min=1))).to(param.dtype), new

    kinds = [(m.shape, m.unit.dtype) for m in known.chosen]
    rule = rule_from_update(init, update, kinds)
    resolved = resolve_options("adafactor", known, {"lr": learning_rate, "weight_decay": weight_decay}, options)
    fallback = partial(_refuse_update, known.spec), lambda grads, state, params, **rates: (dict(params), dict(state))
    return optimizer_from_rule(
        rule, known, resolved, fallback=fallback, is_default_fallback=True, donate=donate, lr=learning_rate
    )


def _refuse_update(spec: PartitionSpec, params: Tensors) -> Mapping[str, Any]:
    """Return no state for what is not updated; raise ValueError for anything else, also on ranks that hold none of it."""
    for name, x in params.items():
        if is_updated(x) and (spec.by_name[name][1].numel if name in spec.by_name else len(x)):
            raise ValueError(
                f"Adafactor: '{name}' is frozen, or none of the matrices given: expected what is trained, all of it among the "
                "matrices; set the rest apart with trainable, frozen = partition(params, spec)"
            )
    return {name: {} for name in params}
