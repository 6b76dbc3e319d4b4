"""matrices: whole matrices of flat slices, each on one owner, and their exchange between slices and owners.

A piece is the part of a matrix that lies in one slice of its unit; over local axes there are so many slices for each rank's
piece of the parameter. On the way to its owner it crosses one axis of the slices after the other, within the owner's replica
of the mesh; on the way back it crosses the same axes, and then goes to the other replicas. Nothing crosses the axes of a
stack. Every rank computes all of this from the spec and the owners, so that only elements are sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec
from .._core.flow import count_ranks
from .._core.layout import Params, from_memory_order, rank_along, rank_coords, to_memory_order
from .._core.mesh import ProcessAxis
from .._core.ops import LinearFunction, OpContext, PendingResult, announce, linear_map, missing_group_error, start_exchange
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import LocalDims, Unit, global_shape, join_shape
from .._slices.pieces import check_slice, param_ranges, scatter_values
from .._spec.table import format_rows
from .._wire.flow import join_pieces, reduce_along, split_pieces
from .._wire.host import compute_device, is_host_resident
from ..collectives._functions import gather_slices, vary
from ._checks import Tensors, check_tensors, concat_flat, join_parts

# --- Which parameters are matrices ---

Select = Callable[[str, Param], bool | Sequence[int]]
"""``select(name, param)``: whether it is a matrix, or its shape as one: [n, m] or [batch, n, m], at most one size -1.

It is asked about the whole parameter, of which ranks may hold pieces over local axes.
"""

MULTIPLICATIONS_PER_ELEMENT_SENT = 512
"""Multiplications that take as long as sending an element to its owner and back, at 10^14 multiplications and 10^11 bytes a
second, 2 bytes an element, for a Newton-Schulz iteration of 5 steps. Only its order of magnitude matters.
"""

Coords = tuple[int, ...]  # of a rank on the mesh
Owner = tuple[int | None, ...]  # coordinates; None on an axis over which each rank owns its part of a stack of matrices


class Matrix(NamedTuple):
    """A parameter that one owner updates as a whole, or a stack of matrices of which each owner updates a part."""

    unit: Unit
    param: Param
    shape: tuple[int, ...]  # as an owner has it: [n, m] or [batch, n, m]; a selection of everything has vectors as well
    begin: int  # offset in the unit's buffer, in elements
    stack: LocalDims = ()  # the local axes over which each rank owns its part of a stack, and the dimension that each splits
    owner: Owner = ()

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.param.name

    @property
    def numel(self) -> int:
        """The number of elements that an owner has."""
        return math.prod(self.shape)

    @property
    def cost(self) -> float:
        """The owner's work, in multiplications: sending the elements, and n^2 m of a matrix [n, m]."""
        return self.numel * ((min(self.shape[-2:]) if len(self.shape) > 1 else 1) + MULTIPLICATIONS_PER_ELEMENT_SENT)

    @property
    def gathered(self) -> LocalDims:
        """The local axes over which an owner gathers pieces of the parameter, and the dimension that each splits."""
        return tuple(item for item in self.param.local if item not in self.stack)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes along which ranks send an owner different elements, outermost first: pieces, and their slices."""
        return (*(axis for axis, _ in self.gathered), *self.unit.p.axes)

    @property
    def stack_axes(self) -> tuple[str, ...]:
        """The axes of ``stack``, which nothing crosses."""
        return tuple(axis for axis, _ in self.stack)

    def is_owned_by(self, coords: Sequence[int]) -> bool:
        """Return whether the rank at these coordinates is the owner, or one of the owners."""
        return all(at is None or at == coord for at, coord in zip(self.owner, coords, strict=True))


def select_matrices(spec: PartitionSpec, select: Select | None, *, gather_stacks: bool) -> list[Matrix]:
    """Return the matrices in buffer order, without owners. ValueError or TypeError names a parameter that cannot be one."""
    found: list[Matrix] = []
    sizes = dict(spec.bound_mesh.sizes)
    for unit in spec:
        begin = 0
        for size, param in unit.parts:
            whole = param and dataclasses.replace(param, shape=global_shape(param, sizes), local=())
            if param and whole and (shape := _matrix_shape(unit, whole, select)) is not None:
                leading = shape[:-2] if shape[:-2] == whole.shape[: len(shape) - 2] else ()
                split = ((axis, dim) for axis, dim in param.local if dim < len(leading) and sizes[axis] > 1)
                stack = () if gather_stacks else tuple(split)
                own = [*shape]
                for axis, dim in stack:
                    own[dim] //= sizes[axis]
                found.append(Matrix(unit, param, tuple(own), begin, stack))
            begin += size
    return found


def _matrix_shape(unit: Unit, param: Param, select: Select | None) -> tuple[int, ...] | None:
    wanted = len(param.shape) == 2 if select is None else select(param.name, param)
    is_inexact = param.dtype.is_floating_point or param.dtype.is_complex
    if wanted is False or not (unit.requires_grad and param.numel and is_inexact):
        return None
    if wanted is True:
        return param.shape
    try:
        shape = tuple(torch.empty(param.numel, device="meta").view(*wanted).shape)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"parameter '{param.name}' {list(param.shape)}: expected True, False or a shape of as many elements, got {wanted!r}"
        ) from None
    if param.permuted:
        raise ValueError(
            f"parameter '{param.name}' has the memory order {param.order}: expected True for it, got the shape {list(shape)}, "
            "in which its elements would be others"
        )
    return shape


# --- Which rank owns each matrix, and which matrices are sent together: arithmetic with the same result on every rank ---

WORKSPACE_FACTOR = 3  # a batch needs up to so many times its size while its owners compute, because of the products


def all_coords(spec: PartitionSpec) -> list[Coords]:
    """Return the coordinates of all ranks of the mesh, in row-major order."""
    return [*itertools.product(*(range(size) for _, size in spec.bound_mesh.sizes))]


def assign_owners(found: Sequence[Matrix], batches: Sequence[Sequence[int]], spec: PartitionSpec) -> list[Matrix]:
    """Return the matrices with owners: the costliest first, to the rank with the least work (LPT; Graham, 1969)."""
    batch_of = {i: number for number, batch in enumerate(batches) for i in batch}
    candidates: dict[tuple[str, ...], dict[Owner, list[Coords]]] = {matrix.stack_axes: {} for matrix in found}
    for (axes, of_axes), rank in itertools.product(candidates.items(), all_coords(spec)):
        owner = tuple(None if name in axes else at for name, at in zip(spec.bound_mesh.names, rank, strict=True))
        of_axes.setdefault(owner, []).append(rank)
    loads: dict[Coords, float] = defaultdict(float)
    load_in_batch: dict[tuple[int, Coords], float] = defaultdict(float)
    owners: dict[int, Owner] = {}
    for i in sorted(range(len(found)), key=lambda i: (-found[i].cost, i)):

        def load(item: tuple[Owner, list[Coords]], batch: int = batch_of[i]) -> tuple[Any, ...]:
            owner, ranks = item
            return max(loads[rank] for rank in ranks), max(load_in_batch[batch, rank] for rank in ranks), owner

        owners[i], ranks = min(candidates[found[i].stack_axes].items(), key=load)
        for rank in ranks:
            loads[rank] += found[i].cost
            load_in_batch[batch_of[i], rank] += found[i].cost
    return [matrix._replace(owner=owners[i]) for i, matrix in enumerate(found)]


def batch_matrices(found: Sequence[Matrix], spec: PartitionSpec) -> list[list[int]]:
    """Return indices of the matrices in batches: neighbours that can be sent together, up to the memory of all ranks."""

    def key(i: int) -> tuple[object, ...]:
        unit = found[i].unit
        return unit.local_axes, unit.p.axes, found[i].stack_axes, unit.dtype, is_host_resident(unit)

    room = len(all_coords(spec)) * max((matrix.unit.numel for matrix in found), default=0)
    out: list[list[int]] = []
    for _, alike in itertools.groupby(range(len(found)), key):
        numel = math.inf  # a batch of its own
        for i in alike:
            of_all_owners = found[i].numel * count_ranks(found[i].stack_axes, spec.bound_mesh)
            if WORKSPACE_FACTOR * (numel + of_all_owners) > room:
                out.append([])
                numel = 0
            out[-1].append(i)
            numel += of_all_owners
    return out


def count_chunks(batch: Sequence[Matrix], spec: PartitionSpec, max_numel: int) -> int:
    """Return the number of chunks in which a batch returns, so that a rank holds at most ``max_numel`` elements of it."""
    replica_axes = [i for i, name in enumerate(spec.bound_mesh.names) if name not in batch[0].unit.distinct_axes]
    slices = count_ranks(batch[0].split_axes, spec.bound_mesh)
    ranks = len(all_coords(spec)) // count_ranks(batch[0].stack_axes, spec.bound_mesh)
    if slices == ranks:  # no more elements come back than went to the owners; a replica sends its results to all others
        return 1
    of_replica = Counter[Owner]()
    for matrix in batch:
        of_replica[tuple(matrix.owner[i] for i in replica_axes)] += matrix.numel
    sent = ranks // slices * max(of_replica.values())
    received = 2 * sum(of_replica.values())  # and put in order
    # Beside the results, which stay until the last of them is sent.
    room = slices * max_numel * (WORKSPACE_FACTOR - 1) / WORKSPACE_FACTOR
    return math.ceil((sent + received) / room)


def _list_names(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


# --- The exchange between slices and owners, planned on each rank ---

Chunk = tuple[int, int]  # ``(number, count)``: which of ``count`` chunks of some elements


def chunk_slice(numel: int, chunk: Chunk) -> slice:
    """Return the range of one chunk among ``numel`` elements."""
    number, count = chunk
    return slice(numel * number // count, numel * (number + 1) // count)


def _split_flat(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split a flat tensor into pieces of these sizes. Through 2-D, so that derivatives go the way of `concat_flat`."""
    return [x[:, 0] for x in flat[:, None].split_with_sizes(list(sizes))]


class AllToAll(NamedTuple):
    """A step of an exchange: take pieces of these sizes in this order, and send so many elements to each rank of a group."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    group: str = ""  # the process group's name; without one nothing is sent
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()


class ExchangePlan(NamedTuple):
    """One rank's exchange of a chunk of its flat tensors, one a matrix, for others, of which ``end`` are the elements."""

    steps: tuple[AllToAll, ...]
    end: tuple[int, ...]
    chunk: Chunk = (0, 1)


def start_plan(tensors: Sequence[Tensor], plan: ExchangePlan) -> Callable[[], list[Tensor]]:
    """Start the first all-to-all of a plan for flat tensors; call the result to wait for all and get each matrix's tensor."""
    finish = _send(tensors, plan.steps[0], plan.chunk)

    def wait() -> list[Tensor]:
        flat = finish()
        for step in plan.steps[1:]:
            flat = _send([flat], step)()
        return _split_flat(flat, plan.end)

    return wait


def _send(tensors: Sequence[Tensor], step: AllToAll, chunk: Chunk = (0, 1)) -> PendingResult:
    """Start a step; the pieces that it does not take may be empty if each tensor is one piece."""
    pieces = tensors
    if chunk != (0, 1) or step.order != tuple(range(len(step.sizes))):
        pieces = _split_pieces(tensors, step)
        pieces = [pieces[i] for i in step.order]
        pieces = pieces if chunk == (0, 1) else [x[chunk_slice(len(x), chunk)] for x in pieces]
    flat = pieces[0] if len(pieces) == 1 else torch.cat([*pieces]) if pieces else tensors[0][:0]
    if not step.group:
        return PendingResult((), lambda: flat)
    announce("all-to-all of matrices", step.group)
    return start_exchange(flat, OpContext(len(step.send), step.group), step.send, step.receive)


def _split_pieces(tensors: Sequence[Tensor], step: AllToAll) -> Sequence[Tensor]:
    if len(tensors) == len(step.sizes) and all(len(tensors[i]) == step.sizes[i] for i in step.order):
        return tensors
    if len(tensors) == 1:
        return tensors[0].split_with_sizes([*step.sizes])
    pieces: list[Tensor] = []
    for tensor in tensors:
        end = 0
        while end < len(tensor):
            begin, end = end, end + step.sizes[len(pieces)]
            pieces.append(tensor[begin:end])
    return pieces


def plan_exchange(
    matrices: Sequence[Matrix], spec: PartitionSpec, coords: Coords, chunk: Chunk = (0, 1), *, to_owners: bool
) -> ExchangePlan:
    """Return the plan from slices to owners, or from owners to the slices of all replicas, for the rank at ``coords``.

    It follows the pieces of matrices whose units are split alike, ``(number of the matrix, number of the slice)``.
    """
    mesh, split, unit = spec.bound_mesh, matrices[0].split_axes, matrices[0].unit
    axes = {name: i for i, (name, axis) in enumerate(mesh.axes) if axis.size > 1}
    split_axes = [axes[name] for name in split if name in axes]
    replica_axes = [i for name, i in axes.items() if name not in unit.distinct_axes]
    rank_of_slice = {rank_along(split, mesh, rank)[0]: rank for rank in all_coords(spec)}
    own = rank_along(split, mesh, coords)[0]
    whole: dict[tuple[int, int], int] = {}  # by piece, its number of elements
    for (i, matrix), s in itertools.product(enumerate(matrices), range(len(rank_of_slice))):
        length = spec.shard_numel(matrix.unit)
        low = s % spec.size(unit) * length
        whole[i, s] = max(0, min(matrix.begin + matrix.param.numel, low + length) - max(matrix.begin, low))
    sizes = {piece: len(range(numel)[chunk_slice(numel, chunk)]) for piece, numel in whole.items()}
    ends: dict[tuple[int, int], tuple[Owner, Owner]] = {}  # where a piece begins and ends; None: on all ranks of the axis
    for (i, s), owner in ((piece, matrices[piece[0]].owner) for piece, numel in whole.items() if numel):
        in_slice = tuple(rank_of_slice[s][axis] if axis in split_axes else at for axis, at in enumerate(owner))
        in_slices = tuple(None if axis in replica_axes else at for axis, at in enumerate(in_slice))
        ends[i, s] = (in_slice, owner) if to_owners else (owner, in_slices)

    def find_pieces(crossed: Sequence[int]) -> Callable[[Coords], list[tuple[int, int]]]:
        """Return a function from a rank's coordinates to the pieces that it has when these axes are crossed."""
        by_place: dict[Owner, list[tuple[int, int]]] = {}
        for piece, (begin, end) in ends.items():
            place = tuple(end[axis] if axis in crossed else at for axis, at in enumerate(begin))
            by_place.setdefault(place, []).append(piece)
        free = {axis for axis, at in enumerate(next(iter(by_place), ())) if at is None}
        return lambda at: by_place.get(tuple(None if axis in free else i for axis, i in enumerate(at)), [])

    def make_step(taken: Sequence[tuple[int, int]], *sending: Any) -> AllToAll:
        held_sizes = tuple((sizes if steps else whole)[piece] for piece in held)
        number = {piece: i for i, piece in enumerate(held)}
        return AllToAll(held_sizes or (0,), tuple(number[piece] for piece in taken), *sending)

    route = [*reversed(split_axes)] if to_owners else [*split_axes, *replica_axes]
    held = [(i, own) for i in range(len(matrices))] if to_owners else find_pieces([])(coords)
    steps: list[AllToAll] = []
    for n, axis in enumerate(route):
        group = mesh.axes[axis][1]
        assert isinstance(group, ProcessAxis)
        if not group.name:
            raise missing_group_error(group.size)
        pieces_at, here = find_pieces(route[:n]), coords[axis]
        others = [pieces_at((*coords[:axis], j, *coords[axis + 1 :])) for j in range(group.size)]
        sends = [[p for p in others[here] if ends[p][1][axis] in (None, j)] for j in range(group.size)]
        receives = [[p for p in pieces if ends[p][1][axis] in (None, here)] for pieces in others]
        counts = (tuple(sum(sizes[p] for p in pieces) for pieces in some) for some in (sends, receives))
        steps.append(make_step([p for pieces in sends for p in pieces], group.name, *counts))
        held = [p for pieces in receives for p in pieces]
    steps.append(make_step(find_pieces(route)(coords)))
    slices = tuple(sizes[i, own] for i in range(len(matrices)))
    owned = tuple(sum(sizes[i, s] for s in rank_of_slice) * m.is_owned_by(coords) for i, m in enumerate(matrices))
    return ExchangePlan(tuple(steps), owned if to_owners else slices, chunk)


@_torch.allow_in_graph
def _exchange(flat: Tensor, plan: ExchangePlan, inverse: ExchangePlan) -> Tensor:
    """Run a plan, whose transpose is its inverse: values that all replicas have alike count once."""

    def run(plan: ExchangePlan, flat: Tensor) -> Tensor:
        steps, end, _ = plan  # Dynamo hands on tuples that have lost their names
        return torch.cat(start_plan([flat], ExchangePlan(tuple(AllToAll(*step) for step in steps), tuple(end)))())

    return LinearFunction.apply(flat, None, linear_map(functools.partial(run, plan), functools.partial(run, inverse)))


# --- A batch of matrices that are sent together, asynchronously unless something tracks the tensors ---


class MatrixBatch(NamedTuple):
    """Matrices of one dtype whose units are split alike on the mesh."""

    matrices: tuple[Matrix, ...]
    spec: PartitionSpec
    to_owners: ExchangePlan | None  # None for simulated ranks, as the next one
    from_owners: ExchangePlan | None
    chunks: tuple[ExchangePlan, ...] = ()  # ``from_owners`` chunk by chunk, where all of it is too much at once

    def collect(self, parts: Tensors) -> Callable[[], Params]:
        """Start to send this rank's parts; call the result for whole matrices, empty if others own them."""
        if self.to_owners is None or self.from_owners is None:
            whole = {matrix.name: self._gather_simulated(parts[matrix.name], matrix) for matrix in self.matrices}
            return lambda: whole
        device = compute_device(self.matrices[0].unit, self.spec.bound_mesh)
        tensors = [parts[matrix.name] for matrix in self.matrices]
        tensors = tensors if device is None else [x.to(device, non_blocking=True) for x in tensors]
        wait = self._start(tensors, self.to_owners, self.from_owners)
        return lambda: {m.name: self._view_matrix(x, m) if len(x) else x for m, x in zip(self.matrices, wait(), strict=True)}

    def spread(self, whole: Tensors, plan: ExchangePlan | None = None) -> Callable[[], Params]:
        """Start to send whole matrices, or a chunk of them; call the result for all replicas' parts. Inverse of `collect`."""
        plan = plan or self.from_owners
        if self.to_owners is None or plan is None:
            parts = {matrix.name: self._scatter_simulated(whole[matrix.name], matrix) for matrix in self.matrices}
            return lambda: parts
        tensors = ((whole[matrix.name], matrix) for matrix in self.matrices)
        flat = [self._flatten_matrix(x, matrix) if x.numel() else x.reshape(-1) for x, matrix in tensors]
        wait = self._start(flat, plan, self.to_owners)
        return lambda: {matrix.name: x for matrix, x in zip(self.matrices, wait(), strict=True)}

    def _start(self, tensors: Sequence[Tensor], plan: ExchangePlan, inverse: ExchangePlan) -> Callable[[], list[Tensor]]:
        if _torch.is_eager() and not _torch.any_tracked(tensors):
            return start_plan(tensors, plan)
        arrived = _split_flat(_exchange(concat_flat(tensors), plan, inverse), plan.end)
        return lambda: arrived

    def _gather_simulated(self, piece: Tensor, matrix: Matrix) -> Tensor:
        """Return the whole matrix at its owner, zeros on the other simulated ranks."""
        mesh = self.spec.bound_mesh
        for name in (name for name in mesh.names if name not in matrix.unit.distinct_axes):
            piece = vary(piece, mesh[name], reduce="sum")
        for name in reversed(matrix.split_axes):
            piece = gather_slices(piece, mesh[name], reduce="sum")
        buffers = piece.view(-1, self.spec.padded_numel(matrix.unit))
        whole = self._view_matrix(buffers[:, matrix.begin : matrix.begin + matrix.param.numel].reshape(-1), matrix)
        return self.select_on_owner(matrix, whole, 0)

    def _scatter_simulated(self, whole: Tensor, matrix: Matrix) -> Tensor:
        """Return this simulated rank's slice of the buffer with the owner's matrix."""
        mesh = self.spec.bound_mesh
        flat = self._flatten_matrix(self.select_on_owner(matrix, whole, 0), matrix)
        rest = self.spec.padded_numel(matrix.unit) - matrix.begin - matrix.param.numel
        buffers = torch.nn.functional.pad(flat.view(-1, matrix.param.numel), (matrix.begin, rest))
        split = [mesh[name] for name in matrix.split_axes]
        others = [mesh[name] for name in mesh.names if name not in matrix.unit.distinct_axes]
        return reduce_along(buffers.flatten(), split, others, "sum")

    def select_on_owner(self, matrix: Matrix, new: Tensor, old: Any) -> Tensor:
        """Return ``new`` on the matrix's owner among simulated ranks, ``old`` on the others."""
        here = torch.ones((), dtype=torch.bool, device=new.device)
        for (_, axis), at in zip(self.spec.bound_mesh.axes, matrix.owner, strict=True):
            here = here if at is None else here & (axis.rank == at)
        return torch.where(here, new, old)

    def _view_matrix(self, flat: Tensor, matrix: Matrix) -> Tensor:
        """Return a matrix from its elements, piece by piece and each in memory order: a view if it is of one piece."""
        pieces = [from_memory_order(x, matrix.param) for x in flat.view(-1, matrix.param.numel).unbind()]
        return join_pieces(pieces, matrix.gathered, dict(self.spec.bound_mesh.sizes)).reshape(matrix.shape)

    def _flatten_matrix(self, whole: Tensor, matrix: Matrix) -> Tensor:
        """Return a matrix's elements, piece by piece and each in memory order. Inverse of `_view_matrix`."""
        sizes = dict(self.spec.bound_mesh.sizes)
        as_param = whole.reshape(join_shape(matrix.param.shape, matrix.gathered, sizes))
        pieces = split_pieces(as_param, matrix.gathered, sizes)
        flat = [to_memory_order(x, matrix.param).reshape(-1) for x in pieces]
        return flat[0] if len(flat) == 1 else torch.cat(flat)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a spec's parameters and their owners on a mesh, as `matrices` returns them. Prints as a table."""

    spec: PartitionSpec  # bound to its mesh
    chosen: tuple[Matrix, ...]
    groups: tuple[tuple[str, ...], ...] = field(repr=False)  # names of the matrices that are sent together
    by_name: Mapping[str, Matrix] = field(init=False, compare=False, repr=False)
    _batches: dict[tuple[str, ...], MatrixBatch] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {matrix.name: matrix for matrix in self.chosen})

    def __str__(self) -> str:
        ranks, rows = all_coords(self.spec), [("owner", "which", "matrices", "numel", "of the mean cost")]
        mean = sum(matrix.cost * count_ranks(matrix.stack_axes, self.spec.bound_mesh) for matrix in self.chosen) / len(ranks)
        for rank in ranks:
            own = [matrix for matrix in self.chosen if matrix.is_owned_by(rank)]
            where = ", ".join(f"{name}={i}" for name, i in zip(self.spec.bound_mesh.names, rank, strict=True))
            share = f"{sum(matrix.cost for matrix in own) / mean:.2f}" if mean else "-"
            names, numel = _list_names([matrix.name for matrix in own], 3), sum(matrix.numel for matrix in own)
            rows.append((where, names, f"{len(own):,}", f"{numel:,}", share))
        others = {param.name: param.numel for unit in self.spec for param in unit.params if param.name not in self.by_name}
        names = f": {_list_names([*others], 6)}" if others else ""
        last = f"no matrices: {len(others):,} parameters, {sum(others.values()):,} elements{names}"
        return "\n".join([*format_rows(rows, names=2), last])

    def _names_in(self, key: str) -> tuple[str, ...]:
        return tuple(param.name for param in self.spec.by_key[key].params if param.name in self.by_name)

    def _is_owner(self, name: str) -> bool:
        return self.spec.bound_mesh.is_simulated or self.by_name[name].is_owned_by(rank_coords(self.spec.bound_mesh, None))

    def _select(self, key: str, piece: Tensor, name: str) -> Tensor:
        """Return a parameter's part of a slice, a view; on simulated ranks, whose shapes are alike, the whole slice."""
        if self.spec.bound_mesh.is_simulated:
            return piece
        return next(piece[low:high] for other, low, high in param_ranges(self.spec.by_key[key], self.spec) if other == name)

    def _join(self, key: str, parts: Tensors, others: Tensor) -> Tensor:
        """Return a slice of parameters' parts, with other elements from ``others``. Inverse of `_select`."""
        unit = self.spec.by_key[key]
        if self.spec.bound_mesh.is_simulated:
            out = others
            for name, part in parts.items():
                is_own = [param is not None and param.name == name for _, param in unit.parts]
                out = torch.where(scatter_values(is_own, False, unit, self.spec, others.device), part, out)
            return out
        # empty ones as well: derivatives of what they were made of are sent back by all ranks or none
        return join_parts(
            others, ((low, high, parts[name]) for name, low, high in param_ranges(unit, self.spec) if name in parts)
        )

    def _check_slices(self, tree: Mapping[str, Tensor]) -> None:
        """Raise ValueError or TypeError, naming the unit, unless these are slices of the spec that can be sent together."""
        check_tensors(tree, "params")
        for key, piece in tree.items():
            unit = self.spec.owner(key)
            if not isinstance(unit, Unit):
                raise ValueError(f"'{key}' is a parameter of the spec: expected units, such as {[*self.spec.by_key][:8]}")
            check_slice(piece, unit, self.spec, "update")
        for names in self.groups:
            tensors = {name: tree[key] for name in names if (key := self.by_name[name].unit.key) in tree}
            kinds = {(x.dtype, x.device): name for name, x in tensors.items()}
            if len(kinds) > 1:
                (expected, first), (got, name) = [*kinds.items()][:2]
                expected, got = (f"{dtype} on {device}" for dtype, device in (expected, got))
                raise ValueError(f"matrix '{name}' is sent together with '{first}': expected {expected}, got {got}")

    def _batches_of(self, keys: Mapping[str, object]) -> Iterator[MatrixBatch]:
        for names in self.groups:
            some = tuple(name for name in names if self.by_name[name].unit.key in keys)
            if some and some not in self._batches:
                chosen, spec = tuple(self.by_name[name] for name in some), self.spec
                there = back = None
                chunks: list[ExchangePlan] = []
                if not spec.bound_mesh.is_simulated:
                    at = rank_coords(spec.bound_mesh, None)
                    count = count_chunks(chosen, spec, max(matrix.unit.numel for matrix in self.chosen))
                    there, back = (plan_exchange(chosen, spec, at, to_owners=to_owners) for to_owners in (True, False))
                    chunks += (plan_exchange(chosen, spec, at, (i, count), to_owners=False) for i in range(count) if count > 1)
                self._batches[some] = MatrixBatch(chosen, spec, there, back, tuple(chunks))
            if some:
                yield self._batches[some]


def matrices(spec: PartitionSpec, *, select: Select | None = None, gather_stacks: bool = False) -> Matrices:
    """Choose which parameters an optimizer updates as whole matrices, and which rank owns each, so that ranks share the work.

    Owners are ranks of the whole mesh: under HSDP each replica has its own matrices, and units that are not split send nothing.
    The costliest matrix goes first, to the rank with the least work. The result is the same on every rank, and prints as a
    table.

    Args:
        spec: A spec, bound to a mesh or to be bound to this process's.
        select: ``select(name, param)`` returns True, False, or the shape as a matrix, [n, m] or [batch, n, m], such as
            ``(len, -1)`` for a convolution. By default trained parameters with two dimensions. `hidden` leaves out embeddings
            and heads.
        gather_stacks: Send a stack [batch, n, m] that is local along its batch, such as experts, whole to one owner. By default
            each rank along that axis owns its part, and no matrix crosses the axis. Other local parameters are sent whole.

    Returns:
        The matrices and their owners.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 3)).on({"shard": 1})
        >>> print(fs.optim.matrices(spec))
        owner    which   matrices  numel  of the mean cost
        --------------------------------------------------
        shard=0  weight         1      6              1.00
        no matrices: 1 parameters, 3 elements: bias
    """
    spec = bind_spec(spec)
    found = select_matrices(spec, select, gather_stacks=gather_stacks)
    batches = batch_matrices(found, spec)
    names = tuple(tuple(found[i].name for i in group) for group in batches)
    return Matrices(spec, tuple(assign_owners(found, batches, spec)), names)
