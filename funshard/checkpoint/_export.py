"""export: full parameters as safetensors files, which transformers and others load; a unit at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._sharding.agree import check_ranks_agree, has_peers
from .._sharding.full import gather_to_first
from .._spec.checks import check_mapping, check_params, find_full_params
from .._spec.spec import PartitionSpec, bind_spec
from .._spec.unit import Unit
from .._units.layout import unflatten_unit
from ._files.directory import LOCK
from ._files.staging import StagingDirectory, find_replaced
from ._ranks.ranks import TIMEOUT, ranks_of
from ._state.leaves import check_holds

__all__ = ["DTYPES", "INDEX", "SINGLE", "export"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
"""What the files call the dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export(
    directory: str | os.PathLike[str],
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    *,
    shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    rename: Callable[[str], str] | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    timeout: float = TIMEOUT,
) -> Path:
    """Writes the full parameters to a new directory as safetensors files; gives its path back. All ranks take part.

    ``model.safetensors``, or where that would be longer than ``shard_bytes`` (of tensors) ``model-00001-of-0000N.safetensors``
    and so on with ``model.safetensors.index.json``: what ``from_pretrained`` of transformers loads, once
    ``model.config.save_pretrained(directory)`` has put the rest there. `read_safetensors` is its inverse.

    ``params`` are shards, full parameters by name, or both. A unit at a time is gathered to the mesh's first rank, which
    writes it: its peak is that unit, twice over gloo, and nothing is allocated on the other ranks. A tied parameter is
    written once, under the name that the model gave it first; a unit at rest in a codec decoded. ``dtype`` is another one for
    what is floating point.
    ``buffers`` are the first rank's to add, by name, such as the running statistics that BatchNorm has in its model, and
    parameters that the spec ignores. ``rename`` gives the names in the files, ``metadata`` goes into their headers beside
    ``{"format": "pt"}``.

    They are written aside, flushed, and there by one rename. With ``overwrite`` the directory may exist: weights that an
    earlier export has put there are replaced, all other files stay. ``dry_run`` writes nothing and raises what can be known
    before: call it with the same arguments before the training whose result is to be exported.

    Raises, on every rank and with ``directory`` as it was, FileExistsError where there is something and no ``overwrite``,
    PermissionError where the directory cannot be made, ValueError or TypeError, naming the unit or tensor, for params that do
    not fit, for names that are there twice and for a dtype that the format does not have, and what the file system raises.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.export(f"{directory}/model", {"": torch.arange(8.0)}, spec)
        ...     print([file.name for file in path.iterdir()])
        ['model.safetensors']
    """
    spec = bind_spec(spec)
    ranks = ranks_of(spec, "checkpoint.export", timeout)
    target = Path(directory).absolute()

    def planned() -> list[_File]:
        if ranks.rank == 0:
            _check_target(target, overwrite=overwrite)
        check_mapping(buffers or {})
        check_params(params, spec)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")
        header = {"format": "pt", **(metadata or {})}
        if wrong := next((key for key, value in header.items() if not isinstance(value, str)), None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"metadata '{wrong}': expected a string, got {type(header[wrong]).__name__}")
        return _files(list(_entries(params, spec, dtype, buffers or {}, rename or str)), shard_bytes, header)

    files = ranks.together(planned, "checkpoint.export")
    if has_peers(spec.bound_mesh):
        check_ranks_agree(
            spec, asked=tuple(f"shard of unit '{key}' {params[key].dtype}" for key in spec.by_key if key in params)
        )
    if dry_run:
        return target
    staging: StagingDirectory | None = None

    def begin() -> None:
        nonlocal staging
        staging = StagingDirectory(target, carried=_is_foreign if overwrite else None)
        for file in files:
            (staging.directory / file.name).write_bytes(file.header)

    try:
        ranks.on_first(begin, "checkpoint.export")
        with torch.no_grad():
            for unit in spec:
                full = _gathered(params, unit, spec)
                ranks.on_first(lambda full=full: _write(staging, files, full), "checkpoint.export")
                del full  # before the next one is gathered
            ranks.on_first(lambda: _close(staging, files, _others(params, spec, buffers or {})), "checkpoint.export")
    except BaseException:
        if staging is not None:
            staging.abandon()
        raise
    return target


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Raise what would end the export when it has been written: FileExistsError or PermissionError."""
    try:
        find_replaced(target, any_directory=overwrite)
    except FileExistsError as error:
        hint = "a directory, and no link" if overwrite else "overwrite=True replaces the weights in a directory"
        raise FileExistsError(f"{error}; {hint}") from None
    parent = next(path for path in target.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{target}: expected a place to write to, and '{parent}' is none")


def _is_foreign(name: str) -> bool:
    """Whether a file of this name in a directory of weights is none that `export` writes."""
    return name not in (SINGLE, INDEX, LOCK) and not re.fullmatch(r"model-\d{5,}-of-\d{5,}\.safetensors", name)


# --- What is where in which file. ---


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file. ``own`` is its name in the model."""

    name: str
    own: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _File:
    """A file, and where in it each tensor is, by its name in the model."""

    name: str
    header: bytes
    places: Mapping[str, tuple[int, _Entry]]
    size: int


def _entries(
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    dtype: torch.dtype | None,
    buffers: Mapping[str, Tensor],
    rename: Callable[[str], str],
) -> Iterator[_Entry]:
    seen: dict[str, str] = {}

    def entry(own: str, shape: tuple[int, ...], kept: torch.dtype) -> _Entry:
        kind = dtype if dtype is not None and kept.is_floating_point else kept
        name = rename(own)
        if kind not in NAMES:
            raise ValueError(f"'{own}': expected a dtype that safetensors has, got {kind}")
        if name in seen:
            raise ValueError(f"'{own}' and '{seen[name]}' would both be '{name}' in the files: expected one name for each")
        seen[name] = own
        return _Entry(name, own, shape, kind)

    for unit in spec:
        full = find_full_params(params, unit)
        for i, param in enumerate(unit.params):
            check_holds(params[unit.key] if full is None else full[i], f"parameter '{param.name}'")
            kept = full[i].dtype if full is not None else unit.dtype if unit.at_rest else params[unit.key].dtype
            yield entry(param.name, param.shape, kept)
    for name, tensor in _others(params, spec, buffers).items():
        if name in spec.by_name:
            raise ValueError(f"buffers: '{name}' is a parameter of the spec: expected others")
        check_holds(tensor, f"'{name}'")
        yield entry(name, tuple(tensor.shape), tensor.dtype)


def _others(params: Mapping[str, Tensor], spec: PartitionSpec, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is in no unit, and whole on every rank."""
    return {name: params[name] for name in spec.ignored if name in params} | dict(buffers)


def _files(entries: list[_Entry], shard_bytes: int, metadata: Mapping[str, str]) -> list[_File]:
    groups: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    n = len(groups)
    names = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return [_laid_out(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _laid_out(name: str, entries: list[_Entry], metadata: Mapping[str, str]) -> _File:
    """Its header: the format is eight bytes of length, JSON, and the tensors' bytes without gaps.

    By our own hands, since the library takes all tensors of a file at once. As it does, the widest dtypes come first, so that
    each tensor begins at a multiple of its elements' size.
    """
    at, described = 0, dict[str, Any](__metadata__=dict(metadata))
    places: dict[str, tuple[int, _Entry]] = {}
    for entry in sorted(entries, key=lambda e: -e.dtype.itemsize):
        offsets = [at, at := at + entry.nbytes]
        described[entry.name] = {"dtype": NAMES[entry.dtype], "shape": [*entry.shape], "data_offsets": offsets}
        places[entry.own] = offsets[0], entry
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return _File(name, header, {own: (len(header) + low, e) for own, (low, e) in places.items()}, len(header) + at)


# --- Its bytes, on the first rank. ---


def _gathered(params: Mapping[str, Tensor], unit: Unit, spec: PartitionSpec) -> dict[str, Tensor]:
    """The unit's parameters on the mesh's first rank, on the host; on the others nothing, or full ones."""
    full = find_full_params(params, unit)
    if full is None:
        buffer = gather_to_first(params[unit.key].detach(), unit, spec.bound_mesh)
        full = [] if buffer is None else unflatten_unit(buffer.cpu(), unit)
    return {param.name: tensor.detach() for param, tensor in zip(unit.params, full, strict=False)}


def _write(staging: StagingDirectory | None, files: list[_File], tensors: Mapping[str, Tensor]) -> None:
    assert staging is not None
    for file in files:
        if own := [name for name in tensors if name in file.places]:
            with (staging.directory / file.name).open("r+b") as opened:
                for name in own:
                    offset, entry = file.places[name]
                    opened.seek(offset)
                    dense = tensors[name].to("cpu", entry.dtype).contiguous()  # alive for as long as its memory is read
                    opened.write(_torch.host_bytes(dense))


def _close(staging: StagingDirectory | None, files: list[_File], others: Mapping[str, Tensor]) -> None:
    """What is left, and all of it to its place."""
    assert staging is not None
    _write(staging, files, others)
    sizes = {file.name: file.size for file in files}
    if len(files) > 1:
        entries = [(entry, file) for file in files for _, entry in file.places.values()]
        total = sum(entry.nbytes for entry, _ in entries)
        content = {"metadata": {"total_size": total}, "weight_map": {entry.name: file.name for entry, file in entries}}
        text = json.dumps(content, indent=2).encode()
        (staging.directory / INDEX).write_bytes(text)
        sizes[INDEX] = len(text)
    for name in sizes:
        with (staging.directory / name).open("r+b") as file:
            os.fsync(file.fileno())
    staging.publish(sizes)
