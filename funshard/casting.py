"""What a `Precision` casts around and inside of a module: inputs, outputs, buffers."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree  # the tree of what models take and return

from .precision import Precision
from .spec import PartitionSpec, Unit

__all__ = ["buffer_dtypes", "cast_around", "cast_back", "cast_floats", "cast_params"]


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """The pytree with its floating point tensors in this dtype; None for no change. Looks into dataclasses as well."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if isinstance(leaf, PackedSequence):
            return leaf.to(dtype) if leaf.data.is_floating_point() else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            out = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                if hasattr(leaf, field.name):
                    object.__setattr__(out, field.name, cast_floats(getattr(leaf, field.name), dtype))  # frozen ones, too
            return out
        return leaf

    return pytree.tree_map(cast, tree)


def cast_around(forward: Callable[..., Any], precision: Precision | None) -> Callable[..., Any]:
    """A module's forward, or another method, with its inputs and outputs cast."""
    if precision is None:
        return forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = precision.output
        if precision.restore_outputs:
            leaves = pytree.tree_leaves((args, kwargs))
            output = next((x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)
        if precision.cast_inputs:
            args, kwargs = cast_floats((args, kwargs), precision.param)
        return cast_floats(forward(*args, **kwargs), output)

    return run


def cast_params(tensors: Sequence[Tensor], unit: Unit) -> Sequence[Tensor]:
    """A unit's full parameters as they are computed with."""
    precision = unit.p.precision
    return [x.to(precision.resolve(x.dtype).param) for x in tensors] if precision else tensors


def buffer_dtypes(spec: PartitionSpec) -> Callable[[str], torch.dtype | None]:
    """To what the floating point buffers of the module at a path are cast, if they are: as the nearest unit around it says."""
    places = spec.places

    def dtype(path: str) -> torch.dtype | None:
        while path not in places:
            path = path.rpartition(".")[0]
        precision = places[path].precision
        return precision.buffer if precision else None

    return dtype


def cast_back(now: Tensor, before: Tensor) -> Tensor:
    """A buffer that was cast for a call, in its own dtype again: what the call did not change is exactly as before."""
    if now.dtype == before.dtype:
        return now
    return torch.where(now == before.to(now.dtype), before, now.to(before.dtype)) if now.shape == before.shape else now
