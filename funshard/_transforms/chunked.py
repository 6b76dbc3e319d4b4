"""chunked: a sum over rows that is computed in slices, at every order: a head and its loss without all logits at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._spec.options import Remat
from ._recompute.function import RecomputedFunction
from ._recompute.remat import SlicedFunction, apply_recomputed
from ._recompute.saved_results import mark_region

W = TypeVar("W")
Rows = TypeVar("Rows")


def chunked(
    f: Callable[[W, Rows], tuple[Tensor, Tensor | float]],
    chunks: int,
    *,
    dim: int = 0,
    reduce: Literal["sum", "mean"] = "sum",
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
        ValueError: ``chunks`` or ``reduce`` is none, or tensors of ``rows`` differ in length.
        TypeError: ``rows`` has no tensors, or other leaves; or ``f`` returns something else.
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

    @functools.wraps(f)
    def run(w: W, rows: Rows) -> Any:
        leaves, dims = _check_rows(name, rows, dim)
        length = leaves[0].shape[dims[0]]
        size = max(1, -(-length // chunks))
        sizes = [min(size, length - start) for start in range(0, length, size)] or [0]
        total, count = _add_slices(f, name, w, rows, dims, sizes)
        return (total, count) if reduce == "sum" else total / torch.where(count == 0, torch.ones_like(count), count)

    return run


def _add_slices(
    f: Callable[..., Any], name: str, w: Any, rows: Any, dims: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    leaves, treedef = pytree.tree_flatten(rows)
    starts = itertools.accumulate(sizes[:-1], initial=0)
    taken = [
        [leaf.narrow(dim, start, size) for leaf, dim in zip(leaves, dims, strict=True)]
        for start, size in zip(starts, sizes, strict=True)
    ]
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


def _check_rows(name: str, rows: Any, dim: int) -> tuple[list[Tensor], list[int]]:
    """Return the tensors of the rows and the dimension, >= 0, that slices each; raise TypeError or ValueError for others."""
    leaves: list[Tensor] = []
    for path, x in pytree.tree_flatten_with_path(rows)[0]:
        where = f"{name}: rows{pytree.keystr(path)}"
        if not isinstance(x, Tensor):
            raise TypeError(f"{where}: expected a tensor, got {type(x).__name__}; give what all slices share by w or a closure")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"{where}: expected a tensor with a dimension {dim}, got shape {list(x.shape)}")
        leaves.append(x)
        if (length := leaves[0].shape[dim]) != x.shape[dim]:
            raise ValueError(
                f"{where}: expected {length} rows along dimension {dim}, as in the first tensor, got {x.shape[dim]}"
            )
    if not leaves:
        raise TypeError(f"{name}: rows: expected tensors, got none")
    return leaves, [dim % x.dim() for x in leaves]


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
