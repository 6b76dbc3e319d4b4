"""Read and check the files of torch.distributed.checkpoint without running anything in them."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ... import _torch
from .._errors import CheckpointError, DamagedError
from .metadata import read_metadata
from .records import Record, read_record
from .regular import checksum, open_regular

__all__ = ["CheckpointReader"]


class CheckpointReader(FileSystemReader):
    """A reader that checks the items of a plan. It raises CheckpointError, naming tensor and file, for damaged ones.

    ``checksums`` are those of the manifest, as in `Manifest`.
    """

    def __init__(self, path: Path, *, check: bool, checksums: Mapping[str, Mapping[str, int]] | None = None) -> None:
        super().__init__(path)
        self._check, self._checksums = check, checksums or {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise FileNotFoundError(f"{self.path}: expected the metadata of all ranks, got a request for one rank's")
        return read_metadata(Path(self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._tensors: Any = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned chunks into their tensors, in file order, and check each."""
        wanted: dict[tuple[str, int, int], list[ReadItem]] = {}
        for item in plan.items:
            info: Any = self.storage_data[item.storage_index]
            wanted.setdefault((info.relative_path, info.offset, info.length), []).append(item)
        file, opened = None, ""
        with ExitStack() as stack:
            for (name, offset, length), items in sorted(wanted.items(), key=lambda pair: pair[0]):
                with _explain_damage(items[0].storage_index.fqn, name):
                    if file is None or name != opened:  # one open file at a time
                        stack.close()
                        file, opened = stack.enter_context(open_regular(Path(self.path) / name)), name
                    self._read_chunk(file, offset, length, items, planner, self._checksums.get(name, {}).get(str(offset)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(
        self, file: BinaryIO, offset: int, length: int, items: list[ReadItem], planner: LoadPlanner, expected: int | None
    ) -> None:
        """Read the parts of one chunk, a tensor in a file, that some items ask for; ``expected`` is its checksum, if known."""
        if offset + length > os.fstat(file.fileno()).st_size:
            raise DamagedError("it was cut short")
        found = read_record(lambda at, size: _read_exactly(file, offset + at, size), length, check_other_members=self._check)
        if expected is not None and found.crc32 != expected:
            raise DamagedError("its checksum is not that in 'funshard.json': expected the file of this save, is it another's?")
        for item in items:
            self._check_chunk(found, item.storage_index)
        dense = torch.empty_strided(found.shape, found.stride, device="meta").is_contiguous()
        for item in items:
            target = planner.resolve_tensor(item)
            if dense and tuple(item.lengths) == found.shape and _has_layout(target, found):  # most items: no buffer in between
                self._read_into(target, file, offset, found)
                planner.commit_tensor(item, target)
                continue
            raw = torch.empty(found.nbytes, dtype=torch.uint8)
            self._read_into(raw, file, offset, found)
            part = raw.view(found.dtype).as_strided(found.shape, found.stride, found.start)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            target.copy_(part)
            planner.commit_tensor(item, target)

    def _check_chunk(self, found: Record, index: MetadataIndex) -> None:
        """Check that a tensor in a file has the shape and dtype that the metadata says."""
        tensor = self._tensors[index.fqn]
        expected = tuple(tensor.chunks[index.index].sizes), tensor.properties.dtype
        if (found.shape, found.dtype) != expected:
            raise DamagedError(f"expected {[*expected[0]]} {expected[1]} there, got {[*found.shape]} {found.dtype}")

    def _read_into(self, memory: Tensor, file: BinaryIO, offset: int, found: Record) -> None:
        """Read a record's bytes into memory, and check them."""
        if not found.nbytes:
            return
        raw = _torch.host_bytes(memory)
        file.seek(offset + found.offset)
        at = 0
        while at < len(raw) and (read := file.readinto(raw[at:])):  # pyright: ignore[reportAttributeAccessIssue]
            at += read
        if at < len(raw):
            raise DamagedError("it was cut short")
        if self._check and checksum(raw) != found.crc32:
            raise DamagedError("its checksum is not what was written")


def _has_layout(target: Tensor, found: Record) -> bool:
    """Return whether the record's bytes can be read straight into a tensor."""
    is_same = target.dtype == found.dtype and target.nbytes == found.nbytes
    return is_same and target.is_contiguous() and target.device.type == "cpu"


def _read_exactly(file: BinaryIO, offset: int, size: int) -> bytes:
    """Read ``size`` bytes at an offset; raise DamagedError if the file ends before."""
    file.seek(offset)
    raw = b""
    while len(raw) < size and (more := file.read(size - len(raw))):
        raw += more
    if len(raw) < size:
        raise DamagedError("it was cut short")
    return raw


@contextmanager
def _explain_damage(tensor: str, file: str) -> Generator[None]:
    """Raise damage as a CheckpointError that names the tensor and the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"tensor '{tensor}': file '{file}' of the checkpoint is missing") from error
    except (DamagedError, OSError) as error:
        raise CheckpointError(f"tensor '{tensor}' in file '{file}' of the checkpoint is damaged: {error}") from error
