"""The manifest of a checkpoint, funshard.json: written, read, and checked completely when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from .._errors import CheckpointError, DamagedError, NewerError
from .._state.json_schema import check_fields, check_tree, raise_damaged
from .regular import SIZE_LIMIT, checksum, read_regular

__all__ = ["MANIFEST", "MAX_SEQUENCE", "METADATA", "Manifest", "is_plain_name", "read_manifest", "write_manifest"]

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
