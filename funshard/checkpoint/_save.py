"""save: write a state to a directory, by all ranks in parallel."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from .._core.checks import bind_spec
from .._core.layout import rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._sharding.hashes import hash_bits
from .._spec.codec import storage_codec
from .._torch.phases import LOGGER, phase
from ._errors import SavedError
from ._files.directory import RemoteStaging, StagingDirectory
from ._files.remote import AnyPath, RemotePath, open_path
from ._files.writer import CheckpointWriter, RangeSavePlanner
from ._ranks import TIMEOUT, Ranks, connect_ranks
from ._state.json_tree import tree_to_json
from ._state.leaves import Leaf, OwnedLeaf, SliceLeaf, TensorLeaf, TensorRange, ValueLeaf, check_storable, leaf_names
from ._state.tree import ContainerNode, Node, describe, iter_leaves, plain_to_json, walk


class Saving:
    """A checkpoint that is being written, or was.

    Attributes:
        path: The path of the checkpoint once it is complete.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> AnyPath:
        """Return the checkpoint's path once the save has ended. Raises the error of the save, on every rank."""
        self._join()
        _pending.discard(self)
        if self._error is not None:
            raise self._error
        return self.path

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _start(self, write: Callable[[], None]) -> None:

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
    timeout: float = TIMEOUT,
) -> Saving:
    """Write a state to the directory ``path``, by all ranks of the spec's mesh in parallel, each byte once.

    The files are those of torch.distributed.checkpoint (DCP), with whole tensors named ``{path in the state}.{parameter}.{path
    in the unit's state}``. A checkpoint appears at ``path`` by one rename: completely or not at all. See ``checkpoints.md``.

    Args:
        path: A path where nothing is, on a file system that all ranks see, or a URL of fsspec, where the manifest is written
            last. An empty directory there is replaced, and with a warning a checkpoint that `latest` passes over as damaged.
        state: A pytree. A mapping by the keys of units is sharded; all ranks have equal values in the rest, but for what
            `per_rank` marks.
        spec: The bound spec of the slices.
        asynchronous: Whether to return after this rank's share is copied to host memory, which a thread then writes. Wait for
            it before ``destroy_process_group``.
        timeout: The seconds that ranks wait for a lost rank. They wait twice as long for one that never calls this.

    Returns:
        The save, whose ``wait()`` returns the path or raises its error. Without a ``wait``, the next `save` raises it.

    Raises:
        FileExistsError: If anything else is at ``path``.
        ValueError: Naming unit and leaf, for a slice of another spec or mesh, and for values that differ between ranks.
        TypeError: For a value that cannot be saved.
        CheckpointError: For a failure while files are written, on every rank. Nothing new is at ``path`` unless it says so.

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
    target = open_path(path) if "://" in path else Path(path).absolute()
    for earlier in list(_pending):
        earlier._join()  # before its process group is used again; `begin` raises its error on all ranks
    ranks = connect_ranks(
        spec, "checkpoint.save", timeout, path=path, asynchronous=bool(asynchronous), in_background=bool(asynchronous)
    )
    saving = Saving(target)
    undo = contextlib.ExitStack()  # called if the save fails

    def begin() -> tuple[_StateSummary, RangeSavePlanner, StagingDirectory | RemoteStaging | None]:
        for earlier in list(_pending):
            earlier.wait()
        with phase("checkpoint plan"):
            summary, staging = _summarize_state(state, spec, ranks), None
            planner = RangeSavePlanner(summary.ranges)
            undo.callback(planner.release)
            if ranks.rank == 0:
                if isinstance(target, RemotePath):
                    staging = RemoteStaging(target)
                else:
                    staging = StagingDirectory(target, over_damaged=True)
                undo.callback(staging.abandon)
        if asynchronous:
            with phase("checkpoint copy"):
                planner.stage()
        return summary, planner, staging

    with undo:
        (summary, planner, staging), messages = ranks.run_and_exchange(
            begin,
            "checkpoint.save",
            lambda begun: (begun[2] and (str(begun[2].directory), begun[2].suffix), begun[0].message()),
        )
        tree = summary.check_agreement([message for _, message in messages], ranks)
        directory, suffix = messages[0][0] or ("", "")
        writer = CheckpointWriter(open_path(directory), ranks.rank, suffix)
        undo_write = undo.pop_all()

    def write() -> None:
        with undo_write, phase("checkpoint write"):
            _write_checkpoint(writer, planner, tree, staging, ranks)
            undo_write.pop_all()
            planner.release()
        LOGGER.info("checkpoint.save: %s is complete", target)

    if asynchronous:
        saving._start(write)
    else:
        write()
    return saving


def _write_checkpoint(
    writer: CheckpointWriter,
    planner: RangeSavePlanner,
    tree: Any,
    staging: StagingDirectory | RemoteStaging | None,
    ranks: Ranks,
) -> None:
    """Write this rank's file. The first rank then writes the metadata of all files, and commits the directory."""

    def write() -> tuple[SavePlan, list[WriteResult], dict[str, dict[int, int]]]:
        plan = planner.create_local_plan()
        return plan, writer.write_items(plan, planner), writer.checksums

    def commit(every: list[Any]) -> None:
        assert staging is not None
        writer.write_metadata([plan for plan, *_ in every], [results for _, results, _ in every])
        staging.commit(tree, writer.sizes, {name: found for *_, own in every for name, found in own.items()})

    ranks.run_and_finish(write, commit, "checkpoint.save", unless_saved="nothing was saved")


# --- Summarize what a rank writes of a state, and check that all ranks agree on it ---

RankMessage: TypeAlias = tuple[str, dict[str, Any], dict[str, tuple[str, int, int]]]
"""What a rank sends of its summary: a digest of ``common``, then ``per_rank`` and ``replicas``."""


@dataclass(frozen=True)
class _StateSummary:
    """The parts of a state that this rank can write, and what the ranks compare of the state."""

    spec: PartitionSpec
    node: Node
    ranges: list[TensorRange] = field(default_factory=list)
    """The ranges of stored tensors that this rank holds."""
    common: dict[str, str] = field(default_factory=dict)
    """A text for each name that must be equal on all ranks."""
    per_rank: dict[str, Any] = field(default_factory=dict)
    """The plain values that are each rank's own, by name."""
    replicas: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """For each slice that several ranks hold, by name: the unit's key, the slice's number, and a digest of its values."""

    def message(self) -> RankMessage:
        return hashlib.sha256(json.dumps(self.common).encode()).hexdigest(), self.per_rank, self.replicas

    def check_agreement(self, messages: list[RankMessage], ranks: Ranks) -> Any:
        """Return the JSON tree of the state. Raises ValueError, on every rank, if the messages of the ranks disagree."""
        if any(digest != messages[0][0] for digest, *_ in messages):
            _raise_difference(ranks.gather(self.common))
        _check_replicas([replicas for *_, replicas in messages])
        every = {name: [values[name] for _, values, _ in messages] for name in self.per_rank}
        return tree_to_json(self.node, self.spec, every)

    def _add(self, leaf: Leaf, value: Any, ranks: Ranks) -> None:
        name = leaf_names(leaf)[0]
        if isinstance(value, Tensor):
            check_storable(value, f"state '{name}'")
        if isinstance(leaf, ValueLeaf):
            if leaf.is_per_rank:
                self.common[name] = "each rank's own, no tensor"
                self.per_rank[name] = leaf.value
            else:
                self.common[name] = json.dumps(plain_to_json(leaf.value, name))
            return
        match leaf:
            case SliceLeaf():
                self.common[name] = f"slices {leaf.dtype} of unit '{leaf.unit.key}'"
                if leaf.is_encoded:
                    raise ValueError(
                        f"unit '{leaf.unit.key}' is at rest in {storage_codec(leaf.unit)}, encoded from the frozen model: "
                        "expected a state without it; save fs.partition(params, spec)[0]"
                    )
                mesh = self.spec.bound_mesh
                index, slices = rank_along(leaf.unit.distinct_axes, mesh, rank_coords(mesh, None))
                if slices < ranks.size:
                    self.replicas[name] = leaf.unit.key, index, int(hash_bits(value.detach()))
            case TensorLeaf(is_per_rank=True):
                self.common[name] = f"each rank's own, of one shape on all, {list(leaf.shape)} {leaf.dtype}"
            case OwnedLeaf():
                self.common[name] = f"of its owners, {list(leaf.shape)} {leaf.dtype}"
            case _:
                self.common[name] = f"{list(value.shape)} {value.dtype} of digest {int(hash_bits(value.detach())):x}"
        self.ranges.extend(leaf.ranges(value, self.spec, ranks.rank, ranks.size))


def _summarize_state(state: Any, spec: PartitionSpec, ranks: Ranks) -> _StateSummary:
    node, values = describe(state, spec)
    summary = _StateSummary(spec, node)
    for path, found in walk(node):
        if isinstance(found, ContainerNode):
            argument = "" if found.argument is None else f" of {found.argument}"
            summary.common[path] = f"a container, {found.kind or 'of a class of its own'}{argument}"
    with torch.no_grad():
        for leaf, value in zip(iter_leaves(node), values, strict=True):
            summary._add(leaf, value, ranks)
    names = Counter(name for leaf in iter_leaves(node) for name in leaf_names(leaf))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"state '{twice[0]}': two of its leaves have this name: expected names without such dots")
    return summary


def _raise_difference(every: list[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for one in every for name in one):
        texts = [one.get(name, "nothing") for one in every]
        if rank := next((rank for rank, text in enumerate(texts) if text != texts[0]), 0):
            raise ValueError(
                f"state '{name}': expected the same on all ranks, got on rank 0 {texts[0]}, on rank {rank} {texts[rank]}; wrap "
                "what is each rank's own in checkpoint.per_rank, with one structure and shape on all or as a string "
                "(json.dumps), and save what is sharded by another spec with that"
            )


def _check_replicas(every: list[dict[str, tuple[str, int, int]]]) -> None:
    """Check that replicas are equal, since each writes a part. Raises ValueError, naming the unit, otherwise."""
    for name in every[0]:
        first: dict[int, tuple[int, int]] = {}
        for rank, replicas in enumerate(every):
            key, index, digest = replicas[name]
            other, expected = first.setdefault(index, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"unit '{key}' of state '{name}': expected the same on all replicas, got others on rank {rank} than on "
                    f"rank {other}; average them first, as by fs.averaging.average"
                )
