"""Attention with every derivative: torch's math kernel on a block of queries at a time, and again for its derivatives."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch
from ._recompute.remat import SlicedFunction, TensorFunction, apply_recomputed
from .ambient import AmbientState


def transforms_attention(block: int = 128) -> contextlib.AbstractContextManager[object]:
    """Return a context in which attention has every derivative, in memory linear in the length of the sequence.

    Inside, this thread's calls of ``F.scaled_dot_product_attention``, also those of ``nn.MultiheadAttention`` and transformers'
    "sdpa", run torch's math kernel on a block of queries at a time, and again for derivatives. Numbers are the math kernel's,
    but for dropout's random ones. Units with ``P(compile=True)`` run without compilation.

    Args:
        block: The number of queries of a block. A shorter sequence has its scores kept, and nothing runs again.

    Returns:
        A context manager, which can be nested: the innermost counts.

    Raises:
        ValueError: ``block`` is not 1 or more.
        RuntimeError: It is entered inside torch.compile: enter it around the compiled step.

    Example:
        >>> import torch, funshard as fs
        >>> def loss(x):
        ...     return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()
        >>> x = torch.ones(1, 1, 300, 2)
        >>> with fs.transforms_attention():
        ...     fs.hvp(loss, x, x).shape
        torch.Size([1, 1, 300, 2])
    """
    if _torch.is_in_traced_function():  # which compiles frames of recomputation one by one
        raise RuntimeError("transforms_attention is entered inside of a compiled function: expected it around the call of that")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"transforms_attention: block: expected a number of queries, 1 or more, got {block!r}")
    return _torch.ReplaceAttention(_make_attention(block))


@functools.cache
def _make_attention(block: int) -> _torch.AttentionFunction:
    """Return the attention function of a block size: one object for each size, because functions are compared by identity."""
    return functools.partial(_attend_by_blocks, block)


def _attend_by_blocks(
    block: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention on ``block`` queries at a time; raise ValueError for both ``attn_mask`` and ``is_causal``."""
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: expected attn_mask or is_causal=True, got both; join them in a mask")
    if query.is_nested:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    xs = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if torch.is_autocast_enabled(query.device.type):  # which casts the arguments of attention
        dtype = torch.get_autocast_dtype(query.device.type)
        xs = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in xs]
    length = query.shape[-2]
    starts = range(0, length, block) or [0]
    parts: list[TensorFunction] = [
        _QueryBlock(start if is_causal else None, dropout_p, scale=scale, enable_gqa=enable_gqa) for start in starts
    ]
    if len(parts) == 1:
        return parts[0](*xs)[0]
    is_mask_sliced = attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] > 1
    in_dims = (query.dim() - 2, None, None, *([] if attn_mask is None else [attn_mask.dim() - 2 if is_mask_sliced else None]))
    sizes = [min(block, length - start) for start in starts]
    fn = SlicedFunction(parts, sizes, in_dims, (max(x.dim() for x in xs) - 2,))
    # under no_grad no level may have a graph, which a Function makes in those around the innermost one
    if _torch.is_in_graph() or not _torch.needs_graph() or not torch.is_grad_enabled():
        return fn(*xs)[0]
    return apply_recomputed(fn, xs)[0][0]


class _QueryBlock:
    """Attention of one block of queries, with the same dropout whenever it runs again.

    ``start`` is the number of the first of them if each attends to no later key; None if it attends to all.
    """

    def __init__(self, start: int | None, dropout_p: float, **options: Any) -> None:
        self._start, self._dropout_p, self._options = start, dropout_p, options
        self._state: AmbientState | None = None  # of the random numbers of the first run

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor]:
        if self._start is not None:
            rows = query.shape[-2]
            end = min(self._start + rows, key.shape[-2])
            key, value = key[..., :end, :], value[..., :end, :]
            mask = torch.ones(rows, end, dtype=torch.bool, device=query.device).tril(self._start)
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        if not self._dropout_p or _torch.is_in_graph():
            return (self._attend(query, key, value, mask),)
        if self._state is not None:
            with self._state.restored():
                return (self._attend(query, key, value, mask),)
        self._state = AmbientState([query])
        out = self._attend(query, key, value, mask)
        self._state.record_end()
        return (out,)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return _torch.math_attention(query, key, value, mask, self._dropout_p, **self._options)
