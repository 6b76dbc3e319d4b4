"""Full parameters that are differentiated on several ranks: nothing reduces their gradients, so each rank would train alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .. import _torch
from .._spec.checks import find_full_params
from .._spec.spec import PartitionSpec
from ..collectives._mesh import ProcessAxis

__all__ = ["check_reduced"]

_WARNED: WeakSet[nn.Module] = WeakSet()
"""The models whose users have been warned: once for each, whatever the filters of warnings."""


def check_reduced(params: Mapping[str, Tensor], model: nn.Module, spec: PartitionSpec, stacklevel: int) -> None:
    """Raise ValueError where the model's own parameters are differentiated on several ranks; warn, once, of copies of them.

    What `unshard` gives is neither: there the caller has said who reduces. It is known by its layout, since all parameters
    of a unit are views of one buffer. A unit of a single parameter does not tell, and is passed over. So is what was
    computed, as by an inner step: its gradients go on to what it was computed from.
    """
    ranks = torch.Size(size for _, size in spec.bound_mesh.sizes).numel()
    full = [] if ranks == 1 else [unit for unit in spec if unit.key not in params and unit.requires_grad]
    named = dict(model.named_parameters(remove_duplicate=False)) if full else {}
    for unit in full:
        tensors = find_full_params(params, unit) or []
        for param, tensor in zip(unit.params, tensors, strict=True):
            if _torch.is_tracked(tensor) and _torch.storage_id(_torch.unwrap(tensor)) == _torch.storage_id(named[param.name]):
                raise ValueError(
                    f"parameter '{param.name}' is the model's own, and with full parameters no gradient is reduced: on "
                    f"{ranks} ranks each would train alone; expected fs.shard(model, spec), or fs.unshard(params, spec) with "
                    "fs.reduce_grads on the gradients"
                )
        as_stored = all(tensor.dtype == unit.dtype for tensor in tensors)  # others were cast, as for mixed precision by hand
        if as_stored and _are_copies(tensors) and _on_processes(spec) and model not in _WARNED:
            _WARNED.add(model)
            warnings.warn(
                f"functional_call: parameter '{unit.params[0].name}' is given in full and differentiated, and no gradient of "
                f"full parameters is reduced: each of {ranks} ranks would train alone; expected fs.shard(model, spec), or "
                "fs.unshard(params, spec) with fs.reduce_grads on the gradients; filter this warning if your own code "
                "reduces them",
                stacklevel=stacklevel + 1,
            )


def _are_copies(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors that are differentiated with respect to lie in memory of their own, each."""
    return (
        len({_torch.storage_id(_torch.unwrap(tensor)) for tensor in tensors}) > 1
        and any(map(_torch.is_tracked, tensors))
        and all(map(_torch.is_leaf, tensors))
    )


def _on_processes(spec: PartitionSpec) -> bool:
    return any(isinstance(axis, ProcessAxis) and axis.name for _, axis in spec.bound_mesh.axes)
