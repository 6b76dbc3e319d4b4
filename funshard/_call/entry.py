"""The entry of a functional_call: every check of its arguments, before anything is communicated or computed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._core.checks import bind_spec, check_params, find_full_params
from .._core.flow import ReduceBy, resolve_reduction
from .._core.spec import PartitionSpec, abridge
from .._units.accumulation import find_accumulation
from .._wire.flow import refuse_reduce_codec_in_graph
from .._wire.host import check_host_resident
from ..collectives._world import has_peers
from .buffers import is_first_warning
from .module_state import BoundModule
from .schedule import CallInputs, CallOptions


def check_call(
    model: nn.Module,
    params: Mapping[str, Tensor],
    args: object,
    kwargs: Mapping[str, object] | None,
    spec: PartitionSpec,
    reduce: ReduceBy,
    reduce_axes: Iterable[str] | None,
    options: CallOptions,
    stacklevel: int,
) -> tuple[BoundModule | None, CallInputs, tuple[Any, ...], dict[str, Any]]:
    """Check the arguments of a functional_call. Return the modules, None inside torch.compile, and what it runs on."""
    spec = bind_spec(spec)
    check_params(params, spec)
    check_host_resident(params, spec)
    refuse_reduce_codec_in_graph(spec)
    accumulation, receiver = find_accumulation(params, spec, reduce, reduce_axes), None
    if accumulation:
        params, reduction, receiver = accumulation.replace(params)
        options = CallOptions(options.prefetch, options.in_flight, options.check_order, accumulation.weight)
    else:
        reduction = resolve_reduction(reduce, reduce_axes, spec.bound_mesh, (unit for unit in spec if unit.key in params))
    _check_count("prefetch", options.prefetch, 0)
    _check_count("in_flight", options.in_flight, 1)
    given, bound = (args if isinstance(args, tuple) else (args,), dict(kwargs or {})), None
    if not _torch.is_in_graph():
        bound = BoundModule.bind(model, spec)
        _check_materialized(model, params, spec, given)
        _check_reduced(model, params, spec, stacklevel + 1)
    return bound, CallInputs(params, spec, reduction, options, receiver), *given


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _check_materialized(model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec, given: object) -> None:
    """Raise ValueError for parameters on the meta device, in ``params`` or ignored, where the other tensors have values."""
    empty = {key: tensor for key, tensor in params.items() if tensor.is_meta}
    ignored = {} if empty else {name: model.get_parameter(name) for name in spec.ignored if name not in params}
    if left := {name: tensor for name, tensor in ignored.items() if tensor.is_meta}:
        raise ValueError(
            f"functional_call: parameters that the spec ignores are on the meta device, without values: {abridge(left)}; "
            "expected them in params"
        )
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)] if empty else []
    if tensors and not any(x.is_meta for x in tensors):
        raise ValueError(
            f"functional_call: params are on the meta device, without values: {abridge(empty)}; expected them to be "
            f"materialized as the arguments are, on {tensors[0].device}; fs.init(model, spec) gives params that are born "
            "sharded, with src= those of one rank"
        )


def _check_reduced(model: nn.Module, params: Mapping[str, Tensor], spec: PartitionSpec, stacklevel: int) -> None:
    """Refuse the model's own parameters where they are differentiated on several ranks; warn, once, of copies of them.

    Nothing reduces the gradients of full parameters, so each rank would train alone. `unshard` gives neither: there the
    caller has said who reduces. Its results are known by their layout, since all parameters of a unit are views of one
    buffer. A unit of a single parameter does not tell, and is passed over; so is what was computed, as by an inner step.
    """
    ranks = torch.Size(size for _, size in spec.bound_mesh.sizes).numel()
    full = [] if ranks == 1 else [unit for unit in spec if unit.key not in params and unit.requires_grad]
    named = dict(model.named_parameters(remove_duplicate=False)) if full else {}
    for unit in full:
        tensors = find_full_params(params, unit) or []
        for param, tensor in zip(unit.params, tensors, strict=True):
            if _torch.has_derivative(tensor) and _torch.shares_storage(tensor, named[param.name]):
                raise ValueError(
                    f"parameter '{param.name}' is the model's own, and with full parameters no gradient is reduced: on "
                    f"{ranks} ranks each would train alone; expected fs.shard(model, spec), or fs.unshard(params, spec) with "
                    "fs.reduce_grads on the gradients"
                )
        are_copies = (
            len({_torch.storage_id(_torch.unwrap(tensor)) for tensor in tensors}) > 1
            and any(map(_torch.has_derivative, tensors))
            and all(_torch.is_leaf(x) and x.dtype == unit.dtype for x in tensors)  # others were cast, as for mixed precision
        )
        if are_copies and has_peers(spec.bound_mesh) and is_first_warning(model, "full parameters"):
            warnings.warn(
                f"functional_call: parameter '{unit.params[0].name}' is given in full and differentiated, and no gradient of "
                f"full parameters is reduced: each of {ranks} ranks would train alone; expected fs.shard(model, spec), or "
                "fs.unshard(params, spec) with fs.reduce_grads on the gradients; filter this warning if your own code "
                "reduces them",
                stacklevel=stacklevel + 1,
            )
