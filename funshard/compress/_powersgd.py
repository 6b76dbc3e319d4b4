"""powersgd: the mean of gradients by its approximation of low rank, of which only two thin matrices are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.flow import count_ranks
from .._core.layout import Params, flatten_unit, unflatten_unit
from .._core.mesh import Axes
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._slices.pieces import zero_padding
from .._slices.random_slices import MASK, draw_normal, philox
from .._units.buckets import Bucket
from ..collectives._functions import all_reduce
from ._compressors import (
    Compressor,
    bind_axes,
    check_grads,
    move_to_rest,
    other_axes,
    reduce_exactly,
    reduce_over_axes,
    scatter_axes,
    to_buffer,
)

LowRankShape = tuple[int, int, int]
"""A matrix's rows, columns, and the rank of its approximation."""


class PowerSGD(NamedTuple):
    """The state of `powersgd`, by parameter name; by unit key where the matrix is a unit's buffer."""

    step: Tensor
    """int64 scalar: how many were taken. With the seed it says what is drawn."""
    q: Params
    """[columns, rank]: what the next step starts from, the same on all ranks that compress together."""
    error: Params
    """[rows, columns]: what this rank has not sent yet, another one on each; {} without error feedback."""


def powersgd(
    rank: int = 1,
    *,
    axes: Axes = None,
    batched: bool = False,
    min_compression_rate: float = 2.0,
    error_feedback: bool = True,
    warm_start: bool = True,
    seed: int = 0,
) -> Compressor[PowerSGD]:
    """Return the compressor that sends an approximation of low rank, ``P @ Q.T``, by its factors.

    ``P = orthogonal(sum over ranks of M @ Q)``, ``Q = mean over ranks of M.T @ P``: one all-reduce of every unit's P, together
    with gradients that are not compressed, and one of every Q, over each axis and for each dtype. Frozen units are not
    compressed; units with local axes are reduced exactly, because a piece has another approximation than the whole. Keep the
    old state after a step with gradients that are not finite (`loss_scale.select`). A state of other options, spec or mesh is
    a ValueError that names the parameter, before any communication.

    Vogels, Karimireddy and Jaggi, PowerSGD, 2019; as powerSGD_hook and batched_powerSGD_hook after their first
    ``start_powerSGD_iter`` steps, for which there is ``switch(1000, exact(), powersgd())``.

    Args:
        rank: The number of columns of P and Q, at least 1 (otherwise ValueError).
        axes: The mesh axes to compress over, all by default. Slices are then compressed, not whole gradients.
        batched: Compress each unit's buffer as one square matrix, as slices always are. By default each gradient is a matrix
            [its first dimension, the rest].
        min_compression_rate: Compress only if P and Q are so many times smaller than the gradient.
        error_feedback: Add to M what earlier steps left out. It takes the memory of the gradients that are compressed.
        warm_start: Start from the Q of the step before.
        seed: Of random numbers, which also depend on the step.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(64, 64, bias=False))
        >>> low = fs.compress.powersgd(rank=1)
        >>> state = low.init(spec)
        >>> grads, state = low.reduce({"weight": torch.ones(64, 64)}, state, spec)
        >>> {name: tuple(q.shape) for name, q in state.q.items()}
        {'weight': (64, 1)}
    """
    if rank < 1:
        raise ValueError(f"compress.powersgd: expected a rank of at least 1, got {rank}")

    def shapes(unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> dict[str, LowRankShape]:
        """Return the shapes and ranks of the unit's matrices that are worth compressing."""
        if not unit.requires_grad or unit.local_axes:
            return {}
        if _is_one_matrix(unit, batched, over):
            ranks = count_ranks((axis for axis in unit.p.axes if axis in over), spec.bound_mesh)
            side = math.ceil(math.sqrt(spec.shard_numel(unit) * ranks))
            sides = {unit.key: (side, side)}
        else:
            sides = {p.name: (p.shape[0], p.numel // p.shape[0]) for p in unit.params if p.shape and p.shape[0]}
        ranked = {key: (n, m, min(n, m, rank)) for key, (n, m) in sides.items()}
        return {key: (n, m, r) for key, (n, m, r) in ranked.items() if (n + m) * r * min_compression_rate < n * m}

    def init(spec: PartitionSpec) -> PowerSGD:
        spec, over = bind_axes(axes, spec)
        step = torch.zeros((), dtype=torch.int64, device=spec.bound_mesh.device)
        every = {key: (shape, unit.dtype) for unit in spec for key, shape in shapes(unit, spec, over).items()}
        zeros = {key: torch.zeros(n, m, dtype=d, device=step.device) for key, ((n, m, _), d) in every.items()}
        like = {key: zeros[key].new_zeros(m, r) for key, ((_, m, r), _) in every.items()}
        return PowerSGD(step, _draw_normals(like, seed, step), zeros if error_feedback else {})

    def reduce(grads: Mapping[str, Tensor], state: PowerSGD, spec: PartitionSpec) -> tuple[Params, PowerSGD]:
        spec, over = bind_axes(axes, spec)
        given = check_grads(grads, spec)
        units = {key: shapes(spec.by_key[key], spec, over) for key in given}
        every = {key: shape for unit in units.values() for key, shape in unit.items()}
        _check_powersgd_state(state, every, error_feedback)
        shards: Params = {}
        pieces: dict[str, Params] = {}
        for key, tensors in given.items():
            unit = spec.by_key[key]
            if units[key] or not any(name in over for name in unit.distinct_axes):
                pieces[key] = _tensors_to_compress(tensors, unit, spec, over, batched)
            else:
                shards[key] = reduce_exactly(to_buffer(tensors, unit, spec), unit, spec, spec.bound_mesh.names)
        sent: Params = {}
        q, error = dict(state.q), dict(state.error)
        for dtype in dict.fromkeys(given[key][0].dtype for key in pieces):
            some = {name: g for key in pieces if given[key][0].dtype == dtype for name, g in pieces[key].items()}
            matrices = {name: _to_padded_matrix(some[name], *every[name][:2]) for name in some if name in every}
            if error_feedback:
                matrices = {name: m + error[name].to(m) for name, m in matrices.items()}
            rest = {name: g for name, g in some.items() if name not in every}
            low, means, new = _approximate(matrices, {name: q[name].to(m) for name, m in matrices.items()}, rest, over, spec)
            if error_feedback:
                error |= {name: (m - low[name]).to(error[name].dtype) for name, m in matrices.items()}
            q |= {name: x.to(q[name].dtype) for name, x in new.items()}
            sent |= means | {name: x.flatten()[: some[name].numel()].view(some[name].shape) for name, x in low.items()}
        fresh = _draw_normals(q, seed, state.step + 1)
        for name in every:
            q[name] = torch.where((q[name] == 0).all(0), fresh[name], q[name]) if warm_start else fresh[name]
        for key, parts in pieces.items():
            unit = spec.by_key[key]
            buffer = sent[key] if key in parts else flatten_unit(sent, unit, spec.padded_numel(unit))
            shard = scatter_axes(buffer, unit, spec, over)
            shards[key] = move_to_rest(zero_padding(shard, unit, spec) if key in units[key] else shard, unit, spec)
        return {key: shards[key] for key in given}, PowerSGD(state.step + 1, q, error)

    return Compressor(init, reduce)


def _approximate(
    matrices: Params, q: Params, rest: Params, over: tuple[str, ...], spec: PartitionSpec
) -> tuple[Params, Params, Params]:
    """Return approximate means of the matrices, means of the rest, and the next q: one dtype, two collectives."""
    size = count_ranks(over, spec.bound_mesh)
    start = _orthonormalize(q)
    summed = _sum_ranks({k: m @ start[k] for k, m in matrices.items()} | {k: g / size for k, g in rest.items()}, over, spec)
    p = _orthonormalize({k: summed[k] for k in matrices})
    q = {k: x / size for k, x in _sum_ranks({k: m.mT @ p[k] for k, m in matrices.items()}, over, spec).items()}
    return {k: p[k] @ q[k].mT for k in matrices}, {k: summed[k] for k in rest}, q


def _sum_ranks(tensors: Params, over: tuple[str, ...], spec: PartitionSpec) -> Params:
    if not sum(x.numel() for x in tensors.values()):
        return tensors
    bucket = Bucket(tensors.items())
    flat = bucket.concat()
    for name in over:
        flat = all_reduce(flat, spec.bound_mesh[name], reduce="sum")
    return {k: part.view(tensors[k].shape) for k, part in bucket.split(flat)}


def _orthonormalize(matrices: Params) -> Params:
    """Return orthonormal columns that span what the matrices' columns do, by QR, those of one shape at once."""
    out: Params = {}
    for shape in dict.fromkeys(x.shape for x in matrices.values()):
        some = {k: x for k, x in matrices.items() if x.shape == shape}
        x = torch.stack(list(some.values()))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if shape[1] == 1:  # by its norm, which is quicker
            wide = torch.nn.functional.normalize(wide, dim=1, eps=torch.finfo(wide.dtype).tiny)
        else:
            wide = torch.linalg.qr(wide).Q
        out |= zip(some, wide.to(x.dtype).unbind(), strict=True)
    return {k: out[k] for k in matrices}


def _draw_normals(like: Params, seed: int, step: Tensor) -> Params:
    """Return normal random numbers in these shapes: a function of seed and step alone, the same on every device."""
    if not like:
        return {}
    names = sorted(like)
    lengths = [like[name].numel() for name in names]
    numbers = torch.arange(-(-sum(lengths) // 4), device=step.device)
    zeros = torch.zeros_like(numbers)
    words = philox((numbers, zeros, zeros + step, zeros), (seed & MASK, (seed >> 32) & MASK))
    parts = draw_normal(words, torch.float32).flatten()[: sum(lengths)].split(lengths)
    drawn = dict(zip(names, parts, strict=True))
    return {name: drawn[name].view(x.shape).to(x) for name, x in like.items()}


def _is_one_matrix(unit: Unit, batched: bool, over: tuple[str, ...]) -> bool:
    """Return whether the unit is compressed as one matrix: also where a rank has only a slice of it."""
    return batched or any(name not in over for name in unit.p.axes)


def _tensors_to_compress(
    tensors: Sequence[Tensor], unit: Unit, spec: PartitionSpec, over: tuple[str, ...], batched: bool
) -> Params:
    """Return the tensors to compress, reduced exactly over the other axes: the unit's buffer by key, or parameters by name."""
    rest = other_axes(over, spec)
    if rest or batched:
        buffer = reduce_over_axes(to_buffer(tensors, unit, spec), unit, spec, rest)
        if _is_one_matrix(unit, batched, over):
            return {unit.key: buffer}
        tensors = unflatten_unit(buffer, unit)
    return {param.name: tensor for param, tensor in zip(unit.params, tensors, strict=True)}


def _to_padded_matrix(tensor: Tensor, n: int, m: int) -> Tensor:
    flat = tensor.reshape(-1)
    return (torch.nn.functional.pad(flat, (0, n * m - len(flat))) if n * m > len(flat) else flat).view(n, m)


def _check_powersgd_state(state: PowerSGD, shapes: Mapping[str, LowRankShape], error_feedback: bool) -> None:
    for key, (n, m, r) in shapes.items():
        parts = ("q", state.q, (m, r)), ("error", state.error, (n, m))
        for part, tensors, shape in parts[: 1 + error_feedback]:
            if key not in tensors or tuple(tensors[key].shape) != shape:
                got = list(tensors[key].shape) if key in tensors else "none"
                raise ValueError(
                    f"compress.powersgd: '{key}': expected a state whose {part} is {list(shape)}, got {got}; "
                    "make it by init(spec) with the same options, spec and mesh"
                )
