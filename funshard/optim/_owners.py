"""Which parameters are matrices, which rank owns each, and which are sent together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .._core.flow import count_ranks
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import LocalDims, Unit, global_shape
from .._wire.host import is_host_resident

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


def hidden(model: nn.Module, *heads: str) -> Select:
    """Return a ``select`` for the hidden matrices of a model: neither embeddings nor heads.

    It selects parameters with two dimensions. It leaves out parameters of ``nn.Embedding`` and ``nn.EmbeddingBag`` under any of
    their names (a tied head), of ``model.get_output_embeddings()`` (transformers), and of the modules in ``heads``. Add stacked
    experts or convolutions yourself::

        is_hidden = hidden(model, "score")
        matrices(spec, select=lambda name, param: len(param.shape) == 3 or is_hidden(name, param))

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    Args:
        model: The model, of which only names and module types are read.
        *heads: Paths of modules to leave out.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> chosen = fs.optim.matrices(fs.policies.whole()(model), select=fs.optim.hidden(model, "2"))
        >>> [matrix.name for matrix in chosen.chosen]
        ['1.weight']
    """
    paths = {id(module): path for path, module in model.named_modules()}
    left_out = {path for path, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    for head in heads:
        if head not in paths.values():
            raise ValueError(f"hidden: '{head}' is no module of the model: expected paths such as {[*paths.values()][1:5]}")
        left_out.add(head)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if id(output) in paths:
        left_out.add(paths[id(output)])

    def select(name: str, param: Param) -> bool:
        inside = {path.rpartition(".")[0] for path in param.names}
        within = any(path == out or path.startswith(f"{out}.") for path in inside for out in left_out)
        return len(param.shape) == 2 and not within

    return select


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


def format_owners(found: Sequence[Matrix], spec: PartitionSpec) -> str:
    """Return a table with a row for each rank: its matrices, their elements and relative cost; then the other parameters."""
    ranks, rows = all_coords(spec), [("owner", "matrices", "numel", "of the mean cost", "which")]
    mean = sum(matrix.cost * count_ranks(matrix.stack_axes, spec.bound_mesh) for matrix in found) / len(ranks)
    for rank in ranks:
        own = [matrix for matrix in found if matrix.is_owned_by(rank)]
        where = ", ".join(f"{name}={i}" for name, i in zip(spec.bound_mesh.names, rank, strict=True))
        share = f"{sum(matrix.cost for matrix in own) / mean:.2f}" if mean else "-"
        numel = sum(matrix.numel for matrix in own)
        rows.append((where, f"{len(own):,}", f"{numel:,}", share, _list_names([matrix.name for matrix in own], 3)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    chosen = {matrix.name for matrix in found}
    others = {param.name: param.numel for unit in spec for param in unit.params if param.name not in chosen}
    names = f": {_list_names([*others], 6)}" if others else ""
    last = f"no matrices: {len(others):,} parameters, {sum(others.values()):,} elements{names}"
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], last])


def _list_names(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
