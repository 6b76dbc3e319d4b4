"""Gradient compression: what is sent in the place of each unit's gradients, with its state passed along.

A `Compressor` takes the place of the reduction: its gradients are this rank's own, with respect to the full parameters
(examples/guide/ideas.md). By `exact` the result is that of ``grad(lambda p: loss(unshard(p, spec)))(params)``. For each unit
the ranks are those of the whole mesh, also where it is split over one axis and replicated over another. A unit with local
axes has its pieces' gradients, by ``unshard(params, spec, whole=False)``: over these axes nothing is sent, and the mean
divides. ``axes=`` names the ones to compress over; over the others gradients are reduced exactly, and first, so that
``axes="replicate"`` on HSDP compresses slices, on the slow wires alone. As DDP's and FSDP's communication hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._core.checks import bind_spec, check_mapping, find_full_params, take_full_params
from .._core.flow import count_ranks
from .._core.layout import Params, flatten_unit, unflatten_unit
from .._core.mesh import Axes
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._slices.pieces import zero_padding
from .._slices.random_slices import MASK, draw_normal, philox
from .._slices.values import upcast
from .._spec.codec import check_trainable
from .._wire.flow import reduce_along, transpose_options
from .._wire.host import HOST, compute_device
from .._wire.reductions import Bucket
from ..collectives._exchange import all_to_all
from ..collectives._functions import all_reduce, gather_slices, scatter

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Compressor(Generic[S]):
    """A pair of pure functions. The state is a pytree of tensors, of the same structure after every step."""

    init: Callable[[PartitionSpec], S]
    """``init(spec)``: the state before the first step."""
    reduce: Callable[[Mapping[str, Tensor], S, PartitionSpec], tuple[Params, S]]
    """``reduce(grads, state, spec)``: the mean over ranks of their full gradients by parameter name, or about that, as
    `shard` slices it, in the gradients' own dtypes and with zeros for padding; and the next state. Units without
    gradients are left out. Raises ValueError or TypeError before any communication for a gradient that does not fit."""


def exact(axes: Axes = None) -> Compressor[tuple[()]]:
    """Return the compressor that sends the gradients themselves (allreduce_hook).

    Gradients of 16 bits are divided before they are added, so that sums do not overflow. To send fewer bits, take
    ``Precision(reduce=)``; for local steps ``switch(100, exact(), exact("gpu"))``, and `averaging.periodic`.

    Args:
        axes: The mesh axes to take the mean over, all by default. Along the others each rank has its own slice: with ``()`` of
            its own gradient (noop_hook). Axes that a unit is local over are among them.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(8, 1, bias=False))
        >>> fs.compress.exact().reduce({"weight": torch.arange(8.0)[None]}, (), spec)
        ({'': tensor([0., 1., 2., 3., 4., 5., 6., 7.])}, ())
    """

    def reduce(grads: Mapping[str, Tensor], state: tuple[()], spec: PartitionSpec) -> tuple[Params, tuple[()]]:
        spec, over = _bind_axes(axes, spec)
        for unit in spec if over else ():
            if missing := [axis for axis in unit.local_axes if axis not in over]:
                raise ValueError(
                    f"compress.exact: unit '{unit.key}' is local over axis '{missing[0]}', where ranks are parts of one model: "
                    f"expected axes= with it, got {list(over)}"
                )
        given = _check_grads(grads, spec, complex_too=True)
        units = [spec.by_key[key] for key in given]
        return {unit.key: _reduce_exactly(_to_buffer(given[unit.key], unit, spec), unit, spec, over) for unit in units}, state

    return Compressor(lambda spec: (), reduce)


def switch(at: int, before: Compressor[S], after: Compressor[T]) -> Compressor[tuple[Tensor, S, T]]:
    """Return the compressor that is ``before`` for some steps, then ``after``.

    Args:
        at: The number of steps. The state's counter, an int64 scalar on the CPU, is read in Python: make the state inside of
            `testing.spmd` or torch.compile.
        before: The first compressor.
        after: The second compressor.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> later = fs.compress.switch(100, fs.compress.exact(), fs.compress.quantize())
        >>> grads, state = later.reduce({"weight": torch.ones(2, 4)}, later.init(spec), spec)
        >>> grads
        {'': tensor([1., 1., 1., 1., 1., 1., 1., 1.])}
    """

    def reduce(
        grads: Mapping[str, Tensor], state: tuple[Tensor, S, T], spec: PartitionSpec
    ) -> tuple[Params, tuple[Tensor, S, T]]:
        steps, first, second = state
        if int(steps) < at:
            shards, first = before.reduce(grads, first, spec)
        else:
            shards, second = after.reduce(grads, second, spec)
        return shards, (steps + 1, first, second)

    return Compressor(lambda spec: (torch.zeros((), dtype=torch.int64), before.init(spec), after.init(spec)), reduce)


def quantize(chunk: int | None = None, *, axes: Axes = None) -> Compressor[tuple[()]]:
    """Return the compressor that sends bytes: 256 levels between the smallest and the largest element of a chunk.

    As quantization_pertensor_hook and quantization_perchannel_hook, but gradients under 1.2e-7 do not vanish. Ranks add in
    float32: an element is off by half a level at most. A chunk with a value that is not finite is not finite. The memory for
    replicated units grows with the number of ranks.

    Args:
        chunk: Elements with a scale of their own, at least 1 (otherwise ValueError; 512 in torch's hook); by default all that
            one rank sends another of a unit.
        axes: The mesh axes to compress over, all by default; over the others gradients are reduced exactly, and first.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> small = fs.compress.quantize()
        >>> grads, state = small.reduce({"weight": torch.full((2, 4), 255.0)}, small.init(spec), spec)
        >>> grads
        {'': tensor([255., 255., 255., 255., 255., 255., 255., 255.])}
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"compress.quantize: expected chunks of at least one element, got {chunk}")

    def reduce(grads: Mapping[str, Tensor], state: tuple[()], spec: PartitionSpec) -> tuple[Params, tuple[()]]:
        spec, over = _bind_axes(axes, spec)
        given = _check_grads(grads, spec)
        shards: Params = {}
        for key, tensors in given.items():
            unit = spec.by_key[key]
            buffer = _reduce_over_axes(_to_buffer(tensors, unit, spec), unit, spec, _other_axes(over, spec))
            if not unit.numel:
                shards[key] = _move_to_rest(buffer, unit, spec)
                continue
            n = spec.shard_numel(unit)
            size = min(chunk or n, n)
            pieces = torch.nn.functional.pad(buffer.float().unflatten(0, (-1, n)), (0, -n % size)).unflatten(1, (-1, size))
            low, high = pieces.amin(-1).clamp(max=0), pieces.amax(-1).clamp(min=0)
            # divided one by one, and the results before they are added: of finite gradients no difference or sum overflows
            scale = (high / 255 - low / 255).clamp(min=torch.finfo(torch.float32).tiny)
            zero = (-low / scale).round().clamp(0, 255)
            data = ((pieces / scale[..., None]).round() + zero[..., None]).clamp(0, 255).to(torch.uint8)
            scales, zeros = _exchange_pieces(torch.stack([scale, zero], -1), unit, spec, over).unbind(-1)
            ranks = count_ranks(over, spec.bound_mesh)
            most = torch.finfo(buffer.dtype).max * (1 - 2**-20) / ranks  # half a level beyond the largest may be too much
            limits = torch.where(scales.isfinite(), min(most, torch.finfo(torch.float32).max / ranks), torch.inf)[..., None]
            received = _exchange_pieces(data, unit, spec, over).float().sub_(zeros[..., None]).mul_(scales[..., None] / ranks)
            total = received.clamp(min=-limits, max=limits).sum(0)
            shards[key] = _move_to_rest(total.flatten()[:n].to(buffer.dtype), unit, spec)
        return shards, state

    return Compressor(lambda spec: (), reduce)


def _exchange_pieces(pieces: Tensor, unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> Tensor:
    """Return the pieces of all ranks for this rank, ``[ranks, ...]``: ``pieces[i]`` is for the owner of slice i of the unit."""
    mesh = spec.bound_mesh
    pieces = pieces.unsqueeze(1)
    for axis in (mesh[name] for name in unit.p.axes if name in over):
        pieces = all_to_all(pieces, axis).unflatten(0, (axis.size, -1)).movedim(0, 1).flatten(1, 2)
    pieces = pieces.squeeze(0)
    for axis in (mesh[name] for name in over if name not in unit.distinct_axes):
        pieces = gather_slices(pieces, axis)
    return pieces


# --- What compressors share: checks of gradients, and the exact reduction over axes that are not compressed ---


def _bind_axes(axes: Axes, spec: PartitionSpec) -> tuple[PartitionSpec, tuple[str, ...]]:
    spec = bind_spec(spec)
    return spec, spec.bound_mesh.select(axes)


def _other_axes(over: tuple[str, ...], spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(name for name in spec.bound_mesh.names if name not in over)


def _check_grads(grads: Mapping[str, Tensor], spec: PartitionSpec, *, complex_too: bool = False) -> dict[str, list[Tensor]]:
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
    units = (spec.by_key[key] for key in given)
    return {unit.key: transpose_options(take_full_params(grads, unit), unit, spec.bound_mesh) for unit in units}


def _to_buffer(tensors: Sequence[Tensor], unit: Unit, spec: PartitionSpec) -> Tensor:
    names = [param.name for param in unit.params]
    return flatten_unit(dict(zip(names, tensors, strict=True)), unit, spec.padded_numel(unit))


def _reduce_exactly(buffer: Tensor, unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> Tensor:
    buffer = _reduce_over_axes(buffer, unit, spec, over)
    return _move_to_rest(_scatter_axes(buffer, unit, spec, _other_axes(over, spec)), unit, spec)


def _move_to_rest(piece: Tensor, unit: Unit, spec: PartitionSpec) -> Tensor:
    return piece if compute_device(unit, spec.bound_mesh) is None else piece.to(HOST)


def _reduce_over_axes(buffer: Tensor, unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> Tensor:
    """Return the mean over some axes, sliced along those that split the unit; `scatter_axes` slices along the others.

    Over local axes a rank's gradient is the sum already, by the model's own collectives: the mean only divides it.
    """
    if not unit.numel:
        return buffer
    mesh = spec.bound_mesh
    order = sorted(range(len(unit.p.axes)), key=lambda i: unit.p.axes[i] not in over)
    if order != sorted(order):  # the axes to reduce over come first
        sizes = [mesh[name].size for name in unit.p.axes]
        buffer = buffer.unflatten(0, (*sizes, -1)).permute(*order, len(order)).flatten()
    narrow = buffer.itemsize == 2
    # of 16 bits all before the sum, as torch's allreduce and fp16 hooks do, whose results these are
    if (ranks := count_ranks(over if narrow else (name for name in over if name in unit.local_axes), mesh)) > 1:
        buffer = buffer / ranks
    split = [mesh[name] for name in unit.p.axes if name in over]
    rest = [mesh[name] for name in reversed(over) if name not in unit.distinct_axes]
    return reduce_along(buffer, split, rest, "sum" if narrow else "mean")


def _scatter_axes(buffer: Tensor, unit: Unit, spec: PartitionSpec, axes: tuple[str, ...]) -> Tensor:
    for name in unit.p.axes:
        if name in axes:
            buffer = scatter(buffer, spec.bound_mesh[name])
    return buffer


# --- powersgd: the mean by its approximation of low rank, of which only two thin matrices are sent ---


class PowerSGD(NamedTuple):
    """The state of `powersgd`, by parameter name; by unit key where the matrix is a unit's buffer."""

    step: Tensor  # int64 scalar: how many were taken; with the seed it says what is drawn
    q: Params  # [columns, rank]: what the next step starts from, the same on all ranks that compress together
    error: Params  # [rows, columns]: what this rank has not sent yet, another one on each; {} without error feedback


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
    old state after a step with gradients that are not finite (`loss_scale.select`).

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

    def shapes(unit: Unit, spec: PartitionSpec, over: tuple[str, ...]) -> dict[str, tuple[int, int, int]]:
        """Return the rows, columns and ranks of the unit's matrices that are worth compressing."""
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
        spec, over = _bind_axes(axes, spec)
        step = torch.zeros((), dtype=torch.int64, device=spec.bound_mesh.device)
        every = {key: (shape, unit.dtype) for unit in spec for key, shape in shapes(unit, spec, over).items()}
        zeros = {key: torch.zeros(n, m, dtype=d, device=step.device) for key, ((n, m, _), d) in every.items()}
        like = {key: zeros[key].new_zeros(m, r) for key, ((_, m, r), _) in every.items()}
        return PowerSGD(step, _draw_normals(like, seed, step), zeros if error_feedback else {})

    def reduce(grads: Mapping[str, Tensor], state: PowerSGD, spec: PartitionSpec) -> tuple[Params, PowerSGD]:
        spec, over = _bind_axes(axes, spec)
        given = _check_grads(grads, spec)
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
                shards[key] = _reduce_exactly(_to_buffer(tensors, unit, spec), unit, spec, spec.bound_mesh.names)
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
            shard = _scatter_axes(buffer, unit, spec, over)
            shards[key] = _move_to_rest(zero_padding(shard, unit, spec) if key in units[key] else shard, unit, spec)
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
        wide = upcast(x)
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
    return batched or any(name not in over for name in unit.p.axes)


def _tensors_to_compress(
    tensors: Sequence[Tensor], unit: Unit, spec: PartitionSpec, over: tuple[str, ...], batched: bool
) -> Params:
    """Return the tensors to compress, reduced exactly over the other axes: the unit's buffer by key, or parameters by name."""
    rest = _other_axes(over, spec)
    if rest or batched:
        buffer = _reduce_over_axes(_to_buffer(tensors, unit, spec), unit, spec, rest)
        if _is_one_matrix(unit, batched, over):
            return {unit.key: buffer}
        tensors = unflatten_unit(buffer, unit)
    return {param.name: tensor for param, tensor in zip(unit.params, tensors, strict=True)}


def _to_padded_matrix(tensor: Tensor, n: int, m: int) -> Tensor:
    flat = tensor.reshape(-1)
    return (torch.nn.functional.pad(flat, (0, n * m - len(flat))) if n * m > len(flat) else flat).view(n, m)


def _check_powersgd_state(state: PowerSGD, shapes: Mapping[str, tuple[int, int, int]], error_feedback: bool) -> None:
    for key, (n, m, r) in shapes.items():
        parts = ("q", state.q, (m, r)), ("error", state.error, (n, m))
        for part, tensors, shape in parts[: 1 + error_feedback]:
            if key not in tensors or tuple(tensors[key].shape) != shape:
                got = list(tensors[key].shape) if key in tensors else "none"
                raise ValueError(
                    f"compress.powersgd: '{key}': expected a state whose {part} is {list(shape)}, got {got}; "
                    "make it by init(spec) with the same options, spec and mesh"
                )
