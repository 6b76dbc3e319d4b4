"""shampoo: gradients between inverse roots of the factors of all gradients so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
    options: OptionsOf | None = None,
    fallback: Fallback | None = None,
    donate: bool = False,
) -> MatrixOptimizer:
    """``(init, update)`` of Shampoo: ``W = (1 - lr weight_decay) W - lr M``, ``M = momentum M + L^(-1/4) G R^(-1/4)``.

    L and R begin as ``eps`` times the identity and gather ``G G^T`` and ``G^T G``: their sum, or with a ``decay`` below 1 their
    moving averages, ``L = decay L + (1 - decay) G G^T``. Their roots are renewed in the first step and ``every`` so many, in
    float32 at least, by eigenvalues. ``relative_eps`` times the largest eigenvalue is added to each: those of directions
    without gradients are rounding errors, some of them negative. A side of more than ``max_size`` has no factor, and the
    other's root is then ^(-1/2).

    The momentum is slices like the parameters; factors and roots are on the matrix's owner, where it is all computed. Other
    arguments, and what is returned, are those of `muon`.

    Gupta, Koren and Singer, Shampoo: Preconditioned Stochastic Tensor Optimization, 2018; several steps with one root as in
    Anil et al., Scalable Second Order Optimization for Deep Learning, 2020, whose code (google-research/scalable_shampoo)
    has the same ``relative_eps`` (``matrix_epsilon``, ``relative_matrix_epsilon``).

    Raises ValueError for options that are out of range, TypeError for complex matrices.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False))
        >>> init, update = fs.optim.shampoo(spec, lr=0.5)
        >>> params, grads = fs.shard({"weight": torch.zeros(2, 2)}, spec), fs.shard({"weight": torch.eye(2)}, spec)
        >>> params, state = update(grads, init(params), params)
        >>> fs.unshard(params, spec)["weight"].diagonal().sign()
        tensor([-1., -1.])
    """
    positive("shampoo", lr=lr, weight_decay=weight_decay, momentum=momentum)
    positive("shampoo", relative_eps=relative_eps)
    if not 0 < decay <= 1 or not eps > 0 or every < 1:
        raise ValueError(f"shampoo: expected 0 < decay <= 1, eps > 0 and every >= 1, got {decay}, {eps} and {every}")
    known = real_matrices("shampoo", spec)

    def begin(like: Tensor) -> Slots:
        state: Slots = {}
        for side, size in sides(like.shape, max_size).items():
            eye = torch.eye(size, dtype=wide(like[..., :1, :1]).dtype, device=like.device).expand(*like.shape[:-2], size, size)
            state |= {side: eps * eye, f"{side}_root": torch.zeros_like(eye, memory_format=torch.contiguous_format)}
        return state

    def before(grad: Tensor, slots: Slots, param: Tensor, options: Options) -> tuple[Sent, Slots]:
        return (grad,), slots

    def work(sent: Mapping[str, Sent], whole: Whole, options: Mapping[str, Options]) -> tuple[dict[str, Sent], Whole]:
        results: dict[str, Sent] = {}
        new: Whole = {}
        for name, (grad,) in sent.items():
            x, new[name] = wide(grad), {}
            factored = sides(x.shape, max_size)
            due = (options[name]["step"] - 1) % every == 0
            for side in factored:
                factor = whole[name][side] * decay + outer(wide(grad), side) * (1 if decay == 1 else 1 - decay)
                make = partial(_inverse_root, factor, 2 * len(factored), relative_eps)
                (root,) = chosen_where(due, make, [whole[name][f"{side}_root"]])
                new[name] |= {side: factor, f"{side}_root": root}
                x = along(x, root, side)
            results[name] = (x,)
        return results, new

    def after(results: Sent, slots: Slots, param: Tensor, options: Options) -> tuple[Tensor, Slots]:
        buffer = options["momentum"] * slots["momentum_buffer"] + results[0]
        return param * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * buffer, {"momentum_buffer": buffer}

    rule = Rule(("momentum_buffer",), begin, before, work, (0,), after)
    own = options_of("shampoo", known, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}, options)
    return with_fallback(rule, known, own, fallback, lr, weight_decay, options, donate=donate)


def _inverse_root(factor: Tensor, power: int, relative_eps: float) -> list[Tensor]:
    """The factor to the power of -1 / ``power``, with ``relative_eps`` times the largest eigenvalue added to its diagonal."""
    values, vectors = eigh(factor)
    values = values.clamp(min=0) + relative_eps * values[..., -1:]
    return [(vectors * values.clamp(min=torch.finfo(values.dtype).tiny).pow(-1 / power)[..., None, :]) @ vectors.mT]
