"""norms: the norm of every parameter of a sharded tree by name, in one reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from .. import _torch
from .._spec.bind import bind_spec
from .._spec.checks import check_tensors
from .._spec.host import compute_device
from .._spec.local import distinct_axes
from .._spec.spec import PartitionSpec
from .._spec.tree import Param
from .._spec.unit import Unit
from .._units.layout import Params
from .._units.padding import check_slice, split_by_param
from ..collectives._functions import sum_shards
from ..collectives._mesh import Mesh, check_spans_world
from ._norms import compare_trees, upcast

__all__ = ["norms"]


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

    Raises:
        ValueError: As `global_norm`, and for a parameter that the tree has twice.
        TypeError: For what is no tensor, such as a unit's whole state, and for a ``by`` of another kind.

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
    check_spans_world(spec.bound_mesh, "norms")
    compare_trees(tree, spec)
    sizes = dict(spec.bound_mesh.sizes)
    squares: Params = {}
    axes: dict[str, tuple[str, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for key, tensor in tree.items():
        owner = spec.owner(key)
        used = compute_device(owner, spec.bound_mesh) if isinstance(owner, Unit) else None
        for param, piece in _split_tensor(owner, tensor, spec):
            if param.name in squares:
                raise ValueError(f"norms: '{key}' has parameter '{param.name}' again: expected a tree that has it once")
            square = _sum_squares(piece)
            squares[param.name] = square if used is None else square.to(used)  # what is sent is there
            axes[param.name] = distinct_axes(owner, tensor, sizes)
            dtypes[param.name] = upcast(tensor.new_empty(0)).abs().dtype
    squares = _sum_over_ranks(squares, axes, spec.bound_mesh)
    groups: dict[str, list[str]] = {}
    for name in spec._to_model_order(squares):
        group = name if by is None else ".".join(name.split(".")[:by]) if isinstance(by, int) else by(name)
        groups.setdefault(group, []).append(name)
    return {group: _root([squares[n] for n in names], [dtypes[n] for n in names]) for group, names in groups.items()}


def _split_tensor(owner: Unit | Param, tensor: Tensor, spec: PartitionSpec) -> Iterator[tuple[Param, Tensor]]:
    """Yield each parameter with its elements in a tensor of the tree, without padding."""
    if isinstance(owner, Param):
        yield owner, tensor
        return
    check_slice(tensor, owner, spec, "norms")
    yield from split_by_param(tensor, owner, spec)


def _sum_squares(x: Tensor) -> Tensor:
    """Return the sum of squared magnitudes in float64; without autograd, one kernel computes it without a copy."""
    wide = torch.promote_types(x.dtype, torch.float64)
    if _torch.is_eager() and not _torch.any_tracked([x]) and (x.is_floating_point() or x.is_complex()):
        return torch.linalg.vector_norm(x.detach(), dtype=wide) ** 2
    x = x.to(wide)
    return (x * x.conj()).real.sum()  # not of a norm, whose second derivative is 0 where all of a rank's elements are 0


def _sum_over_ranks(squares: Params, axes: Mapping[str, tuple[str, ...]], mesh: Mesh) -> Params:
    """Return the squares by name, summed over the ranks that have other elements, by one reduction for each axis."""
    out = dict(squares)
    for axis in mesh.names:
        if names := [name for name in out if axis in axes[name]]:
            out |= zip(names, sum_shards(torch.stack([out[name] for name in names]), mesh[axis]).unbind(), strict=True)
    return out


def _root(squares: list[Tensor], dtypes: list[torch.dtype]) -> Tensor:
    """Return the square root of a group's sum of squares, in the widest dtype of its tensors; its derivative at 0 is 0."""
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    total = squares[0] if len(squares) == 1 else torch.stack(squares).sum()
    is_zero = total == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, total).sqrt()).to(dtype)
