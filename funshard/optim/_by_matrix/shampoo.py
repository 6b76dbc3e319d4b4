"""shampoo: gradients preconditioned by inverse roots of Kronecker factors of all gradients so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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

__all__ = ["shampoo"]


def shampoo(
    spec: PartitionSpec | Matrices,
    *,
    lr: float = 0.01,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    decay: float = 1.0,
    eps: float = 1e-4,
    relative_eps: float = 1e-6,
    every: int = 1,
    max_size: int = 8192,
    options: ParamOptions | None = None,
    fallback: Fallback | None = None,
    donate: bool = False,
) -> MatrixOptimizer:
    """Return ``(init, update)`` of Shampoo: ``M = momentum M + L^(-1/4) G R^(-1/4)``, ``W = (1 - lr weight_decay) W - lr M``.

    L and R begin as ``eps`` times the identity and accumulate ``G G^T`` and ``G^T G``. Eigenvalues give their roots, in float32
    at least, and elements of G count as at most 2^48 there. The momentum is kept in slices like the parameters; owners keep
    factors and roots, and compute everything.

    Source: Gupta, Koren and Singer, Shampoo: Preconditioned Stochastic Tensor Optimization, 2018. One root for several steps,
    and ``relative_eps``: Anil et al., Scalable Second Order Optimization for Deep Learning, 2020, and its code
    (google-research/scalable_shampoo: ``matrix_epsilon``, ``relative_matrix_epsilon``).

    Args:
        spec: The spec, or `matrices`.
        lr: The learning rate, a number.
        weight_decay: Decoupled, as in AdamW.
        momentum: Of the preconditioned gradients.
        decay: 1 sums the factors; below 1 they are moving averages, ``L = decay L + (1 - decay) G G^T``.
        eps: The initial factors, > 0.
        relative_eps: This times the largest eigenvalue is added to each: without gradients they are rounding errors, some
            negative.
        every: Steps between computations of the roots; the first step computes them.
        max_size: A longer side has no factor, and the other side's root is then ^(-1/2).
        options: As in `muon`.
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
        >>> init, update = fs.optim.shampoo(spec, lr=0.5)
        >>> params, grads = fs.shard({"weight": torch.zeros(2, 2)}, spec), fs.shard({"weight": torch.eye(2)}, spec)
        >>> params, state = update(grads, init(params), params)
        >>> fs.unshard(params, spec)["weight"].diagonal().sign()
        tensor([-1., -1.])
    """
    check_nonnegative("shampoo", lr=lr, weight_decay=weight_decay, momentum=momentum)
    check_nonnegative("shampoo", relative_eps=relative_eps)
    if not 0 < decay <= 1 or not eps > 0 or every < 1:
        raise ValueError(f"shampoo: expected 0 < decay <= 1, eps > 0 and every >= 1, got {decay}, {eps} and {every}")
    known = resolve_real_matrices("shampoo", spec)

    def init_owned(like: Tensor) -> Slots:
        state: Slots = {}
        for side, size in factored_sides(like.shape, max_size).items():
            eye = torch.eye(size, dtype=upcast(like[..., :1, :1]).dtype, device=like.device).expand(
                *like.shape[:-2], size, size
            )
            state |= {side: eps * eye, f"{side}_root": torch.zeros_like(eye, memory_format=torch.contiguous_format)}
        return state

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        return (limit_squares(grad),), slots

    def on_owner(
        sent: Mapping[str, Payload], whole: OwnedState, options: Mapping[str, MatrixOptions]
    ) -> tuple[dict[str, Payload], OwnedState]:
        results: dict[str, Payload] = {}
        new: OwnedState = {}
        for name, (grad,) in sent.items():
            x, new[name] = upcast(grad), {}
            factored = factored_sides(x.shape, max_size)
            due = (options[name]["step"] - 1) % every == 0
            for side in factored:
                factor = whole[name][side] * decay + gram(upcast(grad), side) * (1 if decay == 1 else 1 - decay)
                make = partial(_inverse_roots, [factor], 2 * len(factored), relative_eps)
                (root,) = compute_if_due(due, make, [whole[name][f"{side}_root"]])
                new[name] |= {side: factor, f"{side}_root": root}
                x = multiply_side(x, root, side)
            results[name] = (x,)
        return results, new

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        buffer = options["momentum"] * slots["momentum_buffer"] + results[0]
        return param * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * buffer, {"momentum_buffer": buffer}

    rule = MatrixRule(("momentum_buffer",), init_owned, before_exchange, on_owner, (0,), after_exchange, mixes_stacks=False)
    defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    optimizer = optimizer_with_fallback("shampoo", rule, known, defaults, options, fallback, donate=donate)
    return break_graphs(optimizer, "shampoo", "it reads the step to know whether to compute roots")


def _inverse_roots(factors: list[Tensor], power: int, relative_eps: float) -> list[Tensor]:
    """Return the factors to the power -1 / ``power``, after adding to each ``relative_eps`` times its largest eigenvalue."""
    roots: list[Tensor] = []
    for factor in factors:
        values, vectors = eigh_or_nan(factor)
        values = values.clamp(min=0) + relative_eps * values[..., -1:]
        powers = values.clamp(min=torch.finfo(values.dtype).tiny).pow(-1 / power)
        roots.append((vectors * powers[..., None, :]) @ vectors.mT)
    return roots
