"""Files that somebody else may have written, read as data: nothing that they name is imported or called."""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ... import _torch
from .._errors import DamagedError
from .remote import AnyPath, RemotePath

# --- Read files that somebody else may have written: only regular files are opened ---

try:
    from isal.isal_zlib import crc32  # uses CRC instructions: six times as fast as zlib
except ImportError:
    from zlib import crc32

checksum = crc32


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
