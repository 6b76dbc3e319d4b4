"""sample_labels: labels drawn from a model's own distribution, for the true Fisher matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from .._units.philox import MASK, philox

__all__ = ["sample_labels"]


def sample_labels(logits: Tensor, seed: int, *, first: int = 0) -> Tensor:
    """Draw a label for each row of logits from their softmax: with them `fisher` estimates the true Fisher matrix.

    A label follows from the seed, the number of the row and its logits: with ``first``, the same at any number of ranks.

    Args:
        logits: The model's outputs, the classes in the last dimension; without a graph.
        seed: A whole number.
        first: The number of this rank's first row among those of all ranks, such as ``rank * rows``.

    Returns:
        Whole numbers, in the shape of the logits without the last dimension.

    Example:
        >>> import torch, funshard as fs
        >>> fs.curvature.sample_labels(torch.tensor([[0.0, -1e9], [-1e9, 0.0]]), seed=0)
        tensor([0, 1])
    """
    rows = logits.detach().reshape(-1, logits.shape[-1])
    numbers = torch.arange(first, first + len(rows), device=logits.device)
    zeros = torch.zeros_like(numbers)
    words = philox((numbers & MASK, numbers >> 32, zeros, zeros), (seed & MASK, (seed >> 32) & MASK))
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    uniform = (words[0].to(wide) + 0.5) / 2**32
    below = rows.softmax(-1, dtype=wide).cumsum(-1)
    drawn = torch.searchsorted(below, uniform[:, None] * below[:, -1:], right=True)
    return drawn.clamp(max=logits.shape[-1] - 1).reshape(logits.shape[:-1])
