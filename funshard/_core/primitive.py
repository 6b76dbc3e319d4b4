"""The one autograd Function of linear maps between ranks, and the collectives as such maps.

torch.func differentiates the functional ops of torch wrongly (grad raises, jvp is silently zero, vmap is silently wrong; pinned
in tests/house/test_torch_facts.py), so they run only inside the forward of this Function. What the ops do is in ops.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from .._torch.tracing import phase
from .mesh import Axis, Simulated
from .ops import OPS, OpContext, missing_group_error, start_op

_UNIT_NOTES = ("funshard_unit", "funshard_reshard", "funshard_check_order")
"""The annotations of a compiled graph that say whose collective it is, which its transposes take over."""


@dataclass(eq=False, slots=True)
class LinearMap:
    """A linear map along dimension 0: a function of a tensor and of the ranks of simulated axes."""

    run: Callable[..., Tensor]
    transpose: Callable[[], LinearMap]
    size: int | None = None
    """The size of the one simulated axis whose ranks ``run`` takes stacked in dimension 0. None: it runs on one rank."""


def linear_map(run: Callable[..., Tensor], transpose: Callable[..., Tensor]) -> LinearMap:
    """Return the map of two functions that are each other's transpose."""
    return LinearMap(run, lambda: linear_map(transpose, run))


class LinearFunction(_torch.Function):
    """``apply(x, value, linear, *ranks)``: the result of a `LinearMap`, or the ``value`` that was computed of ``x`` before.

    The rank of a simulated axis is batched at the axis's own vmap and at no other: that is how the vmap rule tells the mesh
    from any other vmap, at whatever depth. Any other batch is one more dimension at the end.
    """

    @staticmethod
    def forward(x: Tensor, value: Tensor | None, linear: LinearMap, *ranks: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = linear.run(x, *ranks) if value is None else value
        return out.view_as(out) if out is x or out is value else out

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, ctx.linear, *ctx.ranks = inputs  # pyright: ignore[reportAttributeAccessIssue]
        ctx.notes = _torch.current_annotations(*_UNIT_NOTES)  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with _torch.annotate_graph(**ctx.notes) if ctx.notes else contextlib.nullcontext():
            out = LinearFunction.apply(grad, None, ctx.linear.transpose(), *ctx.ranks)
        return out, *(None for _ in (0, 0, *ctx.ranks))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return LinearFunction.apply(_torch.materialize_zeros(tangent), None, ctx.linear, *ctx.ranks)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: Any, x: Tensor, value: Tensor | None, linear: LinearMap, *ranks: Tensor
    ) -> tuple[Tensor, int]:
        def move(x: Tensor, dim: int | None) -> Tensor:
            return x.expand(info.batch_size, *x.shape).movedim(0, to) if dim is None else x.movedim(dim, to)

        to = -1
        if any(dim is not None for dim in in_dims[3:]):  # the simulated axis itself: its ranks come to dimension 0
            to = 0
            if linear.size is None:
                linear = linear_map(*(torch.vmap(f, (0, *in_dims[3:])) for f in (linear.run, linear.transpose().run)))
            elif info.batch_size != linear.size:
                raise ValueError(
                    f"a simulated axis of {linear.size} ranks: expected all of them in one vmap, got {info.batch_size}; "
                    "a vmap with chunk_size cannot be an axis"
                )
        # with memory of its own: a result that sees one element several times can have no tangent
        value = None if value is None else move(value, in_dims[1]).contiguous()
        x = move(x, in_dims[0])
        return LinearFunction.apply(x, value, linear, *ranks), to % x.dim()


class Label(NamedTuple):
    """The name of what a collective sends, and the comparison of names that ranks make before it starts."""

    text: str
    compare: Callable[[list[str], str, Tensor], None]
    """Of lines, the process group and the tensor: raises an error on every rank if their lines differ."""


def _collective(op: str, size: int, name: str, root: int, label: Label | None) -> LinearMap:
    """Return an op on a process group (``name``), or on ranks stacked in dimension 0 (no name)."""

    def run(x: Tensor, *_: Tensor) -> Tensor:
        if not name:
            return OPS[op].stack(x, root).clone()
        if not OPS[op].sends:
            return start_op(op, x, OpContext(size, name, root))()
        text = label.text if label else ""
        if label:
            label.compare([f"{op} of {text}"], name, x)
        with phase(op, f"of {text}" if text else None):
            return start_op(op, x, OpContext(size, name, root, label=text))()

    return LinearMap(run, lambda: _collective(OPS[op].transpose, size, name, root, label), size)


@_torch.allow_in_graph
def _primitive(x: Tensor, rank: Tensor | None, op: str, size: int, name: str, root: int, label: Label | None) -> Tensor:
    # torch 2.13: Dynamo, inlining the Function, can lose its backward, and it knows no vmap rule. Pinned by
    # test_compiled_equals_eager and test_matrix.py.
    return LinearFunction.apply(x, None, _collective(op, size, name, root, label), *(() if rank is None else (rank,)))


def apply(op: str, x: Tensor, axis: Axis, root: int = 0, label: Label | None = None) -> Tensor:
    """Apply an op of `OPS` over an axis. One rank needs none: it gets ``x`` itself."""
    if isinstance(axis, Simulated):
        return _primitive(x, axis.rank, op, axis.size, "", root, label)
    if axis.size == 1:
        return x
    if not axis.name:
        raise missing_group_error(axis.size)
    if _torch.is_in_graph():  # a graph is traced on tensors without values, and fs.compile compares the graphs
        label = None
    # A view of x, never the differentiated leaf itself (torch 2.13: Dynamo can otherwise lose a custom backward).
    return _primitive(x.view_as(x), None, op, axis.size, axis.name, root, label)
