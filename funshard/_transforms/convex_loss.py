"""Convex losses whose Hessian is known in closed form: its product with a vector needs no second derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._spec.division import ReduceBy, Reduction

__all__ = ["ConvexLoss", "cross_entropy", "squared_error"]


@dataclass(frozen=True)
class ConvexLoss:
    """A convex function of a model's outputs, called as a loss, with its Hessian's product in closed form.

    Attributes:
        value: A function of outputs that returns the loss, a scalar.
        hessian_product: A function of outputs and of a tensor of their shape, that returns the product, of that shape.

    Example:
        >>> import torch, funshard as fs
        >>> loss = fs.curvature.ConvexLoss(lambda z: z.exp().sum(), lambda z, u: z.exp() * u)
        >>> fs.ggnvp(lambda p: 2 * p["w"], loss, {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 3.0])})
        {'w': tensor([ 4., 12.])}
    """

    value: Callable[[Tensor], Tensor]
    hessian_product: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the loss of these outputs."""
        return self.value(outputs)


def cross_entropy(
    labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduce: ReduceBy = "mean"
) -> ConvexLoss:
    """Return the cross-entropy of logits with these labels as a `ConvexLoss`.

    The value is that of ``torch.nn.functional.cross_entropy``. The classes are the last dimension of the logits.

    Args:
        labels: Whole numbers, in the logits' shape without its last dimension.
        ignore_index: The label of positions that do not count.
        label_smoothing: From 0 to 1: how much of the target is uniform. The Hessian does not depend on it.
        reduce: "mean" divides the sum by the number of positions that count, "sum" by nothing, or a number.

    Raises:
        ValueError: For another ``reduce``; and where it is used, for logits of another shape.
        TypeError: For labels that are no whole numbers.

    Example:
        >>> import torch, funshard as fs
        >>> loss = fs.curvature.cross_entropy(torch.tensor([0]))
        >>> loss.hessian_product(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])
    """
    Reduction.make(reduce)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"cross_entropy: labels: expected whole numbers, got {labels.dtype}")

    def divide(total: Tensor) -> Tensor:
        if isinstance(reduce, str):
            return total / (labels != ignore_index).sum() if reduce == "mean" else total
        return total / reduce

    def check(logits: Tensor) -> None:
        if logits.shape[:-1] != labels.shape or not logits.dim():
            raise ValueError(
                f"cross_entropy: expected logits of shape {[*labels.shape, 'classes']} for these labels, got "
                f"{list(logits.shape)}"
            )

    def value(logits: Tensor) -> Tensor:
        check(logits)
        rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
        total = F.cross_entropy(rows, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
        return divide(total)

    def hessian_product(logits: Tensor, u: Tensor) -> Tensor:
        check(logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        p, u = logits.softmax(-1, dtype=wide), u.to(wide)
        centred = u - torch.linalg.vecdot(p, u)[..., None]  # which keeps more digits than p * u - p * <p, u>
        weights = divide((labels != ignore_index).to(wide))
        return centred.mul_(p).mul_(weights[..., None]).to(logits.dtype)

    return ConvexLoss(value, hessian_product)


def squared_error(targets: Tensor, *, reduce: ReduceBy = "mean") -> ConvexLoss:
    """Return the squared error between outputs and these targets as a `ConvexLoss`.

    Args:
        targets: In the outputs' shape.
        reduce: "mean" divides the sum by the number of elements, as ``torch.nn.functional.mse_loss``; "sum" by nothing, or a
            number.

    Raises:
        ValueError: For another ``reduce``; and where it is used, for outputs of another shape.

    Example:
        >>> import torch, funshard as fs
        >>> loss = fs.curvature.squared_error(torch.zeros(2))
        >>> loss(torch.tensor([1.0, 3.0])), loss.hessian_product(torch.zeros(2), torch.ones(2))
        (tensor(5.), tensor([1., 1.]))
    """
    Reduction.make(reduce)
    divisor = (targets.numel() if reduce == "mean" else 1.0) if isinstance(reduce, str) else reduce

    def check(outputs: Tensor) -> None:
        if outputs.shape != targets.shape:
            raise ValueError(
                f"squared_error: expected outputs in the targets' shape, {list(targets.shape)}, got {list(outputs.shape)}"
            )

    def value(outputs: Tensor) -> Tensor:
        check(outputs)
        return (outputs - targets).square().sum() / divisor

    def hessian_product(outputs: Tensor, u: Tensor) -> Tensor:
        check(outputs)
        return u * (2 / divisor)

    return ConvexLoss(value, hessian_product)
