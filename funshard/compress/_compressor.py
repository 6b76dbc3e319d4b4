"""Compressor: the pair of functions, and the handling of a unit's gradients beside compression."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from .._core.checks import bind_spec, check_mapping, find_full_params
from .._core.division import count_ranks
from .._core.layout import Params, flatten_unit
from .._core.mesh import Axes
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._spec.precision import check_trainable
from .._wire.flow import reduce_along
from .._wire.host import HOST, compute_device
from .._wire.whole import transpose_options
from ..collectives._functions import scatter

__all__ = ["Compressor", "bind_axes", "check_grads", "move_axes_first", "move_to_rest", "other_axes", "reduce_exactly"]
__all__ += ["reduce_over_axes", "scatter_axes", "to_buffer"]

S = TypeVar("S")


@dataclass(frozen=True)
class Compressor(Generic[S]):
    """A pair of pure functions. The state is a pytree of tensors, of the same structure after every step."""

    init: Callable[[PartitionSpec], S]
    """``init(spec)``: the state before the first step."""
    reduce: Callable[[Mapping[str, Tensor], S, PartitionSpec], tuple[Params, S]]
    """``reduce(grads, state, spec)``: the mean over ranks of their full gradients by parameter name, or about that, as
    `shard` slices it, in the gradients' own dtypes and with zeros for padding; and the next state. Units without
    gradients are left out. Raises ValueError or TypeError, naming the parameter, before any communication, for one that
    is not of the spec, is missing from its unit, or has another shape or dtype."""


def bind_axes(axes: Axes, spec: PartitionSpec) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Return the bound spec, and the axes in the order of its mesh."""
    spec = bind_spec(spec)
    return spec, spec.bound_mesh.select(axes)


def other_axes(over: tuple[str, ...], spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes that are not in ``over``."""
    return tuple(name for name in spec.bound_mesh.names if name not in over)


def check_grads(grads: Mapping[str, Tensor], spec: PartitionSpec, *, complex_too: bool = False) -> dict[str, list[Tensor]]:
    """Return each unit's gradients by unit key, in the order of its parameters; raise for an invalid gradient."""
    check_mapping(grads)
    for name in grads:
        if name not in spec.by_name and name not in spec.ignored:
            raise ValueError(
                f"gradient '{name}' is not of a parameter of the spec: expected full gradients by names such as "
                f"{list(spec.by_name)[:4]}; differentiate with respect to unshard(params, spec)"
            )
    given = {unit.key: tensors for unit in spec if (tensors := find_full_params(grads, unit)) is not None}
    check_trainable((spec.by_key[key] for key in given), "gradient")
    for key, tensors in given.items():
        for param, tensor in zip(spec.by_key[key].params, tensors, strict=True):
            if not (tensor.is_floating_point() or (complex_too and tensor.is_complex())):
                raise TypeError(f"gradient of parameter '{param.name}': expected a floating point dtype, got {tensor.dtype}")
            if tensor.dtype != tensors[0].dtype:
                raise ValueError(
                    f"gradient of parameter '{param.name}' of unit '{key}': expected {tensors[0].dtype} as "
                    f"'{spec.by_key[key].params[0].name}' has, got {tensor.dtype}; one unit is one buffer of one dtype"
                )
    return {key: transpose_options(tensors, spec.by_key[key], spec.bound_mesh) for key, tensors in given.items()}


def to_buffer(tensors: Sequence[Tensor], unit: Unit, spec: PartitionSpec) -> Tensor:
    """Return the padded buffer of the unit's gradients."""
    names = [param.name for param in unit.params]
    return flatten_unit(dict(zip(names, tensors, strict=True)), unit, spec.padded_numel(unit))


def reduce_exactly(buffer: Tensor, unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> Tensor:
    """Return this rank's slice of the mean over these axes, without compression."""
    buffer = reduce_over_axes(buffer, unit, spec, over)
    return move_to_rest(scatter_axes(buffer, unit, spec, other_axes(over, spec)), unit, spec)


def move_to_rest(piece: Tensor, unit: Unit, spec: PartitionSpec) -> Tensor:
    """Move a unit's slice to the device of its shard: the host with ``P(offload="params")``."""
    return piece if compute_device(unit, spec.bound_mesh) is None else piece.to(HOST)


def reduce_over_axes(buffer: Tensor, unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> Tensor:
    """Return the mean over some axes, sliced along those that split the unit; `scatter_axes` slices along the others.

    Over local axes a rank's gradient is the sum already, by the model's own collectives: the mean only divides it.
    """
    if not unit.numel:
        return buffer
    mesh = spec.bound_mesh
    buffer = move_axes_first(buffer, unit, spec, over)
    narrow = buffer.itemsize == 2
    # of 16 bits all before the sum, as torch's allreduce and fp16 hooks do, whose results these are
    if (ranks := count_ranks(over if narrow else (name for name in over if name in unit.local_axes), mesh)) > 1:
        buffer = buffer / ranks
    split = [mesh[name] for name in unit.p.axes if name in over]
    rest = [mesh[name] for name in reversed(over) if name not in unit.distinct_axes]
    return reduce_along(buffer, split, rest, "sum" if narrow else "mean")


def move_axes_first(buffer: Tensor, unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> Tensor:
    """Reorder the slices of a unit's buffer so that these axes split it first."""
    order = sorted(range(len(unit.p.axes)), key=lambda i: unit.p.axes[i] not in over)
    if order == sorted(order):
        return buffer
    sizes = [spec.bound_mesh[name].size for name in unit.p.axes]
    return buffer.unflatten(0, (*sizes, -1)).permute(*order, len(order)).flatten()


def scatter_axes(buffer: Tensor, unit: Unit, spec: PartitionSpec, axes: tuple[str, ...]) -> Tensor:
    """Return this rank's slice of a buffer along some axes of the unit."""
    for name in unit.p.axes:
        if name in axes:
            buffer = scatter(buffer, spec.bound_mesh[name])
    return buffer
