"""Write the files of torch.distributed.checkpoint as torch.save does, but straight from the tensors' memory."""

from __future__ import annotations

import io
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import skip_data

from ... import _torch
from .planners import RangeSavePlanner, join_plans
from .untrusted import checksum

__all__ = ["CheckpointWriter", "RecordLayout", "make_record_layout", "write_record"]

BUFFER_BYTES = 1 << 17
"""The size of the file buffer, which joins small writes."""
PIECE_BYTES = 1 << 19
"""The bytes that are added to the checksum and then written: the second read finds them in the cache."""


class CheckpointWriter(FileSystemWriter):
    """A writer of one file on each rank.

    After `write_items`, each rank has the checksums of its file's tensors in ``checksums``, by file and offset. After
    `write_metadata`, the first rank has the sizes of all files in ``sizes``.
    """

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=False, overwrite=False)
        self.set_up_storage_writer(rank == 0, rank=rank)
        self.sizes: dict[str, int] = {}
        self.checksums: dict[str, dict[int, int]] = {}

    def write_items(self, plan: SavePlan, planner: RangeSavePlanner) -> list[WriteResult]:
        """Write the items to this rank's file, flush it, and return where each item is."""
        name = f"__{self.rank}_0.distcp"
        layouts: dict[Any, RecordLayout] = {}
        results: list[WriteResult] = []
        tensors = map(planner.resolve_data, plan.items)
        at, checksums = 0, self.checksums.setdefault(name, {})
        with (Path(self.path) / name).open("wb", buffering=BUFFER_BYTES) as file:
            for item, tensor in zip(plan.items, _iter_on_host(tensors), strict=True):
                length, checksums[at] = write_record(file, tensor, layouts)
                results.append(WriteResult(item.index, length, _torch.make_storage_info(name, at, length)))
                at += length
            file.flush()
            os.fsync(file.fileno())
        return results

    def storage_meta(self) -> StorageMeta:
        """Leave out the path, which is not the checkpoint's final one, and whose class only Python 3.13 has."""
        return StorageMeta(save_id=self.save_id)

    def write_metadata(self, plans: list[SavePlan], results: list[list[WriteResult]]) -> None:
        """Write the metadata file, which also has the other names of tied parameters. `StagingDirectory.commit` flushes it."""
        metadata, aliases = join_plans(plans)
        aliased: list[WriteResult] = []
        for result in itertools.chain.from_iterable(results):
            info: Any = result.storage_data
            self.sizes[info.relative_path] = max(self.sizes.get(info.relative_path, 0), info.offset + info.length)
            names = aliases.get(result.index.fqn, ())
            aliased += [WriteResult(MetadataIndex(name, result.index.offset, result.index.index), 0, info) for name in names]
        self.finish(metadata, [*results, aliased])


def _iter_on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor on the host. The copy of one from a device runs while the caller writes the one before."""
    before: Tensor | None = None
    for tensor in tensors:
        host, copy = tensor, None
        if _torch.is_accelerator(tensor.device):
            host = _torch.allocate_like(tensor, torch.device("cpu"))
            copy = _torch.AsyncCopy(tensor, host)
        if before is not None:
            yield before
        if copy is not None:
            _torch.synchronize_copies(tensor.device)
        before = host
    if before is not None:
        yield before


# --- A record: a ZIP file of about seven members, one of which is the elements as they lie in memory. ---


def write_record(file: BinaryIO, tensor: Tensor, layouts: dict[Any, RecordLayout]) -> tuple[int, int]:
    """Write a tensor of the host as torch.save does, and return the number of bytes and the checksum of the elements.

    The elements are written straight from the tensor's memory. `make_record_layout` makes the bytes around them once for each
    dtype, shape and strides, and ``layouts`` keeps them.
    """
    if not tensor.permute(sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))).is_contiguous():  # with gaps
        tensor = tensor.contiguous()
    key = tensor.dtype, tensor.shape, tensor.stride()
    if key not in layouts:
        layouts[key] = make_record_layout(*key)
    before, after, crc_offsets = layouts[key]
    crc32 = 0
    file.write(before)
    raw = _torch.host_bytes(tensor)
    for begin in range(0, len(raw), PIECE_BYTES):
        piece = raw[begin : begin + PIECE_BYTES]
        crc32 = checksum(piece, crc32)
        file.write(piece)
    end = bytearray(after)
    for offset in crc_offsets:
        struct.pack_into("<I", end, offset, crc32)
    file.write(end)
    return len(before) + len(raw) + len(after), crc32


class RecordLayout(NamedTuple):
    """The bytes that torch.save writes before and after the elements of a tensor."""

    before: bytes
    after: bytes
    crc_offsets: tuple[int, ...]
    """The offsets in ``after`` of the elements' checksum, which occurs twice."""


def make_record_layout(dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int]) -> RecordLayout:
    tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")  # nothing touches this memory
    found = _GapFile()
    with skip_data():
        torch.save(tensor, found)
    raw = found.getvalue()
    if not tensor.nbytes:
        return RecordLayout(raw, b"", ())
    (at, size), *more = found.gaps or [(0, 0)]
    before, after = raw[:at], raw[at:]  # after: the elements' data descriptor first, and the ZIP file's directory last
    entry = after.rfind(b"PK\x01\x02", 0, after.find(b"/data/0"))
    if (size, more, after[:4], entry > 0) != (tensor.nbytes, [], b"PK\x07\x08", True):
        raise AssertionError("torch.save writes in another format: expected a ZIP file with one gap for the elements")
    return RecordLayout(before, after, (4, entry + 16))


class _GapFile(io.BytesIO):
    """A file in which a relative seek only notes ``(offset among the bytes written, length)`` in ``gaps``."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[tuple[int, int]] = []

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == io.SEEK_CUR:
            self.gaps.append((self.tell(), offset))
        return self.tell()
