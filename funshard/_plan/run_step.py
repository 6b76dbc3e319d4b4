"""A user's step run on shapes alone: fake tensors, on a process group of ranks in name only."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch
from .._spec.spec import PartitionSpec
from ..collectives._mesh import Mesh, ProcessAxis
from .at_rest import Init
from .events import Event
from .record import StepRecorder

__all__ = ["has_parameter", "record_step"]


def has_parameter(step: Callable[..., Any], name: str) -> bool:
    """Return whether a step has a parameter of this name."""
    return name in inspect.signature(step).parameters


def record_step(
    step: Callable[..., Any], spec: PartitionSpec, batch: Any, init: Init | None, **options: Any
) -> tuple[list[Event], int]:
    """Return the events of ``step(params, state, batch)``, run on fake tensors, and the bytes of its batch.

    Raises:
        RuntimeError: If this process has a process group, or the step sends nothing although its spec has several ranks.
        NotImplementedError: Naming the unit, for offloading where the device is the host.
    """
    sizes = dict(spec.bound_mesh.sizes)
    device = next((x.device for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and not x.is_meta), torch.device("cpu"))
    if device.type == "cpu" and (unit := next((unit for unit in spec if unit.p.offloads), None)):
        raise NotImplementedError(
            f"unit '{unit.key}' has {unit.p}, and where the device is the host nothing is copied: expected a batch on an "
            "accelerator, or a plan without step="
        )
    with _torch.fake_world(math.prod(sizes.values())), torch.enable_grad():
        mesh, groups = _make_mesh(sizes, device.type)
        bound = spec.on(mesh)
        if has_parameter(step, "spec"):
            options["spec"] = bound
        with _torch.fake_mode():
            params = {unit.key: _make_shard(bound, unit.key, device) for unit in bound}
            state: Any = init({key: x for key, x in params.items() if bound.by_key[key].requires_grad}) if init else {}
            fake_batch = pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device=device), batch)
            recorder = StepRecorder(params, groups)
            recorder.hold((params, state, fake_batch))
            with recorder, _torch.report_resizes(recorder.resize):
                result = step(params, state, fake_batch, **options)
            size = sum(x.nbytes for x in pytree.tree_leaves(fake_batch) if isinstance(x, Tensor))
            events = list(recorder.events.events)
            del result
    if any(axis > 1 for axis in sizes.values()) and not any(event.collective for event in events):
        raise RuntimeError(
            f"plan: the step sends nothing, and its mesh has axes {sizes}: expected a step that takes spec= and gives it to "
            "functional_call, or one whose spec is bound to no mesh"
        )
    return events, size


def _make_shard(spec: PartitionSpec, key: str, device: torch.device) -> Tensor:
    length, dtype = spec.stored(spec.by_key[key])
    return torch.empty(length, dtype=dtype, device=device)


def _make_mesh(sizes: dict[str, int], device_type: str) -> tuple[Mesh, dict[str, tuple[str, int]]]:
    """Return a mesh over the ranks in name only, on which this process is the first; and each group's axis and size."""
    axes: list[tuple[str, ProcessAxis]] = []
    groups: dict[str, tuple[str, int]] = {}
    stride = math.prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        group = _torch.axis_group(range(0, size * stride, stride))
        axes.append((name, ProcessAxis(size, 0, group)))
        groups[group] = name, size
    return Mesh(tuple(axes), device_type), groups
