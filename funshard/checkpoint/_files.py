"""The files of torch.distributed.checkpoint, read without running what is in them, and checked."""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .. import _torch
from ._manifest import METADATA
from ._ranks import CheckpointError
from ._records import Record, record
from ._regular import DamagedError, checksum

__all__ = ["Reader", "metadata_of"]

DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    OSError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    pickle.PickleError,
)
"""What reading bytes that are not what was written raises."""


class Reader(FileSystemReader):
    """Reads what a plan asks for and checks it; CheckpointError, naming tensor and file, for what is damaged."""

    def __init__(self, path: Path, *, check: bool) -> None:
        super().__init__(path)
        self._check = check

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise FileNotFoundError(f"{self.path}: no {METADATA}")
        return metadata_of(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[tuple[str, int, int], list[ReadItem]] = {}
        for item in plan.items:
            info: Any = self.storage_data[item.storage_index]
            wanted.setdefault((info.relative_path, info.offset, info.length), []).append(item)
        with _Files(Path(self.path)) as files:
            for (name, offset, length), items in sorted(wanted.items(), key=lambda pair: pair[0]):
                with _explained(items[0].storage_index.fqn, name):
                    self._read(files.opened(name), offset, length, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: BinaryIO, offset: int, length: int, items: list[ReadItem], planner: LoadPlanner) -> None:
        """What some items want of one tensor in a file."""
        found = record(lambda at, size: _exactly(file, offset + at, size), length, check=self._check)
        dense = torch.empty_strided(found.shape, found.stride, device="meta").is_contiguous()
        for item in items:
            target = planner.resolve_tensor(item)
            if dense and tuple(item.lengths) == found.shape and _takes(target, found):  # as most: no memory in between
                self._into(target, file, offset, found)
                planner.commit_tensor(item, target)
                continue
            raw = torch.empty(found.nbytes, dtype=torch.uint8)
            self._into(raw, file, offset, found)
            part = raw.view(found.dtype).as_strided(found.shape, found.stride, found.start)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            target.copy_(part)
            planner.commit_tensor(item, target)

    def _into(self, memory: Tensor, file: BinaryIO, offset: int, found: Record) -> None:
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


def _takes(target: Tensor, found: Record) -> bool:
    """Whether the bytes of the record are what is to be in this memory."""
    alike = target.dtype == found.dtype and target.nbytes == found.nbytes
    return alike and target.is_contiguous() and target.device.type == "cpu"


class _Files:
    """Files of a directory, one open at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._name = path, ""
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def opened(self, name: str) -> BinaryIO:
        """The file of this name, and no other place."""
        if self._file is None or name != self._name:
            if pathlib.PurePath(name).name != name:
                raise DamagedError(f"expected a file of the checkpoint's directory, got {name!r}")
            self.__exit__()
            self._name, self._file = name, (self._path / name).open("rb", buffering=0)
        return self._file


def _exactly(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    raw = b""
    while len(raw) < size and (more := file.read(size - len(raw))):
        raw += more
    if len(raw) < size:
        raise DamagedError("it was cut short")
    return raw


@contextmanager
def _explained(tensor: str, file: str) -> Generator[None]:
    """Damage as a CheckpointError that names the tensor and the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"tensor '{tensor}': file '{file}' of the checkpoint is missing") from error
    except DAMAGE as error:
        raise CheckpointError(f"tensor '{tensor}' in file '{file}' of the checkpoint is damaged: {error}") from error


# --- torch's description of a checkpoint is a pickle. ---

_PLAIN = {
    (dcp.__name__, name): getattr(dcp, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}


class _Unpickler(pickle.Unpickler):
    """Of the classes that torch describes a checkpoint with, all of which only hold data; of nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "pathlib" and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return pathlib.PurePath
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"its {METADATA} asks for {module}.{name}, which is no description of tensors: it is not loaded")


@dataclass
class StorageInfo:
    """Where torch has put an item, as its own private class of that."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


def _member(kind: Any, name: Any) -> Any:
    """Of an enumeration: how Python 3.11's first releases write one down."""
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise CheckpointError(
            f"its {METADATA} asks for {name!r} of {kind!r}, which is no description of tensors: it is not loaded"
        )
    return kind.__members__[name]


def _layout(name: str) -> torch.layout:
    return torch.strided


def metadata_of(path: Path) -> Metadata:
    """The description that torch gives of the checkpoint in a directory, of which nothing is run.

    Raises FileNotFoundError where there is none, CheckpointError for one that is damaged or asks for more than data.
    """
    file = path / METADATA
    if not file.is_file():
        raise FileNotFoundError(f"{path}: expected a checkpoint, which has a file '{METADATA}'; is it a directory of several?")
    try:
        found = _Unpickler(io.BytesIO(file.read_bytes())).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{path}: its file '{METADATA}' is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(
            f"{path}: its file '{METADATA}' is damaged: expected torch's Metadata, got {type(found).__name__}"
        )
    return found
