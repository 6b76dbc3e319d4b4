"""Optimizers as pure functions over shards: rules, torch's, and of whole matrices, and what composes them; norms and trees."""

from .._gone import raise_gone
from .._spec.unit_state import UnitState
from ._by_matrix import by_matrix
from ._checks import Optimizer
from ._compose import accumulate_steps, apply_if_finite, chain, clip_gradients, ema, schedule_lr
from ._from_torch import from_torch
from ._matrices import matrices
from ._matrix_rules import adafactor, hidden, muon, orthogonal, shampoo, soap
from ._norms import axpy, clip_by_global_norm, global_norm, norms, vdot
from ._quantized import decode_state, encode_state, quantized_state
from ._rules import adagrad, adam, adamw, lion, rmsprop, sgd
from ._schedules import cosine, join, linear, schedule, warmup

__all__ = [
    "Optimizer", "UnitState", "accumulate_steps", "adafactor", "adagrad", "adam", "adamw", "apply_if_finite", "axpy",
    "by_matrix", "chain", "clip_by_global_norm", "clip_gradients", "cosine", "decode_state", "ema", "encode_state",
    "from_torch", "global_norm", "hidden", "join", "linear", "lion", "matrices", "muon", "norms", "orthogonal",
    "quantized_state", "rmsprop", "schedule", "schedule_lr", "sgd", "shampoo", "soap", "vdot", "warmup",
]  # fmt: skip

__getattr__ = raise_gone(__name__)
