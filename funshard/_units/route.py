"""The route of a unit between ranks, as plain data that data flow (flow.py) and chains (chain.py) interpret."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._spec.checks import compute_device
from .._spec.division import Reduction, choose_division, count_ranks
from .._spec.precision import Codec, Dtypes, Form, Precision, unpack_bytes
from .._spec.tree import Param
from .._spec.unit import Unit
from ..collectives._mesh import Mesh, ProcessAxis
from .layout import longest_padding, unflatten_unit
from .mixed_layout import MixedLayout, find_param_dtypes, make_mixed_layout

__all__ = ["Route", "find_slice"]


@dataclass(frozen=True)
class Route:
    """The mesh axes over which a unit is gathered and reduced, the dtypes, and the divisors of its gradients."""

    padded_numel: int
    """Elements of its whole buffer."""
    longest_padding: int
    """Elements of the longest padding in its buffer."""
    split_axes: tuple[str, ...]
    """The axes of its slices, outermost first: gathered over from the last one on, reduced over from the first one on."""
    replica_axes: tuple[str, ...]
    """The other axes that its gradients are reduced over, in that order, as slices."""
    reduce_op: Literal["mean", "sum"]
    """The result of the collectives that reduce gradients."""
    divide_before: float
    """The divisor of gradients before the first collective."""
    divide_after: float
    """The divisor of gradients after the last collective."""
    shard_dtype: torch.dtype
    """The dtype of the shard."""
    dtypes: Dtypes
    """The dtypes in which it is gathered and computed with, and in which its gradients are reduced."""
    codec: Codec | None
    """The codec of the slices that are sent."""
    reduce_codec: Codec | None
    """The codec in which its gradients are sent to the owners of its slices, over the one axis that splits it."""
    form: Form | None
    """The form of the encoded slice that the shard's bytes are, if it is at rest in a codec."""
    layout: MixedLayout | None
    """The layout of its buffer in bytes, if its parameters have several dtypes."""
    num_slices: int
    """The number of slices of its buffer."""
    device: torch.device | None
    """The device to which a host-resident shard is copied to be gathered; None for one that is used where it is stored."""
    has_own_buffer: bool
    """Whether its buffer is another tensor than the shard."""
    reshard_after_forward: bool
    """Whether its buffer is freed between forward and backward."""
    kept_axes: tuple[str, ...]
    """The axes of the slice of its buffer that is kept meanwhile and gathered again; none to gather again from the shards."""
    num_kept: int
    """The number of slices that these axes split its buffer into."""

    @classmethod
    def for_unit(cls, unit: Unit, mesh: Mesh, reduction: Reduction, precision: Precision | None, dtype: torch.dtype) -> Route:
        """Return the route of a unit whose shard has this dtype.

        Axes of one rank do not count, and a unit without elements stays where it is.
        """
        dtype = unit.dtype if unit.at_rest else dtype
        dtypes = (precision or Precision())._resolve(dtype)
        codec = unit.at_rest or (precision.codec if precision and dtype.is_floating_point and unit.numel else None)
        sizes = {name: axis.size for name, axis in mesh.axes if axis.size > 1 and unit.numel}
        split_axes = tuple(name for name in unit.p.axes if name in sizes)
        included = tuple(name for name in reversed(sizes) if reduction.includes(name))
        replica_axes = tuple(name for name in included if name not in unit.distinct_axes)
        local_ranks = count_ranks((name for name in unit.local_axes if name in included), mesh)
        num_ranks = count_ranks((*split_axes, *replica_axes), mesh)
        num_slices = count_ranks(unit.p.axes, mesh)
        is_encoded = len(split_axes) == 1 and dtype.is_floating_point
        padded_numel = unit.padded_numel(num_slices)
        device = compute_device(unit, mesh)
        layout = None
        if precision and unit.kept_dtypes and unit.numel:
            layout = make_mixed_layout(unit, padded_numel, num_slices, dtypes.param, find_slice(unit.p.axes, mesh))
            if layout is None:
                dtypes = dtypes._replace(param=find_param_dtypes(unit, dtypes.param)[0])
        is_as_stored = dtypes.param == dtype and layout is None and codec is None and device is None
        has_own_buffer = bool(split_axes) or not is_as_stored
        kept_axes = tuple(name for name in split_axes if name in unit.p.reshard_axes)
        reshards = bool(kept_axes) if unit.p.reshard_axes and split_axes else bool(unit.p.reshard)
        kept_axes = () if kept_axes == split_axes else kept_axes
        reduce_op, before, after = ("mean", 1.0, 1.0)
        if unit.numel:
            reduce_op, before, after = choose_division(reduction.by, num_ranks, dtypes.reduce, local_ranks)
        return cls(
            padded_numel=padded_numel,
            longest_padding=longest_padding(unit, padded_numel),
            split_axes=split_axes,
            replica_axes=replica_axes,
            reduce_op=reduce_op,
            divide_before=before,
            divide_after=after,
            shard_dtype=dtype,
            dtypes=dtypes,
            codec=codec,
            reduce_codec=precision.reduce_codec if precision and is_encoded else None,
            form=unit.at_rest._describe_encoding(padded_numel // num_slices, dtype)[1] if unit.at_rest else None,
            layout=layout,
            num_slices=num_slices,
            device=device,
            has_own_buffer=has_own_buffer,
            reshard_after_forward=reshards and has_own_buffer,
            kept_axes=kept_axes,
            num_kept=count_ranks(kept_axes, mesh),
        )

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype in which a reduced slice leaves the device: the shard's, or the smaller one of the reduction."""
        if self.device is None:
            return self.shard_dtype
        return min(self.shard_dtype, self.dtypes.reduce, key=lambda dtype: dtype.itemsize)

    def decode(self, raw: Tensor, form: Form) -> Tensor:
        """Return the unit's buffer from the bytes of all slices, end to end."""
        assert self.codec is not None
        tensors = unpack_bytes(raw.view(self.num_slices, -1), form)
        return self.codec._decode_slices(tensors, self.padded_numel // self.num_slices, self.dtypes.param)

    @property
    def has_only_collectives(self) -> bool:
        """Whether collectives alone make the route: nothing is cast, encoded, divided or copied."""
        return (
            self.dtypes == (self.shard_dtype, self.shard_dtype)
            and self.divide_before == self.divide_after == 1
            and self.device is None
            and self.layout is None
            and self.reduce_codec is None
        )

    @property
    def view_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the parameters that are views of its buffer."""
        return self.layout.dtypes if self.layout else (self.dtypes.param,)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of its whole buffer."""
        return self.layout.buffer_bytes if self.layout else self.padded_numel * self.dtypes.param.itemsize

    def param_bytes(self, unit: Unit, params: Iterable[Param]) -> int:
        """Return the bytes of some of the unit's parameters, without padding."""
        dtypes = dict(zip(unit.params, find_param_dtypes(unit, self.dtypes.param), strict=True))
        return sum(param.numel * dtypes[param].itemsize for param in params)

    def allocate(self, like: Tensor) -> Tensor:
        """Return a buffer of its own, with anything in it, on the device that it is gathered on."""
        if self.layout:
            return like.new_empty(self.layout.buffer_bytes, dtype=torch.uint8, device=self.device)
        return like.new_empty(self.padded_numel, dtype=self.dtypes.param, device=self.device)

    def unflatten(self, buffer: Tensor, unit: Unit) -> list[Tensor]:
        """Return the unit's parameters, in their order, as views of its buffer."""
        return self.layout.unflatten(buffer, unit) if self.layout else unflatten_unit(buffer, unit)


def find_slice(axes: Iterable[str], mesh: Mesh) -> int | None:
    """Return which slice over these axes this process has, None on simulated ranks and on sizes without ranks."""
    index = 0
    for axis in (mesh[name] for name in axes if mesh[name].size > 1):
        if not isinstance(axis, ProcessAxis) or axis.rank is None:
            return None
        index = index * axis.size + axis.rank
    return index
