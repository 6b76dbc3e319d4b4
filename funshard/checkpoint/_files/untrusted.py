"""Files that somebody else may have written, read as data: nothing in them is imported, called or allocated unchecked."""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import re
import reprlib
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from .._errors import DamagedError

__all__ = ["SIZE_LIMIT", "PickledName", "PickledObject", "Record", "checksum", "open_regular", "read_pickle", "read_record"]
__all__ += ["read_regular"]


# --- Read files that somebody else may have written: only regular files are opened ---

try:
    from isal.isal_zlib import crc32 as checksum  # uses CRC instructions: six times as fast as zlib
except ImportError:
    from zlib import crc32 as checksum


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


# --- Read pickles as data: the reader imports and calls nothing that they name ---

T = TypeVar("T")
PERSISTENT = "persistent id"
"""The name of an object that a pickle refers to by a persistent id, which is its argument."""


class PickledName:
    """The dotted name of a class or function in a pickle."""

    __slots__ = ("dotted",)

    def __init__(self, dotted: str) -> None:
        self.dotted = dotted


class PickledObject:
    """An object in a pickle: the name and arguments of the function that would make it, and its state or None."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        if type(args) is not tuple:
            raise DamagedError(f"expected a tuple of arguments for {name}, got {type(args).__name__}")
        self.name, self.args, self.state = name, args, None

    def set_state(self, state: Any) -> None:
        """Set the state that the pickle has for the object. Raises DamagedError if it has two."""
        if self.state is not None:
            raise DamagedError(f"{self.name} has two states")
        self.state = state


def read_pickle(raw: bytes, check_name: Callable[[str], None]) -> Any:
    """Return the data of a pickle: lists, tuples, dicts, plain values, `PickledName` and `PickledObject`.

    The reader takes the opcodes that pickle writes for such data from protocol 2 on. Keys are strings, numbers or objects,
    and objects are compared by identity: no hash or comparison recurses. Time and memory are linear in the length. Raises
    DamagedError for other bytes, as ``check_name`` does for a name, such as ``torch.Size``, that the pickle may not have.
    """
    try:
        return _read(raw, check_name)
    except DamagedError:
        raise
    except Exception as error:  # only builtin errors: the pickle is too short, or operands have another type
        raise DamagedError(f"no pickle of plain data: {type(error).__name__}: {error}") from error


PROTO, FRAME, STOP, MARK = pickle.PROTO[0], pickle.FRAME[0], pickle.STOP[0], pickle.MARK[0]
MEMOIZE, BINPUT, LONG_BINPUT = pickle.MEMOIZE[0], pickle.BINPUT[0], pickle.LONG_BINPUT[0]
BINGET, LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
BININT1, LONG1, BINFLOAT = pickle.BININT1[0], pickle.LONG1[0], pickle.BINFLOAT[0]
GLOBAL, STACK_GLOBAL, BINPERSID = pickle.GLOBAL[0], pickle.STACK_GLOBAL[0], pickle.BINPERSID[0]
OBJECTS, BUILD = {pickle.REDUCE[0], pickle.NEWOBJ[0]}, pickle.BUILD[0]
APPEND, APPENDS, SETITEM, SETITEMS = pickle.APPEND[0], pickle.APPENDS[0], pickle.SETITEM[0], pickle.SETITEMS[0]
TUPLE, TUPLES = pickle.TUPLE[0], {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False, pickle.EMPTY_TUPLE[0]: ()}
EMPTY_LIST, EMPTY_DICT = pickle.EMPTY_LIST[0], pickle.EMPTY_DICT[0]
INTEGERS = {pickle.BININT[0]: (4, True), pickle.BININT2[0]: (2, False)}
"""For each opcode, the bytes of the integer and whether it is signed."""
STRINGS = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINUNICODE8[0]: 8}
BYTES = {pickle.SHORT_BINBYTES[0]: 1, pickle.BINBYTES[0]: 4, pickle.BINBYTES8[0]: 8}
"""For each opcode, the bytes of the length that precedes the content."""
ORDERED = "collections.OrderedDict"
KEYS = (str, int, PickledObject)


def _read(raw: bytes, check_name: Callable[[str], None]) -> Any:
    """Run the pickle's opcodes, without calling anything, and return what they build."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0

    def read_integer(size: int, signed: bool = False) -> int:
        nonlocal at
        at += size
        return int.from_bytes(raw[at - size : at], "little", signed=signed)

    def read(size: int) -> bytes:
        nonlocal at
        at += size
        return raw[at - size : at]

    def read_line() -> str:
        return read(raw.index(b"\n", at) + 1 - at)[:-1].decode()

    def pop_marked() -> list[Any]:
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    push = stack.append
    while True:  # the end of the bytes raises IndexError; frequent opcodes come first
        code = raw[at]
        at += 1
        if code == MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == BINGET:
            push(memo[raw[at]])
            at += 1
        elif code == BININT1:
            push(raw[at])
            at += 1
        elif code in CONSTANTS:
            push(CONSTANTS[code])
        elif code in TUPLES:
            stack[-TUPLES[code] :] = [tuple(stack[-TUPLES[code] :])]
        elif code in OBJECTS:
            args, maker = stack.pop(), stack.pop()
            push(PickledObject(maker.dotted, args) if maker.dotted != ORDERED or args else {})
        elif code == EMPTY_DICT:
            push({})
        elif code == MARK:
            marks.append(len(stack))
        elif code == SETITEMS:
            items = pop_marked()
            _set_items(stack[-1], items)
        elif code == BUILD:
            state = stack.pop()
            stack[-1].set_state(state)
        elif code == LONG_BINGET:
            push(memo[read_integer(4)])
        elif code in INTEGERS:
            push(read_integer(*INTEGERS[code]))
        elif code in STRINGS:
            push(read(read_integer(STRINGS[code])).decode("utf-8", "surrogatepass"))
        elif code == APPEND:
            item = stack.pop()
            stack[-1].append(item)
        elif code == APPENDS:
            items = pop_marked()
            stack[-1].extend(items)
        elif code == TUPLE:
            push(tuple(pop_marked()))
        elif code == EMPTY_LIST:
            push([])
        elif code == SETITEM:
            items = [stack.pop(-2), stack.pop()]
            _set_items(stack[-1], items)
        elif code == LONG1:
            push(read_integer(read_integer(1), signed=True))
        elif code in (GLOBAL, STACK_GLOBAL):
            names = (read_line(), read_line()) if code == GLOBAL else (stack.pop(-2), stack.pop())
            push(PickledName(".".join(names)))
            check_name(stack[-1].dotted)
        elif code == BINPUT:
            memo[read_integer(1)] = stack[-1]
        elif code == LONG_BINPUT:
            memo[read_integer(4)] = stack[-1]
        elif code == BINFLOAT:
            push(struct.unpack(">d", read(8))[0])
        elif code in BYTES:
            push(read(read_integer(BYTES[code])))
        elif code == BINPERSID:
            push(PickledObject(PERSISTENT, (stack.pop(),)))
        elif code == FRAME:
            at += 8
        elif code == PROTO:
            at += 1
        elif code == STOP:
            (found,) = stack
            return found
        else:
            raise DamagedError(f"it has the opcode {code:#x}, which no plain data needs")


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    """Set keys and values of a dict. Objects as keys are compared by identity."""
    if len(items) % 2 or type(target) is not dict:
        raise DamagedError("expected pairs of keys and values for a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in KEYS:
            raise DamagedError(f"expected a string, a number or an object as a key, got {type(key).__name__}")
        if key in target:
            raise DamagedError("a dict has a key twice")
        target[key] = value


# --- Find the bytes of the one tensor that torch.save wrote, and their checksum, without running anything in the file ---
#
# ``torch.load(map_location="meta", weights_only=True)`` gives the offsets too, on torch 2.11 to 2.15, but not the checksum. And
# it calls the functions that it allows with the arguments of the file: a pickle of 25 bytes allocates 2 GiB as a bytearray.

V2, V3, PARAMETER = REBUILDS = [
    f"{'.'.join(('torch', '_utils'))}.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
]
"""The functions that rebuild a tensor, by which a pickle says what its arguments are. They are not called."""
MAX_MEMBERS = 64
"""The most members of a ZIP file with one tensor: torch writes seven."""
HEAD_BYTES, TAIL_BYTES = 2048, 4096
"""The beginning and the end of a ZIP file of one tensor, in which everything but the elements lies."""


@dataclass(frozen=True)
class Record:
    """The place of a tensor in a file: its elements have ``shape`` and ``stride`` in the ``nbytes`` bytes at ``offset``."""

    offset: int
    nbytes: int
    crc32: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """The offset of the first element in these bytes, in elements."""


def read_record(read: Callable[[int, int], bytes], length: int, *, check_other_members: bool) -> Record:
    """Return the place of the tensor in a ZIP file of ``length`` bytes that torch.save wrote, without reading its elements.

    ``read`` returns the bytes at an offset and of a length. Raises DamagedError for bytes that torch.save did not write.
    """
    try:
        found = _find_record(_BufferedEnds(read, length), check_other_members=check_other_members)
    except (DamagedError, OSError):
        raise
    except Exception as error:  # zipfile raises a dozen classes of errors for bytes that are no ZIP file
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    last = sum((size - 1) * step for size, step in zip(found.shape, found.stride, strict=True)) + found.start
    count = math.prod(found.shape)  # more elements than bytes, in steps of 0, would fill memory from a small file
    if count and max(last + 1, count) * found.dtype.itemsize > found.nbytes:
        raise DamagedError(f"its elements, {[*found.shape]} in steps of {[*found.stride]}, are not all there")
    if found.offset + found.nbytes > length:
        raise DamagedError("it was cut short")
    return found


def _find_record(view: _BufferedEnds, *, check_other_members: bool) -> Record:
    """Return the record of the tensor in an archive; raise DamagedError for anything that torch.save would not write."""
    with zipfile.ZipFile(view) as archive:
        every = archive.infolist()
        members = {info.filename.partition("/")[2]: info for info in every}
        if len(every) > MAX_MEMBERS or len(members) < len(every):
            raise DamagedError(f"it has {len(every)} records, with equal names or too many for one tensor")
        for name, info in members.items():
            if info.compress_type != zipfile.ZIP_STORED:
                raise DamagedError(f"its record '{name}' is compressed")
            if check_other_members and not name.startswith("data/"):
                archive.read(info)  # compares the checksum
        dtype, key, start, shape, stride = _parse_tensor(archive.read(members["data.pkl"]))
        if members.get("byteorder") is not None and archive.read(members["byteorder"]) != b"little":
            raise DamagedError("its bytes are in another order than this machine's")
    info = members[f"data/{key}"]
    view.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", view.read(4))
    return Record(info.header_offset + 30 + name + extra, info.file_size, info.CRC, dtype, shape, stride, start)


class _BufferedEnds(io.RawIOBase):
    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read, self._length, self._at = read, length, 0
        self._tail_begin = max(length - TAIL_BYTES, 0)
        self._head, self._tail = read(0, min(length, HEAD_BYTES)), read(self._tail_begin, length - self._tail_begin)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise DamagedError("it names a place before its begin")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        available = max(self._length - self._at, 0)
        size = available if size < 0 else min(size, available)
        at, self._at = self._at, self._at + size
        if at + size <= len(self._head):
            return self._head[at : at + size]
        if at >= self._tail_begin:
            return self._tail[at - self._tail_begin : at - self._tail_begin + size]
        return self._read(at, size)


_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
"""The dtypes of the storage classes that files name; ``_rebuild_tensor_v3`` names any other dtype."""
STORAGES = re.compile(r"torch(\.storage)?\.(\w+Storage)")
"""The name of a storage class."""


def _check_tensor_name(name: str) -> None:
    is_dtype = name.startswith("torch.") and isinstance(getattr(torch, name[6:], None), torch.dtype)
    if name not in REBUILDS and not is_dtype and not STORAGES.fullmatch(name) and name != "collections.OrderedDict":
        raise DamagedError(f"it asks for {name}, which is no part of a tensor: it is not loaded")


def _parse_tensor(raw: bytes) -> tuple[torch.dtype, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return ``(dtype, key, start, shape, stride)`` of the tensor in a pickle of torch.save; ``key`` names its member."""
    found = read_pickle(raw, _check_tensor_name)
    while type(found) is PickledObject and found.name == PARAMETER:
        found = found.args[0]
    if type(found) is not PickledObject or found.name not in (V2, V3):
        raise DamagedError("expected a tensor")
    storage, start, shape, stride, *_ = found.args
    more = found.args[6 if found.name == V2 else 7 :]
    if any(more):
        raise DamagedError(f"its elements are not as they lie there: {reprlib.repr(more)}")
    if type(storage) is not PickledObject or storage.name != PERSISTENT:
        raise DamagedError("expected a tensor's storage")
    kind, cls, key, *_ = storage.args[0]
    if kind != "storage" or type(cls) is not PickledName or type(key) is not str:
        raise DamagedError("expected a tensor's storage")
    dtype = _DTYPES.get(cls.dotted.rpartition(".")[2])
    if found.name == V3:
        named = found.args[6]
        dtype = getattr(torch, named.dotted[6:], None) if type(named) is PickledName else None
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"its elements are of an unknown type, {cls.dotted}")
    numbers = (start, *shape, *stride)
    if len(shape) != len(stride) or any(type(number) is not int or not 0 <= number < SIZE_LIMIT for number in numbers):
        raise DamagedError(f"expected a place, a shape and steps, got {reprlib.repr((start, shape, stride))}")
    return dtype, key, start, tuple(shape), tuple(stride)
