"""The checkpoints in a directory: how one is written and committed, and how they are found and removed."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._core.checks import bind_spec
from ..._core.spec import PartitionSpec
from .._errors import CheckpointError, NewerError, SavedError
from .._ranks import TIMEOUT, connect_ranks
from .manifest import MANIFEST, MAX_SEQUENCE, METADATA, Manifest, read_manifest, write_manifest
from .remote import AnyPath, RemotePath, open_path
from .untrusted import checksum, read_regular

STAGING_NAME = re.compile(r"\..+\.[0-9a-f]{12}\.partial", re.DOTALL)
"""The names that `_make_staging_path` makes; other directories may have similar ones."""
LOCK_SECONDS = 60
"""The most seconds between the creation of a staging directory and its lock."""
LOCK = ".lock"


def is_directory(path: AnyPath) -> bool:
    """Return whether a path is a directory and not a link to one, which belongs to whoever made it."""
    return path.is_dir() and (isinstance(path, RemotePath) or not path.is_symlink())


def _make_staging_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


def list_committed(directory: AnyPath) -> list[tuple[tuple[float, int], Any, str]]:
    """Return ``(order, path, damage)`` of the checkpoints that `save` has put into a directory, the oldest first.

    The order is the sequence number, and then the time of the manifest, since two jobs may give two checkpoints one number.
    The order of a damaged manifest is infinity.
    """
    found: list[tuple[tuple[float, int], Any, str]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_directory(path) or STAGING_NAME.fullmatch(path.name):
            continue
        try:
            if manifest := read_manifest(path):
                order = manifest.sequence, (path / MANIFEST).stat().st_mtime_ns
                found.append((order, path, _find_wrong_file(path, manifest.files)))
        except (CheckpointError, OSError) as error:
            if os.path.lexists(path / MANIFEST) or (path / MANIFEST).exists():
                found.append(((math.inf, 0), path, str(error)))
    return sorted(found, key=lambda entry: (entry[0], str(entry[1])))


def find_damage(path: AnyPath) -> str:
    """Return the damage of a checkpoint that `save` has written, as far as `latest` looks for it; "" for any other path."""
    try:
        manifest = read_manifest(path)
    except (NewerError, OSError):
        return ""
    except CheckpointError as error:
        return str(error)
    return _find_wrong_file(path, manifest.files) if manifest else ""


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
    for _, path, damage in reversed(list_committed(open_path(os.fsdecode(directory)))):
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
    complete = [path for _, path, damage in list_committed(directory) if not damage]
    removed: list[AnyPath] = []
    for path in complete[:-keep]:
        if isinstance(path, RemotePath):
            (path / MANIFEST).remove()  # first, so that no reader takes a half of it for a checkpoint
            path.remove()
            removed.append(path)
            continue
        moved = _make_staging_path(path)
        try:
            if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError  # it can perhaps be renamed, but its files cannot be removed
            os.rename(path, moved)  # so that no reader takes a half of it for a checkpoint
        except FileNotFoundError:  # another process may clean too
            continue
        except PermissionError:
            if path.exists():
                warnings.warn(f"checkpoint.clean: {path} stays, because this user may not remove it", stacklevel=2)
            continue
        removed += [path] if _remove(moved) else []
    for path in directory.iterdir() if isinstance(directory, Path) and directory.is_dir() else ():
        if is_directory(path) and STAGING_NAME.fullmatch(path.name) and _is_left_over(path) and _remove(path):
            removed.append(path)
    return removed


def _remove(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def _is_left_over(path: Path) -> bool:
    try:
        handle = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:  # between its creation and its lock, or left behind there, or begun to be removed
        with contextlib.suppress(FileNotFoundError):
            return (path / MANIFEST).exists() or time.time() - path.stat().st_mtime > LOCK_SECONDS
        return False
    except PermissionError:  # another user's, who may be writing
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


# --- The directory that a checkpoint is written to: locked, checked, flushed, and renamed to its path ---


class StagingDirectory:
    """A directory beside ``path``, locked while its writer lives, that `publish` renames to ``path``.

    `check_replaceable` says what it may replace there: with ``over_damaged`` a damaged checkpoint.
    """

    suffix = ""

    def __init__(self, path: Path, *, over_damaged: bool = False) -> None:
        self.path, self._over_damaged = path.absolute(), over_damaged
        if damage := self._check_replaceable():
            warnings.warn(f"checkpoint.save: takes the place of a damaged checkpoint: {damage}", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.directory = _make_staging_path(self.path)
        self._lock: int | None = None
        try:
            self.directory.mkdir()
            self._lock = os.open(self.directory / LOCK, os.O_CREAT | os.O_RDWR)
            with contextlib.suppress(OSError):  # a file system without locks: `clean` keeps what it cannot lock
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if is_directory(self.path):
                found = self.path.stat()  # an empty one's, before there is anything to read
                os.chown(self.directory, found.st_uid, found.st_gid)
                shutil.copystat(self.path, self.directory)
        except BaseException:
            self.abandon()
            raise

    def commit(self, tree: Any, sizes: Mapping[str, int], checksums: Mapping[str, Mapping[int, int]]) -> None:
        """Write the manifest of a checkpoint with this JSON tree, sizes of files and checksums, and `publish` it."""
        _describe_checkpoint(self.path, self.directory, tree, sizes, checksums)
        for name in (METADATA, MANIFEST):  # after both are written: one flush of a journal takes both
            _flush(self.directory / name)
        self.publish(sizes)

    def publish(self, sizes: Mapping[str, int]) -> None:
        """Check the sizes of the files, flush the directory and rename it to its path.

        Raises SavedError for a failure after the rename, and other errors before it.
        """
        _check_sizes(self.directory, sizes)
        _flush(self.directory)
        moved = _make_staging_path(self.path)  # for a damaged one, which `clean` removes if this process cannot
        if self._check_replaceable():
            os.rename(self.path, moved)
            if not find_damage(moved):  # a complete one has come in the meantime
                os.rename(moved, self.path)
        try:
            os.rename(self.directory, self.path)
        except OSError:
            self._check_replaceable()  # raises for what has come in the meantime
            raise
        try:
            _flush(self.path.parent)
        except OSError as error:
            raise SavedError(
                f"{self.path} is there and whole, but the flush of the directory that it is in failed, so that it may be gone "
                f"after a power failure: {error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # an empty file that has no reader
                (self.path / LOCK).unlink(missing_ok=True)
            self._unlock()
            shutil.rmtree(moved, ignore_errors=True)

    def _check_replaceable(self) -> str:
        return check_replaceable(self.path, over_damaged=self._over_damaged)

    def abandon(self) -> None:
        """Remove the directory, if it has not been published."""
        for _ in range(10):  # another rank, which does not know of the error yet, may just create its file there
            shutil.rmtree(self.directory, ignore_errors=True)
            if not self.directory.exists():
                break
            time.sleep(0.01)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # also closes and unlocks it if it raises
                os.close(lock)


class RemoteStaging:
    """A directory in an object store: it is a checkpoint once its manifest is there, which `commit` writes last.

    Its files have a suffix of their own, so that a save that was killed, or one that goes on for too long, changes no other.
    """

    def __init__(self, path: RemotePath) -> None:
        if (path / MANIFEST).exists() and not find_damage(path):
            raise FileExistsError(
                f"{path}: expected a path where no checkpoint is, such as one with the number of the step in its name"
            )
        self.path = self.directory = path
        path.mkdir()
        self.suffix = f"_{uuid.uuid4().hex[:12]}"

    def commit(self, tree: Any, sizes: Mapping[str, int], checksums: Mapping[str, Mapping[int, int]]) -> None:
        """Check the files, write the manifest, and remove what other saves have left."""
        _check_sizes(self.directory, sizes)
        _describe_checkpoint(self.path, self.directory, tree, sizes, checksums)
        for path in list(self.path.iterdir()):
            if path.name.endswith(".distcp") and path.name not in sizes:
                path.remove()

    def abandon(self) -> None:
        """Remove the files of this save, and their directory if nothing else is in it."""
        every = list(self.path.iterdir()) if self.path.is_dir() else []
        own = [path for path in every if self.suffix in path.name]
        for path in own if len(own) < len(every) else [self.path]:
            path.remove()


def _check_sizes(directory: AnyPath, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if (got := (directory / name).stat().st_size) != size:
            raise CheckpointError(f"file '{name}': expected {size} bytes, as were written, got {got}")


def _describe_checkpoint(
    path: AnyPath, directory: AnyPath, tree: Any, sizes: Mapping[str, int], checksums: Mapping[str, Mapping[int, int]]
) -> None:
    """Write the manifest of a checkpoint, which lies in a directory and is to be at a path."""
    known = (number for (number, _), *_ in list_committed(path.parent) if number < math.inf)
    sequence = min(1 + int(max(known, default=0)), MAX_SEQUENCE)  # after all that exist now: writes take long
    metadata = checksum(read_regular(directory / METADATA))
    write_manifest(directory, Manifest(sequence, dict(sizes), metadata, tree, dict(checksums)))


def check_replaceable(path: Path, *, over_damaged: bool = False) -> str:
    """Return the damage of a checkpoint that may be replaced, or "" if nothing or an empty directory is at the path.

    Raises FileExistsError for anything else there, ValueError for a directory that a rename must not replace, and
    PermissionError for one that this user may not write to.
    """
    if path.name in ("", "..") or os.path.ismount(path) or _holds_working_directory(path):
        raise ValueError(
            f"{path}: expected a directory that a rename can replace, got a mount point, '..', the working directory or one "
            "above it: give a path inside of it"
        )
    if is_directory(path) and not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path}: expected a directory that this user may write to")
    if not os.path.lexists(path) or (is_directory(path) and not any(path.iterdir())):
        return ""
    if over_damaged and is_directory(path) and (damage := find_damage(path)):
        return damage
    raise FileExistsError(
        f"{path}: expected a path where nothing is, such as one with the number of the step in its name; a checkpoint "
        "that is whole is never written over"
    )


def _holds_working_directory(path: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(os.path.realpath(path))
    except FileNotFoundError:  # it was removed
        return False


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
