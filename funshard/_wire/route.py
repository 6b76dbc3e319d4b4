"""The route of a unit between ranks: its stages, which data flow (flow.py) and chains (chain.py) fold, and facts about it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.flow import Reduction, UnitAxes, count_ranks
from .._core.layout import longest_padding, unflatten_unit
from .._core.mesh import Mesh, ProcessAxis
from .._core.unit import Unit
from .._spec.codec import storage_codec
from .._spec.precision import Dtypes, Precision, precision_of
from .host import compute_device
from .mixed_layout import MixedLayout, find_param_dtypes, make_mixed_layout
from .stages import AllGather, Bytes, Decode, Divide, Encode, GatherEncodedBack, GradDtype, Join, Move, Replicas, Stage


@dataclass(frozen=True)
class Route:
    """The stages of a unit's way from slice to buffer, and what becomes of the buffer."""

    stages: tuple[Stage, ...]
    padded_numel: int
    """Elements of its whole buffer."""
    longest_padding: int
    """Elements of the longest padding in its buffer."""
    split_axes: tuple[str, ...]
    """The axes of its slices, outermost first: gathered over from the last one on, reduced over from the first one on."""
    replica_axes: tuple[str, ...]
    """The other axes that its gradients are reduced over, in that order, as slices."""
    shard_dtype: torch.dtype
    """The dtype of the shard, or of what it encodes."""
    dtypes: Dtypes
    """The dtypes in which it is gathered and computed with, and in which its gradients are reduced."""
    layout: MixedLayout | None
    """The layout of its buffer in bytes, if its parameters have several dtypes."""
    device: torch.device | None
    """The device to which a host-resident shard is copied to be gathered; None for one that is used where it is stored."""
    has_own_buffer: bool
    """Whether its buffer is another tensor than the shard."""
    reshard_after_forward: bool
    """Whether its buffer is freed between forward and backward."""
    secondary_axes: tuple[str, ...]
    """The axes of the slice of its buffer that is kept meanwhile and gathered again; none to gather again from the shards."""
    num_secondary: int
    """The number of slices that these axes split its buffer into."""

    @classmethod
    def for_unit(cls, unit: Unit, mesh: Mesh, reduction: Reduction, dtype: torch.dtype, *, casts: bool = True) -> Route:
        """Return the route of a unit whose shard has this dtype, which its `Precision` ``casts``.

        Axes of one rank do not count, and a unit without elements stays where it is.
        """
        dtype = unit.dtype if unit.at_rest else dtype
        precision = (precision_of(unit.p) if casts else None) or Precision()
        dtypes = precision._resolve(dtype)
        num_slices = count_ranks(unit.p.axes, mesh)
        padded_numel = unit.padded_numel(num_slices)
        slice_numel, device, layout = padded_numel // num_slices, compute_device(unit, mesh), None
        if casts and unit.param_dtypes and unit.numel:
            layout = make_mixed_layout(unit, padded_numel, num_slices, dtypes.param, find_slice(unit.p.axes, mesh))
            if layout is None:
                dtypes = dtypes._replace(param=find_param_dtypes(unit, dtypes.param)[0])

        split_axes, replica_axes, op, before, after = UnitAxes.find(unit, mesh, reduction, dtypes.reduce)
        gathers: list[Stage] = [AllGather.on_axis(name, mesh, op) for name in reversed(split_axes)]
        if precision.reduce_codec and len(split_axes) == 1 and dtype.is_floating_point:
            encoded = {"codec": precision.reduce_codec, "numel": slice_numel, "dtype": dtypes.reduce}
            gathers = [GatherEncodedBack.on_axis(split_axes[0], mesh, op, **encoded)]
        decode = functools.partial(Decode, num_slices=num_slices, numel=slice_numel, dtype=dtypes.param)
        if codec := storage_codec(unit):
            encoding = codec._describe_encoding(slice_numel, dtype)[1]
            moves = [Move(device, torch.uint8, torch.uint8, torch.uint8)] if device is not None else []
            stages = [*moves, *gathers, decode(codec, encoding=encoding)]  # of bytes, which have no gradient
        else:
            sent = dtypes.param  # what comes to the gathers
            if layout:
                sent, gathers = dtype, [Bytes(layout), *gathers, Join(layout)]
            elif precision.codec and dtype.is_floating_point and unit.numel:
                sent, gathers = dtype, [Encode(precision.codec, dtypes), *gathers, decode(precision.codec)]
            replicas = [Replicas.on_axis(name, mesh, op) for name in reversed(replica_axes)]
            stages = [*replicas, *gathers]
            stages = [*([Divide(after)] if after != 1 else []), *stages, *([Divide(before)] if before != 1 else [])]
            if dtypes != (dtype, dtype) or device is not None or layout is not None:
                smaller = min(dtype, dtypes.reduce, key=lambda dtype: dtype.itemsize)
                move = Move(device, sent, dtype, dtype if device is None else smaller)
                stages = [move, *stages, GradDtype(device, dtypes.reduce)]

        has_own_buffer = any(stage.changes_values for stage in stages)
        secondary_axes = tuple(name for name in split_axes if name in unit.p.reshard_axes)
        reshards = bool(secondary_axes) if unit.p.reshard_axes and split_axes else bool(unit.p.reshard)
        secondary_axes = () if secondary_axes == split_axes else secondary_axes
        return cls(
            stages=tuple(stages),
            padded_numel=padded_numel,
            longest_padding=longest_padding(unit, padded_numel),
            split_axes=split_axes,
            replica_axes=replica_axes,
            shard_dtype=dtype,
            dtypes=dtypes,
            layout=layout,
            device=device,
            has_own_buffer=has_own_buffer,
            reshard_after_forward=reshards and has_own_buffer,
            secondary_axes=secondary_axes,
            num_secondary=count_ranks(secondary_axes, mesh),
        )

    @property
    def options(self) -> tuple[Stage, ...]:
        """The last stages, those of options, which make of the buffer as stored what is computed with."""
        return tuple(stage for stage in self.stages if stage.is_option)

    def choose(self, as_stored: bool) -> tuple[Stage, ...]:
        """Return its stages, all or those that bring to the buffer what was sharded."""
        return tuple(stage for stage in self.stages if not stage.is_option) if as_stored else self.stages

    @functools.cached_property
    def bucket_kind(self) -> tuple[object, ...]:
        """The common properties of the units whose gradients are reduced as one, if every rank keeps them whole."""
        divisors = tuple(stage.divisor for stage in self.stages if isinstance(stage, Divide))
        return self.dtypes.reduce, self.shard_dtype, self.device, self.replica_axes, divisors

    @functools.cached_property
    def view_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the parameters that are views of its buffer."""
        return self.layout.dtypes if self.layout else (self.dtypes.param,)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of its whole buffer."""
        return self.layout.buffer_bytes if self.layout else self.padded_numel * self.dtypes.param.itemsize

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
