"""read_safetensors: read files of full parameters as shards; each rank reads its slices."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import reprlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._core.checks import bind_spec
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import Unit, whole_shape
from .._spec.local import describe_pieces
from .._torch.phases import LOGGER
from ._errors import CheckpointError
from ._export import DTYPES, INDEX, SINGLE
from ._files.manifest import is_plain_name
from ._files.planners import iter_boxes
from ._files.untrusted import read_regular
from ._ranks import TIMEOUT, connect_ranks
from ._rekey import clean_name
from ._state.leaves import TensorRange
from ._state.tree import parameter_slice

__all__ = ["read_safetensors"]


def read_safetensors(
    path: str | os.PathLike[str],
    spec: PartitionSpec,
    *,
    rename: Callable[[str], str | None] | None = None,
    cast: bool = False,
    timeout: float = TIMEOUT,
) -> Params:
    """Return the shards of the parameters in safetensors files. Inverse of `export`.

    Every rank sees the files. It reads of each tensor the range in its slice, straight into the result's memory: no full tensor
    is made. A tied parameter may have any of its names, or several with the same values. Parameters that the spec ignores are
    not read.

    Args:
        path: A file, an index (``.json``), or a directory with ``model.safetensors`` or ``model.safetensors.index.json``, the
            same path on all ranks. If a directory has both, the first is read, as in transformers.
        spec: A bound spec, all ranks of whose mesh call this.
        rename: A function from the name in the files to the name in the model, or to None for a tensor to pass over, such as a
            buffer. The default is `clean_name`, which removes the prefixes of wrappers.
        cast: Whether to convert floating point tensors to the spec's dtypes.
        timeout: The seconds that ranks wait for a lost rank.

    Returns:
        The shards, by unit key.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: Naming the parameter, for one that only the files or the spec have, or of another shape or dtype.
        CheckpointError: Naming the file, for one that is damaged or cut short. Every rank raises the errors of all.
        ImportError: Without the package safetensors.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.export(f"{directory}/model", {"": torch.arange(8.0)}, spec)
        ...     print(fs.checkpoint.read_safetensors(path, spec))
        {'': tensor([0., 1., 2., 3., 4., 5., 6., 7.])}
    """
    spec = bind_spec(spec)
    path = os.fsdecode(path)
    ranks = connect_ranks(spec, "checkpoint.read_safetensors", timeout, path=path)

    def read() -> Params:
        with ExitStack() as stack, torch.no_grad():
            stored = _open_tensors(Path(path), stack, rename or clean_name)
            _check_tensors(stored, Path(path), spec, cast=cast)
            return {unit.key: _read_unit(unit, stored, spec, ranks.rank, ranks.size) for unit in spec}

    params = ranks.run(read, "checkpoint.read_safetensors")
    LOGGER.info("checkpoint.read_safetensors: %s is read", path)
    return params


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in an open safetensors file, and a function that reads a part of it."""

    file: Path
    key: str
    """Its name in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[tuple[slice, ...]], Tensor]
    """A function that reads a part of it."""


# --- Open the files. ---


def _import_safe_open() -> tuple[Callable[..., Any], type[Exception]]:
    """Return ``safe_open`` of the package, which maps a file and checks its header, and the error that it raises."""
    try:
        package: Any = importlib.import_module("safetensors")
    except ImportError as error:
        hint = 'pip install "funshard[checkpoint]"'
        raise ImportError(f"checkpoint.read_safetensors needs the package safetensors: {hint}") from error
    return package.safe_open, package.SafetensorError


def _open_tensors(path: Path, stack: ExitStack, rename: Callable[[str], str | None]) -> dict[str, _FileTensor]:
    """Return the tensors of the files by their names in the model. The stack closes the files."""
    safe_open, damage = _import_safe_open()
    out: dict[str, _FileTensor] = {}
    keys: set[str] = set()
    for file, wanted in _list_files(path).items():
        with _explain_damage(file, damage):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            names = list(opened.keys())
            if missing := sorted(wanted - {*names}):
                raise CheckpointError(f"{file}: tensor '{missing[0]}' is not in it: expected it there, as the index says")
            for key in names:
                if key in keys:
                    raise CheckpointError(f"{file}: tensor '{key}' is in another file too: expected it once")
                keys.add(key)
                if (name := rename(key)) is None:
                    continue
                if name in out:
                    both = f"'{key}' and '{out[name].key}'"
                    raise ValueError(f"{both} are both '{name}' in the model: expected one name for each")
                out[name] = _open_tensor(file, key, opened)
    return out


def _open_tensor(file: Path, key: str, opened: Any) -> _FileTensor:
    found = opened.get_slice(key)
    dtype = DTYPES.get(found.get_dtype())
    if dtype is None:
        raise ValueError(f"tensor '{key}': expected one of the dtypes {[*DTYPES]}, got {found.get_dtype()}")
    shape = tuple(found.get_shape())
    return _FileTensor(file, key, shape, dtype, lambda where: found[where] if where else opened.get_tensor(key))


def _list_files(path: Path) -> dict[Path, set[str]]:
    """Return the files, and the tensors that the index names in each."""
    if path.is_dir():  # as transformers: an index beside the one file belongs to an earlier save
        path = path / SINGLE if (path / SINGLE).is_file() or not (path / INDEX).is_file() else path / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file of safetensors, an index, or a directory with '{SINGLE}' or an index")
    if path.suffix != ".json":
        return {path: set()}
    out: dict[Path, set[str]] = {}
    try:
        for key, name in json.loads(read_regular(path).decode())["weight_map"].items():
            if not is_plain_name(name):
                raise ValueError(f"expected files beside it, got {reprlib.repr(name)}")
            out.setdefault(path.with_name(name), set()).add(key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the index is damaged: {type(error).__name__}: {error}") from error
    return out


@contextlib.contextmanager
def _explain_damage(file: Path, damage: type[Exception]) -> Generator[None]:
    if not file.is_file():
        raise CheckpointError(f"{file}: expected this file, which the index names, got none")
    if not file.stat().st_size:
        raise CheckpointError(f"{file}: expected safetensors, got an empty file")
    try:
        yield
    except damage as error:
        raise CheckpointError(f"{file}: damaged, cut short, or no file of safetensors: {error}") from error


# --- Check them against the spec. ---


def _check_tensors(stored: Mapping[str, _FileTensor], path: Path, spec: PartitionSpec, *, cast: bool) -> None:
    sizes = dict(spec.bound_mesh.sizes)
    for unit in spec:
        for param in unit.params:
            found, shape = _find_tensors(param, stored), whole_shape(param, sizes)
            if not found:
                raise ValueError(
                    f"parameter '{param.name}' of unit '{unit.key}' is not in {path}: expected {list(shape)} "
                    f"{param.dtype}, got {len(stored)} tensors such as {sorted(stored)[:3]}; rename= maps their names"
                )
            for one in found:
                _check_stored_tensor(one, param, unit, sizes, cast=cast)
    for name in stored:
        if name not in spec.by_name and name not in spec.ignored:
            raise ValueError(
                f"tensor '{name}' of {stored[name].file} is no parameter of the spec: expected names such as "
                f"{list(spec.by_name)[:3]}; rename= maps names, and gives None for tensors to pass over, such as buffers"
            )


def _find_tensors(param: Param, stored: Mapping[str, _FileTensor]) -> list[_FileTensor]:
    return [stored[name] for name in param.names if name in stored]


def _check_stored_tensor(stored: _FileTensor, param: Param, unit: Unit, sizes: Mapping[str, int], *, cast: bool) -> None:
    """Raise ValueError unless a stored tensor fits; with ``cast``, another floating-point dtype does."""
    where, shape = f"parameter '{param.name}' of unit '{unit.key}'", whole_shape(param, sizes)
    if stored.shape != shape:
        hint = describe_pieces(param, sizes)
        raise ValueError(f"{where}: expected shape {list(shape)}, got {list(stored.shape)} in {stored.file}{hint}")
    floats = stored.dtype.is_floating_point and param.dtype.is_floating_point
    if stored.dtype != param.dtype and not (cast and floats):
        hint = "; cast=True converts it" if floats else ""
        raise ValueError(f"{where}: expected {param.dtype}, got {stored.dtype} in {stored.file}{hint}")


# --- Read this rank's slices. ---


def _read_unit(unit: Unit, stored: Mapping[str, _FileTensor], spec: PartitionSpec, rank: int, ranks: int) -> Tensor:
    """Read this rank's slice of a unit. Parameters stored under several names must be equal under all."""
    leaf = parameter_slice(unit)
    memory = leaf.allocate(spec)
    for part in leaf.ranges(memory, spec, rank, ranks):
        first, *others = _find_tensors(spec.by_name[part.name][1], stored)
        for view, values in _read_boxes(part, first):
            view.copy_(values)
        for other in others:
            _check_tied_values(part, other, first)
    return leaf.to_state(memory, spec)


def _read_boxes(part: TensorRange, stored: _FileTensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each box of a range, the memory for it and the values in the file."""
    for box, view in iter_boxes(part, part.begin, part.begin + len(part.data)) if len(part.data) else ():
        where = tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))
        yield view, stored.read(where)


def _check_tied_values(part: TensorRange, other: _FileTensor, first: _FileTensor) -> None:
    """Check that two tensors of one tied parameter have the same values in a range."""
    for (_, values), (_, expected) in zip(_read_boxes(part, other), _read_boxes(part, first), strict=True):
        if values.dtype != expected.dtype or not torch.equal(_view_bytes(values), _view_bytes(expected)):
            raise ValueError(
                f"'{other.key}' and '{first.key}' are one tied parameter: expected the same values, got others; leave one out, "
                "by a rename= that gives None"
            )


def _view_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
