"""The casts of a `Precision` around and inside a module, and the other attributes that a call sets in modules."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .. import _torch
from .._batchnorm import MESH, WEIGHT, SyncBatchNorm
from .._core.flow import count_ranks
from .._core.spec import PartitionSpec
from .._core.unit import P, Unit
from .._spec.local import check_axes_are_given
from .._spec.precision import has_casts, precision_of
from .._transforms.ambient import RUNNING


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return the pytree with its floating point tensors in this dtype; itself where all stay, and for None.

    It looks into dataclasses, UserDict and SimpleNamespace. Objects of other classes, such as caches, stay as they are.
    """

    def cast(leaf: Any) -> Any:
        if _is_float(leaf):
            return leaf.to(dtype)
        if (fields := _read_fields(leaf)) is None or (new := cast_floats(fields, dtype)) is fields:
            return leaf
        out = copy.copy(leaf)
        for name, value in new.items():
            object.__setattr__(out, name, value)  # frozen ones, too
        return out

    if dtype is None:
        return tree
    leaves, structure = pytree.tree_flatten(tree)
    new = [cast(leaf) for leaf in leaves]
    return tree if all(map(operator.is_, new, leaves)) else pytree.tree_unflatten(new, structure)


def _is_float(leaf: Any) -> bool:
    x = leaf.data if isinstance(leaf, PackedSequence) else leaf
    return isinstance(x, Tensor) and x.is_floating_point()


def _read_fields(leaf: Any) -> dict[str, Any] | None:
    """Return what a dataclass, a UserDict (as a BatchEncoding is) or a SimpleNamespace has; None for another object."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}
    return dict(vars(leaf)) if isinstance(leaf, UserDict | SimpleNamespace) else None


def _list_leaves(tree: Any) -> list[Any]:
    return [x for leaf in pytree.tree_leaves(tree) for x in (leaf, *_list_leaves(_read_fields(leaf) or ()))]


def wrap_in_casts(forward: Callable[..., Any], p: P, path: str) -> Callable[..., Any]:
    """Return a module's forward, or another method, with its inputs and outputs cast.

    It gets copies of the lists and dicts that have a tensor to cast. RuntimeError if it writes to one, which would be lost.
    """
    precision = precision_of(p)
    if precision is None or not has_casts(p):
        return forward

    @_torch.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        floats = [x for x in _list_leaves(given) if _is_float(x)] if precision.restore_outputs else ()
        output = floats[0].data.dtype if floats else precision.output
        cast = [cast_floats(x, precision.param) for x in given] if precision.cast_inputs else given
        copies = [new for new, old in zip(cast, given, strict=True) if new is not old and not isinstance(new, Tensor)]
        before = _list_leaves(copies) if copies else []
        out = forward(*cast[: len(args)], **dict(zip(kwargs, cast[len(args) :], strict=True)))
        for x in _list_leaves(copies) if copies else ():
            if not any(map(partial(operator.is_, x), before)):
                raise RuntimeError(
                    f"module '{path}' writes to a list, dict or dataclass that it was given, and gets as a copy with tensors "
                    f"cast by {p}: expected the value in its result, or tensors in the unit's dtype, which are not copied"
                )
        return cast_floats(out, output)

    return run


def cast_params(tensors: Sequence[Tensor], unit: Unit) -> Sequence[Tensor]:
    """Return a unit's full parameters in the dtype to compute with."""
    precision = precision_of(unit.p)
    if precision is None:
        return tensors
    kept = unit.param_dtypes or (None,) * len(tensors)
    return [x.to(dtype or precision._resolve(x.dtype).param) for x, dtype in zip(tensors, kept, strict=True)]


def buffer_dtype(spec: PartitionSpec, path: str) -> torch.dtype | None:
    """Return the dtype of a module's floating point buffers, which the nearest unit says."""
    while path not in spec.by_path:
        path = path.rpartition(".")[0]
    p = spec.by_path[path]
    return precision.buffer if p.precision and (precision := precision_of(p)) else None


def cast_back(now: Tensor, before: Tensor, cast: Tensor) -> Tensor:
    """Return a buffer after a call that had it ``cast``, in its own dtype: what did not change is exactly as before."""
    if cast.dtype == before.dtype or now.dtype != cast.dtype:
        return now
    wide = now.to(before.dtype)
    return torch.where(now == before.to(now.dtype), before, wide) if now.shape == before.shape else wide


def module_overrides(
    modules: Mapping[str, nn.Module], norms: Mapping[str, nn.Module], spec: PartitionSpec, path: str, weight: Tensor | None
) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield what a call sets in modules beside parameters and buffers: the module, an attribute's name, and the value.

    Casts around forward, and the mesh and weight of layers that take statistics over ranks, which are among ``norms``. Each is
    to be set before the next is asked for. The casts around the module at ``path`` are left to its caller.
    """
    for at, module in norms.items():
        if isinstance(module, SyncBatchNorm):
            if module.training:
                check_axes_are_given(module.axes, spec, f"SyncBatchNorm '{at}'")
                mesh, per_sample = spec.bound_mesh, not _torch.is_in_graph() and RUNNING.is_per_sample
                if per_sample and count_ranks(mesh.select(module.axes), mesh) > 1:
                    raise ValueError(
                        f"SyncBatchNorm '{at}' in per_sample_grads takes statistics over the samples of other ranks: expected "
                        "a layer that looks at one sample, such as nn.GroupNorm, or model.eval()"
                    )
            yield module, MESH, spec.bound_mesh
            if weight is not None:
                yield module, WEIGHT, weight
    for at, p in spec.by_path.items():
        if p.precision and has_casts(p) and at in modules and at != path:
            yield modules[at], "forward", wrap_in_casts(modules[at].forward, p, at)
