"""Checkpoints: a sharded state saved in pieces that others read, whole or not at all, and loaded on any other mesh."""

from ._commit import clean, latest
from ._load import load
from ._ranks import CheckpointError
from ._save import Saving, save
from ._tree import per_rank

__all__ = ["CheckpointError", "Saving", "clean", "latest", "load", "per_rank", "save"]
