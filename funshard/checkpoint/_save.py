"""save: write a state to a directory, by all ranks in parallel."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from .._core.checks import bind_spec
from .._core.spec import PartitionSpec
from .._torch.phases import LOGGER, phase
from ._errors import CheckpointError, SavedError
from ._files.directory import StagingDirectory
from ._files.planners import RangeSavePlanner
from ._files.writer import CheckpointWriter
from ._ranks import TIMEOUT, Ranks, connect_ranks
from ._state.describe import StateSummary, summarize_state

__all__ = ["Saving", "save"]


class Saving:
    """A checkpoint that is being written, or was.

    Attributes:
        path: The path of the checkpoint once it is complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the checkpoint's path once the save has ended. Raises the error of the save, on every rank."""
        if self._thread is not None:
            self._thread.join()
        _pending.discard(self)
        if self._error is not None:
            raise self._error
        return self.path

    def _start(self, write: Callable[[], None]) -> None:
        """Run ``write`` in a thread that the process waits for, and keep its error."""

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error
                if not threading.main_thread().is_alive():  # the exit handler may have run before
                    _print_unclaimed_errors()

        self._thread = threading.Thread(target=run, name="funshard.checkpoint")  # not a daemon: the process waits for it
        _pending.add(self)
        self._thread.start()


_pending: set[Saving] = set()
"""The asynchronous saves that nothing has waited for."""


@atexit.register
def _print_unclaimed_errors() -> None:
    for saving in [saving for saving in _pending if saving._error is not None]:
        _pending.discard(saving)
        ended = "is there, after an error" if isinstance(saving._error, SavedError) else "was not saved"
        print(f"checkpoint.save: {saving.path} {ended}:", file=sys.stderr)
        traceback.print_exception(saving._error)


def save(
    path: str | os.PathLike[str],
    state: Any,
    spec: PartitionSpec,
    *,
    asynchronous: bool = False,
    when_busy: Literal["wait", "raise"] = "wait",
    timeout: float = TIMEOUT,
) -> Saving:
    """Write a state to the directory ``path``, by all ranks of the spec's mesh in parallel, each byte once.

    The files are those of torch.distributed.checkpoint (DCP), and any reader of it sees whole tensors under the model's own
    names, ``{path in the state}.{parameter}.{path in the unit's state}``. ``funshard.json`` beside them has the structure and
    the plain values. A checkpoint appears at ``path`` by one rename: completely or not at all. See ``checkpoints.md``.

    Args:
        path: A path where nothing is, on a file system that all ranks see. An empty directory there is replaced, and with a
            warning a checkpoint that `latest` passes over as damaged. The new directory has the old one's owner and mode.
        state: A pytree of dicts, lists, tuples, named tuples and optree's registered classes. A mapping by the keys of units
            is sharded: parameters, an optimizer's state, averages. All ranks have equal values in the rest, which is stored
            once: tensors, numbers, strings, bytes, None. `per_rank` marks what is each rank's own. Parameters at rest in a
            codec are left out, by `partition`.
        spec: The bound spec of the slices.
        asynchronous: Whether to return after this rank's share is copied to host memory. A thread writes it, over a process
            group of its own, while training goes on. Wait for it before ``destroy_process_group``.
        when_busy: Whether a save before the end of the last one waits for it, or raises CheckpointError.
        timeout: The seconds that ranks wait for a lost rank. They wait twice as long for one that never calls this.

    Returns:
        The save, whose ``wait()`` returns the path or raises its error. Without a ``wait``, the next `save` raises it.

    Raises:
        FileExistsError: If anything else is at ``path``.
        ValueError: Naming unit and leaf, for a slice of another spec or mesh, and for values that differ between ranks. For
            a mount point, and the working directory.
        TypeError: For a value that cannot be saved.
        CheckpointError: For a failure while the files are written. Every rank raises the errors of all, and nothing new is at
            ``path``, except if only the last flush fails or a rank is lost that waits for the end; the error says so.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> state = {"params": {"": torch.arange(8.0)}, "step": 3}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.save(f"{directory}/step3", state, spec).wait()
        ...     print(path.name, fs.checkpoint.load(path, spec))
        step3 {'params': {'': tensor([0., 1., 2., 3., 4., 5., 6., 7.])}, 'step': 3}
    """
    spec = bind_spec(spec)
    path = os.fsdecode(path)
    if "://" in path:
        raise ValueError(f"checkpoint.save: expected a path in a file system that all ranks see, got {path!r}")
    if when_busy not in ("wait", "raise"):
        raise ValueError(f"checkpoint.save: when_busy: expected 'wait' or 'raise', got {when_busy!r}")
    ranks = connect_ranks(spec, "checkpoint.save", timeout, path=path, asynchronous=bool(asynchronous))
    writing = ranks.with_background_group() if asynchronous else ranks
    target = Path(path).absolute()
    saving = Saving(target)
    resources = _SaveResources()

    def begin() -> StateSummary:
        _finish_last(when_busy)
        with phase("checkpoint plan"):
            summary = summarize_state(state, spec, ranks)
            resources.planner = RangeSavePlanner(summary.ranges)
            resources.staging = StagingDirectory(target, over_damaged=True) if ranks.rank == 0 else None
        if asynchronous:
            with phase("checkpoint copy"):
                resources.planner.stage()
        return summary

    def message(summary: StateSummary) -> tuple[str, Any]:
        return str(resources.staging and resources.staging.directory), summary.message()

    def write() -> None:
        assert resources.planner is not None
        with resources.release_on_error(), phase("checkpoint write"):
            _write_checkpoint(directory, resources.planner, tree, resources.staging, writing)
            resources.planner.release()
        LOGGER.info("checkpoint.save: %s is complete", target)

    with resources.release_on_error():
        summary, messages = ranks.run_and_exchange(begin, "checkpoint.save", message)
        tree = summary.check_agreement([theirs for _, theirs in messages], ranks)
        directory = Path(messages[0][0])
    if asynchronous:
        saving._start(write)
    else:
        write()
    return saving


class _SaveResources:
    def __init__(self) -> None:
        self.planner: RangeSavePlanner | None = None
        self.staging: StagingDirectory | None = None

    @contextlib.contextmanager
    def release_on_error(self) -> Generator[None]:
        """Release the memory and remove the directory if the block raises."""
        try:
            yield
        except BaseException:
            if self.planner is not None:
                self.planner.release()
            if self.staging is not None:
                self.staging.abandon()
            raise


def _finish_last(when_busy: str) -> None:
    """Wait for the last save, or raise CheckpointError if it is still being written."""
    for saving in list(_pending):
        if when_busy == "raise" and not saving.done():
            raise CheckpointError(f"the save to {saving.path} is still being written: expected its end; call its wait()")
        saving.wait()


def _write_checkpoint(
    directory: Path, planner: RangeSavePlanner, tree: Any, staging: StagingDirectory | None, ranks: Ranks
) -> None:
    """Write this rank's file. The first rank then writes the metadata of all files, and commits the directory."""
    writer = CheckpointWriter(directory, ranks.rank)

    def write() -> tuple[SavePlan, list[WriteResult], dict[str, dict[int, int]]]:
        plan = planner.create_local_plan()
        return plan, writer.write_items(plan, planner), writer.checksums

    def commit(every: list[tuple[SavePlan, list[WriteResult], dict[str, dict[int, int]]]]) -> None:
        assert staging is not None
        writer.write_metadata([plan for plan, *_ in every], [results for _, results, _ in every])
        staging.commit(tree, writer.sizes, {name: found for *_, own in every for name, found in own.items()})

    ranks.run_and_finish(write, commit, "checkpoint.save", unless_saved="nothing was saved")
