"""Gathers of whole units, on all ranks or to the mesh's first, that overlap with the use of the units before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._phases import phase
from .._spec.checks import compute_device
from .._spec.division import Reduction, count_ranks
from .._spec.unit import Unit
from .._units.chain import CollectiveChain, gather_step
from .._units.host import move
from .._units.layout import Params, rank_coords, view_as_bytes
from .._units.whole import decode_whole, gather_whole
from ..collectives._announce import announce
from ..collectives._mesh import Mesh, ProcessAxis
from ..collectives._sequence import check_sequence
from .agree import process_axes, process_group

__all__ = ["find_gather_groups", "find_result_dtype", "find_sent_dtype", "gather_to_first", "gather_units"]

PendingBuffer = Callable[[], Tensor | None]
"""A function that waits for a unit's whole buffer; it returns None on a rank that does not receive it."""


def gather_units(
    shards: Mapping[str, Tensor],
    units: Sequence[Unit],
    mesh: Mesh,
    *,
    to_first: bool,
    dtype: torch.dtype | None = None,
    limit: int = 0,
) -> Generator[tuple[Unit, Tensor | None]]:
    """Yield each unit and its whole buffer, and gather the next units meanwhile. A rank that does not receive gets None.

    A buffer may be the shard itself where nothing is gathered. Its dtype is ``dtype``, or the unit's own if that is narrower or
    not floating point. The unit in use, the one before, which the caller may still hold, and those in flight have at most
    ``limit`` bytes together, or are two units. In a transform or a compiler, each unit is gathered when it is asked for.

    Raises:
        RuntimeError: If ranks gather other units, or a shard was modified in place since the first one was asked for.
    """
    pieces = {unit.key: shards[unit.key] for unit in units}
    if not _torch.is_eager() or mesh.is_simulated or any(map(_torch.is_fake, pieces.values())):
        for unit in units:
            with torch.no_grad():
                piece = pieces[unit.key].detach().to(find_sent_dtype(pieces[unit.key], unit, dtype))
                buffer = gather_to_first(piece, unit, mesh) if to_first else _gather(piece, unit, mesh)
            yield unit, buffer
            del buffer
        return
    to = " to the first rank" if to_first else ""
    names = [f"gather of unit '{unit.key}'{to} in {find_sent_dtype(pieces[unit.key], unit, dtype)}" for unit in units]
    for group in find_gather_groups(units, mesh):
        check_sequence(names, group, pieces[units[0].key])
    versions = {key: _torch.version(piece) for key, piece in pieces.items()}
    sizes = [_estimate_peak_bytes(pieces[unit.key], unit, mesh, dtype, to_first=to_first) for unit in units]
    in_flight: deque[PendingBuffer] = deque()
    started = 0
    for i, unit in enumerate(units):
        while started <= i or (started < len(units) and sum(sizes[max(i - 1, 0) : started + 1]) <= limit):
            in_flight.append(_start_gather(pieces, versions, units[started], mesh, to_first=to_first, dtype=dtype))
            started += 1
        # without a name for the buffer: this frame must not hold what the caller lets go
        yield unit, _finish_gather(in_flight.popleft(), pieces, versions, unit)


def find_gather_groups(units: Sequence[Unit], mesh: Mesh) -> list[str]:
    """Return the names of the process groups over which these units are gathered."""
    used = {name for unit in units if unit.numel for name in unit.distinct_axes}
    return [axis.name for name, axis in process_axes(mesh).items() if name in used]


def find_result_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is returned: ``dtype`` if its own is a floating point one, else its own."""
    return own if dtype is None or not own.is_floating_point else dtype


def find_sent_dtype(piece: Tensor, unit: Unit, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a piece is sent: the narrower one of its own and ``dtype``; bytes at rest as they are."""
    result = piece.dtype if unit.at_rest else find_result_dtype(piece.dtype, dtype)
    return result if result.itemsize <= piece.itemsize else piece.dtype


def _estimate_peak_bytes(piece: Tensor, unit: Unit, mesh: Mesh, dtype: torch.dtype | None, *, to_first: bool) -> int:
    """Return the peak bytes of a unit: its buffer, the buffers that a gather makes on the way, and a copy of one parameter."""
    own = unit.dtype if unit.at_rest else find_sent_dtype(piece, unit, dtype)
    result = find_result_dtype(own, dtype)
    pieces = count_ranks(unit.local_axes, mesh)
    total = unit.padded_numel(count_ranks(unit.p.axes, mesh)) * pieces * own.itemsize
    gathered = piece.nbytes * count_ranks(unit.distinct_axes, mesh) if unit.at_rest else total
    if sizes := [size for name in unit.distinct_axes if (size := mesh[name].size) > 1][:-1]:
        total += gathered // sizes[0] + gathered // math.prod(sizes)  # what the inner axes gather, and a cast of the slice
    if unit.at_rest:
        total += gathered
    elif to_first and own != piece.dtype:  # other gathers cast as they write the buffer
        total += piece.numel() * own.itemsize
    if unit.local_axes or result != own:
        total += max(param.numel for param in unit.params) * pieces * result.itemsize
    return total


# --- One unit. ---


def _start_gather(
    pieces: Params, versions: Mapping[str, int], unit: Unit, mesh: Mesh, *, to_first: bool, dtype: torch.dtype | None
) -> PendingBuffer:
    """Start to gather a unit, on all ranks or to the first; raise RuntimeError if its shard was modified."""
    piece = pieces[unit.key]
    _check_unmodified(piece, unit, versions)
    with torch.no_grad(), phase("gather", unit.key):
        piece, sent = piece.detach(), find_sent_dtype(piece, unit, dtype)
        return _start_gather_to_first(piece.to(sent), unit, mesh) if to_first else _start_gather_on_all(piece, sent, unit, mesh)


def _finish_gather(pending: PendingBuffer, pieces: Params, versions: Mapping[str, int], unit: Unit) -> Tensor | None:
    """Wait for a unit's whole buffer; raise RuntimeError if its shard was modified meanwhile."""
    with torch.no_grad():
        buffer = pending()
    _check_unmodified(pieces[unit.key], unit, versions)
    return buffer


def _check_unmodified(piece: Tensor, unit: Unit, versions: Mapping[str, int]) -> None:
    """Raise RuntimeError if the shard was modified in place since its version was noted."""
    if _torch.version(piece) != versions[unit.key]:
        raise RuntimeError(
            f"the shard of unit '{unit.key}' was modified in place before its parameters were used, and those of other units "
            "are older: expected the same values until the last unit is gathered; let an update with donate=True wait for "
            "that, or give copies of the shards"
        )


def _gather(piece: Tensor, unit: Unit, mesh: Mesh) -> Tensor:
    """Gather a unit as data flow, for transforms and simulated ranks."""
    return gather_whole(piece, unit, mesh, Reduction(), check_order=True)


def _start_gather_on_all(piece: Tensor, dtype: torch.dtype, unit: Unit, mesh: Mesh) -> PendingBuffer:
    """Start to gather a unit on all ranks, in this dtype, into one buffer. Without it gloo allocates another of its size."""
    axes = [(name, axis) for name in unit.distinct_axes if isinstance(axis := mesh[name], ProcessAxis) and axis.size > 1]
    axes = axes if unit.numel else []
    piece = move(piece, compute_device(unit, mesh), dtype if len(axes) != 1 else piece.dtype)
    ranks = count_ranks((name for name, _ in axes), mesh)
    buffer = piece.new_empty(len(piece) * ranks, dtype=dtype) if axes else None
    steps = [gather_step(axis, f"unit '{unit.key}' over '{name}'") for name, axis in reversed(axes)]
    chain = CollectiveChain(piece, steps, buffer)  # a single gather casts as it writes its own slice
    return lambda: decode_whole(chain.result(), unit, mesh)


# --- To the first rank: data movement, below autograd, over c10d's own collectives. ---


def gather_to_first(piece: Tensor, unit: Unit, mesh: Mesh) -> Tensor | None:
    """Return the unit's whole buffer on the mesh's first rank; None on the others, which allocate nothing."""
    return _start_gather_to_first(piece, unit, mesh)()


def _start_gather_to_first(piece: Tensor, unit: Unit, mesh: Mesh) -> PendingBuffer:
    """Start to gather a unit on the mesh's first rank."""
    at = dict(zip(mesh.names, rank_coords(mesh, None), strict=True))
    piece = piece.to(compute_device(unit, mesh) or piece.device)
    if any(at[name] for name in mesh.names if name not in unit.distinct_axes):
        return lambda: None  # another replica
    return _start_gather_along([*reversed(unit.distinct_axes)], piece, unit, mesh)


def _start_gather_along(names: Sequence[str], piece: Tensor, unit: Unit, mesh: Mesh) -> PendingBuffer:
    """Start to gather to the first rank along the first of these axes. Waiting for it gathers along the others."""
    if not names:
        return lambda: decode_whole(piece, unit, mesh)
    axis, group = process_group(mesh, names[0])
    if group is None:
        return _start_gather_along(names[1:], piece, unit, mesh)
    raw = view_as_bytes(piece)
    rows = raw.new_empty(axis.size, len(raw)) if axis.rank == 0 else None
    announce("gather to the first rank", group.group_name, f"unit '{unit.key}' over '{names[0]}'", raw)
    work = dist.gather(raw, None if rows is None else list(rows), group=group, group_dst=0, async_op=True)

    def finish() -> Tensor | None:
        if work is not None:
            work.wait()
        if rows is None:
            return None
        return _start_gather_along(names[1:], rows.flatten().view(piece.dtype), unit, mesh)()

    return finish
