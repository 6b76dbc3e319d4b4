"""A sum over slices and its gradient in one run of each slice, where plain autograd takes one gradient.

Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024 (arXiv:2410.10989), compute a head's loss so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .grad import is_assumed_differentiated

__all__ = ["SumOfSlices", "is_forward_gradient_allowed"]


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
                sums[k] = _widen(grad) if before is None else before.add_(grad)
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


def _widen(grad: Tensor) -> Tensor:
    """Return a copy to add to: float32 for 16 bits, whose sums over many slices would round or overflow."""
    return grad.to(torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype, copy=True)
