"""The directory of a checkpoint: data files of new names, two that say what they contain, and the manifest last."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import reprlib
import uuid
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple, NoReturn

import torch

from .._core.checks import bind_spec
from .._core.spec import PartitionSpec
from ._files import (
    SIZE_LIMIT,
    AnyPath,
    CheckpointError,
    DamagedError,
    NewerError,
    SavedError,
    checksum,
    flush,
    open_path,
    read_regular,
    remove,
    replace,
)  # fmt: skip
from ._leaves import MAX_DIMS, Box
from ._ranks import TIMEOUT, connect_ranks

MANIFEST = "funshard.json"
"""The name of the manifest: it has the state's structure, its plain values, the checkpoint's sequence number and checksums."""
METADATA = ".metadata"
"""The name of torch's metadata file: written for torch.distributed.checkpoint, and not read."""
VERSION = 2
"""The version of the manifest: 1, of funshard 0.2, has no index of the tensors."""
MAX_SEQUENCE = SIZE_LIMIT - 1
"""The highest sequence number: checkpoints that have it are ordered by time alone."""


@dataclass(frozen=True)
class Manifest:
    """The checked fields of a manifest."""

    sequence: int
    """The number of the checkpoint: the last one in a directory has the highest."""
    files: Mapping[str, int]
    """The size of each file in bytes, by name."""
    state: Any
    """The JSON tree of the state; {} for a state of another program, of which only the tensors are known."""
    tensors: Any
    """For each tensor ``[names, dtype, shape, boxes]``, and for each box ``[offsets, sizes, file, offset, checksum]``; None in
    files of version 0.2."""


def pack_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file of a manifest."""
    text = json.dumps({"version": VERSION, **vars(manifest)})
    return json.dumps({"crc32": checksum(text.encode()), "content": text}).encode()


def read_manifest(path: AnyPath) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if the directory has none, as when `save` did not write it.

    Raises CheckpointError if the manifest is damaged.
    """
    try:
        return _parse(read_regular(path / MANIFEST))
    except FileNotFoundError:
        return None
    except NewerError as error:
        raise NewerError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its file '{MANIFEST}' is damaged: {error}") from error


def _parse(raw: bytes) -> Manifest:
    outer = json.loads(raw.decode())
    _check_fields(outer, {"crc32": int, "content": str}, "the file")
    if checksum(outer["content"].encode()) != outer["crc32"]:
        raise DamagedError("its checksum is not what was written")
    content = json.loads(outer["content"])
    _check_fields(content, {"version": int}, "the content")
    if (version := content["version"]) > VERSION:
        raise NewerError(f"of version {version}, expected at most {VERSION}: use a newer funshard")
    content |= {"tensors": content.get("tensors")} if version == VERSION else {"tensors": None}
    _check_fields(content, {"sequence": int, "files": dict, "state": dict}, "the content")
    if not 0 < content["sequence"] <= MAX_SEQUENCE:
        _raise_damaged("field 'sequence'", "a number from 1 on, of at most 63 bits", content["sequence"])
    for name, size in content["files"].items():
        if not is_plain_name(name) or type(size) is not int or not 0 <= size < SIZE_LIMIT:
            _raise_damaged("field 'files'", "files of the directory and their sizes", {name: size})
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


# --- The index of the tensors in the files ---


class RecordPlace(NamedTuple):
    """The place of a box: a file of the directory, the offset of its elements there, and their checksum."""

    file: str
    offset: int
    checksum: int


class StoredTensor(NamedTuple):
    """A tensor in the files: its shape, and the boxes of it that they have, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Mapping[Box, RecordPlace]


def parse_tensors(path: AnyPath, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name. Raises CheckpointError for an index that `save` does not write."""
    if manifest.tensors is None:
        raise CheckpointError(
            f"{path}: expected an index of tensors in '{MANIFEST}', which version 0.2 did not write: "
            "fs.checkpoint.from_dcp(path, new_path) writes such a checkpoint anew"
        )
    out: dict[str, StoredTensor] = {}
    try:
        for names, kind, shape, boxes in manifest.tensors:
            if not all(isinstance(name, str) for name in names):
                _raise_damaged("a tensor", "names", names)
            if not isinstance(dtype := getattr(torch, kind, None), torch.dtype):
                _raise_damaged(f"tensor {names}", "a dtype of this torch", kind)
            places: dict[Box, RecordPlace] = {}
            for offsets, sizes, file, offset, crc32 in boxes:
                box = Box(_parse_numbers(offsets, len(shape)), _parse_numbers(sizes, len(shape)))
                if not is_plain_name(file):
                    _raise_damaged("the place of a box", "a file of the checkpoint's directory", file)
                places[box] = RecordPlace(file, *_parse_numbers([offset, crc32], 2))
            out |= dict.fromkeys(names, StoredTensor(dtype, _parse_numbers(shape, len(shape)), places))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the index of tensors in its file '{MANIFEST}' is damaged: {error}") from error
    return out


def _parse_numbers(found: Any, length: int) -> tuple[int, ...]:
    if type(found) is not list or len(found) != length or length > MAX_DIMS:
        _raise_damaged("a tensor", f"{min(length, MAX_DIMS)} sizes or places", found)
    for value in found:
        if type(value) is not int or not 0 <= value < SIZE_LIMIT:
            _raise_damaged("a size or place", "a number that is no less than 0", value)
    return tuple(found)


# --- The directory ---

LEFT_NAME = re.compile(r"__\d+_0_[0-9a-f]{12}\.distcp|\.metadata|(\.metadata|funshard\.json)_[0-9a-f]{12}\.partial")
"""The names of what a killed save has left: data files of other programs and of version 0.2 have no number of the save."""


def is_directory(path: AnyPath) -> bool:
    """Return whether a path is a directory and not a link to one, which belongs to whoever made it."""
    return path.is_dir() and not (isinstance(path, Path) and path.is_symlink())


def has_manifest(path: AnyPath) -> bool:
    """Return whether a directory has a manifest, of whatever content."""
    return os.path.lexists(path / MANIFEST) or (path / MANIFEST).exists()


class Committed(NamedTuple):
    """A checkpoint that `save` has put into a directory."""

    order: tuple[float, int]
    """The sequence number, or infinity for a damaged manifest, and then the time of the manifest, since two jobs may give two
    checkpoints one number."""
    path: Any
    files: Mapping[str, int]
    error: Exception | None = None

    def find_damage(self) -> str:
        """Return what is wrong with the manifest or the sizes of the files, or ""."""
        for name, size in self.files.items():
            file = self.path / name
            if not file.is_file() or file.stat().st_size != size:
                return f"{self.path}: its file '{name}' is {'cut short' if file.is_file() else 'missing'}"
        return str(self.error or "")


def _find_committed(path: AnyPath) -> Committed | None:
    """Return the checkpoint at a path, None if no manifest is there."""
    try:
        if is_directory(path) and (manifest := read_manifest(path)):
            return Committed((manifest.sequence, (path / MANIFEST).stat().st_mtime_ns), path, manifest.files)
    except (CheckpointError, OSError) as error:
        return Committed((math.inf, 0), path, {}, error) if has_manifest(path) else None
    return None


def list_committed(directory: AnyPath) -> list[Committed]:
    """Return the checkpoints that `save` has put into a directory, the oldest first. Only manifests are read."""
    found = [_find_committed(path) for path in directory.iterdir()] if directory.is_dir() else []
    return sorted((entry for entry in found if entry), key=lambda entry: (entry.order, str(entry.path)))


def latest(directory: str | os.PathLike[str], spec: PartitionSpec | None = None) -> AnyPath | None:
    """Return the last checkpoint that `save` has completed in a directory, or None if there is none.

    The order is that in which the saves ended, whatever names and clocks say. Links do not count. The function passes over a
    checkpoint whose files are missing or cut short, with a warning.

    Args:
        directory: The directory that has the checkpoints' directories.
        spec: A bound spec. All of its ranks call this, and return what the first one finds. Without a spec, each caller looks
            for itself.

    Returns:
        The path of the checkpoint, for `load`, or None.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = [fs.checkpoint.save(f"{directory}/step{step}", {"step": step}, spec) for step in (1, 2)]
        ...     print(fs.checkpoint.latest(directory).name)
        step2
    """
    if spec is not None:
        ranks = connect_ranks(bind_spec(spec), "checkpoint.latest", TIMEOUT)
        return ranks.run_on_first(lambda: latest(directory), "checkpoint.latest")
    for found in reversed(list_committed(open_path(os.fsdecode(directory)))):
        if not (damage := found.find_damage()):
            return found.path
        warnings.warn(f"checkpoint.latest: passed over a damaged checkpoint: {damage}", stacklevel=2)
    return None


def clean(directory: str | os.PathLike[str], keep: int = 3) -> list[AnyPath]:
    """Remove all but the last ``keep`` complete checkpoints in a directory, and what interrupted saves have left.

    Damaged checkpoints, links, directories that `save` has not written and those that another process is writing stay,
    with a warning also what this user may not remove. Call it on one rank.

    Args:
        directory: The directory that has the checkpoints' directories.
        keep: The number of checkpoints to keep.

    Returns:
        The paths that are gone.

    Raises:
        ValueError: For ``keep < 1``.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = [fs.checkpoint.save(f"{directory}/step{step}", {"step": step}, spec) for step in (1, 2, 3)]
        ...     print([path.name for path in fs.checkpoint.clean(directory, keep=2)])
        ['step1']
    """
    if keep < 1:
        raise ValueError(f"checkpoint.clean: expected to keep at least 1, got {keep}")
    directory = open_path(os.fsdecode(directory))
    complete = [found.path for found in list_committed(directory) if not found.find_damage()]
    old, removed = {str(path): path for path in complete[:-keep]}, list[AnyPath]()
    for path in old.values():
        try:
            remove(path / MANIFEST)  # first, so that no reader takes a half of it for a checkpoint
        except PermissionError:  # noqa: PERF203 - of this one
            warnings.warn(f"checkpoint.clean: {path} stays, because this user may not remove it", stacklevel=2)
    others = [path for path in directory.iterdir() if str(path) not in old] if directory.is_dir() else []
    for path in (*old.values(), *others):
        with contextlib.suppress(OSError):  # another process writes there or cleans too, or the user may not
            left, is_old = _list_left(path), str(path) in old
            if (is_old or any(file.name != METADATA for file in left)) and not has_manifest(path):
                with _lock(path):
                    files = path.iterdir() if is_old else left
                    for file in sorted(files, key=lambda file: bool(LEFT_NAME.fullmatch(file.name))):
                        remove(file)  # last what tells the next call that the rest is to go
                if not any(path.iterdir()):
                    remove(path)
                    removed.append(path)
    return removed


def _list_left(path: AnyPath) -> list[AnyPath]:
    return [file for file in path.iterdir() if LEFT_NAME.fullmatch(file.name)] if is_directory(path) else []


@contextlib.contextmanager
def _lock(path: AnyPath) -> Generator[None]:
    """Lock a directory for the process that writes to it. Raises BlockingIOError if another one has the lock."""
    if not isinstance(path, Path):
        yield
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # perhaps a file system without locks: `clean` keeps what is on it
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes that were forked in the meantime
        with contextlib.suppress(OSError):  # also closes it if it raises
            os.close(handle)


class Target:
    """The directory that a save writes files of new names to: locked while its first rank lives, complete after `commit`.

    A damaged checkpoint there stays until the new manifest takes the place of its own. Raises FileExistsError for anything
    else than nothing, what a killed save has left, or a damaged checkpoint.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path, self.suffix = path, f"_{uuid.uuid4().hex[:12]}"
        self._locked, self._is_complete = contextlib.ExitStack(), False
        if damage := _check_free(path):
            warnings.warn(f"checkpoint.save: takes the place of a damaged checkpoint: {damage}", stacklevel=2)
        self._is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._locked.enter_context(_lock(path))
        except BlockingIOError as error:
            raise FileExistsError(f"{path}: expected a path that no other save writes to: give another, or wait") from error
        except OSError:
            pass
        try:
            (path / f"__0_0{self.suffix}.distcp").open("wb").close()  # tells `clean` whose directory it is
        except BaseException:
            self.abandon()
            raise

    def commit(self, tree: Any, metadata: bytes, sizes: Mapping[str, int], tensors: Any) -> None:
        """Write torch's metadata file and the manifest. Raises SavedError for a failure after that, other errors before it."""
        _check_free(self.path)  # once more, for file systems without locks
        for name, size in sizes.items():
            if (got := (self.path / name).stat().st_size) != size:
                raise CheckpointError(f"file '{name}': expected {size} bytes, as were written, got {got}")
        known = (found.order[0] for found in list_committed(self.path.parent) if not found.error)
        sequence = min(1 + int(max(known, default=0)), MAX_SEQUENCE)  # after all that exist now: writes take long
        manifest = Manifest(sequence, dict(sizes), tree, tensors)
        flush(self.path.parent)
        replace(self.path / METADATA, metadata, self.suffix)
        replace(self.path / MANIFEST, pack_manifest(manifest), self.suffix)
        self._is_complete = True
        try:
            flush(self.path)
        except OSError as error:
            raise SavedError(
                f"{self.path} is there and whole, but the flush of its directory failed, so that it may be gone after a power "
                f"failure: {error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                for file in [*self.path.iterdir()]:  # of a damaged checkpoint, also of version 0.2, and of killed saves
                    is_data = file.name.endswith(".distcp") or LEFT_NAME.fullmatch(file.name)
                    if is_data and file.name not in (METADATA, *sizes):
                        remove(file)
            self._locked.close()

    def abandon(self) -> None:
        """Remove what this save has written, if it is not complete."""
        with contextlib.suppress(OSError):
            for file in () if self._is_complete else list(self.path.iterdir()):
                if self.suffix in file.name:
                    remove(file)
            if self._is_new and not has_manifest(self.path):
                remove(self.path / METADATA)
                if not any(self.path.iterdir()):
                    remove(self.path)
        self._locked.close()


def _check_free(path: AnyPath) -> str:
    """Return the damage of a checkpoint that may be replaced, or "" if there is none."""
    found = _find_committed(path)
    if found and not isinstance(found.error, NewerError | OSError) and (damage := found.find_damage()):
        return damage
    is_left = is_directory(path) and all(LEFT_NAME.fullmatch(file.name) for file in path.iterdir())
    if found or not (is_left or not (os.path.lexists(path) or path.exists())):
        raise FileExistsError(
            f"{path}: expected a path where nothing is, such as one with the number of the step in its name; a checkpoint "
            "that is whole is never written over"
        )
    return ""
