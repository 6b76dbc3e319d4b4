"""The checkpoints in a directory: the latest one, what is wrong with the others, and what may go."""

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

from ..._spec.spec import PartitionSpec, bind_spec
from .._errors import CheckpointError, NewerError
from .._ranks.ranks import TIMEOUT, ranks_of
from .manifest import MANIFEST, read_manifest

__all__ = ["LOCK", "NEW", "clean", "committed", "find_damage", "is_directory", "latest", "staging_path"]

ASIDE = ".partial"
"""How the name of a directory ends that is being written, or was when its writer ended."""
NEW = ".new"
"""How it ends until the directory is locked."""
OWN_NAMES = re.compile(rf"\..+\.[0-9a-f]{{12}}({re.escape(ASIDE)}|{re.escape(NEW)})", re.DOTALL)
"""The names that `staging_path` makes; other directories may have similar ones."""
JUST_MADE = 60
"""Seconds that this may take."""
LOCK = ".lock"


def is_directory(path: Path) -> bool:
    """Whether it is one itself: a link, such as to the best checkpoint, is its maker's."""
    return path.is_dir() and not path.is_symlink()


def staging_path(path: Path) -> Path:
    """A new name beside the path: of what is to be there, and of what no longer is."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{ASIDE}")


def committed(directory: Path) -> list[tuple[tuple[float, int], Path, str]]:
    """Return ``(order, path, what is wrong)`` of what `save` has put into a directory, the oldest first.

    What is wrong is "" for a checkpoint that is whole, as far as the sizes of its files say. The order is the sequence and,
    since two jobs may give the same one to two checkpoints, the time of the manifest; that of a damaged one is infinity.
    """
    found: list[tuple[tuple[float, int], Path, str]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_directory(path) or OWN_NAMES.fullmatch(path.name):
            continue
        try:
            if manifest := read_manifest(path):
                order = manifest.sequence, (path / MANIFEST).stat().st_mtime_ns
                found.append((order, path, _wrong_file(path, manifest.files)))
        except (CheckpointError, OSError) as error:
            if os.path.lexists(path / MANIFEST):
                found.append(((math.inf, 0), path, str(error)))
    return sorted(found)


def find_damage(path: Path) -> str:
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
        return ranks_of(bind_spec(spec), "checkpoint.latest", TIMEOUT).on_first(lambda: latest(directory), "checkpoint.latest")
    for _, path, wrong in reversed(committed(Path(directory))):
        if not wrong:
            return path
        warnings.warn(f"checkpoint.latest: passed over a damaged checkpoint: {wrong}", stacklevel=2)
    return None


def clean(directory: str | os.PathLike[str], keep: int = 3) -> list[Path]:
    """Removes all but the ``keep`` last whole checkpoints in the directory, and what saves that were cut short have left.

    Gives back what it has removed. What another process is writing stays, and so do damaged checkpoints, links, and what
    `save` has not written. On several ranks call it on one. ValueError for ``keep < 1``.

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
    directory = Path(directory)
    good = [path for _, path, wrong in committed(directory) if not wrong]
    removed: list[Path] = []
    for path in good[:-keep]:
        moved = staging_path(path)
        with contextlib.suppress(FileNotFoundError):  # another process cleans too
            os.rename(path, moved)  # at once, so that nobody takes a half of it for a checkpoint
            shutil.rmtree(moved, ignore_errors=True)
            removed.append(path)
    for path in directory.iterdir() if directory.is_dir() else ():
        if is_directory(path) and OWN_NAMES.fullmatch(path.name) and _is_left_over(path):
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
