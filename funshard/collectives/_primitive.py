"""The one autograd Function of all collectives, and how it is applied over an axis.

torch.func differentiates the functional ops of torch wrongly (grad raises, jvp is silently zero, vmap is silently wrong; pinned
in tests/test_torch_facts.py), so they run only inside the forward of this Function. What the ops do is in _ops.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from ._mesh import Axis, Simulated
from ._ops import OPS, OpContext, missing_group_error, start_op
from ._sequence import check_sequence

__all__ = ["apply"]


class _Collective(_torch.Function):
    """One linear map over an axis: a process group's (``name``), or that of ranks stacked in dimension 0 (no name).

    ``rank`` is a Simulated axis's rank, None on a group. It is the operand that is batched at the simulated axis's own
    vmap and at no other: that is how the vmap rule tells the mesh from any other vmap, at whatever depth. With a ``label``
    ranks compare what they are about to start (_sequence.py), in every derivative, too.
    """

    @staticmethod
    def forward(x: Tensor, rank: Tensor | None, op: str, size: int, name: str, root: int, label: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not name:
            return OPS[op].stack(x, root).clone()
        if label and OPS[op].sends:
            check_sequence([f"{op} of {label}"], name, x)
        return start_op(op, x, OpContext(size, name, root))()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rest = inputs[1:]  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rank, op, *rest = ctx.rest
        return _Collective.apply(grad, rank, OPS[op].transpose, *rest), *(None for _ in ctx.rest)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Collective.apply(_torch.materialize_zeros(tangent), *ctx.rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, rank: Tensor | None, *rest: Any) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim, rank_dim = in_dims[:2]
        if rank_dim is not None:  # the simulated axis itself: its ranks come to dimension 0
            if info.batch_size != rest[1]:
                raise ValueError(
                    f"a simulated axis of {rest[1]} ranks: expected all of them in one vmap, got {info.batch_size}; "
                    "a vmap with chunk_size cannot be an axis"
                )
            stacked = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return _Collective.apply(stacked, None, *rest), 0
        return _Collective.apply(x.movedim(dim, -1), rank, *rest), x.dim() - 1


@_torch.allow_in_graph
def _primitive(x: Tensor, rank: Tensor | None, op: str, size: int, name: str, root: int, label: str) -> Tensor:
    # torch 2.13: Dynamo, inlining the Function, can lose its backward, and it knows no vmap rule. Pinned by
    # test_compiled_equals_eager and test_matrix.py.
    return _Collective.apply(x, rank, op, size, name, root, label)


def apply(op: str, x: Tensor, axis: Axis, root: int = 0, label: str = "") -> Tensor:
    """Apply an op of `OPS` over an axis. One rank needs none: it gets ``x`` itself."""
    if isinstance(axis, Simulated):
        return _primitive(x, axis.rank, op, axis.size, "", root, label)
    if axis.size == 1:
        return x
    if not axis.name:
        raise missing_group_error(axis.size)
    # A view of x, never the differentiated leaf itself (torch 2.13: Dynamo can otherwise lose a custom backward).
    return _primitive(x.view_as(x), None, op, axis.size, axis.name, root, label)
