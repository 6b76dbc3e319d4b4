"""plan: what a training step holds, sends and takes, before it runs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import policies
from .._call.call import functional_call
from .._core.checks import bind_spec, check_spec
from .._core.spec import PartitionSpec
from .._core.unit import P
from .._spec.table import format_rows
from .._transforms.products import grad_and_value
from .costs import (
    CATEGORIES,
    Category,
    Event,
    Hardware,
    Timeline,
    UnitBytes,
    format_bytes,
    format_seconds,
    map_p,
    resolve_optimizer,
    unit_bytes,
)
from .picture import draw_plan
from .record import has_parameter, record_schedule, record_step


class Comparison(dict[str, "Plan"]):
    """Plans by name, fastest first; ``print`` shows their peaks and times."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        super().__init__(sorted(plans.items(), key=lambda item: (item[1].seconds, item[1].peak)))

    def __str__(self) -> str:
        rows = [["choice", "peak", "at rest", "step", "waiting"]]
        for name, plan in self.items():
            sizes = map(format_bytes, (plan.peak, sum(plan.at_rest.values())))
            rows.append([name, *sizes, *map(format_seconds, (plan.seconds, plan.exposed_seconds))])
        return "\n".join(format_rows(rows))


def replace_p(spec: PartitionSpec, p: P) -> PartitionSpec:
    """Return the spec with another `P` for its main units, of most elements; ``local``, ``at_rest`` and ``align`` stay."""
    numel = Counter[P]()
    for unit in spec:
        numel[unit.p] += unit.numel
    old = max(numel, key=numel.__getitem__, default=spec.root)
    new = dataclasses.replace(p, local=old.local, at_rest=old.at_rest, align=old.align)
    return map_p(spec, lambda one: new if one == old else one)


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


class Plan(Timeline):
    """The memory, communication and time of a training step on one rank. `plan` makes it; ``print`` shows it as a table.

    Beside what is listed here it has ``spec``, ``hardware``, ``events``, ``units`` (by unit key the bytes between steps),
    ``at_rest`` (the bytes on the device between steps, by category), ``peaks`` (those of each phase when the most are held),
    ``traffic`` (a line for each mesh axis and kind of collective), ``seconds`` and ``exposed_seconds`` (the time of the step,
    and the part in which the device waits for collectives and copies), ``tokens`` and ``batch_bytes`` of this rank's batch.
    """

    def __init__(
        self,
        spec: PartitionSpec,
        hardware: Hardware,
        events: Sequence[Event],
        units: dict[str, UnitBytes],
        batch_bytes: int,
        **step: Any,
    ) -> None:
        self.spec, self.units, self.batch_bytes = spec, units, batch_bytes
        self.tokens = count_tokens(step["batch"])
        self.has_activations = step["step"] is not None
        self._step = step  # the arguments of `plan` for another spec
        there = [unit for unit in self.units.values() if not unit.on_host]
        self.at_rest: dict[Category, int] = {
            "parameters": sum(unit.parameters for unit in there),
            "optimizer": sum(unit.optimizer for unit in there),
            **({"activations": batch_bytes} if batch_bytes else {}),
        }
        super().__init__(events, self.at_rest, hardware)

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory between steps, of units with ``P(offload="params")``."""
        return sum(unit.parameters + unit.optimizer for unit in self.units.values() if unit.on_host)

    @property
    def peak(self) -> int:
        """The most bytes that are on the device at once."""
        return max(sum(held.values()) for held in self.peaks.values())

    @property
    def padding(self) -> int:
        """The elements of all buffers that are no parameter's."""
        return sum(unit.padding for unit in self.units.values())

    def compare(self, choices: Mapping[str, PartitionSpec | P]) -> Comparison:
        """Return the plans of other choices for the same step, batch, optimizer and hardware, fastest first.

        Args:
            choices: By name a spec, on a mesh or else on this plan's, or a `P` for the units that have this plan's main one.

        Raises:
            ValueError: If the step takes no ``spec``, so that it would run as before.
        """
        specs = {name: replace_p(self.spec, one) if isinstance(one, P) else check_spec(one) for name, one in choices.items()}
        if self.has_activations and not has_parameter(self._step["step"], "spec"):
            raise ValueError("the step would run with the same spec: expected step(params, state, batch, *, spec)")
        bound = {name: spec if spec.sizes else spec.on(self.spec.bound_mesh) for name, spec in specs.items()}
        return Comparison({name: plan(spec, hardware=self.hardware, **self._step) for name, spec in bound.items()})

    def to_svg(self) -> str:
        """Return a picture as the text of an SVG file: memory, units and streams over the step."""
        notes = [f"{self.tokens:,} tokens on a rank" if self.tokens else "without computation, which needs a batch"]
        notes += [] if self.has_activations else ["without activations, which need step="]
        return draw_plan(self, self.spec, notes)

    def __str__(self) -> str:
        shown = CATEGORIES if self.has_activations else CATEGORIES[:-1]
        memory = [["bytes per rank", *shown, "total"]]
        for name, held in (("at rest", self.at_rest), *self.peaks.items()):
            memory.append([name, *(format_bytes(held.get(c, 0)) for c in shown), format_bytes(sum(held.values()))])
        notes = [] if self.has_activations else ["without activations: those need step="]
        if self.host_bytes:
            notes.append(f"{format_bytes(self.host_bytes)} in host memory")
        sizes = dict(self.spec.bound_mesh.sizes)
        traffic = [["axis", "collective", "count", "in", "out", "sent by a rank", "time"]]
        for one in self.traffic:
            nbytes = map(format_bytes, (one.input_bytes, one.output_bytes, one.sent_bytes))
            axis = f"{one.axis}={sizes[one.axis]}" if one.axis in sizes else one.axis
            traffic.append([axis, one.op, f"{one.count:,}", *nbytes, format_seconds(one.seconds)])
        without = "" if self.tokens else "; without computation: that needs batch="
        step = f"step: {format_seconds(self.seconds)}, {format_seconds(self.exposed_seconds)} of it waiting{without}"
        sent = format_rows(traffic) if len(traffic) > 1 else ["nothing is sent"]
        return "\n".join([*format_rows(memory), *notes, "", *sent, "", step, f"padding: {self.padding:,} elements"])

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
    init, tokens = resolve_optimizer(optimizer)[0], count_tokens(batch)
    units = unit_bytes(spec, init)
    events, size = record_step(step, spec, batch, init) if step else (record_schedule(spec, units, tokens), 0)
    return Plan(spec, hardware or Hardware(), events, units, size, batch=batch, step=step, optimizer=optimizer)


# --- `python -m funshard plan`: a plan of a model from the command line ---

_BATCH = "a rank's tokens; or a shape, as 8x1024 or 8x1024:float32, to run the model, with a cross entropy of its first result"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    parser = argparse.ArgumentParser("python -m funshard", description="Plan a training step before it runs.")
    command = parser.add_subparsers(required=True).add_parser("plan", description="Plan a training step, with AdamW.")
    command.add_argument("model", metavar="MODULE:CALLABLE", help="what returns the model; called on the meta device")
    command.add_argument("--policy", default="whole", help="whole, or by_type:NAME[,NAME] (whole)")
    command.add_argument("--mesh", type=axes_and_sizes, default="shard=8", help="such as replicate=2,shard=8 (shard=8)")
    command.add_argument("--batch", type=shape_or_tokens, help=_BATCH)
    command.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan into a file")
    args = parser.parse_args(argv)
    try:
        sys.path.insert(0, os.getcwd())
        module, _, name = args.model.partition(":")
        with torch.device("meta"):
            model: nn.Module = getattr(importlib.import_module(module), name or "MODULE:CALLABLE")()
        types, names = {type(x).__name__: type(x) for x in model.modules()}, args.policy.removeprefix("by_type:").split(",")
        if args.policy != "whole" and (not args.policy.startswith("by_type:") or not types.keys() >= {*names}):
            raise ValueError(f"--policy: expected whole, or by_type:NAME with some of {sorted(types)}, got {args.policy!r}")
        policy = policies.whole() if args.policy == "whole" else policies.by_type(*(types[name] for name in names))
        step = _make_step(model) if isinstance(args.batch, Tensor) else None
        found = plan(policy(model).on(args.mesh), batch=args.batch, step=step)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        command.error(str(error))
    if args.svg:
        args.svg.write_text(found.to_svg())
    print(found)


def axes_and_sizes(text: str) -> dict[str, int]:
    """Return the sizes of a mesh by axis."""
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


def shape_or_tokens(text: str) -> Tensor | int:
    """Return a number, or an empty tensor of a shape such as ``8x1024:float32``."""
    shape, _, dtype = text.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    return sizes[0] if text.isdecimal() else torch.empty(sizes, dtype=getattr(torch, dtype or "int64"), device="meta")


def _make_step(model: nn.Module) -> Callable[..., Any]:
    """Return a training step of a model: the cross entropy of its first result, and AdamW in place."""
    _, update = resolve_optimizer("adamw")

    def step(params: Any, state: Any, batch: Tensor, *, spec: PartitionSpec) -> Any:
        buffers = {name: torch.empty_like(x, device=batch.device) for name, x in model.named_buffers()}

        def loss(params: Any) -> Tensor:
            out = functional_call(model, params, (batch,), spec=spec, buffers=buffers)
            first = next(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())
            rows = first.flatten(0, -2) if first.dim() > 1 else first[None]
            return F.cross_entropy(rows.float(), torch.zeros(len(rows), dtype=torch.int64, device=rows.device))

        return update(grad_and_value(loss)(params)[0], state, params)

    return step
