"""The way of whole matrices to their owners, and back to slices: which pieces a rank sends to which, hop by hop.

A piece is what of a matrix lies in one slice of its unit. To its owner it goes over one axis of the slices after the other,
on the replica of the mesh that the owner is in; back over the same axes, and then from that replica to the others. All of it
follows from the spec and the owners, so that every rank knows what comes from where, and nothing is sent but elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ... import _torch
from ..._spec.spec import PartitionSpec
from ..._units.layout import slice_index
from ...collectives._mesh import ProcessAxis
from ...collectives._ops import OpContext, PendingResult, missing_group_error, start_exchange
from .flat import Share, apart, joined, part_of
from .owners import Matrix, every_rank

__all__ = ["There", "Way", "back", "started", "there", "travelled"]

Piece = tuple[int, int]
"""Which matrix, and in which slice."""
At = tuple[int, ...]
"""A rank's coordinates on the mesh."""


class Hop(NamedTuple):
    """Pieces put in order, and exchanged over one axis."""

    sizes: tuple[int, ...]
    """Of the pieces that are there before."""
    order: tuple[int, ...]
    """Which of them are taken, one after the other."""
    group: str = ""
    """The process group's name; "" where nothing is sent."""
    send: tuple[int, ...] = ()
    """How many elements to each of its ranks."""
    receive: tuple[int, ...] = ()


class Way(NamedTuple):
    """From what a rank has of some matrices to what it is to have of them: one flat tensor for each, maybe an empty one."""

    begin: tuple[int, ...]
    """Elements of each matrix before."""
    hops: tuple[Hop, ...]
    end: tuple[int, ...]
    """Elements of each matrix after."""

    @staticmethod
    def of(plain: Any) -> Way:
        """Of tuples that have lost their names."""
        begin, hops, end = plain
        return Way(tuple(begin), tuple(Hop(*hop) for hop in hops), tuple(end))


class There(NamedTuple):
    """Elements of a way that are under way; to be called for those of each matrix."""

    way: Way
    finish: PendingResult
    """Of its first hop."""

    def __call__(self) -> list[Tensor]:
        """What has arrived, when it has."""
        flat = self.finish()
        for hop in self.way.hops[1:]:
            flat = _sent(_picked([flat], hop), hop)()
        return apart(flat, self.way.end)


def started(tensors: Sequence[Tensor], way: Way) -> There:
    """The first hop of a way, begun; ``tensors`` have the elements of each matrix, with whatever dimensions after the first."""
    first = way.hops[0]
    return There(way, _sent(_picked(tensors, first), first))


def _picked(tensors: Sequence[Tensor], hop: Hop) -> Tensor:
    """The pieces that a hop takes of those before it, which lie in these tensors one after the other.

    Those that it does not take may be empty, if each is a tensor of its own.
    """
    all_of_them = hop.order == tuple(range(len(hop.sizes)))
    each = len(tensors) == len(hop.sizes) and all(len(tensors[i]) == hop.sizes[i] for i in hop.order)
    if all_of_them or not each:
        flat = tensors[0] if len(tensors) == 1 else torch.cat([*tensors])
        if all_of_them:
            return flat
        tensors = flat.split_with_sizes([*hop.sizes])
    return torch.cat([tensors[i] for i in hop.order]) if hop.order else tensors[0][:0]


def _sent(flat: Tensor, hop: Hop) -> PendingResult:
    if not hop.group:
        return PendingResult((), lambda: flat)
    return start_exchange(flat, OpContext(len(hop.send), hop.group), hop.send, hop.receive)


def there(matrices: Sequence[Matrix], spec: PartitionSpec, at: At) -> Way:
    """From slices to owners: what this rank has of each matrix, to the whole ones of those that it owns."""
    plan = _Plan(matrices, spec)
    mine = plan.slice_of(at)
    before = [(i, mine) for i in range(len(matrices))]

    def begin(at: At) -> list[Piece]:
        own = plan.slice_of(at)
        return [(i, own) for i, m in enumerate(matrices) if plan.sizes[i][own] and plan.same_replica(m.owner, at)]

    hops = plan.hops(begin, [(axis, functools.partial(_owner, matrices, axis)) for axis in reversed(plan.split)], at, before)
    last = [(i, s) for i, m in enumerate(matrices) if m.owner == at for s in range(plan.slices) if plan.sizes[i][s]]
    return plan.way([plan.sizes[i][mine] for i, _ in before], hops, last, [m.param.numel * (m.owner == at) for m in matrices])


def back(matrices: Sequence[Matrix], spec: PartitionSpec, at: At, share: Share = (0, 1)) -> Way:
    """From owners to slices, on all replicas. Inverse of `there`, or of that share of each piece."""
    plan = _Plan(matrices, spec, share)
    mine = plan.slice_of(at)

    def begin(at: At) -> list[Piece]:
        return [(i, s) for i, m in enumerate(matrices) if m.owner == at for s in range(plan.slices) if plan.sizes[i][s]]

    to_slices = [(axis, functools.partial(plan.coordinate, axis)) for axis in plan.split]
    hops = plan.hops(begin, [*to_slices, *((axis, None) for axis in plan.rest)], at, begin(at))
    last = [(i, mine) for i in range(len(matrices)) if plan.sizes[i][mine]]
    sizes = [sum(plan.sizes[i]) * (m.owner == at) for i, m in enumerate(matrices)]
    return plan.way(sizes, hops, last, [plan.sizes[i][mine] for i in range(len(matrices))])


def _owner(matrices: Sequence[Matrix], axis: int, piece: Piece) -> int:
    return matrices[piece[0]].owner[axis]


Over = tuple[int, Callable[[Piece], int] | None]
"""An axis, and to which of its ranks a piece goes; None for all of them."""


class _Plan:
    """Where the pieces of some matrices, of units that are split alike, are."""

    def __init__(self, matrices: Sequence[Matrix], spec: PartitionSpec, share: Share = (0, 1)) -> None:
        self.mesh, self._unit = spec.bound_mesh, matrices[0].unit
        names = self.mesh.names
        talking = [i for i, (_, axis) in enumerate(self.mesh.axes) if axis.size > 1]
        self.split = [i for name in self._unit.p.axes if (i := names.index(name)) in talking]
        self.rest = [i for i in talking if names[i] not in self._unit.p.axes]
        self.slices = spec.size(self._unit)
        numels = [[_overlap(m, s, spec.shard_numel(m.unit)) for s in range(self.slices)] for m in matrices]
        self.sizes = [[len(range(numel)[part_of(numel, *share)]) for numel in own] for own in numels]
        self._of_slice = {self.slice_of(at): at for at in every_rank(spec)}

    def slice_of(self, at: At) -> int:
        """Which slice a rank has."""
        return slice_index(self._unit, self.mesh, at)

    def coordinate(self, axis: int, piece: Piece) -> int:
        """Where on the axis the ranks are whose slice a piece is of."""
        return self._of_slice[piece[1]][axis]

    def same_replica(self, owner: At, at: At) -> bool:
        """Whether two ranks have the same coordinates on the axes that the unit is replicated over."""
        return all(owner[i] == at[i] for i in self.rest)

    def hops(
        self, begin: Callable[[At], list[Piece]], over: Sequence[Over], at: At, before: list[Piece]
    ) -> tuple[list[Hop], list[Piece]]:
        """``(the hops, the pieces that are there after them)``, for a rank that has these ``before``."""

        @functools.cache
        def held(at: At, number: int) -> list[Piece]:
            if not number:
                return begin(at)
            axis, to = over[number - 1]
            lists = (held((*at[:axis], j, *at[axis + 1 :]), number - 1) for j in range(self.mesh.axes[axis][1].size))
            return [piece for pieces in lists for piece in pieces if to is None or to(piece) == at[axis]]

        out: list[Hop] = []
        for number, (axis, to) in enumerate(over):
            group = self.mesh.axes[axis][1]
            assert isinstance(group, ProcessAxis)
            if not group.name:
                raise missing_group_error(group.size)
            own = held(at, number)
            sends = [[p for p in own if to is None or to(p) == j] for j in range(group.size)]
            others = (held((*at[:axis], j, *at[axis + 1 :]), number) for j in range(group.size))
            receives = [[p for p in pieces if to is None or to(p) == at[axis]] for pieces in others]
            where = {piece: i for i, piece in enumerate(before)}
            order = tuple(where[p] for pieces in sends for p in pieces)
            counts = (tuple(self._numel(pieces) for pieces in lists) for lists in (sends, receives))
            out.append(Hop(self._sizes(before), order, group.name, *counts))
            before = [p for pieces in receives for p in pieces]
        return out, before

    def way(self, begin: Sequence[int], hops: tuple[list[Hop], list[Piece]], last: Sequence[Piece], end: Sequence[int]) -> Way:
        """The whole way: at its end the pieces are put in this order."""
        over, before = hops
        where = {piece: i for i, piece in enumerate(before)}
        return Way(tuple(begin), (*over, Hop(self._sizes(before), tuple(where[p] for p in last))), tuple(end))

    def _sizes(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        return tuple(self.sizes[i][s] for i, s in pieces) or (0,)

    def _numel(self, pieces: Sequence[Piece]) -> int:
        return sum(self.sizes[i][s] for i, s in pieces)


def _overlap(matrix: Matrix, number: int, length: int) -> int:
    """Elements of a matrix in a slice of its unit."""
    low, high = number * length, (number + 1) * length
    return max(0, min(matrix.begin + matrix.param.numel, high) - max(matrix.begin, low))


class _Trip(_torch.Function):
    """A way, and its inverse, which is its transpose: what all replicas have alike counts once."""

    @staticmethod
    def forward(flat: Tensor, way: Way, inverse: Way) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.cat(started([flat], way)())

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.ways = inputs[1:]  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        way, inverse = ctx.ways
        return _Trip.apply(grad, inverse, way), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Trip.apply(_torch.materialize_zeros(tangent), *ctx.ways)

    @staticmethod
    def vmap(info: Any, in_dims: Any, flat: Tensor, *ways: Way) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Trip.apply(flat.movedim(in_dims[0], -1), *ways), flat.dim() - 1


@_torch.allow_in_graph
def _trip(flat: Tensor, way: Way, inverse: Way) -> Tensor:
    return _Trip.apply(flat, Way.of(way), Way.of(inverse))  # Dynamo hands tuples on


def travelled(tensors: Sequence[Tensor], way: Way, inverse: Way) -> list[Tensor]:
    """What a way makes of tensors, of one dimension each: linear, its transpose is the inverse."""
    return apart(_trip(joined(tensors), way, inverse), way.end)
