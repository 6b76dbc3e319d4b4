"""The route of a unit between ranks, as plain data that data flow (flow.py) and chains (chain.py) interpret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._spec.codec import Codec, Form, unpack_bytes
from .._spec.division import Reduction, choose_division, count_ranks
from .._spec.host import compute_device
from .._spec.precision import Dtypes, Precision
from .._spec.unit import Unit
from ..collectives._mesh import Mesh
from .layout import longest_padding

__all__ = ["Route"]


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
    form: Form | None
    """The form of the encoded slice that the shard's bytes are, if it is at rest in a codec."""
    num_slices: int
    """The number of slices of its buffer."""
    device: torch.device | None
    """The device to which a host-resident shard is copied to be gathered; None for one that is used where it is stored."""
    has_own_buffer: bool
    """Whether its buffer is another tensor than the shard."""
    reshard_after_forward: bool
    """Whether its buffer is freed between forward and backward."""

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
        padded_numel = unit.padded_numel(num_slices)
        device = compute_device(unit, mesh)
        has_own_buffer = bool(split_axes) or dtypes.param != dtype or codec is not None or device is not None
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
            form=unit.at_rest._describe_encoding(padded_numel // num_slices, dtype)[1] if unit.at_rest else None,
            num_slices=num_slices,
            device=device,
            has_own_buffer=has_own_buffer,
            reshard_after_forward=unit.p.reshard and has_own_buffer,
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
        """Whether collectives alone make the route: nothing is cast, divided or copied."""
        return (
            self.dtypes == (self.shard_dtype, self.shard_dtype)
            and self.divide_before == self.divide_after == 1
            and self.device is None
        )
