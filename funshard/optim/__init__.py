"""Optimizers as pure functions over shards: torch's, and of whole matrices, and what composes them; norms, clipping, trees."""

from .._spec.unit_state import UnitState
from ._by_matrix.muon import muon, orthogonal
from ._by_matrix.optimizer import MatrixOptimizer, by_matrix
from ._by_matrix.shampoo import shampoo, soap
from ._by_matrix.step import MatrixState
from ._composition.pairs import ComposedOptimizer, GradientTransformation
from ._composition.wrappers import (
    AccumulationState,
    EmaState,
    FiniteState,
    ScheduleState,
    accumulate_steps,
    apply_if_finite,
    chain,
    clip_gradients,
    ema,
    schedule,
    schedule_lr,
)
from ._elementwise.optimizer import Optimizer, State
from ._from_torch import from_torch
from ._matrices.matrices import Matrices, matrices
from ._matrices.owners import hidden
from ._norms import axpy, clip_by_global_norm, global_norm, norms, scale, vdot
from ._quantized.optimizer import decode_state, encode_state, quantized_state
from ._quantized.slices import QuantizedSlice

__all__ = [
    "AccumulationState", "ComposedOptimizer", "EmaState", "FiniteState", "GradientTransformation", "Matrices",
    "MatrixOptimizer", "MatrixState", "Optimizer", "QuantizedSlice", "ScheduleState", "State", "UnitState", "accumulate_steps",
    "apply_if_finite", "axpy", "by_matrix", "chain", "clip_by_global_norm", "clip_gradients", "decode_state", "ema",
    "encode_state", "from_torch", "global_norm", "hidden", "matrices", "muon", "norms", "orthogonal", "quantized_state",
    "scale", "schedule", "schedule_lr", "shampoo", "soap", "vdot",
]  # fmt: skip

_GONE = {
    "reshard": "checkpoint.save and checkpoint.load(path, spec, like=...), which give each owner its part",
}
"""Names of 0.2 that are gone, and what to write instead."""


def __getattr__(name: str) -> object:
    if name in _GONE:
        raise AttributeError(f"funshard.optim has no '{name}' any more: use {_GONE[name]}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
