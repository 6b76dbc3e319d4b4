"""Which parameters are matrices, and which rank owns each: arithmetic, the same on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..._spec.spec import PartitionSpec
from ..._spec.tree import Param
from ..._spec.unit import Unit

__all__ = ["Cost", "Matrix", "Select", "assigned", "chosen", "every_rank", "groups", "hidden", "largest", "shares", "table"]

Select = Callable[[str, Param], bool | Sequence[int]]
"""``select(name, param)``: whether it is a matrix, or the shape it is seen in: [n, m] or [batch, n, m], with a -1 or none."""
Cost = Callable[[tuple[int, ...]], float]
"""``cost(shape)``: what its owner has to do for a matrix of this shape, [n, m] or [batch, n, m], in any unit."""

MOVED = 512
"""So many multiplications take as long as it takes to send an element there and back: 10^14 a second, 10^11 bytes a second,
2 bytes each, and a Newton-Schulz iteration of 5 steps. Its order of magnitude is what counts."""
WORK = 3
"""So often what a rank owns of a group is there while it is worked on, which may be one unit's worth: the products of the
iteration. What is on its way back may be another."""


class Matrix(NamedTuple):
    """A parameter that is worked on as a whole."""

    unit: Unit
    param: Param
    shape: tuple[int, ...]
    """In which it is seen: [n, m], or [batch, n, m]; for `matrices` of everything also a vector's."""
    begin: int
    """Where it begins in its unit's buffer, in elements."""
    cost: float
    owner: tuple[int, ...] = ()
    """Its owner's coordinates on the mesh."""

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.param.name


def hidden(model: nn.Module, *heads: str) -> Select:
    """Selects the matrices of a model that a matrix optimizer is for: those that are neither embeddings nor a head.

    Parameters with two dimensions, but for those of ``nn.Embedding`` and ``nn.EmbeddingBag``, under whichever of their names
    (a tied head), those of what the model gives as ``get_output_embeddings()`` (transformers), and those of the modules
    named as ``heads``. Stacked experts and convolutions are yours to add::

        wanted = hidden(model, "score")
        matrices(spec, select=lambda name, param: len(param.shape) == 3 or wanted(name, param))

    As Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024. Raises ValueError for a head that is no
    module of the model.

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


def chosen(spec: PartitionSpec, select: Select | None, cost: Cost | None) -> list[Matrix]:
    """The matrices, in the order of the buffers. ValueError or TypeError, naming the parameter, for what cannot be one."""
    found: list[Matrix] = []
    for unit in spec:
        begin = 0
        for size, param in unit.parts:
            if param is not None and (shape := _shape(unit, param, select)) is not None:
                found.append(Matrix(unit, param, shape, begin, float((cost or _cost)(shape))))
            begin += size
    return found


def _cost(shape: tuple[int, ...]) -> float:
    return math.prod(shape) * ((min(shape[-2:]) if len(shape) > 1 else 1) + MOVED)


def _shape(unit: Unit, param: Param, select: Select | None) -> tuple[int, ...] | None:
    """How a parameter is seen as a matrix; None if it is none."""
    wanted = len(param.shape) == 2 if select is None else select(param.name, param)
    if wanted is False or not unit.requires_grad or not param.numel:
        return None
    if not (param.dtype.is_floating_point or param.dtype.is_complex):
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


def every_rank(spec: PartitionSpec) -> list[tuple[int, ...]]:
    """The coordinates of all ranks of the mesh, row by row."""
    return [*itertools.product(*(range(size) for _, size in spec.bound_mesh.sizes))]


def assigned(found: Sequence[Matrix], together: Sequence[Sequence[int]], spec: PartitionSpec) -> list[Matrix]:
    """The same with owners: each to the rank that has least to do, the dearest first (LPT: Graham, 1969).

    Of ranks that have as much to do the one that has least of the matrix's group, so that they work at the same time.
    """
    ranks = every_rank(spec)
    group_of = {i: number for number, group in enumerate(together) for i in group}
    loads = dict.fromkeys(ranks, 0.0)
    of_group: dict[tuple[int, tuple[int, ...]], float] = {}
    owners: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(found)), key=lambda i: (-found[i].cost, i)):
        group = group_of[i]
        owner = min(ranks, key=lambda rank: (loads[rank], of_group.get((group, rank), 0.0), rank))
        loads[owner] += found[i].cost
        of_group[group, owner] = of_group.get((group, owner), 0.0) + found[i].cost
        owners[i] = owner
    return [matrix._replace(owner=owners[i]) for i, matrix in enumerate(found)]


def groups(found: Sequence[Matrix], spec: PartitionSpec) -> list[list[int]]:
    """Which are worked on at the same time: neighbours of one `_kind`, as many as the memory of all ranks takes."""
    room = len(every_rank(spec)) * largest(found)
    out: list[list[int]] = []
    numel = 0
    for i, matrix in enumerate(found):
        before = found[out[-1][-1]] if out else None
        alike = before is not None and _kind(before.unit) == _kind(matrix.unit)
        if not alike or WORK * (numel + matrix.param.numel) > room:
            out.append([])
            numel = 0
        out[-1].append(i)
        numel += matrix.param.numel
    return out


def shares(group: Sequence[Matrix], spec: PartitionSpec, most: int) -> int:
    """In how many goes the matrices of a group come back, so that at most so many elements of them are on a rank at once.

    A replica sends what it has worked out to all, so that on more replicas each has more coming; within one there is no more
    than there was on the way to the owners.
    """
    split = {spec.bound_mesh.names.index(name) for name in group[0].unit.p.axes}
    slices, ranks = spec.size(group[0].unit), len(every_rank(spec))
    if slices == ranks:
        return 1
    of_replica: dict[tuple[int, ...], int] = {}
    for matrix in group:
        replica = tuple(at for i, at in enumerate(matrix.owner) if i not in split)
        of_replica[replica] = of_replica.get(replica, 0) + matrix.param.numel
    sent = ranks // slices * max(of_replica.values())
    received = 2 * sum(of_replica.values())  # and put in order
    room = slices * most * (WORK - 1) / WORK  # beside the results, which are there until the last of them is sent
    return math.ceil((sent + received) / room)


def largest(found: Sequence[Matrix]) -> int:
    """Elements of the largest of the units that matrices are in."""
    return max((matrix.unit.numel for matrix in found), default=0)


def _kind(unit: Unit) -> tuple[object, ...]:
    """The way of its matrices, their dtype, and whether they come from the host, where others are on the device."""
    return unit.p.axes, unit.dtype, "params" in unit.p.offloads


def table(found: Sequence[Matrix], spec: PartitionSpec) -> str:
    """Of each rank how many matrices it owns, their elements and what they cost beside the mean; then what is no matrix."""
    ranks = every_rank(spec)
    mean = sum(matrix.cost for matrix in found) / len(ranks)
    rows: list[tuple[str, ...]] = [("owner", "matrices", "numel", "of the mean cost", "which")]
    for rank in ranks:
        own = [matrix for matrix in found if matrix.owner == rank]
        where = ", ".join(f"{name}={i}" for (name, _), i in zip(spec.bound_mesh.sizes, rank, strict=True))
        share = f"{sum(matrix.cost for matrix in own) / mean:.2f}" if mean else "-"
        names = ", ".join(matrix.name for matrix in own[:3]) + (", ..." if len(own) > 3 else "")
        rows.append((where, f"{len(own):,}", f"{sum(matrix.param.numel for matrix in own):,}", share, names))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    names = {matrix.name for matrix in found}
    rest: Mapping[str, int] = {p.name: p.numel for unit in spec for p in unit.params if p.name not in names}
    others = ", ".join([*rest][:6]) + (", ..." if len(rest) > 6 else "")
    lines.append(f"no matrices: {len(rest):,} parameters, {sum(rest.values()):,} elements{': ' if rest else ''}{others}")
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
