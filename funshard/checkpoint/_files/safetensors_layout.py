"""The layout of safetensors files: which tensor lies where in which file, and the header that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DTYPES", "DTYPE_NAMES", "INDEX", "SINGLE", "FileLayout", "TensorEntry", "lay_out_files", "make_index"]

SINGLE = "model.safetensors"
"""The name of the file if there is one."""
INDEX = "model.safetensors.index.json"
"""The name of the index if there are several files."""
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The dtypes by their names in the files."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write."""

    name: str
    """Its name in the file."""
    model_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """A file to write: its header, and the offset of each tensor by its name in the model."""

    name: str
    header: bytes
    entries: Mapping[str, tuple[int, TensorEntry]]
    size: int


def lay_out_files(entries: list[TensorEntry], shard_bytes: int, metadata: Mapping[str, str]) -> list[FileLayout]:
    """Return the files for some tensors in their order, each with at most ``shard_bytes`` bytes of tensors or one tensor."""
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    n = len(groups)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return [_lay_out_file(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _lay_out_file(name: str, entries: list[TensorEntry], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a file: eight bytes of length, JSON, and the tensors' bytes without gaps.

    The library would take all tensors of a file at once. As it does, the widest dtypes come first, so that each tensor begins
    at a multiple of its element size.
    """
    at, header = 0, dict[str, Any](__metadata__=dict(metadata))
    offsets: dict[str, tuple[int, TensorEntry]] = {}
    for entry in sorted(entries, key=lambda e: -e.dtype.itemsize):
        begin, at = at, at + entry.nbytes
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": [*entry.shape], "data_offsets": [begin, at]}
        offsets[entry.model_name] = begin, entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    return FileLayout(name, raw, {key: (len(raw) + begin, e) for key, (begin, e) in offsets.items()}, len(raw) + at)


def make_index(files: list[FileLayout]) -> bytes:
    """Return the content of the index of several files."""
    entries = [(entry, file) for file in files for _, entry in file.entries.values()]
    total = sum(entry.nbytes for entry, _ in entries)
    content = {"metadata": {"total_size": total}, "weight_map": {entry.name: file.name for entry, file in entries}}
    return json.dumps(content, indent=2).encode()
