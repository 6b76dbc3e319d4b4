"""The derivatives of the plain model that assert_exact compares with: by plain autograd, which records what it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import grad

from .._units.layout import Params

__all__ = ["differentiate", "multiply_ggn", "multiply_hessian", "multiply_loss_hessian"]


def differentiate(value: Tensor, trained: Mapping[str, Tensor], *, create_graph: bool = False) -> Params:
    """Return the gradient of a scalar by name: zeros without a derivative, dense where torch's is sparse."""
    if value.dim():
        raise ValueError(f"assert_exact: expected the loss to be a scalar, got shape {list(value.shape)}; reduce it")
    if not value.requires_grad or not trained:
        return {name: torch.zeros_like(p) for name, p in trained.items()}
    leaves = list(trained.values())
    grads = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True, materialize_grads=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in zip(trained, grads, strict=True)}


def multiply_hessian(grads: Params, vector: Params, trained: Mapping[str, Tensor]) -> Params:
    """Return the Hessian-vector product, from the gradients with their graph."""
    return differentiate(_inner_product(grads, vector), trained)


def multiply_ggn(
    outputs: Tensor, curvature: Callable[[Tensor, Tensor], Tensor], vector: Params, trained: Mapping[str, Tensor]
) -> Params:
    """Return the GGN-vector product J' H J v, where ``curvature(outputs, J v)`` returns H J v."""
    if not outputs.requires_grad or not trained:
        return {name: torch.zeros_like(p) for name, p in trained.items()}
    c = torch.zeros_like(outputs, requires_grad=True)  # J v is the derivative of <J' c, v> by c
    along = _inner_product(differentiate((outputs * c).sum(), trained, create_graph=True), vector)
    (pushed,) = torch.autograd.grad(along, c, retain_graph=True)
    return differentiate((outputs * curvature(outputs.detach(), pushed)).sum(), trained)


def multiply_loss_hessian(loss: Callable[[Tensor], Tensor], outputs: Tensor, u: Tensor) -> Tensor:
    """Return the product of the loss's Hessian at the outputs with ``u``, as the gradient of a gradient."""
    return grad(lambda z: (grad(loss)(z) * u).sum())(outputs)


def _inner_product(grads: Params, vector: Params) -> Tensor:
    """Return the inner product over the real numbers."""
    return torch.stack([(g * vector[name].conj()).real.sum() for name, g in grads.items()] or [torch.zeros(())]).sum()
