"""stream_full: full parameters one after the other, in the memory of two buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from .. import _torch
from .._spec.byte_size import parse_bytes
from .._spec.checks import bind_spec, check_shards
from .._spec.spec import PartitionSpec, abridge
from .._spec.unit import Unit
from .._units.host import start_copy_to_host
from .._units.layout import rank_coords
from .._units.whole import join_pieces, split_whole
from ..collectives._mesh import Mesh
from ..collectives._sequence import SequenceCheck, get_host_group, is_comparable
from .gathers import find_gather_groups, find_result_dtype, gather_units

__all__ = ["copy_if_shared", "is_receiver", "stream_full"]

REMEDY = (
    "Expected all ranks to use parameters up to the same one: leave the loop where all ranks do, or with rank0_only=True, "
    "where the first rank alone may leave"
)
"""The advice in an error about ranks of which some left a stream earlier than others."""


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

    All ranks iterate to the same end. Units come in the order of their first parameter in the model. The tensors have no
    derivative, like those of `gather_full`. They may be views of a unit's buffer, which lives as long as one of them: clone
    those that you keep.

    Args:
        shards: As for `gather_full`. Do not modify them before the end.
        spec: The spec of the shards.
        bucket: Bytes, as a number or such as "512MiB". The peak is two buckets of full parameters, or two units if larger.
        dtype: The dtype of floating point parameters, instead of their own. The narrower of the two is sent.
        names: Names or globs of the parameters to give; by default all. Units without any are not gathered. A tied parameter
            comes once, under its first name, if any of its names matches.
        rank0_only: Only the mesh's first rank gets parameters. The others hold slices at most.
        offload_to_cpu: Give tensors in host memory.

    Raises:
        ValueError: As `gather_full`, and for a name or glob that matches nothing.
        RuntimeError: Inside a transform of torch.func; for a modified shard; where ranks stream different parameters. If they
            end early at different ones, the next call raises it.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2))
        >>> for name, tensor in fs.stream_full({"": torch.zeros(16)}, spec, names="*weight", dtype=torch.bfloat16):
        ...     print(name, list(tensor.shape), tensor.dtype)
        weight [2, 4] torch.bfloat16
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    units = check_shards(shards, spec, part=True)
    shards = dict(shards)
    size = parse_bytes(bucket, "bucket")
    if size <= 0:
        raise ValueError(f"bucket: expected a positive number of bytes, got {bucket!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):  # pyright: ignore
        raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
    if rank0_only and mesh.is_simulated:
        raise ValueError("stream_full: rank0_only on a simulated mesh: expected process groups; all ranks run the same code")
    if not mesh.is_simulated and not _torch.is_eager():
        raise RuntimeError(
            "stream_full inside a transform or a compiled function, which the stream could outlive: expected a call outside; "
            "unshard(params, spec) is differentiable, and gather_full returns values"
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
        used = 0
        try:
            for unit, buffer in gathers:
                used += 1
                if buffer is not None:
                    yield from _iter_params(buffer, shards[unit.key], unit, mesh, wanted[unit.key], dtype, offload_to_cpu)
            if is_receiver(mesh, rank0_only=rank0_only):
                for name in (name for name in ignored if name in chosen):
                    yield name, copy_if_shared(shards[name].detach(), shards[name], dtype, offload_to_cpu)
        finally:
            if rank0_only:  # the other ranks, which get nothing to stop at, send all of it
                deque(gathers, maxlen=0)
            gathers.close()  # what is in flight ends in the background, and the next gather waits for it
            if not rank0_only:
                _start_end_check(used, ordered, mesh)

    return stream()


def is_receiver(mesh: Mesh, *, rank0_only: bool) -> bool:
    """Return whether this rank gets parameters."""
    return not (rank0_only and any(rank_coords(mesh, None)))


def _match_names(names: str | Iterable[str] | None, units: Sequence[Unit], ignored: Collection[str]) -> set[str]:
    """Return the parameters, each by the first of its names, that a name or glob matches; ValueError if one matches none."""
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
    buffer: Tensor,
    shard: Tensor,
    unit: Unit,
    mesh: Mesh,
    names: Sequence[str],
    dtype: torch.dtype | None,
    offload_to_cpu: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named parameters of a unit, in this order. Each is computed when the caller asks for it."""
    with torch.no_grad():
        buffer = start_copy_to_host(buffer)() if offload_to_cpu else buffer
        pieces = split_whole(buffer, unit, mesh)
    sizes = dict(mesh.sizes)
    params = {param.name: (param, views) for param, views in zip(unit.params, pieces, strict=True)}
    for name in names:
        param, views = params[name]
        with torch.no_grad():
            tensor = copy_if_shared(join_pieces(views, param.local, sizes), shard, dtype)
        yield name, tensor


def copy_if_shared(tensor: Tensor, source: Tensor, dtype: torch.dtype | None, offload_to_cpu: bool = False) -> Tensor:
    """Return a tensor in ``dtype``, copied if it shares memory with ``source``."""
    with torch.no_grad():
        tensor = tensor.to("cpu" if offload_to_cpu else tensor.device, find_result_dtype(tensor.dtype, dtype))
        return tensor.clone() if _torch.shares_storage(tensor, source) else tensor


def _start_end_check(used: int, units: Sequence[Unit], mesh: Mesh) -> None:
    """Start to compare how many units each rank has used. The next call waits for it: this rank may be about to raise."""
    try:
        mesh.check_groups()
    except RuntimeError:  # the stream outlived its process groups
        return
    where = f"after {used} of {len(units)} units" + (f", the last one '{units[used - 1].key}'" if used else "")
    for group in filter(is_comparable, find_gather_groups(units, mesh)):
        SequenceCheck(get_host_group(group), [f"the end of stream_full {where}"], "ranks have ended a stream early", REMEDY)
