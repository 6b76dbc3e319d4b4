"""Checkpoints: a sharded state saved in pieces that others read, whole or not at all, and loaded on any other mesh."""

from ._errors import CheckpointError
from ._files.directory import clean, latest
from ._load import load
from ._optimizer_state_dict import from_optimizer_state_dict, optimizer_state_dict
from ._safetensors import export, read_safetensors
from ._save import Saving, save
from ._state.tree import per_rank

__all__ = [
    "CheckpointError", "Saving", "clean", "export", "from_optimizer_state_dict", "latest", "load", "optimizer_state_dict",
    "per_rank", "read_safetensors", "save",
]  # fmt: skip

_GONE = {
    "clean_name": "name.replace('_orig_mod.', '') and the like; load and read_safetensors do it",
    "rekey": "set_optimizer_state_dict and get_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
}
"""Names of 0.2 that are gone, and what to write instead."""


def __getattr__(name: str) -> object:
    if name in _GONE:
        raise AttributeError(f"funshard.checkpoint has no '{name}' any more: use {_GONE[name]}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
