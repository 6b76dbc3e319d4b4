"""chunked: a sum over rows that is computed in slices, at every order: a head and its loss without all logits at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._spec.options import Remat
from ._recompute.function import RecomputedFunction
from ._recompute.regions import mark_region
from ._recompute.remat import SlicedFunction, apply_recomputed
from .grad import is_assumed_differentiated

__all__ = ["chunked"]


# --- A sum over slices and its gradient in one run of each slice, where plain autograd takes one gradient ---
#
# Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024 (arXiv:2410.10989), compute a head's loss so.


def is_forward_gradient_allowed(tensors: Sequence[object]) -> bool:
    """Return whether forward may compute the gradient: plain autograd alone records these tensors, none in float16.

    A transform or a compiler may need another derivative. In float16 a loss is scaled first, so that gradients do not vanish.
    """
    if torch.compiler.is_compiling() or _torch.current_level() or _torch.is_in_forward_ad() or is_assumed_differentiated():
        return False
    recorded = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad] if torch.is_grad_enabled() else []
    devices = {x.device.type for x in recorded if torch.is_autocast_enabled(x.device.type)}
    dtypes = {x.dtype for x in recorded} | {torch.get_autocast_dtype(device) for device in devices}
    return bool(recorded) and torch.float16 not in dtypes


class SumOfSlices:
    """A sum over slices of rows, which `add_up` computes together with its gradient.

    Args:
        call: A function ``(w, rows) -> (sum, count)`` of one slice.
        name: What errors call it.
        w: The shared arguments, a tree.
        rows: The tree of the rows' tensors.
        take: A function from the rows' tensors to those of each slice.
        dims: For each of the rows' tensors the dimension that is sliced.
    """

    def __init__(
        self,
        call: Callable[[Any, Any], tuple[Tensor, Tensor]],
        name: str,
        w: Any,
        rows: Any,
        take: Callable[[Sequence[Tensor]], list[list[Tensor]]],
        dims: Sequence[int],
    ) -> None:
        self._call, self.name, self._take, self._dims = call, name, take, dims
        self._shared, self._shared_def = pytree.tree_flatten(w)
        self._rows, self._rows_def = pytree.tree_flatten(rows)
        self._tensor_positions = [i for i, x in enumerate(self._shared) if isinstance(x, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of w, then those of the rows."""
        return [*(self._shared[i] for i in self._tensor_positions), *self._rows]

    def add_up(self) -> tuple[Tensor, Tensor]:
        """Return the sum and the count; the sum has a gradient that is computed already, by the tensors of w and the rows."""
        out: tuple[Tensor, Tensor] = _SumWithGradient.apply(self, *self.tensors)  # pyright: ignore[reportAssignmentType]
        return out

    def run(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return the sum, the count and the gradients that are needed: of 16 bits in float32. None stands for zero."""
        leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        count = len(self._tensor_positions)
        shared = list(self._shared)
        for i, leaf in zip(self._tensor_positions, leaves, strict=False):
            shared[i] = leaf
        w = pytree.tree_unflatten(shared, self._shared_def)
        sums: list[Tensor | None] = [None] * count
        joined: list[list[Tensor]] = [[] for _ in self._dims]
        parts = [
            self._add_slice(w, leaves[:count], taken, needs[count:], sums, joined)
            for taken in self._take([x.detach() for x in leaves[count:]])
        ]
        totals, counts = zip(*parts, strict=True)
        gradients = [torch.cat(x, dim) if x else None for x, dim in zip(joined, self._dims, strict=True)]
        return functools.reduce(torch.add, totals), functools.reduce(torch.add, counts), [*sums, *gradients]

    def _add_slice(
        self,
        w: Any,
        shared: Sequence[Tensor],
        rows: Sequence[Tensor],
        needs: Sequence[bool],
        sums: list[Tensor | None],
        joined: Sequence[list[Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and the count of one slice; add its gradients to the sums, and append them to those to be joined."""
        rows = [x.detach().requires_grad_(need) for x, need in zip(rows, needs, strict=True)]
        part, grads = self._run_slice(w, [*shared, *rows], rows)
        for k, grad in enumerate(grads[: len(shared)]):
            if grad is not None:
                before = sums[k]
                sums[k] = _widen_grad(grad) if before is None else before.add_(grad)
        for slices, x, grad in zip(joined, rows, grads[len(shared) :], strict=True):
            if x.requires_grad:
                slices.append(torch.zeros_like(x) if grad is None else grad)
        return part

    def _run_slice(
        self, w: Any, leaves: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor | None]]:
        """Return the sum and the count of one slice, without a graph, and the sum's gradients by the leaves."""
        # not the hooks of a call around this
        hooks = torch.autograd.graph.saved_tensors_hooks(_return_unchanged, _return_unchanged)
        with torch.enable_grad(), hooks:
            total, count = self._call(w, pytree.tree_unflatten(rows, self._rows_def))
        if count.requires_grad or (total.requires_grad and not _torch.depends_only_on(total, leaves)):
            what = (
                "a count that has a gradient" if count.requires_grad else "a tensor that requires grad, and is not in w or rows"
            )
            raise RuntimeError(
                f'{self.name} has {what}: expected all of them in w or rows, and a constant count, with gradient="forward"; '
                "or no gradient="
            )
        wanted = [x for x in leaves if x.requires_grad]
        grads: Iterator[Tensor | None] = iter([None] * len(wanted))
        if total.requires_grad:
            with torch.autocast(total.device.type, enabled=False):  # forward's, which backward is not within
                grads = iter(torch.autograd.grad(total, wanted, allow_unused=True))
        return (total.detach(), count), [next(grads) if x.requires_grad else None for x in leaves]


class _SumWithGradient(torch.autograd.Function):
    """The autograd node of `SumOfSlices`: forward computes the gradients, and backward multiplies them by the cotangent."""

    @staticmethod
    def forward(ctx: Any, sums: SumOfSlices, *tensors: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, count, ctx.grads = sums.run(tensors, ctx.needs_input_grad[1:])
        ctx.name, ctx.dtypes = sums.name, [x.dtype for x in tensors]
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise RuntimeError(
                f'{ctx.name}: backward with create_graph=True: expected a first derivative alone with gradient="forward", '
                "which forward has computed without a graph; leave gradient= out"
            )
        if ctx.grads is None:
            raise RuntimeError(f"{ctx.name}: a second backward: expected retain_graph=True in the first one")
        kept, grads = _torch.is_graph_retained(), ctx.grads
        if not kept:
            ctx.grads = None
        out: list[Tensor | None] = []
        for i, dtype in enumerate(ctx.dtypes):
            grad, grads[i] = grads[i], grads[i] if kept else None
            out.append(None if grad is None else (grad * cotangent if kept else grad.mul_(cotangent)).to(dtype))
        return None, *out


def _return_unchanged(x: Tensor) -> Tensor:
    """Return a saved tensor as it is: a hook that takes the place of hooks around the call."""
    return x


def _widen_grad(grad: Tensor) -> Tensor:
    """Return a copy to add to: float32 for 16 bits, whose sums over many slices would round or overflow."""
    return grad.to(torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype, copy=True)


# --- chunked ---

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
            total, count = SumOfSlices(functools.partial(_run_slice, f, name=name), name, w, rows, slices.take, dims).add_up()
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
                outs.append(_run_slice(f, w, pytree.tree_unflatten(taken, treedef), name))
        totals, counts = zip(*outs, strict=True)
        return functools.reduce(torch.add, totals), functools.reduce(torch.add, counts)
    call = functools.partial(_run_slice, name=name)
    taken = slices.take()
    parts = [
        _ChunkFunction(call, name, {"the function": f, "w": w, "rows": pytree.tree_unflatten(tensors, treedef)}, {}, Remat())
        for tensors in taken
    ]
    position = {id(x): i for i, x in enumerate(taken[0])}  # the others are shared: w, and what f closes over
    found = [(x, position.get(id(x))) for x in parts[0].tensors]
    xs = [x if i is None else slices.leaves[i] for x, i in found]
    in_dims = tuple(None if i is None else slices.dims[i] for _, i in found)
    outputs, _ = apply_recomputed(SlicedFunction(parts, slices.sizes, in_dims, (None, None)), xs)
    total, count = outputs
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
