"""torch's metadata file of a checkpoint, `.metadata`: a pickle, which is read as data and checked completely."""

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
from .._state.leaves import MAX_DIMS
from .manifest import METADATA, is_plain_name
from .pickles import PickledName, PickledObject, read_pickle
from .regular import SIZE_LIMIT, read_regular

__all__ = ["StorageInfo", "read_metadata"]

DCP = f"{dcp.__name__}."
"""The prefix of the classes that a metadata file pickles."""
STORAGE_INFO, LAYOUT = f"{filesystem.__name__}._StorageInfo", f"{serialization.__name__}._get_layout"
CLASSES = "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata"
ALLOWED_GLOBALS = {
    STORAGE_INFO,
    LAYOUT,
    "torch.Size",
    "collections.OrderedDict",
    "builtins.getattr",
    f"{DCP}_MEM_FORMAT_ENCODING",
} | {f"{DCP}{name}" for name in CLASSES.split()}
"""The names that a metadata file may have. Early releases of Python 3.11 pickle an enum member as ``getattr(enum, name)``."""
PATHS = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")
"""The classes of the checkpoint's own path; Python 3.13 keeps them in ``pathlib._local``."""


@dataclass(frozen=True)
class StorageInfo:
    """The place of a stored chunk: the needed fields of torch's private class of this name."""

    relative_path: str
    offset: int
    length: int


def read_metadata(path: Path) -> Metadata:
    """Return torch's metadata of the checkpoint in a directory, without running anything in the file.

    The result is built of torch's own classes, from checked parts. Raises FileNotFoundError if there is no file, and
    CheckpointError for one that is damaged or names anything but data.
    """
    try:
        raw = read_regular(path / METADATA)
        return _parse_metadata(read_pickle(raw, _check_pickled_name), len(raw))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: expected a checkpoint, which has a file '{METADATA}'; is it a directory of several?"
        ) from None
    except DamagedError as error:
        raise CheckpointError(f"{path}: its file '{METADATA}' is damaged: {error}") from error


def _check_pickled_name(name: str) -> None:
    """Raise DamagedError for a name that a metadata file does not need."""
    is_dtype = name.startswith("torch.") and isinstance(getattr(torch, name[6:], None), torch.dtype)
    if name not in ALLOWED_GLOBALS and not is_dtype and not PATHS.fullmatch(name):
        raise DamagedError(f"it asks for {name}, which is no description of tensors: it is not loaded")


# --- The objects of the file. ---


def _parse_metadata(found: Any, nbytes: int) -> Metadata:
    """Return torch's metadata from the objects of its pickle of so many bytes."""
    state = _get_fields(found, f"{DCP}Metadata")
    tensors: dict[str, Any] = {}
    known: dict[int, Any] = {}  # tied parameters share one entry
    for name, entry in _get_dict(state, "state_dict_metadata").items():
        if type(name) is not str:
            _raise_damaged("the name of a tensor", name)
        if id(entry) not in known:
            known[id(entry)] = _parse_entry(entry, name, nbytes)
            nbytes -= len(getattr(known[id(entry)], "chunks", ()))
        tensors[name] = known[id(entry)]
    storage: dict[MetadataIndex, StorageInfo] = {}
    for key, info in _get_dict(state, "storage_data").items():
        index = _parse_index(key)
        if index in storage:
            _raise_damaged(f"each chunk of '{index.fqn}' once", f"two at {list(index.offset or ())}")
        storage[index] = _parse_info(info)
    return Metadata(tensors, storage_data=storage)


def _parse_entry(found: Any, name: str, most: int) -> TensorStorageMetadata | BytesStorageMetadata:
    """Return the entry of a tensor, with its chunks, of which there are at most so many."""
    if type(found) is PickledObject and found.name == f"{DCP}BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _get_fields(found, f"{DCP}TensorStorageMetadata")
    size = _parse_shape(state.get("size"))
    chunks = state.get("chunks")
    if type(chunks) is not list or len(chunks) > most:  # entries may share a list: a small file could have a million chunks
        _raise_damaged(f"the chunks of '{name}', fewer than the file's bytes", chunks)
    out: list[ChunkStorageMetadata] = []
    for chunk in chunks:
        box = _get_fields(chunk, f"{DCP}ChunkStorageMetadata")
        offsets, sizes = _parse_shape(box.get("offsets")), _parse_shape(box.get("sizes"))
        if not len(offsets) == len(sizes) == len(size):
            _raise_damaged(f"chunks of '{name}' with {len(size)} dimensions", f"one of {list(sizes)} at {list(offsets)}")
        out.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=_parse_dtype(state.get("properties"))), size, out)


def _parse_dtype(properties: Any) -> torch.dtype:
    """Return the dtype among a tensor's properties."""
    state = properties.state if _is_object(properties, f"{DCP}TensorProperties") else None
    named = state[0] if type(state) is tuple and state else None
    dtype = getattr(torch, named.dotted[6:], None) if type(named) is PickledName else None
    if not isinstance(dtype, torch.dtype):
        _raise_damaged("a tensor's properties, its dtype first", state)
    return dtype


def _parse_index(found: Any) -> MetadataIndex:
    """Return the name and offset of a chunk."""
    state = _get_fields(found, f"{DCP}MetadataIndex")
    name, offset = state.get("fqn"), state.get("offset")
    if type(name) is not str:
        _raise_damaged("the name of a tensor", name)
    return MetadataIndex(name, None if offset is None else _parse_shape(offset))


def _parse_info(found: Any) -> StorageInfo:
    """Return where a chunk is stored."""
    state = _get_fields(found, STORAGE_INFO)
    file: Any = state.get("relative_path")
    if not is_plain_name(file):
        _raise_damaged("a file of the checkpoint's directory", file)
    if state.get("transform_descriptors"):
        _raise_damaged(f"bytes in '{file}' as torch.save writes them", f"transformed ones, {state['transform_descriptors']}")
    return StorageInfo(file, _parse_size(state.get("offset")), _parse_size(state.get("length")))


# --- Their fields. ---


def _raise_damaged(expected: str, found: Any) -> NoReturn:
    """Raise DamagedError that says what was expected and what was found."""
    got = found if isinstance(found, str) else getattr(found, "name", reprlib.repr(found))
    raise DamagedError(f"expected {expected}, got {got}")


def _is_object(found: Any, name: str) -> bool:
    return type(found) is PickledObject and found.name == name


def _get_fields(found: Any, name: str) -> dict[Any, Any]:
    """Return the fields of a pickled object of this class."""
    if not _is_object(found, name) or type(found.state) is not dict:
        _raise_damaged(f"an object of {name}", found)
    return found.state


def _get_dict(state: dict[Any, Any], name: str) -> dict[Any, Any]:
    """Return a field that must be a dict."""
    if type(found := state.get(name)) is not dict:
        _raise_damaged(f"a dict as '{name}'", found)
    return found


def _parse_shape(found: Any) -> torch.Size:
    """Return a shape, of a torch.Size or a sequence."""
    values = found.args[0] if _is_object(found, "torch.Size") and len(found.args) == 1 else found
    if type(values) not in (tuple, list) or len(values) > MAX_DIMS:
        _raise_damaged(f"a shape of at most {MAX_DIMS} dimensions", values)
    return torch.Size([_parse_size(value) for value in values])


def _parse_size(value: Any) -> int:
    """Return a size that must be a whole number within the limit."""
    if type(value) is not int or not 0 <= value < SIZE_LIMIT:
        _raise_damaged("a number that is no less than 0", value)
    return value
