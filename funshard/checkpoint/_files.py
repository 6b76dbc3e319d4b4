"""The files of a checkpoint: their errors, and paths that are local or in object stores."""

from __future__ import annotations

import contextlib
import os
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

try:
    from isal.isal_zlib import crc32  # uses CRC instructions: six times as fast as zlib
except ImportError:
    from zlib import crc32

checksum = crc32

PIECE_BYTES = 1 << 19
"""The bytes that are added to the checksum and then written: the second read finds them in the cache."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be read because it is damaged, cut short or of another format."""


class SavedError(CheckpointError):
    """An operation failed after the checkpoint was complete at its path."""


class NewerError(CheckpointError):
    """A checkpoint was written by a newer version of this library."""


class DamagedError(ValueError):
    """The error for bytes in a file that are not what was written. Callers raise a `CheckpointError` that names the file."""


# --- Paths of files, local ones and those in object stores, by fsspec, which torch requires ---


class _RemotePath(os.PathLike[str]):
    """A path in a file system of fsspec, such as ``s3://bucket/run/step1``, with the methods of pathlib that are needed."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # which local paths do not need

        self._url = url.rstrip("/")
        found: tuple[Any, str] = url_to_fs(self._url, use_listings_cache=False)
        self._fs, self._path = found

    def __fspath__(self) -> str:
        return self._url

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> _RemotePath:
        return _RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> _RemotePath:
        return _RemotePath(self._url.rpartition("/")[0])

    def open(self, mode: str, buffering: int = -1) -> Any:
        return self._fs.open(self._path, mode)  # what is written is there when it is closed, as a whole

    def is_file(self) -> bool:
        return self._fs.isfile(self._path)

    def is_dir(self) -> bool:
        return self._fs.isdir(self._path)

    def exists(self) -> bool:
        return self._fs.exists(self._path)

    def stat(self) -> Any:
        # no time: checkpoints of one number are ordered by their names
        return types.SimpleNamespace(st_size=self._fs.size(self._path), st_mtime_ns=0)

    def iterdir(self) -> Iterator[_RemotePath]:
        return (self / path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path, detail=False))

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        self._fs.makedirs(self._path, exist_ok=exist_ok)

    def remove(self) -> None:
        self._fs.rm(self._path, recursive=True)


AnyPath: TypeAlias = Path | _RemotePath


def open_path(path: str) -> AnyPath:
    """Return a path, which is in an object store if it has a scheme."""
    return _RemotePath(path) if "://" in path else Path(path)


def flush(path: AnyPath) -> None:
    """Flush a file or a directory to the disk."""
    if isinstance(path, Path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(path: AnyPath) -> None:
    """Remove a file, as much as possible of a directory and all in it, or nothing if nothing is there."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(path, _RemotePath):
            path.remove()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def replace(path: AnyPath, raw: bytes, suffix: str) -> None:
    """Write a file that is there as a whole or not at all, also where another one is; flush it and its directory before."""
    if isinstance(path, _RemotePath):
        with path.open("wb") as file:
            file.write(raw)
        return
    partial = path.with_name(f"{path.name}{suffix}.partial")
    partial.write_bytes(raw)
    flush(partial)
    flush(path.parent)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    os.replace(partial, path)


# --- Read files that somebody else may have written: only regular files are opened ---

SIZE_LIMIT = 1 << 63
"""More bytes than any file has, and more elements than any tensor."""


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a regular file without a buffer. Raises DamagedError for a FIFO or a device, whose reading may never end."""
    if isinstance(path, Path) and os.path.lexists(path) and not path.is_file():
        kind = (
            "a link that leads to itself or nowhere"
            if path.is_symlink() and not path.exists()
            else "a directory, a device or a FIFO"
        )
        raise DamagedError(f"expected a regular file as '{path.name}', got {kind}")
    return path.open("rb", buffering=0)


def read_regular(path: AnyPath) -> bytes:
    """Return the content of a regular file. Raises the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files: that of the attribute of torch."""
    return str(dtype).removeprefix("torch.")
