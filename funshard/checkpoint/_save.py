"""save: write a state to a directory, by all ranks in parallel."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._core.checks import bind_spec
from .._core.layout import rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._sharding.sharding import hash_bits
from .._spec.codec import storage_codec
from .._torch.tracing import LOGGER, phase
from ._dcp import WrittenBox, pack_index, write_boxes
from ._directory import AnyPath, SavedError, Target, open_path
from ._leaves import COMMON, NUMBER, SLICE, Box, Leaf, TensorRange, ValueLeaf, check_storable, split_range
from ._ranks import TIMEOUT, Ranks, connect_ranks
from ._tree import Description


class Saving:
    """A checkpoint that is being written, or was.

    Attributes:
        path: The path of the checkpoint once it is complete.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path, self._ended = path, Future[None]()

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return self._ended.done()

    def wait(self) -> AnyPath:
        """Return the checkpoint's path once the save has ended. Raises the error of the save, on every rank."""
        error = self._ended.exception()
        _pending.discard(self)
        if error is not None:
            raise error
        return self.path

    def _run(self, write: Callable[[], None]) -> None:
        try:
            self._ended.set_result(write())
        except BaseException as error:
            self._ended.set_exception(error)
            if not threading.main_thread().is_alive():  # the exit handler may have run before
                _print_unclaimed_errors()


_pending: set[Saving] = set()
"""The asynchronous saves that nothing has waited for."""


@atexit.register
def _print_unclaimed_errors() -> None:
    for saving in [saving for saving in _pending if saving.done()]:
        _pending.discard(saving)
        if error := saving._ended.exception():
            ended = "is there, after an error" if isinstance(error, SavedError) else "was not saved"
            print(f"checkpoint.save: {saving.path} {ended}:", file=sys.stderr)
            traceback.print_exception(error)


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
    in the unit's state}``. The manifest is written last: a checkpoint is complete or absent. See ``checkpoints.md``.

    Args:
        path: A path where nothing is, on a file system that all ranks see, or a URL of fsspec. An empty directory is filled,
            and with a warning a checkpoint replaced that `latest` passes over as damaged; else FileExistsError.
        state: A pytree. A mapping by the keys of units is sharded; all ranks have equal values in the rest, but for what
            `per_rank` marks.
        spec: The bound spec of the slices.
        asynchronous: Whether to return after this rank's share is copied to host memory, which a thread then writes. Wait for
            it before ``destroy_process_group``.
        timeout: The seconds that ranks wait for a lost rank. They wait twice as long for one that never calls this.

    Returns:
        The save, whose ``wait()`` returns the path or raises its error. Without a ``wait``, the next `save` raises it.

    Raises:
        ValueError, TypeError: For a slice of another spec, values that differ between ranks, or that cannot be saved.
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
    ranks = connect_ranks(spec, "checkpoint.save", timeout, path=path, asynchronous=bool(asynchronous))
    saving = Saving(target)
    undo = contextlib.ExitStack()  # called if the save fails

    def begin() -> tuple[tuple[_StateSummary, RangeWriter, Target | None], Any]:
        for earlier in list(_pending):
            earlier.wait()
        with phase("checkpoint plan"):
            summary, place = _StateSummary(state, spec, ranks), None
            writer = RangeWriter(summary.ranges)
            undo.callback(writer.release)
            if ranks.rank == 0:
                place = Target(target, ranks.name)
                undo.callback(place.abandon)
        if asynchronous:
            with phase("checkpoint copy"):
                writer.stage()
        return (summary, writer, place), (summary.common, summary.per_rank, summary.replicas)

    with undo:
        (summary, writer, place), per_rank = ranks.decide(begin, _compare_states, "checkpoint.save")
        tree = summary.fill_tree(per_rank)
        file = target / f"__{ranks.rank}_0_{ranks.name}.distcp"
        undo_write = undo.pop_all()

    def commit(every: list[list[WrittenBox]]) -> None:
        assert place is not None
        place.commit(tree, *pack_index([box for boxes in every for box in boxes]))

    def write() -> None:
        with undo_write, phase("checkpoint write"):
            ranks.decide(lambda: (None, writer.write(file)), commit, "checkpoint.save: nothing was saved")
            undo_write.pop_all()
            writer.release()
        LOGGER.info("checkpoint.save: %s is complete", target)

    if asynchronous:
        _pending.add(saving)
        threading.Thread(target=saving._run, args=(write,), name="funshard.checkpoint").start()  # which the process waits for
    else:
        saving._ended.set_result(write())
    return saving


# --- Summarize what a rank writes of a state, and check that all ranks agree on it ---


class _StateSummary:
    """The parts of a state that this rank can write, and what the ranks compare of the state."""

    def __init__(self, state: Any, spec: PartitionSpec, ranks: Ranks) -> None:
        self._spec, self._tree = spec, Description(state, spec)
        self.ranges: list[tuple[TensorRange, Tensor]] = []
        """The ranges of stored tensors that this rank holds, and their elements."""
        self.common = dict(self._tree.containers)
        """A text for each name that must be equal on all ranks."""
        self.replicas: dict[tuple[str, str, int], int] = {}
        """A digest of each slice that several ranks hold, by the unit's key, the slice's name and its number."""
        self.per_rank: dict[str, Any] = {}
        """The plain values that are this rank's own, by name."""
        with torch.no_grad():
            for leaf, value in zip(self._tree.leaves, self._tree.values, strict=True):
                self._add(leaf, value, ranks)
        names = Counter(name for leaf in self._tree.leaves for names in leaf.names for name in names)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"state '{twice[0]}': two of its leaves have this name: expected names without such dots")

    def fill_tree(self, per_rank: list[dict[str, Any]]) -> Any:
        """Return the JSON tree of the state, with the values that are each rank's own, by rank."""
        for leaf in self._tree.leaves:
            if isinstance(leaf, ValueLeaf) and leaf.is_per_rank:
                leaf.data["values"] = [values[leaf.names[0][0]] for values in per_rank]
        return self._tree.json

    def _add(self, leaf: Leaf, value: Any, ranks: Ranks) -> None:
        name = leaf.names[0][0]
        if isinstance(leaf, ValueLeaf):
            self.common[name] = "each rank's own, no tensor" if leaf.is_per_rank else json.dumps(leaf.data["value"])
            self.per_rank |= {name: leaf.data["values"][0]} if leaf.is_per_rank else {}
            return
        check_storable(value, f"state '{name}'")
        text = f"{leaf.kind}, {list(leaf.shapes[0])} {leaf.dtype}"
        if leaf.unit and leaf.is_encoded:
            raise ValueError(
                f"unit '{leaf.unit.key}' is at rest in {storage_codec(leaf.unit)}, encoded from the frozen model: expected a "
                "state without it; save fs.partition(params, spec)[0]"
            )
        if leaf.unit and leaf.kind == SLICE:
            mesh = self._spec.bound_mesh
            index, slices = rank_along(leaf.unit.distinct_axes, mesh, rank_coords(mesh, None))
            if slices < ranks.size:
                self.replicas[leaf.unit.key, name, index] = int(hash_bits(value.detach()))
        elif leaf.kind in (NUMBER, COMMON):
            text += f" of digest {int(hash_bits(value.detach())):x}"
        self.common[name] = text
        self.ranges.extend(leaf.divide(value))


def _compare_states(found: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return the values that are each rank's own, by rank. Raises ValueError where the states of ranks differ."""
    every, per_rank, replicas = zip(*found, strict=True)
    for name in dict.fromkeys(name for one in every for name in one) if any(one != every[0] for one in every) else ():
        texts = [one.get(name, "nothing") for one in every]
        if rank := next((rank for rank, text in enumerate(texts) if text != texts[0]), 0):
            raise ValueError(
                f"state '{name}': expected the same on all ranks, got on rank 0 {texts[0]}, on rank {rank} {texts[rank]}; wrap "
                "what is each rank's own in checkpoint.per_rank, with one structure and shape on all or as a string "
                "(json.dumps), and save what is sharded by another spec with that"
            )
    seen: dict[tuple[str, str, int], tuple[int, int]] = {}
    for rank, slices in enumerate(replicas):
        for at, digest in slices.items():
            other, expected = seen.setdefault(at, (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"unit '{at[0]}' of state '{at[1]}': expected the same on all replicas, got others on rank {rank} "
                    f"than on rank {other}; average them first, as by fs.averaging.average"
                )
    return [*per_rank]


# --- Write this rank's boxes ---


class RangeWriter:
    """A writer of this rank's share of some ranges: of the ranks that hold a piece, the one with the fewest bytes writes it."""

    def __init__(self, parts: Iterable[tuple[TensorRange, Tensor]]) -> None:
        written: dict[tuple[int, tuple[str, ...] | None], list[int]] = {}  # by the number of holders, and their axes
        self._memory: Tensor | None = None
        self.boxes: list[tuple[TensorRange, Box, Tensor]] = []
        """The boxes with the ranges that they are of, and their elements."""
        for part, data in parts:
            size, nbytes = data.dtype.itemsize, written.setdefault((part.holders, part.axes), [0] * part.holders)
            for begin, end in split_range(part.begin, part.begin + part.numel, size):
                holder = min(range(part.holders), key=nbytes.__getitem__)
                nbytes[holder] += (end - begin) * size
                if holder == part.holder:
                    self.boxes += [(part, box, view) for box, view in part.iter_boxes(data, begin, end)]

    def stage(self) -> None:
        """Copy the tensors to memory of the host, so that later changes to them are not saved.

        The next save uses the memory again: to allocate it costs more than the copy.
        """
        ends = [0, *accumulate(-(-view.nbytes // 16) * 16 for *_, view in self.boxes)]  # at multiples of 16 bytes
        devices = {view.device for *_, view in self.boxes if view.device.type != "cpu"}
        memory = _staging_memory.pop() if _staging_memory else None
        if memory is None or len(memory) < ends[-1] or (devices and not memory.is_pinned()):
            memory = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=bool(devices))  # pinned for copies from a device
        for i, (part, box, view) in enumerate(self.boxes):
            staged = memory[ends[i] : ends[i] + view.nbytes].view(view.dtype).view(view.shape)
            self.boxes[i] = part, box, staged.copy_(view, non_blocking=True)
        self._memory = memory
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    def release(self) -> None:
        """Drop the tensors, and leave the staging memory to the next save."""
        self.boxes.clear()
        if self._memory is not None:
            _staging_memory[:] = [self._memory]

    def write(self, path: AnyPath) -> list[WrittenBox]:
        """Write the boxes to a file, flush it, and return where each is."""
        return write_boxes(path, self.boxes)


_staging_memory: list[Tensor] = []
"""The staging memory of a save that has ended, if there is one."""
