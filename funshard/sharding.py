"""shard, unshard, reshard, gather_full, scatter_full: parameters on their way between full and sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _torch
from .collectives import Reduce, all_gather, scatter, vary
from .layout import Params, check_buffers, coordinates, flatten, flatten_unit, unflatten_unit
from .mesh import Group, Mesh, Simulated
from .spec import PartitionSpec, Unit
from .tree import Param

__all__ = [
    "combine",
    "gather_full",
    "gather_unit",
    "partition",
    "reshard",
    "scatter_full",
    "scatter_unit",
    "shard",
    "unshard",
]


def shard(model_or_params: nn.Module | Mapping[str, Tensor], spec: PartitionSpec, *, rank: int | None = None) -> Params:
    """This rank's 1-D slice of every unit, by unit key. Inverse of `unshard`.

    From a module, whose parameters it copies and leaves alone, or from full parameters by name (then differentiable,
    its transpose gathers). On the device of the mesh; ``spec.shard_numel(unit)`` elements of the tensors' own dtype.
    With an unbound spec the whole world is one axis "shard". ``rank`` gives another rank's shards, counted over the
    mesh row by row.

    Raises ValueError, naming the parameter, as `flatten` does; and, where the mesh has other processes and no rank is
    given, if their specs differ from this one: found by comparing a digest before anything else is sent.
    """
    spec = spec.bound
    mesh = _mesh(spec)
    if isinstance(model_or_params, nn.Module):
        full = _parameters_of(model_or_params, spec)
    else:
        full = dict(model_or_params)
        flatten({name: _like_meta(t) for name, t in full.items()}, spec)  # every error before communication
    if rank is None and _torch.level() == 0 and not torch.compiler.is_compiling():
        _check_ranks_agree(spec, mesh)
    device = _device(mesh)
    out: Params = {}
    for unit in spec:
        buffer = flatten_unit(full, unit, spec.padded_numel(unit))
        piece = scatter_unit(buffer, unit, mesh, rank)
        out[unit.key] = piece if device is None or piece.is_meta else piece.to(device)
    return out


def scatter_unit(buffer: Tensor, unit: Unit, mesh: Mesh, rank: int | None = None) -> Tensor:
    """This rank's (or ``rank``'s) slice of a unit's full buffer that all ranks have alike. Inverse of `gather_unit`."""
    if rank is not None:
        at = coordinates(mesh, rank)
        for name in unit.p.axes:
            buffer = scatter(buffer, mesh[name], rank=at[mesh.names.index(name)])
        return buffer
    for name in unit.p.axes:
        buffer = scatter(buffer, mesh[name])
    return buffer


def gather_unit(piece: Tensor, unit: Unit, mesh: Mesh, *, reduce: Reduce = "mean") -> Tensor:
    """The full buffer of a unit from each rank's slice of it; its gradient is the reduced slice.

    Gathers over the axes of ``unit.p``, and over the other axes of the mesh the buffer is replicated: FSDP, HSDP and
    DDP are this one function. In backward the gradient is reduce-scattered first and all-reduced as a slice.
    """
    if not unit.numel:  # nothing to send
        return piece.new_empty(0)
    for name in mesh.names:
        if name not in unit.p.axes:
            piece = vary(piece, mesh[name], reduce=reduce)
    for name in reversed(unit.p.axes):
        piece = all_gather(piece, mesh[name], reduce=reduce)
    return piece


def unshard(
    shards: Mapping[str, Tensor], spec: PartitionSpec, *, units: Iterable[str] | None = None, reduce: Reduce = "mean"
) -> Params:
    """The full parameters by name, all alive at once, as views of one buffer per unit. Inverse of `shard`.

    Differentiable at every order: the gradient of a shard is its slice of the mean over ranks of the full gradients,
    or of their sum with ``reduce="sum"``. Where nothing is to be gathered (``P()``, one rank) the buffer is the shard
    itself. ``units`` are the keys of units to gather, all of them by default; those of
    an ignored parameter in ``shards`` pass through.

    Raises ValueError, naming the unit, for shards that do not fit the spec, before any communication.
    """
    spec = spec.bound
    mesh = _mesh(spec)
    check_shards(shards, spec)
    chosen = tuple(spec.by_key) if units is None else tuple(units)
    for key in chosen:
        if key not in spec.by_key:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {list(spec.by_key)[:8]}")
    full: Params = {}
    for unit in (spec.by_key[key] for key in chosen):
        tensors = unflatten_unit(gather_unit(shards[unit.key], unit, mesh, reduce=reduce), unit)
        full.update(zip((p.name for p in unit.params), tensors, strict=True))
    return full | {name: shards[name] for name in spec.ignored if name in shards}


def check_shards(shards: Mapping[str, Tensor], spec: PartitionSpec) -> None:
    """ValueError or TypeError, naming the unit, unless ``shards`` are what `shard` gives for this spec."""
    check_buffers(shards, spec, {unit.key: spec.shard_numel(unit) for unit in spec})


def reshard(shards: Mapping[str, Tensor], spec: PartitionSpec, new_spec: PartitionSpec) -> Params:
    """``shard(unshard(shards, spec), new_spec)`` without ever holding all of it: other policy, other mesh axes.

    A gathered unit lives from the first new unit that needs it to the last, so between equal units the peak is one
    unit. Both specs must cover the same parameters: ValueError, naming one that is only in one of them.
    """
    spec, new_spec = spec.bound, new_spec.bound
    new_mesh = _mesh(new_spec)
    check_shards(shards, spec)
    names = {unit.key: {spec.by_name[p.name][0].key for p in unit.params if p.name in spec.by_name} for unit in new_spec}
    for name in spec.by_name.keys() ^ new_spec.by_name.keys():
        where = "the old spec" if name in spec.by_name else "the new spec"
        raise ValueError(f"parameter '{name}' is in {where} only: expected two specs of one model")
    last = {old: new.key for new in new_spec for old in names[new.key]}
    full: Params = {}
    gathered: set[str] = set()
    out: Params = {}
    for unit in new_spec:
        for key in sorted(names[unit.key] - gathered):
            gathered.add(key)
            full |= unshard(shards, spec, units=[key])
        out[unit.key] = scatter_unit(flatten_unit(full, unit, new_spec.padded_numel(unit)), unit, new_mesh)
        for old in (key for key in names[unit.key] if last[key] == unit.key):
            for param in spec.by_key[old].params:
                del full[param.name]
    return out


def gather_full(
    shards: Mapping[str, Tensor], spec: PartitionSpec, *, rank0_only: bool = False, offload_to_cpu: bool = False
) -> Params:
    """The full parameters by name, each a tensor of its own without gradient, unit by unit: summon_full_params.

    With ``rank0_only`` the mesh's first rank alone gets them, by a gather that allocates nothing elsewhere; the others
    get ``{}``. With ``offload_to_cpu`` each unit goes to host memory before the next is gathered, so that the peak on
    the device is one unit. `scatter_full` writes them back. Works for anything sharded like the parameters: gradients,
    optimizer state.

    Raises ValueError as `unshard` does, and for ``rank0_only`` on a simulated mesh, where all ranks run as one.
    """
    spec = spec.bound
    mesh = _mesh(spec)
    check_shards(shards, spec)
    if rank0_only and any(isinstance(axis, Simulated) for _, axis in mesh.axes):
        raise ValueError("gather_full: rank0_only on a simulated mesh: expected process groups; all ranks run the same code")
    full: Params = {}
    with torch.no_grad():
        for unit in spec:
            full |= _copies(shards[unit.key].detach(), unit, mesh, rank0_only, offload_to_cpu)
    return full


def _copies(piece: Tensor, unit: Unit, mesh: Mesh, rank0_only: bool, offload_to_cpu: bool) -> Params:
    """A gathered unit's parameters, copied; its buffer is gone when this returns, before the next one is gathered."""
    buffer = _gather_to_first(piece, unit, mesh) if rank0_only else gather_unit(piece, unit, mesh)
    if buffer is None:
        return {}
    tensors = zip(unit.params, unflatten_unit(buffer, unit), strict=True)
    return {param.name: t.to("cpu", copy=True) if offload_to_cpu else t.clone() for param, t in tensors}


def scatter_full(full: Mapping[str, Tensor] | None, spec: PartitionSpec, *, src: int = 0) -> Params:
    """The shards of the parameters that rank ``src`` of the mesh holds; the other ranks give None. The write-back.

    Only slices travel: a scatter over the sharded axes, a broadcast over the replicated ones. The shards have the
    spec's dtypes and the mesh's device. Inverse of ``gather_full(..., rank0_only=True)``.

    Raises ValueError on *every* rank if what ``src`` holds does not fit the spec; nothing has been sent by then but
    the message that says so.
    """
    spec = spec.bound
    mesh = _mesh(spec)
    if any(isinstance(axis, Simulated) for _, axis in mesh.axes):
        raise ValueError("scatter_full on a simulated mesh: expected process groups; use shard(full, spec) there")
    source, here = coordinates(mesh, src), coordinates(mesh, None)
    error = _source_error(full, spec) if source == here else ""
    device = _device(mesh) or torch.device("cpu")
    error = _broadcast_text(error, mesh, source, device)
    if error:
        raise ValueError(f"scatter_full: rank {src} holds other parameters than the spec's: {error}")
    out: Params = {}
    for unit in spec:
        buffer = None
        if source == here:
            assert full is not None
            buffer = flatten_unit(full, unit, spec.padded_numel(unit)).detach().to(device)
        out[unit.key] = _scatter_from(buffer, unit, spec, mesh, source, device)
    return out


def partition(
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    predicate: Callable[[Unit | Param], bool] | None = None,
) -> tuple[Params, Params]:
    """``(trainable, frozen)``: the params, split in two. Inverse of `combine`.

    Shards are split by ``predicate(unit)``, full parameters by ``predicate(param)``; by default what has
    ``requires_grad`` is trainable. Differentiate with respect to the first and combine inside the loss. Raises
    ValueError for a key that is neither a unit nor a parameter of the spec.
    """
    parts: tuple[Params, Params] = {}, {}
    for key, tensor in params.items():
        owner = spec.by_key.get(key) or (spec.by_name[key][1] if key in spec.by_name else None)
        if owner is None:
            raise ValueError(f"'{key}' is no unit and no parameter of the spec: expected some of {list(spec.by_key)[:8]}")
        parts[0 if (predicate or _trained)(owner) else 1][key] = tensor
    return parts


def _trained(owner: Unit | Param) -> bool:
    return owner.requires_grad


def combine(*parts: Mapping[str, Tensor]) -> Params:
    """One dict of all parts. Inverse of `partition`. Raises ValueError for a key that is in two of them."""
    out: Params = {}
    for part in parts:
        for key, tensor in part.items():
            if key in out:
                raise ValueError(f"combine: '{key}' is in two parts: expected disjoint ones")
            out[key] = tensor
    return out


def _mesh(spec: PartitionSpec) -> Mesh:
    return spec.mesh or Mesh.of(dict(spec.sizes or ()))


def _device(mesh: Mesh) -> torch.device | None:
    if mesh.device_type in (None, "cpu"):
        return None if mesh.device_type is None else torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def _parameters_of(model: nn.Module, spec: PartitionSpec) -> Params:
    """The model's parameters under the spec's names; ValueError unless they are what the spec was made for."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in named.items():
        if name not in spec.by_name and name not in spec.ignored and not any(tensor is named.get(i) for i in spec.ignored):
            raise ValueError(f"parameter '{name}' is not in the spec: expected the model that it was made for; make a new spec")
    for name, (unit, param) in spec.by_name.items():
        if name not in named:
            raise ValueError(f"parameter '{name}' of unit '{unit.key}' is not in the model: was it changed after the spec?")
        if named[name].dtype != param.dtype or tuple(named[name].shape) != param.shape:
            got = f"{list(named[name].shape)} {named[name].dtype}"
            raise ValueError(
                f"parameter '{name}' of unit '{unit.key}': expected {list(param.shape)} {param.dtype}, got {got}; "
                "was the model changed after the spec was made?"
            )
        if named[name] is not named[param.name]:
            raise ValueError(f"parameter '{name}' of unit '{unit.key}': expected it tied to '{param.name}', got two tensors")
    return {name: tensor.detach() for name, tensor in named.items()}


def _like_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _lines(spec: PartitionSpec) -> list[str]:
    """What must be alike on all ranks, a line for each parameter."""
    return [
        f"unit '{unit.key}' {unit.p}: parameter '{min(p.names)}' {list(p.shape)} {p.dtype} order={p.order} "
        f"requires_grad={p.requires_grad}"
        for unit in spec
        for p in unit.params
    ]


def _check_ranks_agree(spec: PartitionSpec, mesh: Mesh) -> None:
    """ValueError on every rank of the mesh if their specs differ: one small all-gather of a digest per mesh axis.

    Only when all axes are through is the result looked at: a rank that raised before would leave others waiting.
    """
    lines = _lines(spec)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    device = _device(mesh) or torch.device("cpu")
    digests = _rows(torch.tensor(list(digest), dtype=torch.uint8, device=device), mesh)
    if bool((digests == digests[0]).all()):
        return
    texts = _gather_texts("\n".join(lines), mesh, device)
    other, rank = next((t.split("\n"), r) for r, t in enumerate(texts) if t != texts[0])
    first = texts[0].split("\n")
    i = next(i for i in range(len(first) + 1) if first[i : i + 1] != other[i : i + 1])
    expected, got = (x[i] if i < len(x) else "nothing more" for x in (first, other))
    raise ValueError(
        f"the ranks of the mesh {mesh.names} have different models: expected, as on its rank 0, {expected}; "
        f"got on rank {rank} {got}; build the same model with the same policy on every rank"
    )


def _rows(row: Tensor, mesh: Mesh) -> Tensor:
    """The rows of all ranks of the mesh, in its row-major order, over the axes that can communicate."""
    rows = row.unsqueeze(0)
    for _, axis in reversed(mesh.axes):
        if isinstance(axis, Group) and axis.name:
            rows = all_gather(rows, axis)
    return rows


def _gather_texts(text: str, mesh: Mesh, device: torch.device) -> list[str]:
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = _rows(torch.tensor([len(data)], device=device), mesh).flatten().tolist()
    padded = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
    return [bytes(row[:n].tolist()).decode() for row, n in zip(_rows(padded, mesh), lengths, strict=True)]


# --- Gathers to one rank and scatters from one: data movement, below autograd, over c10d's own collectives. ---


def _group(mesh: Mesh, name: str) -> tuple[Group, dist.ProcessGroup | None]:
    axis = mesh[name]
    assert isinstance(axis, Group)
    if axis.size > 1 and not axis.name:
        raise ValueError(f"axis '{name}' of {axis.size} ranks has no process group: bind the spec with .on(mesh)")
    return axis, dist.distributed_c10d._resolve_process_group(axis.name) if axis.size > 1 else None  # pyright: ignore


def _gather_to_first(piece: Tensor, unit: Unit, mesh: Mesh) -> Tensor | None:
    """The unit's buffer on the mesh's first rank; None, and no buffer, on the others."""
    at = dict(zip(mesh.names, coordinates(mesh, None), strict=True))
    if any(at[name] for name in mesh.names if name not in unit.p.axes):
        return None  # another replica
    for name in reversed(unit.p.axes):
        axis, group = _group(mesh, name)
        if group is None:
            continue
        rows = piece.new_empty(axis.size, len(piece)) if at[name] == 0 else None
        dist.gather(piece.contiguous(), None if rows is None else list(rows), group=group, group_dst=0)
        if rows is None:
            return None
        piece = rows.flatten()
    return piece


def _scatter_from(
    buffer: Tensor | None, unit: Unit, spec: PartitionSpec, mesh: Mesh, source: tuple[int, ...], device: torch.device
) -> Tensor:
    """The inverse: slices of the source's buffer along the sharded axes, then copies along the replicated ones."""
    numel = spec.padded_numel(unit)
    here, want = (dict(zip(mesh.names, c, strict=True)) for c in (coordinates(mesh, None), source))
    rest = list(mesh.names)
    for name in (*unit.p.axes, *(n for n in mesh.names if n not in unit.p.axes)):
        axis, group = _group(mesh, name)
        rest.remove(name)
        split = name in unit.p.axes
        numel = numel // axis.size if split else numel
        # In this step those take part that the source's data has reached, or reaches now: they sit where the source
        # sits on every axis still to come.
        if group is None or any(here[n] != want[n] for n in rest):
            continue
        out = torch.empty(numel, dtype=unit.dtype, device=device)
        if split:
            pieces = list(buffer.view(axis.size, numel)) if buffer is not None and here[name] == want[name] else None
            dist.scatter(out, pieces, group=group, group_src=want[name])
        else:
            out = buffer if buffer is not None else out
            dist.broadcast(out, group=group, group_src=want[name])
        buffer = out
    assert buffer is not None
    return buffer


def _source_error(full: Mapping[str, Tensor] | None, spec: PartitionSpec) -> str:
    if full is None:
        return "expected a dict of full parameters, got None"
    if not isinstance(full, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        return f"expected a dict of full parameters, got {type(full).__name__}"
    for name, tensor in full.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = "a meta tensor" if isinstance(tensor, Tensor) else type(tensor).__name__  # pyright: ignore
            return f"parameter '{name}': expected a tensor with data, got {kind}"
    try:
        flatten({name: _like_meta(tensor) for name, tensor in full.items()}, spec)
    except ValueError as error:
        return str(error)
    for name, tensor in full.items():
        if name in spec.by_name and tensor.dtype != spec.by_name[name][1].dtype:
            return f"parameter '{name}': expected {spec.by_name[name][1].dtype}, got {tensor.dtype}"
    return ""


def _broadcast_text(text: str, mesh: Mesh, source: tuple[int, ...], device: torch.device) -> str:
    """The source's text on every rank of the mesh: an axis at a time, the length first."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    for name, src in zip(mesh.names, source, strict=True):
        _, group = _group(mesh, name)
        if group is None:
            continue
        length = torch.tensor([len(data)], device=device)
        dist.broadcast(length, group=group, group_src=src)
        data = data if len(data) == int(length) else data.new_empty(int(length))
        if len(data):
            dist.broadcast(data, group=group, group_src=src)
    return bytes(data.tolist()).decode()
