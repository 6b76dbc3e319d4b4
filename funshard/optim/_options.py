"""Options of single parameters, as ranges of the shards that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from .._slices.pieces import padding_mask, param_ranges
from .._spec.codec import check_trainable
from ..collectives._functions import vary
from ._checks import Tensors, check_nonnegative, check_tensors, is_updated

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


class OptionRanges(NamedTuple):
    """The ranges of a shard whose parameters have the same options. Without ranges it is one piece, of any shape."""

    numel: int | None = None
    ranges: tuple[tuple[int, slice], ...] = ()
    """``(group, range)``: the same groups on every rank, perhaps with an empty range."""
    groups: tuple[int, ...] = (0,)
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
    who: str, spec: PartitionSpec | None, options: ParamOptions | None, check: Check
) -> tuple[list[Mapping[str, Any]], dict[str, OptionRanges] | None]:
    """Return ``(the distinct options, ranges by unit key of shards, and by name of `param_views`)``; None without a spec."""
    if spec is None:
        if options is not None:
            raise ValueError(f"{who}: options are those of a spec's parameters: expected spec=, got none")
        return [{}], None
    spec = bind_spec(spec)
    groups, group_of_param = group_by_options(spec, options, check)
    is_simulated = spec.bound_mesh.is_simulated
    if is_simulated and len(groups) > 1:
        raise ValueError(
            "options: where a parameter lies in a shard depends on the rank, and simulated ranks are all there at once: "
            "expected a mesh of processes, or the same options for all parameters"
        )
    out: dict[str, OptionRanges] = {}
    for unit in spec:
        if unit.is_encoded:
            out[unit.key] = OptionRanges(frozen_unit=unit)
        elif is_simulated:  # where a parameter's part is the whole slice
            names = (unit.key, *(param.name for param in unit.params))
            out |= dict.fromkeys(names, OptionRanges(spec.shard_numel(unit)))
        else:
            out |= _ranges_of_unit(unit, spec, group_of_param)
    return groups or [{}], out


def _ranges_of_unit(unit: Unit, spec: PartitionSpec, group_of_param: Mapping[str, int]) -> dict[str, OptionRanges]:
    """Return a unit's ranges, and those of its parameters. Neighbours with the same options are one range: fewer kernels."""
    out: dict[str, OptionRanges] = {}
    ranges: list[tuple[int, slice]] = []
    for name, begin, end in param_ranges(unit, spec):
        group = group_of_param[name]
        out[name] = OptionRanges(end - begin, ((group, slice(0, end - begin)),), (group,))
        if ranges and ranges[-1][0] == group and end > begin:
            ranges[-1] = group, slice(ranges[-1][1].start, end)
        elif end > begin:
            ranges.append((group, slice(begin, end)))
    groups = tuple(dict.fromkeys(group_of_param[param.name] for param in unit.params))
    absent = [(group, slice(0, 0)) for group in groups if group not in dict(ranges)]
    return out | {unit.key: OptionRanges(spec.shard_numel(unit), (*ranges, *absent), groups)}


def split_by_options(tensor: Tensor, ranges: OptionRanges) -> list[tuple[int, Tensor]]:
    """Return ``(group, view)`` for every range, or for the whole tensor if it has none."""
    if not ranges.ranges:
        return [(ranges.groups[0], tensor.view_as(tensor))]
    return [(group, tensor[at]) for group, at in ranges.ranges]


def join_ranges(old: Tensor, ranges: OptionRanges, parts: Sequence[Tensor | None]) -> Tensor:
    """Return a shard of these parts, and of ``old`` outside of the ranges and where a part is None. Differentiable."""
    if not ranges.ranges:
        return old if parts[0] is None else parts[0]
    tensors: list[Tensor] = []
    end = 0
    for (_, at), part in zip(ranges.ranges, parts, strict=True):
        if at.stop > at.start:
            tensors += [old[end : at.start], old[at] if part is None else part]
            end = at.stop
    return torch.cat([*tensors, old[end:]])


def find_updated(ranges: Mapping[str, OptionRanges] | None, params: Tensors) -> dict[str, OptionRanges]:
    """Return the option ranges of units that an update changes: integers stay. ValueError or TypeError for other slices."""
    check_tensors(params, "params")
    updated = [key for key, x in params.items() if is_updated(x)]
    if ranges is None:
        return dict.fromkeys(updated, OptionRanges())
    for key, tensor in params.items():
        if key not in ranges:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {[*ranges][:8]}")
        if frozen := ranges[key].frozen_unit:
            check_trainable([frozen], "update")
        if tuple(tensor.shape) != (ranges[key].numel,):
            raise ValueError(
                f"unit '{key}': expected a shard of {ranges[key].numel} elements, got shape {list(tensor.shape)}; "
                "are these params of another spec or another mesh?"
            )
    return {key: ranges[key] for key in updated}


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


def padding_masks(spec: PartitionSpec, params: Tensors) -> dict[str, Tensor]:
    """Return the masks of padding by key, for whole slices that have padding."""
    masks: dict[str, Tensor] = {}
    for key, tensor in params.items():
        unit = spec.by_key.get(key) or spec.by_name[key][0]
        if unit.numel < spec.padded_numel(unit) and tensor.shape == (spec.shard_numel(unit),):
            masks[key] = padding_mask(unit, spec, tensor.device)
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
