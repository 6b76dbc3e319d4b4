"""Which rank owns each matrix, and which matrices are sent together: arithmetic with the same result on every rank."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..._spec.division import count_ranks
from ..._spec.spec import PartitionSpec
from .selection import Matrix, Owner

__all__ = [
    "all_coords",
    "assign_owners",
    "batch_matrices",
    "count_chunks",
    "format_owners",
    "largest_unit_numel",
]

WORKSPACE_FACTOR = 3
"""A batch needs up to this many times its size while its owners compute, because of the iteration's products.

Results on their way back may need as much again.
"""


def all_coords(spec: PartitionSpec) -> list[tuple[int, ...]]:
    """Return the coordinates of all ranks of the mesh, in row-major order."""
    return [*itertools.product(*(range(size) for _, size in spec.bound_mesh.sizes))]


def assign_owners(found: Sequence[Matrix], batches: Sequence[Sequence[int]], spec: PartitionSpec) -> list[Matrix]:
    """Return the matrices with owners: the costliest first, each to the rank with the least work (LPT; Graham, 1969).

    A tie goes to the rank with the least work in the matrix's batch, so that the ranks of a batch compute at the same time.
    """
    batch_of = {i: number for number, batch in enumerate(batches) for i in batch}
    candidates = {axes: _map_owners_to_ranks(axes, spec) for axes in {matrix.stack_axes for matrix in found}}
    loads = dict.fromkeys(all_coords(spec), 0.0)
    load_in_batch: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    owners: dict[int, Owner] = {}
    for i in sorted(range(len(found)), key=lambda i: (-found[i].cost, i)):
        batch = batch_of[i]

        def load(item: tuple[Owner, list[tuple[int, ...]]]) -> tuple[Any, ...]:
            owner, ranks = item
            return max(loads[rank] for rank in ranks), max(load_in_batch[batch, rank] for rank in ranks), owner  # noqa: B023

        owners[i], ranks = min(candidates[found[i].stack_axes].items(), key=load)
        for rank in ranks:
            loads[rank] += found[i].cost
            load_in_batch[batch, rank] += found[i].cost
    return [matrix._replace(owner=owners[i]) for i, matrix in enumerate(found)]


def _map_owners_to_ranks(stack_axes: tuple[str, ...], spec: PartitionSpec) -> dict[Owner, list[tuple[int, ...]]]:
    """Return the ranks of each possible owner of a matrix: several ranks if its stack is split over axes."""
    free = [name in stack_axes for name in spec.bound_mesh.names]
    out: dict[Owner, list[tuple[int, ...]]] = {}
    for rank in all_coords(spec):
        out.setdefault(tuple(None if is_free else at for is_free, at in zip(free, rank, strict=True)), []).append(rank)
    return out


def batch_matrices(found: Sequence[Matrix], spec: PartitionSpec) -> list[list[int]]:
    """Return indices of the matrices in batches: neighbours with one `_batch_key`, up to the memory of all ranks."""
    room = len(all_coords(spec)) * largest_unit_numel(found)
    out: list[list[int]] = []
    numel = 0
    for i, matrix in enumerate(found):
        of_all_owners = matrix.numel * count_ranks(matrix.stack_axes, spec.bound_mesh)
        before = found[out[-1][-1]] if out else None
        alike = before is not None and _batch_key(before) == _batch_key(matrix)
        if not alike or WORKSPACE_FACTOR * (numel + of_all_owners) > room:
            out.append([])
            numel = 0
        out[-1].append(i)
        numel += of_all_owners
    return out


def count_chunks(batch: Sequence[Matrix], spec: PartitionSpec, max_numel: int) -> int:
    """Return the number of chunks in which a batch returns, so that a rank holds at most ``max_numel`` elements of it at once.

    Each replica sends its results to all others, so more replicas receive more. Within one replica no more elements come back
    than went to the owners.
    """
    replica_axes = [i for i, name in enumerate(spec.bound_mesh.names) if name not in batch[0].unit.distinct_axes]
    slices = count_ranks(batch[0].split_axes, spec.bound_mesh)
    ranks = len(all_coords(spec)) // count_ranks(batch[0].stack_axes, spec.bound_mesh)
    if slices == ranks:
        return 1
    of_replica: dict[Owner, int] = {}
    for matrix in batch:
        replica = tuple(matrix.owner[i] for i in replica_axes)
        of_replica[replica] = of_replica.get(replica, 0) + matrix.numel
    sent = ranks // slices * max(of_replica.values())
    received = 2 * sum(of_replica.values())  # and put in order
    # Beside the results, which stay until the last of them is sent.
    room = slices * max_numel * (WORKSPACE_FACTOR - 1) / WORKSPACE_FACTOR
    return math.ceil((sent + received) / room)


def largest_unit_numel(found: Sequence[Matrix]) -> int:
    """Return the number of elements of the largest unit that has matrices."""
    return max((matrix.unit.numel for matrix in found), default=0)


def _batch_key(matrix: Matrix) -> tuple[object, ...]:
    """Return the key that matrices sent together share: axes of pieces and of slices, dtype, whether they are on the host."""
    unit = matrix.unit
    return unit.local_axes, unit.p.axes, matrix.stack_axes, unit.dtype, "params" in unit.p.offloads


def format_owners(found: Sequence[Matrix], spec: PartitionSpec) -> str:
    """Return a table with a row for each rank: its matrices, their elements and relative cost; then the other parameters."""
    ranks = all_coords(spec)
    mean = sum(matrix.cost * count_ranks(matrix.stack_axes, spec.bound_mesh) for matrix in found) / len(ranks)
    rows: list[tuple[str, ...]] = [("owner", "matrices", "numel", "of the mean cost", "which")]
    for rank in ranks:
        own = [matrix for matrix in found if matrix.is_owned_by(rank)]
        where = ", ".join(f"{name}={i}" for (name, _), i in zip(spec.bound_mesh.sizes, rank, strict=True))
        share = f"{sum(matrix.cost for matrix in own) / mean:.2f}" if mean else "-"
        names = ", ".join(matrix.name for matrix in own[:3]) + (", ..." if len(own) > 3 else "")
        rows.append((where, f"{len(own):,}", f"{sum(matrix.numel for matrix in own):,}", share, names))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    names = {matrix.name for matrix in found}
    fallback: Mapping[str, int] = {p.name: p.numel for unit in spec for p in unit.params if p.name not in names}
    others = ", ".join([*fallback][:6]) + (", ..." if len(fallback) > 6 else "")
    lines.append(
        f"no matrices: {len(fallback):,} parameters, {sum(fallback.values()):,} elements{': ' if fallback else ''}{others}"
    )
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
