"""shard, unshard and functional_call as data flow alone: what all other modes and options have to equal.

Nothing runs ahead, and nothing is cast, saved or recomputed. Every transform of torch.func applies at every order, so that
``grad`` and ``grad_and_value`` are torch.func's own: a gather's transpose reduces gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .checks import bind_spec, check_full, check_params, check_shards, find_full_params
from .flow import ReduceBy, Reduction, resolve_reduction, scatter_along, unshard_unit
from .layout import Params, flatten_unit, unflatten_unit
from .spec import PartitionSpec
from .unit import P


def shard(model_or_params: nn.Module | Mapping[str, Tensor], spec: PartitionSpec, *, rank: int | None = None) -> Params:
    """Return this rank's (or ``rank``'s) slice of every unit, by unit key. Inverse of `unshard`.

    The arguments are those of `funshard.shard`; the spec has no options.
    """
    spec = _check_plain(bind_spec(spec))
    if isinstance(model_or_params, nn.Module):
        model_or_params = {name: x.detach() for name, x in model_or_params.named_parameters(remove_duplicate=False)}
    check_full(model_or_params, spec)
    full, mesh = model_or_params, spec.bound_mesh
    buffers = {unit.key: flatten_unit(full, unit, spec.padded_numel(unit)) for unit in spec}
    return {unit.key: scatter_along(buffers[unit.key], unit.p.axes, mesh, rank) for unit in spec}


def unshard(shards: Mapping[str, Tensor], spec: PartitionSpec, *, reduce: ReduceBy = "mean") -> Params:
    """Return the full parameters by name, as views of one buffer per unit. Inverse of `shard`; differentiable at every order.

    The arguments are those of `funshard.unshard`; the spec has no options.
    """
    spec = _check_plain(bind_spec(spec))
    check_shards(shards, spec)
    return spec._to_model_order(_gather(shards, spec, Reduction.make(reduce)))


def functional_call(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: object = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    spec: PartitionSpec,
    reduce: ReduceBy = "mean",
    reduce_axes: Iterable[str] | None = None,
) -> Any:
    """Call a module on slices, as torch.func.functional_call on gathered parameters. Buffers are copies.

    The arguments are those of `funshard.functional_call`; the spec has no options.
    """
    spec = _check_plain(bind_spec(spec))
    check_params(params, spec)
    reduction = resolve_reduction(reduce, reduce_axes, spec.bound_mesh, (unit for unit in spec if unit.key in params))
    full = _gather(params, spec, reduction)
    for unit in spec:
        tensors = find_full_params(params, unit) or [full[param.name] for param in unit.params]
        full.update((name, x) for param, x in zip(unit.params, tensors, strict=True) for name in param.names)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    positional = args if isinstance(args, tuple) else (args,)
    return _run(model, buffers | full, positional, dict(kwargs or {}))


def _run(model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a model with these tensors in the place of its own. torch.func's leaves them in modules that have two paths."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, x in tensors.items():
            path, _, attr = name.rpartition(".")
            module = model.get_submodule(path)
            own: dict[str, Any] = module._parameters if attr in module._parameters else module._buffers
            before.append((own, attr, own[attr]))
            own[attr] = x
        return model(*args, **kwargs)
    finally:
        for own, attr, x in reversed(before):
            own[attr] = x


def _gather(params: Mapping[str, Tensor], spec: PartitionSpec, reduction: Reduction) -> Params:
    """Return the parameters of the units whose slices these are, and those that the spec ignores, by name."""
    full = {name: params[name] for name in spec.ignored if name in params}
    for unit in (unit for unit in spec if unit.key in params):
        buffer = unshard_unit(params[unit.key], unit, spec.bound_mesh, reduction)
        full.update(zip((param.name for param in unit.params), unflatten_unit(buffer, unit), strict=True))
    return full


def _check_plain(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec; raise ValueError, naming the unit, for one with an option."""
    for unit in spec:
        p = unit.p
        if p != P(p.axis, reshard=p.reshard, align=p.align, unit=p.unit):
            raise ValueError(f"unit '{unit.key}' is {p}: expected a P of axis, reshard, align and unit alone")
    return spec
