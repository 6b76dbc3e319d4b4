"""Philox4x32-10: random words as a pure function of a counter and a key, by integer arithmetic on tensors.

Each word depends on its counter alone, so that any part of a stream can be computed by itself, on every device. The generator
of torch on CUDA and of numpy. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["MASK", "philox"]

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four random words of a counter.

    Args:
        counter: Four words below 2**32, int64 tensors of one shape.
        key: Two words below 2**32, which choose the stream.

    Returns:
        Four words below 2**32, like the counter's.

    """
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # int64 wraps, and the 64 bits are those of the product
        a, b, c, d = (
            ((right >> 32) & MASK) ^ b ^ first,
            right & MASK,
            ((left >> 32) & MASK) ^ d ^ second,
            left & MASK,
        )
        first, second = (first + KEY_INCREMENTS[0]) & MASK, (second + KEY_INCREMENTS[1]) & MASK
    return a, b, c, d
