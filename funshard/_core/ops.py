"""Every collective, on a process group and on ranks stacked in dimension 0, and the autograd Function of such linear maps.

The functional ops ``torch.ops._c10d_functional`` return before they are done; `start_op` returns a `PendingResult` that waits
for them. torch.func differentiates them wrongly (grad raises, jvp is silently zero, vmap is silently wrong; pinned in
tests/house/test_torch_facts.py), so they run only inside the forward of `LinearFunction`, by the name of their *transpose*.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.fx.node import has_side_effect

from .. import _torch
from .._torch.tracing import phase
from .mesh import Axis, Simulated


class PendingResult:
    """The result of a collective that is running. Call it once to wait for ``outs``; until then its buffers live.

    ``result`` makes the result of them; by default the only one is it.
    """

    __slots__ = ("_result", "outs")

    def __init__(self, outs: Sequence[Tensor], result: Callable[..., Tensor] = lambda out: out) -> None:
        self.outs, self._result = outs, result

    def __call__(self) -> Tensor:
        """Wait, and return the result."""
        return self._result(*map(_wait, self.outs))

    def then(self, change: Callable[[Tensor], Tensor]) -> PendingResult:
        """Return a pending result that is ``change`` of this one."""
        result = self._result
        return PendingResult(self.outs, lambda *outs: change(result(*outs)))


class OpContext(NamedTuple):
    """The process group of an op by its size and name, and the root of the ops that have one.

    The ``label`` names what is sent, for `funshard.check`.
    """

    size: int
    name: str
    root: int = 0
    label: str = ""


def missing_group_error(size: int) -> ValueError:
    """Return the error for an axis that is only a size."""
    return ValueError(
        f"an axis of {size} ranks without a process group cannot communicate: expected a DeviceMesh axis "
        "or a Simulated one; bind the spec with .on(mesh) (a pickled spec must be bound anew)"
    )


def start_op(op: str, x: Tensor, context: OpContext, out: Tensor | None = None) -> PendingResult:
    """Start an op of `OPS` on a process group; ValueError if the axis has none.

    ``out`` is the buffer for the result of a gather, which casts to its dtype, or ``x`` itself for an all-reduce in place. It
    is None while operators are recorded, because a graph has to be functional.
    """
    if not context.name:
        raise missing_group_error(context.size)
    if is_checked() and OPS[op].sends:
        announce(op, context.name, context.label, x, None if out is None else out.dtype)
    if not x.is_complex():
        return OPS[op].group(x, context, out)
    # All of this is linear over the reals, which every backend reduces.
    finish = OPS[op].group(torch.view_as_real(x.resolve_conj()), context, None if out is None else torch.view_as_real(out))
    return finish.then(torch.view_as_complex)


# wait_tensor has side effects, too. torch.func.linearize computes what depends on constants alone in advance: of a gather of
# frozen parameters it folded the start without the wait. Pinned by test_linearize_folds_no_collective.
for _op in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast"):
    has_side_effect(getattr(torch.ops._c10d_functional, _op).default)


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(x)


def _all_gather(x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    if out is not None and out.itemsize == 1:
        x = x.to(out.dtype)
    if x.dtype != torch.uint8 and (not x.is_floating_point() or x.itemsize == 1):  # gloo lacks int16 and 8-bit floats
        raw = _all_gather(x.contiguous().view(torch.uint8), context, None if out is None else out.view(torch.uint8))
        return raw.then(lambda out: out.view(x.dtype))
    x = x.contiguous()
    if out is None:
        result = torch.ops._c10d_functional.all_gather_into_tensor.default(x, context.size, context.name)
    elif _torch.backend_name(context.name, x.device) == "gloo":
        return _gather_by_broadcasts(x, context, out)
    else:
        if x.dtype != out.dtype:  # cast on the way to its slice
            x = out.chunk(context.size)[_torch.resolve_group(context.name).rank()].copy_(x)
        result = torch.ops._c10d_functional.all_gather_into_tensor_out.default(x, context.size, context.name, out=out)
    return PendingResult((result,))


def _gather_by_broadcasts(x: Tensor, context: OpContext, out: Tensor) -> PendingResult:
    """Gather by a broadcast in place from each rank. gloo's own all-gather uses another buffer and copies it."""
    pieces, group = [*out.chunk(context.size)], _torch.resolve_group(context.name)
    pieces[group.rank()].copy_(x)
    under_way = [torch.ops._c10d_functional.broadcast_.default(piece, i, context.name) for i, piece in enumerate(pieces)]
    return PendingResult(under_way, lambda *_: out)


def _all_gather_stack(x: Tensor, root: int) -> Tensor:
    """Return all ranks' slices, concatenated, for each stacked rank; ``root`` is for other ops."""
    return x.flatten(0, 1).unsqueeze(0).expand(len(x), *(-1,) * (x.dim() - 1))


def _reduce_scatter(op: str, x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    if _torch.backend_name(context.name, x.device) == "gloo":
        return _scatter_by_exchange(x, context, mean=op == "avg")
    result = torch.ops._c10d_functional.reduce_scatter_tensor.default(x.contiguous(), op, context.size, context.name)
    return PendingResult((result,))


def _scatter_by_exchange(x: Tensor, context: OpContext, mean: bool) -> PendingResult:
    """Reduce-scatter by an exchange of slices and a local sum. gloo's own is an all-reduce and sends twice the bytes."""
    group, x = _torch.resolve_group(context.name), x.contiguous()
    n, rank = len(x) // context.size, group.rank()
    before, mine, after = x.split([rank * n, n, (context.size - rank - 1) * n])
    theirs = torch.cat([before, after]) if len(before) and len(after) else before if len(before) else after
    lengths = [0 if i == rank else n for i in range(context.size)]

    def reduce(received: Tensor) -> Tensor:
        others = received if context.size == 2 else received.unflatten(0, (context.size - 1, n)).sum(0, dtype=x.dtype)
        total = others.add_(mine)
        return total.div_(context.size) if mean else total

    return start_exchange(theirs, context, lengths, lengths).then(reduce)


def _sum_stack(x: Tensor, root: int) -> Tensor:
    return x.sum(0, keepdim=True, dtype=x.dtype).expand_as(x)


def _mean_stack(x: Tensor, root: int) -> Tensor:
    return (x.sum(0, keepdim=True) / len(x)).expand_as(x)


def _split_rows(x: Tensor) -> Tensor:
    """Return stacked ranks' tensors with dimension 1 split into one part for each rank."""
    return x.unflatten(1, (len(x), -1)) if x.shape[1] else x.new_empty(len(x), len(x), 0, *x.shape[2:])


def _slice_stack(x: Tensor, root: int) -> Tensor:
    return _split_rows(x).diagonal(dim1=0, dim2=1).movedim(-1, 0)


def _reduce_scatter_stack(reduce: Callable[[Tensor, int], Tensor], x: Tensor, root: int) -> Tensor:
    return _slice_stack(reduce(x, root), root)


def _all_reduce(op: str, x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    ops = torch.ops._c10d_functional
    reduce = ops.all_reduce.default if out is None else ops.all_reduce_.default
    return PendingResult((reduce(x.contiguous(), op, context.name),))


def _identity(x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    return PendingResult((), lambda: x.view_as(x))


def _identity_stack(x: Tensor, root: int) -> Tensor:
    return x


def _broadcast(x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    result = torch.ops._c10d_functional.broadcast.default(x.contiguous(), context.root, context.name)
    return PendingResult((result,))


def _broadcast_stack(x: Tensor, root: int) -> Tensor:
    return x[root : root + 1].expand_as(x)


def _sum_to(x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    """Start a sum over ranks that only the root gets: the others get zeros."""
    total = _all_reduce("sum", x, context, out)
    is_root = _torch.resolve_group(context.name).rank() == context.root
    return total if is_root else total.then(torch.zeros_like)


def _sum_to_stack(x: Tensor, root: int) -> Tensor:
    is_root = (torch.arange(len(x), device=x.device) == root).view(-1, *(1,) * (x.dim() - 1))
    return torch.where(is_root, x.sum(0, keepdim=True, dtype=x.dtype), 0)


def _all_to_all(x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    pieces = [len(x) // context.size] * context.size
    return start_exchange(x, context, pieces, pieces)


def _all_to_all_stack(x: Tensor, root: int) -> Tensor:
    return _split_rows(x).transpose(0, 1).flatten(1, 2)


def start_exchange(x: Tensor, context: OpContext, send: Sequence[int], receive: Sequence[int]) -> PendingResult:
    """Start an all-to-all with uneven counts: ``send`` rows of ``x`` to each rank, ``receive`` from each, in rank order."""
    if x.is_complex():
        raw = start_exchange(torch.view_as_real(x.resolve_conj()), context, send, receive)
        return raw.then(torch.view_as_complex)
    if x.dtype != torch.uint8 and (not x.is_floating_point() or x.itemsize == 1):  # gloo lacks bool, int16 and 8-bit floats
        count = math.prod(x.shape[1:]) * x.itemsize  # bytes of a row
        flat = x.contiguous().flatten().view(torch.uint8)
        raw = start_exchange(flat, context, [n * count for n in send], [n * count for n in receive])
        return raw.then(lambda out: out.view(x.dtype).view(sum(receive), *x.shape[1:]))
    out = torch.ops._c10d_functional.all_to_all_single.default(x.contiguous(), [*receive], [*send], context.name)
    return PendingResult((out,))


def _slice(x: Tensor, context: OpContext, out: Tensor | None) -> PendingResult:
    n = len(x) // context.size
    return PendingResult((), lambda: x.narrow(0, context.root * n, n).clone())


@dataclass(frozen=True)
class _Op:
    group: Callable[[Tensor, OpContext, Tensor | None], PendingResult]
    stack: Callable[[Tensor, int], Tensor]
    transpose: str
    sends: bool = True


OPS: dict[str, _Op] = {
    "gather_mean": _Op(_all_gather, _all_gather_stack, "scatter_mean"),
    "scatter_mean": _Op(partial(_reduce_scatter, "avg"), partial(_reduce_scatter_stack, _mean_stack), "gather_mean"),
    "gather_sum": _Op(_all_gather, _all_gather_stack, "scatter_sum"),
    "scatter_sum": _Op(partial(_reduce_scatter, "sum"), partial(_reduce_scatter_stack, _sum_stack), "gather_sum"),
    "reduce_mean": _Op(partial(_all_reduce, "avg"), _mean_stack, "reduce_mean"),
    "reduce_sum": _Op(partial(_all_reduce, "sum"), _sum_stack, "reduce_sum"),
    "shards_to_sum": _Op(partial(_all_reduce, "sum"), _sum_stack, "sum_to_shards"),
    "sum_to_shards": _Op(partial(_all_reduce, "avg"), _mean_stack, "shards_to_sum"),
    "vary_mean": _Op(_identity, _identity_stack, "unvary_mean", sends=False),
    "unvary_mean": _Op(partial(_all_reduce, "avg"), _mean_stack, "vary_mean"),
    "vary_sum": _Op(_identity, _identity_stack, "unvary_sum", sends=False),
    "unvary_sum": _Op(partial(_all_reduce, "sum"), _sum_stack, "vary_sum"),
    "broadcast": _Op(_broadcast, _broadcast_stack, "sum_to"),
    "sum_to": _Op(_sum_to, _sum_to_stack, "broadcast"),
    "all_to_all": _Op(_all_to_all, _all_to_all_stack, "all_to_all"),
    "slice": _Op(_slice, _slice_stack, "gather_mean", sends=False),
}
"""Every op by its name: on a process group, on stacked ranks, and the name of its transpose."""


class RankError(RuntimeError):
    """An error that `funshard.check` raises on all ranks: they disagree, one of them has raised, or one is missing."""


Listener = Callable[[str, str | Sequence[int], str, Tensor | None, torch.dtype | None], None]
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Have this function called before each collective, with the arguments of `announce`; None for no function."""
    global _listener
    _listener = listener


def is_checked() -> bool:
    """Return whether the check is on in this process."""
    return _listener is not None


def announce(
    op: str, group: str | Sequence[int], label: str = "", sent: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Announce a collective that this rank is about to start; nothing happens unless the check is on.

    The ``group`` is the name of a process group, or global ranks; ``label`` says what is sent, and ``dtype`` in which dtype, if
    not in that of ``sent``: a tensor of as many elements on all ranks, None if they may differ. Raises RankError, on every
    rank, if another one announces another collective, has raised, or is missing.
    """
    if _listener is not None:
        _listener(op, group, label, sent, dtype)


# --- Linear maps between ranks, and the collectives as such maps ---

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
