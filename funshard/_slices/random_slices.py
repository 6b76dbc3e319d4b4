"""random_like: random vectors like the parameters, whose values do not depend on how these are sharded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from .._core.checks import bind_spec, check_mapping
from .._core.flow import scatter_along
from .._core.layout import Params, from_memory_order
from .._core.spec import PartitionSpec
from .._core.unit import Unit, global_shape
from .._wire.flow import flatten_global
from .pieces import check_slice, slice_coords, slice_pieces

CHUNK = 1 << 16
"""The number of counters drawn at once: four elements each, and some 20 times their memory meanwhile."""

Draw = Callable[[Sequence[Tensor], torch.dtype], Tensor]
"""A function from four words, ``[counters]`` each, to as many elements, ``[counters, 4]``."""


_Range = tuple[str, int, int]
"""Elements of a parameter, in its memory order: its name, begin and end."""


def random_like(
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    seed: int | Tensor,
    *,
    distribution: Literal["normal", "rademacher"] = "normal",
    rank: int | None = None,
) -> Params:
    """Return a random vector like the parameters: this rank's slices of one that is the same however they are sharded.

    An element follows from the seed, its parameter's name and its place there alone, and padding is zero: for directions of
    `hvp` and probes. ``torch.randn_like`` of shards fills the padding, and differs between replicas.

    Args:
        params: This rank's shards by unit key, or full tensors by parameter name; some or all. Their values are not read.
        spec: Their spec.
        seed: A whole number, or an integer tensor without dimensions, which vmap may batch. The same on all ranks.
        distribution: "normal", with variance 1 (of complex numbers too), or "rademacher": -1 and 1, equally likely.
        rank: Whose slices, by its number on the mesh, row-major; this rank's by default.

    Returns:
        Tensors with the keys, shapes, dtypes and devices of ``params``.

    Raises:
        TypeError: A seed is no integer, or a unit or parameter is not floating point.
        ValueError: A key is not in the spec, a tensor of another shape, or a unit at rest in a codec.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> signs = fs.random_like(fs.shard(model, spec), spec, 0, distribution="rademacher")
        >>> fs.unshard(signs, spec)["weight"].abs()
        tensor([[1., 1.],
                [1., 1.]])
    """
    spec = bind_spec(spec)
    check_mapping(params)
    if distribution not in ("normal", "rademacher"):
        raise ValueError(f"random_like: distribution: expected 'normal' or 'rademacher', got {distribution!r}")
    inexact = isinstance(seed, Tensor) and (seed.dim() or seed.is_floating_point() or seed.is_complex())
    if inexact or not (type(seed) is int or (isinstance(seed, Tensor) and seed.dtype != torch.bool)):
        raise TypeError(f"random_like: seed: expected a whole number, or an integer tensor without dimensions, got {seed!r}")
    draw = draw_normal if distribution == "normal" else _draw_signs
    for key, tensor in params.items():
        owner = spec.owner(key)
        if isinstance(owner, Unit):
            check_slice(tensor, owner, spec, "random vector")
        elif tuple(tensor.shape) != (shape := global_shape(owner, dict(spec.bound_mesh.sizes))):
            raise ValueError(f"parameter '{key}': expected shape {list(shape)}, got {list(tensor.shape)}")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"random_like: '{key}': expected a floating point tensor, got {tensor.dtype}; set it apart with "
                "partition(params, spec, predicate)"
            )
    return {key: _draw_like(tensor, key, spec, seed, draw, rank) for key, tensor in params.items()}


def _draw_like(tensor: Tensor, key: str, spec: PartitionSpec, seed: int | Tensor, draw: Draw, rank: int | None) -> Tensor:
    """Draw random values for a shard or a full parameter: the same for each element on every mesh."""
    owner = spec.owner(key)
    if not isinstance(owner, Unit):
        owner = dataclasses.replace(owner, shape=tuple(tensor.shape))
        return from_memory_order(_draw_ranges([(owner.name, 0, owner.numel)], seed, draw, tensor)[0], owner)
    mesh = spec.bound_mesh
    if owner.local_axes or (rank is None and mesh.is_simulated):
        sizes = dict(mesh.sizes)
        params = [dataclasses.replace(param, shape=global_shape(param, sizes)) for param in owner.params]
        drawn = _draw_ranges([(param.name, 0, param.numel) for param in params], seed, draw, tensor)
        full = {param.name: from_memory_order(x, param) for x, param in zip(drawn, params, strict=True)}
        return scatter_along(flatten_global(full, owner, spec), owner.distinct_axes, mesh, rank)
    found = [*slice_pieces(owner, spec, slice_coords(owner, spec, rank))]
    drawn = _draw_ranges([(p.param.name, p.begin, p.begin + p.high - p.low) for p in found], seed, draw, tensor)
    parts: list[Tensor] = []
    end = 0
    for piece, values in zip(found, drawn, strict=True):
        if len(values):
            parts += [tensor.new_zeros(piece.low - end), values]
            end = piece.high
    return torch.cat([*parts, tensor.new_zeros(len(tensor) - end)])


def _draw_ranges(ranges: Sequence[_Range], seed: int | Tensor, draw: Draw, like: Tensor) -> list[Tensor]:
    """Return the elements of each range, 1-D. A counter holds the number of four elements and the name; the key is the seed."""
    if like.is_complex():
        twice = [(name, 2 * begin, 2 * end) for name, begin, end in ranges]
        real = torch.empty(0, dtype=like.real.dtype, device=like.device)
        pairs = [x.view(-1, 2) for x in _draw_ranges(twice, seed, draw, real)]
        return [torch.complex(x[:, 0], x[:, 1]) / math.sqrt(2) for x in pairs]
    counters = [(begin // 4, -(-end // 4)) for _, begin, end in ranges]
    device = like.device
    numbers = torch.cat([torch.arange(first, last, device=device) for first, last in counters])
    lengths = [last - first for first, last in counters]
    hashes = [torch.full((n,), hash_text(name), device=device) for (name, *_), n in zip(ranges, lengths, strict=True)]
    names = torch.cat(hashes)
    key = seed & MASK, (seed >> 32) & MASK
    chunks = [
        draw(philox((n & MASK, n >> 32, name & MASK, (name >> 32) & MASK), key), like.dtype).flatten(-2)
        for n, name in zip(numbers.split(CHUNK), names.split(CHUNK), strict=True)
    ]
    flat = torch.cat(chunks)
    out: list[Tensor] = []
    start = 0
    for (_, begin, end), (first, last) in zip(ranges, counters, strict=True):
        skipped = start + begin - 4 * first
        out.append(flat[skipped : skipped + end - begin])
        start += 4 * (last - first)
    return out


def draw_normal(words: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Draw normal numbers by the Box-Muller transform, in float64 if the device has it, so that slices round alike."""
    wide = torch.float32 if words[0].device.type == "mps" else torch.float64
    a, b, c, d = ((word.to(wide) + 0.5) / 2**32 for word in words)
    radii = (-2 * torch.stack([a, c], -1).log()).sqrt()
    angles = 2 * math.pi * torch.stack([b, d], -1)
    return torch.cat([radii * angles.cos(), radii * angles.sin()], -1).to(dtype)


def _draw_signs(words: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (1 - 2 * (torch.stack([*words], -1) >> 31)).to(dtype)


def hash_text(name: str) -> int:
    """Return the FNV-1a hash of a text as a signed 64-bit number, the same in every process."""
    number = 0xCBF29CE484222325
    for byte in [*name.encode()]:
        number = ((number ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return number - (1 << 64) if number >> 63 else number


# --- Philox4x32-10: random words as a pure function of a counter and a key, by integer arithmetic on tensors ---
#
# Each word depends on its counter alone, so that any part of a stream can be computed by itself, on every device. The generator
# of torch on CUDA and of numpy. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four random words of a counter.

    Args:
        counter: Four words below 2**32, int64 tensors of one shape.
        key: Two words below 2**32, which choose the stream.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # int64 wraps, and the 64 bits are those of the product
        a, b, c, d = (
            ((right >> 32) & MASK) ^ b ^ first,
            right & MASK,
            ((left >> 32) & MASK) ^ d ^ second,
            left & MASK,
        )
        first, second = (first + KEY_INCREMENTS[0]) & MASK, (second + KEY_INCREMENTS[1]) & MASK
    return a, b, c, d
