"""The route of a unit between ranks: its stages, which data flow (flow.py) and chains (chain.py) fold, and facts about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._spec.checks import compute_device
from .._spec.division import Reduction, choose_division, count_ranks
from .._spec.precision import Codec, Dtypes, Form, Precision
from .._spec.tree import Param
from .._spec.unit import Unit
from ..collectives._mesh import Mesh, ProcessAxis
from .layout import longest_padding, unflatten_unit
from .mixed_layout import MixedLayout, find_param_dtypes, make_mixed_layout
from .stages import AllGather, Bytes, Copy, Decode, Divide, Encode, GatherEncodedBack, GradDtype, Join, Move, Replicas, Stage

__all__ = ["BucketKind", "Route", "find_slice"]


class BucketKind(NamedTuple):
    """The common properties of replicated units whose gradients are reduced as one."""

    reduce: torch.dtype
    """The dtype of the reduction."""
    shard: torch.dtype
    device: torch.device | None
    """The device of use, of host-resident units."""
    axes: tuple[str, ...]
    divisors: tuple[float, ...]


@dataclass(frozen=True)
class Route:
    """The mesh axes over which a unit is gathered and reduced, the dtypes, and the stages that they make."""

    padded_numel: int
    """Elements of its whole buffer."""
    longest_padding: int
    """Elements of the longest padding in its buffer."""
    split_axes: tuple[str, ...]
    """The axes of its slices, outermost first: gathered over from the last one on, reduced over from the first one on."""
    replica_axes: tuple[str, ...]
    """The other axes that its gradients are reduced over, in that order, as slices."""
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
    stages: tuple[Stage, ...] = ()
    """The way from the slice to the buffer."""

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
        num_slices = count_ranks(unit.p.axes, mesh)
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
        is_encoded = len(split_axes) == 1 and dtype.is_floating_point
        route = cls(
            padded_numel=padded_numel,
            longest_padding=longest_padding(unit, padded_numel),
            split_axes=split_axes,
            replica_axes=replica_axes,
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
        local_ranks = count_ranks((name for name in unit.local_axes if name in included), mesh)
        num_ranks = count_ranks((*split_axes, *replica_axes), mesh)
        by = reduction.by if unit.numel else "sum"
        division = choose_division(by, num_ranks, dtypes.reduce, local_ranks)
        return dataclasses.replace(route, stages=route._make_stages(mesh, *division))

    def _make_stages(self, mesh: Mesh, op: Literal["mean", "sum"], before: float, after: float) -> tuple[Stage, ...]:
        """Return the stages, with this result of the reductions and these divisors before the first and after the last one."""
        param, reduce = self.dtypes
        numel = self.padded_numel // self.num_slices
        stages: list[Stage] = []
        if self.form:  # bytes, which have no gradient
            if self.device is not None:
                stages.append(Move(self.device, torch.uint8, torch.uint8, torch.uint8))
            elif not self.split_axes:
                stages.append(Copy())
            stages += [AllGather.of(name, mesh, op) for name in reversed(self.split_axes)]
            assert self.codec is not None
            return *stages, Decode(self.codec, self.num_slices, numel, param, self.form)
        sent = self.shard_dtype if self.codec or self.layout else param
        is_cast = self.dtypes != (self.shard_dtype, self.shard_dtype) or self.device is not None or self.layout is not None
        if is_cast:
            stages.append(Move(self.device, sent, self.shard_dtype, self.result_dtype))
        if after != 1:
            stages.append(Divide(after))
        stages += [Replicas.of(name, mesh, op) for name in reversed(self.replica_axes)]
        if self.layout:
            stages.append(Bytes(self.layout))
        elif self.codec:
            stages.append(Encode(self.codec, param))
        for name in reversed(self.split_axes):
            if self.reduce_codec:
                stages.append(GatherEncodedBack.of(name, mesh, op, codec=self.reduce_codec, numel=numel, dtype=reduce))
            else:
                stages.append(AllGather.of(name, mesh, op))
        if self.layout:
            stages.append(Join(self.layout))
        elif self.codec:
            stages.append(Decode(self.codec, self.num_slices, numel, param))
        if before != 1:
            stages.append(Divide(before))
        if is_cast:
            stages.append(GradDtype(self.device, reduce))
        return tuple(stages)

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype in which a reduced slice leaves the device: the shard's, or the smaller one of the reduction."""
        if self.device is None:
            return self.shard_dtype
        return min(self.shard_dtype, self.dtypes.reduce, key=lambda dtype: dtype.itemsize)

    @property
    def bucket_kind(self) -> BucketKind:
        """The kind of the bucket in which its gradient is reduced, if every rank keeps it whole."""
        divisors = tuple(stage.divisor for stage in self.stages if isinstance(stage, Divide))
        return BucketKind(self.dtypes.reduce, self.shard_dtype, self.device, self.replica_axes, divisors)

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
