"""matrices: whole matrices of flat slices, each on one owner, and their exchange between slices and owners.

A piece is the part of a matrix that lies in one slice of its unit; over local axes there are so many slices for each rank's
piece of the parameter. On the way to its owner it crosses one axis of the slices after the other, within the owner's replica
of the mesh; on the way back it crosses the same axes, and then goes to the other replicas. Nothing crosses the axes of a
stack. Every rank computes all of this from the spec and the owners, so that only elements are sent.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec
from .._core.layout import Params, from_memory_order, rank_along, rank_coords, to_memory_order
from .._core.mesh import ProcessAxis
from .._core.ops import OpContext, PendingResult, announce, missing_group_error, start_exchange
from .._core.primitive import LinearFunction, linear_map
from .._core.spec import PartitionSpec
from .._core.unit import Unit, join_shape
from .._slices.pieces import check_slice, param_ranges, scatter_values
from .._wire.flow import join_pieces, reduce_along, split_pieces
from .._wire.host import compute_device
from ..collectives._functions import gather_slices, vary
from . import _owners
from ._checks import Tensors, check_tensors
from ._owners import Coords, Matrix, Owner, Select

Chunk = tuple[int, int]  # ``(number, count)``: which of ``count`` chunks of some elements


def chunk_slice(numel: int, chunk: Chunk) -> slice:
    """Return the range of one chunk among ``numel`` elements."""
    number, count = chunk
    return slice(numel * number // count, numel * (number + 1) // count)


def _concat_flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors through 2-D: torch.cat drops empty 1-D ones, and with them their vmap level, which is sent."""
    return torch.cat([x[:, None] for x in tensors])[:, 0]


def _split_flat(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split a flat tensor into pieces of these sizes. Through 2-D, so that derivatives go the way of `_concat_flat`."""
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
    rank_of_slice = {rank_along(split, mesh, rank)[0]: rank for rank in _owners.all_coords(spec)}
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
        arrived = _split_flat(_exchange(_concat_flat(tensors), plan, inverse), plan.end)
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
        return _owners.format_owners(self.chosen, self.spec)

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
        tensors: list[Tensor] = []
        end = 0
        for name, low, high in param_ranges(unit, self.spec):
            if name in parts:  # an empty one as well: derivatives of what it was made of are sent back by all ranks or none
                tensors += [others[end:low], parts[name]]
                end = high
        return _concat_flat([*tensors, others[end:]])

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
                    count = _owners.count_chunks(chosen, spec, max(matrix.unit.numel for matrix in self.chosen))
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
          owner  matrices  numel  of the mean cost  which
        -------------------------------------------------
        shard=0         1      6              1.00  weight
        no matrices: 1 parameters, 3 elements: bias
    """
    spec = bind_spec(spec)
    found = _owners.select_matrices(spec, select, gather_stacks=gather_stacks)
    batches = _owners.batch_matrices(found, spec)
    names = tuple(tuple(found[i].name for i in group) for group in batches)
    return Matrices(spec, tuple(_owners.assign_owners(found, batches, spec)), names)
