"""Optimizers of whole matrices: Muon, with its choice of hidden ones, Shampoo, SOAP and Adafactor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _torch
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._slices.values import is_inexact, upcast
from ._by_matrix import MatrixOptions, MatrixRule, Payload, Slots, make_optimizer, rule_from_update
from ._checks import Optimizer, Pair, ParamOptions, Tensors, check_nonnegative
from ._matrices import Matrices, Select, matrices

RELATIVE_EPS = 1e-6
"""Shampoo adds this times the largest eigenvalue to each."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def hidden(model: nn.Module, *heads: str) -> Select:
    """Return a ``select`` for the hidden matrices of a model: neither embeddings nor heads.

    It selects parameters with two dimensions. It leaves out parameters of ``nn.Embedding`` and ``nn.EmbeddingBag`` under any of
    their names (a tied head), of ``model.get_output_embeddings()`` (transformers), and of the modules in ``heads``. Add stacked
    experts or convolutions yourself::

        is_hidden = hidden(model, "score")
        matrices(spec, select=lambda name, param: len(param.shape) == 3 or is_hidden(name, param))

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    Args:
        model: The model, of which only names and module types are read.
        *heads: Paths of modules to leave out.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> chosen = fs.optim.matrices(fs.policies.whole()(model), select=fs.optim.hidden(model, "2"))
        >>> [matrix.name for matrix in chosen.chosen]
        ['1.weight']
    """
    paths = {id(module): path for path, module in model.named_modules()}
    left_out = {path for path, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    for head in heads:
        if head not in paths.values():
            raise ValueError(f"hidden: '{head}' is no module of the model: expected paths such as {[*paths.values()][1:5]}")
        left_out.add(head)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if id(output) in paths:
        left_out.add(paths[id(output)])

    def select(name: str, param: Param) -> bool:
        inside = {path.rpartition(".")[0] for path in param.names}
        within = any(path == out or path.startswith(f"{out}.") for path in inside for out in left_out)
        return len(param.shape) == 2 and not within

    return select


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
    fallback: Pair | None = None,
    donate: bool = False,
) -> Optimizer:
    """Return ``(init, update)`` of Muon: orthonormalized momentum for matrices, AdamW for other parameters.

    ``B = B + (1 - momentum) (G - B)``; with ``nesterov`` the direction is ``orthogonal(G + momentum (B - G))``, else
    ``orthogonal(B)``; then ``W = (1 - lr weight_decay) W - lr scale direction``. The momentum is kept in slices like the
    parameters. The iteration (`orthogonal`) runs once for each matrix, on its owner.

    Args:
        spec: The spec, or `matrices`: ``matrices(spec, select=hidden(model))`` leaves embeddings and heads to ``fallback``.
        lr, weight_decay: The learning rate, a number, and the decay, decoupled as in AdamW.
        momentum, nesterov: Of the average of gradients, and whether to use Nesterov's.
        coefficients, eps, steps: Of the iteration, 1 to 99 steps; see `orthogonal`.
        adjust_lr: The scale of a matrix [n, m]: ``"original"`` is ``sqrt(max(1, n / m))``; ``"match_rms_adamw"`` is
            ``0.2 sqrt(max(n, m))``, which suits AdamW's learning rate and weight decay.
        dtype: In which a matrix is sent and iterated. On a CPU without bfloat16 instructions float32 is faster.
        options: ``options(name, param)``: a parameter's own ``lr``, ``weight_decay`` or ``momentum``.
        fallback, donate: As in `by_matrix`; the default is AdamW with this ``lr`` and ``weight_decay``.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False))
        >>> init, update = fs.optim.muon(spec, lr=0.5, dtype=torch.float32)
        >>> params = {"": torch.zeros(8)}
        >>> update({"": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])}, init(params), params)[0][""][:4].sign()
        tensor([-1.,  0.,  0., -1.])

    Source: Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025. Equal to torch.optim.Muon.
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

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        buffer = slots["momentum_buffer"].lerp(grad, 1 - options["momentum"])
        sent = grad.lerp(buffer, options["momentum"]) if nesterov else buffer
        return (sent.to(dtype),), {"momentum_buffer": buffer}

    def on_owner(sent: Payload, state: Slots, options: MatrixOptions) -> tuple[Payload, Slots]:
        return (orthogonal(sent[0], steps=steps, coefficients=coefficients, eps=eps),), {}

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        rate, (direction,), (n, m) = options["lr"], results, options["shape"][-2:]
        scale = math.sqrt(max(1, n / m)) if adjust_lr == "original" else 0.2 * math.sqrt(max(n, m))
        param = param.mul(1 - rate * options["weight_decay"])
        direction = direction.to(torch.promote_types(upcast(direction).dtype, param.dtype))
        return param.sub(direction * (rate * scale)).to(param.dtype), slots

    rule = MatrixRule(("momentum_buffer",), lambda x: {}, before_exchange, on_owner, after_exchange, takes_batches=True)
    defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    return make_optimizer("muon", rule, spec, defaults, options=options, fallback=fallback, donate=donate)


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

    Example:
        >>> import torch
        >>> u = orthogonal(torch.diag(torch.tensor([3.0, 4.0])), steps=20, coefficients=(15 / 8, -10 / 8, 3 / 8))
        >>> torch.allclose(u, torch.eye(2))
        True
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    largest = upcast(y.detach()).abs().amax((-2, -1), keepdim=True)
    power = torch.where(largest > 1, largest / (2 * torch.frexp(largest).mantissa), 1).to(y.dtype)
    y = y / power  # a power of two near the largest element, which rounds nothing
    y = y / torch.maximum(torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True), eps / power)
    batched = y.dim() > 2
    y = y.flatten(0, -3) if batched else y
    add = torch.baddbmm if batched else torch.addmm
    for _ in range(steps):
        gram = y @ y.mT
        y = add(y, add(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).reshape(x.shape)


# --- Shared parts of Shampoo and SOAP: the factors G G^T and G^T G of a matrix, and functions of them every few steps ---


def _factored_sides(shape: Sequence[int], max_size: int) -> list[str]:
    return [side for side, size in zip(("left", "right"), shape[-2:], strict=True) if size <= max_size]


def _init_factors(like: Tensor, max_size: int, eps: float, suffix: str) -> Slots:
    """Return each side's factor, ``eps`` times the identity, and of the same size zeros for what is computed from it."""
    state: Slots = {}
    for side in _factored_sides(like.shape, max_size):
        size = like.shape[-2 if side == "left" else -1]
        eye = torch.eye(size, dtype=upcast(like[..., :1, :1]).dtype, device=like.device).expand(*like.shape[:-2], size, size)
        state |= {side: eps * eye, f"{side}_{suffix}": torch.zeros_like(eye, memory_format=torch.contiguous_format)}
    return state


def _limit_squares(grad: Tensor) -> Tensor:
    """Return a gradient with finite elements cut to 2^48 in float32, as 2^384 in float64: sums of their squares are finite."""
    limit = torch.finfo(torch.promote_types(grad.dtype, torch.float32)).max ** 0.375
    limit = min(limit, torch.finfo(grad.dtype).max)
    return torch.where(grad.isfinite(), grad.clamp(-limit, limit), grad)


def _gram(grad: Tensor, side: str) -> Tensor:
    return grad @ grad.mT if side == "left" else grad.mT @ grad


def _multiply_side(x: Tensor, factor: Tensor, side: str) -> Tensor:
    return factor @ x if side == "left" else x @ factor


def _eigh_or_nan(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors, NaN if not finite: an exception on one owner leaves the others waiting."""
    finite = factor.isfinite().all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, factor, 0))
    return torch.where(finite[..., 0], values, torch.nan), torch.where(finite, vectors, torch.nan)


def _compute_if_due(due: Tensor, new: Callable[[], Sequence[Tensor]], old: Sequence[Tensor]) -> list[Tensor]:
    """Return the new tensors, computed only if due, else the old. ``due`` is on the host, the same on all ranks."""
    if not _torch.is_wrapped(due):
        return list(new() if bool(due) else old)
    return [torch.where(due, a, b) for a, b in zip(new(), old, strict=True)]  # simulated ranks, of which none can be asked


def shampoo(
    spec: PartitionSpec | Matrices,
    *,
    lr: float = 0.01,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    decay: float = 1.0,
    eps: float = 1e-4,
    every: int = 1,
    max_size: int = 8192,
    options: ParamOptions | None = None,
    fallback: Pair | None = None,
    donate: bool = False,
) -> Optimizer:
    """Return ``(init, update)`` of Shampoo: ``M = momentum M + L^(-1/4) G R^(-1/4)``, ``W = (1 - lr weight_decay) W - lr M``.

    L and R begin as ``eps`` times the identity and accumulate ``G G^T`` and ``G^T G``. Eigenvalues give their roots, in float32
    at least, and elements of G count as at most 2^48 there. The momentum is kept in slices like the parameters.

    Args:
        spec, lr, weight_decay: As in `muon`.
        momentum: Of the preconditioned gradients.
        decay: 1 sums the factors; below 1 they are moving averages, ``L = decay L + (1 - decay) G G^T``.
        eps: The initial factors, > 0.
        every: Steps between computations of the roots; the first step computes them.
        max_size: A longer side has no factor, and the other side's root is then ^(-1/2).
        options, fallback, donate: As in `muon`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False))
        >>> init, update = fs.optim.shampoo(spec, lr=0.5)
        >>> params = {"": torch.zeros(8)}
        >>> update({"": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])}, init(params), params)[0][""][:4].sign()
        tensor([-1.,  0.,  0., -1.])

    Source: Gupta, Koren and Singer, Shampoo, 2018; one root for several steps and `RELATIVE_EPS`: Anil et al., Scalable Second
    Order Optimization for Deep Learning, 2020, and google-research/scalable_shampoo.
    """
    check_nonnegative("shampoo", lr=lr, weight_decay=weight_decay, momentum=momentum)
    if not 0 < decay <= 1 or not eps > 0 or every < 1:
        raise ValueError(f"shampoo: expected 0 < decay <= 1, eps > 0 and every >= 1, got {decay}, {eps} and {every}")

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        return (_limit_squares(grad),), slots

    def on_owner(sent: Payload, state: Slots, options: MatrixOptions) -> tuple[Payload, Slots]:
        new: Slots = {}
        x = grad = upcast(sent[0])
        factored = _factored_sides(x.shape, max_size)
        due = (options["step"] - 1) % every == 0
        for side in factored:
            factor = state[side] * decay + _gram(grad, side) * (1 if decay == 1 else 1 - decay)
            make = partial(_inverse_roots, factor, 2 * len(factored))
            (root,) = _compute_if_due(due, make, [state[f"{side}_root"]])
            new |= {side: factor, f"{side}_root": root}
            x = _multiply_side(x, root, side)
        return (x,), new

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        buffer = options["momentum"] * slots["momentum_buffer"] + results[0]
        return param * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * buffer, {"momentum_buffer": buffer}

    init_owned = partial(_init_factors, max_size=max_size, eps=eps, suffix="root")
    rule = MatrixRule(("momentum_buffer",), init_owned, before_exchange, on_owner, after_exchange, reads_step=True)
    defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    return make_optimizer("shampoo", rule, spec, defaults, options=options, fallback=fallback, donate=donate)


def _inverse_roots(factor: Tensor, power: int) -> list[Tensor]:
    """Return the factor to the power -1 / ``power``. What has no gradients has rounding errors as eigenvalues."""
    values, vectors = _eigh_or_nan(factor)
    values = values.clamp(min=0) + RELATIVE_EPS * values[..., -1:]
    powers = values.clamp(min=torch.finfo(values.dtype).tiny).pow(-1 / power)
    return [(vectors * powers[..., None, :]) @ vectors.mT]


def soap(
    spec: PartitionSpec | Matrices,
    *,
    lr: float = 3e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    every: int = 10,
    max_size: int = 8192,
    options: ParamOptions | None = None,
    fallback: Pair | None = None,
    donate: bool = False,
) -> Optimizer:
    """Return ``(init, update)`` of SOAP: Adam's step in the eigenbasis of moving averages of ``G G^T`` and ``G^T G``.

    With Q the eigenvectors of both sides, the gradient and its average M are rotated, ``G' = Q_L^T G Q_R``; V averages
    ``G'^2``; the step is ``M' / (sqrt(V) + eps)``, bias-corrected and rotated back; the weight decays as in AdamW. sqrt(V) is
    at least the rounding error of its largest element, so that directions without gradients get no steps. The first gradient
    only computes the basis. Elements of gradients count as at most 2^48 in float32: larger squares would overflow.

    Args:
        spec, lr, weight_decay: As in `muon`.
        betas: Adam's, of M and V; the second one is also that of the factors.
        eps: Added to sqrt(V).
        every: Steps between updates of the basis, each one step of power iteration and QR.
        max_size: A longer side is not rotated.
        options, fallback, donate: As in `muon`; options are ``lr`` and ``weight_decay``.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False))
        >>> init, update = fs.optim.soap(spec, lr=0.5)
        >>> params, grads = {"": torch.zeros(8)}, {"": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])}
        >>> params, state = update(grads, init(params), params)  # the first step only sets up the eigenbasis
        >>> update(grads, state, params)[0][""][:4].sign()
        tensor([-1.,  0.,  0., -1.])

    Source: Vyas et al., SOAP, 2024. The steps equal those of nikhilvyas/SOAP with ``merge_dims`` and ``precondition_1d`` off.
    """
    check_nonnegative("soap", lr=lr, weight_decay=weight_decay, eps=eps)
    if not all(0 <= beta < 1 for beta in betas) or every < 1:
        raise ValueError(f"soap: expected betas in [0, 1) and every >= 1, got {betas} and {every}")

    def init_owned(like: Tensor) -> Slots:
        square = like.new_zeros(like.shape, dtype=upcast(like[..., :1, :1]).dtype)
        return {"exp_avg_sq": square, **_init_factors(like, max_size, 0.0, "basis")}

    def before_exchange(grad: Tensor, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Payload, Slots]:
        weight = (1 - betas[0]) * _is_past_first(options["step"], param)
        grad = _limit_squares(grad)
        average = slots["exp_avg"] + (grad - slots["exp_avg"]) * weight
        return (grad, average), {"exp_avg": average}

    def on_owner(sent: Payload, state: Slots, options: MatrixOptions) -> tuple[Payload, Slots]:
        (grad, average), step = map(upcast, sent), options["step"]
        factored = _factored_sides(grad.shape, max_size)
        counts = _is_past_first(step, grad)
        factors = [state[side] + (_gram(grad, side) - state[side]) * (1 - betas[1]) for side in factored]
        bases = [state[f"{side}_basis"] for side in factored]
        rotated = _rotate(grad, bases, factored)
        square = state["exp_avg_sq"]
        square = square + (rotated.square() - square) * (1 - betas[1]) * counts
        root = (square + (1 - counts)).sqrt()  # not of the first step's zeros, where it has no derivative
        # Adam would divide the rounding errors of a rotated gradient by themselves, into full steps
        smallest = root.amax((-2, -1), keepdim=True) * (30 * math.sqrt(max(root.shape[-2:])) * torch.finfo(root.dtype).eps)
        direction = _rotate(average, bases, factored) / (torch.maximum(root, smallest) + eps)
        direction = _rotate(direction, [basis.mT for basis in bases], factored) * counts
        bases = _compute_if_due(step == 1, lambda: [_eigh_or_nan(factor)[1].flip(-1) for factor in factors], bases)
        due = (step > 1) & ((step - 1) % every == 0)
        square, *bases = _compute_if_due(due, lambda: _power_iteration(square, factors, bases, factored), [square, *bases])
        new = {"exp_avg_sq": square}
        for side, factor, basis in zip(factored, factors, bases, strict=True):
            new |= {side: factor, f"{side}_basis": basis}
        return (direction,), new

    def after_exchange(results: Payload, slots: Slots, param: Tensor, options: MatrixOptions) -> tuple[Tensor, Slots]:
        counts = _is_past_first(options["step"], param)
        taken = (options["step"] - 1).clamp(min=1).to(torch.float64)  # the first gradient makes the basis and no step
        size = ((1 - betas[1] ** taken).sqrt() / (1 - betas[0] ** taken)).to(param.device, param.dtype)
        param = param - options["lr"] * size * results[0]
        return param * (1 - options["lr"] * options["weight_decay"] * counts), slots

    rule = MatrixRule(("exp_avg",), init_owned, before_exchange, on_owner, after_exchange, reads_step=True)
    defaults = {"lr": lr, "weight_decay": weight_decay}
    return make_optimizer("soap", rule, spec, defaults, options=options, fallback=fallback, donate=donate)


def _is_past_first(step: Tensor, like: Tensor) -> Tensor:
    return (step > 1).to(like.device, upcast(like[..., :0]).dtype).to(like.dtype)


def _rotate(x: Tensor, bases: list[Tensor], factored: list[str]) -> Tensor:
    for basis, side in zip(bases, factored, strict=True):
        x = _multiply_side(x, basis.mT if side == "left" else basis, side)
    return x


def _power_iteration(square: Tensor, factors: list[Tensor], bases: list[Tensor], factored: list[str]) -> list[Tensor]:
    # in the order of the old basis's eigenvalues
    out: list[Tensor] = []
    for factor, basis, side in zip(factors, bases, factored, strict=True):
        values = (basis * (factor @ basis)).sum(-2)
        order = values.argsort(dim=-1, descending=True)
        dim = -2 if side == "left" else -1
        square = square.gather(dim, (order[..., :, None] if side == "left" else order[..., None, :]).expand_as(square))
        basis = basis.gather(-1, order[..., None, :].expand_as(basis))
        out.append(torch.linalg.qr(factor @ basis).Q)
    return [square, *out]


def adafactor(
    learning_rate: float,
    spec: PartitionSpec | Matrices,
    *,
    decay_rate: float = 0.8,
    clipping_threshold: float = 1.0,
    eps: float | None = None,
    min_scale: float = 1e-3,
    weight_decay: float = 0.0,
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
        options: ``options(name, param)``: a parameter's own ``lr`` or ``weight_decay``.
        donate: As in `by_matrix`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2, bias=False))
        >>> init, update = fs.optim.adafactor(0.5, spec)
        >>> params = {"": torch.ones(8)}
        >>> update({"": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])}, init(params), params)[0][""][:4] < 1
        tensor([ True, False, False,  True])
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

    def begin_others(params: Tensors) -> Mapping[str, Any]:  # which raises also on ranks that hold none of a parameter
        by_name = known.spec.by_name
        for name, x in params.items():
            if is_inexact(x) and (by_name[name][1].numel if name in by_name else len(x)):
                raise ValueError(
                    f"Adafactor: '{name}' is frozen, or none of the matrices given: expected what is trained, all of it among "
                    "the matrices; set the rest apart with trainable, frozen = partition(params, spec)"
                )
        return {name: {} for name in params}

    rule = rule_from_update(init, update, known.chosen)
    defaults = {"lr": learning_rate, "weight_decay": weight_decay}
    fallback = begin_others, lambda grads, state, params, **rates: (dict(params), dict(state))
    return make_optimizer("adafactor", rule, known, defaults, options=options, fallback=fallback, shares_lr=True, donate=donate)
