"""A checkpoint's directory: written aside, checked, flushed, and there by one rename; the latest, and what may go."""

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

from .._spec.spec import PartitionSpec, bound
from ._manifest import LAST, MANIFEST, METADATA, Manifest, NewerError, read_manifest, write_manifest
from ._ranks import TIMEOUT, CheckpointError, ranks_of
from ._regular import checksum, read_regular

__all__ = ["Aside", "clean", "latest"]

ASIDE = ".partial"
"""How the name of a directory ends that is being written, or was when its writer ended."""
NEW = ".new"
"""How it ends until the directory is locked."""
OWN_NAMES = re.compile(rf"\..+\.[0-9a-f]{{12}}({re.escape(ASIDE)}|{re.escape(NEW)})", re.DOTALL)
"""What `_beside` makes of a name; others' may end like it."""
JUST_MADE = 60
"""Seconds that this may take."""
LOCK = ".lock"


class Aside:
    """The directory beside ``path`` in which a checkpoint is written, locked for as long as its writer lives.

    Raises FileExistsError where there is something at ``path``, unless ``over_damaged`` it is what `latest` passes over.
    """

    def __init__(self, path: Path, *, over_damaged: bool = False) -> None:
        self.path, self._over_damaged = path.absolute(), over_damaged
        if wrong := self._refuse_existing():
            warnings.warn(f"checkpoint.save: takes the place of a damaged checkpoint: {wrong}", stacklevel=2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.aside = _beside(self.path)
        new = self.aside.with_suffix(NEW)
        new.mkdir()
        self._lock: int | None = os.open(new / LOCK, os.O_CREAT | os.O_RDWR)
        with contextlib.suppress(OSError):  # a file system without locks: `clean` leaves what it cannot lock
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(new, self.aside)  # nobody sees it unlocked

    def commit(self, tree: Any, written: Mapping[str, int]) -> None:
        """It is at its path, as `publish` says, with what torch's description does not say of it."""
        known = (number for (number, _), *_ in _committed(self.path.parent) if number < math.inf)
        sequence = min(1 + int(max(known, default=0)), LAST)  # after all that are there now: writing may have taken long
        metadata = checksum(read_regular(self.aside / METADATA))
        write_manifest(self.aside, Manifest(sequence, dict(written), metadata, tree))
        for name in (METADATA, MANIFEST):  # when both are written: the first flush takes what a journal has of the other too
            _flush(self.aside / name)
        self.publish(written)

    def publish(self, written: Mapping[str, int]) -> None:
        """It is at its path, whole and flushed, when this returns. ``written`` are the sizes that its files should have."""
        for name, size in written.items():
            if (got := (self.aside / name).stat().st_size) != size:
                raise CheckpointError(f"file '{name}': expected {size} bytes, as were written, got {got}")
        _flush(self.aside)
        damaged = self._damaged_aside() if self._refuse_existing() else None
        try:
            os.rename(self.aside, self.path)
        except OSError:
            if damaged is not None:
                with contextlib.suppress(OSError):
                    os.rename(damaged, self.path)
            self._refuse_existing()  # what has come in the meantime
            raise
        _flush(self.path.parent)
        (self.path / LOCK).unlink(missing_ok=True)
        self._unlock()
        if damaged is not None:
            shutil.rmtree(damaged, ignore_errors=True)

    def _refuse_existing(self) -> str:
        """FileExistsError for what may not go from the path; what is wrong with that which may, "" if there is nothing."""
        if not os.path.lexists(self.path) or (_is_directory(self.path) and not any(self.path.iterdir())):
            return ""
        if self._over_damaged and _is_directory(self.path) and (wrong := _damage(self.path)):
            return wrong
        raise FileExistsError(
            f"{self.path}: expected a path where nothing is, such as one with the number of the step in its name; a checkpoint "
            "that is whole is never written over"
        )

    def _damaged_aside(self) -> Path:
        """Where the damaged checkpoint is then, until it is removed by this process or by `clean`."""
        moved = _beside(self.path)
        os.rename(self.path, moved)
        if not _damage(moved):  # another has come in the meantime
            os.rename(moved, self.path)
            self._refuse_existing()
        return moved

    def abandon(self) -> None:
        """Take away what was written, if it has not been published."""
        for _ in range(10):  # another rank, which does not know of it yet, may just put its file there
            shutil.rmtree(self.aside, ignore_errors=True)
            if not self.aside.exists():
                break
            time.sleep(0.01)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _is_directory(path: Path) -> bool:
    """Whether it is one itself: a link, such as to the best checkpoint, is its maker's."""
    return path.is_dir() and not path.is_symlink()


def _beside(path: Path) -> Path:
    """Where it is before it is there, and when it is no longer."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{ASIDE}")


def _flush(path: Path) -> None:
    """What was written to a file, or the entries of a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _committed(directory: Path) -> list[tuple[tuple[float, int], Path, str]]:
    """Return ``(order, path, what is wrong)`` of what `save` has put into a directory, the oldest first.

    What is wrong is "" for a checkpoint that is whole, as far as the sizes of its files say. The order is the sequence and,
    since two jobs may give the same one to two checkpoints, the time of the manifest; that of a damaged one is infinity.
    """
    found: list[tuple[tuple[float, int], Path, str]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not _is_directory(path) or OWN_NAMES.fullmatch(path.name):
            continue
        try:
            if manifest := read_manifest(path):
                order = manifest.sequence, (path / MANIFEST).stat().st_mtime_ns
                found.append((order, path, _wrong_file(path, manifest.files)))
        except (CheckpointError, OSError) as error:
            if os.path.lexists(path / MANIFEST):
                found.append(((math.inf, 0), path, str(error)))
    return sorted(found)


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint that `save` has written there, as far as `latest` looks; "" with anything else."""
    try:
        manifest = read_manifest(path)
    except NewerError:
        return ""
    except CheckpointError as error:
        return str(error)
    except OSError:  # nobody knows
        return ""
    return _wrong_file(path, manifest.files) if manifest else ""


def _wrong_file(path: Path, sizes: Mapping[str, int]) -> str:
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{path}: its file '{name}' is {'cut short' if file.is_file() else 'missing'}"
    return ""


def latest(directory: str | os.PathLike[str], spec: PartitionSpec | None = None) -> Path | None:
    """The checkpoint in the directory that was saved last and is whole; None if there is none.

    Only what `save` has finished counts, and no link to it, in the order in which it did, whatever names and clocks say. One
    whose files are missing or cut short is passed over with a warning. With a spec, whose ranks all call this, it is what the
    first of them finds; without one each looks for itself.
    """
    if spec is not None:
        return ranks_of(bound(spec), "checkpoint.latest", TIMEOUT).on_first(lambda: latest(directory), "checkpoint.latest")
    for _, path, wrong in reversed(_committed(Path(directory))):
        if not wrong:
            return path
        warnings.warn(f"checkpoint.latest: passed over a damaged checkpoint: {wrong}", stacklevel=2)
    return None


def clean(directory: str | os.PathLike[str], keep: int = 3) -> list[Path]:
    """Removes all but the ``keep`` last whole checkpoints in the directory, and what saves that were cut short have left.

    Gives back what it has removed. What another process is writing stays, and so do damaged checkpoints, links, and what
    `save` has not written. On several ranks call it on one. ValueError for ``keep < 1``.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.clean: expected to keep at least 1, got {keep}")
    directory = Path(directory)
    good = [path for _, path, wrong in _committed(directory) if not wrong]
    removed: list[Path] = []
    for path in good[:-keep]:
        aside = _beside(path)
        with contextlib.suppress(FileNotFoundError):  # another process cleans too
            os.rename(path, aside)  # at once, so that nobody takes a half of it for a checkpoint
            shutil.rmtree(aside, ignore_errors=True)
            removed.append(path)
    for path in directory.iterdir() if directory.is_dir() else ():
        if _is_directory(path) and OWN_NAMES.fullmatch(path.name) and _is_left_over(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_left_over(path: Path) -> bool:
    """Whether nobody writes it any more."""
    if path.name.endswith(NEW):
        with contextlib.suppress(FileNotFoundError):
            return time.time() - path.stat().st_mtime > JUST_MADE
    return path.name.endswith(ASIDE) and not _is_locked(path / LOCK)


def _is_locked(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False  # of a checkpoint that `clean` has begun to remove
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
