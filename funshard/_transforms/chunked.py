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
from .._spec.remat import Remat
from ._recompute.code_reads import GlobalWatch
from ._recompute.function import RecomputedFunction
from ._recompute.regions import mark_region
from ._recompute.remat import SlicedFunction, apply_recomputed
from .slice_gradient import SumOfSlices, is_forward_gradient_allowed

__all__ = ["chunked"]

W = TypeVar("W")
Rows = TypeVar("Rows")


def chunked(
    f: Callable[[W, Rows], tuple[Tensor, Tensor | float]],
    chunks: int,
    *,
    dim: int = 0,
    reduce: Literal["sum", "mean"] = "sum",
    gradient: Literal["backward", "forward"] = "backward",
) -> Callable[[W, Rows], Any]:
    """Return a function that adds up ``f`` over slices of the rows, and runs it again on each slice for its derivatives.

    One slice is in memory at a time, at every order and in every transform, so that a head's logits are never all there. The
    gradients of ``w`` are added up, in float32 if they have 16 bits. Else it is as `remat` of ``f``, inside torch.compile, too.

    Args:
        f: A function ``(w, rows) -> (sum, count)``: a floating point scalar, and a number. It changes no object.
        chunks: The number of slices, all of one length but the last; at most one for each row, and at least one.
        dim: The dimension along which every tensor of ``rows`` is sliced.
        reduce: "sum" for the sums ``(sum, count)``, "mean" for their quotient, which is the sum where the count is 0.
        gradient: "forward" runs each slice once where plain autograd takes one gradient, as in `grad`: with its gradient, which
            is kept until backward. All that is differentiated is in ``w`` or ``rows`` then. Elsewhere, and in float16, it is as
            "backward".

    Returns:
        A function of ``w`` and ``rows``, trees of tensors; sums and counts of 16 bits are float32.

    Raises:
        ValueError: ``chunks``, ``reduce`` or ``gradient`` is none, or tensors of ``rows`` differ in length.
        TypeError: ``rows`` has no tensors, or other leaves; or ``f`` returns something else.
        RuntimeError: ``f`` changes an object or a global variable; or ``create_graph=True`` where forward has taken the
            gradient. `remat` raises others.

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
    if gradient not in ("backward", "forward"):
        raise ValueError(f'{name}: gradient: expected "backward" or "forward", got {gradient!r}')

    @functools.wraps(f)
    def run(w: W, rows: Rows) -> Any:
        leaves, dims = _check_rows(name, rows, dim)
        length = leaves[0].shape[dims[0]]
        size = max(1, -(-length // chunks))
        sizes = [min(size, length - start) for start in range(0, length, size)] or [0]
        slices = _Slices(sizes, leaves, dims)
        if gradient == "forward" and is_forward_gradient_allowed([*pytree.tree_leaves(w), *leaves]):
            total, count = SumOfSlices(functools.partial(_run_slice, f, name), name, w, rows, slices.take, dims).add_up()
        else:
            total, count = _add_slices(f, name, w, rows, slices)
        return (total, count) if reduce == "sum" else total / torch.where(count == 0, torch.ones_like(count), count)

    return run


class _Slices:
    """The tensors of some rows, the dimension along which each is sliced, and the lengths of the slices."""

    def __init__(self, sizes: Sequence[int], leaves: Sequence[Tensor], dims: Sequence[int]) -> None:
        self.sizes, self.leaves, self.dims = sizes, leaves, dims

    def take(self, leaves: Sequence[Tensor] | None = None) -> list[list[Tensor]]:
        """Return the tensors of each slice, of these leaves or of its own."""
        starts = itertools.accumulate(self.sizes[:-1], initial=0)
        leaves = self.leaves if leaves is None else leaves
        return [
            [leaf.narrow(dim, start, size) for leaf, dim in zip(leaves, self.dims, strict=True)]
            for start, size in zip(starts, self.sizes, strict=True)
        ]


def _add_slices(f: Callable[..., Any], name: str, w: Any, rows: Any, slices: _Slices) -> tuple[Tensor, Tensor]:
    """Return the sum and the count that ``f`` returns, added up over slices."""
    treedef = pytree.tree_structure(rows)
    if torch.compiler.is_compiling() or not _torch.needs_graph():
        outs: list[tuple[Tensor, Tensor]] = []
        for taken in slices.take():
            with mark_region(Remat(), name):  # nothing but in torch.compile
                outs.append(_run_slice(f, name, w, pytree.tree_unflatten(taken, treedef)))
        totals, counts = zip(*outs, strict=True)
        return functools.reduce(torch.add, totals), functools.reduce(torch.add, counts)
    watch = GlobalWatch.for_function(f, name, "expected it to change nothing; return what is a sum")
    call = functools.partial(_run_watched_slice, watch, name)
    taken = slices.take()
    parts = [
        _ChunkFunction(call, name, {"the function": f, "w": w, "rows": pytree.tree_unflatten(tensors, treedef)}, (), Remat())
        for tensors in taken
    ]
    position = {id(x): i for i, x in enumerate(taken[0])}  # the others are shared: w, and what f closes over
    found = [(x, position.get(id(x))) for x in parts[0].tensors]
    xs = [x if i is None else slices.leaves[i] for x, i in found]
    in_dims = tuple(None if i is None else slices.dims[i] for _, i in found)
    outputs, _ = apply_recomputed(SlicedFunction(parts, slices.sizes, in_dims, (None, None)), xs)
    for part in parts[1:]:
        part.finish(outputs)
    return parts[0].finish(outputs)


class _ChunkFunction(RecomputedFunction):
    """The function of one slice, which can run again; it raises RuntimeError if it changes an object."""

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        out = super().__call__(*xs)
        if len(out) != 2 or self.has_changed_objects:
            raise RuntimeError(
                f"{self.name} changes an object that it was given or closes over, or keeps a tensor in one: expected it to "
                "change nothing, because it runs on every slice, and again for derivatives; return what is a sum"
            )
        return out


def _check_rows(name: str, rows: Any, dim: int) -> tuple[list[Tensor], list[int]]:
    """Return the tensors of the rows and the dimension, >= 0, that slices each; raise TypeError or ValueError for others."""
    leaves = pytree.tree_leaves(rows)
    if not leaves:
        raise TypeError(f"{name}: rows: expected tensors, got none")
    if all(isinstance(x, Tensor) and -x.dim() <= dim < x.dim() for x in leaves):
        dims = [dim % x.dim() for x in leaves]
        if all(x.shape[d] == leaves[0].shape[dims[0]] for x, d in zip(leaves, dims, strict=True)):
            return leaves, dims
    first: Tensor | None = None
    for path, x in pytree.tree_flatten_with_path(rows)[0]:
        where = f"{name}: rows{pytree.keystr(path)}"
        if not isinstance(x, Tensor):
            raise TypeError(f"{where}: expected a tensor, got {type(x).__name__}; give what all slices share by w or a closure")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"{where}: expected a tensor with a dimension {dim}, got shape {list(x.shape)}")
        first = x if first is None else first
        if x.shape[dim] != first.shape[dim]:
            raise ValueError(
                f"{where}: expected {first.shape[dim]} rows along dimension {dim}, as in the first tensor, got {x.shape[dim]}"
            )
    raise AssertionError("no leaf differs")


def _run_watched_slice(watch: GlobalWatch, name: str, f: Callable[..., Any], w: Any, rows: Any) -> tuple[Tensor, Tensor]:
    """Call `_run_slice`; raise RuntimeError if ``f`` changes a global variable that it reads."""
    with watch:
        return _run_slice(f, name, w, rows)


def _run_slice(f: Callable[..., Any], name: str, w: Any, rows: Any) -> tuple[Tensor, Tensor]:
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
