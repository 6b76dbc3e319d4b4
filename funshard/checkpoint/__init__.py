"""Checkpoints: a sharded state saved in pieces that others read, whole or not at all, and loaded on any other mesh."""

from .._gone import raise_gone
from ._directory import CheckpointError, clean
from ._load import latest, load
from ._optimizer_state_dict import from_optimizer_state_dict, optimizer_state_dict
from ._safetensors import export, read_safetensors
from ._save import from_dcp, save
from ._tree import per_rank

__all__ = [
    "CheckpointError", "clean", "export", "from_dcp", "from_optimizer_state_dict", "latest", "load", "optimizer_state_dict",
    "per_rank", "read_safetensors", "save",
]  # fmt: skip

__getattr__ = raise_gone(__name__)
