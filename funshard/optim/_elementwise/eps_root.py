"""Adam and AdamW with an epsilon under the root, so that derivatives exist where all gradients were zero."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import _torch

__all__ = ["add_eps_root", "warn_zero_gradients"]

ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def add_eps_root(cls: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the class itself, or a subclass with ``eps_root``, which is checked and removed from the defaults."""
    if "eps_root" not in defaults:
        return cls
    eps_root = defaults.pop("eps_root")
    if cls not in ADAMS or not defaults.get("differentiable") or defaults.get("amsgrad"):
        raise ValueError(
            f"from_torch: eps_root is for differentiable Adam and AdamW, without amsgrad: expected one of these with "
            f"differentiable=True, got {cls.__name__}"
        )
    if not eps_root >= 0:
        raise ValueError(f"from_torch: eps_root: expected at least 0, got {eps_root}")

    class WithEpsRoot(cls):  # pyright: ignore[reportGeneralTypeIssues]
        """An optimizer that divides by ``sqrt(v / (1 - b2^t) + eps_root) + eps``, as optax.adam does."""

        has_derivative_at_zero = eps_root > 0

        def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for group in self.param_groups:
                for param in group["params"]:
                    _step(param, self.state[param], group, eps_root)

    WithEpsRoot.__name__ = WithEpsRoot.__qualname__ = cls.__name__
    return WithEpsRoot


def _step(param: Tensor, state: dict[str, Tensor], group: dict[str, Any], eps_root: float) -> None:
    """Run one step in place, as torch's own does, in operations that autograd records."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    assert param.grad is not None
    before = param.clone()  # saved for derivatives by tensor options, and not written to
    if param.is_complex():
        raise TypeError("from_torch: eps_root is for real parameters, got complex ones")
    grad = -param.grad if group["maximize"] else param.grad
    decoupled = group.get("decoupled_weight_decay", False)
    if decay and not decoupled:
        grad = grad + decay * before
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    steps = state["step"].to(param.dtype)
    average = state["exp_avg"] / (1 - beta1**steps)
    square = state["exp_avg_sq"] / (1 - beta2**steps)
    shrunk = before * (1 - lr * decay) if decay and decoupled else before
    param.copy_(shrunk - lr * average / ((square + eps_root).sqrt() + group["eps"]))


def warn_zero_gradients(
    cls: type[torch.optim.Optimizer],
    grads: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Tensor]],
    masks: Mapping[str, Tensor],
) -> None:
    """Warn, naming the unit, about elements whose gradients were all zero and are differentiated through a root."""
    if not issubclass(cls, ADAMS) or getattr(cls, "has_derivative_at_zero", False) or torch.compiler.is_compiling():
        return
    for key, grad in grads.items():
        if key not in state or "exp_avg_sq" not in state[key] or not _torch.is_tracked(grad) or _torch.is_batched(grad):
            continue
        zeros = _torch.unwrap(state[key]["exp_avg_sq"].detach()) == 0
        if key in masks:
            zeros = zeros & ~masks[key]
        if bool(zeros.any()):
            warnings.warn(
                f"from_torch: unit '{key}' has elements whose gradients were all 0, as of a feature that is always 0: "
                f"{cls.__name__} takes the root of their mean square, which has no derivative there, and derivatives that "
                "depend on them are NaN; give eps_root=1e-8, say, which is added under the root",
                stacklevel=3,
            )
            return
