"""The two files that say what a checkpoint contains, `funshard.json` and torch's `.metadata`, checked when they are read."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
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

from .._errors import CheckpointError, DamagedError, NewerError
from .._state.json_tree import check_fields, check_tree, raise_damaged
from .._state.leaves import MAX_DIMS
from .untrusted import SIZE_LIMIT, PickledName, PickledObject, checksum, read_pickle, read_regular

__all__ = ["MANIFEST", "MAX_SEQUENCE", "METADATA", "Manifest", "is_plain_name", "read_manifest", "read_metadata"]
__all__ += ["write_manifest"]


MANIFEST = "funshard.json"
"""The name of the manifest: it has the state's structure, its plain values, the checkpoint's sequence number and checksums."""
METADATA = ".metadata"
"""The name of torch's metadata file, which says where each tensor is in the other files."""
VERSION = 1
"""The version of the manifest's format."""
MAX_SEQUENCE = SIZE_LIMIT - 1
"""The highest sequence number: checkpoints that have it are ordered by time alone."""


@dataclass(frozen=True)
class Manifest:
    """The checked fields of a manifest."""

    sequence: int
    """The number of the checkpoint: the last one in a directory has the highest."""
    files: Mapping[str, int]
    """The size of each file in bytes, by name."""
    metadata: int
    """The checksum of torch's metadata file."""
    state: Any
    """The JSON tree of the state, as `tree_to_json` returns it."""
    checksums: Mapping[str, Mapping[Any, int]]
    """For each file by name, the checksum of each tensor's elements by the tensor's offset; {} in files of version 0.2."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in a directory."""
    text = json.dumps({"version": VERSION, **asdict(manifest)})
    (directory / MANIFEST).write_text(json.dumps({"crc32": checksum(text.encode()), "content": text}))


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if the directory has none, as when `save` did not write it.

    Raises CheckpointError if the manifest is damaged, or if torch's metadata file has another checksum than it says.
    """
    try:
        raw = read_regular(path / MANIFEST)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    try:
        found = _parse(raw)
    except NewerError as error:
        raise NewerError(f"{path}: {error}") from None
    except RecursionError as error:
        raise CheckpointError(f"{path}: its file '{MANIFEST}' is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its file '{MANIFEST}' is damaged: {error}") from error
    try:
        metadata = checksum(read_regular(path / METADATA))
    except (FileNotFoundError, DamagedError):
        metadata = None
    if metadata != found.metadata:
        raise CheckpointError(f"{path}: its file '{METADATA}' is damaged or missing")
    return found


def _parse(raw: bytes) -> Manifest:
    """Return the manifest in the bytes of a file. Raises ValueError, NewerError or RecursionError for other bytes."""
    outer = json.loads(raw.decode())
    check_fields(outer, {"crc32": int, "content": str}, "the file")
    if checksum(outer["content"].encode()) != outer["crc32"]:
        raise DamagedError("its checksum is not what was written")
    content = json.loads(outer["content"])
    check_fields(content, {"version": int}, "the content")
    if (version := content["version"]) > VERSION:
        raise NewerError(f"of version {version}, expected at most {VERSION}: use a newer funshard")
    content.setdefault("checksums", {})
    fields = {"sequence": int, "files": dict, "metadata": int, "state": dict, "checksums": dict}
    check_fields(content, fields, "the content")
    if not 0 < content["sequence"] <= MAX_SEQUENCE:
        raise_damaged("field 'sequence'", "a number from 1 on, of at most 63 bits", content["sequence"])
    for name, size in content["files"].items():
        if not is_plain_name(name) or type(size) is not int or not 0 <= size < SIZE_LIMIT:
            raise_damaged("field 'files'", "files of the directory and their sizes", {name: size})
    for name, checksums in content["checksums"].items():
        if type(checksums) is not dict:
            raise_damaged("field 'checksums'", "an object for each file", {name: checksums})
    check_tree(content["state"])
    return Manifest(**{name: content[name] for name in Manifest.__dataclass_fields__})


def is_plain_name(name: object) -> bool:
    """Return whether a name is that of a file in the same directory, and not a path to another."""
    return type(name) is str and name.isprintable() and name not in ("", "..") and PurePath(name).name == name


# --- torch's metadata file of a checkpoint, `.metadata`: a pickle, which is read as data and checked completely ---

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
    is_dtype = name.startswith("torch.") and isinstance(getattr(torch, name[6:], None), torch.dtype)
    if name not in ALLOWED_GLOBALS and not is_dtype and not PATHS.fullmatch(name):
        raise DamagedError(f"it asks for {name}, which is no description of tensors: it is not loaded")


def _parse_metadata(found: Any, nbytes: int) -> Metadata:
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
    state = properties.state if _is_object(properties, f"{DCP}TensorProperties") else None
    named = state[0] if type(state) is tuple and state else None
    dtype = getattr(torch, named.dotted[6:], None) if type(named) is PickledName else None
    if not isinstance(dtype, torch.dtype):
        _raise_damaged("a tensor's properties, its dtype first", state)
    return dtype


def _parse_index(found: Any) -> MetadataIndex:
    state = _get_fields(found, f"{DCP}MetadataIndex")
    name, offset = state.get("fqn"), state.get("offset")
    if type(name) is not str:
        _raise_damaged("the name of a tensor", name)
    return MetadataIndex(name, None if offset is None else _parse_shape(offset))


def _parse_info(found: Any) -> StorageInfo:
    state = _get_fields(found, STORAGE_INFO)
    file: Any = state.get("relative_path")
    if not is_plain_name(file):
        _raise_damaged("a file of the checkpoint's directory", file)
    if state.get("transform_descriptors"):
        _raise_damaged(f"bytes in '{file}' as torch.save writes them", f"transformed ones, {state['transform_descriptors']}")
    return StorageInfo(file, _parse_size(state.get("offset")), _parse_size(state.get("length")))


def _raise_damaged(expected: str, found: Any) -> NoReturn:
    got = found if isinstance(found, str) else getattr(found, "name", reprlib.repr(found))
    raise DamagedError(f"expected {expected}, got {got}")


def _is_object(found: Any, name: str) -> bool:
    return type(found) is PickledObject and found.name == name


def _get_fields(found: Any, name: str) -> dict[Any, Any]:
    if not _is_object(found, name) or type(found.state) is not dict:
        _raise_damaged(f"an object of {name}", found)
    return found.state


def _get_dict(state: dict[Any, Any], name: str) -> dict[Any, Any]:
    if type(found := state.get(name)) is not dict:
        _raise_damaged(f"a dict as '{name}'", found)
    return found


def _parse_shape(found: Any) -> torch.Size:
    values = found.args[0] if _is_object(found, "torch.Size") and len(found.args) == 1 else found
    if type(values) not in (tuple, list) or len(values) > MAX_DIMS:
        _raise_damaged(f"a shape of at most {MAX_DIMS} dimensions", values)
    return torch.Size([_parse_size(value) for value in values])


def _parse_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < SIZE_LIMIT:
        _raise_damaged("a number that is no less than 0", value)
    return value
