"""The two files that say what a checkpoint contains, `funshard.json` and torch's `.metadata`, checked when they are read."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, NamedTuple, NoReturn

import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from .._errors import CheckpointError, DamagedError, NewerError
from .._state.leaves import MAX_DIMS, Box
from .remote import AnyPath
from .untrusted import SIZE_LIMIT, Pickled, checksum, read_pickle, read_regular

MANIFEST = "funshard.json"
"""The name of the manifest: it has the state's structure, its plain values, the checkpoint's sequence number and checksums."""
METADATA = ".metadata"
"""The name of torch's metadata file, which says where each tensor is in the other files."""
VERSION = 1
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
    records: Mapping[str, Mapping[Any, int]]
    """For each file by name, the checksum of each tensor's record by its offset; {} in files of version 0.2."""


def pack_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file of a manifest."""
    text = json.dumps({"version": VERSION, **asdict(manifest)})
    return json.dumps({"crc32": checksum(text.encode()), "content": text}).encode()


def read_manifest(path: AnyPath) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if the directory has none, as when `save` did not write it.

    Raises CheckpointError if the manifest is damaged, or if torch's metadata file has another checksum than it says.
    """
    try:
        found = _parse(read_regular(path / MANIFEST))
    except FileNotFoundError:
        return None
    except NewerError as error:
        raise NewerError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its file '{MANIFEST}' is damaged: {error}") from error
    try:
        metadata = checksum(read_regular(path / METADATA))
    except (FileNotFoundError, DamagedError):
        metadata = None
    if metadata != found.metadata:
        raise CheckpointError(f"{path}: its file '{METADATA}' is damaged or missing")
    return found


def _parse(raw: bytes) -> Manifest:
    outer = json.loads(raw.decode())
    _check_fields(outer, {"crc32": int, "content": str}, "the file")
    if checksum(outer["content"].encode()) != outer["crc32"]:
        raise DamagedError("its checksum is not what was written")
    content = json.loads(outer["content"])
    _check_fields(content, {"version": int}, "the content")
    if (version := content["version"]) > VERSION:
        raise NewerError(f"of version {version}, expected at most {VERSION}: use a newer funshard")
    content.setdefault("records", {})
    fields = {"sequence": int, "files": dict, "metadata": int, "state": dict, "records": dict}
    _check_fields(content, fields, "the content")
    if not 0 < content["sequence"] <= MAX_SEQUENCE:
        _raise_damaged("field 'sequence'", "a number from 1 on, of at most 63 bits", content["sequence"])
    for name, size in content["files"].items():
        if not is_plain_name(name) or type(size) is not int or not 0 <= size < SIZE_LIMIT:
            _raise_damaged("field 'files'", "files of the directory and their sizes", {name: size})
    for name, records in content["records"].items():
        if type(records) is not dict:
            _raise_damaged("field 'records'", "an object for each file", {name: records})
    return Manifest(**{name: content[name] for name in Manifest.__dataclass_fields__})


def _check_fields(data: Any, fields: dict[str, type], where: str) -> None:
    """Check that data is a dict with these fields, of exactly these types. Raises DamagedError otherwise."""
    if type(data) is not dict:
        _raise_damaged(where, "an object", data)
    for name, cls in fields.items():
        if type(data.get(name)) is not cls:
            _raise_damaged(where, f"a {cls.__name__} as field '{name}'", data.get(name))


def _raise_damaged(where: str, expected: str, found: object) -> NoReturn:
    raise DamagedError(f"{where}: expected {expected}, got {reprlib.repr(found)}")


def is_plain_name(name: object) -> bool:
    """Return whether a name is that of a file in the same directory, and not a path to another."""
    return type(name) is str and name.isprintable() and name not in ("", "..") and PurePath(name).name == name


# --- torch's metadata file of a checkpoint, `.metadata`: a pickle, which is read as data and checked completely ---

CLASSES = "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata"
ALLOWED_GLOBALS = {
    f"{filesystem.__name__}._StorageInfo",
    f"{serialization.__name__}._get_layout",
    "torch.Size",
    "collections.OrderedDict",
    "builtins.getattr",
    f"{dcp.__name__}._MEM_FORMAT_ENCODING",
} | {f"{dcp.__name__}.{name}" for name in CLASSES.split()}
"""The names that a metadata file may have. Early releases of Python 3.11 pickle an enum member as ``getattr(enum, name)``."""
PATHS = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")
"""The classes of the checkpoint's own path; Python 3.13 keeps them in ``pathlib._local``."""


class StoredTensor(NamedTuple):
    """A tensor in the files: its shape, and the boxes of it that are records there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[Box]


class RecordPlace(NamedTuple):
    """The place of a record: a file of the directory, and the bytes in it."""

    file: str
    offset: int
    length: int


def read_metadata(path: AnyPath) -> tuple[dict[str, StoredTensor], dict[tuple[str, tuple[int, ...]], RecordPlace]]:
    """Return the tensors by name in torch's metadata of a checkpoint, and the places of their boxes by name and offsets.

    Nothing in the file is run. Raises FileNotFoundError if there is none, and CheckpointError for one that is damaged or names
    anything but data.
    """
    try:
        return _parse_metadata(read_pickle(read_regular(path / METADATA), _check_pickled_name))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: expected a checkpoint, which has a file '{METADATA}'; is it a directory of several?"
        ) from None
    except DamagedError as error:
        raise CheckpointError(f"{path}: its file '{METADATA}' is damaged: {error}") from error


def _check_pickled_name(name: str) -> None:
    if name not in ALLOWED_GLOBALS and _find_dtype(name) is None and not PATHS.fullmatch(name):
        raise DamagedError(f"it asks for {name}, which is no description of tensors: it is not loaded")


def _find_dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return found if isinstance(found, torch.dtype) else None


def _parse_metadata(found: Any) -> tuple[dict[str, StoredTensor], dict[tuple[str, tuple[int, ...]], RecordPlace]]:
    state = _get_fields(found, "Metadata", state_dict_metadata=dict, storage_data=dict)
    tensors = {
        name: _parse_tensor(entry)
        for name, entry in state["state_dict_metadata"].items()
        if getattr(entry, "dotted", "") != f"{dcp.__name__}.BytesStorageMetadata"
    }
    places: dict[tuple[str, tuple[int, ...]], RecordPlace] = {}
    for index, info in state["storage_data"].items():
        key, fields = _get_fields(index, "MetadataIndex", fqn=str), _get_fields(info, "_StorageInfo")
        at: Any = key["fqn"], _parse_shape(key.get("offset") or ())
        file: Any = fields.get("relative_path")
        if at in places:
            _raise_damaged(f"a chunk of '{key['fqn']}'", "one at each place", at[1])
        if not is_plain_name(file):
            _raise_damaged("the place of a chunk", "a file of the checkpoint's directory", file)
        if fields.get("transform_descriptors"):
            _raise_damaged(
                f"file '{file}'", "bytes as torch.save writes them", f"transformed {fields['transform_descriptors']}"
            )
        places[at] = RecordPlace(file, *_parse_shape((fields.get("offset"), fields.get("length"))))
    return tensors, places


def _parse_tensor(found: Any) -> StoredTensor:
    state = _get_fields(found, "TensorStorageMetadata", chunks=list, properties=Pickled)
    shape = _parse_shape(state.get("size"))
    boxes: list[Box] = []
    for chunk in state["chunks"]:
        fields = _get_fields(chunk, "ChunkStorageMetadata")
        boxes.append(Box(_parse_shape(fields.get("offsets")), _parse_shape(fields.get("sizes"))))
        if not len(boxes[-1].offsets) == len(boxes[-1].sizes) == len(shape):
            _raise_damaged("a chunk", f"{len(shape)} dimensions", [*boxes[-1].sizes])
    properties: Any = state["properties"].state
    named = properties[0] if type(properties) is tuple and properties else None
    if (dtype := _find_dtype(getattr(named, "dotted", ""))) is None:
        _raise_damaged("a tensor's properties", "its dtype first", properties)
    return StoredTensor(dtype, shape, boxes)


def _get_fields(found: Any, cls: str, **fields: type) -> dict[str, Any]:
    """Return the fields of an object of this class of torch, some of which have these types."""
    if not isinstance(found, Pickled) or type(found).__name__ != cls or type(found.state) is not dict:
        _raise_damaged("the pickle", f"an object of {cls}", getattr(found, "dotted", found))
    for name, kind in fields.items():
        if not isinstance(found.state.get(name), kind):
            _raise_damaged(cls, f"a {kind.__name__} as '{name}'", found.state.get(name))
    return found.state


def _parse_shape(found: Any) -> tuple[int, ...]:
    values = found.args[0] if getattr(found, "dotted", "") == "torch.Size" and found.args else found
    if type(values) not in (tuple, list) or len(values) > MAX_DIMS:
        _raise_damaged("a tensor", f"a shape of at most {MAX_DIMS} dimensions", values)
    for value in values:
        if type(value) is not int or not 0 <= value < SIZE_LIMIT:
            _raise_damaged("a size or place", "a number that is no less than 0", value)
    return tuple(values)
