"""Around the update: norms, clipping, torch's optimizers, and optimizers of whole matrices, each on one owner."""

from ._by_matrix import MatrixOptimizer, by_matrix
from ._elementwise import Optimizer, State
from ._from_torch import from_torch
from ._matrices import Matrices, matrices
from ._muon import muon, orthogonal
from ._norms import clip_by_global_norm, global_norm, vdot
from ._owners import hidden
from ._reshard import reshard
from ._shampoo import shampoo
from ._soap import soap
from ._step import MatrixState

__all__ = [
    "Matrices",
    "MatrixOptimizer",
    "MatrixState",
    "Optimizer",
    "State",
    "by_matrix",
    "clip_by_global_norm",
    "from_torch",
    "global_norm",
    "hidden",
    "matrices",
    "muon",
    "orthogonal",
    "reshard",
    "shampoo",
    "soap",
    "vdot",
]
