"""save: a state of sharded and other values to a directory, by all ranks in parallel."""

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

from .._spec.spec import PartitionSpec, bind_spec
from ._errors import CheckpointError, SavedError
from ._files.planners import Writes
from ._files.staging import StagingDirectory
from ._files.writer import Writer
from ._ranks.ranks import TIMEOUT, Ranks, ranks_of
from ._state.summary import Planned, planned

__all__ = ["Saving", "save"]


class Saving:
    """A checkpoint that is being written, or was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Where the checkpoint is, when it is there. Raises the error that it ended with, on every rank."""
        if self._thread is not None:
            self._thread.join()
        _pending.discard(self)
        if self._error is not None:
            raise self._error
        return self.path

    def _start(self, write: Callable[[], None]) -> None:
        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error
                if not threading.main_thread().is_alive():  # nobody will ask
                    _tell()

        self._thread = threading.Thread(target=run, name="funshard.checkpoint")  # not a daemon: the process waits for it
        _pending.add(self)
        self._thread.start()


_pending: set[Saving] = set()
"""What was started asynchronously and nobody has waited for."""


@atexit.register
def _tell() -> None:
    """What has gone wrong that nobody has asked for: the process ends."""
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
    """Writes a state to the directory ``path``, by all ranks of the spec's mesh in parallel, each byte once.

    ``state`` is any pytree of dicts, lists, tuples, named tuples and optree's registered classes. A mapping in it by the keys
    of units is taken for sharded: parameters, an optimizer's state, averages. What it holds is stored under the model's own
    parameter names, ``{path in the state}.{parameter}.{path in the unit's state}``, as whole tensors for every reader of
    torch.distributed.checkpoint (DCP): each slice as the N-d boxes that it covers, tied parameters under all of their names.
    All else all ranks must have alike, and it is stored once: tensors, numbers, strings, bytes, None. What is each rank's
    own is said by `per_rank`. Tensors are read, not changed; no gradient is kept. Units at rest in a codec are made anew
    from the model that was frozen, and leave with `partition`.

    The files are DCP's; ``funshard.json`` beside them has the state's structure and plain values. They are written into a
    directory aside, checked, flushed, and renamed to ``path`` as the last thing: a checkpoint is there as a whole or not at
    all, and none that is whole is written over. One that `latest` passes over as damaged gives up its place, with a warning:
    when the new one is there: a loop that went on from the one before comes by the same step again. What goes wrong on one
    rank is an error on all of them: so is a rank that is lost, for which the others wait ``timeout`` seconds, and twice as long
    for one that does not come at all.

    ``asynchronous`` returns when this rank's share is copied to memory of the host; a thread writes it, over a process group
    of its own, while training goes on, also in place. `Saving.wait` gives the path or the error; otherwise an error comes up
    at the next `save`. A save before the last one has ended waits for it, or with ``when_busy="raise"`` raises
    CheckpointError. The process does not end before it is written; wait for it before ``destroy_process_group``.

    Raises FileExistsError where there is anything else at ``path``, ValueError, naming unit and leaf, for a slice that is not
    of this spec and mesh and for what ranks have differently, TypeError for what is none of the above, CheckpointError for
    what fails while it is written: on every rank, and nothing new is at ``path`` then. Two errors can come when it is there
    already, and say so or that a rank was lost: where the rename cannot be flushed, and where a rank is lost that waits for
    the end. `latest` knows.

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
    if "://" in os.fspath(path):
        raise ValueError(f"checkpoint.save: expected a path in a file system that all ranks see, got {os.fspath(path)!r}")
    if when_busy not in ("wait", "raise"):
        raise ValueError(f"checkpoint.save: when_busy: expected 'wait' or 'raise', got {when_busy!r}")
    ranks = ranks_of(spec, "checkpoint.save", timeout)
    writing = ranks.in_background() if asynchronous else ranks
    target = Path(path).absolute()
    saving = Saving(target)
    begun = _Begun()

    def begin() -> Planned:
        _last_one_over(when_busy)
        plan = planned(state, spec, ranks)
        begun.writes = plan.writes
        begun.staging = StagingDirectory(target, over_damaged=True) if ranks.rank == 0 else None
        if asynchronous:
            plan.writes.stage()
        return plan

    def said(plan: Planned) -> tuple[str, str, Any]:
        return os.fspath(path), str(begun.staging and begun.staging.directory), plan.said()

    def write() -> None:
        with begun.or_undone():
            _write(directory, plan.writes, tree, begun.staging, writing)
            plan.writes.ended()

    with begun.or_undone():
        plan, told = ranks.heard(begin, "checkpoint.save", said)
        _check_paths([theirs for theirs, *_ in told])
        tree = plan.agreed([theirs for *_, theirs in told], ranks)
        directory = Path(told[0][1])
    if asynchronous:
        saving._start(write)
    else:
        write()
    return saving


class _Begun:
    """What a save has taken until it ends."""

    def __init__(self) -> None:
        self.writes: Writes | None = None
        self.staging: StagingDirectory | None = None

    @contextlib.contextmanager
    def or_undone(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            if self.writes is not None:
                self.writes.ended()
            if self.staging is not None:
                self.staging.abandon()
            raise


def _last_one_over(when_busy: str) -> None:
    for saving in list(_pending):
        if when_busy == "raise" and not saving.done():
            raise CheckpointError(f"the save to {saving.path} is still being written: expected its end; call its wait()")
        saving.wait()


def _check_paths(paths: list[str]) -> None:
    if other := next((rank for rank, path in enumerate(paths) if path != paths[0]), 0):
        raise ValueError(
            f"checkpoint.save: expected one path on all ranks, got on rank 0 {paths[0]!r}, on rank {other} {paths[other]!r}"
        )


def _write(directory: Path, writes: Writes, tree: Any, staging: StagingDirectory | None, ranks: Ranks) -> None:
    """Each rank writes its file, and tells the first what is where in it, which describes and commits it."""
    writer = Writer(directory, ranks.rank)

    def write() -> tuple[SavePlan, list[WriteResult]]:
        plan = writes.create_local_plan()
        return plan, writer.write_data(plan, writes).wait()

    def commit(told: list[tuple[SavePlan, list[WriteResult]]]) -> None:
        assert staging is not None
        plans, metadata = writes.create_global_plan([plan for plan, _ in told])
        writer.prepare_global_plan(plans)
        writer.finish(metadata, [results for _, results in told])
        staging.commit(tree, writer.written)

    ranks.ended_by_first(write, commit, "checkpoint.save", unless_saved="nothing was saved")
