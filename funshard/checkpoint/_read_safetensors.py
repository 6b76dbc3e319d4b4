"""read_safetensors: files of full parameters as shards; each rank reads its slices of them."""

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

from .._spec.spec import PartitionSpec, bind_spec
from .._spec.tree import Param
from .._spec.unit import Unit
from .._units.layout import Params
from ._errors import CheckpointError
from ._export import DTYPES, INDEX, SINGLE
from ._files.manifest import is_plain_name
from ._files.planners import boxed
from ._files.regular import read_regular
from ._ranks.ranks import TIMEOUT, ranks_of
from ._rekey import clean_name
from ._state.leaves import Part
from ._state.tree import parameters

__all__ = ["read_safetensors"]


def read_safetensors(
    path: str | os.PathLike[str],
    spec: PartitionSpec,
    *,
    rename: Callable[[str], str | None] | None = None,
    cast: bool = False,
    timeout: float = TIMEOUT,
) -> Params:
    """The shards of the parameters in safetensors files. Inverse of `export`.

    ``path`` is a file, an index (``.json``), or a directory with ``model.safetensors`` or ``model.safetensors.index.json``, as
    transformers and `export` write them; of both transformers reads the first, and so does this. Every rank sees the files,
    and reads of each tensor the range that lies in its slice, straight into the result's memory: no full tensor is made.

    ``rename(name in the files)`` is the name in the model, None for what is not wanted, such as buffers. By default the
    prefixes of wrappers are left out (`clean_name`). A tied parameter may be there under any of its names, or several, if
    its values are the same. Parameters that the spec ignores are not read. With ``cast`` floating point tensors of another
    dtype become the spec's.

    Raises, on every rank and before anything is returned, FileNotFoundError where there is no such file, ValueError, naming
    the parameter, for one that is only in the files or only in the spec, and for another shape or dtype; CheckpointError,
    naming the file, for what is damaged or cut short; ImportError without the package safetensors.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.export(f"{directory}/model", {"": torch.arange(8.0)}, spec)
        ...     print(fs.checkpoint.read_safetensors(path, spec))
        {'': tensor([0., 1., 2., 3., 4., 5., 6., 7.])}
    """
    spec = bind_spec(spec)
    ranks = ranks_of(spec, "checkpoint.read_safetensors", timeout)

    def read() -> Params:
        with ExitStack() as stack, torch.no_grad():
            stored = _checked(_stored(Path(path), stack, rename or clean_name), Path(path), spec, cast=cast)
            return {unit.key: _read(unit, stored, spec, ranks.rank, ranks.size) for unit in spec}

    return ranks.together(read, "checkpoint.read_safetensors")


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file. ``key`` is its name there, ``slices`` gives parts of it without reading the others."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: Callable[[tuple[slice, ...]], Tensor]


# --- What is in the files. ---


def _opener() -> tuple[Callable[..., Any], type[Exception]]:
    """``(safe_open, its error)`` of the package, which checks that header and file fit and maps the file."""
    try:
        package: Any = importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError(
            'checkpoint.read_safetensors needs the package safetensors: pip install "funshard[checkpoint]"'
        ) from error
    return package.safe_open, package.SafetensorError


def _stored(path: Path, stack: ExitStack, rename: Callable[[str], str | None]) -> dict[str, _Stored]:
    """The tensors of the files by their names in the model, for as long as the stack lives."""
    safe_open, damage = _opener()
    out: dict[str, _Stored] = {}
    keys: set[str] = set()
    for file, wanted in _files(path).items():
        with _explained(file, damage):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            there = list(opened.keys())
            if missing := sorted(wanted - {*there}):
                raise CheckpointError(f"{file}: tensor '{missing[0]}' is not in it: expected it there, as the index says")
            for key in there:
                if key in keys:
                    raise CheckpointError(f"{file}: tensor '{key}' is in another file too: expected it once")
                keys.add(key)
                if (name := rename(key)) is None:
                    continue
                if name in out:
                    raise ValueError(
                        f"'{key}' and '{out[name].key}' are both '{name}' in the model: expected one name for each"
                    )
                out[name] = _described(file, key, opened)
    return out


def _described(file: Path, key: str, opened: Any) -> _Stored:
    found = opened.get_slice(key)
    dtype = DTYPES.get(found.get_dtype())
    if dtype is None:
        raise ValueError(f"tensor '{key}': expected one of the dtypes {[*DTYPES]}, got {found.get_dtype()}")
    shape = tuple(found.get_shape())

    def slices(where: tuple[slice, ...]) -> Tensor:
        return found[where] if where else opened.get_tensor(key)

    return _Stored(file, key, shape, dtype, slices)


def _files(path: Path) -> dict[Path, set[str]]:
    """The files, and what should be in each."""
    if path.is_dir():  # as transformers: an index beside the one file is of an earlier save
        path = path / SINGLE if (path / SINGLE).is_file() or not (path / INDEX).is_file() else path / INDEX
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected a file of safetensors, an index of such, or a directory with '{SINGLE}' or one"
        )
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
def _explained(file: Path, damage: type[Exception]) -> Generator[None]:
    """Damage as a CheckpointError that names the file."""
    if not file.is_file():
        raise CheckpointError(f"{file}: expected this file, which the index names, got none")
    if not file.stat().st_size:
        raise CheckpointError(f"{file}: expected safetensors, got an empty file")
    try:
        yield
    except damage as error:
        raise CheckpointError(f"{file}: damaged, cut short, or no file of safetensors: {error}") from error


# --- Whether it is what the spec wants. ---


def _checked(stored: Mapping[str, _Stored], path: Path, spec: PartitionSpec, *, cast: bool) -> Mapping[str, _Stored]:
    for unit in spec:
        for param in unit.params:
            found = _of(param, stored)
            if not found:
                raise ValueError(
                    f"parameter '{param.name}' of unit '{unit.key}' is not in {path}: expected {list(param.shape)} "
                    f"{param.dtype}, got {len(stored)} tensors such as {sorted(stored)[:3]}; rename= maps their names"
                )
            for one in found:
                _check(one, param, unit, cast=cast)
    for name in stored:
        if name not in spec.by_name and name not in spec.ignored:
            raise ValueError(
                f"tensor '{name}' of {stored[name].file} is no parameter of the spec: expected names such as "
                f"{list(spec.by_name)[:3]}; rename= maps names, and gives None for what is not wanted, such as buffers"
            )
    return stored


def _of(param: Param, stored: Mapping[str, _Stored]) -> list[_Stored]:
    """The parameter under each of its names that is there."""
    return [stored[name] for name in param.names if name in stored]


def _check(stored: _Stored, param: Param, unit: Unit, *, cast: bool) -> None:
    where = f"parameter '{param.name}' of unit '{unit.key}'"
    if stored.shape != param.shape:
        raise ValueError(f"{where}: expected shape {list(param.shape)}, got {list(stored.shape)} in {stored.file}")
    floats = stored.dtype.is_floating_point and param.dtype.is_floating_point
    if stored.dtype != param.dtype and not (cast and floats):
        hint = "; cast=True converts it" if floats else ""
        raise ValueError(f"{where}: expected {param.dtype}, got {stored.dtype} in {stored.file}{hint}")


# --- This rank's slices of it. ---


def _read(unit: Unit, stored: Mapping[str, _Stored], spec: PartitionSpec, rank: int, ranks: int) -> Tensor:
    leaf = parameters(unit)
    memory = leaf.memory(spec)
    for part in leaf.parts(memory, spec, rank, ranks):
        first, *others = _of(spec.by_name[part.name][1], stored)
        for view, values in _boxes(part, first):
            view.copy_(values)
        for other in others:
            _compare(part, other, first)
    return leaf.closed(memory, spec)


def _boxes(part: Part, stored: _Stored) -> Iterator[tuple[Tensor, Tensor]]:
    """What the part's range covers: of the memory for it and of the file, box by box."""
    if not len(part.data):
        return
    for box, view in boxed(part, part.begin, part.begin + len(part.data)):
        where = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        yield view, stored.slices(where)


def _compare(part: Part, other: _Stored, first: _Stored) -> None:
    for (_, values), (_, expected) in zip(_boxes(part, other), _boxes(part, first), strict=True):
        if values.dtype != expected.dtype or not torch.equal(_bits(values), _bits(expected)):
            raise ValueError(
                f"'{other.key}' and '{first.key}' are one tied parameter: expected the same values, got others; leave one out, "
                "by a rename= that gives None"
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
