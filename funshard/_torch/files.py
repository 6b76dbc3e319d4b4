"""Private parts of torch.distributed.checkpoint: the location of an item in its files."""

from __future__ import annotations

from typing import Any

__all__ = ["make_storage_info"]


def make_storage_info(file: str, offset: int, length: int) -> Any:
    """Return the location of an item in a checkpoint, in the class that torch's FileSystemReader expects.

    The class is a part of the format, pickled by its name. Pinned by ``test_stored_at``.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # half a second, which only checkpoints need

    return _StorageInfo(file, offset, length)
