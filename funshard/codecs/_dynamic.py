"""dynamic8: 8 bits whose levels are dense near zero, for the moments of optimizers."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch
from .._spec.precision import Codec
from ._blocks import block_ratios, check_block, scale_blocks, widen_dtype

__all__ = ["dynamic8"]


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
    to, back = _ToDynamic(block), _FromDynamic(block)
    return Codec(to, back, block=block, takes_dtype=True, takes_noise=True, name=f"dynamic8(block={block})")


@dataclass(frozen=True)
class _ToDynamic:
    """The encoder of `dynamic8`: codes, scales of blocks, and the length."""

    block: int

    def __call__(self, x: Tensor, *, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        ratios, absmax = block_ratios(x, self.block)
        rows = F.pad(x, (0, -len(x) % self.block)).view(-1, self.block)
        unsigned = (rows.amin(1) >= 0) & (absmax > 0)
        ratios, column = ratios.float(), unsigned.to(torch.int32)[:, None]
        levels = _nearest_levels(ratios, column)
        if noise is not None:
            noise = F.pad(noise, (0, -len(x) % self.block)).view(-1, self.block)
            levels = _round_stochastically(ratios, levels, noise)
        levels = levels.maximum((rows > 0) * (257 * column))
        codes = ((levels - _ZERO * (1 - column)) & 255).to(torch.uint8).flatten()[: len(x)]
        return codes, torch.where(unsigned, -absmax, absmax), x.new_empty(len(x), 0)


@dataclass(frozen=True)
class _FromDynamic:
    """The decoder of `dynamic8`."""

    block: int

    def __call__(self, codes: Tensor, absmax: Tensor, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        wide = widen_dtype(absmax.dtype)
        padded = F.pad(codes.to(torch.int32), (0, -len(codes) % self.block)).view(-1, self.block)
        levels = padded + 256 * (absmax < 0).to(torch.int32)[:, None]
        values = _look_up("decoded", levels).to(wide).flatten()[: len(codes)]
        return scale_blocks(values, absmax.abs().to(wide), self.block).to(dtype or like.dtype)


def _nearest_levels(ratios: Tensor, unsigned: Tensor) -> Tensor:
    """Return the number of the level that is nearest to each ratio: int32, 256 more where the [blocks, 1] column is 1."""
    if _is_recorded(ratios):
        found = [torch.bucketize(ratios, _constant(name, ratios.device), out_int32=True) for name in ("signed", "unsigned")]
        return torch.where(unsigned == 1, found[1] + 256, found[0])
    # The upper half of a float's bits leaves two levels to choose from: ten times faster than a binary search on the CPU.
    keys = (_torch.view_as_dtype(ratios, torch.int32) >> 16) & 0xFFFF
    levels = _look_up("by_key", keys + (unsigned << 16))
    return levels + (ratios > _look_up("middles", levels))


def _round_stochastically(ratios: Tensor, nearest: Tensor, noise: Tensor) -> Tensor:
    """Return one of the two levels around each ratio, so that the mean over the noise in [0, 1) is the ratio."""
    lower = nearest - (ratios < _look_up("levels", nearest)).to(torch.int32)
    low, high = _look_up("levels", lower), _look_up("levels", (lower + 1).minimum(lower | 255))
    return lower + (noise * (high - low) < ratios - low).to(torch.int32)


def _look_up(name: str, indices: Tensor) -> Tensor:
    """Return the elements of a table."""
    return _constant(name, indices.device).index_select(0, indices.flatten()).view(indices.shape)


def _constant(name: str, device: torch.device) -> Tensor:
    """Return a table on a device: kept, but a constant in what is recorded."""
    if torch.compiler.is_compiling() or _is_recorded(torch.empty(0, device="cpu")):
        # a copy of so few bytes does not wait for the device
        return torch.tensor(_SMALL_TABLES[name]).to(device, non_blocking=True)
    return _kept_table(name, device)


def _is_recorded(tensor: Tensor) -> bool:
    """Return whether operators are recorded, or the tensor has no values."""
    return torch.compiler.is_compiling() or _torch.is_traced() or _torch.is_fake(_torch.unwrap(tensor))


@functools.cache
def _kept_table(name: str, device: torch.device) -> Tensor:
    """Return a table on a device."""
    with _torch.below_transforms(), torch.inference_mode(False), torch.no_grad():
        return (_levels_by_key() if name == "by_key" else torch.tensor(_SMALL_TABLES[name])).to(device)


def _middles(levels: list[float]) -> tuple[float, ...]:
    """Return the bounds between neighbouring levels."""
    return tuple((a + b) / 2 for a, b in itertools.pairwise(levels))


_SMALL_TABLES = {
    "decoded": (*_SIGNED[_ZERO:], *_SIGNED[:_ZERO], *_UNSIGNED),
    "levels": (*_SIGNED, *_UNSIGNED),
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
    found = [
        torch.bucketize(least, torch.tensor(_SMALL_TABLES[name]), out_int32=True) + offset
        for name, offset in (("signed", 0), ("unsigned", 256))
    ]
    return torch.cat(found)
