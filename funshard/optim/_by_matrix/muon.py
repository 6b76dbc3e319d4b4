"""muon: momentum made orthogonal by a Newton-Schulz iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..._spec.spec import PartitionSpec
from .._elementwise.options import Options as OptionsOf
from .._matrices.matrices import Matrices
from .._norms import wide
from .factors import real_matrices
from .fallback import options_of, positive, with_fallback
from .optimizer import Fallback, MatrixOptimizer
from .rule import Options, Rule, Sent, Slots, Whole

__all__ = ["muon", "orthogonal"]

BATCHED = 1 << 20
"""Matrices of one shape and at most so many elements are worked on as one batch: for larger ones the copies are dearer."""
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
    options: OptionsOf | None = None,
    fallback: Fallback | None = None,
    donate: bool = False,
) -> MatrixOptimizer:
    """``(init, update)`` of Muon: every matrix's momentum, made orthogonal, is its step; the rest has AdamW's.

    ``B = B + (1 - momentum) (G - B)``; with ``nesterov`` what is made orthogonal is ``G + momentum (B - G)``, else B; then
    ``W = (1 - lr weight_decay) W - lr scale orthogonal(...)``. The scale is ``sqrt(max(1, n / m))`` of a matrix [n, m], or
    with ``adjust_lr="match_rms_adamw"`` ``0.2 sqrt(max(n, m))``, with which AdamW's learning rate and weight decay will do.
    The iteration (`orthogonal`) runs once for each matrix, on its owner, in ``dtype``, in which the matrix travels both ways;
    on a CPU without bfloat16 instructions float32 is faster. Which are matrices, and their owners, say `matrices` in the
    place of the ``spec``: ``matrices(spec, select=hidden(model))`` leaves embeddings and heads to ``fallback``.

    The momentum is slices like the parameters. ``options(name, param)`` gives a parameter ``lr``, ``weight_decay`` or
    ``momentum`` of its own. ``fallback`` is by default AdamW with this ``lr`` and ``weight_decay``; `by_matrix` has others,
    for ``donate`` and for the learning rates of a step.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable for LLM
    Training, 2025; torch.optim.Muon, to which it is equal (``dtype=torch.bfloat16``).

    Raises ValueError for options that are out of range, and what `by_matrix` raises; TypeError for complex matrices.

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
    _check(lr, weight_decay, momentum, steps, adjust_lr, coefficients, dtype)
    known = real_matrices("muon", spec)

    def before(grad: Tensor, slots: Slots, param: Tensor, options: Options) -> tuple[Sent, Slots]:
        buffer = slots["momentum_buffer"].lerp(grad, 1 - options["momentum"])
        sent = grad.lerp(buffer, options["momentum"]) if nesterov else buffer
        return (sent.to(dtype),), {"momentum_buffer": buffer}

    def work(sent: Mapping[str, Sent], whole: Whole, options: Mapping[str, Options]) -> tuple[dict[str, Sent], Whole]:
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, (x,) in sent.items():
            alike.setdefault(tuple(x.shape) if x.numel() <= BATCHED else (id(x),), []).append(name)
        out: dict[str, Sent] = {}
        for names in alike.values():
            some = [sent[name][0] for name in names]
            x = some[0] if len(some) == 1 else torch.stack(some)
            x = orthogonal(x, steps=steps, coefficients=coefficients, eps=eps)
            out |= {name: (y,) for name, y in zip(names, [x] if len(some) == 1 else x.unbind(), strict=True)}
        return out, whole

    scales = {m.name: scale_of(m.shape, adjust_lr) for m in known.chosen}

    def after(results: Sent, slots: Slots, param: Tensor, options: Options) -> tuple[Tensor, Slots]:
        rate, (direction,) = options["lr"], results
        param = param.mul(1 - rate * options["weight_decay"])
        return param.sub(wide(direction) * (rate * options["scale"])).to(param.dtype), slots

    rule = Rule(("momentum_buffer",), lambda x: {}, before, work, (0,), after)
    of = options_of("muon", known, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}, options)
    own = {name: {**some, "scale": scales[name]} for name, some in of.items()}
    return with_fallback(rule, known, own, fallback, lr, weight_decay, options, donate=donate)


def orthogonal(
    x: Tensor, *, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """About ``U V^T`` of a matrix ``U S V^T``, or of each in a batch [..., n, m], in its own dtype.

    By iterating ``X = a X + b (X X^T) X + c (X X^T)^2 X`` (Newton-Schulz) from X of norm 1: singular values come near 1,
    with the default coefficients quickly into [0.7, 1.2]. Differentiable. As ``_zeropower_via_newtonschulz`` of
    torch/optim/_muon.py; Bernstein and Newhouse, Old Optimizer, New Norm, 2024; Jordan et al., 2024.

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
    """Return a power of two of the size of each matrix's largest element, at least 1, to divide by before squaring.

    Nothing is rounded by the division.
    """
    largest = wide(x.detach()).abs().amax((-2, -1), keepdim=True)
    power = largest / (2 * torch.frexp(largest).mantissa)
    return torch.where(largest > 1, power, 1).to(x.dtype)


def scale_of(shape: tuple[int, ...], adjust_lr: str) -> float:
    """What a matrix's learning rate is multiplied by."""
    n, m = shape[-2:]
    return math.sqrt(max(1, n / m)) if adjust_lr == "original" else 0.2 * math.sqrt(max(n, m))


def _check(
    lr: float,
    weight_decay: float,
    momentum: float,
    steps: int,
    adjust_lr: str,
    coefficients: Sequence[float],
    dtype: torch.dtype,
) -> None:
    positive("muon", lr=lr, weight_decay=weight_decay, momentum=momentum)
    if steps not in range(1, 100):
        raise ValueError(f"muon: steps: expected 1 to 99, got {steps}")
    if adjust_lr not in ("original", "match_rms_adamw"):
        raise ValueError(f"muon: adjust_lr: expected 'original' or 'match_rms_adamw', got {adjust_lr!r}")
    if len(coefficients) != 3:
        raise ValueError(f"muon: coefficients: expected 3, got {coefficients}")
    if not dtype.is_floating_point:
        raise ValueError(f"muon: dtype: expected one of floating point numbers, got {dtype}")
