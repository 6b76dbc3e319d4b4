"""What each collective does: started on a process group, and computed on ranks that are stacked in dimension 0.

Nothing in here knows about gradients, but for the name of every op's *transpose*. The functional ops
``torch.ops._c10d_functional`` do the work; they return before it is done, and `start` gives what waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from .. import _torch
from ._tag import UnitTag, has_margins, tag_length

__all__ = ["OPS", "Finish", "Where", "exchange", "no_group", "start"]


class Finish:
    """Waits for a collective that was started, and gives its result. To be called once: until then its buffers live.

    What is waited for are ``outs``; the result is made of them, as they are after that.
    """

    __slots__ = ("_result", "outs")

    def __init__(self, outs: Sequence[Tensor], result: Callable[..., Tensor]) -> None:
        self.outs, self._result = outs, result

    def __call__(self) -> Tensor:
        """The result, once it is there."""
        return self._result(*map(_wait, self.outs))

    def then(self, change: Callable[[Tensor], Tensor]) -> Finish:
        """The same with another result, made of this one."""
        result = self._result
        return Finish(self.outs, lambda *outs: change(result(*outs)))


class Where(NamedTuple):
    """Over which ranks: the size and the name of the process group, and the root of the ops that have one.

    With a ``tag`` ranks compare what they gather and reduce, on gloo, where the buffer has margins for it.
    """

    size: int
    name: str
    root: int = 0
    tag: UnitTag | None = None


def no_group(size: int) -> ValueError:
    """The error for an axis that is only a size."""
    return ValueError(
        f"an axis of {size} ranks without a process group cannot communicate: expected a DeviceMesh axis "
        "or a Simulated one; bind the spec with .on(mesh) (a pickled spec must be bound anew)"
    )


def start(op: str, x: Tensor, where: Where, own: Tensor | None = None) -> Finish:
    """Start an op on a process group. Raises ValueError without one.

    ``own`` is where the result goes, for a gather, which casts to its dtype, and (``x`` itself) for an all-reduce; not where
    it is recorded, which is to be functional.
    """
    if not where.name:
        raise no_group(where.size)
    if not x.is_complex():
        return OPS[op].group(x, where, own)
    # All of this is linear over the reals, which every backend reduces.
    finish = OPS[op].group(torch.view_as_real(x.resolve_conj()), where, None if own is None else torch.view_as_real(own))
    return finish.then(torch.view_as_complex)


# As wait_tensor is: torch.func.linearize computes in advance what depends on constants alone, and of a gather of frozen
# parameters it took the part that starts it without the one that waits. Pinned by test_linearize_folds_no_collective.
for _op in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast"):
    has_side_effect(getattr(torch.ops._c10d_functional, _op).default)


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(x)


def _itself(out: Tensor) -> Tensor:
    return out


def _gather(x: Tensor, where: Where, own: Tensor | None) -> Finish:
    if own is not None and own.itemsize == 1:
        x = x.to(own.dtype)
    if x.dtype != torch.uint8 and (not x.is_floating_point() or x.itemsize == 1):  # gloo lacks int16 and 8-bit floats
        raw = _gather(x.contiguous().view(torch.uint8), where, None if own is None else own.view(torch.uint8))
        return raw.then(lambda out: out.view(x.dtype))
    x = x.contiguous()
    if own is None:
        out = torch.ops._c10d_functional.all_gather_into_tensor.default(x, where.size, where.name)
    elif _torch.backend_name(where.name, x.device) == "gloo":
        return _broadcasts(x, where, own)
    else:
        if x.dtype != own.dtype:  # cast on the way to where its slice will be
            x = own.chunk(where.size)[_torch.resolve_group(where.name).rank()].copy_(x)
        out = torch.ops._c10d_functional.all_gather_into_tensor_out.default(x, where.size, where.name, out=own)
    return Finish((out,), _itself)


def _broadcasts(x: Tensor, where: Where, own: Tensor) -> Finish:
    """Gather as a broadcast in place from each rank: gloo's own gathers into another buffer first and copies that."""
    pieces, group = [*own.chunk(where.size)], _torch.resolve_group(where.name)
    pieces[group.rank()].copy_(x)
    compare = where.tag.attach(own, pieces, group) if where.tag and has_margins(own) else None
    under_way = [torch.ops._c10d_functional.broadcast_.default(piece, i, where.name) for i, piece in enumerate(pieces)]

    def result(*_: Tensor) -> Tensor:
        if compare is not None:
            compare()
        return own

    return Finish(under_way, result)


def _gather_stack(x: Tensor, root: int) -> Tensor:
    return x.flatten(0, 1).unsqueeze(0).expand(len(x), *(-1,) * (x.dim() - 1))


def _scatter(mean: bool) -> Callable[[Tensor, Where, Tensor | None], Finish]:
    def group(x: Tensor, where: Where, own: Tensor | None) -> Finish:
        if _torch.backend_name(where.name, x.device) == "gloo":
            return _scatter_by_exchange(x, where, mean)
        op = "avg" if mean else "sum"
        out = torch.ops._c10d_functional.reduce_scatter_tensor.default(x.contiguous(), op, where.size, where.name)
        return Finish((out,), _itself)

    return group


def _scatter_by_exchange(x: Tensor, where: Where, mean: bool) -> Finish:
    """Reduce-scatter as an exchange of slices and a local sum: gloo's own is an all-reduce inside, twice the bytes."""
    group, x = _torch.resolve_group(where.name), x.contiguous()
    n, rank = len(x) // where.size, group.rank()
    before, mine, after = x.split([rank * n, n, (where.size - rank - 1) * n])
    k, remove_tags = 0, None
    if where.tag and n and x.dim() == 1 and has_margins(x):
        k = tag_length(x)
        theirs, remove_tags = where.tag.enclose([piece for i, piece in enumerate(x.split(n)) if i != rank], group)
    else:
        theirs = torch.cat([before, after]) if len(before) and len(after) else before if len(before) else after
    lengths = [0 if i == rank else n + k for i in range(where.size)]

    def reduced(received: Tensor) -> Tensor:
        if where.size == 2:
            others = received if remove_tags is None else remove_tags(received)[0]
        else:
            rows = received.unflatten(0, (-1, n)) if remove_tags is None else remove_tags(received)
            others = rows.sum(0, dtype=x.dtype)
        total = others.add_(mine)
        return total.div_(where.size) if mean else total

    return exchange(theirs, where, lengths, lengths).then(reduced)


def _sum_stack(x: Tensor, root: int) -> Tensor:
    return x.sum(0, keepdim=True, dtype=x.dtype).expand_as(x)


def _mean_stack(x: Tensor, root: int) -> Tensor:
    return (x.sum(0, keepdim=True) / len(x)).expand_as(x)


def _slices(x: Tensor) -> Tensor:
    return x.unflatten(1, (len(x), -1)) if x.shape[1] else x.new_empty(len(x), len(x), 0, *x.shape[2:])


def _slice_stack(x: Tensor, root: int) -> Tensor:
    return _slices(x).diagonal(dim1=0, dim2=1).movedim(-1, 0)


def _scatter_stack(mean: bool) -> Callable[[Tensor, int], Tensor]:
    return lambda x, root: _slice_stack((_mean_stack if mean else _sum_stack)(x, root), root)


def _reduce(op: str) -> Callable[[Tensor, Where, Tensor | None], Finish]:
    def group(x: Tensor, where: Where, own: Tensor | None) -> Finish:
        reduce = (
            torch.ops._c10d_functional.all_reduce.default if own is None else torch.ops._c10d_functional.all_reduce_.default
        )
        out = reduce(x.contiguous(), op, where.name)
        return Finish((out,), _itself)

    return group


def _identity(x: Tensor, where: Where, own: Tensor | None) -> Finish:
    return Finish((), lambda: x.view_as(x))


def _identity_stack(x: Tensor, root: int) -> Tensor:
    return x


def _broadcast(x: Tensor, where: Where, own: Tensor | None) -> Finish:
    out = torch.ops._c10d_functional.broadcast.default(x.contiguous(), where.root, where.name)
    return Finish((out,), _itself)


def _broadcast_stack(x: Tensor, root: int) -> Tensor:
    return x[root : root + 1].expand_as(x)


def _sum_to(x: Tensor, where: Where, own: Tensor | None) -> Finish:
    total = _reduce("sum")(x, where, own)
    here = _torch.resolve_group(where.name).rank() == where.root
    return total if here else total.then(torch.zeros_like)


def _sum_to_stack(x: Tensor, root: int) -> Tensor:
    here = (torch.arange(len(x), device=x.device) == root).view(-1, *(1,) * (x.dim() - 1))
    return torch.where(here, x.sum(0, keepdim=True, dtype=x.dtype), 0)


def _all_to_all(x: Tensor, where: Where, own: Tensor | None) -> Finish:
    pieces = [len(x) // where.size] * where.size
    return exchange(x, where, pieces, pieces)


def _all_to_all_stack(x: Tensor, root: int) -> Tensor:
    return _slices(x).transpose(0, 1).flatten(1, 2)


def exchange(x: Tensor, where: Where, send: Sequence[int], receive: Sequence[int]) -> Finish:
    """Start an exchange of unequal pieces: so many rows of ``x`` to each rank, so many from each, in rank order."""
    if x.is_complex():
        raw = exchange(torch.view_as_real(x.resolve_conj()), where, send, receive)
        return raw.then(torch.view_as_complex)
    out = torch.ops._c10d_functional.all_to_all_single.default(x.contiguous(), [*receive], [*send], where.name)
    return Finish((out,), _itself)


def _slice(x: Tensor, where: Where, own: Tensor | None) -> Finish:
    n = len(x) // where.size
    return Finish((), lambda: x.narrow(0, where.root * n, n).clone())


@dataclass(frozen=True)
class _Op:
    group: Callable[[Tensor, Where, Tensor | None], Finish]
    stack: Callable[[Tensor, int], Tensor]
    transpose: str
    sends: bool = True


OPS: dict[str, _Op] = {
    "gather_mean": _Op(_gather, _gather_stack, "scatter_mean"),
    "scatter_mean": _Op(_scatter(mean=True), _scatter_stack(mean=True), "gather_mean"),
    "gather_sum": _Op(_gather, _gather_stack, "scatter_sum"),
    "scatter_sum": _Op(_scatter(mean=False), _scatter_stack(mean=False), "gather_sum"),
    "reduce_mean": _Op(_reduce("avg"), _mean_stack, "reduce_mean"),
    "reduce_sum": _Op(_reduce("sum"), _sum_stack, "reduce_sum"),
    "shards_to_sum": _Op(_reduce("sum"), _sum_stack, "sum_to_shards"),
    "sum_to_shards": _Op(_reduce("avg"), _mean_stack, "shards_to_sum"),
    "vary_mean": _Op(_identity, _identity_stack, "unvary_mean", sends=False),
    "unvary_mean": _Op(_reduce("avg"), _mean_stack, "vary_mean"),
    "vary_sum": _Op(_identity, _identity_stack, "unvary_sum", sends=False),
    "unvary_sum": _Op(_reduce("sum"), _sum_stack, "vary_sum"),
    "broadcast": _Op(_broadcast, _broadcast_stack, "sum_to"),
    "sum_to": _Op(_sum_to, _sum_to_stack, "broadcast"),
    "all_to_all": _Op(_all_to_all, _all_to_all_stack, "all_to_all"),
    "slice": _Op(_slice, _slice_stack, "gather_mean", sends=False),
}
"""Every op by its name: on a process group, on stacked ranks, and the name of its transpose."""
