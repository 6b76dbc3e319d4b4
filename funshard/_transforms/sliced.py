"""Functions in slices, at every order: a sum over rows without all logits at once, and attention by blocks of queries."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._spec.options import Remat
from ._recompute.function import RecomputedFunction
from ._recompute.remat import SlicedFunction, TensorFunction, apply_recomputed
from ._recompute.saved_results import mark_region
from .ambient import AmbientState
from .products import find_length

W = TypeVar("W")
Rows = TypeVar("Rows")


def chunked(
    f: Callable[[W, Rows], tuple[Tensor, Tensor | float]], chunks: int, *, dim: int = 0, reduce: Literal["sum", "mean"] = "sum"
) -> Callable[[W, Rows], Any]:
    """Return a function that adds up ``f`` over slices of the rows, and runs it again on each slice for its derivatives.

    One slice is in memory at a time, at every order and in every transform. The gradients of ``w`` are added up, in float32 if
    they have 16 bits. Else it is as `remat` of ``f``, inside torch.compile, too.

    Args:
        f: A function ``(w, rows) -> (sum, count)``: a floating point scalar, and a number. It changes no object.
        chunks: The number of slices, all of one length but the last; at most one for each row, and at least one.
        dim: The dimension along which every tensor of ``rows`` is sliced.
        reduce: "sum" for the sums ``(sum, count)``, "mean" for their quotient, which is the sum where the count is 0.

    Returns:
        A function of ``w`` and ``rows``, trees of tensors; sums and counts of 16 bits are float32.

    Raises:
        ValueError: ``chunks`` or ``reduce`` is none, or ``rows`` has no tensors, or some that differ in length.
        TypeError: ``rows`` has other leaves; or ``f`` returns something else.
        RuntimeError: ``f`` changes an object; or as `remat`.

    Example:
        >>> import torch, funshard as fs
        >>> head = lambda w, rows: (torch.nn.functional.cross_entropy(rows[0] @ w, rows[1], reduction="sum"), len(rows[1]))
        >>> fs.chunked(head, 4, reduce="mean")(torch.zeros(3, 8), (torch.ones(10, 3), torch.arange(10) % 8))
        tensor(2.0794)
    """
    name = f"chunked {getattr(f, '__qualname__', type(f).__name__)}"
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name}: chunks: expected a number of slices, 1 or more, got {chunks!r}")
    if reduce not in ("sum", "mean"):
        raise ValueError(f'{name}: reduce: expected "sum" or "mean", got {reduce!r}')

    @_torch.wraps(f)
    def run(w: W, rows: Rows) -> Any:
        length = find_length(f"{name}: rows", rows, dim)
        size = max(1, -(-length // chunks))
        sizes = [min(size, length - start) for start in range(0, length, size)] or [0]
        total, count = _add_slices(f, name, w, rows, dim, sizes)
        return (total, count) if reduce == "sum" else total / torch.where(count == 0, torch.ones_like(count), count)

    return run


def _add_slices(f: Callable[..., Any], name: str, w: Any, rows: Any, dim: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    leaves, treedef = pytree.tree_flatten(rows)
    dims = [dim % leaf.dim() for leaf in leaves]
    taken = [list(slices) for slices in zip(*(leaf.split(list(sizes), dim) for leaf in leaves), strict=True)]
    if _torch.is_in_graph() or not _torch.needs_graph():
        outs: list[tuple[Tensor, Tensor]] = []
        for tensors in taken:
            with mark_region(Remat()):  # nothing but in torch.compile
                outs.append(_run_slice(f, w, pytree.tree_unflatten(tensors, treedef), name))
        totals, counts = zip(*outs, strict=True)
        return functools.reduce(torch.add, totals), functools.reduce(torch.add, counts)
    call = functools.partial(_run_slice, name=name)
    parts = [
        _ChunkFunction(call, name, {"the function": f, "w": w, "rows": pytree.tree_unflatten(tensors, treedef)}, (), Remat())
        for tensors in taken
    ]
    position = {id(x): i for i, x in enumerate(taken[0])}  # the others are shared: w, and what f closes over
    found = [(x, position.get(id(x))) for x in parts[0].tensors]
    xs = [x if i is None else leaves[i] for x, i in found]
    in_dims = tuple(None if i is None else dims[i] for _, i in found)
    (total, count), _ = apply_recomputed(SlicedFunction(parts, sizes, in_dims, (None, None)), xs)
    return total, count


class _ChunkFunction(RecomputedFunction):
    """The function of one slice, which can run again; it raises RuntimeError if it changes an object."""

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        out = super().__call__(*xs)
        if len(out) != 2 or self.has_changed_objects:
            raise RuntimeError(
                f"{self.name} changes an object that it was given or closes over, or keeps a tensor in one: expected it to "
                "change nothing, because it runs on every slice, and again for derivatives; return what is a sum"
            )
        if self._left is not None:  # at once: until then the slice's graph lives
            self.finish(out)
        return out


def _run_slice(f: Callable[..., Any], w: Any, rows: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the sum and count of one slice as new tensors, widened from 16 bits; raise TypeError if ``f`` returns no pair."""
    out = f(w, rows)
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(f"{name}: expected f to return (sum, count), got {type(out).__name__}")
    total, count = out
    if not isinstance(total, Tensor) or not total.is_floating_point() or total.dim():
        got = f"{total.dtype} of shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise TypeError(f"{name}: expected f to return a floating point scalar (0-dim) tensor as its sum, got {got}")
    if not isinstance(count, Tensor):
        count = torch.as_tensor(count, device=total.device)
    if count.dim():
        raise TypeError(f"{name}: expected f to return a number as its count, got shape {list(count.shape)}")
    return _widen(total), _widen(count)


def _widen(x: Tensor) -> Tensor:
    """Return a copy of a number: a bool as int64, 16-bit floats as float32, and others in their own dtype."""
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int64}
    return x.to(wide[x.dtype]) if x.dtype in wide else x.clone()


# --- attention ---


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
