"""funshard.json, the manifest of a checkpoint: written, read, and checked as a whole when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from .._errors import CheckpointError, DamagedError, NewerError
from .._state.json_schema import check_fields, check_tree, refuse
from .regular import checksum, read_regular

__all__ = ["LAST", "MANIFEST", "METADATA", "Manifest", "is_plain_name", "read_manifest", "write_manifest"]

MANIFEST = "funshard.json"
"""What torch's description does not say: the state's structure, its plain values, which checkpoint this is, and checksums."""
METADATA = ".metadata"
"""torch's name of the file that says what is in the others."""
VERSION = 1
LARGEST = 1 << 63
"""More than any file has bytes."""
LAST = LARGEST - 1
"""The highest sequence: of checkpoints that have it the time counts alone."""


@dataclass(frozen=True)
class Manifest:
    """The fields of a checkpoint's manifest, checked."""

    sequence: int
    """Of those in a directory the last one has the highest."""
    files: Mapping[str, int]
    """The size of each of the checkpoint's files, by name."""
    metadata: int
    """The checksum of torch's description."""
    state: Any
    """The tree of the state, as `written_tree` gives it."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in a directory."""
    text = json.dumps({"version": VERSION, **asdict(manifest)})
    (directory / MANIFEST).write_text(json.dumps({"crc32": checksum(text.encode()), "content": text}))


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if `save` did not write it.

    Raises CheckpointError if the manifest is damaged, or if torch's description is not the one that it was written with.
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
        own = checksum(read_regular(path / METADATA))
    except (FileNotFoundError, DamagedError):
        own = None
    if own != found.metadata:
        raise CheckpointError(f"{path}: its file '{METADATA}' is damaged or missing")
    return found


def _parse(raw: bytes) -> Manifest:
    """Return what the file holds. Raises ValueError, NewerError or RecursionError for anything but a manifest."""
    outer = json.loads(raw.decode())
    check_fields(outer, {"crc32": int, "content": str}, "the file")
    if checksum(outer["content"].encode()) != outer["crc32"]:
        raise DamagedError("its checksum is not what was written")
    content = json.loads(outer["content"])
    check_fields(content, {"version": int}, "the content")
    if (version := content["version"]) > VERSION:
        raise NewerError(f"of version {version}, expected at most {VERSION}: use a newer funshard")
    check_fields(content, {"sequence": int, "files": dict, "metadata": int, "state": dict}, "the content")
    if not 0 < content["sequence"] <= LAST:
        refuse("field 'sequence'", "a number from 1 on, of at most 63 bits", content["sequence"])
    for name, size in content["files"].items():
        if not is_plain_name(name) or type(size) is not int or not 0 <= size < LARGEST:
            refuse("field 'files'", "files of the directory and their sizes", {name: size})
    check_tree(content["state"])
    return Manifest(**{name: content[name] for name in Manifest.__dataclass_fields__})


def is_plain_name(name: object) -> bool:
    """Whether this is the name of a file in a directory, and of no other place."""
    return type(name) is str and name.isprintable() and name not in ("", "..") and PurePath(name).name == name
