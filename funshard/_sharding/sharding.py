"""shard, unshard, reshard, reduce_grads, and partition: parameters and gradients on their way between full and sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from .. import _torch
from .._core.checks import (
    bind_spec,
    check_buffers,
    check_full,
    check_mapping,
    check_param_classes,
    check_shards,
    check_spec,
    find_full_params,
    take_full_params,
)
from .._core.flow import ReduceBy, Reduction, resolve_reduction, scatter_along
from .._core.layout import Params, flatten_unit, rank_coords, to_memory_order, unflatten_unit
from .._core.mesh import Mesh, has_peers
from .._core.spec import PartitionSpec
from .._core.tree import Param, check_not_compiled
from .._core.unit import Unit
from .._spec.codec import check_trainable
from .._spec.table import log_spec
from .._wire.accumulation import drop_unweighted, find_accumulation
from .._wire.flow import (
    apply_options,
    flatten_global,
    reduce_slice,
    reduce_unit,
    store_slice,
    unflatten_global,
    unshard_global,
    unshard_unit,
)
from .._wire.host import check_host_resident
from ..collectives._agree import check_ranks_agree, report_to_ranks
from ..collectives._functions import sum_over
from .full import check_source, gather_stored, scatter_from
from .skeleton import is_skeleton


def shard(
    model_or_params: nn.Module | Mapping[str, Tensor] | None,
    spec: PartitionSpec,
    *,
    rank: int | None = None,
    src: int | None = None,
    check_values: bool = True,
) -> Params:
    """Return this rank's 1-D slice of every unit, by unit key. Inverse of `unshard`.

    Each rank takes its slice from its own values, so all must have the same: use one seed before the model is built. The ranks
    compare a digest of every parameter's bits first, by one small all-gather; not inside a transform or a compiler. The slices
    are on the mesh's device, or with ``P(offload="params")`` in pinned host memory. A unit at rest in a codec (`P`) has bytes.

    Args:
        model_or_params: A module, whose parameters are copied, or full parameters by name: then differentiable, and the
            transpose gathers. Over local axes (`P`) they are the whole parameters, not this rank's pieces.
        spec: The spec. An unbound one is on all ranks, as one axis "shard".
        rank: The rank whose shards to return, counted over the mesh row by row; this one by default.
        src: The rank that sends its values to all others: of each unit slices alone travel. The others' may be on the meta
            device, or None.
        check_values: Whether ranks compare their values, or only their specs.

    Returns:
        By unit key ``spec.shard_numel(unit)`` elements of the parameters' own dtype.

    Raises:
        ValueError: As `flatten`, naming the parameter; on every rank, if specs or values of ranks differ.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 4, bias=False)).on({"shard": 2})
        >>> [fs.shard({"weight": torch.arange(16.0).view(4, 4)}, spec, rank=rank)[""].tolist() for rank in range(2)]
        [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]]
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    together = rank is None and has_peers(mesh) and _torch.is_eager()
    full, values = None, None
    with report_to_ranks(spec, together):
        if _is_source(src, rank, spec):
            if is_skeleton(model_or_params):
                raise ValueError(
                    "shard: the model is a skeleton, whose parameters have no values: expected the model that it was made "
                    "of, or full parameters by name"
                )
            if model_or_params is None and len(spec):
                raise ValueError("shard: expected a model or full parameters by name, got None")
            full = collect_full_params({} if model_or_params is None else model_or_params, spec)
            if src is not None:
                check_source(full, spec)
        _check_device(model_or_params, spec)
        if together and check_values and src is None:
            values = hash_params(full or {}, spec)
    if together:
        check_ranks_agree(spec, values, () if src is None else (f"src={src}",))
    log_spec(spec)
    out: Params = {}
    for unit in spec:
        if src is None:
            assert full is not None
            piece = scatter_along(flatten_global(full, unit, spec), unit.distinct_axes, mesh, rank)
        else:
            piece = scatter_from(full, unit, spec, src)
        out[unit.key] = store_slice(piece, unit, mesh)
    return out


def _check_device(model: object, spec: PartitionSpec) -> None:
    device = spec.bound_mesh.device
    if not isinstance(model, nn.Module) or device is None:
        return
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if name not in spec.ignored and x.device.type == device.type and x.device != device:
            raise ValueError(
                f"shard: '{name}' is on {x.device}, and the process group's device is {device}, where shards go: expected one "
                f"device; call torch.{device.type}.set_device({x.device.index}) before that, or model.to('{device}')"
            )


def _is_source(src: int | None, rank: int | None, spec: PartitionSpec) -> bool:
    """Return whether `shard` uses the values of this process; raise ValueError if rank= and src= do not fit the mesh."""
    mesh = spec.bound_mesh
    if src is not None:
        if rank is not None:
            raise ValueError(f"shard: expected rank= or src=, got both: {rank} and {src}")
        if mesh.is_simulated:
            raise ValueError("shard: src= on a simulated mesh: expected process groups; simulated ranks close over the same")
        return rank_coords(mesh, src) == rank_coords(mesh, None)
    check_rank("shard", spec, rank)
    return True


def check_rank(who: str, spec: PartitionSpec, rank: int | None) -> None:
    """Raise ValueError unless the spec's mesh or ``rank`` says which slices to take."""
    mesh = spec.bound_mesh
    split = {name for unit in spec for name in unit.distinct_axes}
    if rank is None and any(axis.rank is None for name, axis in mesh.axes if name in split):
        last = math.prod(size for _, size in mesh.sizes) - 1
        raise ValueError(
            f"{who}: the spec is on sizes alone, {dict(mesh.sizes)}: expected a rank in 0..{last}, got None; give rank=, or "
            "bind the spec to process groups by .on(init_device_mesh(...))"
        )


def unshard(
    shards: Mapping[str, Tensor],
    spec: PartitionSpec,
    *,
    units: Iterable[str] | None = None,
    reduce: ReduceBy = "mean",
    whole: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Params:
    """Return the full parameters by name, as views of one buffer per unit. Inverse of `shard`.

    Differentiable at every order. Without a gather (``P()``, one rank) the buffer is a copy of the shard, which takes memory
    once one of the two is written to. A unit at rest in a codec is decoded, and a constant. `stream_full` iterates over
    parameters without holding all.

    Args:
        shards: Slices by unit key, all of them or a part (`partition`), or gradients and other slices like them. Ignored
            parameters pass through.
        spec: The spec of the shards.
        units: Keys of the units to gather; by default all that are given.
        reduce: The gradient of a shard is its slice of the "mean" over ranks of the full gradients, their "sum", or their sum
            over a number.
        whole: Whether parameters that are local over an axis (`P`) are gathered over it, too. False: they are this rank's
            pieces, as `functional_call` and `reduce_grads` take them.
        rank0_only: Only the mesh's first rank gets the parameters, the others ``{}``. With this or the next one they are values
            without gradient, each in memory of its own: as summon_full_params, or a full state dict.
        offload_to_cpu: Move each unit to host memory before the next one is gathered.

    Raises:
        ValueError: For shards that do not fit the spec, naming the unit, before any communication; for ``rank0_only`` on a
            simulated mesh.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1))
        >>> shards = fs.shard({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}, spec)
        >>> fs.unshard(shards, spec)
        {'weight': tensor([[1., 2.]]), 'bias': tensor([3.])}
    """
    spec = bind_spec(spec)
    mesh, reduction = spec.bound_mesh, Reduction.make(reduce)
    given = [unit.key for unit in check_shards(shards, spec)]
    check_host_resident(shards, spec)
    chosen = given if units is None else tuple(units)
    for key in chosen:
        if key not in spec.by_key:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {list(spec.by_key)[:8]}")
        if key not in given:
            raise ValueError(f"unit '{key}' is missing: expected its shard among those given, got units {given[:4]}")
    if rank0_only or offload_to_cpu:
        if reduce != "mean" or not whole:
            raise ValueError(f"unshard: expected rank0_only= and offload_to_cpu= alone, got {reduce=} and {whole=} beside them")
        given = {key: shards[key] for key in (*chosen, *spec.ignored) if key in shards}
        return gather_stored(given, spec, apply_options, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
    if accumulation := find_accumulation(shards, spec, "mean", None):
        accumulation.check_unweighted(shards, "its loss unshards the shards")
    full: Params = {}
    for unit in (spec.by_key[key] for key in chosen):
        full.update(_unshard_params(shards[unit.key], unit, mesh, reduction, whole=whole))
    return spec._to_model_order(full | {name: shards[name] for name in spec.ignored if name in shards})


def _unshard_params(
    piece: Tensor, unit: Unit, mesh: Mesh, reduction: Reduction, *, whole: bool = True, as_stored: bool = False
) -> Params:
    """Return a unit's full parameters by name, or with ``as_stored`` what was sharded, whatever options compute with."""
    if whole:
        buffer = unshard_global(piece, unit, mesh, reduction, check_order=True, as_stored=as_stored)
    else:
        buffer = unshard_unit(piece, unit, mesh, reduction, check_order=True, casts=False)
    # a copy if nothing was gathered, since the shard may be written to; in eager mode it takes no memory until then
    if buffer.numel() == piece.numel() if _torch.is_in_graph() else _torch.shares_storage(buffer, piece):
        buffer = _torch.lazy_clone(buffer) if _torch.is_eager() else buffer.clone()
    tensors = unflatten_global(buffer, unit, mesh) if whole else unflatten_unit(buffer, unit)
    return {param.name: x for param, x in zip(unit.params, tensors, strict=True)}


def reshard(shards: Mapping[str, Tensor], spec: PartitionSpec, new_spec: PartitionSpec) -> Params:
    """Return ``shard(unshard(shards, spec), new_spec)`` without holding all parameters: for another policy or mesh.

    A gathered unit lives from the first new unit that needs it to the last: between equal units the peak is one unit.

    Args:
        shards: Slices by unit key, all of them or the parts of some new units (`partition`).
        spec: The spec of the shards.
        new_spec: Another spec of the same parameters (otherwise ValueError).

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> old, new = fs.policies.whole()(model), fs.by_type(torch.nn.Linear)(model)
        >>> shards = fs.shard(model, old)
        >>> sorted(shards), sorted(fs.reshard(shards, old, new))
        ([''], ['0', '1'])
    """
    spec, new_spec = bind_spec(spec), bind_spec(new_spec)
    new_mesh = new_spec.bound_mesh
    given = {unit.key for unit in check_shards(shards, spec)}
    check_host_resident(shards, spec)
    for name in spec.by_name.keys() ^ new_spec.by_name.keys():
        where = "the old spec" if name in spec.by_name else "the new spec"
        raise ValueError(f"parameter '{name}' is in {where} only: expected two specs of one model")
    if accumulation := find_accumulation(shards, spec, "mean", None):
        accumulation.check_unweighted(shards, "its loss unshards the shards")
    names = {unit.key: {spec.by_name[p.name][0].key for p in unit.params} for unit in new_spec}
    made = [unit for unit in new_spec if not given.isdisjoint(names[unit.key])]
    for unit in made:
        if missing := sorted(names[unit.key] - given):
            raise ValueError(
                f"unit '{missing[0]}' is missing: expected all that the new spec's unit '{unit.key}' is made of, "
                f"{sorted(names[unit.key])}, or nothing of it"
            )
    last = {old: new.key for new in made for old in names[new.key]}
    full: Params = {}
    gathered: set[str] = set()
    out: Params = {}
    for unit in made:
        for key in sorted(names[unit.key] - gathered):
            gathered.add(key)
            full |= _unshard_params(shards[key], spec.by_key[key], spec.bound_mesh, Reduction(), as_stored=True)
        buffer = flatten_global(full, unit, new_spec)
        out[unit.key] = store_slice(scatter_along(buffer, unit.distinct_axes, new_mesh), unit, new_mesh)
        for old in (key for key in names[unit.key] if last[key] == unit.key):
            for param in spec.by_key[old].params:
                del full[param.name]
    return out


# --- Gradients that are reduced when you say so: no_sync, gradient accumulation, uneven batches ---


def reduce_grads(
    grads: Mapping[str, Tensor],
    spec: PartitionSpec,
    *,
    reduce_axes: Iterable[str] | None = None,
    reduce: ReduceBy = "mean",
    weight: float | Tensor | None = None,
) -> Params:
    """Return the gradients of the shards, by unit key: the mean over ranks of each rank's own gradients.

    Differentiate with respect to ``unshard(params, spec)`` as often as you like, add up, and reduce once: ``no_sync``. The
    result equals the gradients of functional_call. They are reduced in the dtype of the unit's `Precision`, and returned in
    their own. Differentiable.

    Args:
        grads: Full gradients by parameter name, all of a unit's or none. Or, by unit key, gradients that were reduced over some
            axes and are now reduced over others: HSDP with one all-reduce for many micro-batches.
        spec: The spec of the parameters.
        reduce_axes: The mesh axes to reduce over, by default all.
        reduce: "mean", "sum", or the number to divide the sum by.
        weight: This rank's number of samples, if ranks have different ones: the result is ``sum_r w_r g_r / sum_r w_r`` over
            all ranks. With weight 0 the rank takes part and its gradients do not count, NaN included. Without ``reduce`` and
            ``reduce_axes``; to reduce while backward runs, multiply the loss by `weight_share`.

    Raises:
        ValueError: For gradients or axes that do not fit the spec, naming the path, before any communication.
        NotImplementedError: For a weight and a unit with local axes, where a rank's gradients have parts of others' losses.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.reduce_grads({"weight": torch.ones(2, 4)}, spec)
        {'': tensor([1., 1., 1., 1., 1., 1., 1., 1.])}
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    if weight is not None:
        if reduce != "mean" or reduce_axes is not None:
            raise ValueError(f"reduce_grads: expected weight= alone, got {reduce=} and {reduce_axes=} beside it")
        grads, reduce = _weigh(grads, spec, weight), "sum"
    full, slices = _split_units(grads, spec)
    reduction = resolve_reduction(reduce, mesh.names if reduce_axes is None else reduce_axes, mesh, full)
    for unit in slices:
        if split := [axis for axis in unit.p.axes if reduction.includes(axis)]:
            raise ValueError(
                f"unit '{unit.key}': a slice cannot be reduced over axis '{split[0]}', which the unit is split over: expected "
                "reduce_axes= without it, or full gradients by parameter name"
            )
    out: Params = {}
    for unit in full:
        buffer = flatten_unit(grads, unit, spec.padded_numel(unit))
        out[unit.key] = reduce_unit(buffer, unit, mesh, reduction)
    for unit in slices:
        out[unit.key] = reduce_slice(grads[unit.key], unit, mesh, reduction)
    return {unit.key: out[unit.key] for unit in spec if unit.key in out}


def weight_share(weight: float | Tensor, spec: PartitionSpec) -> Tensor:
    """Return ``w / sum_r w_r``, this rank's share of the total weight, or 0 if that is 0; a scalar in float32 at least.

    A weight that is negative or not finite makes the shares of all ranks NaN.

    A loss that is the mean over this rank's samples, times this, and ``reduce="sum"``, is the mean over all ranks' samples. A
    mean over none must not be 0/0 here: divide by ``max(n, 1)``, or use ``accumulate(f, params, [batch], weights=[n])``.

    Args:
        weight: This rank's number of samples or tokens, a number or a scalar tensor.
        spec: The spec, whose mesh has the ranks.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.weight_share(3, spec)
        tensor(1.)
    """
    mesh = bind_spec(spec).bound_mesh
    # a number is filled in on the device: a copy from the host would have to wait for it
    number = isinstance(weight, int | float)
    own = torch.full((), weight, device=mesh.device) if number else torch.as_tensor(weight, device=mesh.device)
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    own = torch.where((own >= 0) & own.isfinite(), own, torch.nan)  # of every rank, then: the host does not wait to read it
    total = sum_over(own, mesh)
    return torch.where(total == 0, 0, own / total)


def _weigh(grads: Mapping[str, Tensor], spec: PartitionSpec, weight: float | Tensor) -> Params:
    """Return gradients times this rank's share of the weight."""
    for unit in spec:
        if local := [axis for axis in unit.local_axes if spec.bound_mesh[axis].size > 1]:
            raise NotImplementedError(
                f"reduce_grads: weight=: unit '{unit.key}' is local over axis '{local[0]}', where gradients have parts of "
                "other ranks' losses: expected each rank's loss times weight_share(weight, spec), and reduce='sum'"
            )
    share = weight_share(weight, spec)
    shares = ((name, g, share.to(g.device)) for name, g in grads.items())
    return {name: drop_unweighted(g, s) * s.to(g.dtype) for name, g, s in shares}


def _split_units(grads: Mapping[str, Tensor], spec: PartitionSpec) -> tuple[list[Unit], list[Unit]]:
    check_mapping(grads)
    full = [unit for unit in spec if find_full_params(grads, unit) is not None]
    names = {name for unit in full for param in unit.params for name in param.names}
    slices = [unit for unit in spec if unit.key in grads]
    check_trainable((*full, *slices), "gradient")
    lengths = {unit.key: spec.shard_numel(unit) for unit in slices}
    check_buffers({key: g for key, g in grads.items() if key not in names}, spec, lengths)
    return full, slices


# --- Parts of shards or parameters, and the check of what is sharded ---


def partition(
    params: Mapping[str, Tensor], spec: PartitionSpec, predicate: Callable[[Unit | Param], bool] | None = None
) -> tuple[Params, Params]:
    """Return ``(trainable, frozen)``. Inverse of `combine`.

    Differentiate with respect to the first and combine inside the loss. Parameters that the spec ignores are frozen.

    Args:
        params: Shards by unit key, or full parameters by name.
        spec: Their spec.
        predicate: Which units or parameters are trainable; by default those with ``requires_grad``.

    Raises:
        ValueError: For a key that is neither a unit nor a parameter, and for a trainable unit at rest in a codec.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> _ = model[0].requires_grad_(False)
        >>> spec = fs.by_type(torch.nn.Linear)(model)
        >>> trainable, frozen = fs.partition(fs.shard(model, spec), spec)
        >>> sorted(trainable), sorted(frozen)
        (['1'], ['0'])
    """
    spec = check_spec(spec)
    check_mapping(params)
    parts: tuple[Params, Params] = {}, {}
    for key, tensor in params.items():
        owner = None if key in spec.ignored else spec.owner(key)
        trainable = owner is not None and (predicate(owner) if predicate else owner.requires_grad)
        if trainable and key in spec.by_key:
            check_trainable([spec.by_key[key]], "gradient")
        parts[0 if trainable else 1][key] = tensor
    return parts


def combine(*parts: Mapping[str, Tensor]) -> Params:
    """Return the union of disjoint dicts. Inverse of `partition`.

    Args:
        parts: Dicts by unit key or parameter name.

    Raises:
        ValueError: For a key that is in two of them.

    Example:
        >>> import torch, funshard as fs
        >>> fs.combine({"0": torch.zeros(1)}, {"1": torch.ones(1)})
        {'0': tensor([0.]), '1': tensor([1.])}
    """
    out: Params = {}
    for part in parts:
        for key, tensor in part.items():
            if key in out:
                raise ValueError(f"combine: '{key}' is in two parts: expected disjoint ones")
            out[key] = tensor
    return out


def collect_full_params(model_or_params: nn.Module | Mapping[str, Tensor], spec: PartitionSpec) -> dict[str, Tensor]:
    """Return the whole parameters by name, from a model (detached) or a mapping, after a check that they fit the spec."""
    if not isinstance(model_or_params, nn.Module):
        check_full(model_or_params, spec, whole=True)
        return dict(model_or_params)
    for path, module in model_or_params.named_modules():
        check_not_compiled(path, module)
    named = dict(model_or_params.named_parameters(remove_duplicate=False))
    check_param_classes({name: named[name] for name in spec.by_name if name in named})
    full = {name: tensor.detach() for name, tensor in named.items()}
    ignored = {id(named.get(name)) for name in spec.ignored}
    check_full({name: full[name] for name in full if name in spec.by_name or id(named[name]) not in ignored}, spec, whole=True)
    for name, (unit, param) in spec.by_name.items():
        if named[param.name].dtype != param.dtype:
            raise ValueError(f"parameter '{name}' of unit '{unit.key}': expected {param.dtype}, got {named[name].dtype}")
        if named.get(name) is not named[param.name]:
            raise ValueError(f"parameter '{name}' of unit '{unit.key}': expected it tied to '{param.name}', got two tensors")
    return full


_PIECE = 1 << 17
"""Words hashed at once: few enough that their factors stay in the cache."""


def hash_params(params: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return a hash of the bits of each parameter, in the order of the spec, with NaN and -0.0 like any other values.

    A hash sums the 64-bit words, each times an odd number for its place, modulo 2**64: one changed word always changes it. It
    is computed on the parameter's own device.
    """
    sizes = dict(spec.bound_mesh.sizes)
    with torch.no_grad():
        found = [
            hash_bits(to_memory_order(tensor.detach(), param))
            for unit in spec
            for tensor, param in zip(take_full_params(params, unit, sizes), unit.params, strict=True)
        ]
        return torch.stack([number.to(found[0].device) for number in found]) if found else torch.zeros(0, dtype=torch.int64)


def hash_bits(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits, as an int64 scalar tensor; 0 on the meta device."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # also of one element, which counts as contiguous whatever its stride is
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
    return _hash_words(torch.cat([_hash_words(words.view(torch.int64)), raw[whole:].long()]))[0]


def _hash_words(words: Tensor) -> Tensor:
    places = torch.arange(1, min(len(words), _PIECE) + 1, device=words.device)
    places *= -0x61C8864680B583EB  # as in splitmix64: neighbours get numbers that have nothing in common
    places = (places ^ (places >> 29)) * -0x40A7B892E31B1A47 | 1
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        total = total * 0x5851F42D4C957F2D + (piece * places[: len(piece)]).sum()
    return total
