"""soap: Adam in the eigenbasis of Shampoo's factors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..._spec.spec import PartitionSpec
from .._elementwise.options import Options as OptionsOf
from .._matrices.matrices import Matrices
from .._norms import wide
from .factors import along, chosen_where, eigh, outer, real_matrices, sides
from .fallback import options_of, positive, with_fallback
from .optimizer import Fallback, MatrixOptimizer
from .rule import Options, Rule, Sent, Slots, Whole

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
    options: OptionsOf | None = None,
    fallback: Fallback | None = None,
    donate: bool = False,
) -> MatrixOptimizer:
    """``(init, update)`` of SOAP: Adam's step in the eigenbasis of moving averages of ``G G^T`` and ``G^T G``.

    With Q the eigenvectors of both sides, the gradient and its average M are rotated, ``G' = Q_L^T G Q_R``; V averages
    ``G'^2``; the step is ``M' / (sqrt(V) + eps)``, its bias corrected, rotated back; and the weight decays as AdamW's does.
    An element of sqrt(V) is taken to be at least as large as the rounding errors of the largest one, so that directions
    without gradients, where M' and V are rounding errors, get no steps.

    The factors have their own ``shampoo_beta``, by default the second of ``betas``. The first gradient makes the basis and
    nothing else; after each ``every`` steps it is renewed by one step of power iteration and QR. A side of more than
    ``max_size`` is not rotated.

    M is slices like the parameters and travels with the gradient; V, the factors and the basis are on the matrix's owner.
    Other arguments, and what is returned, are those of `muon`.

    Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024, and the authors' code (nikhilvyas/SOAP), to whose
    steps these are equal (``merge_dims`` and ``precondition_1d`` off).

    Raises ValueError for options that are out of range, TypeError for complex matrices.

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
    positive("soap", lr=lr, weight_decay=weight_decay, eps=eps)
    beta = betas[1] if shampoo_beta is None else shampoo_beta
    if not all(0 <= b < 1 for b in (*betas, beta)) or every < 1:
        raise ValueError(f"soap: expected betas in [0, 1) and every >= 1, got {betas}, {beta} and {every}")
    known = real_matrices("soap", spec)

    def begin(like: Tensor) -> Slots:
        dtype = wide(like[..., :1, :1]).dtype
        state = {"exp_avg_sq": like.new_zeros(like.shape, dtype=dtype)}
        for side, size in sides(like.shape, max_size).items():
            zeros = like.new_zeros((*like.shape[:-2], size, size), dtype=dtype)
            state |= {side: zeros, f"{side}_basis": zeros.clone()}
        return state

    def before(grad: Tensor, slots: Slots, param: Tensor, options: Options) -> tuple[Sent, Slots]:
        weight = (1 - betas[0]) * _counts(options["step"], param)
        average = slots["exp_avg"] + (grad - slots["exp_avg"]) * weight
        return (grad, average), {"exp_avg": average}

    def work(sent: Mapping[str, Sent], whole: Whole, options: Mapping[str, Options]) -> tuple[dict[str, Sent], Whole]:
        results: dict[str, Sent] = {}
        new: Whole = {}
        for name, (grad, average) in sent.items():
            direction, new[name] = _step(wide(grad), wide(average), whole[name], options[name]["step"])
            results[name] = (direction,)
        return results, new

    def _step(grad: Tensor, average: Tensor, state: Slots, step: Tensor) -> tuple[Tensor, Slots]:
        factored = [*sides(grad.shape, max_size)]
        counts = _counts(step, grad)
        factors = [state[side] + (outer(grad, side) - state[side]) * (1 - beta) for side in factored]
        bases = [state[f"{side}_basis"] for side in factored]
        rotated = _rotated(grad, bases, factored)
        square = state["exp_avg_sq"]
        square = square + (rotated.square() - square) * (1 - betas[1]) * counts
        root = (square + (1 - counts)).sqrt()  # not of the first step's zeros, where it has no derivative
        direction = _rotated(average, bases, factored) / (torch.maximum(root, _rounding(root)) + eps)
        direction = _rotated(direction, [basis.mT for basis in bases], factored) * counts
        bases = chosen_where(step == 1, lambda: [_eigenvectors(factor) for factor in factors], bases)
        due = (step > 1) & ((step - 1) % every == 0)
        square, *bases = chosen_where(due, lambda: _renewed(square, factors, bases, factored), [square, *bases])
        new = {"exp_avg_sq": square}
        for side, factor, basis in zip(factored, factors, bases, strict=True):
            new |= {side: factor, f"{side}_basis": basis}
        return direction, new

    def after(results: Sent, slots: Slots, param: Tensor, options: Options) -> tuple[Tensor, Slots]:
        taken = options["step"] - 1  # the first gradient makes the basis and no step
        counts = _counts(options["step"], param)
        taken = taken.clamp(min=1).to(torch.float64)
        size = ((1 - betas[1] ** taken).sqrt() / (1 - betas[0] ** taken)).to(param.device, param.dtype)
        param = param - options["lr"] * size * results[0]
        return param * (1 - options["lr"] * options["weight_decay"] * counts), slots

    rule = Rule(("exp_avg",), begin, before, work, (0,), after)
    own = options_of("soap", known, {"lr": lr, "weight_decay": weight_decay}, options)
    return with_fallback(rule, known, own, fallback, lr, weight_decay, options, donate=donate)


def _counts(step: Tensor, like: Tensor) -> Tensor:
    """0 in the first step, 1 after it."""
    return (step > 1).to(like.device, wide(like[..., :0]).dtype).to(like.dtype)


def _rounding(root: Tensor) -> Tensor:
    """Return the size of rounding errors in a rotated gradient: Adam would divide them by themselves, into whole steps."""
    size = max(root.shape[-2:])
    return root.amax((-2, -1), keepdim=True) * (30 * math.sqrt(size) * torch.finfo(root.dtype).eps)


def _rotated(x: Tensor, bases: list[Tensor], factored: list[str]) -> Tensor:
    """``Q_L^T X Q_R``, of the sides that have a basis."""
    for basis, side in zip(bases, factored, strict=True):
        x = along(x, basis.mT if side == "left" else basis, side)
    return x


def _eigenvectors(factor: Tensor) -> Tensor:
    """As columns, those of the largest eigenvalues first."""
    return eigh(factor)[1].flip(-1)


def _renewed(square: Tensor, factors: list[Tensor], bases: list[Tensor], factored: list[str]) -> list[Tensor]:
    """``(V, the bases)`` after a step of power iteration, in the order of the eigenvalues that the old ones give."""
    out: list[Tensor] = []
    for factor, basis, side in zip(factors, bases, factored, strict=True):
        values = (basis * (factor @ basis)).sum(-2)
        order = values.argsort(dim=-1, descending=True)
        dim = -2 if side == "left" else -1
        square = square.gather(dim, (order[..., :, None] if side == "left" else order[..., None, :]).expand_as(square))
        basis = basis.gather(-1, order[..., None, :].expand_as(basis))
        out.append(torch.linalg.qr(factor @ basis).Q)
    return [square, *out]
