"""Norms, inner products and arithmetic of sharded trees, whole or by parameter, and clipping."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec
from .._core.layout import Params
from .._core.mesh import check_spans_world
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._slices.pieces import check_slice, map_unpadded, split_by_param
from .._slices.values import upcast
from .._spec.local import distinct_axes
from .._wire.host import compute_device
from ..collectives._agree import Comparison, RankLines, find_difference, find_host_groups
from ..collectives._functions import gather_slices, sum_shards
from ._checks import check_tensors, vary_over


def global_norm(tree: Mapping[str, Tensor], spec: PartitionSpec, *, p: float = 2.0) -> Tensor:
    """Return the p-norm of all elements of the whole tensors, the same on every rank.

    Slices are summed over the axes that a unit is split over, by a collective for each; replicas count once, padding never.
    Differentiable at every order; with respect to shards it counts once for all ranks, as `collectives.sum_shards`. Shards that
    are scaled by it inside a derivative take ``vary(norm, axis, reduce="sum")`` of it, as in `clip_by_global_norm`. Equal to
    ``torch.nn.utils.get_total_norm`` of the gathered tree.

    Args:
        tree: Gradients, say: this rank's slices by unit key, or by parameter name full tensors or this rank's local pieces.
        spec: The spec of the slices.
        p: The order of the norm, > 0 or ``math.inf``.

    Returns:
        A scalar in float32 or the tensors' dtype, whichever is wider.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> fs.optim.global_norm({"weight": torch.tensor([[3.0, 4.0]])}, spec)
        tensor(5.)
    """
    spec = bind_spec(spec)
    check_tensors(tree, "global_norm")
    if not p > 0:
        raise ValueError(f"global_norm: expected a positive p, or inf, got {p}")

    def power(x: Tensor) -> Tensor:
        return upcast(x).abs() if p == math.inf else upcast(x).abs() ** p

    def reduce(x: Tensor) -> Tensor:
        return x.sum() if p < math.inf or not x.numel() else x.amax()

    values = {key: reduce(_map_tensors("norm", power, key, spec, x)) for key, x in tree.items()}
    total = _combine_over_ranks(values, tree, spec, p)
    return total if p == math.inf else total ** (1 / p)


def vdot(a: Mapping[str, Tensor], b: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return the inner product of the whole tensors of two trees, the same on every rank.

    Trees, dtype, collectives and derivatives are as in `global_norm`. Equal to ``torch.vdot`` of the gathered trees: ``a`` is
    conjugated if it is complex.

    Args:
        a: Slices by unit key, or full tensors by parameter name.
        b: A tree with the keys and shapes of ``a``.
        spec: The spec of the slices.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> fs.optim.vdot({"weight": torch.tensor([[1.0, 2.0]])}, {"weight": torch.tensor([[3.0, 4.0]])}, spec)
        tensor(11.)
    """
    return vdots([(a, b)], spec)[0]


def vdots(pairs: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]], spec: PartitionSpec) -> Tensor:
    """Return the inner products of pairs of trees, all with the same keys, by the collectives of one `vdot`: [pairs]."""
    spec = bind_spec(spec)
    for a, b in pairs:
        _check_same_keys("vdot", "a", a, "b", b)

    def product(x: Tensor, y: Tensor) -> Tensor:
        return upcast(x).conj() * upcast(y)

    first = pairs[0][0]
    products = {
        key: torch.stack([_map_tensors("inner product", product, key, spec, a[key], b[key]).sum() for a, b in pairs])
        for key in first
    }
    total = _combine_over_ranks(products, first, spec)
    return total if first else torch.zeros(len(pairs))


def clip_by_global_norm(
    tree: Mapping[str, Tensor], spec: PartitionSpec, max_norm: float | Tensor, *, p: float = 2.0
) -> tuple[Params, Tensor]:
    """Scale a tree to a norm of at most ``max_norm``.

    The scale is min(1, max_norm / (norm + 1e-6)), as in ``torch.nn.utils.clip_grad_norm_`` of the gathered tree. As there, a
    NaN norm makes everything NaN, and an infinite norm makes finite elements 0 and infinite ones NaN: check the norm before the
    update.

    Args:
        tree: This rank's slices by unit key, or full tensors by parameter name.
        spec: The spec of the slices.
        max_norm: The largest norm, >= 0.
        p: The order of the norm, as in `global_norm`.

    Returns:
        ``(the scaled tree in the tensors' own dtypes, the norm before)``.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> fs.optim.clip_by_global_norm({"weight": torch.tensor([[3.0, 4.0]])}, spec, 2.5)
        ({'weight': tensor([[1.5000, 2.0000]])}, tensor(5.))
    """
    check_max_norm("clip_by_global_norm", max_norm)
    norm = global_norm(tree, spec, p=p)
    return scale_to_norm(tree, max_norm, norm, spec), norm


def check_max_norm(function: str, max_norm: float | Tensor) -> None:
    """Raise ValueError unless the limit is >= 0, as far as the host can tell without waiting for a device."""
    if isinstance(max_norm, Tensor) and not (_torch.is_eager() and max_norm.device.type == "cpu"):
        return
    if not max_norm >= 0:
        raise ValueError(f"{function}: max_norm: expected a number from 0 on, got {float(max_norm)}")


def scale_to_norm(tree: Mapping[str, Tensor], max_norm: float | Tensor, norm: Tensor, spec: PartitionSpec) -> Params:
    """Return the tree, whose norm is given, scaled to at most ``max_norm``; backward sums ranks' cotangents of the scale."""
    if isinstance(max_norm, Tensor):
        max_norm = torch.where(max_norm >= 0, max_norm, math.nan)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    spec = bind_spec(spec)
    sizes = dict(spec.bound_mesh.sizes)
    scales: dict[tuple[str, ...], Tensor] = {}
    out: Params = {}
    for key, tensor in tree.items():
        axes = distinct_axes(spec.owner(key), tensor, sizes)
        if axes not in scales:
            scales[axes] = vary_over(scale, axes, spec)
        out[key] = tensor * scales[axes].to(tensor.device, tensor.dtype)
    return out


def sum_of_squares(key: str, grad: Tensor, spec: PartitionSpec) -> Tensor:
    """Return this rank's part of the squared 2-norm of one unit or parameter. `global_norm_from_squares` combines several."""
    elements = _map_tensors("norm", lambda x: x, key, spec, grad)
    return torch.linalg.vector_norm(elements, dtype=torch.promote_types(grad.dtype, torch.float32)) ** 2


def global_norm_from_squares(squares: Mapping[str, Tensor], tree: Mapping[str, Tensor], spec: PartitionSpec) -> Tensor:
    """Return the 2-norm of the whole tensors of a tree from each one's `sum_of_squares`."""
    return _combine_over_ranks(squares, tree, bind_spec(spec), 2.0).sqrt()


def _map_tensors(what: str, f: Callable[..., Tensor], key: str, spec: PartitionSpec, *tensors: Tensor) -> Tensor:
    owner = spec.owner(key)
    if not isinstance(owner, Unit):
        return f(*tensors)
    for tensor in tensors:
        check_slice(tensor, owner, spec, what)
    return map_unpadded(f, owner, spec, *tensors)


def _combine_over_ranks(
    values: Mapping[str, Tensor], tree: Mapping[str, Tensor], spec: PartitionSpec, p: float = 1.0
) -> Tensor:
    """Sum the tensors' numbers over a tree and over ranks that have other elements; take the maximum for p = inf."""
    _compare_trees(tree, spec, "a norm or an inner product")
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    for key, value in values.items():
        axes, value = _place_number(key, tree[key], value, spec)
        parts.setdefault(axes, []).append(value)

    def combine(some: list[Tensor]) -> Tensor:
        return torch.stack(some).sum(0) if p < math.inf else torch.stack(some).amax(0)

    totals = _reduce_over_ranks({axes: (axes, combine(some)) for axes, some in parts.items()}, spec, p)
    return combine([*totals.values()]) if totals else torch.zeros(())


def _place_number(key: str, tensor: Tensor, value: Tensor, spec: PartitionSpec) -> tuple[tuple[str, ...], Tensor]:
    """Return the axes over which ranks have other parts of a tensor, and its number on the device that sends it."""
    owner = spec.owner(key)
    used = compute_device(owner, spec.bound_mesh) if isinstance(owner, Unit) else None
    return distinct_axes(owner, tensor, dict(spec.bound_mesh.sizes)), value if used is None else value.to(used)


def _reduce_over_ranks(
    numbers: Mapping[Any, tuple[tuple[str, ...], Tensor]], spec: PartitionSpec, p: float = 1.0
) -> dict[Any, Tensor]:
    """Return each of the numbers, given with its axes, summed over these, or its maximum: one collective for each axis."""
    out = {key: number for key, (_, number) in numbers.items()}
    for name in spec.bound_mesh.names:
        if keys := [key for key, (axes, _) in numbers.items() if name in axes]:
            sent, axis = torch.stack([out[key] for key in keys]), spec.bound_mesh[name]
            total = gather_slices(sent[None], axis).amax(0) if p == math.inf else sum_shards(sent, axis)
            out |= zip(keys, total.unbind(), strict=True)
    return out


def _compare_trees(tree: Mapping[str, Tensor], spec: PartitionSpec, what: str) -> None:
    """Raise ValueError on every rank if their trees have other keys; unless nothing of this one is sent to other ranks."""
    check_spans_world(spec.bound_mesh, what)
    sizes, is_split = dict(spec.bound_mesh.sizes), any(unit.distinct_axes for unit in spec)
    owners = ((spec.owner(key), x) for key, x in tree.items())
    if is_split and (not tree or any(isinstance(one, Unit) or distinct_axes(one, x, sizes) for one, x in owners)):
        lines = [*map(repr, tree)] or ["an empty tree"]
        Comparison(lines, find_host_groups(spec.bound_mesh), _make_difference_error, "trees").finish()


def _make_difference_error(everyone: RankLines) -> ValueError:
    (rank, expected), (other, got) = find_difference(everyone)
    return ValueError(
        f"a norm or an inner product: rank {rank} has {expected} in its tree where rank {other} has {got}: expected the same "
        "keys in the same order on all ranks, such as all units of the spec; an unused parameter has gradient zeros"
    )


def norms(tree: Mapping[str, Tensor], spec: PartitionSpec, *, by: int | Callable[[str], str] | None = None) -> Params:
    """Return the 2-norm of every whole parameter in a tree by name, or of groups of them, the same on every rank.

    For gradients, parameters or updates. Squares are summed in float64, so that neither large nor small values are lost, in one
    reduction of one small tensor for each mesh axis that splits a unit. Tied parameters count once, local ones with all ranks'
    pieces, padding never. Differentiable at every order as `global_norm`; the derivative where a norm is 0 is 0.

    Args:
        tree: This rank's slices by unit key, or by parameter name full tensors or this rank's local pieces; some or all.
        spec: The spec of the slices.
        by: A function from a parameter's name to that of its group, or how many components of the name a group has in common:
            2 for groups such as ``"blocks.3"``. By default each parameter is a group.

    Returns:
        By name, scalars in float32 or the tensors' dtype, whichever is wider: views of one tensor for each dtype.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1)
        >>> spec = fs.policies.whole()(model)
        >>> tree = fs.shard({"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([12.0])}, spec)
        >>> fs.optim.norms(tree, spec), fs.optim.norms(tree, spec, by=lambda name: "all")
        ({'weight': tensor(5.), 'bias': tensor(12.)}, {'all': tensor(13.)})
    """
    spec = bind_spec(spec)
    check_tensors(tree, "norms")
    if by is not None and not isinstance(by, int) and not callable(by):
        raise TypeError(f"norms: by: expected a function of a name, a number of its components or None, got {by!r}")
    _compare_trees(tree, spec, "norms")
    numbers: dict[str, tuple[tuple[str, ...], Tensor]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for key, tensor in tree.items():
        owner = spec.owner(key)
        if isinstance(owner, Unit):
            check_slice(tensor, owner, spec, "norms")
        for param, piece in split_by_param(tensor, owner, spec) if isinstance(owner, Unit) else [(owner, tensor)]:
            if param.name in numbers:
                raise ValueError(f"norms: '{key}' has parameter '{param.name}' again: expected a tree that has it once")
            numbers[param.name] = _place_number(key, tensor, _sum_squares(piece), spec)
            dtypes[param.name] = upcast(tensor.new_empty(0)).abs().dtype
    squares = _reduce_over_ranks(numbers, spec)
    groups: dict[str, list[str]] = {}
    for name in spec._to_model_order(squares):
        group = name if by is None else ".".join(name.split(".")[:by]) if isinstance(by, int) else by(name)
        groups.setdefault(group, []).append(name)
    out: Params = {}
    for group, names in groups.items():
        total = squares[names[0]] if len(names) == 1 else torch.stack([squares[name] for name in names]).sum()
        is_zero, dtype = total == 0, functools.reduce(torch.promote_types, (dtypes[name] for name in names))
        out[group] = torch.where(is_zero, 0, torch.where(is_zero, 1, total).sqrt()).to(dtype)  # the derivative at 0 is 0
    return out


def _sum_squares(x: Tensor) -> Tensor:
    """Return the sum of squared magnitudes in float64; without autograd, one kernel computes it without a copy."""
    wide = torch.promote_types(x.dtype, torch.float64)
    if _torch.is_eager() and not _torch.any_tracked([x]) and (x.is_floating_point() or x.is_complex()):
        return torch.linalg.vector_norm(x.detach(), dtype=wide) ** 2
    x = x.to(wide)
    return (x * x.conj()).real.sum()  # not of a norm, whose second derivative is 0 where all of a rank's elements are 0


def axpy(a: float | Tensor, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> Params:
    """Return ``a * x + y``.

    Args:
        a: A number, or a scalar tensor: the same on all ranks. Its derivative is each rank's own (`collectives.vary`).
        x: A tree, such as shards.
        y: A tree with the keys and shapes of ``x``, and the dtypes of the result.

    Example:
        >>> import torch, funshard as fs
        >>> fs.optim.axpy(-0.5, {"w": torch.tensor([2.0, 4.0])}, {"w": torch.ones(2)})
        {'w': tensor([ 0., -1.])}
    """
    _check_same_keys("axpy", "x", x, "y", y)
    return {key: (a * x[key] + t).to(t.dtype) for key, t in y.items()}


def scale(a: float | Tensor, x: Mapping[str, Tensor]) -> Params:
    """Return ``a * x``, in the dtypes of ``x``; ``a`` is as in `axpy`."""
    return {key: (a * t).to(t.dtype) for key, t in x.items()}


def _check_same_keys(function: str, a_name: str, a: Mapping[str, Tensor], b_name: str, b: Mapping[str, Tensor]) -> None:
    for key in [*a, *b]:
        if key not in a or key not in b:
            raise ValueError(
                f"{function}: '{key}' is in {a_name if key in a else b_name} only: expected trees of the same keys"
            )
        if a[key].shape != b[key].shape:
            raise ValueError(f"{function}: '{key}': expected tensors of one shape, got {[*a[key].shape]} and {[*b[key].shape]}")
