"""The files of a checkpoint: their errors, paths that are local or in object stores, and reading them as data alone."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import shutil
import stat
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor, nn

from .. import _torch

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


class RemotePath(os.PathLike[str]):
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

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The directory that the path is in."""
        return RemotePath(self._url.rpartition("/")[0])

    def open(self, mode: str, buffering: int = -1) -> Any:
        """Open the file. One that is written is there when it is closed, as a whole."""
        return self._fs.open(self._path, mode)

    def is_file(self) -> bool:
        """Return whether a file is there."""
        return self._fs.isfile(self._path)

    def is_dir(self) -> bool:
        """Return whether files are below the path."""
        return self._fs.isdir(self._path)

    def exists(self) -> bool:
        """Return whether anything is there."""
        return self._fs.exists(self._path)

    def stat(self) -> Any:
        """Return the size, and no time: checkpoints of one number are ordered by their names."""
        return types.SimpleNamespace(st_size=self._fs.size(self._path), st_mtime_ns=0)

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is in the directory."""
        return (self / path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path, detail=False))

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make the directory, in a file system that has any, if it is not there."""
        self._fs.makedirs(self._path, exist_ok=exist_ok)

    def remove(self) -> None:
        """Remove a file, or all below the path."""
        self._fs.rm(self._path, recursive=True)


AnyPath: TypeAlias = Path | RemotePath


def open_path(path: str) -> AnyPath:
    """Return a path, which is in an object store if it has a scheme."""
    return RemotePath(path) if "://" in path else Path(path)


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
        if isinstance(path, RemotePath):
            path.remove()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def replace(path: AnyPath, raw: bytes, suffix: str) -> None:
    """Write a file that is there as a whole or not at all, also where another one is; flush it and its directory before."""
    if isinstance(path, RemotePath):
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
    if isinstance(path, RemotePath):
        return path.open("rb")
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


def read_regular(path: AnyPath) -> bytes:
    """Return the content of a regular file. Raises the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


# --- Read a pickle as data: by the standard library's unpickler, for which every class is a stand-in ---
#
# torch.distributed.checkpoint pickles its metadata by protocol 4, which torch's own weights-only unpickler does not know.


class Pickled:
    """A stand-in for an object in a pickle. Its class, made for one pickle, is the stand-in for the object's class."""

    dotted = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Pickled:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


_PLAIN_OPCODES = """
    PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_LIST EMPTY_DICT EMPTY_TUPLE
    APPEND APPENDS SETITEM SETITEMS TUPLE TUPLE1 TUPLE2 TUPLE3 GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
"""
_Unpickler: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _DataUnpickler(_Unpickler):
    """An unpickler of plain data and of stand-ins for objects: nothing that the pickle names is imported or called."""

    dispatch = {getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]] for name in _PLAIN_OPCODES.split()}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module}.{name}"
        self.check_name(dotted)
        if dotted == "collections.OrderedDict":
            return lambda: {}  # noqa: PIE807 - takes no arguments, and what a pickle may set on it goes with it
        return type(name, (Pickled,), {"dotted": dotted})

    def load_setitem(self) -> None:
        self.metastack.append(self.stack)
        self.stack = [self.stack.pop(-2), self.stack.pop()]
        self.load_setitems()

    def load_setitems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(target) is not dict or not isinstance(key, str | int | Pickled):  # no hash of a key recurses
                raise DamagedError(f"expected a dict, with strings, numbers or objects as keys, got {type(key).__name__}")
            target[key] = value

    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}


def read_pickle(raw: bytes, check_name: Callable[[str], None]) -> Any:
    """Return the data of a pickle: lists, tuples, dicts, plain values and `Pickled`.

    Raises DamagedError for other bytes, as ``check_name`` does for a name, such as ``torch.Size``, that it may not have.
    """
    unpickler = _DataUnpickler(io.BytesIO(raw))
    unpickler.check_name = check_name
    try:
        return unpickler.load()
    except DamagedError:
        raise
    except Exception as error:  # the pickle is too short, has other opcodes, or operands of another type
        raise DamagedError(f"no pickle of plain data: {type(error).__name__}: {error}") from error


# --- Find the elements of a tensor that torch.save wrote ---


@dataclass(frozen=True)
class Record:
    """The place of a tensor in a file of torch.save: ``like`` has its dtype, shape and strides on the meta device."""

    offset: int
    like: Tensor

    @property
    def end(self) -> int:
        """The offset of the end of its elements."""
        steps = zip(self.like.shape, self.like.stride(), strict=True)
        numel = 1 + sum((size - 1) * step for size, step in steps) if self.like.numel() else 0
        return self.offset + numel * self.like.dtype.itemsize


class _Slice(io.RawIOBase):
    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise DamagedError("it names a place before its begin")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(wanted)
        self._at += read
        return read


def find_record(file: BinaryIO, offset: int, length: int, *, check: bool) -> Record:
    """Return the place of the tensor that torch.save wrote to these bytes of a file, without reading its elements.

    ``check`` compares the checksums of the ZIP file. Raises DamagedError for other bytes.
    """
    try:
        view: Any = _Slice(file, offset, length)
        if check and (name := zipfile.ZipFile(view).testzip()) is not None:
            hint = "; records of funshard have none there: is its funshard.json lost? Then check=False reads them"
            raise DamagedError(f"the checksum of '{name}' is not what was written{hint}")
        view.seek(0)
        found = torch.load(view, map_location="meta", weights_only=True)
    except (DamagedError, FileNotFoundError):
        raise
    except Exception as error:  # of a dozen classes
        is_pickle = isinstance(error, pickle.UnpicklingError)  # whose text in torch is advice to run the pickle
        text = "torch.load(weights_only=True) refuses it" if is_pickle else str(error).partition("\n")[0]
        raise DamagedError(f"{type(error).__name__}: {text}") from error
    is_plain = type(found) in (Tensor, nn.Parameter) and found.layout == torch.strided and not found.is_quantized
    if not is_plain or found.is_conj() or found.is_neg() or found.device.type != "meta":
        raise DamagedError(f"expected a plain, dense tensor, got {type(found).__name__}")
    start = found.storage_offset() * found.dtype.itemsize
    record = Record(_torch.checkpoint_offset(found) + start, found.detach())
    if record.end > length:
        raise DamagedError("it was cut short")
    if record.end - record.offset < found.numel() * found.dtype.itemsize:  # a tensor of any size fits into a few bytes
        raise DamagedError(f"its elements, {[*found.shape]} in steps of {[*found.stride()]}, are not all there")
    return record
