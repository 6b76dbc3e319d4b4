"""plan: what a training step holds, sends and takes, before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._spec.bind import bind_spec
from .._spec.division import Reduction
from .._spec.spec import PartitionSpec
from .._units.buckets import BUCKET_BYTES, BUCKET_BYTES_CUDA
from .._units.route import Route
from .at_rest import StateBytes, UnitBytes, balance, is_on_host, optimizer_init, state_bytes, unit_bytes
from .events import Category, Collective, Event, Phase
from .forecast import CallForecast, StepFacts
from .hardware import Hardware
from .module_runs import module_runs
from .run_step import record_step
from .table import format_plan
from .timeline import Held, Timeline

__all__ = ["Plan", "Traffic", "plan"]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind that a rank takes part in along one mesh axis in a step."""

    axis: str
    op: str
    """"all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"."""
    count: int
    input_bytes: int
    output_bytes: int
    sent_bytes: int
    """The bytes that this rank sends over the axis."""
    seconds: float
    """Their time, hidden behind computation or not."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank holds, sends and computes in a training step. `plan` makes it; ``print`` shows it as a table."""

    spec: PartitionSpec
    """The spec, on its mesh."""
    hardware: Hardware
    events: Sequence[Event]
    units: dict[str, UnitBytes]
    """By unit key, its bytes between steps."""
    optimizer_state: StateBytes
    tokens: int
    """Tokens of this rank's batch; 0 where computation is not counted."""
    batch_bytes: int
    """Bytes of this rank's batch, where activations are counted."""
    has_activations: bool
    """Whether activations are counted: the plan ran a step."""

    @cached_property
    def timeline(self) -> Timeline:
        """The events with their times and the bytes that are held."""
        return Timeline(self.events, self.at_rest, self.hardware)

    @cached_property
    def at_rest(self) -> dict[Category, int]:
        """The bytes on the device between steps, by category."""
        there = [unit for unit in self.units.values() if not unit.on_host]
        parameters, optimizer = (sum(getattr(unit, name) for unit in there) for name in ("parameters", "optimizer"))
        batch: dict[Category, int] = {"activations": self.batch_bytes} if self.batch_bytes else {}
        return {"parameters": parameters, "optimizer": optimizer, **batch}

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory between steps, of units with ``P(offload="params")``."""
        return sum(unit.parameters + unit.optimizer for unit in self.units.values() if unit.on_host)

    @property
    def peak(self) -> int:
        """The most bytes that are on the device at once."""
        return sum(self.timeline.peak.values())

    @property
    def peaks(self) -> dict[Phase, Held]:
        """By phase ("forward", "backward", "update"), the bytes by category when the most are held."""
        return self.timeline.peaks

    @property
    def peaks_by_unit(self) -> dict[str, int]:
        """By unit key, the most bytes that are held while the unit is worked on."""
        return self.timeline.peaks_by_unit

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """What is sent in a step, a line for each mesh axis and kind of collective."""
        found: dict[tuple[str, str], list[Collective]] = {}
        for event in self.events:
            if (one := event.collective) is not None:
                found.setdefault((one.axis, one.op), []).append(one)
        return tuple(
            Traffic(
                axis,
                op,
                len(some),
                sum(one.input_bytes for one in some),
                sum(one.output_bytes for one in some),
                sum(one.sent_bytes for one in some),
                sum(map(self.hardware.collective_seconds, some)),
            )
            for (axis, op), some in found.items()
        )

    @property
    def padding(self) -> int:
        """The elements of all buffers that are no parameter's."""
        return sum(unit.padding for unit in self.units.values())

    @cached_property
    def balance(self) -> tuple[int, int]:
        """The fewest and the most elements of parameters, without padding, that a rank has."""
        return balance(self.spec)

    @property
    def largest_unit(self) -> str:
        """The key of the unit whose gathered buffer is the largest."""
        routes = _routes(self.spec)
        return max(routes, key=lambda key: routes[key].padded_numel * routes[key].dtypes.param.itemsize, default="")

    @property
    def seconds(self) -> float:
        """The time of the step on the plan's hardware."""
        return self.timeline.step_seconds

    @property
    def exposed_seconds(self) -> float:
        """The part of the time in which the device waits for collectives and copies."""
        return self.timeline.exposed_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain dicts, lists, numbers and strings."""
        return {
            "mesh": dict(self.spec.bound_mesh.sizes),
            "hardware": dataclasses.asdict(self.hardware),
            "at_rest": {**self.at_rest, "host": self.host_bytes},
            "optimizer_state": _sum_state(self.optimizer_state),
            "peak": self.peak,
            "peaks": self.peaks,
            "has_activations": self.has_activations,
            "traffic": [dataclasses.asdict(one) for one in self.traffic],
            "padding": self.padding,
            "balance": list(self.balance),
            "largest_unit": self.largest_unit,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
            "units": {key: {**unit._asdict(), "peak": self.peaks_by_unit.get(key, 0)} for key, unit in self.units.items()},
        }

    def __str__(self) -> str:
        return format_plan(self)

    def __repr__(self) -> str:
        return f"<Plan: {self.peak:,} bytes at the peak, {self.seconds:.4g} s, on {dict(self.spec.bound_mesh.sizes)}>"


def plan(
    spec: PartitionSpec,
    *,
    batch: Any = None,
    step: Callable[..., Any] | None = None,
    optimizer: object = "adamw",
    hardware: Hardware | None = None,
) -> Plan:
    """Return what one rank holds, sends and computes in a training step, before it runs.

    The mesh may have any sizes (``spec.on({"replicate": 32, "shard": 512})``), and no process group is needed.

    Without ``step`` the plan is made from the spec alone. Gathers and reductions are those of `functional_call`, with units in
    the order of ``spec.order``; the update writes in place, as with ``donate=True``. Activations are not counted.

    With ``step`` the step runs once on fake tensors, on a process group of ranks in name only, and all that it allocates,
    computes and sends is counted. Indices that a model computes from its data, such as a router's, are spread evenly.
    See ``examples/guide/planning.md``.

    Args:
        spec: The spec, on a mesh.
        batch: This rank's number of tokens, or its batch: tensors of which the first one with integers has an element for each
            token, or else the first one a row. Without it, computation takes no time.
        step: ``step(params, state, batch, *, spec)``: the training step, which gives ``spec`` to `functional_call`. It may
            leave ``spec`` out where its own is bound to no mesh, and the mesh here is one axis "shard". ``batch`` are tensors.
        optimizer: The name of a class of torch.optim, such as "adamw", such a class, the pair ``(init, update)``, or None.
        hardware: The rates that times are computed from; a `Hardware` with its defaults if not given.

    Returns:
        A `Plan`: print it, or ask for `Plan.peak`, `Plan.traffic`, `Plan.seconds`.

    Raises:
        ValueError: For simulated ranks, an axis of the mesh without a bandwidth, and an unknown optimizer.
        RuntimeError: With ``step``, if this process has a process group.
        NotImplementedError: With ``step``, for ``P(offload=...)`` where the batch is not on an accelerator.

    Example:
        >>> import torch, funshard as fs
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
        >>> plan = fs.plan(fs.by_type(torch.nn.Linear)(model).on({"shard": 8}))
        >>> plan.at_rest
        {'parameters': 4196864, 'optimizer': 8393728}
        >>> [(one.op, one.count, one.output_bytes) for one in plan.traffic]
        [('all_gather', 3, 50368512), ('reduce_scatter', 2, 4196864)]
    """
    spec = bind_spec(spec)
    if spec.bound_mesh.is_simulated:
        raise ValueError("plan: the spec is on simulated ranks: expected a mesh of processes, or sizes such as {'shard': 8}")
    init = optimizer_init(optimizer)
    state = state_bytes(spec, init)
    units = unit_bytes(spec, state)
    tokens = count_tokens(batch)
    if step is None:
        events, batch_bytes = forecast(spec, units, tokens), 0
    else:
        events, batch_bytes = record_step(step, spec, batch, init)
    return Plan(spec, hardware or Hardware(), events, units, state, tokens, batch_bytes, step is not None)


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
    facts = StepFacts(spec, _routes(spec), tokens, BUCKET_BYTES if on_cpu else BUCKET_BYTES_CUDA)
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


def _routes(spec: PartitionSpec) -> dict[str, Route]:
    """Return each unit's route; that of a unit on the host leads over a device, also where none is known."""
    routes: dict[str, Route] = {}
    for unit in spec:
        route = Route.for_unit(unit, spec.bound_mesh, Reduction(), unit.p.precision, spec.stored(unit)[1])
        if is_on_host(unit, spec):
            at = route.device or torch.device("cuda")
            route = dataclasses.replace(route, device=at, has_own_buffer=True, reshard_after_forward=unit.p.reshard)
        routes[unit.key] = route
    return routes


def _sum_state(state: StateBytes) -> dict[str, int]:
    found: dict[str, int] = {}
    for kinds in state.values():
        for kind, size in kinds.items():
            found[kind] = found.get(kind, 0) + size
    return found
