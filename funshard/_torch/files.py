"""Files of torch: what its checkpoints say of where something is."""

from __future__ import annotations

from typing import Any

__all__ = ["make_storage_info"]


def make_storage_info(file: str, offset: int, length: int) -> Any:
    """Where an item is, as `torch.distributed.checkpoint.FileSystemReader` wants to be told: by a class of its own.

    It is a part of the format, pickled by its name. Pinned by ``test_stored_at``.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # half a second, which only checkpoints need

    return _StorageInfo(file, offset, length)
