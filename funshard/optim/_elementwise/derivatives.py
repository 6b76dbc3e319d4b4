"""Derivatives of an update: which ranks share an option, and which elements are padding, by the spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _torch
from ..._spec.spec import PartitionSpec
from ..._units.padding import padding_mask
from ...collectives._functions import vary
from ...collectives._mesh import Simulated

__all__ = ["SharedOptions", "fill_padding", "padding_masks", "refuse_without_spec", "split_axes"]


class SharedOptions:
    """The options of one step, as slices use them.

    Each rank's slices give part of the derivative of a shared learning rate, and replicas give all of it. So backward sums an
    option over the axes of the slices that use it; forward sends nothing.
    """

    def __init__(self, spec: PartitionSpec | None) -> None:
        self._spec = spec
        self._entered: dict[tuple[int, tuple[str, ...]], tuple[Tensor, Tensor]] = {}

    def over_axes(self, option: Any, axes: tuple[str, ...]) -> Any:
        """Return the option for units split over these axes: itself, unless it is differentiated."""
        if isinstance(option, tuple):
            return tuple(self.over_axes(one, axes) for one in option)  # pyright: ignore[reportUnknownVariableType]
        if self._spec is None or not axes or not isinstance(option, Tensor) or not _torch.is_tracked(option):
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

    def for_matrix(self, options: Mapping[str, Any], axes: tuple[str, ...]) -> Mapping[str, Any]:
        """Return all options of a matrix for these axes."""
        return {name: self.over_axes(option, axes) for name, option in options.items()}


def split_axes(spec: PartitionSpec | None, key: str) -> tuple[str, ...]:
    """Return the mesh axes over which a unit, or a parameter's unit, is split; none without a spec."""
    if spec is None:
        return ()
    unit = spec.by_key.get(key) or spec.by_name[key][0]
    return unit.distinct_axes


def padding_masks(spec: PartitionSpec | None, params: Mapping[str, Tensor], rank: int | None) -> dict[str, Tensor]:
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


def refuse_without_spec(options: Iterable[tuple[str, Tensor]], params: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError for a differentiated option on several ranks if no spec says which shards are slices.

    Tensors with several dimensions are not shards; each rank has its own.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if any(x.dim() != 1 for x in params.values()):
        return
    for name, option in options:
        if _torch.is_tracked(option):
            raise RuntimeError(
                f"from_torch: {name} is differentiated on {dist.get_world_size()} ranks, of which each has a part of the "
                "derivative where a unit is split, and all of it where it is replicated: expected spec=, by which it is the "
                "whole one for every unit, or a number"
            )
