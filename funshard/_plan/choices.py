"""Plans of other choices: given ones compared, and those found that fit into the memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._spec.precision import Precision
from .._spec.spec import PartitionSpec
from .._spec.unit import P
from .run_step import has_parameter
from .table import format_bytes, format_rows, format_seconds

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Choice", "Comparison", "candidates", "main_p", "replace_p"]

MICROBATCHES = (1, 2, 4, 8)
BF16 = Precision(param=torch.bfloat16, reduce=torch.float32)


class Comparison(dict[str, "Plan"]):
    """Plans by name, fastest first; ``print`` shows their peaks and times."""

    def __str__(self) -> str:
        rows = [["choice", "peak", "at rest", "step", "waiting"]]
        for name, plan in self.items():
            rest, times = sum(plan.at_rest.values()), (plan.seconds, plan.exposed_seconds)
            rows.append([name, format_bytes(plan.peak), format_bytes(rest), *map(format_seconds, times)])
        return "\n".join(format_rows(rows)) if len(rows) > 1 else "nothing fits"

    @classmethod
    def by_time(cls, plans: Mapping[str, Plan]) -> Comparison:
        """Return the plans in the order of their times, and of their peaks where those are equal."""
        return cls(sorted(plans.items(), key=lambda item: (item[1].seconds, item[1].peak)))


class Choice(NamedTuple):
    """A spec to plan, and the number of micro-batches of its step."""

    name: str
    spec: PartitionSpec
    microbatches: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the step beside the usual ones."""
        return {"microbatches": self.microbatches} if self.microbatches > 1 else {}


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

    def change(one: P) -> P:
        return new if one == old else one

    return dataclasses.replace(
        spec,
        selected=tuple((path, change(one)) for path, one in spec.selected),
        root=change(spec.root),
        units=tuple(dataclasses.replace(unit, p=change(unit.p)) for unit in spec.units),
    )


def candidates(plan: Plan) -> Iterator[Choice]:
    """Yield the choices that `Plan.fit` tries: axes, reshard, remat, offload, precision and micro-batches."""
    spec, base = plan.spec, main_p(plan.spec)
    counts = MICROBATCHES if plan.step is not None and has_parameter(plan.step, "microbatches") else (1,)
    precisions = (base.precision,) if base.precision or main_dtype(spec) != torch.float32 else (None, BF16)
    offloads = (base.offload,) if plan.is_on_host_alone else dict.fromkeys((base.offload, "params"))
    for mesh, axes in _iter_layouts(plan):
        bound = spec.on(mesh) if mesh else spec
        for reshard, remat, precision, offload, count in itertools.product(
            (True, False), dict.fromkeys((base.remat, False, True)), precisions, offloads, counts
        ):
            if not axes and not reshard:
                continue  # nothing is gathered
            p = dataclasses.replace(
                base,
                axis=axes[0] if len(axes) == 1 else axes or None,
                reshard=reshard,
                remat=remat,
                precision=precision,
                offload=offload,
            )
            sizes = " x ".join(f"{name}={size}" for name, size in bound.bound_mesh.sizes)
            name = f"{p}, {sizes}" + (f", {count} micro-batches" if count > 1 else "")
            yield Choice(name, replace_p(bound, p), count)


def main_dtype(spec: PartitionSpec) -> torch.dtype:
    """Return the dtype of the largest unit."""
    return max(spec, key=lambda unit: unit.numel).dtype if len(spec) else torch.float32


def _iter_layouts(plan: Plan) -> Iterator[tuple[dict[str, int] | None, tuple[str, ...]]]:
    """Yield meshes of as many ranks, None for the plan's own, and the axes to split units over."""
    sizes = dict(plan.spec.bound_mesh.sizes)
    local = {axis for unit in plan.spec for axis in unit.local_axes}
    names = [name for name in sizes if name not in local]
    for i in range(len(names) + 1):
        yield None, tuple(names[i:])
    if len(sizes) > 1 or not names:
        return
    bandwidth, (name,) = plan.hardware.bandwidth, names
    if isinstance(bandwidth, Mapping) and "replicate" not in bandwidth:
        return
    ranks = sizes[name]
    for size in (2**i for i in range(1, ranks.bit_length()) if 2**i < ranks and ranks % 2**i == 0):
        yield {"replicate": ranks // size, name: size}, (name,)
