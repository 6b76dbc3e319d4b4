"""Checks that parameters fit a spec, whose errors name the path; and where host-resident units are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .. import _torch
from .spec import PartitionSpec
from .tree import Param
from .unit import Unit, global_shape


def bind_spec(spec: object) -> PartitionSpec:
    """Return ``spec.bound``, as every function that takes a spec does first.

    Raises:
        TypeError: For anything else than a spec.
        RuntimeError: If a process group that it was bound to is gone, or this process has another rank in it now.
    """
    found = check_spec(spec).bound
    if found.mesh is not None:
        found.mesh.check_groups()
    return found


def check_spec(spec: object) -> PartitionSpec:
    """Return the spec unchanged; raise TypeError for a policy or any other type."""
    if isinstance(spec, PartitionSpec):
        return spec
    if callable(spec) and not isinstance(spec, torch.nn.Module | type):
        raise TypeError(f"spec: expected a PartitionSpec, got the policy {spec!r}; call it on the model: policy(model)")
    raise TypeError(f"spec: expected a PartitionSpec such as fs.policies.whole()(model), got {type(spec).__name__}")


def check_mapping(params: object, what: str = "params") -> None:
    """Raise TypeError unless these are a mapping."""
    if not isinstance(params, Mapping):
        hint = "; fs.shard(model, spec) gives them" if isinstance(params, nn.Module) else ""
        raise TypeError(f"{what}: expected a dict of tensors by unit key or parameter name, got {type(params).__name__}{hint}")


def check_shards(shards: Mapping[str, Tensor], spec: PartitionSpec) -> list[Unit]:
    """Return the units of these shards, all or some; ValueError or TypeError, naming the unit, unless `shard` gives such."""
    _check_stored(shards, spec, spec, part=True)
    return [unit for unit in spec if unit.key in shards]


def _check_stored(shards: Mapping[str, Tensor], spec: PartitionSpec, units: Iterable[Unit], *, part: bool = False) -> None:
    """Raise an error unless the shards fit the spec: by bytes for units with ``at_rest``, else by length and dtype."""
    lengths: dict[str, int] = {}
    stored = spec._all_stored()
    for unit in units:
        lengths[unit.key], dtype = stored[unit.key]
        got = shards.get(unit.key) if unit.at_rest and isinstance(shards, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(got, Tensor) and (got.dtype, tuple(got.shape)) != (dtype, (lengths[unit.key],)):
            raise ValueError(
                f"unit '{unit.key}' is at rest in {unit.at_rest}: expected its {lengths[unit.key]} bytes (uint8) on this mesh, "
                f"got shape {list(got.shape)} {got.dtype}; shard(model, spec) or reshard(params, old_spec, spec) gives them"
            )
    check_buffers(shards, spec, lengths, part=part)


def check_buffers(
    buffers: Mapping[str, Tensor], spec: PartitionSpec, lengths: Mapping[str, int], *, part: bool = False
) -> None:
    """Raise ValueError or TypeError, naming the unit, unless ``buffers`` are exactly the 1-D tensors of these lengths.

    With ``part`` some may be missing.
    """
    check_mapping(buffers)
    for key, tensor in buffers.items():
        if key not in lengths and key not in spec.ignored:
            raise ValueError(
                f"unit '{key}' is not in the spec: expected units {list(lengths)[:4]}; are these params of another spec?"
            )
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"unit '{key}': expected a tensor, got {type(tensor).__name__}")
    for key, length in lengths.items():
        if key not in buffers:
            if part:
                continue
            raise ValueError(f"unit '{key}' is missing: expected a buffer of {length} elements, got units {list(buffers)[:4]}")
        if tuple(buffers[key].shape) != (length,):
            on = ", ".join(f"{name}={size}" for name, size in spec.bound_mesh.sizes)
            raise ValueError(
                f"unit '{key}': expected a 1-D buffer of {length} elements, got shape {list(buffers[key].shape)}; "
                f"are these params of another spec or another mesh than {on}?"
            )


def check_params(params: Mapping[str, Tensor], spec: PartitionSpec, sizes: Mapping[str, int] | None = None) -> None:
    """Raise ValueError or TypeError unless each unit has its shard or its full parameters, of a dtype to compute with.

    With the ``sizes`` of mesh axes these are the whole parameters, and otherwise this rank's pieces of those that are local.
    """
    check_mapping(params)
    full = {unit.key: tensors for unit in spec if (tensors := find_full_params(params, unit, sizes)) is not None}
    names = {name for key in full for param in spec.by_key[key].params for name in param.names}
    for key in params:
        if key in spec.by_name and key not in names:
            unit = spec.by_name[key][0].key
            raise ValueError(f"parameter '{key}': expected the shard of its unit '{unit}' or its full parameters, got both")
    shards = {key: tensor for key, tensor in params.items() if key not in names} if names else params
    _check_stored(shards, spec, [unit for unit in spec if unit.key not in full])
    for unit in spec:
        for tensor in full.get(unit.key) or (params[unit.key],):
            if tensor.dtype == unit.dtype or (unit.is_encoded and unit.key not in full):
                continue
            if not (tensor.is_floating_point() and unit.dtype.is_floating_point):
                like = "a floating point dtype such as " if unit.dtype.is_floating_point else ""
                raise TypeError(f"unit '{unit.key}': expected {like}{unit.dtype}, got {tensor.dtype}")


def check_param_classes(named: Mapping[str, Tensor]) -> None:
    """Raise TypeError, naming the parameter, for one of a class of its own: a call gives forward plain tensors."""
    for name, tensor in named.items():
        if type(tensor) not in (Tensor, nn.Parameter, _torch.FakeTensor):
            raise TypeError(
                f"parameter '{name}' is a {type(tensor).__name__}: expected an nn.Parameter, because forward gets plain "
                "tensors, without what the class adds; keep that in the module, or leave the parameter out by policies.ignoring"
            )


def take_full_params(params: Mapping[str, Tensor], unit: Unit, sizes: Mapping[str, int] | None = None) -> list[Tensor]:
    """Return the parameters of a unit, found under any of their names, after a check of their shapes and dtype.

    With the ``sizes`` of mesh axes the whole parameters, and otherwise this rank's pieces of those that are local.
    """
    tensors = [_take_full(params, param, unit, sizes) for param in unit.params]
    for tensor, param in zip(tensors, unit.params, strict=True):
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"parameter '{param.name}' of unit '{unit.key}': expected {tensors[0].dtype} as "
                f"'{unit.params[0].name}' has, got {tensor.dtype}; one unit is one buffer of one dtype"
            )
    return tensors


def _take_full(params: Mapping[str, Tensor], param: Param, unit: Unit, sizes: Mapping[str, int] | None = None) -> Tensor:
    """Return a full parameter, found under any of its names; raise ValueError or TypeError unless it fits."""
    tensor = next((params[name] for name in param.names if name in params), None)
    shape = param.shape if sizes is None else global_shape(param, sizes)
    if tensor is None:
        raise ValueError(f"parameter '{param.name}' of unit '{unit.key}' is missing: expected {list(shape)}, got none")
    for name in param.aliases:
        if name in params and params[name] is not tensor and not _is_same_value(params[name], tensor):
            raise ValueError(
                f"parameter '{name}' of unit '{unit.key}' is tied, one parameter under the names {list(param.names)}: expected "
                "one tensor, got two, of different values or with gradients of their own; leave one of the names out, or untie "
                "them in the model and make a new spec"
            )
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"parameter '{param.name}' of unit '{unit.key}': expected a tensor, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        hint = "was the model changed after the spec was made?"
        if param.local:
            expected = "piece of this rank is expected, as from unshard(whole=False)" if sizes is None else "whole is expected"
            hint = f"it is local over {dict(param.local)}: the {expected}"
        raise ValueError(
            f"parameter '{param.name}' of unit '{unit.key}': expected shape {list(shape)}, got {list(tensor.shape)}; {hint}"
        )
    return tensor


def _is_same_value(a: object, b: object) -> bool:
    """Return whether one of two full parameters can be dropped: equal values, and no derivative that only one of them gets."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if _torch.is_in_graph() or _torch.any_tracked((a, b)):
        return False
    if _torch.shares_storage(a, b) and (a.storage_offset(), a.stride()) == (b.storage_offset(), b.stride()):
        return True
    return _torch.is_eager() and (a.is_meta or torch.equal(a, b.to(a.device)))


def find_full_params(params: Mapping[str, Tensor], unit: Unit, sizes: Mapping[str, int] | None = None) -> list[Tensor] | None:
    """Return the unit's full parameters if ``params`` has them, under any of their names, instead of its buffer; else None.

    ``sizes`` is as in `check_params`. Raises ValueError, naming the parameter, where only some are, or with another shape.
    """
    if unit.key in params or not any(name in params for param in unit.params for name in param.names):
        return None
    return [_take_full(params, param, unit, sizes) for param in unit.params]


def check_full(params: Mapping[str, Tensor], spec: PartitionSpec, *, whole: bool = False) -> None:
    """Raise ValueError or TypeError, naming the parameter, unless these are all of the spec's, one dtype for each unit.

    With ``whole`` they are the whole parameters, and otherwise this rank's pieces of those that are local.
    """
    check_mapping(params)
    for name in params:
        if name not in spec.by_name and name not in spec.ignored:
            raise ValueError(
                f"parameter '{name}' is not in the spec: expected names such as {list(spec.by_name)[:4]}; "
                "was the model changed after the spec was made?"
            )
    for unit in spec:
        take_full_params(params, unit, dict(spec.bound_mesh.sizes) if whole else None)
