"""Full parameters, leaving unit by unit by stream_full and gather_stored, and entering from one rank."""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec, check_shards
from .._core.flow import Reduction, count_ranks
from .._core.layout import Params, rank_coords
from .._core.mesh import Mesh, ProcessAxis, has_peers, process_axes
from .._core.ops import PendingResult, announce
from .._core.spec import PartitionSpec, abridge
from .._core.unit import Unit
from .._torch.tracing import phase
from .._wire.chain import CollectiveChain
from .._wire.flow import apply_options, decode_global, flatten_global, join_pieces, split_global, unshard_global
from .._wire.host import check_host_resident, compute_device, copy_to_host, move
from .._wire.mixed_layout import view_as_bytes
from .._wire.stages import AllGather, Names, StartStep
from ..collectives._agree import check_sequence

# --- Gathers of whole units that overlap with the use of the units before ---


def gather_units(
    shards: Mapping[str, Tensor],
    units: Sequence[Unit],
    mesh: Mesh,
    *,
    to_first: bool = False,
    dtype: torch.dtype | None = None,
    limit: int = 0,
) -> Generator[tuple[Unit, Tensor | None]]:
    """Yield each unit and its whole buffer as stored, None where it goes ``to_first`` alone, and gather the next meanwhile.

    A buffer may be the shard itself where nothing is gathered. Its dtype is ``dtype``, or the unit's own if that is narrower or
    not floating point. The unit in use, the one before, which the caller may still hold, and those in flight have at most
    ``limit`` bytes together, or are two units. In a transform or a compiler, each unit is gathered when it is asked for, on
    all ranks.

    Raises:
        RuntimeError: If ranks gather other units, or a shard was modified in place since the first one was asked for.
    """
    pieces = {unit.key: shards[unit.key].detach() for unit in units}
    sent = {unit.key: find_sent_dtype(pieces[unit.key], unit, dtype) for unit in units}
    at = dict(zip(mesh.names, rank_coords(mesh, None), strict=True)) if to_first else {}
    if not _torch.is_eager() or mesh.is_simulated or any(map(_torch.is_fake, pieces.values())):
        for unit in units:
            with torch.no_grad():
                piece = pieces[unit.key].to(sent[unit.key])
                buffer = unshard_global(piece, unit, mesh, Reduction(), check_order=True, as_stored=True)
            yield unit, None if any(at.values()) else buffer
            del buffer
        return
    to = " to the first rank" if to_first else ""
    names = [f"gather of unit '{unit.key}'{to} in {sent[unit.key]}" for unit in units]
    for group in find_gather_groups(units, mesh):
        check_sequence(names, group, pieces[units[0].key])
    versions = {key: _torch.version(piece) for key, piece in pieces.items()}
    sizes = [_estimate_peak_bytes(pieces[unit.key], unit, mesh, dtype, to_first=to_first) for unit in units]
    in_flight: deque[Callable[[], Tensor | None]] = deque()
    started = 0

    def check_unmodified(unit: Unit) -> None:
        if _torch.version(pieces[unit.key]) != versions[unit.key]:
            raise RuntimeError(
                f"the shard of unit '{unit.key}' was modified in place before its parameters were used, and those of other "
                "units are older: expected the same values until the last unit is gathered; let an update with donate=True "
                "wait for that, or give copies of the shards"
            )

    for i, unit in enumerate(units):
        while started <= i or (started < len(units) and sum(sizes[max(i - 1, 0) : started + 1]) <= limit):
            following, started = units[started], started + 1
            check_unmodified(following)
            in_flight.append(_start_gather(pieces[following.key], sent[following.key], following, mesh, at))
        buffer = in_flight.popleft()()
        check_unmodified(unit)
        yield unit, buffer
        del buffer


def find_gather_groups(units: Sequence[Unit], mesh: Mesh) -> list[str]:
    """Return the names of the process groups over which these units are gathered."""
    used = {name for unit in units if unit.numel for name in unit.distinct_axes}
    return [axis.name for name, axis in process_axes(mesh).items() if name in used]


def find_result_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is returned: ``dtype`` if its own is a floating point one, else its own."""
    return own if dtype is None or not own.is_floating_point else dtype


def find_sent_dtype(piece: Tensor, unit: Unit, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a piece is sent: the narrower one of its own and ``dtype``; bytes at rest as they are."""
    result = piece.dtype if unit.is_encoded else find_result_dtype(piece.dtype, dtype)
    return result if result.itemsize <= piece.itemsize else piece.dtype


def _estimate_peak_bytes(piece: Tensor, unit: Unit, mesh: Mesh, dtype: torch.dtype | None, *, to_first: bool) -> int:
    """Return the peak bytes of a unit: its buffer, the buffers that a gather makes on the way, and a copy of one parameter."""
    own = unit.dtype if unit.is_encoded else find_sent_dtype(piece, unit, dtype)
    result = find_result_dtype(own, dtype)
    pieces = count_ranks(unit.local_axes, mesh)
    total = unit.padded_numel(count_ranks(unit.p.axes, mesh)) * pieces * own.itemsize
    gathered = piece.nbytes * count_ranks(unit.distinct_axes, mesh) if unit.is_encoded else total
    if sizes := [size for name in unit.distinct_axes if (size := mesh[name].size) > 1][:-1]:
        total += gathered // sizes[0] + gathered // math.prod(sizes)  # what the inner axes gather, and a cast of the slice
    if unit.is_encoded:
        total += gathered
    elif to_first and own != piece.dtype:  # other gathers cast as they write the buffer
        total += piece.numel() * own.itemsize
    if unit.local_axes or result != own:
        total += max(param.numel for param in unit.params) * pieces * result.itemsize
    return total


def _start_gather(
    piece: Tensor, dtype: torch.dtype, unit: Unit, mesh: Mesh, at: Mapping[str, int]
) -> Callable[[], Tensor | None]:
    """Start to gather a unit in this dtype; return the wait for its buffer.

    ``at`` are the coordinates of this rank where the first one alone gets it, and the others None: then no rank allocates more
    than it gathers along inner axes. A single gather on all ranks casts as it writes its own slice.
    """
    if any(at[name] for name in at if name not in unit.distinct_axes):
        return lambda: None  # another replica
    axes = [name for name in reversed(unit.distinct_axes) if mesh[name].size > 1 and unit.numel]
    names = Names(unit.key, f"unit '{unit.key}'")
    with torch.no_grad(), phase("gather", unit.key):
        if at:
            sends = next((i for i, name in enumerate(axes) if at[name]), len(axes))  # after which it gets nothing more
            steps = [_gather_to_first(mesh, name, names) for name in axes[: sends + 1]]
        else:
            steps = [AllGather.on_axis(name, mesh, "mean").start(names) for name in axes]
        piece = move(piece, compute_device(unit, mesh), piece.dtype if len(axes) == 1 and not at else dtype)
        # without it gloo allocates another one of its size
        buffer = piece.new_empty(len(piece) * count_ranks(axes, mesh), dtype=dtype) if axes and not at else None
        chain = CollectiveChain(piece, steps, buffer)

    def finish() -> Tensor | None:
        with torch.no_grad():
            gathered = chain.result()
            return None if any(at.values()) else decode_global(gathered, unit, mesh)

    return finish


def _gather_to_first(mesh: Mesh, name: str, names: Names) -> StartStep:
    """Return the function that starts a gather along an axis to its first rank, below autograd, by c10d's own collective."""
    axis = mesh[name]
    assert isinstance(axis, ProcessAxis)
    group = _torch.resolve_group(axis.name)

    def start(x: Tensor, _: Tensor | None) -> PendingResult:
        raw = view_as_bytes(x)
        rows = raw.new_empty(axis.size, len(raw)) if axis.rank == 0 else None
        announce("gather to the first rank", group.group_name, f"{names.label} over '{name}'", raw)
        work = dist.gather(raw, None if rows is None else list(rows), group=group, group_dst=0, async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            return raw if rows is None else rows.flatten().view(x.dtype)

        return PendingResult((), finish)

    return start


# --- stream_full: full parameters one after the other, in the memory of two buckets ---


def stream_full(
    shards: Mapping[str, Tensor],
    spec: PartitionSpec,
    *,
    bucket: float | str = "1GB",
    dtype: torch.dtype | None = None,
    names: str | Iterable[str] | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Generator[tuple[str, Tensor]]:
    """Return an iterator over the full parameters, as ``(name, tensor)``, that gathers ahead.

    All ranks iterate. One that ends early gathers the rest all the same: choose a part by ``names``. Units come in the order
    of their first parameter in the model. The tensors have no derivative. They may be views of a unit's buffer, which lives
    as long as one of them: clone those that you keep.

    Args:
        shards: As for `unshard`. Do not modify them before the end.
        spec: The spec of the shards.
        bucket: Bytes, as a number or such as "512MiB". The peak is two buckets of full parameters, or two units if larger.
        dtype: The dtype of floating point parameters, instead of their own. The narrower of the two is sent.
        names: Names or globs of the parameters to give; by default all. A tied parameter comes once, under its first name.
        rank0_only: Only the mesh's first rank gets parameters. The others hold slices at most.
        offload_to_cpu: Give tensors in host memory.

    Raises:
        ValueError: As `unshard`, and for a name or glob that matches nothing.
        RuntimeError: Inside a transform of torch.func; for a modified shard; where ranks stream different parameters.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2))
        >>> for name, tensor in fs.stream_full({"": torch.zeros(16)}, spec, names="*weight", dtype=torch.bfloat16):
        ...     print(name, list(tensor.shape), tensor.dtype)
        weight [2, 4] torch.bfloat16
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    units = check_shards(shards, spec)
    check_host_resident(shards, spec)
    shards = dict(shards)
    size = parse_bytes(bucket, "bucket")
    if size <= 0:
        raise ValueError(f"bucket: expected a positive number of bytes, got {bucket!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):  # pyright: ignore
        raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
    receives = is_receiver(mesh, rank0_only=rank0_only)
    if not mesh.is_simulated and not _torch.is_eager():
        raise RuntimeError(
            "stream_full inside a transform or a compiled function, which the stream could outlive: expected a call outside; "
            "unshard(params, spec) is differentiable"
        )
    if (meta := next((unit for unit in units if shards[unit.key].is_meta), None)) is not None:
        raise ValueError(f"stream_full: the shard of unit '{meta.key}' is on the meta device: expected values")
    ignored = [name for name in spec.ignored if name in shards]
    chosen = _match_names(names, units, ignored)
    place = {name: i for i, name in enumerate(dict.fromkeys((*spec.names, *spec.by_name, *ignored)))}
    wanted = {unit.key: sorted(chosen & {param.name for param in unit.params}, key=place.__getitem__) for unit in units}
    first = {unit.key: min(place[param.name] for param in unit.params) for unit in units}
    ordered = sorted((unit for unit in units if wanted[unit.key]), key=lambda unit: first[unit.key])

    def stream() -> Generator[tuple[str, Tensor]]:
        gathers = gather_units(shards, ordered, mesh, to_first=rank0_only, dtype=dtype, limit=2 * size)
        try:
            for unit, buffer in gathers:
                if buffer is not None:
                    buffer = apply_options(buffer, unit, mesh)
                    yield from _iter_params(buffer, shards[unit.key], unit, mesh, wanted[unit.key], dtype, offload_to_cpu)
            for name in (name for name in ignored if receives and name in chosen):
                yield name, copy_if_shared(shards[name].detach(), shards[name], dtype, offload_to_cpu)
        finally:
            if find_gather_groups(ordered, mesh):
                deque(gathers, maxlen=0)  # a rank that ends early sends the rest to those that do not

    return stream()


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(size: float | str, what: str = "memory") -> int:
    """Return a number of bytes from "80GB", "512MiB" or a number.

    Raises:
        ValueError: For anything else, naming what has this size.
    """
    if not isinstance(size, str):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # None, NaN, infinity
            return int(size)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?I?)B?\s*", str(size).upper())
    if not isinstance(size, str) or match is None or match[2] not in _UNITS:
        raise ValueError(f"{what}: expected a number of bytes such as '80GB' or '512MiB', got {size!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def is_receiver(mesh: Mesh, *, rank0_only: bool) -> bool:
    """Return whether this rank gets parameters. ValueError for ``rank0_only`` on simulated ranks, which all run one code."""
    if rank0_only and mesh.is_simulated:
        raise ValueError("rank0_only on a simulated mesh: expected process groups; all ranks run the same code")
    return not (rank0_only and any(rank_coords(mesh, None)))


def _match_names(names: str | Iterable[str] | None, units: Sequence[Unit], ignored: Collection[str]) -> set[str]:
    every = {param.name: param.names for unit in units for param in unit.params} | {name: (name,) for name in ignored}
    if names is None:
        return {*every}
    chosen: set[str] = set()
    for glob in [names] if isinstance(names, str) else names:
        found = {name for name, aliases in every.items() if any(alias == glob or fnmatchcase(alias, glob) for alias in aliases)}
        if not found:
            raise ValueError(f"names: '{glob}' matches no parameter of these shards: expected some of {abridge(every)}")
        chosen |= found
    return chosen


def _iter_params(
    buffer: Tensor, source: Tensor | None, unit: Unit, mesh: Mesh, names: Sequence[str], dtype: torch.dtype | None, to_cpu: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named parameters of a unit's buffer, in this order. Each is computed when the caller asks for it.

    They share no memory with ``source``, and with None none at all: one that shares memory cannot be saved by itself.
    """
    with torch.no_grad():
        buffer = copy_to_host(buffer) if to_cpu else buffer
        pieces = split_global(buffer, unit, mesh)
    sizes = dict(mesh.sizes)
    params = {param.name: (param, views) for param, views in zip(unit.params, pieces, strict=True)}
    for name in names:
        param, views = params[name]
        with torch.no_grad():
            tensor = join_pieces(views, param.local, sizes)
            tensor = tensor.clone() if source is None else copy_if_shared(tensor, source, dtype)
        yield name, tensor


def copy_if_shared(tensor: Tensor, source: Tensor, dtype: torch.dtype | None, offload_to_cpu: bool = False) -> Tensor:
    """Return a tensor in ``dtype``, copied if it shares memory with ``source``."""
    with torch.no_grad():
        tensor = tensor.to("cpu" if offload_to_cpu else tensor.device, find_result_dtype(tensor.dtype, dtype))
        return tensor.clone() if _torch.shares_storage(tensor, source) else tensor


# --- All full parameters at once, and from one rank ---


def gather_stored(
    shards: Mapping[str, Tensor],
    spec: PartitionSpec,
    then: Callable[[Tensor, Unit, Mesh], Tensor] = lambda buffer, *_: buffer,
    *,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Params:
    """Gather parameters, optimizer state or other vectors unit by unit: values without gradient, each in its own memory.

    ``then`` makes of each unit's buffer what options compute with. Units move to the host before the next one is gathered.
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    units = check_shards(shards, spec)
    check_host_resident(shards, spec)
    receives = is_receiver(mesh, rank0_only=rank0_only)
    full: Params = {}
    for unit, buffer in gather_units(shards, units, mesh, to_first=rank0_only):
        if buffer is not None:
            names = [param.name for param in unit.params]
            full |= dict(_iter_params(then(buffer, unit, mesh), None, unit, mesh, names, None, offload_to_cpu))
        del buffer  # before the next unit is gathered
    for name in (name for name in spec.ignored if receives and name in shards):
        full[name] = copy_if_shared(shards[name], shards[name], None, offload_to_cpu)
    return spec._to_model_order(full)


def check_source(full: Mapping[str, Tensor], spec: PartitionSpec) -> None:
    """Raise ValueError unless full parameters have data, and the spec's dtypes, in which the other ranks receive them."""
    for name in filter(spec.by_name.__contains__, full):
        if full[name].is_meta:
            raise ValueError(f"parameter '{name}': expected a tensor with data, got a meta tensor")
        if full[name].dtype != (dtype := spec.by_name[name][1].dtype):
            raise ValueError(f"parameter '{name}': expected {dtype}, got {full[name].dtype}")


def scatter_from(full: Mapping[str, Tensor] | None, unit: Unit, spec: PartitionSpec, src: int) -> Tensor:
    """Return this rank's slice of a unit of the full parameters on one rank of the mesh; None on the others.

    Only slices travel: a scatter over the sharded axes, a broadcast over the replicated ones.
    """
    mesh = spec.bound_mesh
    device = mesh.device or torch.device("cpu")
    buffer = None
    if full is not None:
        buffer = flatten_global(full, unit, spec).detach()
        buffer = buffer.to(device) if mesh.device or has_peers(mesh) else buffer
    numel = spec.padded_numel(unit) * count_ranks(unit.local_axes, mesh)
    here, want = (dict(zip(mesh.names, rank_coords(mesh, rank), strict=True)) for rank in (None, src))
    rest = list(mesh.names)
    for name in (*unit.distinct_axes, *(n for n in mesh.names if n not in unit.distinct_axes)):
        axis, split = mesh[name], name in unit.distinct_axes
        rest.remove(name)
        numel = numel // axis.size if split else numel
        # In this step those take part that the source's data has reached, or reaches now: they sit where the source
        # sits on every axis still to come.
        if not isinstance(axis, ProcessAxis) or axis.size == 1 or any(here[n] != want[n] for n in rest):
            continue
        group = _torch.resolve_group(axis.name)
        out = torch.empty(numel, dtype=unit.dtype, device=device)
        announce("scatter" if split else "broadcast", group.group_name, f"unit '{unit.key}' over '{name}'", out)
        if split:
            whole = None if buffer is None or here[name] != want[name] else view_as_bytes(buffer)
            pieces = None if whole is None else list(whole.view(axis.size, len(whole) // axis.size))
            dist.scatter(view_as_bytes(out), pieces, group=group, group_src=want[name])
        else:
            out = buffer if buffer is not None else out
            dist.broadcast(view_as_bytes(out), group=group, group_src=want[name])
        buffer = out
    assert buffer is not None
    return buffer
