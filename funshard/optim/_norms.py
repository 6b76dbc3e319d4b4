"""Norms and inner products of what is sharded like the parameters, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import _torch
from .._spec.host import used_on
from .._spec.spec import PartitionSpec, bound
from .._spec.unit import Unit
from .._units.layout import Params
from .._units.padding import check_slice, map_elements
from ..collectives._functions import gather_slices, sum_shards
from ..collectives._mesh import check_spans_world

__all__ = ["clip_by_global_norm", "clipped", "global_norm", "norm_of_units", "sum_of_squares", "vdot", "wide"]


def global_norm(tree: Mapping[str, Tensor], spec: PartitionSpec, *, p: float = 2.0) -> Tensor:
    """The p-norm of all elements of the whole tensors, a scalar that is the same on every rank: of a gradient, say.

    ``tree`` holds this rank's shards by unit key, or full tensors by parameter name, which every rank has alike; some
    units or all. Slices are added up over the axes that a unit is split over, replicated ones count once. Padding does not
    count, whatever its values are. In float32 at least. One collective of a scalar for each set of axes. Differentiable at
    every order; with respect to shards it counts, as `collectives.sum_shards` does, once for all ranks. Equal to
    ``torch.nn.utils.get_total_norm`` of the gathered tree.

    Raises ValueError, naming it, for a key that is neither, for a tensor that is not as long as the unit's slice, for a p
    that is not positive, and for a mesh of only some ranks that `PartitionSpec.on` was not told of by ``submesh=True``.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> fs.optim.global_norm({"weight": torch.tensor([[3.0, 4.0]])}, spec)
        tensor(5.)
    """
    if not p > 0:
        raise ValueError(f"global_norm: expected a positive p, or inf, got {p}")
    spec = bound(spec)

    def power(x: Tensor) -> Tensor:
        return wide(x).abs() if p == math.inf else wide(x).abs() ** p

    values = {key: _combined(_elements("norm", power, key, spec, x), p) for key, x in tree.items()}
    total = _over_ranks(values, spec, p)
    return total if p == math.inf else total ** (1 / p)


def vdot(a: Mapping[str, Tensor], b: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """The inner product of the whole tensors that two trees are slices of: a scalar, the same on every rank.

    Trees, dtype, collectives and derivatives are those of `global_norm`. Equal to ``torch.vdot`` of the gathered trees:
    where complex, ``a`` is conjugated.

    >>> import torch, funshard as fs
    >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
    >>> fs.optim.vdot({"weight": torch.tensor([[1.0, 2.0]])}, {"weight": torch.tensor([[3.0, 4.0]])}, spec)
    tensor(11.)

    Raises ValueError, naming it, for a key that is neither unit nor parameter, that only one of them has, whose tensors have
    two shapes, or whose tensors are not as long as the unit's slice.
    """
    spec = bound(spec)
    for key in [*a, *b]:
        if key not in a or key not in b:
            raise ValueError(f"vdot: '{key}' is in {'a' if key in a else 'b'} only: expected trees of the same keys")
        if a[key].shape != b[key].shape:
            raise ValueError(f"vdot: '{key}': expected tensors of one shape, got {list(a[key].shape)} and {list(b[key].shape)}")

    def product(x: Tensor, y: Tensor) -> Tensor:
        return wide(x).conj() * wide(y)

    values = {key: _elements("inner product", product, key, spec, x, b[key]).sum() for key, x in a.items()}
    return _over_ranks(values, spec)


def clip_by_global_norm(
    tree: Mapping[str, Tensor], spec: PartitionSpec, max_norm: float | Tensor, *, p: float = 2.0
) -> tuple[Params, Tensor]:
    """``(the tree scaled to a norm of at most max_norm, its norm before)``, in the tensors' own dtypes.

    The norm is `global_norm`'s, and the scale min(1, max_norm / (norm + 1e-6)), as in ``torch.nn.utils.clip_grad_norm_``
    of the gathered tree. As there, nothing is said of a norm that is not finite: NaN makes everything NaN, inf makes what is
    finite 0 and what is infinite NaN. Look at the norm before the update.

    >>> import torch, funshard as fs
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> fs.optim.clip_by_global_norm({"weight": torch.tensor([[3.0, 4.0]])}, fs.policies.whole()(model), 2.5)
    ({'weight': tensor([[1.5000, 2.0000]])}, tensor(5.))

    Raises what `global_norm` raises, and ValueError for a ``max_norm`` that is negative or NaN. (A tensor of an accelerator or
    a transform, which the host cannot read at once, makes the result NaN instead.)
    """
    check_max_norm("clip_by_global_norm", max_norm)
    norm = global_norm(tree, spec, p=p)
    return clipped(tree, max_norm, norm), norm


def check_max_norm(function: str, max_norm: float | Tensor) -> None:
    """ValueError unless the limit is 0 or more, as far as the host can tell without waiting for a device."""
    if isinstance(max_norm, Tensor) and not (_torch.is_eager() and max_norm.device.type == "cpu"):
        return
    if not max_norm >= 0:
        raise ValueError(f"{function}: max_norm: expected a number from 0 on, got {float(max_norm)}")


def clipped(tree: Mapping[str, Tensor], max_norm: float | Tensor, norm: Tensor) -> Params:
    """The tree, whose norm is taken to be this one, scaled to at most ``max_norm``."""
    if isinstance(max_norm, Tensor):
        max_norm = torch.where(max_norm >= 0, max_norm, math.nan)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    return {key: tensor * scale.to(tensor.device, tensor.dtype) for key, tensor in tree.items()}


def sum_of_squares(key: str, grad: Tensor, spec: PartitionSpec) -> Tensor:
    """Return this rank's part of the squared 2-norm of one unit or parameter; `norm_of_units` makes a norm of several."""
    elements = _elements("norm", lambda x: x, key, spec, grad)
    return torch.linalg.vector_norm(elements, dtype=torch.promote_types(grad.dtype, torch.float32)) ** 2


def norm_of_units(squares: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return the 2-norm of the whole tensors from each one's `sum_of_squares`."""
    return _over_ranks(squares, bound(spec), 2.0).sqrt()


def _elements(what: str, f: Callable[..., Tensor], key: str, spec: PartitionSpec, *tensors: Tensor) -> Tensor:
    """An elementwise function of what a tree has under a key, without padding."""
    owner = spec.owner(key)
    if not isinstance(owner, Unit):
        return f(*tensors)
    for tensor in tensors:
        check_slice(tensor, owner, spec, what)
    return map_elements(f, owner, spec, *tensors)


def _over_ranks(values: Mapping[str, Tensor], spec: PartitionSpec, p: float = 1.0) -> Tensor:
    """The sum of a scalar of each unit or parameter, or their maximum: over its ranks where a unit is split."""
    check_spans_world(spec.bound_mesh, "a norm or an inner product")
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    for key, value in values.items():
        owner = spec.owner(key)
        used = used_on(owner, spec.bound_mesh) if isinstance(owner, Unit) else None
        value = value if used is None else value.to(used)  # what is sent is there
        parts.setdefault(owner.p.axes if isinstance(owner, Unit) else (), []).append(value)
    totals: list[Tensor] = []
    for axes, of_units in parts.items():
        total = _combined(torch.stack(of_units), p)
        for axis in (spec.bound_mesh[name] for name in axes):
            total = gather_slices(total[None], axis).amax() if p == math.inf else sum_shards(total, axis)
        totals.append(total)
    return _combined(torch.stack(totals), p) if totals else torch.zeros(())


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _combined(values: Tensor, p: float) -> Tensor:
    return values.sum() if p < math.inf or not values.numel() else values.amax()
