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

from .._spec.precision import Precision
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit

__all__ = ["buffer_dtypes", "cast_around", "cast_back", "cast_floats", "cast_params", "casts"]


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """The pytree with its floating point tensors in this dtype; None for no change. Looks into dataclasses as well."""
    return tree if dtype is None else _map_floats(lambda x: x.to(dtype), tree)


def _map_floats(fn: Callable[[Tensor | PackedSequence], Tensor | PackedSequence], tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf) if leaf.is_floating_point() else leaf
        if isinstance(leaf, PackedSequence):
            return fn(leaf) if leaf.data.is_floating_point() else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            out = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                if hasattr(leaf, field.name):
                    object.__setattr__(out, field.name, _map_floats(fn, getattr(leaf, field.name)))  # frozen ones, too
            return out
        return leaf

    return pytree.tree_map(one, tree)


def casts(precision: Precision) -> bool:
    """Whether anything is cast around a module: not where the precision is about gathers, reductions or buffers alone."""
    return precision.restore_outputs or any((precision.output, precision.cast_inputs and precision.param))


def cast_around(forward: Callable[..., Any], precision: Precision | None) -> Callable[..., Any]:
    """A module's forward, or another method, with its inputs and outputs cast."""
    if precision is None or not casts(precision):
        return forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = _first_dtype((args, kwargs)) if precision.restore_outputs else precision.output
        if precision.cast_inputs:
            args, kwargs = cast_floats((args, kwargs), precision.param)
        return cast_floats(forward(*args, **kwargs), output)

    return run


def _first_dtype(tree: Any) -> torch.dtype | None:
    """That of the first floating point tensor."""
    dtypes: list[torch.dtype] = []

    def note(x: Tensor | PackedSequence) -> Tensor | PackedSequence:
        dtypes.append(x.data.dtype)
        return x

    _map_floats(note, tree)
    return dtypes[0] if dtypes else None


def cast_params(tensors: Sequence[Tensor], unit: Unit) -> Sequence[Tensor]:
    """A unit's full parameters as they are computed with."""
    precision = unit.p.precision
    return [x.to(precision._resolve(x.dtype).param) for x in tensors] if precision else tensors


def buffer_dtypes(spec: PartitionSpec) -> Callable[[str], torch.dtype | None]:
    """To what the floating point buffers of the module at a path are cast, if they are: as the nearest unit around it says."""
    places = spec.places

    def dtype(path: str) -> torch.dtype | None:
        while path not in places:
            path = path.rpartition(".")[0]
        precision = places[path].precision
        return precision.buffer if precision else None

    return dtype


def cast_back(now: Tensor, before: Tensor, cast: Tensor) -> Tensor:
    """A buffer after a call that had it ``cast``, in its own dtype again: what did not change is exactly as before."""
    if cast.dtype == before.dtype or now.dtype != cast.dtype:
        return now
    wide = now.to(before.dtype)
    return torch.where(now == before.to(now.dtype), before, wide) if now.shape == before.shape else wide
