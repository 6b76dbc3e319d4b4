"""The state of an optimizer of matrices: its class, and its values before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._units.layout import Params
from .._elementwise.streaming import copy_like
from .._matrices.batch import MatrixBatch
from .._matrices.slices import SliceLayout
from .config import MatrixConfig
from .rule import OwnedState

__all__ = ["MatrixState", "init_state", "place_like"]


class MatrixState(NamedTuple):
    """The state of one unit, as an optimizer of matrices keeps it."""

    step: Tensor
    """The number of steps taken: int64, on the host, the same on all ranks."""
    slices: dict[str, Tensor]
    """Elementwise state of the matrices, such as momentum: slices like the shard. {} for a unit without matrices."""
    owned: dict[str, dict[str, Tensor]]
    """By matrix, its owner's state, such as preconditioners. Other ranks hold empty tensors, [0, *shape]."""
    fallback: dict[str, Any]
    """The state of ``fallback``: by unit key if the unit has no matrix, else by parameter name."""


def init_state(config: MatrixConfig, params: Mapping[str, Tensor]) -> dict[str, MatrixState]:
    """Return the state before the first step, by unit key: zeros, or what the rule's ``init_owned`` returns for each matrix."""
    others = config.fallback_tensors(params)
    fallback = config.fallback[0](others)
    if [*fallback] != [*others]:
        raise ValueError(
            f"fallback: expected a state with the keys of what it is given, {[*others][:4]}, got {[*fallback][:4]}"
        )
    whole: OwnedState = {}
    slots: dict[str, Params] = {slot: {} for slot in config.rule.slots}
    for batch in config.matrices._batches_of(params):
        initial = _init_batch(config, batch, params)
        whole |= {name: {key: x for key, x in state.items() if key not in slots} for name, state in initial.items()}
        for slot, parts in slots.items() if config.rule.needs_values else ():
            parts |= batch.spread({name: state[slot] for name, state in initial.items()})
    state: dict[str, MatrixState] = {}
    for key, tensor in params.items():
        layout, names = config.matrices._slice_layout(key), config.matrices._names_in(key)
        some = {slot: {n: parts[n] for n in names if n in parts} for slot, parts in slots.items()} if names else {}
        slices = {slot: place_like(tensor, _init_slice(layout, parts, tensor.detach())) for slot, parts in some.items()}
        owned = {name: whole[name] for name in names}
        others = {name: fallback[name] for name in config.fallback_tensors({key: tensor})}
        state[key] = MatrixState(torch.zeros((), dtype=torch.int64), slices, owned, others)
    return state


def _init_slice(layout: SliceLayout, parts: Params, shard: Tensor) -> Tensor:
    """Return a shard of elementwise state: the given parts, and zeros elsewhere."""
    zeros = torch.zeros_like(shard, dtype=next(iter(parts.values()), shard).dtype)
    return layout.join(parts, zeros) if parts else zeros


def _init_batch(config: MatrixConfig, batch: MatrixBatch, params: Mapping[str, Tensor]) -> OwnedState:
    """Return the initial state of the matrices of a batch: empty tensors [0, *shape] where another rank is the owner."""
    parts = {
        m.name: config.matrices._slice_layout(m.unit.key).select(params[m.unit.key].detach(), m.name) for m in batch.matrices
    }
    given = batch.collect(parts) if config.rule.needs_values else {}
    out: OwnedState = {}
    for matrix in batch.matrices:
        part = parts[matrix.name]
        if config.matrices._is_owner(matrix.name):
            out[matrix.name] = config.rule.init_owned(given[matrix.name] if given else part.new_zeros(()).expand(matrix.shape))
        else:
            like = config.rule.init_owned(torch.empty(matrix.shape, dtype=part.dtype, device="meta"))
            out[matrix.name] = {key: part.new_empty((0, *x.shape), dtype=x.dtype) for key, x in like.items()}
    return out


def place_like(old: Tensor, new: Tensor) -> Tensor:
    """Return ``new`` in pinned memory if ``old`` is."""
    return copy_like(old, new) if _torch.is_pinned(old) else new
