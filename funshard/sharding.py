"""shard, unshard, reshard, and partition: parameters on their way between full and sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from . import _torch
from .agree import check_ranks_agree
from .division import Divide, Reduction
from .layout import Params, check_buffers, flatten, flatten_unit, unflatten_unit
from .spec import PartitionSpec, Unit
from .travel import gather_unit, scatter_unit
from .tree import Param

__all__ = [
    "combine",
    "partition",
    "reshard",
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
    given, on every rank if their specs differ or one of them has such an error: found by comparing a digest before
    anything else is sent.
    """
    spec = spec.bound
    mesh, device = spec.bound_mesh, spec.bound_mesh.device
    together = rank is None and _torch.level() == 0 and not torch.compiler.is_compiling()
    try:
        full = _checked(model_or_params, spec)
    except ValueError as error:
        if together:
            check_ranks_agree(spec, str(error))  # tell the ranks that wait for the digest
        raise
    if together:
        check_ranks_agree(spec)
    out: Params = {}
    for unit in spec:
        buffer = flatten_unit(full, unit, spec.padded_numel(unit))
        piece = scatter_unit(buffer, unit, mesh, rank)
        out[unit.key] = piece if device is None or piece.is_meta else piece.to(device)
    return out


def unshard(
    shards: Mapping[str, Tensor], spec: PartitionSpec, *, units: Iterable[str] | None = None, reduce: Divide = "mean"
) -> Params:
    """The full parameters by name, all alive at once, as views of one buffer per unit. Inverse of `shard`.

    Differentiable at every order: the gradient of a shard is its slice of the mean over ranks of the full gradients,
    of their sum with ``reduce="sum"``, or of that over a number. In the shards' own dtype, both ways. Where nothing is
    to be gathered (``P()``, one rank) the buffer is the shard itself. ``units`` are the keys of units to gather, all of
    them by default; an ignored parameter in ``shards`` passes through.

    Raises ValueError, naming the unit, for shards that do not fit the spec, before any communication.
    """
    spec = spec.bound
    mesh, reduction = spec.bound_mesh, Reduction.of(reduce)
    check_shards(shards, spec)
    chosen = tuple(spec.by_key) if units is None else tuple(units)
    for key in chosen:
        if key not in spec.by_key:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {list(spec.by_key)[:8]}")
    full: Params = {}
    for unit in (spec.by_key[key] for key in chosen):
        tensors = unflatten_unit(gather_unit(shards[unit.key], unit, mesh, reduction), unit)
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
    new_mesh = new_spec.bound_mesh
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


def partition(
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    predicate: Callable[[Unit | Param], bool] | None = None,
) -> tuple[Params, Params]:
    """``(trainable, frozen)``: the params, split in two. Inverse of `combine`.

    Shards are split by ``predicate(unit)``, full parameters by ``predicate(param)``; by default what has
    ``requires_grad`` is trainable. Parameters that the spec ignores are frozen. Differentiate with respect to the first
    and combine inside the loss. Raises ValueError for a key that is neither a unit nor a parameter of the spec.
    """
    parts: tuple[Params, Params] = {}, {}
    for key, tensor in params.items():
        trainable = key not in spec.ignored and (predicate or _trained)(spec.owner(key))
        parts[0 if trainable else 1][key] = tensor
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


def _checked(model_or_params: nn.Module | Mapping[str, Tensor], spec: PartitionSpec) -> Params:
    """The full parameters by name; ValueError unless they fit the spec."""
    if isinstance(model_or_params, nn.Module):
        return _parameters_of(model_or_params, spec)
    full = dict(model_or_params)
    flatten({name: like_meta(tensor) for name, tensor in full.items()}, spec)
    return full


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


def like_meta(tensor: Tensor) -> Tensor:
    """A tensor of that shape and dtype without data, to try things on."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
