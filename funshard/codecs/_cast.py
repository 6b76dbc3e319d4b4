"""cast: values in another dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._spec.precision import Codec

__all__ = ["cast"]


def cast(dtype: torch.dtype) -> Codec:
    """Return the codec of values in another dtype: bfloat16 and float16 are two bytes an element.

    For ``Precision(reduce_codec=)``, whose sums stay in float32. What is too large for the dtype becomes infinite: 65,520 and
    more in float16.

    Args:
        dtype: A floating point dtype of at least 16 bits, in which no number that is not finite becomes finite.

    Raises:
        TypeError: For another dtype.

    Example:
        >>> import torch, funshard as fs
        >>> codec = fs.codecs.cast(torch.bfloat16)
        >>> codec.decode(*codec.encode(torch.tensor([1.0, 1.001, -3.0])))
        tensor([ 1.,  1., -3.])
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"codecs.cast: expected a floating point dtype of at least 16 bits, got {dtype!r}; int8 has scales")
    return Codec(_Cast(dtype), _CastBack(), takes_dtype=True, name=f"cast({dtype})")


@dataclass(frozen=True)
class _Cast:
    """The encoder of `cast`: the values, and an empty tensor of their own dtype."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(self.dtype), x.new_empty(len(x), 0)


@dataclass(frozen=True)
class _CastBack:
    """The decoder of `cast`."""

    def __call__(self, values: Tensor, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return values.to(dtype or like.dtype)
