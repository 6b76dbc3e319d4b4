"""Optimizers as pure functions over shards: torch's, and optimizers of whole matrices; norms, clipping, arithmetic of trees."""

from .._spec.unit_state import UnitState
from ._by_matrix.muon import muon, orthogonal
from ._by_matrix.optimizer import MatrixOptimizer, by_matrix
from ._by_matrix.reshard import reshard
from ._by_matrix.shampoo import shampoo
from ._by_matrix.soap import soap
from ._by_matrix.state import MatrixState
from ._elementwise.optimizer import Optimizer, State
from ._from_torch import from_torch
from ._matrices.matrices import Matrices, matrices
from ._matrices.selection import hidden
from ._norms import clip_by_global_norm, global_norm, vdot
from ._trees import axpy, scale

__all__ = [
    "Matrices",
    "MatrixOptimizer",
    "MatrixState",
    "Optimizer",
    "State",
    "UnitState",
    "axpy",
    "by_matrix",
    "clip_by_global_norm",
    "from_torch",
    "global_norm",
    "hidden",
    "matrices",
    "muon",
    "orthogonal",
    "reshard",
    "scale",
    "shampoo",
    "soap",
    "vdot",
]
