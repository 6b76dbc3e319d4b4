"""The checkpoints in a directory: find the latest one, find damaged ones, and remove old ones."""

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

from ..._spec.bind import bind_spec
from ..._spec.spec import PartitionSpec
from .._errors import CheckpointError, NewerError
from .._ranks.ranks import TIMEOUT, connect_ranks
from .manifest import MANIFEST, read_manifest

__all__ = ["LOCK", "NEW_SUFFIX", "clean", "find_damage", "is_directory", "latest", "list_committed", "make_staging_path"]

PARTIAL_SUFFIX = ".partial"
"""The suffix of a staging directory."""
NEW_SUFFIX = ".new"
"""The suffix of a staging directory until it is locked."""
STAGING_NAME = re.compile(rf"\..+\.[0-9a-f]{{12}}({re.escape(PARTIAL_SUFFIX)}|{re.escape(NEW_SUFFIX)})", re.DOTALL)
"""The names that `make_staging_path` makes; other directories may have similar ones."""
LOCK_SECONDS = 60
"""The most seconds between the creation of a staging directory and its lock."""
LOCK = ".lock"
"""The file of a staging directory that its writer keeps locked."""


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory and not a link to one, which belongs to whoever made it."""
    return path.is_dir() and not path.is_symlink()


def make_staging_path(path: Path) -> Path:
    """Return a new path beside this one, for a directory to be renamed to it, or one that was moved away from it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{PARTIAL_SUFFIX}")


def list_committed(directory: Path) -> list[tuple[tuple[float, int], Path, str]]:
    """Return ``(order, path, damage)`` of the checkpoints that `save` has put into a directory, the oldest first.

    The damage is "" if all files have their sizes. The order is the sequence number, and then the time of the manifest, since
    two jobs may give two checkpoints one number. The order of a damaged manifest is infinity.
    """
    found: list[tuple[tuple[float, int], Path, str]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_directory(path) or STAGING_NAME.fullmatch(path.name):
            continue
        try:
            if manifest := read_manifest(path):
                order = manifest.sequence, (path / MANIFEST).stat().st_mtime_ns
                found.append((order, path, _find_wrong_file(path, manifest.files)))
        except (CheckpointError, OSError) as error:
            if os.path.lexists(path / MANIFEST):
                found.append(((math.inf, 0), path, str(error)))
    return sorted(found)


def find_damage(path: Path) -> str:
    """Return the damage of a checkpoint that `save` has written, as far as `latest` looks for it; "" for any other path."""
    try:
        manifest = read_manifest(path)
    except NewerError:
        return ""
    except CheckpointError as error:
        return str(error)
    except OSError:  # unknown
        return ""
    return _find_wrong_file(path, manifest.files) if manifest else ""


def _find_wrong_file(path: Path, sizes: Mapping[str, int]) -> str:
    """Return the damage of the first file that is missing or has another size."""
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{path}: its file '{name}' is {'cut short' if file.is_file() else 'missing'}"
    return ""


def latest(directory: str | os.PathLike[str], spec: PartitionSpec | None = None) -> Path | None:
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
        >>> model = torch.nn.Linear(2, 2)
        >>> spec = fs.policies.whole()(model)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (1, 2):
        ...         _ = fs.checkpoint.save(f"{directory}/step{step}", fs.shard(model, spec), spec)
        ...     print(fs.checkpoint.latest(directory).name)
        step2
    """
    if spec is not None:
        return connect_ranks(bind_spec(spec), "checkpoint.latest", TIMEOUT).run_on_first(
            lambda: latest(directory), "checkpoint.latest"
        )
    for _, path, damage in reversed(list_committed(Path(os.fsdecode(directory)))):
        if not damage:
            return path
        warnings.warn(f"checkpoint.latest: passed over a damaged checkpoint: {damage}", stacklevel=2)
    return None


def clean(directory: str | os.PathLike[str], keep: int = 3) -> list[Path]:
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
        >>> model = torch.nn.Linear(2, 2)
        >>> spec = fs.policies.whole()(model)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (1, 2, 3):
        ...         _ = fs.checkpoint.save(f"{directory}/step{step}", fs.shard(model, spec), spec)
        ...     print([path.name for path in fs.checkpoint.clean(directory, keep=2)])
        ['step1']
    """
    if keep < 1:
        raise ValueError(f"checkpoint.clean: expected to keep at least 1, got {keep}")
    directory = Path(os.fsdecode(directory))
    complete = [path for _, path, damage in list_committed(directory) if not damage]
    removed: list[Path] = []
    for path in complete[:-keep]:
        moved = make_staging_path(path)
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
    for path in directory.iterdir() if directory.is_dir() else ():
        if is_directory(path) and STAGING_NAME.fullmatch(path.name) and _is_left_over(path) and _remove(path):
            removed.append(path)
    return removed


def _remove(path: Path) -> bool:
    """Remove a directory, and return whether it is gone."""
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def _is_left_over(path: Path) -> bool:
    """Return whether the writer of a staging directory has ended."""
    if path.name.endswith(NEW_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            return time.time() - path.stat().st_mtime > LOCK_SECONDS
    return path.name.endswith(PARTIAL_SUFFIX) and not _is_locked(path / LOCK)


def _is_locked(lock: Path) -> bool:
    """Return whether a process holds the lock, or may hold it; False if the file is gone."""
    try:
        handle = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False  # a checkpoint that `clean` has begun to remove
    except PermissionError:
        return True  # another user's, who may be writing
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
