"""Find the bytes of the one tensor that torch.save wrote, and their checksum, without running anything in the file.

``torch.load(map_location="meta", weights_only=True)`` gives the offsets too, on torch 2.11 to 2.15, but not the checksum. And
it calls the functions that it allows with the arguments of the file: a pickle of 25 bytes allocates 2 GiB as a bytearray.
"""

from __future__ import annotations

import io
import math
import re
import reprlib
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._errors import DamagedError
from .pickles import PERSISTENT, PickledName, PickledObject, read_pickle
from .regular import SIZE_LIMIT

__all__ = ["Record", "read_record"]

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
    """Return the place of the tensor in a ZIP file that torch.save wrote, without reading its elements.

    Args:
        read: A function from an offset and a length to the bytes there.
        length: The bytes of the ZIP file.
        check_other_members: Whether to compare the checksums of the other members.

    Raises:
        DamagedError: For bytes that torch.save did not write for one tensor.
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
    """A file whose beginning and end are read once."""

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
    """Raise DamagedError for a pickled name that is no part of a tensor."""
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
