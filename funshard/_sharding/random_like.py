"""random_like: random vectors like the parameters, whose values do not depend on how these are sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from .._core.checks import bind_spec, check_mapping
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.unit import Unit, global_shape
from .._slices.pieces import check_slice
from .._slices.random_slices import draw_like, draw_normal


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
    return {key: draw_like(tensor, key, spec, seed, draw, rank) for key, tensor in params.items()}


def _draw_signs(words: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (1 - 2 * (torch.stack([*words], -1) >> 31)).to(dtype)
