"""Norms and inner products of what is sharded like the parameters, and clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .._spec.host import used_on
from .._spec.spec import PartitionSpec, bound
from .._spec.unit import Unit
from .._units.layout import Params
from ..collectives._functions import all_gather, sum_shards

__all__ = ["clip_by_global_norm", "global_norm", "vdot", "wide"]


def global_norm(tree: Mapping[str, Tensor], spec: PartitionSpec, *, p: float = 2.0) -> Tensor:
    """The p-norm of all elements of the whole tensors, a scalar that is the same on every rank: of a gradient, say.

    ``tree`` holds this rank's shards by unit key, or full tensors by parameter name, which every rank has alike; some
    units or all. Slices are added up over the axes that a unit is split over, replicated ones count once. In float32 at
    least. One collective of a scalar for each set of axes. Differentiable at every order; with respect to shards it
    counts, as `collectives.sum_shards` does, once for all ranks. Equal to ``torch.nn.utils.get_total_norm`` of the
    gathered tree.

    Raises ValueError, naming it, for a key that is neither, and for a p that is not positive.
    """
    if not p > 0:
        raise ValueError(f"global_norm: expected a positive p, or inf, got {p}")
    total = _over_ranks({key: _of_elements(tensor, p) for key, tensor in tree.items()}, spec, p)
    return total if p == math.inf else total ** (1 / p)


def vdot(a: Mapping[str, Tensor], b: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """The inner product of the whole tensors that two trees are slices of: a scalar, the same on every rank.

    Trees, dtype, collectives and derivatives are those of `global_norm`. Equal to ``torch.vdot`` of the gathered trees:
    where complex, ``a`` is conjugated.

    >>> import torch, funshard as fs
    >>> spec = fs.whole()(torch.nn.Linear(2, 1, bias=False))
    >>> fs.optim.vdot({"": torch.tensor([1.0, 2.0])}, {"": torch.tensor([3.0, 4.0])}, spec)
    tensor(11.)

    Raises ValueError, naming it, for a key that is neither unit nor parameter, that only one of them has, or whose
    tensors have two shapes.
    """
    for key in [*a, *b]:
        if key not in a or key not in b:
            raise ValueError(f"vdot: '{key}' is in {'a' if key in a else 'b'} only: expected trees of the same keys")
        if a[key].shape != b[key].shape:
            raise ValueError(f"vdot: '{key}': expected tensors of one shape, got {list(a[key].shape)} and {list(b[key].shape)}")
    return _over_ranks({key: (wide(tensor).conj() * wide(b[key])).sum() for key, tensor in a.items()}, spec)


def clip_by_global_norm(
    tree: Mapping[str, Tensor], max_norm: float | Tensor, spec: PartitionSpec, *, p: float = 2.0
) -> tuple[Params, Tensor]:
    """``(the tree scaled to a norm of at most max_norm, its norm before)``, in the tensors' own dtypes.

    The norm is `global_norm`'s, and the scale min(1, max_norm / (norm + 1e-6)), as in ``torch.nn.utils.clip_grad_norm_``
    of the gathered tree. As there, nothing is said of a norm that is not finite: NaN makes everything NaN, inf makes what is
    finite 0 and what is infinite NaN. Look at the norm before the update.

    >>> import torch, funshard as fs
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> fs.optim.clip_by_global_norm({"": torch.tensor([3.0, 4.0])}, 1.0, fs.whole()(model))
    ({'': tensor([0.6000, 0.8000])}, tensor(5.))

    Raises what `global_norm` raises.
    """
    norm = global_norm(tree, spec, p=p)
    return clipped(tree, max_norm, norm), norm


def clipped(tree: Mapping[str, Tensor], max_norm: float | Tensor, norm: Tensor) -> Params:
    """The tree, whose norm is taken to be this one, scaled to at most ``max_norm``."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    return {key: tensor * scale.to(tensor.device, tensor.dtype) for key, tensor in tree.items()}


def _over_ranks(values: Mapping[str, Tensor], spec: PartitionSpec, p: float = 1.0) -> Tensor:
    """The sum of a scalar of each unit or parameter, or their maximum: over its ranks where a unit is split."""
    spec = bound(spec)
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    for key, value in values.items():
        owner = spec.owner(key)
        used = used_on(owner, spec.bound_mesh) if isinstance(owner, Unit) else None
        value = value if used is None else value.to(used)  # what is sent is there
        parts.setdefault(owner.p.axes if isinstance(owner, Unit) else (), []).append(value)
    totals: list[Tensor] = []
    for axes, of_units in parts.items():
        total = _together(torch.stack(of_units), p)
        for axis in (spec.bound_mesh[name] for name in axes):
            total = all_gather(total[None], axis).amax() if p == math.inf else sum_shards(total, axis)
        totals.append(total)
    return _together(torch.stack(totals), p) if totals else torch.zeros(())


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _of_elements(tensor: Tensor, p: float) -> Tensor:
    """The sum of the elements' p-th powers, or the largest."""
    size = wide(tensor).abs()
    return _together(size.flatten() if p == math.inf else size**p, p)


def _together(values: Tensor, p: float) -> Tensor:
    return values.sum() if p < math.inf or not values.numel() else values.amax()
