"""The exchange of whole matrices between slices and owners: which pieces each rank sends to which rank, axis by axis.

A piece is the part of a matrix that lies in one slice of its unit; over local axes there are so many slices for each rank's
piece of the parameter. On the way to its owner it crosses one axis of the slices after the other, within the owner's replica
of the mesh; on the way back it crosses the same axes, and then goes to the other replicas. Nothing crosses the axes of a
stack. Every rank computes all of this from the spec and the owners, so that only elements are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._spec.division import count_ranks
from ..._spec.spec import PartitionSpec
from ..._units.layout import rank_along
from ...collectives._announce import announce
from ...collectives._mesh import ProcessAxis
from ...collectives._ops import OpContext, PendingResult, missing_group_error, start_exchange
from ...collectives._primitive import LinearFunction, linear_map
from .flat import Chunk, chunk_slice, concat_flat, split_flat
from .owners import all_coords
from .selection import Matrix, Owner

__all__ = ["ExchangePlan", "SliceIndex", "exchange_matrices", "plan_from_owners", "plan_to_owners", "start_plan"]

SliceIndex = tuple[int, int]
"""``(number of the matrix, number of the slice)``."""
Coords = tuple[int, ...]
"""A rank's coordinates on the mesh."""


class AllToAll(NamedTuple):
    """A step of an exchange: reorder pieces, then exchange them over one axis."""

    sizes: tuple[int, ...]
    """Elements of each piece that the rank holds before it."""
    order: tuple[int, ...]
    """Which of these pieces it takes, in sending order."""
    group: str = ""
    """The process group's name; "" if nothing is sent."""
    send: tuple[int, ...] = ()
    """Elements to send to each rank of the group."""
    receive: tuple[int, ...] = ()
    """Elements to receive from each rank of the group."""


class ExchangePlan(NamedTuple):
    """One rank's exchange of its tensors of some matrices for others: one flat tensor a matrix, perhaps empty."""

    begin: tuple[int, ...]
    """Elements of each matrix before."""
    steps: tuple[AllToAll, ...]
    end: tuple[int, ...]
    """Elements of each matrix after."""

    @staticmethod
    def from_plain(plain: Any) -> ExchangePlan:
        """Rebuild a plan from tuples that have lost their names."""
        begin, steps, end = plain
        return ExchangePlan(tuple(begin), tuple(AllToAll(*step) for step in steps), tuple(end))


class PendingExchange(NamedTuple):
    """An exchange under way. Calling it waits and returns the tensor of each matrix."""

    plan: ExchangePlan
    finish: PendingResult
    """Waits for the first all-to-all."""

    def __call__(self) -> list[Tensor]:
        """Wait, run the remaining steps, and return the tensor of each matrix."""
        flat = self.finish()
        for step in self.plan.steps[1:]:
            flat = _send(_select_pieces([flat], step), step)()
        return split_flat(flat, self.plan.end)


def start_plan(tensors: Sequence[Tensor], plan: ExchangePlan) -> PendingExchange:
    """Start the first all-to-all of a plan; ``tensors`` hold the elements of each matrix in their first dimension."""
    first = plan.steps[0]
    return PendingExchange(plan, _send(_select_pieces(tensors, first), first))


def _select_pieces(tensors: Sequence[Tensor], step: AllToAll) -> Tensor:
    """Concatenate the pieces that a step takes; all held pieces lie end to end in these tensors.

    If each tensor is one piece, pieces that the step does not take may be empty.
    """
    all_of_them = step.order == tuple(range(len(step.sizes)))
    each = len(tensors) == len(step.sizes) and all(len(tensors[i]) == step.sizes[i] for i in step.order)
    if all_of_them or not each:
        flat = tensors[0] if len(tensors) == 1 else torch.cat([*tensors])
        if all_of_them:
            return flat
        tensors = flat.split_with_sizes([*step.sizes])
    return torch.cat([tensors[i] for i in step.order]) if step.order else tensors[0][:0]


def _send(flat: Tensor, step: AllToAll) -> PendingResult:
    """Start the all-to-all of a step, if it sends anything."""
    if not step.group:
        return PendingResult((), lambda: flat)
    announce("all-to-all of matrices", step.group)
    return start_exchange(flat, OpContext(len(step.send), step.group), step.send, step.receive)


def plan_to_owners(matrices: Sequence[Matrix], spec: PartitionSpec, coords: Coords) -> ExchangePlan:
    """Return the plan from slices to owners for the rank at ``coords``."""
    planner = _ExchangePlanner(matrices, spec)
    own_slice = planner.slice_of(coords)
    held = [(i, own_slice) for i in range(len(matrices))]

    def begin(coords: Coords) -> list[SliceIndex]:
        own = planner.slice_of(coords)
        return [(i, own) for i, m in enumerate(matrices) if planner.sizes[i][own] and planner.is_same_replica(m.owner, coords)]

    steps = planner.plan_steps(
        begin,
        [(axis, functools.partial(_owner_coord, matrices, axis)) for axis in reversed(planner.split_axes)],
        coords,
        held,
    )
    last = planner.owned_slices(coords)
    sizes = [m.numel * m.is_owned_by(coords) for m in matrices]
    return planner.finish_plan([planner.sizes[i][own_slice] for i, _ in held], steps, last, sizes)


def plan_from_owners(matrices: Sequence[Matrix], spec: PartitionSpec, coords: Coords, chunk: Chunk = (0, 1)) -> ExchangePlan:
    """Return the plan from owners to the slices of all replicas. Inverse of `plan_to_owners`, or of one chunk of it."""
    planner = _ExchangePlanner(matrices, spec, chunk)
    own_slice = planner.slice_of(coords)
    begin = planner.owned_slices
    to_slices = [(axis, functools.partial(planner.coordinate, axis)) for axis in planner.split_axes]
    steps = planner.plan_steps(begin, [*to_slices, *((axis, None) for axis in planner.replica_axes)], coords, begin(coords))
    last = [(i, own_slice) for i in range(len(matrices)) if planner.sizes[i][own_slice]]
    sizes = [sum(planner.sizes[i]) * m.is_owned_by(coords) for i, m in enumerate(matrices)]
    return planner.finish_plan(sizes, steps, last, [planner.sizes[i][own_slice] for i in range(len(matrices))])


def _owner_coord(matrices: Sequence[Matrix], axis: int, piece: SliceIndex) -> int:
    """Return the coordinate of a piece's owner on an axis where only one rank owns the matrix."""
    coord = matrices[piece[0]].owner[axis]
    assert coord is not None
    return coord


AxisRoute = tuple[int, Callable[[SliceIndex], int] | None]
"""An axis, and a function from a piece to its rank on that axis; None sends it to all ranks."""


class _ExchangePlanner:
    """A planner that follows the pieces of matrices whose units are split alike."""

    def __init__(self, matrices: Sequence[Matrix], spec: PartitionSpec, chunk: Chunk = (0, 1)) -> None:
        self.mesh, self._matrices, self._split = spec.bound_mesh, matrices, matrices[0].split_axes
        names, unit = self.mesh.names, matrices[0].unit
        nontrivial = [i for i, (_, axis) in enumerate(self.mesh.axes) if axis.size > 1]
        self.split_axes = [i for name in self._split if (i := names.index(name)) in nontrivial]
        self.replica_axes = [i for i in nontrivial if names[i] not in unit.distinct_axes]
        self.slices, of_piece = count_ranks(self._split, self.mesh), spec.size(unit)
        numels = [[_count_overlap(m, s % of_piece, spec.shard_numel(m.unit)) for s in range(self.slices)] for m in matrices]
        self.sizes = [[len(range(numel)[chunk_slice(numel, *chunk)]) for numel in own] for own in numels]
        self._of_slice = {self.slice_of(coords): coords for coords in all_coords(spec)}

    def slice_of(self, coords: Coords) -> int:
        """Return the number of the slice that a rank has, among the slices of all pieces that an owner gathers."""
        return rank_along(self._split, self.mesh, coords)[0]

    def owned_slices(self, coords: Coords) -> list[SliceIndex]:
        """Return the slices, which are not empty, of the matrices that a rank owns."""
        owned = [i for i, matrix in enumerate(self._matrices) if matrix.is_owned_by(coords)]
        return [(i, s) for i in owned for s in range(self.slices) if self.sizes[i][s]]

    def coordinate(self, axis: int, piece: SliceIndex) -> int:
        """Return the coordinate, on an axis, of the ranks with the piece's slice."""
        return self._of_slice[piece[1]][axis]

    def is_same_replica(self, owner: Owner, coords: Coords) -> bool:
        """Return whether two ranks agree on the axes that the unit is replicated over."""
        return all(owner[i] == coords[i] for i in self.replica_axes)

    def plan_steps(
        self, begin: Callable[[Coords], list[SliceIndex]], routes: Sequence[AxisRoute], coords: Coords, held: list[SliceIndex]
    ) -> tuple[list[AllToAll], list[SliceIndex]]:
        """Return ``(steps, pieces held after them)`` for the rank at ``coords``, which begins with the pieces ``held``."""

        @functools.cache
        def held_after(coords: Coords, number: int) -> list[SliceIndex]:
            if not number:
                return begin(coords)
            axis, to = routes[number - 1]
            lists = (
                held_after((*coords[:axis], j, *coords[axis + 1 :]), number - 1) for j in range(self.mesh.axes[axis][1].size)
            )
            return [piece for pieces in lists for piece in pieces if to is None or to(piece) == coords[axis]]

        out: list[AllToAll] = []
        for number, (axis, to) in enumerate(routes):
            group = self.mesh.axes[axis][1]
            assert isinstance(group, ProcessAxis)
            if not group.name:
                raise missing_group_error(group.size)
            own = held_after(coords, number)
            sends = [[p for p in own if to is None or to(p) == j] for j in range(group.size)]
            others = (held_after((*coords[:axis], j, *coords[axis + 1 :]), number) for j in range(group.size))
            receives = [[p for p in pieces if to is None or to(p) == coords[axis]] for pieces in others]
            where = {piece: i for i, piece in enumerate(held)}
            order = tuple(where[p] for pieces in sends for p in pieces)
            counts = (tuple(self._numel(pieces) for pieces in lists) for lists in (sends, receives))
            out.append(AllToAll(self._sizes(held), order, group.name, *counts))
            held = [p for pieces in receives for p in pieces]
        return out, held

    def finish_plan(
        self,
        begin: Sequence[int],
        steps: tuple[list[AllToAll], list[SliceIndex]],
        last: Sequence[SliceIndex],
        end: Sequence[int],
    ) -> ExchangePlan:
        """Return the plan of these steps, with a last one that puts the pieces in the order ``last``."""
        routes, held = steps
        where = {piece: i for i, piece in enumerate(held)}
        return ExchangePlan(tuple(begin), (*routes, AllToAll(self._sizes(held), tuple(where[p] for p in last))), tuple(end))

    def _sizes(self, pieces: Sequence[SliceIndex]) -> tuple[int, ...]:
        """Return the elements of these slices, (0,) if there are none."""
        return tuple(self.sizes[i][s] for i, s in pieces) or (0,)

    def _numel(self, pieces: Sequence[SliceIndex]) -> int:
        return sum(self.sizes[i][s] for i, s in pieces)


def _count_overlap(matrix: Matrix, number: int, length: int) -> int:
    """Return how many of a matrix's elements lie in one slice of its unit."""
    low, high = number * length, (number + 1) * length
    return max(0, min(matrix.begin + matrix.param.numel, high) - max(matrix.begin, low))


@_torch.allow_in_graph
def _exchange(flat: Tensor, plan: ExchangePlan, inverse: ExchangePlan) -> Tensor:
    """Run a plan, whose transpose is its inverse."""
    # Values that all replicas have alike count once: so the transpose is the inverse plan. Dynamo hands tuples on.
    runs = (functools.partial(_run_plan, ExchangePlan.from_plain(one)) for one in (plan, inverse))
    return LinearFunction.apply(flat, None, linear_map(*runs))


def _run_plan(plan: ExchangePlan, flat: Tensor) -> Tensor:
    return torch.cat(start_plan([flat], plan)())


def exchange_matrices(tensors: Sequence[Tensor], plan: ExchangePlan, inverse: ExchangePlan) -> list[Tensor]:
    """Run a plan on 1-D tensors: linear, and its transpose is ``inverse``."""
    return split_flat(_exchange(concat_flat(tensors), plan, inverse), plan.end)
