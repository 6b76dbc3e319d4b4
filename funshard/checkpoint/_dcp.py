"""The format of torch.distributed.checkpoint: what is written of a tensor, torch's metadata, and checkpoints of others."""

from __future__ import annotations

import os
import pickle
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from .. import _torch
from ._directory import PIECE_BYTES, AnyPath, CheckpointError, Target, checksum, dtype_name, open_path, read_manifest
from ._leaves import Box, TensorRange, check_tiles, split_range

# --- A record: what torch.save writes of a tensor, about 1,500 bytes around the elements, but straight from its memory ---

_SMALL = 1 << 12
"""More bytes than any other write of torch.save has."""


class Record:
    """A file as torch.save sees it, which finds the elements of a tensor in what is written.

    Attributes:
        nbytes: The number of bytes of the record.
        begin: The offset of the elements in it.
        checksum: That of the elements.
    """

    def __init__(self, file: BinaryIO, elements: memoryview) -> None:
        self._file, self._elements = file, elements
        self.nbytes = self.begin = self.checksum = 0

    def write(self, raw: memoryview) -> int:
        """Write bytes. torch.save writes the elements at once."""
        found = len(raw) == len(self._elements) and (len(raw) > _SMALL or raw == self._elements)
        self.begin = self.nbytes if found else self.begin
        for begin in range(0, len(raw), PIECE_BYTES):
            piece = raw[begin : begin + PIECE_BYTES]
            self.checksum = checksum(piece, self.checksum if begin else 0) if found else self.checksum
            self._file.write(piece)
        self.nbytes += len(raw)
        return len(raw)


def write_record(file: BinaryIO, tensor: Tensor) -> Record:
    """Write a tensor as torch.save does one of the host.

    torch.save writes a whole storage: so it is given one that has the elements alone, in the memory where they are.
    """
    dense = tensor.contiguous().cpu()
    raw = _torch.host_bytes(dense)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    alone = flat.view(dense.dtype).view(dense.shape) if raw else torch.empty(dense.shape, dtype=dense.dtype)
    _torch.save_unchecked(alone, record := Record(file, raw))
    return record


# --- What describes the files: torch's metadata, and the index of the manifest ---


class WrittenBox(NamedTuple):
    """A box of a stored tensor, and the place of its record."""

    names: tuple[str, ...]
    """The tensor's name, and its other names."""
    shape: tuple[int, ...]
    """The tensor's."""
    dtype: torch.dtype
    box: Box
    file: str
    offset: int
    length: int
    begin: int
    """The offset of the elements in the file."""
    checksum: int


def write_boxes(path: AnyPath, boxes: Iterable[tuple[TensorRange, Box, Tensor]]) -> list[WrittenBox]:
    """Write boxes of ranges to a file, flush it, and return where each is."""
    out: list[WrittenBox] = []
    at = 0
    with path.open("wb", buffering=1 << 17) as file:
        for part, box, tensor in boxes:
            record = write_record(file, tensor)
            place = path.name, at, record.nbytes, at + record.begin, record.checksum
            out.append(WrittenBox(part.names, part.shape, tensor.dtype, box, *place))
            at += record.nbytes
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
    return out


def pack_index(boxes: Sequence[WrittenBox]) -> tuple[bytes, dict[str, int], list[Any]]:
    """Return the content of torch's metadata file, the sizes of the data files, and the manifest's index of tensors.

    Raises ValueError if a tensor's boxes do not tile it.
    """
    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    sizes: dict[str, int] = {}
    index: list[Any] = []
    by_name: dict[str, list[WrittenBox]] = defaultdict(list)
    for box in boxes:
        by_name[box.names[0]].append(box)
        sizes[box.file] = max(sizes.get(box.file, 0), box.offset + box.length)
    for name, written in by_name.items():
        first = written[0]
        try:
            check_tiles(first.shape, [box.box for box in written])
        except ValueError as error:
            raise ValueError(f"'{name}', of all ranks: {error}") from error
        places = [[*one.box, one.file, one.begin, one.checksum] for one in written]
        index.append([first.names, dtype_name(first.dtype), first.shape, places])
        chunks = [of_torch.ChunkStorageMetadata(*map(torch.Size, box.box)) for box in written]
        for alias in first.names:
            properties = of_torch.TensorProperties(first.dtype)
            tensors[alias] = of_torch.TensorStorageMetadata(properties, torch.Size(first.shape), chunks)
            for box, chunk in zip(written, chunks, strict=True):
                at = of_torch.MetadataIndex(alias, chunk.offsets)
                storage[at] = _torch.make_storage_info(box.file, box.offset, box.length)
    names = {name: (name,) for name in tensors}
    save_id = of_torch.StorageMeta(save_id=str(uuid.uuid4()))  # no path, whose class not every Python has
    metadata = of_torch.Metadata(tensors, planner_data=names, storage_data=storage, storage_meta=save_id)
    return pickle.dumps(metadata), sizes, index


# --- Checkpoints of others ---

_LOADED_BYTES = 1 << 30
"""The bytes of tensors that `from_dcp` has in memory, unless one tensor has more."""


def from_dcp(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> AnyPath:
    """Write a checkpoint of torch.distributed.checkpoint, or one of funshard 0.2, anew as `save` does, and return its path.

    torch reads the source, and its ``.metadata`` is a pickle, which **runs what is in it**: only give what you trust. Call it
    in one process, of the Python and torch that wrote the source. It has about 1 GiB of tensors in memory at a time.

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
        found = reader.read_metadata().state_dict_metadata
    except ImportError as error:
        raise CheckpointError(f"{source}: expected the Python and torch that wrote it, got others: {error}") from error
    manifest = read_manifest(open_path(os.fsdecode(source)))
    place = Target(open_path(os.fsdecode(target)))
    try:
        written = write_boxes(place.path / f"__0_0{place.suffix}.distcp", _load_boxes(reader, found))
        place.commit(manifest.state if manifest else {}, *pack_index(written))
    except CheckpointException as error:  # no Exception
        raise CheckpointError(
            f"{source}: torch.distributed.checkpoint cannot read it: {str(error).splitlines()[-1]}"
        ) from error
    finally:
        place.abandon()
    return place.path


def _load_boxes(reader: FileSystemReader, found: Mapping[str, Any]) -> Iterator[tuple[TensorRange, Box, Tensor]]:
    """Yield the boxes of all tensors, some of which torch loads at a time."""
    remaining = [(name, x) for name, x in found.items() if isinstance(x, of_torch.TensorStorageMetadata)]
    while remaining:
        tensors: dict[str, Any] = {}
        nbytes = 0
        while remaining and nbytes <= _LOADED_BYTES:
            name, x = remaining.pop()
            tensors[name] = torch.empty(x.size, dtype=x.properties.dtype)
            nbytes += tensors[name].nbytes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that this is one process
            load(tensors, storage_reader=reader, no_dist=True)
        for name, tensor in tensors.items():
            part = TensorRange((name,), tuple(tensor.shape), tuple(range(tensor.dim())), tensor.numel())
            for begin, end in split_range(0, tensor.numel(), tensor.dtype.itemsize):
                yield from ((part, box, view) for box, view in part.iter_boxes(tensor.view(-1), begin, end))
