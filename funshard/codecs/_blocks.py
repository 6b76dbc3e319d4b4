"""What codecs of blocks share: the ratios of elements to their block's largest, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["block_ratios", "check_block", "scale_blocks", "widen_dtype"]


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
