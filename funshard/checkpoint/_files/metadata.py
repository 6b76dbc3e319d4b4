"""torch's description of a checkpoint, `.metadata`: a pickle, read as data and checked as a whole."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .._errors import CheckpointError, DamagedError
from .manifest import METADATA, is_plain_name
from .pickles import PickledName, PickledObject, read_pickle
from .regular import read_regular

__all__ = ["StorageInfo", "read_metadata"]

DCP = f"{dcp.__name__}."
STORAGE_INFO, LAYOUT = f"{filesystem.__name__}._StorageInfo", f"{serialization.__name__}._get_layout"
NAMES = {STORAGE_INFO, LAYOUT, "torch.Size", "collections.OrderedDict", "builtins.getattr"} | {
    f"{DCP}{name}"
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}
"""What a description may name. Early releases of Python 3.11 write a member of an enumeration as ``getattr(enum, name)``."""
PATHS = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")
"""The checkpoint's own path; Python 3.13 keeps the classes in ``pathlib._local``."""
LARGEST = 1 << 63


@dataclass(frozen=True)
class StorageInfo:
    """Where torch has put an item: the fields of its own private class that are needed."""

    relative_path: str
    offset: int
    length: int


def read_metadata(path: Path) -> Metadata:
    """Return torch's description of the checkpoint in a directory, of which nothing is run.

    Every part of it that is used is new, of torch's own classes and checked. Raises FileNotFoundError where there is none, and
    CheckpointError for one that is damaged or asks for more than data.
    """
    try:
        return _metadata(read_pickle(read_regular(path / METADATA), _check_name))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: expected a checkpoint, which has a file '{METADATA}'; is it a directory of several?"
        ) from None
    except DamagedError as error:
        raise CheckpointError(f"{path}: its file '{METADATA}' is damaged: {error}") from error


def _check_name(name: str) -> None:
    is_dtype = name.startswith("torch.") and isinstance(getattr(torch, name[6:], None), torch.dtype)
    if name not in NAMES and not is_dtype and not PATHS.fullmatch(name):
        raise DamagedError(f"it asks for {name}, which is no description of tensors: it is not loaded")


# --- What is in it. ---


def _metadata(found: Any) -> Metadata:
    state = _state(found, f"{DCP}Metadata")
    tensors: dict[str, Any] = {}
    known: dict[int, Any] = {}  # tied parameters share one description
    for name, entry in _dict(state, "state_dict_metadata").items():
        if type(name) is not str:
            _refuse("the name of a tensor", name)
        if id(entry) not in known:
            known[id(entry)] = _entry(entry, name)
        tensors[name] = known[id(entry)]
    storage: dict[MetadataIndex, StorageInfo] = {}
    for key, info in _dict(state, "storage_data").items():
        index = _index(key)
        if index in storage:
            _refuse(f"each chunk of '{index.fqn}' once", f"two at {list(index.offset or ())}")
        storage[index] = _info(info)
    return Metadata(tensors, storage_data=storage)


def _entry(found: Any, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(found) is PickledObject and found.name == f"{DCP}BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(found, f"{DCP}TensorStorageMetadata")
    size = _sizes(state.get("size"))
    chunks = state.get("chunks")
    if type(chunks) is not list:
        _refuse(f"the chunks of '{name}'", chunks)
    out: list[ChunkStorageMetadata] = []
    for chunk in chunks:
        box = _state(chunk, f"{DCP}ChunkStorageMetadata")
        offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
        if not len(offsets) == len(sizes) == len(size):
            _refuse(f"chunks of '{name}' with {len(size)} dimensions", f"one of {list(sizes)} at {list(offsets)}")
        out.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(state.get("properties"))), size, out)


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if _is(properties, f"{DCP}TensorProperties") else None
    named = state[0] if type(state) is tuple and state else None
    dtype = getattr(torch, named.dotted[6:], None) if type(named) is PickledName else None
    if not isinstance(dtype, torch.dtype):
        _refuse("a tensor's properties, its dtype first", state)
    return dtype


def _index(found: Any) -> MetadataIndex:
    state = _state(found, f"{DCP}MetadataIndex")
    name, offset = state.get("fqn"), state.get("offset")
    if type(name) is not str:
        _refuse("the name of a tensor", name)
    return MetadataIndex(name, None if offset is None else _sizes(offset))


def _info(found: Any) -> StorageInfo:
    state = _state(found, STORAGE_INFO)
    file: Any = state.get("relative_path")
    if not is_plain_name(file):
        _refuse("a file of the checkpoint's directory", file)
    if state.get("transform_descriptors"):
        _refuse(f"bytes in '{file}' as torch.save writes them", f"transformed ones, {state['transform_descriptors']}")
    return StorageInfo(file, _size(state.get("offset")), _size(state.get("length")))


# --- Parts of these. ---


def _refuse(expected: str, found: Any) -> NoReturn:
    got = found if isinstance(found, str) else getattr(found, "name", reprlib.repr(found))
    raise DamagedError(f"expected {expected}, got {got}")


def _is(found: Any, name: str) -> bool:
    return type(found) is PickledObject and found.name == name


def _state(found: Any, name: str) -> dict[Any, Any]:
    """Return the fields of an object of this class."""
    if not _is(found, name) or type(found.state) is not dict:
        _refuse(f"an object of {name}", found)
    return found.state


def _dict(state: dict[Any, Any], name: str) -> dict[Any, Any]:
    if type(found := state.get(name)) is not dict:
        _refuse(f"a dict as '{name}'", found)
    return found


def _sizes(found: Any) -> torch.Size:
    values = found.args[0] if _is(found, "torch.Size") and len(found.args) == 1 else found
    if type(values) not in (tuple, list):
        _refuse("a shape", values)
    return torch.Size([_size(value) for value in values])


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        _refuse("a number that is no less than 0", value)
    return value
