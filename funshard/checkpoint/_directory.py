"""The directory of a checkpoint: data files of new names, two that say what they contain, and the manifest last."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import reprlib
import shutil
import types
import uuid
import warnings
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple, TypeAlias

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

    __str__ = __fspath__

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
        kinds = "a directory, a device, a FIFO or a link that leads to none"
        raise DamagedError(f"expected a regular file as '{path.name}', got {kinds}")
    return path.open("rb", buffering=0)


def read_regular(path: AnyPath) -> bytes:
    """Return the content of a regular file. Raises the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files: that of the attribute of torch."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: object) -> torch.dtype:
    """Return the dtype of a name in a file. Raises DamagedError for any other."""
    if type(name) is not str or not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise DamagedError(f"expected a dtype of this torch, got {reprlib.repr(name)}")
    return dtype


# --- The manifest ---

MANIFEST = "funshard.json"
"""The name of the manifest: it has the state's structure, its plain values, the checkpoint's sequence number and checksums."""
METADATA = ".metadata"
"""The name of torch's metadata file: written for torch.distributed.checkpoint, and not read."""
VERSION = 2
"""The version of the manifest: 1, of funshard 0.2, has no index of the tensors."""
MAX_SEQUENCE = SIZE_LIMIT - 1
"""The highest sequence number: checkpoints that have it are ordered by time alone."""


class Manifest(NamedTuple):
    """The manifest of a checkpoint that `save` has put into a directory."""

    path: Any
    order: tuple[float, int]
    """The sequence number, which is the highest for the last checkpoint in a directory, or infinity for a damaged manifest, and
    then the time of the manifest, since two jobs may give two checkpoints one number."""
    files: Mapping[str, int]
    """The size of each file in bytes, by name."""
    state: Any = None
    """The JSON tree of the state; {} for a state of another program, of which only the tensors are known."""
    tensors: Any = None
    """For each tensor ``[names, dtype, shape, boxes]``, and for each box ``[offsets, sizes, file, offset, checksum]``; None in
    files of version 0.2."""
    error: Exception | None = None
    """What is wrong with a damaged manifest."""

    def find_damage(self) -> str:
        """Return what is wrong with the manifest or the sizes of the files, or ""."""
        for name, size in self.files.items():
            file = self.path / name
            if not file.is_file() or file.stat().st_size != size:
                return f"{self.path}: its file '{name}' is {'cut short' if file.is_file() else 'missing'}"
        return str(self.error or "")


def read_manifest(path: AnyPath) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if the directory has none, as when `save` did not write it.

    Raises CheckpointError if the manifest is damaged.
    """
    try:
        return _parse(path, read_regular(path / MANIFEST), (path / MANIFEST).stat().st_mtime_ns)
    except FileNotFoundError:
        return None
    except NewerError as error:
        raise NewerError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its file '{MANIFEST}' is damaged: {error}") from error


def _parse(path: AnyPath, raw: bytes, time: int) -> Manifest:
    crc32, text = _check_fields(json.loads(raw.decode()), crc32=int, content=str)
    if checksum(text.encode()) != crc32:
        raise DamagedError("its checksum is not what was written")
    content = json.loads(text)
    (version,) = _check_fields(content, version=int)
    if version > VERSION:
        raise NewerError(f"of version {version}, expected at most {VERSION}: use a newer funshard")
    sequence, files, state = _check_fields(content, sequence=int, files=dict, state=dict)
    if not 0 < sequence <= MAX_SEQUENCE:
        raise DamagedError(f"field 'sequence': expected a number from 1 on, of at most 63 bits, got {reprlib.repr(sequence)}")
    for name, size in files.items():
        if not is_plain_name(name) or type(size) is not int or not 0 <= size < SIZE_LIMIT:
            raise DamagedError(f"field 'files': expected files of the directory and their sizes, got {name!r} and {size!r}")
    return Manifest(path, (sequence, time), files, state, content.get("tensors") if version == VERSION else None)


def _check_fields(data: Any, **fields: type) -> list[Any]:
    """Return these fields of a dict, which are of exactly these types. Raises DamagedError otherwise."""
    for name, cls in fields.items():
        if type(data) is not dict or type(data.get(name)) is not cls:
            raise DamagedError(f"expected an object with a {cls.__name__} as field '{name}', got {reprlib.repr(data)}")
    return [data[name] for name in fields]


def is_plain_name(name: object) -> bool:
    """Return whether a name is that of a file in the same directory, and not a path to another."""
    return type(name) is str and name.isprintable() and name not in ("", "..") and PurePath(name).name == name


# --- The directory ---

LEFT_NAME = re.compile(r"__\d+_0_[0-9a-f]{12}\.distcp|\.metadata|(\.metadata|funshard\.json)_[0-9a-f]{12}\.partial")
"""The names of what a killed save has left: data files of other programs and of version 0.2 have no number of the save."""


def is_directory(path: AnyPath) -> bool:
    """Return whether a path is a directory and not a link to one, which belongs to whoever made it."""
    return path.is_dir() and not (isinstance(path, Path) and path.is_symlink())


def has_manifest(path: AnyPath) -> bool:
    """Return whether a directory has a manifest, of whatever content."""
    return os.path.lexists(path / MANIFEST) or (path / MANIFEST).exists()


def _find_manifest(path: AnyPath) -> Manifest | None:
    """Return the manifest at a path, one with an error if it is damaged, or None if no manifest is there."""
    try:
        return read_manifest(path) if is_directory(path) else None
    except (CheckpointError, OSError) as error:
        return Manifest(path, (math.inf, 0), {}, error=error) if has_manifest(path) else None


def list_manifests(directory: AnyPath) -> list[Manifest]:
    """Return the manifests of the checkpoints in a directory, the oldest first."""
    found = [_find_manifest(path) for path in directory.iterdir()] if directory.is_dir() else []
    return sorted((entry for entry in found if entry), key=lambda entry: (entry.order, str(entry.path)))


def clean(directory: str | os.PathLike[str], keep: int = 3) -> list[AnyPath]:
    """Remove all but the last ``keep`` complete checkpoints in a directory, and what interrupted saves have left.

    Damaged checkpoints, links, directories that `save` has not written and those that another process is writing stay,
    with a warning also what this user may not remove. Call it on one rank.

    Args:
        directory: The directory that has the checkpoints' directories.
        keep: The number of checkpoints to keep.

    Returns:
        The paths that are gone.

    Raises:
        ValueError: For ``keep < 1``.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = [fs.checkpoint.save(f"{directory}/step{step}", {"step": step}, spec) for step in (1, 2, 3)]
        ...     print([path.name for path in fs.checkpoint.clean(directory, keep=2)])
        ['step1']
    """
    if keep < 1 or keep % 1:
        raise ValueError(f"checkpoint.clean: keep: expected a whole number from 1 on, got {keep}")
    directory = open_path(os.fsdecode(directory))
    complete = [found.path for found in list_manifests(directory) if not found.find_damage()]
    old, removed = {str(path): path for path in complete[:-keep]}, list[AnyPath]()
    for path in old.values():
        try:
            remove(path / MANIFEST)  # first, so that no reader takes a half of it for a checkpoint
        except PermissionError:  # noqa: PERF203 - of this one
            warnings.warn(f"checkpoint.clean: {path} stays, because this user may not remove it", stacklevel=2)
    others = [path for path in directory.iterdir() if str(path) not in old] if directory.is_dir() else []
    for path in (*old.values(), *others):
        with contextlib.suppress(OSError):  # another process writes there or cleans too, or the user may not
            is_old = str(path) in old
            left = [file for file in path.iterdir() if LEFT_NAME.fullmatch(file.name)] if is_directory(path) else []
            if (is_old or any(file.name != METADATA for file in left)) and not has_manifest(path):
                with _lock(path):
                    files = path.iterdir() if is_old else left
                    for file in sorted(files, key=lambda file: bool(LEFT_NAME.fullmatch(file.name))):
                        remove(file)  # last what tells the next call that the rest is to go
                if not any(path.iterdir()):
                    remove(path)
                    removed.append(path)
    return removed


@contextlib.contextmanager
def _lock(path: AnyPath) -> Generator[None]:
    """Lock a directory for the process that writes to it. Raises BlockingIOError if another one has the lock."""
    if not isinstance(path, Path):
        yield
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # perhaps a file system without locks: `clean` keeps what is on it
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes that were forked in the meantime
        with contextlib.suppress(OSError):  # also closes it if it raises
            os.close(handle)


class Target:
    """The directory that a save writes files of new names to: locked while its first rank lives, complete after `commit`.

    A damaged checkpoint there stays until the new manifest takes the place of its own. Raises FileExistsError for anything
    else than nothing, what a killed save has left, or a damaged checkpoint.
    """

    def __init__(self, path: AnyPath, name: str = "") -> None:
        self.path, self.suffix = path, f"_{name or uuid.uuid4().hex[:12]}"
        self._locked, self._is_complete = contextlib.ExitStack(), False
        if damage := _check_free(path):
            warnings.warn(f"checkpoint.save: takes the place of a damaged checkpoint: {damage}", stacklevel=2)
        self._is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._locked.enter_context(_lock(path))
        except BlockingIOError as error:
            raise FileExistsError(f"{path}: expected a path that no other save writes to: give another, or wait") from error
        except OSError:
            pass
        try:
            (path / f"__0_0{self.suffix}.distcp").open("wb").close()  # tells `clean` whose directory it is
        except BaseException:
            self.abandon()
            raise

    def commit(self, tree: Any, metadata: bytes, sizes: Mapping[str, int], tensors: Any) -> None:
        """Write torch's metadata file and the manifest. Raises SavedError for a failure after that, other errors before it."""
        _check_free(self.path)  # once more, for file systems without locks
        for name, size in sizes.items():
            if (got := (self.path / name).stat().st_size) != size:
                raise CheckpointError(f"file '{name}': expected {size} bytes, as were written, got {got}")
        known = (found.order[0] for found in list_manifests(self.path.parent) if not found.error)
        sequence = min(1 + int(max(known, default=0)), MAX_SEQUENCE)  # after all that exist now: writes take long
        content = {"version": VERSION, "sequence": sequence, "files": dict(sizes), "state": tree, "tensors": tensors}
        text = json.dumps(content)
        flush(self.path.parent)
        replace(self.path / METADATA, metadata, self.suffix)
        replace(self.path / MANIFEST, json.dumps({"crc32": checksum(text.encode()), "content": text}).encode(), self.suffix)
        self._is_complete = True
        try:
            flush(self.path)
        except OSError as error:
            raise SavedError(
                f"{self.path} is there and whole, but the flush of its directory failed: a power failure may lose it: {error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                for file in [*self.path.iterdir()]:  # of a damaged checkpoint, also of version 0.2, and of killed saves
                    is_data = file.name.endswith(".distcp") or LEFT_NAME.fullmatch(file.name)
                    if is_data and file.name not in (METADATA, *sizes):
                        remove(file)
            self._locked.close()

    def abandon(self) -> None:
        """Remove what this save has written, if it is not complete."""
        with contextlib.suppress(OSError):
            for file in () if self._is_complete else list(self.path.iterdir()):
                if self.suffix in file.name:
                    remove(file)
            if self._is_new and not has_manifest(self.path):
                remove(self.path / METADATA)
                if not any(self.path.iterdir()):
                    remove(self.path)
        self._locked.close()


def _check_free(path: AnyPath) -> str:
    """Return the damage of a checkpoint that may be replaced, or "" if there is none."""
    found = _find_manifest(path)
    if found and not isinstance(found.error, NewerError | OSError) and (damage := found.find_damage()):
        return damage
    is_left = is_directory(path) and all(LEFT_NAME.fullmatch(file.name) for file in path.iterdir())
    if found or not (is_left or not (os.path.lexists(path) or path.exists())):
        raise FileExistsError(
            f"{path}: expected a path where nothing is, such as one with the number of the step; no whole one is written over"
        )
    return ""
