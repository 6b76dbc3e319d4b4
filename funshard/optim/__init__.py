"""Optimizers as pure functions over shards: rules, torch's, and of whole matrices, and what composes them; norms and trees."""

from .._spec.unit_state import UnitState
from ._by_matrix.rules import adafactor, muon, orthogonal, shampoo, soap
from ._by_matrix.step import MatrixState, by_matrix
from ._checks import Optimizer, QuantizedSlice
from ._compose import accumulate_steps, apply_if_finite, chain, clip_gradients, ema, schedule_lr
from ._from_torch import from_torch
from ._matrices.matrices import Matrices, matrices
from ._matrices.owners import hidden
from ._norms import axpy, clip_by_global_norm, global_norm, norms, scale, vdot
from ._quantized import decode_state, encode_state, quantized_state
from ._rules import adagrad, adam, adamw, lion, rmsprop, sgd
from ._schedules import cosine, join, linear, schedule, warmup

__all__ = [
    "Matrices", "MatrixState", "Optimizer", "QuantizedSlice", "UnitState", "accumulate_steps", "adafactor", "adagrad", "adam",
    "adamw", "apply_if_finite", "axpy", "by_matrix", "chain", "clip_by_global_norm", "clip_gradients", "cosine", "decode_state",
    "ema", "encode_state", "from_torch", "global_norm", "hidden", "join", "linear", "lion", "matrices", "muon", "norms",
    "orthogonal", "quantized_state", "rmsprop", "scale", "schedule", "schedule_lr", "sgd", "shampoo", "soap", "vdot", "warmup",
]  # fmt: skip

_GONE = {
    "AccumulationState": "the fields of what init(params) returns",
    "ComposedOptimizer": "Optimizer, the type of every pair",
    "EmaState": "the fields of what init(params) returns",
    "FiniteState": "the fields of what init(params) returns",
    "GradientTransformation": "Optimizer, the type of every pair",
    "MatrixOptimizer": "Optimizer, the type of every pair",
    "ScheduleState": "the fields of what init(params) returns",
    "State": "dict[str, dict[str, Tensor]]",
    "reshard": "checkpoint.save and checkpoint.load(path, spec, like=...), which give each owner its part",
}
"""Names of 0.2 that are gone, and what to write instead."""


def __getattr__(name: str) -> object:
    if name in _GONE:
        raise AttributeError(f"funshard.optim has no '{name}' any more: use {_GONE[name]}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
