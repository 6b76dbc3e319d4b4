"""int8 and nf4: evenly spaced levels, and quantiles of the normal distribution."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._spec.precision import Codec
from ._blocks import block_ratios, check_block, scale_blocks, widen_dtype

__all__ = ["NF4", "int8", "nf4"]

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of NormalFloat: quantiles of the normal distribution, with a zero. Appendix E of Dettmers et al., 2023."""

_MIDDLES = tuple((a + b) / 2 for a, b in itertools.pairwise(NF4))
"""The bounds between neighbouring levels of NF4."""
_PAIRS = tuple((a, b) for a in NF4 for b in NF4)
"""The two values that each byte stands for."""
_SCALES = 256
"""The number of scales that share a second scale, where scales are quantized."""


def int8(block: int = 64) -> Codec:
    """Return the codec of whole numbers in -127..127 times ``absmax / 127``: at most half of that off.

    8.25 bits an element of 16-bit parameters in blocks of 64. ``absmax`` keeps the slice's dtype.

    Args:
        block: The number of elements with an ``absmax`` of their own.

    Example:
        >>> import torch, funshard as fs
        >>> codec = fs.codecs.int8(block=2)
        >>> codec.decode(*codec.encode(torch.tensor([127.0, 1.4, 0.0, -2.0, 5.0]))).round(decimals=3)
        tensor([127.,   1.,   0.,  -2.,   5.])
    """
    check_block(block, 1)
    to, back = _ToInt8(block), _FromInt8(block)
    return Codec(to, back, block=block, takes_dtype=True, takes_noise=True, name=f"int8(block={block})")


def nf4(block: int = 64, *, double_quant: bool = False) -> Codec:
    """Return the codec of one of 16 values times the block's ``absmax``, two to a byte: at most 0.152 of it off.

    QLoRA's, bytes as in bitsandbytes (Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023). ``absmax`` keeps
    the slice's dtype: 4.25 bits an element of 16-bit parameters in blocks of 64.

    Args:
        block: The number of elements with an ``absmax`` of their own.
        double_quant: Keep ``absmax`` in int8, in blocks of 256 and without its mean over the slice: 4.13 bits.

    Example:
        >>> import torch, funshard as fs
        >>> codec = fs.codecs.nf4(block=2)
        >>> codec.decode(*codec.encode(torch.tensor([2.0, 1.0, 0.0, -0.5, 3.0])))
        tensor([ 2.0000,  0.8814,  0.0000, -0.5000,  3.0000])
    """
    check_block(block, 2)
    options = f"block={block}" + (", double_quant=True" if double_quant else "")
    to, back = _ToNF4(block, double_quant), _FromNF4(block, double_quant)
    return Codec(to, back, block=block, takes_dtype=True, name=f"nf4({options})")


# Classes, and not closures: two of one block are equal, and a spec that holds them can be pickled. The last tensor of what
# they encode is empty, and has the length and the dtype of the slice.


@dataclass(frozen=True)
class _ToInt8:
    """The encoder of `int8`: codes, scales of blocks, and the length."""

    block: int

    def __call__(self, x: Tensor, *, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        ratios, absmax = block_ratios(x, self.block)
        numbers = ratios.mul_(127).flatten()[: len(x)]
        numbers = numbers.round_() if noise is None else (numbers + noise).floor_()
        return numbers.to(torch.int8), absmax, x.new_empty(len(x), 0)


@dataclass(frozen=True)
class _FromInt8:
    """The decoder of `int8`."""

    block: int

    def __call__(self, codes: Tensor, absmax: Tensor, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        wide = widen_dtype(absmax.dtype)  # rounded once: in 16 bits twice would be a whole step off
        return scale_blocks(codes.to(wide).div_(127), absmax.to(wide), self.block).to(dtype or like.dtype)


@dataclass(frozen=True)
class _ToNF4:
    """The encoder of `nf4`: two codes a byte, and scales, perhaps quantized themselves."""

    block: int
    double_quant: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        ratios, absmax = block_ratios(x, self.block)
        codes = torch.zeros_like(ratios, dtype=torch.uint8)
        for middle in _MIDDLES:
            codes = codes + (ratios > middle)
        pairs = codes.view(-1, 2)
        packed = (pairs[:, 0] * 16 + pairs[:, 1])[: (len(x) + 1) // 2]
        if not self.double_quant:
            return packed, absmax, x.new_empty(len(x), 0)
        absmax = absmax.to(widen_dtype(x.dtype))
        mean = (absmax / max(len(absmax), 1)).sum()  # of which the sum does not overflow
        return packed, *_ToInt8(_SCALES)(absmax - mean), mean, x.new_empty(len(x), 0)


@dataclass(frozen=True)
class _FromNF4:
    """The decoder of `nf4`."""

    block: int
    double_quant: bool

    def __call__(self, packed: Tensor, *rest: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        *scales, like = rest
        dtype = dtype or like.dtype
        absmax = scales[0]
        if self.double_quant:
            *coded, mean = scales
            most = min(torch.finfo(dtype).max, torch.finfo(mean.dtype).max)
            absmax = (_FromInt8(_SCALES)(*coded) + mean).clamp(0, most)
        # a copy of so few bytes does not wait for the device
        pairs = torch.tensor(_PAIRS, dtype=dtype).to(packed.device, non_blocking=True)
        values = F.embedding(packed.to(torch.int32), pairs).flatten()[: len(like)]
        return scale_blocks(values, absmax.to(dtype), self.block)
