"""soap: Adam in the eigenbasis of Shampoo's factors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..._spec.spec import PartitionSpec
from .._elementwise.options import ParamOptions
from .._matrices.matrices import Matrices
from .._norms import upcast
from .config import Fallback
from .factors import compute_if_due, eigh_or_nan, factored_sides, gram, limit_squares, multiply_side, resolve_real_matrices
from .fallback import check_nonnegative, optimizer_with_fallback
from .optimizer import MatrixOptimizer, break_graphs
from .rule import MatrixOptions, MatrixRule, OwnedState, Payload, Slots

__all__ = ["soap"]


def soap(
    spec: PartitionSpec | Matrices,
    *,
    lr: float = 3e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    every: int = 10,
    max_size: int = 8192,
    options: ParamOptions | None = None,
    fallback: Fallback | None = None,
    donate: bool = False,
) -> MatrixOptimizer:
    """Return ``(init, update)`` of SOAP: Adam's step in the eigenbasis of moving averages of ``G G^T`` and ``G^T G``.

    With Q the eigenvectors of both sides, the gradient and its average M are rotated, ``G' = Q_L^T G Q_R``; V averages
    ``G'^2``; the step is ``M' / (sqrt(V) + eps)``, bias-corrected and rotated back; the weight decays as in AdamW. sqrt(V) is
    at least the rounding error of its largest element: directions without gradients, where M' and V are rounding errors, get no
    steps. The first gradient only computes the basis. M is kept in slices like the parameters; owners keep V, the factors and
    the basis. Elements of gradients count as at most 2^48 in float32: larger squares would overflow.

    Source: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024. The steps equal those of the authors' code
    (nikhilvyas/SOAP) with ``merge_dims`` and ``precondition_1d`` off.

    Args:
        spec: The spec, or `matrices`.
        lr: The learning rate, a number.
        weight_decay: Decoupled, as in AdamW.
        betas: Adam's, of M and V.
        shampoo_beta: Of the factors; by default the second of ``betas``.
        eps: Added to sqrt(V).
        every: Steps between updates of the basis, each one step of power iteration and QR.
        max_size: A longer side is not rotated.
        options: As in `muon`, ``lr`` and ``weight_decay``.
        fallback: As in `muon`.
        donate: As in `by_matrix`.

    Returns:
        A `MatrixOptimizer`.

    Raises:
        ValueError: An option is out of range, and as in `by_matrix`.
        TypeError: A matrix is complex.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False))
        >>> init, update = fs.optim.soap(spec, lr=0.5)
        >>> params, grads = fs.shard({"weight": torch.zeros(2, 2)}, spec), fs.shard({"weight": torch.eye(2)}, spec)
        >>> params, state = update(grads, init(params), params)  # the first step only sets up the eigenbasis
        >>> params, state = update(grads, state, params)
        >>> fs.unshard(params, spec)["weight"].diagonal().sign()
        tensor([-1., -1.])
    """
    check_nonnegative("soap", lr=lr, weight_decay=weight_decay, eps=eps)
    beta = betas[1] if shampoo_beta is None else shampoo_beta
    if not all(0 <= b < 1 for b in (*betas, beta)) or every < 1:
        raise ValueError(f"soap: expected betas in [0, 1) and every >= 1, got {betas}, {beta} and {every}")
    known = resolve_real_matrices("soap", spec)

    def init_owned(like: Tensor) -> Slots:
        dtype = upcast(like[..., :1, :1]).dtype
        state = {"exp_avg_sq": like.new_zeros(like.shape, dtype=dtype)}
        for side, size in factored_sides(like.shape, max_size).items():
            zeros = like.new_zeros((*like.shape[:-2], size, size), dtype=dtype)
            state |= {side: zeros, f"{side}_basis": zeros.clone()}
        return state

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        weight = (1 - betas[0]) * _is_past_first(options["step"], param)
        grad = limit_squares(grad)
        average = slots["exp_avg"] + (grad - slots["exp_avg"]) * weight
        return (grad, average), {"exp_avg": average}

    def on_owner(
        sent: Mapping[str, Payload], whole: OwnedState, options: Mapping[str, MatrixOptions]
    ) -> tuple[dict[str, Payload], OwnedState]:
        results: dict[str, Payload] = {}
        new: OwnedState = {}
        for name, (grad, average) in sent.items():
            direction, new[name] = _step(upcast(grad), upcast(average), whole[name], options[name]["step"])
            results[name] = (direction,)
        return results, new

    def _step(grad: Tensor, average: Tensor, state: Slots, step: Tensor) -> tuple[Tensor, Slots]:
        factored = [*factored_sides(grad.shape, max_size)]
        counts = _is_past_first(step, grad)
        factors = [state[side] + (gram(grad, side) - state[side]) * (1 - beta) for side in factored]
        bases = [state[f"{side}_basis"] for side in factored]
        rotated = _rotate(grad, bases, factored)
        square = state["exp_avg_sq"]
        square = square + (rotated.square() - square) * (1 - betas[1]) * counts
        root = (square + (1 - counts)).sqrt()  # not of the first step's zeros, where it has no derivative
        direction = _rotate(average, bases, factored) / (torch.maximum(root, _rounding_error(root)) + eps)
        direction = _rotate(direction, [basis.mT for basis in bases], factored) * counts
        bases = compute_if_due(step == 1, lambda: [_eigenvectors(factor) for factor in factors], bases)
        due = (step > 1) & ((step - 1) % every == 0)
        square, *bases = compute_if_due(due, lambda: _power_iteration(square, factors, bases, factored), [square, *bases])
        new = {"exp_avg_sq": square}
        for side, factor, basis in zip(factored, factors, bases, strict=True):
            new |= {side: factor, f"{side}_basis": basis}
        return direction, new

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        taken = options["step"] - 1  # the first gradient makes the basis and no step
        counts = _is_past_first(options["step"], param)
        taken = taken.clamp(min=1).to(torch.float64)
        size = ((1 - betas[1] ** taken).sqrt() / (1 - betas[0] ** taken)).to(param.device, param.dtype)
        param = param - options["lr"] * size * results[0]
        return param * (1 - options["lr"] * options["weight_decay"] * counts), slots

    rule = MatrixRule(("exp_avg",), init_owned, before_exchange, on_owner, (0,), after_exchange, mixes_stacks=False)
    defaults = {"lr": lr, "weight_decay": weight_decay}
    optimizer = optimizer_with_fallback("soap", rule, known, defaults, options, fallback, donate=donate)
    return break_graphs(optimizer, "soap", "it reads the step to know whether to compute bases")


def _is_past_first(step: Tensor, like: Tensor) -> Tensor:
    """Return 0 in the first step and 1 after it, like ``like``."""
    return (step > 1).to(like.device, upcast(like[..., :0]).dtype).to(like.dtype)


def _rounding_error(root: Tensor) -> Tensor:
    """Return the size of rounding errors in a rotated gradient, which Adam would divide by themselves, into full steps."""
    size = max(root.shape[-2:])
    return root.amax((-2, -1), keepdim=True) * (30 * math.sqrt(size) * torch.finfo(root.dtype).eps)


def _rotate(x: Tensor, bases: list[Tensor], factored: list[str]) -> Tensor:
    """Return ``Q_L^T X Q_R`` for the sides that have a basis."""
    for basis, side in zip(bases, factored, strict=True):
        x = multiply_side(x, basis.mT if side == "left" else basis, side)
    return x


def _eigenvectors(factor: Tensor) -> Tensor:
    """Return the eigenvectors as columns, those of the largest eigenvalues first."""
    return eigh_or_nan(factor)[1].flip(-1)


def _power_iteration(square: Tensor, factors: list[Tensor], bases: list[Tensor], factored: list[str]) -> list[Tensor]:
    """Return ``[V, *bases]`` after one step of power iteration, in the order of the old basis's eigenvalues."""
    out: list[Tensor] = []
    for factor, basis, side in zip(factors, bases, factored, strict=True):
        values = (basis * (factor @ basis)).sum(-2)
        order = values.argsort(dim=-1, descending=True)
        dim = -2 if side == "left" else -1
        square = square.gather(dim, (order[..., :, None] if side == "left" else order[..., None, :]).expand_as(square))
        basis = basis.gather(-1, order[..., None, :].expand_as(basis))
        out.append(torch.linalg.qr(factor @ basis).Q)
    return [square, *out]
