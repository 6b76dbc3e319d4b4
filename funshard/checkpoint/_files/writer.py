"""The files of torch.distributed.checkpoint: what torch.save writes, but straight from where the tensors lie."""

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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import skip_data

from ... import _torch
from .regular import checksum

__all__ = ["Around", "Writer", "around", "write_record"]

BUFFER = 1 << 17
"""Bytes that small writes are joined to."""
PIECE = 1 << 19
"""Bytes that are summed up and then written: memory is read once, the second time they are in the cache."""


class Writer(FileSystemWriter):
    """torch's files, a file of each rank; ``written`` are their sizes, on the first rank, when all is written."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=False, overwrite=False)
        self.set_up_storage_writer(rank == 0, rank=rank)
        self.written: dict[str, int] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._aliases: dict[str, tuple[str, ...]] = plans[0].planner_data
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Where each item is in this rank's file, which is flushed."""
        name = f"__{self.rank}_0.distcp"
        known: dict[Any, Around] = {}
        results: list[WriteResult] = []
        tensors: Iterable[Any] = map(planner.resolve_data, plan.items)
        at = 0
        with (Path(self.path) / name).open("wb", buffering=BUFFER) as file:
            for item, tensor in zip(plan.items, _on_host(tensors), strict=True):
                length = write_record(file, tensor, known)
                results.append(WriteResult(item.index, length, _torch.make_storage_info(name, at, length)))
                at += length
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        """Leave the path out, which is not where the checkpoint will be, and of a class that Python 3.13 alone has."""
        return StorageMeta(save_id=self.save_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """With the other names of tied parameters, for which nothing is written twice. Who commits it flushes it."""
        again: list[WriteResult] = []
        result: Any
        for result in itertools.chain.from_iterable(results):
            info: Any = result.storage_data
            self.written[info.relative_path] = max(self.written.get(info.relative_path, 0), info.offset + info.length)
            others = (
                MetadataIndex(n, result.index.offset, result.index.index) for n in self._aliases.get(result.index.fqn, ())
            )
            again += [WriteResult(other, 0, info) for other in others]
        super().finish(metadata, [*results, again])


def _on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each on the host; what is on a device comes while the one before is written."""
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


# --- A record: a ZIP file in which the elements are one of some seven members, as they lie in memory. ---


def write_record(file: BinaryIO, tensor: Tensor, known: dict[Any, Around]) -> int:
    """Writes a tensor of the host as torch.save does, with its checksum, and gives the number of bytes.

    The elements are written from where they are. What comes before and after them is made by torch.save itself, `around`,
    once for each dtype, shape and strides: these are kept in ``known``.
    """
    if not tensor.permute(sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))).is_contiguous():  # with gaps
        tensor = tensor.contiguous()
    key = tensor.dtype, tensor.shape, tensor.stride()
    if key not in known:
        known[key] = around(*key)
    before, after, places = known[key]
    crc32 = 0
    file.write(before)
    raw = _torch.host_bytes(tensor)
    for begin in range(0, len(raw), PIECE):
        piece = raw[begin : begin + PIECE]
        crc32 = checksum(piece, crc32)
        file.write(piece)
    end = bytearray(after)
    for place in places:
        struct.pack_into("<I", end, place, crc32)
    file.write(end)
    return len(before) + len(raw) + len(after)


class Around(NamedTuple):
    """What torch.save writes before and after the elements of a tensor, and where in the latter their checksum is twice."""

    before: bytes
    after: bytes
    places: tuple[int, ...]


def around(dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int]) -> Around:
    """What torch.save writes of a dense tensor beside its elements, which are in its memory one after the other."""
    tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")  # memory that nobody touches
    found = _Gaps()
    with skip_data():
        torch.save(tensor, found)
    raw = found.getvalue()
    if not tensor.nbytes:
        return Around(raw, b"", ())
    (at, size), *more = found.gaps or [(0, 0)]
    before, after = raw[:at], raw[at:]  # a note on the elements comes first, and one on each member last
    entry = after.rfind(b"PK\x01\x02", 0, after.find(b"/data/0"))
    if (size, more, after[:4], entry > 0) != (tensor.nbytes, [], b"PK\x07\x08", True):
        raise AssertionError("torch.save writes in another format: expected a ZIP file with one gap for the elements")
    return Around(before, after, (4, entry + 16))


class _Gaps(io.BytesIO):
    """A file without what is skipped: ``gaps`` are at which place so many bytes would be."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[tuple[int, int]] = []

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == io.SEEK_CUR:
            self.gaps.append((self.tell(), offset))
        return self.tell()
