"""muon: momentum, orthonormalized by a Newton-Schulz iteration."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..._core.spec import PartitionSpec
from .._checks import Optimizer, check_nonnegative
from .._matrices.matrices import Matrices
from .._norms import upcast
from .._options import ParamOptions
from .optimizer import optimizer_with_fallback, resolve_real_matrices
from .step import Fallback, MatricesOptions, MatrixOptions, MatrixRule, OwnedState, OwnerResults, Payload, Sent, Slots

__all__ = ["muon", "orthogonal"]

MAX_BATCHED_NUMEL = 1 << 20
"""Matrices of one shape are computed as one batch up to this many elements: for larger ones the copies cost more."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def muon(
    spec: PartitionSpec | Matrices,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    steps: int = 5,
    adjust_lr: Literal["original", "match_rms_adamw"] = "original",
    dtype: torch.dtype = torch.bfloat16,
    options: ParamOptions | None = None,
    fallback: Fallback | None = None,
    donate: bool = False,
) -> Optimizer:
    """Return ``(init, update)`` of Muon: orthonormalized momentum for matrices, AdamW for other parameters.

    ``B = B + (1 - momentum) (G - B)``; with ``nesterov`` the direction is ``orthogonal(G + momentum (B - G))``, else
    ``orthogonal(B)``; then ``W = (1 - lr weight_decay) W - lr scale direction``. The momentum is kept in slices like the
    parameters. The iteration (`orthogonal`) runs once for each matrix, on its owner. ``matrices(spec, select=hidden(model))``
    instead of the spec leaves embeddings and heads to ``fallback``.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable for LLM
    Training, 2025. Equal to torch.optim.Muon with ``dtype=torch.bfloat16``.

    Args:
        spec: The spec, or `matrices`.
        lr: The learning rate, a number.
        weight_decay: Decoupled, as in AdamW.
        momentum: Of the average of gradients.
        nesterov: Use Nesterov's momentum.
        coefficients: Of the iteration; see `orthogonal`.
        eps: The smallest norm to divide by.
        steps: Iterations, 1 to 99.
        adjust_lr: The scale of a matrix [n, m]: ``"original"`` is ``sqrt(max(1, n / m))``; ``"match_rms_adamw"`` is
            ``0.2 sqrt(max(n, m))``, which suits AdamW's learning rate and weight decay.
        dtype: In which a matrix is sent and iterated. On a CPU without bfloat16 instructions float32 is faster.
        options: ``options(name, param)``: a parameter's own ``lr``, ``weight_decay`` or ``momentum``.
        fallback: As in `by_matrix`; by default AdamW with this ``lr`` and ``weight_decay``.
        donate: As in `by_matrix`.

    Returns:
        An `Optimizer`.

    Raises:
        ValueError: An option is out of range, and as in `by_matrix`.
        TypeError: A matrix is complex.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> init, update = fs.optim.muon(spec, lr=0.5, dtype=torch.float32)
        >>> params, grads = fs.shard({"weight": torch.zeros(2, 2)}, spec), fs.shard({"weight": torch.eye(2)}, spec)
        >>> params, state = update(grads, init(params), params)
        >>> fs.unshard(params, spec)["weight"].diagonal().sign()
        tensor([-1., -1.])
    """
    check_nonnegative("muon", lr=lr, weight_decay=weight_decay, momentum=momentum)
    if steps not in range(1, 100):
        raise ValueError(f"muon: steps: expected 1 to 99, got {steps}")
    if adjust_lr not in ("original", "match_rms_adamw"):
        raise ValueError(f"muon: adjust_lr: expected 'original' or 'match_rms_adamw', got {adjust_lr!r}")
    if len(coefficients) != 3:
        raise ValueError(f"muon: coefficients: expected 3, got {coefficients}")
    if not dtype.is_floating_point:
        raise ValueError(f"muon: dtype: expected one of floating point numbers, got {dtype}")
    known = resolve_real_matrices("muon", spec)

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        buffer = slots["momentum_buffer"].lerp(grad, 1 - options["momentum"])
        sent = grad.lerp(buffer, options["momentum"]) if nesterov else buffer
        return (sent.to(dtype),), {"momentum_buffer": buffer}

    def on_owner(sent: Sent, whole: OwnedState, options: MatricesOptions) -> OwnerResults:
        same_shape: dict[tuple[int, ...], list[str]] = {}
        for name, (x,) in sent.items():
            same_shape.setdefault(tuple(x.shape) if x.numel() <= MAX_BATCHED_NUMEL else (id(x),), []).append(name)
        out: dict[str, Payload] = {}
        for names in same_shape.values():
            some = [sent[name][0] for name in names]
            x = some[0] if len(some) == 1 else torch.stack(some)
            x = orthogonal(x, steps=steps, coefficients=coefficients, eps=eps)
            out |= {name: (y,) for name, y in zip(names, [x] if len(some) == 1 else x.unbind(), strict=True)}
        return out, whole

    def lr_scale(n: int, m: int) -> float:
        return math.sqrt(max(1, n / m)) if adjust_lr == "original" else 0.2 * math.sqrt(max(n, m))

    scales = {m.name: {"scale": lr_scale(*m.shape[-2:])} for m in known.chosen}

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        rate, (direction,) = options["lr"], results
        param = param.mul(1 - rate * options["weight_decay"])
        direction = direction.to(torch.promote_types(upcast(direction).dtype, param.dtype))
        return param.sub(direction * (rate * options["scale"])).to(param.dtype), slots

    rule = MatrixRule(("momentum_buffer",), lambda x: {}, before_exchange, on_owner, (0,), after_exchange, mixes_stacks=False)
    defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    return optimizer_with_fallback("muon", rule, known, defaults, options, fallback, donate=donate, constants=scales)


def orthogonal(
    x: Tensor, *, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Return approximately ``U V^T`` for a matrix ``U S V^T`` (its singular value decomposition), or for each of a batch.

    It iterates ``X = a X + b (X X^T) X + c (X X^T)^2 X`` (Newton-Schulz) from X of norm 1. Singular values approach 1; the
    default coefficients bring them quickly into [0.7, 1.2]. Differentiable.

    Source: ``_zeropower_via_newtonschulz`` of torch/optim/_muon.py; Bernstein and Newhouse, Old Optimizer, New Norm, 2024;
    Jordan et al., 2024.

    Args:
        x: [n, m] or [..., n, m].
        steps: The number of iterations.
        coefficients: ``(a, b, c)``.
        eps: The smallest norm to divide by.

    Returns:
        A tensor like ``x``.

    Example:
        >>> import torch
        >>> u = orthogonal(torch.diag(torch.tensor([3.0, 4.0])), steps=20, coefficients=(15 / 8, -10 / 8, 3 / 8))
        >>> torch.allclose(u, torch.eye(2))
        True
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    power = _power_of_two(y)
    y = y / power
    y = y / torch.maximum(torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True), eps / power)
    batched = y.dim() > 2
    y = y.flatten(0, -3) if batched else y
    add = torch.baddbmm if batched else torch.addmm
    for _ in range(steps):
        gram = y @ y.mT
        y = add(y, add(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    y = y.mT if tall else y
    return y.reshape(x.shape)


def _power_of_two(x: Tensor) -> Tensor:
    """Return a power of two near each matrix's largest element, at least 1: dividing by it rounds nothing."""
    largest = upcast(x.detach()).abs().amax((-2, -1), keepdim=True)
    power = largest / (2 * torch.frexp(largest).mantissa)
    return torch.where(largest > 1, power, 1).to(x.dtype)
