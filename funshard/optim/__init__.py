"""Around the update: norms and inner products of what is sharded like the parameters, clipping, torch's optimizers."""

from ._matrices import Matrices, matrices
from ._norms import Optimizer, State, clip_by_global_norm, from_torch, global_norm, vdot

__all__ = ["Matrices", "Optimizer", "State", "clip_by_global_norm", "from_torch", "global_norm", "matrices", "vdot"]
