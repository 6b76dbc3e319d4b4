"""plan: what a training step holds, sends and takes, before it runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._core.checks import bind_spec, check_spec
from .._core.spec import PartitionSpec
from .._core.unit import P
from .._spec.precision import Precision, resolve_dtypes
from .._spec.table import format_rows
from .at_rest import StateBytes, UnitBytes, count_per_slice, device_bytes, map_p, optimizer_init, state_bytes, unit_bytes
from .picture import draw_plan
from .record import has_parameter, record_schedule, record_step
from .timeline import (
    CATEGORIES,
    Category,
    Event,
    Hardware,
    Held,
    Phase,
    Timeline,
    Traffic,
    format_bytes,
    format_seconds,
    sum_traffic,
)

# --- The printed form of a plan, and of several ---


def format_plan(plan: Plan) -> str:
    """Format a plan: memory by phase, communication by axis, time, and what is worth knowing of the units."""
    shown = CATEGORIES if plan.has_activations else CATEGORIES[:-1]
    memory = [["bytes per rank", *shown, "total"]]
    for name, held in (("at rest", plan.at_rest), *plan.peaks.items()):
        memory.append([name, *(format_bytes(held.get(c, 0)) for c in shown), format_bytes(sum(held.values()))])
    notes = [] if plan.has_activations else ["without activations: those need step="]
    if plan.host_bytes:
        notes.append(f"{format_bytes(plan.host_bytes)} in host memory")
    sizes = dict(plan.spec.bound_mesh.sizes)
    traffic = [["axis", "collective", "count", "in", "out", "sent by a rank", "time"]]
    for one in plan.traffic:
        nbytes = map(format_bytes, (one.input_bytes, one.output_bytes, one.sent_bytes))
        axis = f"{one.axis}={sizes[one.axis]}" if one.axis in sizes else one.axis
        traffic.append([axis, one.op, f"{one.count:,}", *nbytes, format_seconds(one.seconds)])
    without = "" if plan.tokens else "; without computation: that needs batch="
    facts = [
        f"step: {format_seconds(plan.seconds)}, {format_seconds(plan.exposed_seconds)} of it waiting{without}",
        "padding: {:,} elements; parameters on a rank: {:,} to {:,}".format(plan.padding, *plan.balance),
    ]
    if plan.units:
        facts.append(f"largest unit: '{plan.largest_unit}' of {plan.units[plan.largest_unit].numel:,} elements")
    sent = format_rows(traffic) if len(traffic) > 1 else ["nothing is sent"]
    return "\n".join([*format_rows(memory), *notes, "", *sent, "", *facts])


class Comparison(dict[str, "Plan"]):
    """Plans by name, fastest first; ``print`` shows their peaks and times."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        super().__init__(sorted(plans.items(), key=lambda item: (item[1].seconds, item[1].peak)))

    def __str__(self) -> str:
        rows = [["choice", "peak", "at rest", "step", "waiting"]]
        for name, plan in self.items():
            sizes = map(format_bytes, (plan.peak, sum(plan.at_rest.values())))
            rows.append([name, *sizes, *map(format_seconds, (plan.seconds, plan.exposed_seconds))])
        return "\n".join(format_rows(rows)) if len(rows) > 1 else "nothing fits"


# --- Other choices: those of `Plan.compare` for the main units, and those that `Plan.fit` tries ---

MICROBATCHES = (1, 2, 4, 8)
FIGURES = ["peak", "peaks", "has_activations", "padding", "balance", "largest_unit", "tokens", "seconds", "exposed_seconds"]
"""The figures of a plan that JSON has as they are."""
BF16 = Precision(param=torch.bfloat16, reduce=torch.float32)


def main_p(spec: PartitionSpec) -> P:
    """Return the `P` of most of a spec's elements."""
    numel: Counter[P] = Counter()
    for unit in spec:
        numel[unit.p] += unit.numel
    return max(numel, key=numel.__getitem__) if numel else spec.root


def replace_p(spec: PartitionSpec, p: P) -> PartitionSpec:
    """Return the spec with another `P` for its main units; their ``local``, ``at_rest`` and ``align`` stay."""
    old = main_p(spec)
    new = dataclasses.replace(p, local=old.local, at_rest=old.at_rest, align=old.align)
    return map_p(spec, lambda one: new if one == old else one)


def iter_choices(plan: Plan) -> Iterator[tuple[str, PartitionSpec, dict[str, int]]]:
    """Yield what `Plan.fit` tries, by name: axes, reshard, remat, offload and precision, and micro-batches of the step."""
    spec, base = plan.spec, main_p(plan.spec)
    dtype = max(spec, key=lambda unit: unit.numel).dtype if len(spec) else torch.float32
    counts = MICROBATCHES if plan.step is not None and has_parameter(plan.step, "microbatches") else (1,)
    precisions = (base.precision,) if base.precision or dtype != torch.float32 else (None, BF16)
    devices = {x.device.type for x in pytree.tree_leaves(plan.batch) if isinstance(x, Tensor) and not x.is_meta}
    offloads = (base.offload,) if devices <= {"cpu"} else dict.fromkeys((base.offload, "params"))
    others = (True, False), dict.fromkeys((base.remat, False, True)), precisions, offloads, counts
    for (bound, axes), choice in itertools.product(_iter_layouts(plan), [*itertools.product(*others)]):
        reshard, remat, precision, offload, count = choice
        if axes or reshard:  # else nothing is gathered
            axis = axes[0] if len(axes) == 1 else axes or None
            p = dataclasses.replace(base, axis=axis, reshard=reshard, remat=remat, precision=precision, offload=offload)
            name = f"{p}, " + " x ".join(f"{name}={size}" for name, size in bound.bound_mesh.sizes)
            many = {"microbatches": count} if count > 1 else {}
            yield name + (f", {count} micro-batches" if many else ""), replace_p(bound, p), many


def _iter_layouts(plan: Plan) -> Iterator[tuple[PartitionSpec, tuple[str, ...]]]:
    """Yield the spec on meshes of as many ranks, and the axes to split units over."""
    sizes = dict(plan.spec.bound_mesh.sizes)
    local = {axis for unit in plan.spec for axis in unit.local_axes}
    names = [name for name in sizes if name not in local]
    for i in range(len(names) + 1):
        yield plan.spec, tuple(names[i:])
    bandwidth = plan.hardware.bandwidth
    if len(sizes) == len(names) == 1 and not (isinstance(bandwidth, Mapping) and "replicate" not in bandwidth):
        ((name, ranks),) = sizes.items()
        for size in (2**i for i in range(1, ranks.bit_length()) if 2**i < ranks and ranks % 2**i == 0):
            yield plan.spec.on({"replicate": ranks // size, name: size}), (name,)


# --- `Plan` and plan ---


def count_tokens(batch: Any) -> int:
    """Return the number of tokens of a batch: a number, or tensors; 0 for None."""
    if batch is None or (type(batch) is int and batch > 0):
        return batch or 0
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    if not tensors:
        error = ValueError if isinstance(batch, int | float) else TypeError
        raise error(f"plan: batch: expected a number of tokens, at least 1, or tensors, or None, got {batch!r:.80}")
    integers = [x for x in tensors if not x.is_floating_point() and not x.is_complex()]
    return integers[0].numel() if integers else tensors[0].numel() // max(tensors[0].shape[-1] if tensors[0].dim() else 1, 1)


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

    @cached_property
    def timeline(self) -> Timeline:
        """The events with their times and the bytes that are held."""
        return Timeline(self.events, self.at_rest, self.hardware)

    @cached_property
    def at_rest(self) -> dict[Category, int]:
        """The bytes on the device between steps, by category."""
        parameters, optimizer = device_bytes(self.units)
        batch: dict[Category, int] = {"activations": self.batch_bytes} if self.batch_bytes else {}
        return {"parameters": parameters, "optimizer": optimizer, **batch}

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory between steps, of units with ``P(offload="params")``."""
        return sum(unit.parameters + unit.optimizer for unit in self.units.values() if unit.on_host)

    @property
    def peak(self) -> int:
        """The most bytes that are on the device at once."""
        return max(sum(held.values()) for held in self.peaks.values())

    @property
    def peaks(self) -> dict[Phase, Held]:
        """By phase ("forward", "backward", "update"), the bytes by category when the most are held."""
        return self.timeline.peaks

    @cached_property
    def peaks_by_unit(self) -> dict[str, int]:
        """By unit key, the most bytes that are held while the unit is worked on."""
        peaks = Counter[str]()
        for event, held in zip(self.events, self.timeline.held(), strict=True):
            peaks[event.unit] = max(peaks[event.unit], sum(held.values()))
        return peaks

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
        sizes = dict(self.spec.bound_mesh.sizes)
        totals = torch.zeros([*sizes.values()], dtype=torch.int64)
        for unit in self.spec:
            axes = unit.p.axes
            counts = count_per_slice(unit, self.spec).view([sizes[axis] for axis in axes])
            counts = counts.permute([axes.index(axis) for axis in sizes if axis in axes])
            totals += counts.reshape([size if axis in axes else 1 for axis, size in sizes.items()])
        return int(totals.min()), int(totals.max())

    @property
    def largest_unit(self) -> str:
        """The key of the unit whose gathered buffer is the largest."""
        nbytes = lambda unit: self.spec.padded_numel(unit) * resolve_dtypes(unit.p, unit.dtype).param.itemsize  # noqa: E731
        return max(self.spec, key=nbytes).key if len(self.spec) else ""

    @property
    def seconds(self) -> float:
        """The time of the step on the plan's hardware."""
        return self.timeline.step_seconds

    @property
    def exposed_seconds(self) -> float:
        """The part of the time in which the device waits for collectives and copies."""
        return self.timeline.exposed_seconds

    def compare(self, choices: Mapping[str, PartitionSpec | P]) -> Comparison:
        """Return the plans of other choices for the same step, batch, optimizer and hardware, fastest first.

        Args:
            choices: By name a spec, on a mesh or else on this plan's, or a `P` for the units that have this plan's main one.

        Raises:
            ValueError: If the step takes no ``spec``, so that it would run as before.
        """
        specs = {name: replace_p(self.spec, one) if isinstance(one, P) else check_spec(one) for name, one in choices.items()}
        mesh = self.spec.bound_mesh
        return Comparison({name: self._replan(spec if spec.sizes else spec.on(mesh)) for name, spec in specs.items()})

    def fit(self, memory: float | str | None = None, *, headroom: float = 0.1) -> Comparison:
        """Return the choices whose peak fits into the memory of a device, fastest first.

        Tries the axes to split over (and HSDP of other sizes on a mesh of one axis), reshard, remat, bfloat16 where nothing
        is said of precision, offloaded parameters where the batch is on an accelerator, and 1 to 8 micro-batches if the step
        takes ``microbatches``.

        Args:
            memory: Bytes, such as "80GB"; by default those of the plan's hardware.
            headroom: The part of them that is left to fragmentation, the libraries, and what kernels allocate.

        Raises:
            ValueError: Without ``step``, as activations are not counted then, and if the step takes no ``spec``.
        """
        if self.step is None:
            raise ValueError("fit: without a step activations are not counted: expected a plan(spec, step=..., batch=...)")
        if not 0 <= headroom < 1:
            raise ValueError(f"fit: headroom: expected a part of the memory, at least 0 and below 1, got {headroom!r}")
        hardware = self.hardware if memory is None else dataclasses.replace(self.hardware, memory=memory)
        limit = hardware.memory_bytes * (1 - headroom)
        plans, init = dict[str, Plan](), optimizer_init(self.optimizer)
        for name, spec, options in iter_choices(self):
            if sum(device_bytes(unit_bytes(spec, state_bytes(spec, init)))) > limit:
                continue  # whatever the step does
            if (found := self._replan(spec, options)).peak <= limit:
                plans[name] = found
        return Comparison(plans)

    def _replan(self, spec: PartitionSpec, options: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan of the same step with another spec and other options of the step."""
        if self.step is not None and not has_parameter(self.step, "spec"):
            raise ValueError("the step would run with the same spec: expected step(params, state, batch, *, spec)")
        step = functools.partial(self.step, **options) if self.step and options else self.step
        return plan(spec, batch=self.batch, step=step, optimizer=self.optimizer, hardware=self.hardware)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain dicts, lists, numbers and strings."""
        return {
            "mesh": dict(self.spec.bound_mesh.sizes),
            "hardware": dataclasses.asdict(self.hardware),
            "at_rest": {**self.at_rest, "host": self.host_bytes},
            "optimizer_state": dict(sum(map(Counter, self.optimizer_state.values()), Counter[str]())),
            "traffic": [dataclasses.asdict(one) for one in self.traffic],
            **{name: getattr(self, name) for name in FIGURES},
            "units": {key: {**unit._asdict(), "peak": self.peaks_by_unit.get(key, 0)} for key, unit in self.units.items()},
        }

    def to_svg(self) -> str:
        """Return a picture as the text of an SVG file: memory over the step, units on the ranks, and streams over time."""
        notes = [f"{self.tokens:,} tokens on a rank" if self.tokens else "without computation, which needs a batch"]
        notes += [] if self.has_activations else ["without activations, which need step="]
        return draw_plan(self.timeline, self.spec, self.units, notes)

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

    Without ``step`` `functional_call` runs on shapes, with a model that only reads its parameters, in the order of
    ``spec.order``. The update writes in place, as with ``donate=True``; nothing counts activations. With ``step`` the step runs
    once on fake tensors, on a process group of ranks in name only, and all that it allocates, computes and sends is counted.
    Indices that a model computes from its data, such as a router's, are spread evenly. See ``examples/guide/planning.md``.

    Args:
        spec: The spec, on a mesh.
        batch: This rank's number of tokens, or its batch: tensors of which the first one with integers has an element for each
            token, or else the first one a row. Without it, computation takes no time.
        step: ``step(params, state, batch, *, spec)``: the training step, which gives ``spec`` to `functional_call`. It may
            leave ``spec`` out where its own is bound to no mesh, and the mesh here is one axis "shard". ``batch`` are tensors.
        optimizer: The name of a class of torch.optim, such as "adamw", such a class, the pair ``(init, update)``, or None.
        hardware: The rates that times are computed from; a `Hardware` with its defaults if not given.

    Raises:
        ValueError: For simulated ranks, a batch of no tokens, an axis without a bandwidth, and an unknown optimizer.
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
    if not isinstance(hardware, Hardware | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"plan: hardware: expected a Hardware such as fs.Hardware(memory='80GB'), or None, got {hardware!r}")
    init, tokens = optimizer_init(optimizer), count_tokens(batch)
    state = state_bytes(spec, init)
    units = unit_bytes(spec, state)
    events, batch_bytes = record_step(step, spec, batch, init) if step else (record_schedule(spec, units, tokens), 0)
    return Plan(spec, hardware or Hardware(), events, units, state, tokens, batch_bytes, batch, step, optimizer)
