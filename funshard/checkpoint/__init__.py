"""Checkpoints: a sharded state saved in pieces that others read, whole or not at all, and loaded on any other mesh."""

from .._gone import raise_gone
from ._checkpoint import from_dcp, latest, load, save
from ._convert import export, from_optimizer_state_dict, optimizer_state_dict, read_safetensors
from ._directory import CheckpointError, clean
from ._tree import per_rank

__all__ = [
    "CheckpointError", "clean", "export", "from_dcp", "from_optimizer_state_dict", "latest", "load", "optimizer_state_dict",
    "per_rank", "read_safetensors", "save",
]  # fmt: skip

__getattr__ = raise_gone(__name__)
