"""The directory of a checkpoint: data files of new names, and the manifest last. A directory without one is no checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import uuid
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from ..._core.checks import bind_spec
from ..._core.spec import PartitionSpec
from .._errors import CheckpointError, NewerError, SavedError
from .._ranks import TIMEOUT, connect_ranks
from .manifest import MANIFEST, MAX_SEQUENCE, METADATA, Manifest, pack_manifest, read_manifest
from .remote import AnyPath, RemotePath, flush, open_path, remove, replace
from .untrusted import checksum

LEFT_NAME = re.compile(r"__\d+_0_[0-9a-f]{12}\.distcp|\.metadata|(\.metadata|funshard\.json)_[0-9a-f]{12}\.partial")
"""The names of what a killed save has left: data files of other programs and of version 0.2 have no number of the save."""


def is_directory(path: AnyPath) -> bool:
    """Return whether a path is a directory and not a link to one, which belongs to whoever made it."""
    return path.is_dir() and (isinstance(path, RemotePath) or not path.is_symlink())


def has_manifest(path: AnyPath) -> bool:
    """Return whether a directory has a manifest, of whatever content."""
    return os.path.lexists(path / MANIFEST) or (path / MANIFEST).exists()


def list_committed(directory: AnyPath) -> list[tuple[tuple[float, int], Any, str, Mapping[str, int]]]:
    """Return ``(order, path, damage, files)`` of the checkpoints that `save` has put into a directory, the oldest first.

    The order is the sequence number, and then the time of the manifest, since two jobs may give two checkpoints one number.
    The order of a damaged manifest is infinity.
    """
    found: list[tuple[tuple[float, int], Any, str, Mapping[str, int]]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        try:
            if is_directory(path) and (manifest := read_manifest(path)):
                order = manifest.sequence, (path / MANIFEST).stat().st_mtime_ns
                found.append((order, path, _find_wrong_file(path, manifest.files), manifest.files))
        except (CheckpointError, OSError) as error:  # noqa: PERF203 - of this one
            if has_manifest(path):
                found.append(((math.inf, 0), path, str(error), {}))
    return sorted(found, key=lambda entry: (entry[0], str(entry[1])))


def _find_wrong_file(path: AnyPath, sizes: Mapping[str, int]) -> str:
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{path}: its file '{name}' is {'cut short' if file.is_file() else 'missing'}"
    return ""


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
    for _, path, damage, _ in reversed(list_committed(open_path(os.fsdecode(directory)))):
        if not damage:
            return path
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
    complete = [(path, files) for _, path, damage, files in list_committed(directory) if not damage]
    removed: list[AnyPath] = []
    for path, _ in complete[:-keep]:
        try:
            remove(path / MANIFEST)  # first, so that no reader takes a half of it for a checkpoint
        except PermissionError:
            warnings.warn(f"checkpoint.clean: {path} stays, because this user may not remove it", stacklevel=2)
            continue
        with contextlib.suppress(OSError):
            _remove_files(path)
        removed += [] if path.exists() else [path]
    files_of = {str(path): files for path, files in complete}
    for path in list(directory.iterdir()) if directory.is_dir() else ():
        named = files_of.get(str(path))
        with contextlib.suppress(OSError):  # another process writes there or cleans too, or the user may not
            left = _list_left(path, named or ()) if is_directory(path) and (named or not has_manifest(path)) else []
            if left:
                _unlock(_lock(path))
                for file in left if named else [path / METADATA, *left]:
                    remove(file)
                if not any(path.iterdir()):
                    remove(path)
                    removed.append(path)
    return removed


def _remove_files(path: AnyPath) -> None:
    """Remove a directory, last the files that tell the next `clean` what is left of it."""
    for file in sorted(path.iterdir(), key=lambda file: file.name != METADATA and bool(LEFT_NAME.fullmatch(file.name))):
        remove(file)
    remove(path)


def _list_left(path: AnyPath, named: Iterable[str]) -> list[AnyPath]:
    """Return the files of saves in a directory that its manifest does not name."""
    return [file for file in path.iterdir() if LEFT_NAME.fullmatch(file.name) and file.name not in (METADATA, *named)]


def _lock(path: AnyPath) -> int | None:
    """Lock a directory for the process that writes to it. Raises BlockingIOError if another one has the lock."""
    if isinstance(path, RemotePath):
        return None
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # perhaps a file system without locks, where `clean` keeps what it cannot lock
        os.close(handle)
        raise
    return handle


def _unlock(handle: int | None) -> None:
    if handle is not None:
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
        self._lock: int | None = None
        self._is_complete = False
        if damage := _check_free(path):
            warnings.warn(f"checkpoint.save: takes the place of a damaged checkpoint: {damage}", stacklevel=2)
        self._is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = _lock(path)
        except BlockingIOError as error:
            raise FileExistsError(f"{path}: expected a path that no other save writes to: give another, or wait") from error
        except OSError:
            pass
        try:
            (path / f"__0_0{self.suffix}.distcp").open("wb").close()  # tells `clean` whose directory it is
        except BaseException:
            self.abandon()
            raise

    def commit(self, metadata: bytes, tree: Any, sizes: Mapping[str, int], checksums: Mapping[str, Mapping[int, int]]) -> None:
        """Write torch's metadata file and the manifest. Raises SavedError for a failure after that, other errors before it."""
        _check_free(self.path)  # once more, for file systems without locks
        for name, size in sizes.items():
            if (got := (self.path / name).stat().st_size) != size:
                raise CheckpointError(f"file '{name}': expected {size} bytes, as were written, got {got}")
        known = (number for (number, _), *_ in list_committed(self.path.parent) if number < math.inf)
        sequence = min(1 + int(max(known, default=0)), MAX_SEQUENCE)  # after all that exist now: writes take long
        manifest = Manifest(sequence, dict(sizes), checksum(metadata), tree, dict(checksums))
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
                old = [file for file in self.path.iterdir() if file.name.endswith(".distcp") and file.name not in sizes]
                for file in {*old, *_list_left(self.path, sizes)}:
                    remove(file)
            self._release()

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
        self._release()

    def _release(self) -> None:
        handle, self._lock = self._lock, None
        _unlock(handle)


def _check_free(path: AnyPath) -> str:
    """Return the damage of a checkpoint that may be replaced, or "" if there is none."""
    if is_directory(path) and has_manifest(path):
        if damage := _find_damage(path):
            return damage
    elif is_directory(path):
        if all(LEFT_NAME.fullmatch(file.name) for file in path.iterdir()):
            return ""
    elif not os.path.lexists(path) and not path.exists():
        return ""
    raise FileExistsError(
        f"{path}: expected a path where nothing is, such as one with the number of the step in its name; a checkpoint "
        "that is whole is never written over"
    )


def _find_damage(path: AnyPath) -> str:
    try:
        manifest = read_manifest(path)
    except (NewerError, OSError):
        return ""
    except CheckpointError as error:
        return str(error)
    return _find_wrong_file(path, manifest.files) if manifest else ""
