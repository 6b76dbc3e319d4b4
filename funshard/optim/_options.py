"""Options of single parameters, as ranges of the shards that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec
from .._core.mesh import Simulated
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import Unit
from .._slices.pieces import padding_mask, param_views
from .._spec.codec import check_trainable
from ..collectives._functions import vary
from ._checks import Tensors, check_nonnegative

ParamOptions = Callable[[str, Param], Mapping[str, Any]]
"""``options(name, param)``: the parameter's own options, which replace the defaults."""


def check_options(what: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError, with ``what`` as its subject, for an option that is not among the known ones or below 0."""
    if unknown := sorted({*given}.difference(known)):
        raise ValueError(f"{what}: expected some of {[*known]}, got '{unknown[0]}'")
    check_nonnegative(what, **given)


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

    def without_cuts(self) -> OptionRanges:
        """Return one piece, with the padding, where all parameters have the same options."""
        return self if len(self.groups) > 1 else self._replace(ranges=())


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
    who: str, spec: PartitionSpec | None, options: ParamOptions | None, rank: int | None, check: Check
) -> tuple[list[Mapping[str, Any]], dict[str, OptionRanges] | None]:
    """Return ``(the distinct options, ranges by unit key of shards, and by name of `param_views`)``; None without a spec."""
    if spec is None:
        if options is not None:
            raise ValueError(f"{who}: options are those of a spec's parameters: expected spec=, got none")
        return [{}], None
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


def join_ranges(old: Tensor, ranges: OptionRanges, parts: Sequence[Tensor | None]) -> Tensor:
    """Return a shard of these parts, and of ``old`` outside of the ranges and where a part is None. Differentiable."""
    if not ranges.ranges:
        return old if parts[0] is None else parts[0]
    tensors: list[Tensor] = []
    end = 0
    for item, part in zip(ranges.ranges, parts, strict=True):
        if item.end > item.begin:
            tensors += [old[end : item.begin], old[item.begin : item.end] if part is None else part]
            end = item.end
    return torch.cat([*tensors, old[end:]])


def find_ranges(ranges: Mapping[str, OptionRanges] | None, key: str, tensor: object) -> OptionRanges:
    """Return a unit's option ranges. ValueError or TypeError, naming the unit, if the tensor is not a shard of it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"unit '{key}': expected a tensor, got {type(tensor).__name__}")
    if ranges is None:
        return OptionRanges()
    if key not in ranges:
        raise ValueError(f"unit '{key}' is not in the spec: expected some of {[*ranges][:8]}")
    if frozen := ranges[key].frozen_unit:
        check_trainable([frozen], "update")
    if tuple(tensor.shape) != (ranges[key].numel,):
        raise ValueError(
            f"unit '{key}': expected a shard of {ranges[key].numel} elements, got shape {list(tensor.shape)}; "
            "are these params of another spec or another mesh?"
        )
    return ranges[key]


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
        if self._spec is None or not axes or not isinstance(option, Tensor):
            return option
        if _torch.is_in_dynamo():  # which does not tell; forward it is nothing
            for name in axes:
                option = vary(option, self._spec.bound_mesh[name], reduce="sum")
            return option
        if not _torch.has_derivative(option):
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


def refuse_without_spec(name: str, rate: object, params: Tensors) -> None:
    """Raise RuntimeError for a differentiated rate on several ranks, unless tensors have several dimensions: no shards."""
    if not (isinstance(rate, Tensor) and dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if all(x.dim() == 1 for x in params.values()) and _torch.has_derivative(rate):
        raise RuntimeError(
            f"{name}: lr is differentiated on {dist.get_world_size()} ranks, of which each has a part of the derivative where "
            "a unit is split, and all of it where it is replicated: expected spec=, by which it is the whole one for every "
            "unit, or a number"
        )
