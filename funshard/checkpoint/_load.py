"""load: read a checkpoint as a state of any spec; each rank reads what its slices overlap with."""

from __future__ import annotations

import json
import os
import reprlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec
from .._core.spec import PartitionSpec
from .._torch.tracing import LOGGER, phase
from . import _directory
from ._directory import MANIFEST, AnyPath, CheckpointError, DamagedError, Manifest, checksum, open_path
from ._leaves import MAX_DIMS, PER_RANK, Box, TensorLeaf, TensorRange, ValueLeaf, check_tiles, clean_name
from ._ranks import TIMEOUT, Ranks
from ._tree import Description, Template, check_rank_count, find_value, iter_plain_values, rebuild, select_part, without_memory


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
        like: A state with the structure, shapes and dtypes of the result; tensors may be on the meta device. It is needed for
            containers of other classes, and for states of optimizers of matrices, in 8 bits, or that other programs wrote.
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

    loader, _ = ranks.decide(open_checkpoint, _check_identities, "checkpoint.load")
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
    for found in reversed(_directory.list_committed(open_path(os.fsdecode(directory)))):
        if not (damage := found.find_damage()):
            return found.path
        warnings.warn(f"checkpoint.latest: passed over a damaged checkpoint: {damage}", stacklevel=2)
    return None


def _check_identities(found: list[tuple[Any, str]]) -> None:
    if other := next((rank for rank, (identity, _) in enumerate(found) if identity != found[0][0]), 0):
        raise ValueError(
            f"expected one checkpoint and names of one like= on all ranks, got on rank 0 {found[0][1]!r}, on rank {other} "
            f"{found[other][1]!r}, with other contents or names; latest(directory, spec) gives all ranks one path"
        )


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
        self.identity = sorted(manifest.files), manifest.sequence, checksum(names.encode())
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


# --- The index of the tensors in the files ---


class RecordPlace(NamedTuple):
    """The place of a box: a file of the directory, the offset of its elements there, and their checksum."""

    file: str
    offset: int
    checksum: int
    record: tuple[int, int] = (0, 0)
    """The offset and the bytes of the record around the elements: in torch's metadata, and not in the manifest."""


class StoredTensor(NamedTuple):
    """A tensor in the files: its names, and the boxes of it that they have, each in row-major order."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Mapping[Box, RecordPlace]


def parse_tensors(path: AnyPath, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name. Raises CheckpointError for an index that `save` does not write."""
    if manifest.tensors is None:
        raise CheckpointError(
            f"{path}: expected an index of tensors in '{MANIFEST}', which version 0.2 did not write: "
            "fs.checkpoint.from_dcp(path, new_path) writes such a checkpoint anew"
        )
    out: dict[str, StoredTensor] = {}
    try:
        for names, kind, shape, boxes in manifest.tensors:
            if not all(isinstance(name, str) for name in names):
                raise DamagedError(f"a tensor: expected names, got {reprlib.repr(names)}")
            places: dict[Box, RecordPlace] = {}
            for offsets, sizes, file, offset, crc32 in boxes:
                if not _directory.is_plain_name(file):
                    raise DamagedError(f"a box: expected a file of the checkpoint's directory, got {reprlib.repr(file)}")
                box = Box(_parse_numbers(offsets, len(shape)), _parse_numbers(sizes, len(shape)))
                offset, crc32 = _parse_numbers([offset, crc32], 2)
                places[box] = RecordPlace(file, offset, crc32)
            found = StoredTensor(tuple(names), _directory.find_dtype(kind), _parse_numbers(shape, len(shape)), places)
            out |= dict.fromkeys(names, found)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the index of tensors in its file '{MANIFEST}' is damaged: {error}") from error
    return out


def _parse_numbers(found: Any, length: int) -> tuple[int, ...]:
    if type(found) is not list or len(found) != length or length > MAX_DIMS:
        raise DamagedError(f"a tensor: expected {min(length, MAX_DIMS)} sizes or places, got {reprlib.repr(found)}")
    if wrong := [x for x in found if type(x) is not int or not 0 <= x < _directory.SIZE_LIMIT]:
        raise DamagedError(f"a size or place: expected a number that is no less than 0, got {reprlib.repr(wrong[0])}")
    return tuple(found)


def plan_reads(part: TensorRange, data: Tensor, stored: Iterable[Box]) -> Iterator[tuple[Box, tuple[slice, ...], Tensor]]:
    """Yield the stored boxes that overlap with a range, the place of the overlap in each, and the memory for it."""
    for box, view in part.iter_boxes(data):
        for other in stored:
            begins = [*map(max, box.offsets, other.offsets)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                at, here = (
                    tuple(slice(i - k, j - k) for i, j, k in zip(begins, ends, start, strict=True))
                    for start in (other.offsets, box.offsets)
                )
                yield other, at, view[here]
