"""The directory in which a checkpoint is written: locked, checked, flushed, and at its path by one rename."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._errors import CheckpointError, SavedError
from .directory import LOCK, NEW, committed, find_damage, is_directory, staging_path
from .manifest import LAST, MANIFEST, METADATA, Manifest, write_manifest
from .regular import checksum, read_regular

__all__ = ["StagingDirectory", "find_replaced"]


class StagingDirectory:
    """A directory beside ``path``, locked for as long as its writer lives, that `publish` renames to ``path``.

    What it may replace there is `find_replaced`'s; of a directory that it replaces ``carried`` says by name what to take over.
    """

    def __init__(self, path: Path, *, over_damaged: bool = False, carried: Callable[[str], bool] | None = None) -> None:
        self.path, self._over_damaged, self._carried = path.absolute(), over_damaged, carried
        if wrong := self._find_replaced():
            warnings.warn(f"checkpoint.save: takes the place of a damaged checkpoint: {wrong}", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.directory = staging_path(self.path)
        self._lock: int | None = None
        new = self.directory.with_suffix(NEW)
        try:
            new.mkdir()
            self._lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR)
            with contextlib.suppress(OSError):  # a file system without locks: `clean` leaves what it cannot lock
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(new, self.directory)  # nobody sees it unlocked
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            self._unlock()
            raise

    def commit(self, tree: Any, written: Mapping[str, int]) -> None:
        """Write the manifest of a checkpoint whose files have these sizes, and `publish` it."""
        known = (number for (number, _), *_ in committed(self.path.parent) if number < math.inf)
        sequence = min(1 + int(max(known, default=0)), LAST)  # after all that are there now: writing may have taken long
        metadata = checksum(read_regular(self.directory / METADATA))
        write_manifest(self.directory, Manifest(sequence, dict(written), metadata, tree))
        for name in (METADATA, MANIFEST):  # when both are written: the first flush takes what a journal has of the other too
            _flush(self.directory / name)
        self.publish(written)

    def publish(self, written: Mapping[str, int]) -> None:
        """Rename the directory to its path, whole and flushed. ``written`` are the sizes that its files should have.

        Raises SavedError for what fails when it is there, anything else before.
        """
        for name, size in written.items():
            if (got := (self.directory / name).stat().st_size) != size:
                raise CheckpointError(f"file '{name}': expected {size} bytes, as were written, got {got}")
        if self._carried is not None and is_directory(self.path):
            _carry_over(self.path, self.directory, self._carried)
        _flush(self.directory)
        replaced = None if self._find_replaced() is None else self._move_replaced()
        try:
            os.rename(self.directory, self.path)
        except OSError:
            if replaced is not None:
                with contextlib.suppress(OSError):
                    os.rename(replaced, self.path)
            self._find_replaced()  # what has come in the meantime
            raise
        try:
            _flush(self.path.parent)
        except OSError as error:
            raise SavedError(
                f"{self.path} is there and whole, but the flush of the directory that it is in failed, so that it may be gone "
                f"after a power failure: {error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # an empty file that nobody reads
                (self.path / LOCK).unlink(missing_ok=True)
            self._unlock()
            if replaced is not None:
                shutil.rmtree(replaced, ignore_errors=True)

    def _find_replaced(self) -> str | None:
        return find_replaced(self.path, over_damaged=self._over_damaged, any_directory=self._carried is not None)

    def _move_replaced(self) -> Path:
        """Move what is at the path aside, until this process or `clean` removes it; return where it is."""
        moved = staging_path(self.path)
        os.rename(self.path, moved)
        if self._carried is None and not find_damage(moved):  # another has come in the meantime
            os.rename(moved, self.path)
            self._find_replaced()
        return moved

    def abandon(self) -> None:
        """Take away what was written, if it has not been published."""
        for _ in range(10):  # another rank, which does not know of it yet, may just put its file there
            shutil.rmtree(self.directory, ignore_errors=True)
            if not self.directory.exists():
                break
            time.sleep(0.01)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # it is closed, and so unlocked, also then
                os.close(lock)


def find_replaced(path: Path, *, over_damaged: bool = False, any_directory: bool = False) -> str | None:
    """Return what is wrong with what is at a path and may be replaced, "" if nothing is; None where nothing is there.

    That is a damaged checkpoint where ``over_damaged``, and each directory where ``any_directory``, but never a link.
    Raises FileExistsError for all else.
    """
    if not os.path.lexists(path) or (is_directory(path) and not any(path.iterdir())):
        return None
    if is_directory(path):
        if any_directory:
            return ""
        if over_damaged and (wrong := find_damage(path)):
            return wrong
    raise FileExistsError(
        f"{path}: expected a path where nothing is, such as one with the number of the step in its name; a checkpoint "
        "that is whole is never written over"
    )


def _carry_over(source: Path, target: Path, carried: Callable[[str], bool]) -> None:
    """Put some of a directory's entries, by name, into another one too: by hard links, where the file system has them."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:
            shutil.copy2(old, new, follow_symlinks=False)

    for entry in os.scandir(source):
        new = target / entry.name
        if not carried(entry.name) or os.path.lexists(new):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, new, symlinks=True, copy_function=link)
        else:
            link(entry.path, str(new))


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
