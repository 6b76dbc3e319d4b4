"""The events of a step from the spec alone: its routes, its modules, and the update."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._units.buckets import BUCKET_BYTES, BUCKET_BYTES_CUDA
from .._units.route import Route
from .at_rest import UnitBytes, is_on_host
from .events import Event
from .forecast import CallForecast
from .module_runs import module_runs
from .step_facts import StepFacts

__all__ = ["count_tokens", "forecast", "unit_routes"]


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch: a number, or tensors; 0 for None."""
    if batch is None or isinstance(batch, int):
        return batch or 0
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    if not tensors:
        raise TypeError(f"plan: batch: expected a number of tokens, or tensors, got {batch!r:.80}")
    integers = [x for x in tensors if not x.is_floating_point() and not x.is_complex()]
    return integers[0].numel() if integers else tensors[0].numel() // max(tensors[0].shape[-1] if tensors[0].dim() else 1, 1)


def forecast(spec: PartitionSpec, units: dict[str, UnitBytes], tokens: int) -> list[Event]:
    """Return the events of a step from shapes alone."""
    on_cpu = spec.bound_mesh.device_type == "cpu"
    facts = StepFacts(spec, unit_routes(spec), tokens, BUCKET_BYTES if on_cpu else BUCKET_BYTES_CUDA)
    call = CallForecast(facts, module_runs(spec))
    call.forward()
    facts.events.phase = "backward"
    call.backward()
    facts.events.phase = "update"
    for unit in spec:
        if unit.requires_grad and not units[unit.key].on_host:
            grads = units[unit.key].parameters
            moved = 3 * units[unit.key].parameters + 2 * units[unit.key].optimizer
            facts.events.add("update", unit.key, moved_bytes=moved)
            facts.events.add("memory", unit.key, {"gradients": -grads})
    return facts.events.events


def unit_routes(spec: PartitionSpec) -> dict[str, Route]:
    """Return each unit's route; that of a unit on the host leads over a device, also where none is known."""
    routes: dict[str, Route] = {}
    for unit in spec:
        route = Route.for_unit(unit, spec.bound_mesh, Reduction(), unit.p.precision, spec.stored(unit)[1])
        if is_on_host(unit, spec):
            at = route.device or torch.device("cuda")
            route = dataclasses.replace(route, device=at, has_own_buffer=True, reshard_after_forward=bool(unit.p.reshard))
        routes[unit.key] = route
    return routes
