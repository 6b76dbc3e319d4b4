"""Which options hold where in a shard: options per parameter as stretches of long vectors, for `optim.from_torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._spec.spec import PartitionSpec, bound
from ..._spec.tree import Param
from ..._spec.unit import Unit
from ..._units.layout import param_views

__all__ = ["Layout", "Options", "Run", "for_groups", "grouped", "join", "kept_ratio", "laid_out", "part", "pieces", "put"]

Options = Callable[[str, Param], Mapping[str, Any]]
"""``options(name, param)``: what a parameter has in the place of the defaults."""


def kept_ratio(lr: float | Tensor, own: Any, default: Any, who: str = "") -> Any:
    """A step's learning rate for a parameter whose own is not the default one. ValueError unless that is positive."""
    if not default:
        raise ValueError(f"{who}an lr among the options keeps its ratio to the default one: expected that positive")
    return lr * (own / default)


class Run(NamedTuple):
    """A stretch of a shard in which all parameters have the same options."""

    begin: int
    end: int
    group: int


class Layout(NamedTuple):
    """How one shard is cut into runs; without runs it is not, whatever its shape."""

    numel: int | None = None
    runs: tuple[Run, ...] = ()
    groups: tuple[int, ...] = (0,)
    """The groups of the unit's parameters, on every rank the same ones: each has a run, if an empty one."""
    at_rest: Unit | None = None
    """The unit, where its shard is bytes."""


Check = Callable[[str, Mapping[str, Any]], None]


def grouped(
    spec: PartitionSpec, options: Options | None, check: Check = lambda name, own: None
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """``(the different options that there are, which of them each parameter has)``; ``check`` sees each of the first."""
    groups: list[Mapping[str, Any]] = []
    group_of: dict[str, int] = {}
    for param in (param for unit in spec for param in unit.params):
        own = {} if options is None else dict(options(param.name, param))
        if own not in groups:
            check(param.name, own)
            groups.append(own)
        group_of[param.name] = groups.index(own)
    return groups, group_of


def laid_out(
    spec: PartitionSpec, options: Options | None, rank: int | None, check: Check
) -> tuple[list[Mapping[str, Any]], dict[str, Layout]]:
    """``(the different options that there are, the layout of this rank's shards)``; ``check`` as for `grouped`.

    Of shards by unit key, and of what lies in them of single parameters (`param_views`) by parameter name.
    """
    spec = bound(spec)
    groups, group_of = grouped(spec, options, check)
    unknown = rank is None and spec.bound_mesh.is_simulated
    if unknown and len(groups) > 1:
        raise ValueError(
            "options: where a parameter lies in a shard depends on the rank, and simulated ranks are all there at once: "
            "expected rank=, a mesh of processes, or the same options for all parameters"
        )
    numels = {unit.key: spec.shard_numel(unit) for unit in spec if not unit.at_rest}
    frozen = {unit.key: Layout(at_rest=unit) for unit in spec if unit.at_rest}
    if unknown:  # where a parameter's part is the whole slice
        parts = {param.name: Layout(numels[unit.key]) for unit in spec if not unit.at_rest for param in unit.params}
        return groups or [{}], {key: Layout(numel) for key, numel in numels.items()} | parts | frozen
    where = param_views({key: torch.empty(numel, device="meta") for key, numel in numels.items()}, spec, rank=rank)
    layouts = {key: _layout(spec.by_key[key], numel, where, group_of) for key, numel in numels.items()}
    parts = {name: Layout(len(x), (Run(0, len(x), group_of[name]),), (group_of[name],)) for name, x in where.items()}
    return groups or [{}], layouts | parts | frozen


def _layout(unit: Unit, numel: int, where: Mapping[str, Tensor], group_of: Mapping[str, int]) -> Layout:
    """Neighbours of one group are one run: few kernels."""
    runs: list[Run] = []
    for param in unit.params:
        begin, group = int(where[param.name].storage_offset()), group_of[param.name]
        end = begin + len(where[param.name])
        if runs and runs[-1].group == group and end > begin:
            runs[-1] = runs[-1]._replace(end=end)
        elif end > begin:
            runs.append(Run(begin, end, group))
    groups = tuple(dict.fromkeys(group_of[param.name] for param in unit.params))
    absent = [Run(0, 0, group) for group in groups if group not in {run.group for run in runs}]
    return Layout(numel, (*runs, *absent), groups)


def pieces(tensor: Tensor, layout: Layout) -> Iterator[tuple[int, Tensor]]:
    """``(group, view)`` of every run, in order, or of the whole tensor."""
    if not layout.runs:
        yield layout.groups[0], tensor.view_as(tensor)
    for run in layout.runs:
        yield run.group, tensor[run.begin : run.end]


def part(values: Mapping[str, Tensor], layout: Layout, at: int, scalars: Iterable[str]) -> dict[str, Tensor]:
    """The state of the run number ``at``, as views: its stretch of the vectors, its group's element of the scalars.

    A further run of a group gets copies of the scalars, which each run counts up.
    """
    if not layout.runs:
        return dict(values)
    run = layout.runs[at]
    out: dict[str, Tensor] = {}
    for name, tensor in values.items():
        if name not in scalars:
            out[name] = tensor[run.begin : run.end]
            continue
        scalar = tensor if len(layout.groups) == 1 else tensor[layout.groups.index(run.group)]
        again = run.group in {before.group for before in layout.runs[:at]}
        out[name] = scalar.clone() if again else scalar
    return out


def for_groups(tensor: Tensor, layout: Layout | None) -> Tensor:
    """What a state has for a shard, with a number for each group where it is one for all, as checkpoints have it."""
    one = tensor.dim() == 0 and layout is not None and layout.runs and len(layout.groups) > 1
    return tensor.expand(len(layout.groups)).clone() if one and layout is not None else tensor


def put(whole: Tensor, new: Tensor, layout: Layout, at: int, *, scalar: bool = False) -> Tensor:
    """A shard, or a scalar of its state, with what run number ``at`` became in its place: without writing, differentiable."""
    if not layout.runs or (scalar and len(layout.groups) == 1):
        return new
    run = layout.runs[at]
    if scalar:
        return whole.select_scatter(new, 0, layout.groups.index(run.group))
    return whole.slice_scatter(new, 0, run.begin, run.end)


def join(tensor: Tensor, layout: Layout, parts: list[dict[str, Tensor]], scalars: Iterable[str]) -> dict[str, Tensor]:
    """The state of a shard from that of its runs. Inverse of `part`: zeros in the padding, scalars one for each group."""
    if not layout.runs:
        return parts[0]
    out: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for values in parts for name in values):
        found = next(values[name] for values in parts if name in values)
        if name in scalars:
            of_group = {run.group: values.get(name) for run, values in reversed([*zip(layout.runs, parts, strict=True)])}
            each = [torch.zeros_like(found) if (t := of_group[group]) is None else t for group in layout.groups]
            out[name] = each[0] if len(each) == 1 else torch.stack(each)
            continue
        out[name] = found.new_zeros(tensor.shape)
        for run, values in zip(layout.runs, parts, strict=True):
            if name in values:
                out[name][run.begin : run.end] = values[name]
    return out
