"""gather_full, scatter_full: full parameters leaving and entering, unit by unit; the functional summon_full_params."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .._spec.checks import bind_spec, check_full, check_shards
from .._spec.division import count_ranks
from .._spec.spec import PartitionSpec, log_spec
from .._spec.unit import Unit
from .._units.flow import encode_at_rest
from .._units.host import place_slice, start_copy_to_host
from .._units.layout import Params, rank_coords, view_as_bytes
from .._units.whole import flatten_whole, unflatten_whole
from ..collectives._announce import announce
from ..collectives._mesh import Mesh
from .agree import broadcast_text, has_peers, process_group
from .gathers import gather_units
from .stream import copy_if_shared, is_receiver

__all__ = ["gather_full", "scatter_full"]


def gather_full(
    shards: Mapping[str, Tensor], spec: PartitionSpec, *, rank0_only: bool = False, offload_to_cpu: bool = False
) -> Params:
    """Return the full parameters by name, gathered unit by unit, each a tensor of its own without gradient.

    As summon_full_params, in the order of ``model.named_parameters()``. `scatter_full` writes them back, and `stream_full`
    iterates over them without holding all.

    Args:
        shards: Anything sharded like the parameters, or a part of it: gradients, optimizer state. Ignored ones are copied.
        spec: The spec of the shards.
        rank0_only: Only the mesh's first rank gets them; the others get ``{}`` and allocate nothing.
        offload_to_cpu: Move each unit to host memory before the next is gathered: the device holds one unit.

    Raises:
        ValueError: As `unshard`, and for ``rank0_only`` on a simulated mesh, where all ranks run as one.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.gather_full({"": torch.arange(8.0)}, spec)
        {'weight': tensor([[0., 1., 2., 3.],
                [4., 5., 6., 7.]])}
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    units = check_shards(shards, spec, part=True)
    if rank0_only and mesh.is_simulated:
        raise ValueError("gather_full: rank0_only on a simulated mesh: expected process groups; all ranks run the same code")
    full: Params = {}
    waiting: Callable[[], Params] = dict
    for unit, buffer in gather_units(shards, units, mesh, to_first=rank0_only):
        copies = _copy_params(buffer, unit, mesh, offload_to_cpu)
        del buffer  # before the next unit is gathered
        full |= waiting()  # the one before, while this one is copied
        waiting = copies
    if is_receiver(mesh, rank0_only=rank0_only):
        full |= {
            name: copy_if_shared(shards[name], shards[name], None, offload_to_cpu) for name in spec.ignored if name in shards
        }
    return spec._to_model_order(full | waiting())


def _copy_params(buffer: Tensor | None, unit: Unit, mesh: Mesh, offload_to_cpu: bool) -> Callable[[], Params]:
    """Copy a gathered unit's parameters. From a device to the host this is one copy, for which the returned function waits."""
    if buffer is None:
        return dict
    if offload_to_cpu and buffer.device.type != "cpu":
        copy = start_copy_to_host(buffer)
        return lambda: _clone_params(copy(), unit, mesh)
    copies = _clone_params(buffer, unit, mesh)
    return lambda: copies


def _clone_params(buffer: Tensor, unit: Unit, mesh: Mesh) -> Params:
    """Return each parameter as a tensor of its own: one that shares memory with others cannot be saved by itself."""
    return {param.name: t.clone() for param, t in zip(unit.params, unflatten_whole(buffer, unit, mesh), strict=True)}


def scatter_full(full: Mapping[str, Tensor] | None, spec: PartitionSpec, *, src: int = 0) -> Params:
    """Return the shards of the full parameters on one rank. Inverse of ``gather_full(..., rank0_only=True)``.

    Only slices travel: a scatter over the sharded axes, a broadcast over the replicated ones.

    Args:
        full: On rank ``src`` the full parameters by name; None on the others.
        spec: The spec of the shards, which have its dtypes and its mesh's device.
        src: A rank of the mesh.

    Raises:
        ValueError: On *every* rank if the parameters do not fit the spec, before any of them is sent.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.scatter_full({"weight": torch.arange(8.0).view(2, 4)}, spec)
        {'': tensor([0., 1., 2., 3., 4., 5., 6., 7.])}
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    if mesh.is_simulated:
        raise ValueError("scatter_full on a simulated mesh: expected process groups; use shard(full, spec) there")
    source, here = rank_coords(mesh, src), rank_coords(mesh, None)
    error = _source_error(full, spec) if source == here else ""
    device = mesh.device or torch.device("cpu")
    error = broadcast_text(error, mesh, source, device)
    if error:
        raise ValueError(f"scatter_full: rank {src} holds other parameters than the spec's: {error}")
    log_spec(spec)
    out: Params = {}
    for unit in spec:
        buffer = None
        if source == here:
            assert full is not None
            buffer = flatten_whole(full, unit, spec).detach()
            buffer = buffer.to(device) if mesh.device or has_peers(mesh) else buffer
        out[unit.key] = place_slice(encode_at_rest(_scatter_from(buffer, unit, spec, mesh, source, device), unit), unit, mesh)
    return out


# --- Scatters from one rank: data movement, below autograd, over c10d's own collectives. ---


def _scatter_from(
    buffer: Tensor | None, unit: Unit, spec: PartitionSpec, mesh: Mesh, source: tuple[int, ...], device: torch.device
) -> Tensor:
    """Scatter the source's buffer along the sharded axes, then broadcast along the replicated ones."""
    numel = spec.padded_numel(unit) * count_ranks(unit.local_axes, mesh)
    here, want = (dict(zip(mesh.names, c, strict=True)) for c in (rank_coords(mesh, None), source))
    rest = list(mesh.names)
    for name in (*unit.distinct_axes, *(n for n in mesh.names if n not in unit.distinct_axes)):
        axis, group = process_group(mesh, name)
        rest.remove(name)
        split = name in unit.distinct_axes
        numel = numel // axis.size if split else numel
        # In this step those take part that the source's data has reached, or reaches now: they sit where the source
        # sits on every axis still to come.
        if group is None or any(here[n] != want[n] for n in rest):
            continue
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


def _source_error(full: Mapping[str, Tensor] | None, spec: PartitionSpec) -> str:
    """Return why a source's parameters cannot be sharded; an empty string if they can."""
    if full is None and not len(spec):
        return ""  # full or None, of a model without parameters
    if full is None:
        return "expected a dict of full parameters, got None"
    if not isinstance(full, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"expected a dict of full parameters, got {type(full).__name__}"
    for name, tensor in full.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = "a meta tensor" if isinstance(tensor, Tensor) else type(tensor).__name__  # pyright: ignore
            return f"parameter '{name}': expected a tensor with data, got {kind}"
    try:
        check_full(full, spec, whole=True)
    except (ValueError, TypeError) as error:
        return str(error)
    for name, tensor in full.items():
        if name in spec.by_name and tensor.dtype != spec.by_name[name][1].dtype:
            return f"parameter '{name}': expected {spec.by_name[name][1].dtype}, got {tensor.dtype}"
    return ""
