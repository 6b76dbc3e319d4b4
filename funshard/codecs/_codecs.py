"""The codecs: int8, NF4, dynamic8 and cast."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch
from .._spec.codec import Codec

# --- What codecs of blocks share: the ratios of elements to their block's largest, and back ---


def check_block(block: object, of: int) -> None:
    """Raise TypeError or ValueError unless ``block`` is a positive multiple of ``of``."""
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"block: expected a whole number of elements, got {block!r}")
    if block < 1 or block % of:
        raise ValueError(f"block: expected a positive {'even ' if of == 2 else ''}number of elements, got {block}")


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def block_ratios(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return ``x / absmax`` in float32 at least, [blocks, block], with zeros at the end; and ``absmax``, [blocks].

    The ratios are a new tensor, to which the caller may write: on the CPU, memory that is new takes longer than arithmetic.
    """
    rows = F.pad(x, (0, -len(x) % block)) if len(x) % block else x  # without padding it copies, too
    rows = rows.reshape(-1, block)
    absmax = rows.abs().amax(1)
    absmax = torch.where(absmax.isfinite(), absmax, torch.nan)
    wide = widen_dtype(x.dtype)
    return (rows.to(wide) / absmax.to(wide)[:, None]).nan_to_num_(0.0), absmax


def scale_blocks(values: Tensor, absmax: Tensor, block: int) -> Tensor:
    """Return each block times its absmax. Writes to ``values`` where no block is broken off."""
    numel = len(values)
    if numel % block:
        return (F.pad(values, (0, -numel % block)).view(-1, block) * absmax[:, None]).flatten()[:numel]
    values.view(-1, block).mul_(absmax[:, None])
    return values


@dataclass(frozen=True)
class _Function:
    """A function with its first arguments, and no closure: two alike are equal, and a spec that holds them can be pickled.

    The last tensor of what the functions below encode is empty, and has the length and the dtype of the slice.
    """

    function: Callable[..., Any]
    options: tuple[Any, ...]

    def __call__(self, *tensors: Tensor, **dtype: Any) -> Any:
        return self.function(*self.options, *tensors, **dtype)


# --- cast: values in another dtype ---


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
    return Codec(_Function(_cast, (dtype,)), _cast_back, takes_dtype=True, name=f"cast({dtype})")


def _cast(dtype: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values, and an empty tensor of their own dtype."""
    return x.to(dtype), x.new_empty(len(x), 0)


def _cast_back(values: Tensor, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return values.to(dtype or like.dtype)


# --- int8 and nf4: evenly spaced levels, and quantiles of the normal distribution ---

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of NormalFloat: quantiles of the normal distribution, with a zero. Appendix E of Dettmers et al., 2023."""


def _middles(levels: Sequence[float]) -> tuple[float, ...]:
    """Return the bounds between neighbouring levels."""
    return tuple((a + b) / 2 for a, b in itertools.pairwise(levels))


_MIDDLES = _middles(NF4)
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
    to, back = _Function(_to_int8, (block,)), _Function(_from_int8, (block,))
    return Codec(to, back, block=block, takes_dtype=True, name=f"int8(block={block})")


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
    to, back = (_Function(f, (block, double_quant)) for f in (_to_nf4, _from_nf4))
    return Codec(to, back, block=block, takes_dtype=True, name=f"nf4({options})")


def _to_int8(block: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales of blocks, and the length."""
    ratios, absmax = block_ratios(x, block)
    return ratios.mul_(127).flatten()[: len(x)].round_().to(torch.int8), absmax, x.new_empty(len(x), 0)


def _from_int8(block: int, codes: Tensor, absmax: Tensor, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    wide = widen_dtype(absmax.dtype)  # rounded once: in 16 bits twice would be a whole step off
    return scale_blocks(codes.to(wide).div_(127), absmax.to(wide), block).to(dtype or like.dtype)


def _to_nf4(block: int, double_quant: bool, x: Tensor) -> tuple[Tensor, ...]:
    """Return two codes a byte, scales, perhaps quantized themselves, and the length."""
    ratios, absmax = block_ratios(x, block)
    codes = torch.zeros_like(ratios, dtype=torch.uint8)
    for middle in _MIDDLES:
        codes = codes + (ratios > middle)
    pairs = codes.view(-1, 2)
    packed = (pairs[:, 0] * 16 + pairs[:, 1])[: (len(x) + 1) // 2]
    if not double_quant:
        return packed, absmax, x.new_empty(len(x), 0)
    absmax = absmax.to(widen_dtype(x.dtype))
    mean = (absmax / max(len(absmax), 1)).sum()  # of which the sum does not overflow
    return packed, *_to_int8(_SCALES, absmax - mean), mean, x.new_empty(len(x), 0)


def _from_nf4(block: int, double_quant: bool, packed: Tensor, *rest: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    *scales, like = rest
    dtype = dtype or like.dtype
    absmax = scales[0]
    if double_quant:
        *coded, mean = scales
        most = min(torch.finfo(dtype).max, torch.finfo(mean.dtype).max)
        absmax = (_from_int8(_SCALES, *coded) + mean).clamp(0, most)
    # a copy of so few bytes does not wait for the device
    pairs = torch.tensor(_PAIRS, dtype=dtype).to(packed.device, non_blocking=True)
    values = F.embedding(packed.to(torch.int32), pairs).flatten()[: len(like)]
    return scale_blocks(values, absmax.to(dtype), block)


# --- dynamic8: 8 bits whose levels are dense near zero, for the moments of optimizers ---


def _make_levels(counts: list[int]) -> list[float]:
    """Return the means of evenly spaced cells in each decade from 1e-7 on, as many as ``counts`` says for it, and 1."""
    cells = [10.0 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / n) for decade, n in enumerate(counts) for i in range(n)]
    return [*cells, 1.0]


_POSITIVE = _make_levels([2**i for i in range(7)])
_SIGNED = [*(-x for x in reversed(_POSITIVE) if x != _POSITIVE[-2]), 0.0, *_POSITIVE]
"""The 256 levels in order. bitsandbytes has -0.993 instead of -1, so that a largest negative value shrinks in every step."""
_UNSIGNED = [0.0, *_make_levels([2 ** (i + 1) for i in range(7)])]
_ZERO = _SIGNED.index(0.0)
"""The number of level 0, whose code is 0: memory of zeros is zeros."""


def dynamic8(block: int = 256) -> Codec:
    """Return the codec of dynamic 8-bit quantization, whose levels go down to 3e-7 of the block's ``absmax``.

    A value is at most 0.011 of ``absmax`` off, and a small one much less. The levels are those of bitsandbytes' 8-bit
    optimizers (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022). A block without negative values, as of
    second moments, has 256 levels from zero up, and a positive value in it never becomes zero, because an update divides by
    its root. ``absmax`` keeps the slice's dtype; such a block has ``-absmax``. 8.125 bits an element of float32.

    Args:
        block: The number of elements with an ``absmax`` of their own.

    Example:
        >>> import torch, funshard as fs
        >>> codec = fs.codecs.dynamic8(block=4)
        >>> codec.decode(*codec.encode(torch.tensor([-4.0, 1e-3, 0.0, 2.0])))
        tensor([-4.0000e+00,  1.0750e-03,  0.0000e+00,  2.0031e+00])
    """
    check_block(block, 1)
    to, back = _Function(_to_dynamic, (block,)), _Function(_from_dynamic, (block,))
    return Codec(to, back, block=block, takes_dtype=True, name=f"dynamic8(block={block})")


def _to_dynamic(block: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales of blocks, and the length."""
    ratios, absmax = block_ratios(x, block)
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    unsigned = (rows.amin(1) >= 0) & (absmax > 0)
    ratios, column = ratios.float(), unsigned.to(torch.int32)[:, None]
    levels = _nearest_levels(ratios, column).maximum((rows > 0) * (257 * column))
    codes = ((levels - _ZERO * (1 - column)) & 255).to(torch.uint8).flatten()[: len(x)]
    return codes, torch.where(unsigned, -absmax, absmax), x.new_empty(len(x), 0)


def _from_dynamic(block: int, codes: Tensor, absmax: Tensor, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    wide = widen_dtype(absmax.dtype)
    padded = F.pad(codes.to(torch.int32), (0, -len(codes) % block)).view(-1, block)
    levels = padded + 256 * (absmax < 0).to(torch.int32)[:, None]
    values = _look_up("decoded", levels).to(wide).flatten()[: len(codes)]
    return scale_blocks(values, absmax.abs().to(wide), block).to(dtype or like.dtype)


def _nearest_levels(ratios: Tensor, unsigned: Tensor) -> Tensor:
    """Return the number of the level that is nearest to each ratio: int32, 256 more where the [blocks, 1] column is 1."""
    if _is_recorded(ratios):
        found = [torch.bucketize(ratios, _constant(name, ratios.device), out_int32=True) for name in ("signed", "unsigned")]
        return torch.where(unsigned == 1, found[1] + 256, found[0])
    # The upper half of a float's bits leaves two levels to choose from: ten times faster than a binary search on the CPU.
    keys = (_torch.view_as_dtype(ratios, torch.int32) >> 16) & 0xFFFF
    levels = _look_up("by_key", keys + (unsigned << 16))
    return levels + (ratios > _look_up("middles", levels))


def _look_up(name: str, indices: Tensor) -> Tensor:
    return _constant(name, indices.device).index_select(0, indices.flatten()).view(indices.shape)


def _constant(name: str, device: torch.device) -> Tensor:
    """Return a table on a device: kept, but a constant in what is recorded."""
    if _torch.is_in_graph() or _is_recorded(torch.empty(0, device="cpu")):
        # a copy of so few bytes does not wait for the device
        return torch.tensor(_SMALL_TABLES[name]).to(device, non_blocking=True)
    return _kept_table(name, device)


def _is_recorded(tensor: Tensor) -> bool:
    """Return whether operators are recorded, or the tensor has no values."""
    return _torch.is_in_graph() or _torch.is_tracing() or _torch.is_fake(_torch.unwrap(tensor))


@functools.cache
def _kept_table(name: str, device: torch.device) -> Tensor:
    with _torch.below_transforms(), torch.inference_mode(False), torch.no_grad():
        return (_levels_by_key() if name == "by_key" else torch.tensor(_SMALL_TABLES[name])).to(device)


_SMALL_TABLES = {
    "decoded": (*_SIGNED[_ZERO:], *_SIGNED[:_ZERO], *_UNSIGNED),
    "signed": _middles(_SIGNED),
    "unsigned": _middles(_UNSIGNED),
    "middles": (*_middles(_SIGNED), math.inf, *_middles(_UNSIGNED), math.inf),
}
"""Levels of signed blocks and then of the others: by code, and in order; and the bounds between neighbours."""


def _levels_by_key() -> Tensor:
    """Return the level of the least number of each upper half of a float's bits, of signed and then of unsigned blocks.

    In no key, but those around zero that all have one level, lie two bounds.
    """
    keys = torch.arange(1 << 16, dtype=torch.int32)
    keys = torch.where(keys < 1 << 15, keys, keys - (1 << 16))  # as a signed 16-bit number
    least = ((keys << 16) | (0xFFFF * (keys < 0).to(torch.int32))).view(torch.float32).nan_to_num(0.0)
    bounds = [torch.tensor(_SMALL_TABLES[name]) for name in ("signed", "unsigned")]
    return torch.cat([torch.bucketize(least, of_kind, out_int32=True) + 256 * i for i, of_kind in enumerate(bounds)])
