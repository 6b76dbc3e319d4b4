"""Read files that somebody else may have written: only regular files are opened."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

try:
    from isal.isal_zlib import crc32 as checksum  # uses CRC instructions: six times as fast as zlib
except ImportError:
    from zlib import crc32 as checksum

from .._errors import DamagedError

__all__ = ["SIZE_LIMIT", "checksum", "open_regular", "read_regular"]

SIZE_LIMIT = 1 << 63
"""More bytes than any file has, and more elements than any tensor."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, without a buffer.

    Raises FileNotFoundError if there is none, and DamagedError for other files: a FIFO would wait for a writer, and a device
    may never end.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DamagedError(f"expected a regular file as '{path.name}', got a link that leads to itself") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedError(f"expected a regular file as '{path.name}', got a directory, a device or a FIFO")
    return os.fdopen(handle, "rb", buffering=0)


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()
