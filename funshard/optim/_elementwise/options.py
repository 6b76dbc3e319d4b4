"""Options of single parameters, as ranges of the shards that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _torch
from ..._core.checks import bind_spec
from ..._core.mesh import Simulated
from ..._core.spec import PartitionSpec
from ..._core.tree import Param
from ..._core.unit import Unit
from ..._slices.pieces import padding_mask, param_views
from ...collectives._functions import vary
from .._checks import Tensors

__all__ = ["OptionRanges", "ParamOptions", "SharedOptions", "expand_numbers", "fill_padding", "group_by_options", "join_ranges"]
__all__ += ["option_ranges", "padding_masks", "refuse_without_spec", "scale_lr", "scatter_range", "split_axes"]
__all__ += ["split_by_options", "state_of_range"]


ParamOptions = Callable[[str, Param], Mapping[str, Any]]
"""``options(name, param)``: the parameter's own options, which replace the defaults."""


def scale_lr(lr: float | Tensor, own: Any, default: Any, who: str = "") -> Any:
    """Return a step's lr for a parameter with its own lr, whose ratio to the default stays. ValueError unless that is > 0."""
    if not default:
        raise ValueError(f"{who}an lr among the options keeps its ratio to the default one: expected that positive")
    return lr * (own / default)


class OptionRange(NamedTuple):
    """A range of a shard whose parameters have the same options."""

    begin: int
    end: int
    group: int


class OptionRanges(NamedTuple):
    """The ranges of one shard, by options. Without ranges it is one piece, of any shape."""

    numel: int | None = None
    ranges: tuple[OptionRange, ...] = ()
    groups: tuple[int, ...] = (0,)
    """The groups of the unit's parameters, the same on every rank: each has a range, perhaps an empty one."""
    frozen_unit: Unit | None = None
    """The unit, if its shard is bytes of a codec."""


Check = Callable[[str, Mapping[str, Any]], None]


def group_by_options(
    spec: PartitionSpec, options: ParamOptions | None, check: Check = lambda name, own: None
) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """Return ``(the distinct options, the index of each parameter's options)``; ``check`` runs on each distinct one."""
    groups: list[Mapping[str, Any]] = []
    group_of_param: dict[str, int] = {}
    for param in (param for unit in spec for param in unit.params):
        own = {} if options is None else dict(options(param.name, param))
        if own not in groups:
            check(param.name, own)
            groups.append(own)
        group_of_param[param.name] = groups.index(own)
    return groups, group_of_param


def option_ranges(
    spec: PartitionSpec, options: ParamOptions | None, rank: int | None, check: Check
) -> tuple[list[Mapping[str, Any]], dict[str, OptionRanges]]:
    """Return ``(the distinct options, ranges by unit key of shards, and by name of `param_views`)``."""
    spec = bind_spec(spec)
    groups, group_of_param = group_by_options(spec, options, check)
    is_rank_unknown = rank is None and spec.bound_mesh.is_simulated
    if is_rank_unknown and len(groups) > 1:
        raise ValueError(
            "options: where a parameter lies in a shard depends on the rank, and simulated ranks are all there at once: "
            "expected rank=, a mesh of processes, or the same options for all parameters"
        )
    numels = {unit.key: spec.shard_numel(unit) for unit in spec if not unit.is_encoded}
    frozen = {unit.key: OptionRanges(frozen_unit=unit) for unit in spec if unit.is_encoded}
    if is_rank_unknown:  # where a parameter's part is the whole slice
        parts = {param.name: OptionRanges(numels[unit.key]) for unit in spec if not unit.is_encoded for param in unit.params}
        return groups or [{}], {key: OptionRanges(numel) for key, numel in numels.items()} | parts | frozen
    where = param_views({key: torch.empty(numel, device="meta") for key, numel in numels.items()}, spec, rank=rank)
    by_key = {key: _ranges_of_unit(spec.by_key[key], numel, where, group_of_param) for key, numel in numels.items()}
    parts = {
        name: OptionRanges(len(x), (OptionRange(0, len(x), group_of_param[name]),), (group_of_param[name],))
        for name, x in where.items()
    }
    return groups or [{}], by_key | parts | frozen


def _ranges_of_unit(unit: Unit, numel: int, where: Tensors, group_of_param: Mapping[str, int]) -> OptionRanges:
    """Return a unit's ranges. Neighbours with the same options are one range: fewer kernels."""
    ranges: list[OptionRange] = []
    for param in unit.params:
        begin, group = int(where[param.name].storage_offset()), group_of_param[param.name]
        end = begin + len(where[param.name])
        if ranges and ranges[-1].group == group and end > begin:
            ranges[-1] = ranges[-1]._replace(end=end)
        elif end > begin:
            ranges.append(OptionRange(begin, end, group))
    groups = tuple(dict.fromkeys(group_of_param[param.name] for param in unit.params))
    absent = [OptionRange(0, 0, group) for group in groups if group not in {option_range.group for option_range in ranges}]
    return OptionRanges(numel, (*ranges, *absent), groups)


def split_by_options(tensor: Tensor, ranges: OptionRanges) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(group, view)`` for every range, or for the whole tensor if it has none."""
    if not ranges.ranges:
        yield ranges.groups[0], tensor.view_as(tensor)
    for option_range in ranges.ranges:
        yield option_range.group, tensor[option_range.begin : option_range.end]


def state_of_range(values: Tensors, ranges: OptionRanges, at: int, scalars: Iterable[str]) -> dict[str, Tensor]:
    """Return the state of range ``at``, as views: its part of each vector, and its group's number.

    Each range counts up its own, so a further range of the same group gets copies of the numbers.
    """
    if not ranges.ranges:
        return dict(values)
    option_range = ranges.ranges[at]
    out: dict[str, Tensor] = {}
    for name, tensor in values.items():
        if name not in scalars:
            out[name] = tensor[option_range.begin : option_range.end]
            continue
        scalar = tensor if len(ranges.groups) == 1 else tensor[ranges.groups.index(option_range.group)]
        is_repeated = option_range.group in {before.group for before in ranges.ranges[:at]}
        out[name] = scalar.clone() if is_repeated else scalar
    return out


def expand_numbers(tensor: Tensor, ranges: OptionRanges | None) -> Tensor:
    """Return one number a group if the state has one for all groups, as checkpoints do."""
    one = tensor.dim() == 0 and ranges is not None and ranges.ranges and len(ranges.groups) > 1
    return tensor.expand(len(ranges.groups)).clone() if one and ranges is not None else tensor


def scatter_range(whole: Tensor, new: Tensor, ranges: OptionRanges, at: int, *, scalar: bool = False) -> Tensor:
    """Return a shard, or numbers, with the new value of range number ``at``. Differentiable: it writes nothing."""
    if not ranges.ranges or (scalar and len(ranges.groups) == 1):
        return new
    option_range = ranges.ranges[at]
    if scalar:
        return whole.select_scatter(new, 0, ranges.groups.index(option_range.group))
    return whole.slice_scatter(new, 0, option_range.begin, option_range.end)


def join_ranges(
    tensor: Tensor, ranges: OptionRanges, parts: list[dict[str, Tensor]], scalars: Iterable[str]
) -> dict[str, Tensor]:
    """Return a shard's state from those of its ranges, with zeros for padding, and stacked numbers, one a group."""
    if not ranges.ranges:
        return parts[0]
    out: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for values in parts for name in values):
        found = next(values[name] for values in parts if name in values)
        if name in scalars:
            of_group = {
                option_range.group: values.get(name)
                for option_range, values in reversed([*zip(ranges.ranges, parts, strict=True)])
            }
            each = [torch.zeros_like(found) if (t := of_group[group]) is None else t for group in ranges.groups]
            out[name] = each[0] if len(each) == 1 else torch.stack(each)
            continue
        out[name] = found.new_zeros(tensor.shape)
        for option_range, values in zip(ranges.ranges, parts, strict=True):
            if name in values:
                out[name][option_range.begin : option_range.end] = values[name]
    return out


# --- Derivatives of an update: which ranks share an option, and which elements are padding, by the spec ---


class SharedOptions:
    """The options of one step. Backward sums the derivative of a shared one over the axes of the slices that use it."""

    def __init__(self, spec: PartitionSpec | None) -> None:
        self._spec = spec
        self._entered: dict[tuple[int, tuple[str, ...]], tuple[Tensor, Tensor]] = {}

    def over_axes(self, option: Any, axes: tuple[str, ...]) -> Any:
        """Return the option for units split over these axes: itself, unless it is differentiated."""
        if isinstance(option, tuple):
            return tuple(self.over_axes(one, axes) for one in option)  # pyright: ignore[reportUnknownVariableType]
        if self._spec is None or not axes or not isinstance(option, Tensor) or not _torch.has_derivative(option):
            return option
        key = id(option), axes
        if key not in self._entered:  # once, so that backward sends one number for many units
            mesh = self._spec.bound_mesh
            entered = option.to(mesh.device or option.device)
            for name in axes:
                entered = vary(entered, mesh[name], reduce="sum")
            for _, axis in mesh.axes:  # an in-place kernel under vmap takes an operand of all of its levels
                if isinstance(axis, Simulated):
                    entered = entered + 0 * axis.rank
            self._entered[key] = option, entered.to(option.device)
        return self._entered[key][1]


def split_axes(spec: PartitionSpec | None, key: str) -> tuple[str, ...]:
    """Return the mesh axes over which a unit, or a parameter's unit, is split; none without a spec."""
    if spec is None:
        return ()
    unit = spec.by_key.get(key) or spec.by_name[key][0]
    return unit.distinct_axes


def padding_masks(spec: PartitionSpec | None, params: Tensors, rank: int | None) -> dict[str, Tensor]:
    """Return the masks of padding by key, for whole slices that have padding; {} without a spec."""
    masks: dict[str, Tensor] = {}
    if spec is None:
        return masks
    for key, tensor in params.items():
        unit = spec.by_key.get(key) or spec.by_name[key][0]
        if unit.numel < spec.padded_numel(unit) and tensor.shape == (spec.shard_numel(unit),):
            masks[key] = padding_mask(unit, spec, tensor.device, rank)
    return masks


def fill_padding(grad: Tensor, mask: Tensor | None) -> Tensor:
    """Return the gradient with 1 in its padding: the root of a zero has no derivative and would make all others NaN."""
    return grad if mask is None else torch.where(mask, 1, grad)


def refuse_without_spec(options: Iterable[tuple[str, Tensor]], params: Tensors) -> None:
    """Raise RuntimeError for a differentiated option on several ranks, unless tensors have several dimensions: no shards."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if any(x.dim() != 1 for x in params.values()):
        return
    for name, option in options:
        if _torch.has_derivative(option):
            raise RuntimeError(
                f"from_torch: {name} is differentiated on {dist.get_world_size()} ranks, of which each has a part of the "
                "derivative where a unit is split, and all of it where it is replicated: expected spec=, by which it is the "
                "whole one for every unit, or a number"
            )
