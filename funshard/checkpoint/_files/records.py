"""What torch.save wrote of one tensor: where its bytes are in a file, and their checksum. Nothing in it is run."""

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

__all__ = ["Record", "record"]

V2, V3, PARAMETER = REBUILDS = [
    f"{'.'.join(('torch', '_utils'))}.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
]
"""The functions that files name: nothing of them is used."""
MEMBERS = 64
"""Records of a ZIP file with one tensor at most: torch writes seven."""
LARGEST = 1 << 63
HEAD, TAIL = 2048, 4096
"""Bytes at the begin and at the end in which a file of one tensor has everything else."""


@dataclass(frozen=True)
class Record:
    """A tensor in a file: its elements are ``shape`` and ``stride`` of the ``nbytes`` bytes at ``offset``."""

    offset: int
    nbytes: int
    crc32: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Of the first element, in elements."""


def record(read: Callable[[int, int], bytes], length: int, *, check: bool) -> Record:
    """Return the record in what torch.save wrote, of so many bytes, of which ``read(offset, length)`` gives some.

    Raises `DamagedError` for what is anything else, or has other checksums but that of the tensor itself, which is not read.
    """
    try:
        found = _record(_View(read, length), check=check)
    except (DamagedError, OSError):
        raise
    except Exception as error:  # of zipfile, on bytes that are no ZIP file: of a dozen classes
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    last = sum((size - 1) * step for size, step in zip(found.shape, found.stride, strict=True)) + found.start
    if math.prod(found.shape) and (last + 1) * found.dtype.itemsize > found.nbytes:
        raise DamagedError(f"its elements, {[*found.shape]} in steps of {[*found.stride]}, are not all there")
    if found.offset + found.nbytes > length:
        raise DamagedError("it was cut short")
    return found


def _record(view: _View, *, check: bool) -> Record:
    with zipfile.ZipFile(view) as archive:
        every = archive.infolist()
        members = {info.filename.partition("/")[2]: info for info in every}
        if len(every) > MEMBERS or len(members) < len(every):
            raise DamagedError(f"it has {len(every)} records, of which some have one name or are no part of a tensor")
        for name, info in members.items():
            if info.compress_type != zipfile.ZIP_STORED:
                raise DamagedError(f"its record '{name}' is compressed")
            if check and not name.startswith("data/"):
                archive.read(info)  # which compares the checksum
        dtype, key, start, shape, stride = _described(archive.read(members["data.pkl"]))
        if members.get("byteorder") is not None and archive.read(members["byteorder"]) != b"little":
            raise DamagedError("its bytes are in another order than this machine's")
    info = members[f"data/{key}"]
    view.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", view.read(4))
    return Record(info.header_offset + 30 + name + extra, info.file_size, info.CRC, dtype, shape, stride, start)


class _View(io.RawIOBase):
    """The bytes as a file, of which the begin and the end are read once."""

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read, self._length, self._at = read, length, 0
        self._from = max(length - TAIL, 0)
        self._head, self._tail = read(0, min(length, HEAD)), read(self._from, length - self._from)

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
        there = max(self._length - self._at, 0)
        size = there if size < 0 else min(size, there)
        at, self._at = self._at, self._at + size
        if at + size <= len(self._head):
            return self._head[at : at + size]
        if at >= self._from:
            return self._tail[at - self._from : at - self._from + size]
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
"""The types of elements that have a storage class of their own in files; the others are named by `_v3`."""


STORAGES = re.compile(r"torch(\.storage)?\.(\w+Storage)")
"""A class of storages."""


def _check_name(name: str) -> None:
    is_dtype = name.startswith("torch.") and isinstance(getattr(torch, name[6:], None), torch.dtype)
    if name not in REBUILDS and not is_dtype and not STORAGES.fullmatch(name) and name != "collections.OrderedDict":
        raise DamagedError(f"it asks for {name}, which is no part of a tensor: it is not loaded")


def _described(raw: bytes) -> tuple[torch.dtype, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return ``(dtype, key, start, shape, stride)`` of the one tensor that torch.save has described."""
    found = read_pickle(raw, _check_name)
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
    if len(shape) != len(stride) or any(type(number) is not int or not 0 <= number < LARGEST for number in numbers):
        raise DamagedError(f"expected a place, a shape and steps, got {reprlib.repr((start, shape, stride))}")
    return dtype, key, start, tuple(shape), tuple(stride)
