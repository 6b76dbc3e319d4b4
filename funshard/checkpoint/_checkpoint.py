"""save and load: write a state to a directory, by all ranks in parallel, and read it as a state of any spec."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

from .. import _torch
from .._core.checks import bind_spec
from .._core.layout import rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._sharding.sharding import hash_bits
from .._spec.codec import storage_codec
from .._torch.tracing import LOGGER, phase
from . import _directory
from ._directory import MANIFEST, AnyPath, CheckpointError, DamagedError, Target, checksum, open_path
from ._leaves import (
    COMMON,
    NUMBER,
    PER_RANK,
    SLICE,
    Box,
    RecordPlace,
    StoredTensor,
    TensorLeaf,
    TensorRange,
    ValueLeaf,
    check_storable,
    check_tiles,
    clean_name,
    pack_index,
    parse_tensors,
    plan_reads,
    write_boxes,
)  # fmt: skip
from ._ranks import TIMEOUT, Ranks
from ._tree import Description, Template, check_rank_count, find_value, iter_plain_values, rebuild, select_part, without_memory


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
        CheckpointError, OSError: For a failure while files are written, on every rank. Nothing new is there unless it says so.

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
            ranks.decide(lambda: (None, write_boxes(file, boxes)), commit, f"checkpoint.save: nothing was saved at {path}")
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
"""The memory of the last asynchronous save, which the next one waits for and uses again: new memory costs more than a copy."""


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


# --- load ---


def load(
    path: str | os.PathLike[str],
    spec: PartitionSpec,
    *,
    only: str | None = None,
    like: Any = None,
    check: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """Return the state that `save` wrote to a directory, sharded by this spec. Nothing in the files is run.

    The policy, the mesh, `P` and the number of ranks may differ from those of the save. Each rank reads what overlaps with its
    slices, and raises the errors of all. Checkpoints of FSDP1, FSDP2 and DDP, which `from_dcp` has written anew, are read by
    the names of their parameters: ``only="model"`` returns the shards of ``{"model": state_dict}``. See ``checkpoints.md``.

    Args:
        path: The directory of the checkpoint, the same one on all ranks, or a copy of it.
        spec: A bound spec, all ranks of whose mesh call this.
        only: The path of a part of the state to read, such as ``"params"`` or ``"opt.ema"``.
        like: A state with the structure, shapes and dtypes of the result, which is all that is read; tensors may be on the meta
            device. It is needed for containers of other classes, and for states of optimizers of matrices, in 8 bits, or that
            other programs wrote.
        check: Whether to compare the checksums of the records that are read.
        timeout: The seconds that ranks wait for a lost rank.

    Returns:
        The state, or the part of it. Tensors are on the mesh's device if they were on an accelerator, else on the host.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: Naming the parameter, for one that only the checkpoint or the spec has, or of another shape or dtype.
        CheckpointError: Naming tensor and file, for damage.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        >>> one, two = fs.policies.whole()(model), fs.by_path({"1": fs.P("shard")})(model)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.save(f"{directory}/step3", fs.shard(model, one), one).wait()
        ...     print(sorted(fs.checkpoint.load(path, two)))
        ['', '1']
    """
    spec = bind_spec(spec)
    if only is not None and not isinstance(only, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"checkpoint.load: only: expected the path of a part of the state, as 'params', got {only!r}")
    path = os.fsdecode(path)
    ranks = Ranks(spec, "checkpoint.load", timeout, only=only)

    def open_checkpoint() -> tuple[_Loader, tuple[Any, str]]:
        loader = _Loader(open_path(path), spec, ranks, only, like, check)
        return loader, (loader.identity, path)

    def check_identities(found: list[tuple[Any, str]]) -> None:
        if other := next((rank for rank, (identity, _) in enumerate(found) if identity != found[0][0]), 0):
            raise ValueError(
                f"expected one checkpoint and names of one like= on all ranks, got on rank 0 {found[0][1]!r}, on rank {other} "
                f"{found[other][1]!r}, with other contents or names; latest(directory, spec) gives all ranks one path"
            )

    loader, _ = ranks.decide(open_checkpoint, check_identities, "checkpoint.load")
    state = ranks.run(loader.read, "checkpoint.load")
    LOGGER.info("checkpoint.load: %s is read", path)
    return state


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
        ranks = Ranks(bind_spec(spec), "checkpoint.latest", TIMEOUT)
        return ranks.run_on_first(lambda: latest(directory), "checkpoint.latest")
    for found in reversed(_directory.list_manifests(open_path(os.fsdecode(directory)))):
        if not (damage := found.find_damage()):
            return found.path
        warnings.warn(f"checkpoint.latest: passed over a damaged checkpoint: {damage}", stacklevel=2)
    return None


Reads = list[tuple[tuple[slice, ...], Tensor]]
"""Parts of a box to read, each by its place in the box and the memory for it."""


class _Loader:
    def __init__(self, directory: AnyPath, spec: PartitionSpec, ranks: Ranks, only: str | None, like: Any, check: bool) -> None:
        self._spec, self._ranks = spec, ranks
        if (manifest := _directory.read_manifest(directory)) is None:
            raise FileNotFoundError(
                f"{directory}: expected a checkpoint, which has a file '{MANIFEST}'; is it a directory of several? What "
                "torch.distributed.checkpoint wrote fs.checkpoint.from_dcp(path, new_path) writes anew"
            )
        self._directory, self._check_sums, self._tensors = directory, check, parse_tensors(directory, manifest)
        cleaned = Counter(map(clean_name, self._tensors))
        own = {key: key for key in self._tensors}
        self._keys = {name: key for key in own if cleaned[name := clean_name(key)] == 1} | own
        """The tensors' names by the names that they are found by, perhaps without the prefixes of wrappers."""
        path, units = tuple(only.split(".")) if only else (), None
        saved: dict[str, Any] = {}
        if manifest.state:
            try:
                saved = dict(iter_plain_values(manifest.state, ranks.rank))
                if like is None:
                    template = Template(select_part(manifest.state, only or ""), spec, ranks.rank, ranks.size, path)
                    like, units = template.state, template.units
            except (DamagedError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # `save` wrote no such tree
                text = f"{directory}: the state in its file '{MANIFEST}' is damaged: {type(error).__name__}: {error}"
                raise CheckpointError(text) from error
        elif like is None:  # another program's state_dict
            like, units = {unit.key: without_memory(*spec.stored(unit)) for unit in spec}, {path}
        self._like, leaves = like, Description(like, spec, path, units).leaves
        self._values = [find_value(leaf, saved) if isinstance(leaf, ValueLeaf) else None for leaf in leaves]
        self._leaves = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, ValueLeaf)}
        for leaf in self._leaves.values():
            self._check(leaf)
        names = json.dumps([leaf.names for leaf in leaves])
        self.identity = sorted(manifest.files), manifest.order[0], checksum(names.encode())
        """What is equal on all ranks: the checkpoint, by its files' unique names, and the leaves to read."""

    def _check(self, leaf: TensorLeaf) -> None:
        for i, (names, shape) in enumerate(zip(leaf.names, leaf.shapes, strict=True)):
            if (key := self._find_key(names)) is None:
                raise ValueError(
                    f"tensor '{names[0]}' is not in the checkpoint: expected {list(shape)} {leaf.dtype}, got none but "
                    f"{sorted(self._tensors)[:3]} and so on: was another model saved, has it a state in another codec or "
                    "memory order (fs.optim.decode_state and encode_state convert)?"
                )
            found = self._tensors[key]
            try:
                check_tiles(found.shape, found.boxes)
            except ValueError as error:
                raise CheckpointError(f"tensor '{key}' of the checkpoint is damaged: {error}") from error
            if leaf.kind == PER_RANK and found.shape[1:] == shape[1:]:
                check_rank_count(names[0], found.shape[0], self._ranks.size)
            leaf.check_stored(i, found, self._spec, "the checkpoint: was another model saved?")

    def read(self) -> Any:
        with torch.no_grad(), phase("checkpoint read"):
            encoded = [[i] for i, leaf in self._leaves.items() if leaf.is_encoded]
            for numbers in ([i for i in self._leaves if [i] not in encoded], *encoded):  # these alone: for memory
                memory = {i: self._leaves[i].allocate() for i in numbers}
                self._read_ranges([part for i in numbers for part in self._leaves[i].divide(memory[i])])
                for i in numbers:
                    self._values[i] = self._leaves[i].to_state(memory.pop(i), self._spec)
        return rebuild(self._like, iter(self._values))

    def _find_key(self, names: Sequence[str]) -> str | None:
        return next((self._keys[name] for name in names if name in self._keys), None)

    def _read_ranges(self, parts: Iterable[tuple[TensorRange, Tensor]]) -> None:
        wanted: dict[str, dict[tuple[RecordPlace, str, Box], Reads]] = defaultdict(lambda: defaultdict(list))
        for part, data in parts:
            key = self._find_key(part.names) or ""
            boxes = self._tensors[key].boxes
            for box, at, target in plan_reads(part, data, boxes):
                wanted[boxes[box].file][boxes[box], key, box].append((at, target))
        for name, found in wanted.items():
            (_, key, _), *_ = found
            try:
                with _directory.open_regular(self._directory / name) as file:
                    for (place, key, box), reads in sorted(found.items(), key=lambda pair: pair[0]):
                        self._read_box(file, place, box, self._tensors[key].dtype, reads)
            except FileNotFoundError as error:
                raise CheckpointError(f"tensor '{key}': file '{name}' of the checkpoint is missing") from error
            except (DamagedError, OSError) as error:
                raise CheckpointError(f"tensor '{key}' in file '{name}' of the checkpoint is damaged: {error}") from error

    def _read_box(self, file: BinaryIO, place: RecordPlace, box: Box, dtype: torch.dtype, reads: Reads) -> None:
        nbytes, target = box.numel * dtype.itemsize, reads[0][1]
        if place.offset + nbytes > file.seek(0, os.SEEK_END):
            raise DamagedError("it was cut short")
        is_whole = len(reads) == 1 and tuple(target.shape) == box.sizes
        is_direct = is_whole and target.is_contiguous() and target.device.type == "cpu"
        memory = target if is_direct else torch.empty(nbytes, dtype=torch.uint8)
        raw = _torch.host_bytes(memory)
        file.seek(place.offset)
        at = crc32 = 0
        while at < nbytes and (read := file.readinto(raw[at : at + _directory.PIECE_BYTES])):  # pyright: ignore[reportAttributeAccessIssue]
            crc32 = checksum(raw[at : at + read], crc32) if self._check_sums else place.checksum
            at += read
        if at < nbytes:
            raise DamagedError("it was cut short")
        if crc32 != place.checksum:
            raise DamagedError("its checksum is not that in 'funshard.json': expected the file of this save, is it another's?")
        if not is_direct:
            values = memory.view(dtype).view(box.sizes)
            for part, target in reads:
                target.copy_(values[part])


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
                load_by_torch({name: tensor}, storage_reader=reader, no_dist=True)
            whole = TensorRange((name,), tuple(tensor.shape), tuple(range(tensor.dim())), tensor.numel())
            for piece, elements in whole.split(tensor.view(-1)):
                yield from ((whole, box, view) for box, view in piece.iter_boxes(elements))
