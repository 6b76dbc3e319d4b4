"""Arithmetic of trees of tensors, such as shards: the vectors of optimizers and of linear algebra."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .._core.layout import Params

__all__ = ["axpy", "check_same_keys", "scale"]


def axpy(a: float | Tensor, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Params:
    """Return ``a * x + y``.

    Args:
        a: A number, or a scalar tensor: the same on all ranks. Its derivative is each rank's own (`collectives.vary`).
        x: A tree, such as shards.
        y: A tree with the keys and shapes of ``x``.

    Returns:
        A tree with the dtypes of ``y``.

    Raises:
        ValueError: Only one tree has a key, or its tensors differ in shape.

    Example:
        >>> import torch, funshard as fs
        >>> fs.optim.axpy(-0.5, {"w": torch.tensor([2.0, 4.0])}, {"w": torch.ones(2)})
        {'w': tensor([ 0., -1.])}
    """
    check_same_keys("axpy", "x", x, "y", y)
    return {key: (a * x[key] + t).to(t.dtype) for key, t in y.items()}


def scale(a: float | Tensor, x: Mapping[str, Tensor]) -> Params:
    """Return ``a * x``, in the dtypes of ``x``.

    Args:
        a: As in `axpy`.
        x: A tree, such as shards.

    Example:
        >>> import torch, funshard as fs
        >>> fs.optim.scale(0.5, {"w": torch.tensor([2.0, 4.0])})
        {'w': tensor([1., 2.])}
    """
    return {key: (a * t).to(t.dtype) for key, t in x.items()}


def check_same_keys(function: str, a_name: str, a: Mapping[str, Tensor], b_name: str, b: Mapping[str, Tensor]) -> None:
    for key in [*a, *b]:
        if key not in a or key not in b:
            only = a_name if key in a else b_name
            raise ValueError(f"{function}: '{key}' is in {only} only: expected trees of the same keys")
        if a[key].shape != b[key].shape:
            raise ValueError(
                f"{function}: '{key}': expected tensors of one shape, got {list(a[key].shape)} and {list(b[key].shape)}"
            )
