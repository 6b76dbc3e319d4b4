"""Adapters of bytearray, array.array and NumPy arrays, whose bytes a run may change."""

from __future__ import annotations

import array
import sys
from typing import Any

from .adapters import Contents, ObjectAdapter, OpaqueState

__all__ = ["find_array_adapter"]

_MAX_BYTES = 1 << 20
"""The size up to which each run has a NumPy array as the first run found it. Of a larger one a sample is compared."""


def find_array_adapter(cls: type) -> ObjectAdapter | None:
    """Return the adapter of a class of arrays; None for other classes, and for arrays that are files."""
    if cls in _ADAPTERS:
        return _ADAPTERS[cls]
    bases = {base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] == "numpy"}
    return _NUMPY_ARRAY_ADAPTER if "ndarray" in bases and "memmap" not in bases else None


def _fill_bytes(obj: bytearray, contents: Contents) -> None:
    obj[:] = contents[0][1][0].value


def _fill_array(obj: array.array[Any], contents: Contents) -> None:
    del obj[:]
    obj.frombytes(contents[0][1][0].value)


def _read_numpy(obj: Any) -> Contents:
    """Return an array's contents: its objects, or a sample of at most ``_MAX_BYTES`` of its bytes; none if it is read-only."""
    if not obj.flags.writeable or type(obj.base).__name__ in ("memmap", "mmap"):
        return []
    if obj.dtype.hasobject:
        return [(list(range(obj.size)), list(obj.flat))]
    step = -(-obj.nbytes // _MAX_BYTES) or 1
    return [(["bytes"], [OpaqueState((obj.shape, str(obj.dtype), obj.flat[::step].tobytes()))])]


def _fill_numpy(obj: Any, contents: Contents) -> None:
    """Write the saved bytes into an array, if all of them were saved."""
    state = contents[0][1][0] if contents and contents[0][1] else None
    if isinstance(state, OpaqueState) and obj.size and obj.nbytes <= _MAX_BYTES:
        obj[...] = sys.modules["numpy"].frombuffer(state.value[2], obj.dtype).reshape(obj.shape)


def _make_numpy(context: Any) -> Any:
    """Return an empty array; raise TypeError for one that cannot be copied."""
    if context is None:
        raise TypeError("a NumPy array is copied up to 1 MiB, and if it is no view and contains no objects")
    return sys.modules["numpy"].empty(*context)


def _numpy_context(obj: Any) -> Any:
    """Return the shape and dtype of an array that can be copied, else None."""
    can_copy = type(obj).__name__ == "ndarray" and obj.base is None and obj.nbytes <= _MAX_BYTES and not obj.dtype.hasobject
    return (obj.shape, obj.dtype) if can_copy else None


_ADAPTERS: dict[type, ObjectAdapter] = {
    bytearray: ObjectAdapter(lambda obj: [(["bytes"], [OpaqueState(bytes(obj))])], _fill_bytes, lambda _: bytearray()),
    array.array: ObjectAdapter(
        lambda obj: [(["bytes"], [OpaqueState(obj.tobytes())])], _fill_array, array.array, lambda obj: obj.typecode
    ),
}
_NUMPY_ARRAY_ADAPTER = ObjectAdapter(_read_numpy, _fill_numpy, _make_numpy, _numpy_context)
