"""save and from_dcp: write a state to a directory, by all ranks in parallel, in the format of torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import traceback
import types
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from .. import _torch
from .._core.checks import bind_spec
from .._core.layout import rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._sharding.sharding import hash_bits
from .._spec.codec import storage_codec
from .._torch.tracing import LOGGER, phase
from . import _directory
from ._directory import AnyPath, CheckpointError, Target, open_path
from ._leaves import COMMON, NUMBER, SLICE, Box, TensorRange, ValueLeaf, check_storable, check_tiles
from ._load import RecordPlace, StoredTensor
from ._ranks import TIMEOUT, Ranks
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
            print(f"checkpoint.save: {self.path}: the save ended with an error:", file=sys.stderr)
            traceback.print_exception(error)
            self._ended.set_exception(error)


_pending: set[Saving] = set()
"""The asynchronous saves that nothing has waited for."""


def save(
    path: str | os.PathLike[str], state: Any, spec: PartitionSpec, *, asynchronous: bool = False, timeout: float = TIMEOUT
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
    ranks = Ranks(spec, "checkpoint.save", timeout, path=path, asynchronous=bool(asynchronous))
    saving = Saving(target)
    undo = contextlib.ExitStack()  # called if the save fails

    def begin() -> tuple[tuple[Description, Boxes, Target | None], Any]:
        for earlier in list(_pending):
            earlier.wait()
        with phase("checkpoint plan"), torch.no_grad():
            tree, place = Description(state, spec), None
            ranges, texts = summarize(tree, spec, ranks.size)
            boxes = share_boxes(ranges)
            if ranks.rank == 0:
                place = Target(target, ranks.name)
                undo.callback(place.abandon)
        if asynchronous:
            with phase("checkpoint copy"):
                boxes = stage(boxes)
        return (tree, boxes, place), (texts, [leaf.data["values"][0] for leaf in tree.per_rank_values])

    def compare(found: list[Any]) -> list[Any]:
        every, per_rank = zip(*found, strict=True)
        hint = (
            "; wrap what is each rank's own in checkpoint.per_rank, with one structure and shape on all or as a string "
            "(json.dumps), and save what is sharded by another spec with that"
        )
        compare_texts([*every], hint)
        return [*zip(*per_rank, strict=True)]

    with undo:
        (tree, boxes, place), per_rank = ranks.decide(begin, compare, "checkpoint.save")
        for leaf, values in zip(tree.per_rank_values, per_rank, strict=True):
            leaf.data["values"] = values
        file = target / f"__{ranks.rank}_0_{ranks.name}.distcp"
        undo_write = undo.pop_all()

    def commit(every: list[list[StoredTensor]]) -> None:
        assert place is not None
        place.commit(tree.json, *pack_index(chain.from_iterable(every)))

    def write() -> None:
        with undo_write, phase("checkpoint write"):
            ranks.decide(lambda: (None, write_boxes(file, boxes)), commit, "checkpoint.save: nothing was saved")
            undo_write.pop_all()
        LOGGER.info("checkpoint.save: %s is complete", target)

    if asynchronous:
        _pending.add(saving)
        threading.Thread(target=saving._run, args=(write,), name="funshard.checkpoint").start()  # which the process waits for
    else:
        saving._ended.set_result(write())
    return saving


# --- What the ranks compare of their states ---

Part = tuple[str, str]
"""The name of a part of the state, and "", or which slice it is of a unit's that several ranks may hold."""


def summarize(tree: Description, spec: PartitionSpec, ranks: int) -> tuple[list[tuple[TensorRange, Tensor]], dict[Part, str]]:
    """Return the ranges of stored tensors that this rank has, with their elements, and a text for each part to compare."""
    mesh, ranges = spec.bound_mesh, list[tuple[TensorRange, Tensor]]()
    texts = {(where, ""): text for where, text in tree.containers.items()}
    for leaf, value in zip(tree.leaves, tree.values, strict=True):
        name = leaf.names[0][0]
        if isinstance(leaf, ValueLeaf):
            texts[name, ""] = "each rank's own, no tensor" if leaf.is_per_rank else json.dumps(leaf.data["value"])
            continue
        check_storable(value, f"state '{name}'")
        if leaf.unit and leaf.is_encoded:
            raise ValueError(
                f"unit '{leaf.unit.key}' is at rest in {storage_codec(leaf.unit)}, encoded from the frozen model: expected a "
                "state without it; save fs.partition(params, spec)[0]"
            )
        index, slices = rank_along(leaf.unit.distinct_axes, mesh, rank_coords(mesh, None)) if leaf.unit else (0, 1)
        is_slice = leaf.kind == SLICE
        texts[name, ""] = f"{leaf.kind}, {list(leaf.shapes[0])} {leaf.dtype}"
        if leaf.kind in (NUMBER, COMMON) or (is_slice and slices < ranks):
            part = f", slice {index} of unit '{leaf.unit.key}'" if is_slice and leaf.unit else ""
            texts[name, part] = f"{texts[name, '']} of digest {int(hash_bits(value.detach())):x}"
        ranges.extend(leaf.divide(value))
    names = Counter(name for leaf in tree.leaves for names in leaf.names for name in names)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"state '{twice[0]}': two of its leaves have this name: expected names without such dots")
    return ranges, texts


def compare_texts(every: list[dict[Part, str]], hint: str = "") -> None:
    """Raise ValueError, naming the part, where the texts of ranks differ."""
    seen = {part: (0, text) for part, text in every[0].items()}
    for rank, texts in enumerate(every):
        absent = {part: "nothing" for part in every[0] if not part[1] and part not in texts}
        for (name, part), text in (texts | absent).items():
            other, expected = seen.setdefault((name, part), (rank, text) if part else (0, "nothing"))
            if text != expected:
                remedy = "; average replicas first, as by fs.averaging.average" if part else hint
                got = f"got on rank {other} {expected}, on rank {rank} {text}"
                raise ValueError(f"state '{name}'{part}: expected the same on all ranks, {got}{remedy}")


# --- Write this rank's boxes ---


Boxes = list[tuple[TensorRange, Box, Tensor]]
"""Boxes with the ranges that they are of, and their elements."""


def share_boxes(parts: Iterable[tuple[TensorRange, Tensor]]) -> Boxes:
    """Return the boxes that this rank writes: of the ranks that hold a piece, the one with the fewest bytes writes it."""
    written: dict[tuple[int, tuple[str, ...] | None], list[int]] = {}  # by the number of holders, and their axes
    boxes: Boxes = []
    for part, data in parts:
        nbytes = written.setdefault((part.holders, part.axes), [0] * part.holders)
        for piece, elements in part.split(data):
            holder = min(range(part.holders), key=nbytes.__getitem__)
            nbytes[holder] += elements.nbytes
            if holder == part.holder:
                boxes += [(part, box, view) for box, view in piece.iter_boxes(elements)]
    return boxes


_staging_memory = [torch.empty(0, dtype=torch.uint8)]
"""The memory of the last asynchronous save. The next one waits for it and uses it again: to allocate costs more than to copy."""


def stage(boxes: Boxes) -> Boxes:
    """Return the boxes with their elements copied to memory of the host, so that later changes to them are not saved."""
    ends = [0, *accumulate(-(-view.nbytes // 16) * 16 for *_, view in boxes)]  # at multiples of 16 bytes
    devices = {view.device for *_, view in boxes if view.device.type != "cpu"}
    memory = _staging_memory[0]
    if len(memory) < ends[-1] or (devices and not memory.is_pinned()):
        memory = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=bool(devices))  # pinned for copies from a device
    _staging_memory[0] = memory
    staged: Boxes = []
    for begin, (part, box, view) in zip(ends, boxes, strict=False):
        copied = memory[begin : begin + view.nbytes].view(view.dtype).view(view.shape)
        staged.append((part, box, copied.copy_(view, non_blocking=True)))
    for device in devices:
        torch.get_device_module(device).synchronize(device)
    return staged


# --- A record: what torch.save writes of a tensor, about 1,500 bytes around the elements, but straight from its memory ---


def write_record(file: BinaryIO, tensor: Tensor) -> tuple[int, int, int]:
    """Write a tensor as torch.save does one of the host. Return the bytes, and the offset and checksum of its elements.

    torch.save writes a whole storage, at once: so it is given one that has the elements alone, in the memory where they are.
    """
    dense = tensor.contiguous().cpu()
    elements = _torch.host_bytes(dense)
    nbytes = offset = crc32 = 0

    def write(raw: memoryview) -> int:
        nonlocal nbytes, offset, crc32
        is_found = len(raw) == len(elements) and (len(raw) > 4096 or raw == elements)  # all else that it writes is short
        offset = nbytes if is_found else offset
        for begin in range(0, len(raw), _directory.PIECE_BYTES):
            piece = raw[begin : begin + _directory.PIECE_BYTES]
            crc32 = _directory.checksum(piece, crc32 if begin else 0) if is_found else crc32
            file.write(piece)
        nbytes += len(raw)
        return len(raw)

    flat = torch.frombuffer(elements, dtype=torch.uint8) if elements else torch.empty(0, dtype=torch.uint8)
    alone = flat.view(dense.dtype).view(dense.shape) if elements else torch.empty(dense.shape, dtype=dense.dtype)
    _torch.save_unchecked(alone, types.SimpleNamespace(write=write))
    return nbytes, offset, crc32


# --- What describes the files: torch's metadata, and the index of the manifest ---


def write_boxes(path: AnyPath, boxes: Iterable[tuple[TensorRange, Box, Tensor]]) -> list[StoredTensor]:
    """Write boxes of ranges to a file, flush it, and return where each is."""
    out: list[StoredTensor] = []
    at = 0
    with path.open("wb", buffering=1 << 17) as file:
        for part, box, tensor in boxes:
            nbytes, begin, crc32 = write_record(file, tensor)
            place = RecordPlace(path.name, at + begin, crc32, (at, nbytes))
            out.append(StoredTensor(part.names, tensor.dtype, part.shape, {box: place}))
            at += nbytes
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
    return out


def pack_index(written: Iterable[StoredTensor]) -> tuple[bytes, dict[str, int], list[Any]]:
    """Return the content of torch's metadata file, the sizes of the data files, and the manifest's index of tensors.

    Raises ValueError if a tensor's boxes do not tile it.
    """
    metadata = of_torch.Metadata({}, planner_data={}, storage_data={})
    metadata.storage_meta = of_torch.StorageMeta(save_id=str(uuid.uuid4()))  # no path, whose class not every Python has
    sizes: dict[str, int] = {}
    index: list[Any] = []
    by_name: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in written:
        by_name[tensor.names[0]].append(tensor)
    for name, parts in by_name.items():
        names, dtype, shape, _ = parts[0]
        boxes = [pair for part in parts for pair in part.boxes.items()]
        try:
            check_tiles(shape, [box for box, _ in boxes])
        except ValueError as error:
            raise ValueError(f"'{name}', of all ranks: {error}") from error
        index.append([names, _directory.dtype_name(dtype), shape, [[*box, *place[:3]] for box, place in boxes]])
        chunks = [of_torch.ChunkStorageMetadata(*map(torch.Size, box)) for box, _ in boxes]
        described = of_torch.TensorStorageMetadata(of_torch.TensorProperties(dtype), torch.Size(shape), chunks)
        metadata.state_dict_metadata |= dict.fromkeys(names, described)
        metadata.planner_data |= {alias: (alias,) for alias in names}
        for (_, place), chunk in zip(boxes, chunks, strict=True):
            sizes[place.file] = max(sizes.get(place.file, 0), sum(place.record))
            stored = _torch.make_storage_info(place.file, *place.record)
            metadata.storage_data |= {of_torch.MetadataIndex(alias, chunk.offsets): stored for alias in names}
    return pickle.dumps(metadata), sizes, index


# --- Checkpoints of others ---


def from_dcp(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> AnyPath:
    """Write a checkpoint of torch.distributed.checkpoint, or one of funshard 0.2, anew as `save` does, and return its path.

    torch reads the source, and its ``.metadata`` is a pickle, which **runs what is in it**: only give what you trust. Call it
    in one process, of the Python and torch that wrote the source. It has one tensor in memory at a time.

    Args:
        source: The directory of the checkpoint.
        target: A path where nothing is.

    Returns:
        The path of the target, for `load`. A state of funshard 0.2 is as it was; of another program there are tensors alone,
        which ``only=`` or ``like=`` find by their names.

    Raises:
        FileNotFoundError, CheckpointError: If the source is no checkpoint of torch.distributed.checkpoint, or a damaged one.
        FileExistsError: If something is at the target.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 2))
        >>> with tempfile.TemporaryDirectory() as directory:  # these are files of torch.distributed.checkpoint, too
        ...     theirs = fs.checkpoint.save(f"{directory}/theirs", {"step": torch.tensor(3)}, spec).wait()
        ...     path = fs.checkpoint.from_dcp(theirs, f"{directory}/anew")
        ...     print(fs.checkpoint.load(path, spec))
        {'step': tensor(3)}
    """
    reader = FileSystemReader(os.fspath(source))
    try:
        metadata = reader.read_metadata()
    except ImportError as error:
        raise CheckpointError(f"{source}: expected the Python and torch that wrote it, got others: {error}") from error
    reader.read_metadata = lambda *args, **kwargs: metadata  # else torch would read it again for each tensor
    manifest = _directory.read_manifest(open_path(os.fsdecode(source)))
    place = Target(open_path(os.fsdecode(target)))
    try:
        written = write_boxes(place.path / f"__0_0{place.suffix}.distcp", _load_boxes(reader, metadata.state_dict_metadata))
        place.commit(manifest.state if manifest else {}, *pack_index(written))
    except CheckpointException as error:  # no Exception
        raise CheckpointError(
            f"{source}: torch.distributed.checkpoint cannot read it: {str(error).splitlines()[-1]}"
        ) from error
    finally:
        place.abandon()
    return place.path


def _load_boxes(reader: FileSystemReader, found: Mapping[str, Any]) -> Iterator[tuple[TensorRange, Box, Tensor]]:
    """Yield the boxes of all tensors, of which torch loads one at a time."""
    for name, x in found.items():
        if isinstance(x, of_torch.TensorStorageMetadata):
            tensor = torch.empty(x.size, dtype=x.properties.dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that this is one process
                load({name: tensor}, storage_reader=reader, no_dist=True)
            whole = TensorRange((name,), tuple(tensor.shape), tuple(range(tensor.dim())), tensor.numel())
            for piece, elements in whole.split(tensor.view(-1)):
                yield from ((whole, box, view) for box, view in piece.iter_boxes(elements))
