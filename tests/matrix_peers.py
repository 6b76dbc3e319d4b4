"""Optimizers of matrices written down plainly from their papers, on whole parameters in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import funshard as fs

Params = dict[str, Tensor]
Peer = Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]
"""``peer(param, grad, state, t) -> the new param``; it keeps what it wants in the state. ``t`` counts from 1."""


def newton_schulz(x: Tensor) -> Tensor:
    """Jordan et al., 2024."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x / x.norm()
    for _ in range(5):
        y = a * y + b * (y @ y.mT) @ y + c * (y @ y.mT) @ (y @ y.mT) @ y
    return y


def muon(lr: float = 0.05, decay: float = 0.1, mu: float = 0.95) -> Peer:
    def step(w: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        b = state["b"] = mu * state.get("b", torch.zeros_like(g)) + (1 - mu) * g
        n, m = w.shape
        return (1 - lr * decay) * w - lr * max(1, n / m) ** 0.5 * newton_schulz((1 - mu) * g + mu * b)

    return step


def shampoo(
    lr: float = 0.05, decay: float = 0.1, mu: float = 0.9, eps: float = 1e-2, every: int = 1, beta: float = 1.0
) -> Peer:
    """Gupta et al., 2018, Algorithm 1, with the relative epsilon of Anil et al., 2020."""

    def power(x: Tensor, p: float) -> Tensor:
        values, vectors = torch.linalg.eigh(x)
        return vectors @ torch.diag((values + 1e-6 * values.max()) ** p) @ vectors.mT

    def step(w: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        n, m = w.shape
        gain = 1 if beta == 1 else 1 - beta
        state["l"] = beta * state.get("l", eps * torch.eye(n, dtype=w.dtype)) + gain * g @ g.mT
        state["r"] = beta * state.get("r", eps * torch.eye(m, dtype=w.dtype)) + gain * g.mT @ g
        if (t - 1) % every == 0:
            state["roots"] = power(state["l"], -1 / 4), power(state["r"], -1 / 4)
        left, right = state["roots"]
        state["m"] = mu * state.get("m", torch.zeros_like(g)) + left @ g @ right
        return (1 - lr * decay) * w - lr * state["m"]

    return step


def soap(
    lr: float = 0.05, decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.8), every: int = 3, max_size: int = 8
) -> Peer:
    """Vyas et al., 2024, Algorithms 3 and 4, with the first step and the order of eigenvalues of the authors' code."""
    b1, b2 = betas

    def step(w: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        factors = [g @ g.mT if len(g) <= max_size else None, g.mT @ g if g.shape[1] <= max_size else None]
        if t == 1:
            state["factors"] = [None if x is None else (1 - b2) * x for x in factors]
            bases = (None if x is None else torch.linalg.eigh(x).eigenvectors.flip(1) for x in state["factors"])
            state["q"] = [torch.eye(n, dtype=g.dtype) if q is None else q for n, q in zip(g.shape, bases, strict=True)]
            state["m"], state["v"] = torch.zeros_like(g), torch.zeros_like(g)
            return w
        left, right = state["q"]
        rotated = left.mT @ g @ right
        state["m"] = b1 * state["m"] + (1 - b1) * g
        state["v"] = b2 * state["v"] + (1 - b2) * rotated**2
        direction = left @ ((left.mT @ state["m"] @ right) / (state["v"].sqrt() + 1e-8)) @ right.mT
        s = t - 1
        w = w - lr * (1 - b2**s) ** 0.5 / (1 - b1**s) * direction
        w = w - lr * decay * w
        both = zip(state["factors"], factors, strict=True)
        state["factors"] = [None if x is None else b2 * old + (1 - b2) * x for old, x in both]
        for i, (x, q) in enumerate(zip(state["factors"], state["q"], strict=True)) if s % every == 0 else ():
            if x is not None:
                order = torch.diag(q.mT @ x @ q).argsort(descending=True)
                state["v"] = state["v"].index_select(i, order)
                state["q"][i] = torch.linalg.qr(x @ q[:, order]).Q
        return w

    return step


def trained(params: Mapping[str, Tensor], grads: list[Params], peer: Peer, matrices: set[str], **adamw: float) -> Params:
    """The parameters after a step with each of the gradients: matrices by the peer, the rest by torch's AdamW."""
    out = {name: p.detach().clone() for name, p in params.items()}
    rest = {name: p for name, p in out.items() if name not in matrices}
    optimizer = torch.optim.AdamW(rest.values(), **adamw) if rest else None
    states: dict[str, dict[str, Any]] = {name: {} for name in matrices}
    for t, grad in enumerate(grads, 1):
        for name in matrices:
            out[name] = peer(out[name], grad[name], states[name], t)
        for name, p in rest.items():
            p.grad = grad[name].clone()
        if optimizer:
            optimizer.step()
    return out


def sharded(
    spec: fs.PartitionSpec, pair: Any, full: Params, grads: list[Params], rates: Any = lambda t: {}
) -> tuple[Params, Any]:
    """The shards of these parameters, and the state, after a step of ``(init, update)`` with each of the gradients."""
    init, update = pair
    params = fs.shard(full, spec)
    state = init(params)
    for t, grad in enumerate(grads):
        params, state = update(fs.shard(grad, spec), state, params, **rates(t))
    return params, state
