"""What torch.save wrote of one tensor: where its bytes are in a file, and their checksum. Nothing in it is run."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._regular import DamagedError

__all__ = ["Record", "record"]

REBUILDS = ".".join(("torch", "_utils"))
"""The module whose functions files name: nothing of it is used."""
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
    """The record in what torch.save wrote, of so many bytes, of which ``read(offset, length)`` gives some.

    Raises `DamagedError` for what is anything else, or has other checksums but that of the tensor itself, which is not read.
    """
    view = _View(read, length)
    with zipfile.ZipFile(view) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for name, info in members.items():
            if info.compress_type != zipfile.ZIP_STORED:
                raise DamagedError(f"its record '{name}' is compressed")
            if check and not name.startswith("data/"):
                archive.read(info)  # which compares the checksum
        dtype, key, start, shape, stride = _Described(io.BytesIO(archive.read(members["data.pkl"]))).load()
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
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = self._length - self._at if size < 0 else min(size, self._length - self._at)
        at, self._at = self._at, self._at + size
        if at + size <= len(self._head):
            return self._head[at : at + size]
        if at >= self._from:
            return self._tail[at - self._from : at - self._from + size]
        return self._read(at, size)


class _Described(pickle.Unpickler):
    """Reads ``(dtype, key, start, shape, stride)`` of the one tensor that torch.save has described."""

    def find_class(self, module: str, name: str) -> Any:
        if module == REBUILDS and name in _REBUILDS:
            return _REBUILDS[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return _Storage(name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise DamagedError(f"it asks for {module}.{name}, which is no part of a tensor: it is not loaded")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise DamagedError(f"expected a tensor's storage, got {kind!r}")
        return storage, str(key)


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


class _Storage:
    """The class of a tensor's storage, by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def dtype(self) -> torch.dtype:
        found = _DTYPES.get(self.name)
        if found is None:
            raise DamagedError(f"its elements are of an unknown type, {self.name}")
        return found


def _v2(storage: Any, start: int, shape: Any, stride: Any, grad: Any = False, hooks: Any = None, extra: Any = None) -> Any:
    if extra:
        raise DamagedError(f"its elements are not as they lie there: {extra}")
    return storage[0].dtype, storage[1], start, tuple(shape), tuple(stride)


def _v3(storage: Any, start: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: torch.dtype, extra: Any = None) -> Any:
    if extra:
        raise DamagedError(f"its elements are not as they lie there: {extra}")
    return dtype, storage[1], start, tuple(shape), tuple(stride)


_REBUILDS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor_v2": _v2,
    "_rebuild_tensor_v3": _v3,
    "_rebuild_parameter": lambda tensor, *_: tensor,
}
