"""plan: what a training step holds, sends and takes, before it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .._spec.bind import bind_spec
from .._spec.byte_size import parse_bytes
from .._spec.spec import PartitionSpec
from .._spec.unit import P
from ._picture.picture import draw_plan
from .at_rest import StateBytes, UnitBytes, balance, optimizer_init, state_bytes, sum_state, unit_bytes
from .choices import Comparison, candidates, replace_p
from .events import Category, Event, Phase
from .from_spec import count_tokens, forecast, unit_routes
from .hardware import Hardware
from .run_step import has_parameter, record_step
from .table import format_plan
from .timeline import Held, Timeline
from .traffic import Traffic, sum_traffic

__all__ = ["Plan", "plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The memory, communication and time of a training step on one rank. `plan` makes it; ``print`` shows it as a table."""

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
    batch: Any = None
    step: Callable[..., Any] | None = None
    optimizer: object = None

    @property
    def has_activations(self) -> bool:
        """Whether activations are counted: the plan ran a step."""
        return self.step is not None

    @property
    def is_on_host_alone(self) -> bool:
        """Whether the step ran on the CPU, where nothing can be offloaded."""
        tensors = (x for x in pytree.tree_leaves(self.batch) if isinstance(x, Tensor))
        return self.step is not None and next((x.device.type for x in tensors if not x.is_meta), "cpu") == "cpu"

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
        """The bytes that a step sends, a line for each mesh axis and kind of collective."""
        return sum_traffic(self.events, self.hardware)

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
        routes = unit_routes(self.spec)
        return max(routes, key=lambda key: routes[key].buffer_bytes, default="")

    @property
    def seconds(self) -> float:
        """The time of the step on the plan's hardware."""
        return self.timeline.step_seconds

    @property
    def exposed_seconds(self) -> float:
        """The part of the time in which the device waits for collectives and copies."""
        return self.timeline.exposed_seconds

    def compare(self, choices: Mapping[str, PartitionSpec | P]) -> Comparison:
        """Return the plans of other choices for the same step, batch, optimizer and hardware.

        Args:
            choices: By name a spec, on a mesh or else on this plan's, or a `P` for the units that have this plan's main one.

        Returns:
            The plans by name, fastest first; ``print`` shows a table.

        Raises:
            ValueError: If the step takes no ``spec``, so that it would run as before.
        """
        self._check_step_takes_spec("compare")
        plans: dict[str, Plan] = {}
        for name, choice in choices.items():
            spec = replace_p(self.spec, choice) if isinstance(choice, P) else choice
            plans[name] = self._replan(spec if spec.sizes else spec.on(self.spec.bound_mesh))
        return Comparison.by_time(plans)

    def fit(self, memory: float | str | None = None, *, headroom: float = 0.1) -> Comparison:
        """Return the choices whose peak fits into the memory of a device, fastest first.

        Tries the axes to split over (and HSDP of other sizes on a mesh of one axis), reshard, remat, bfloat16 where nothing
        is said of precision, offloaded parameters where the batch is on an accelerator, and 1 to 8 micro-batches if the step
        takes ``microbatches``.

        Args:
            memory: Bytes, such as "80GB"; by default those of the plan's hardware.
            headroom: The part of them that is left to fragmentation, the libraries, and what kernels allocate.

        Returns:
            The plans by choice; ``print`` shows a table.

        Raises:
            ValueError: Without ``step``, as activations are not counted then, and if the step takes no ``spec``.
        """
        if self.step is None:
            raise ValueError("fit: without a step activations are not counted: expected a plan(spec, step=..., batch=...)")
        self._check_step_takes_spec("fit")
        limit = parse_bytes(self.hardware.memory if memory is None else memory) * (1 - headroom)
        plans: dict[str, Plan] = {}
        for choice in candidates(self):
            rest = plan(choice.spec, optimizer=self.optimizer, hardware=self.hardware)
            if sum(rest.at_rest.values()) > limit:
                continue  # whatever the step does
            found = self._replan(choice.spec, choice.options)
            if found.peak <= limit:
                plans[choice.name] = found
        return Comparison.by_time(plans)

    def _check_step_takes_spec(self, what: str) -> None:
        """Raise ValueError if the planned step cannot run with another spec."""
        if self.step is not None and not has_parameter(self.step, "spec"):
            raise ValueError(f"{what}: the step would run with the same spec: expected step(params, state, batch, *, spec)")

    def _replan(self, spec: PartitionSpec, options: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan of the same step with another spec and other options of the step."""
        step = functools.partial(self.step, **options) if self.step and options else self.step
        return plan(spec, batch=self.batch, step=step, optimizer=self.optimizer, hardware=self.hardware)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain dicts, lists, numbers and strings."""
        return {
            "mesh": dict(self.spec.bound_mesh.sizes),
            "hardware": dataclasses.asdict(self.hardware),
            "at_rest": {**self.at_rest, "host": self.host_bytes},
            "optimizer_state": sum_state(self.optimizer_state),
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

    def to_svg(self) -> str:
        """Return a picture as the text of an SVG file: memory over the step, units on the ranks, and streams over time."""
        return draw_plan(self)

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
    return Plan(spec, hardware or Hardware(), events, units, state, tokens, batch_bytes, batch, step, optimizer)
