"""What others read and write: parameters in safetensors files, by ranges, and optimizers' states as state_dicts by name."""

from __future__ import annotations

import json
import os
import reprlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._core.checks import bind_spec, check_mapping, check_params, find_full_params
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.unit import global_shape
from .._sharding.full import find_result_dtype, gather_stored, stream_full
from .._torch.tracing import LOGGER
from .._wire.host import check_host_resident
from ..optim._checks import ParamOptions, State, copy_like, group_by_options, refuse_encoded
from ..optim._from_torch import ELEMENTWISE_CLASSES, from_torch
from ._checkpoint import Part, compare_texts, summarize
from ._directory import CheckpointError, DamagedError, flush, is_directory, is_plain_name, open_regular, read_regular
from ._leaves import Box, TensorLeaf, check_storable, clean_name, slice_leaf
from ._ranks import TIMEOUT, Ranks
from ._tree import Description, rebuild, without_memory

SINGLE = "model.safetensors"
"""The name of the file if there is one."""
INDEX = "model.safetensors.index.json"
"""The name of the index if there are several files."""
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32,
    "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""The dtypes by their names in the files."""


def _import_safetensors() -> Any:
    try:
        import safetensors.torch  # pyright: ignore[reportUnusedImport] - an attribute of the result
    except ImportError as error:
        raise ImportError(
            "checkpoint.export and read_safetensors need the package safetensors: pip install 'funshard[safetensors]'"
        ) from error
    return safetensors


# --- export ---


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
    dry_run: bool = False,
    timeout: float = TIMEOUT,
) -> Path:
    """Write the full parameters to a directory as safetensors files, which ``from_pretrained`` of transformers loads.

    All ranks take part. The first one gathers a unit at a time, and holds one file's tensors; the files get their names when
    all are written. A tied parameter is written once, under the first of its names. It needs the package safetensors.

    Args:
        directory: A path where nothing is, or an empty directory.
        params: Shards, full parameters by name, or both. Of replicas the first rank's values are written.
        spec: The bound spec of the parameters.
        shard_bytes: The most bytes of tensors in a file.
        dtype: The dtype of floating point tensors in the files, instead of their own.
        buffers: Tensors that the first rank adds, by name, such as the running statistics of BatchNorm.
        rename: A function from the name in the model to the name in the files.
        metadata: Entries for the headers, beside ``{"format": "pt"}``.
        dry_run: Whether to only raise the errors that can be known before, such as before the training.
        timeout: The seconds that ranks wait for a lost rank.

    Returns:
        The path of the directory.

    Raises:
        FileExistsError, PermissionError: If something is at the path, or nothing can be put there.
        ValueError, TypeError: Naming the unit or tensor, for what the files cannot hold. Every rank raises the errors of all.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.export(f"{directory}/model", {"": torch.arange(8.0)}, spec)
        ...     print([file.name for file in path.iterdir()])
        ['model.safetensors']
    """
    spec = bind_spec(spec)
    path = os.fsdecode(directory)
    ranks = Ranks(spec, "checkpoint.export", timeout, directory=path, dtype=str(dtype), dry_run=bool(dry_run))
    if "://" in path:
        raise ValueError(f"checkpoint.export: expected a local directory, which safetensors writes to, got {path!r}")
    target = Path(path).absolute()
    header = {"format": "pt", **(metadata or {})}

    def plan() -> tuple[tuple[Params, list[dict[str, str]], int], dict[Part, str]]:
        _import_safetensors()
        if ranks.rank == 0:
            _check_target(target)
        check_mapping(buffers or {})
        check_params(params, spec, dict(spec.bound_mesh.sizes))
        check_host_resident(params, spec)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")
        if wrong := next((key for key, value in header.items() if not isinstance(value, str)), None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"metadata '{wrong}': expected a string, got {type(header[wrong]).__name__}")
        if wrong := next((name for name in buffers or {} if name in spec.by_name), None):
            raise ValueError(f"buffers: '{wrong}' is a parameter of the spec: expected others")
        texts = {(key, ""): f"a slice, {params[key].dtype}" for key in spec.by_key if key in params}
        full = _find_full(params, spec) | dict(buffers or {})
        return (full, *_plan_files(params, spec, dtype, full, rename or str, shard_bytes)), texts

    (full, files, total_size), _ = ranks.decide(plan, compare_texts, "checkpoint.export")
    if dry_run:
        return target

    def stream() -> Iterator[tuple[str, Tensor]]:
        for unit in (unit for unit in spec if unit.key in params):  # each by itself: no two of them are in memory
            yield from stream_full({unit.key: params[unit.key]}, spec, dtype=dtype, rank0_only=True, offload_to_cpu=True)
        for name, tensor in full.items() if ranks.rank == 0 else ():
            yield name, tensor.to("cpu", find_result_dtype(tensor.dtype, dtype))

    def write_files(folder: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        n, found, weights = len(files), dict[str, Tensor](), dict[str, str]()
        paths = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
        for file, names in zip(paths, files, strict=True):
            while names.keys() - found.keys():
                found.update([next(tensors)])
            dense = ((new, found.pop(name).contiguous()) for name, new in names.items())
            _import_safetensors().torch.save_file(dict(dense), f"{folder}/{file}", header)
            flush(Path(folder, file))
            weights |= dict.fromkeys(names.values(), file)
        if n > 1:
            index = {"metadata": {"total_size": total_size}, "weight_map": weights}
            Path(folder, INDEX).write_text(json.dumps(index, indent=2))
            flush(Path(folder, INDEX))
        for file in (*paths, *[INDEX] * (n > 1)):  # last the index: nobody reads files without it
            os.replace(f"{folder}/{file}", target / file)
        flush(target)
        flush(target.parent)

    def write() -> None:
        tensors, is_new = stream(), ranks.rank == 0 and not target.exists()
        try:
            if ranks.rank == 0:
                target.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=target) as folder:
                    write_files(folder, tensors)
        finally:
            deque(tensors, maxlen=0)  # every rank takes part in all gathers, also where the first one cannot write
            with suppress(OSError):  # of a directory that is not empty
                if is_new:
                    target.rmdir()

    with torch.no_grad():
        ranks.run(write, "checkpoint.export")
    LOGGER.info("checkpoint.export: %s is complete", target)
    return target


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and not (is_directory(target) and not any(target.iterdir())):
        raise FileExistsError(f"{target}: expected a path where nothing is, or an empty directory; export replaces nothing")
    parent = next(path for path in (target, *target.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{target}: expected a place to write to, and '{parent}' is none")


def _find_full(params: Mapping[str, Tensor], spec: PartitionSpec) -> Params:
    """Return the parameters that are given in full, by name."""
    found = ((unit, find_full_params(params, unit, dict(spec.bound_mesh.sizes))) for unit in spec)
    full = {
        param.name: tensor.detach() for unit, some in found if some for param, tensor in zip(unit.params, some, strict=True)
    }
    return full | {name: params[name] for name in spec.ignored if name in params}


def _plan_files(
    params: Mapping[str, Tensor],
    spec: PartitionSpec,
    dtype: torch.dtype | None,
    full: Params,
    rename: Callable[[str], str],
    shard_bytes: int,
) -> tuple[list[dict[str, str]], int]:
    """Return for each file the names in it by those in the model, and all bytes. Raises an error for what files cannot hold."""
    sharded: Params = {}
    for unit in (unit for unit in spec if unit.key in params):
        check_storable(params[unit.key], f"parameter '{unit.params[0].name}'")
        own, sizes = unit.dtype if unit.is_encoded else params[unit.key].dtype, dict(spec.bound_mesh.sizes)
        sharded |= {param.name: without_memory(global_shape(param, sizes), own) for param in unit.params}
    for name, tensor in full.items():
        check_storable(tensor, f"'{name}'")
    files: list[dict[str, str]] = [{}]
    seen: dict[str, str] = {}
    total = begin = 0
    for name, tensor in (sharded | full).items():
        if (stored := find_result_dtype(tensor.dtype, dtype)) not in DTYPES.values():
            raise ValueError(f"'{name}': expected a dtype that safetensors has, got {stored}")
        if (new := rename(name)) in seen:
            raise ValueError(f"'{name}' and '{seen[new]}' would both be '{new}' in the files: expected one name for each")
        seen[new] = name
        end = total + tensor.numel() * stored.itemsize
        if files[-1] and end - begin > shard_bytes:
            files.append({})
            begin = total
        files[-1][name], total = new, end
    return files, total


# --- read_safetensors ---


class _FileTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    opened: Any
    """The file, as safetensors opens it: mapped into memory."""

    def read(self, box: Box) -> Tensor:
        return self.opened.get_slice(self.name)[box.slices] if self.shape else self.opened.get_tensor(self.name)


def read_safetensors(
    path: str | os.PathLike[str],
    spec: PartitionSpec,
    *,
    rename: Callable[[str], str | None] | None = None,
    cast: bool = False,
    timeout: float = TIMEOUT,
) -> Params:
    """Return the shards of the parameters in safetensors files, by unit key. Inverse of `export`.

    Every rank reads the ranges in its slice. A tied parameter may have any one of its names. Parameters that the spec
    ignores are not read. It needs the package safetensors.

    Args:
        path: A file, an index (``.json``), or a directory with ``model.safetensors`` or an index, the same on all ranks.
        spec: A bound spec, all ranks of whose mesh call this.
        rename: A function from the name in the files to the name in the model, or to None for a tensor to pass over, such as a
            buffer. The default removes the prefixes of wrappers.
        cast: Whether to convert floating point tensors to the spec's dtypes.
        timeout: The seconds that ranks wait for a lost rank.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: Naming the parameter, for one that only the files or the spec have, or of another shape or dtype.
        CheckpointError: Naming the file, for one that is damaged or cut short. Every rank raises the errors of all.

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
    ranks = Ranks(spec, "checkpoint.read_safetensors", timeout, path=path)

    def read() -> Params:
        stored, params = _find_tensors_in_files(Path(path), rename or clean_name), dict[str, Tensor]()
        names = {unit: tuple(param.names for param in unit.params) for unit in spec}
        leaves = {unit.key: slice_leaf(names[unit], unit.dtype, unit, spec, is_encoded=unit.is_encoded) for unit in spec}
        _check_tensors(stored, path, spec, leaves, cast=cast)
        with torch.no_grad():
            for key, leaf in leaves.items():
                memory = leaf.allocate()
                leaf.fill(memory, lambda names, box: next(stored[name] for name in names if name in stored).read(box))
                params[key] = leaf.to_state(memory, spec)
        return params

    params = ranks.run(read, "checkpoint.read_safetensors")
    LOGGER.info("checkpoint.read_safetensors: %s is read", path)
    return params


def _find_tensors_in_files(path: Path, rename: Callable[[str], str | None]) -> dict[str, _FileTensor]:
    """Return the tensors by their names in the model. Raises CheckpointError for a file that is damaged, or missing."""
    safetensors, found, file = _import_safetensors(), list[_FileTensor](), path
    files = _list_files(path)
    try:
        for file in files:
            open_regular(file).close()
            opened = safetensors.safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - no dict
                tensor = opened.get_slice(name)
                if (dtype := tensor.get_dtype()) not in DTYPES:
                    raise DamagedError(f"tensor '{name}': expected one of the dtypes {[*DTYPES]}, got {dtype!r}")
                found.append(_FileTensor(name, tuple(tensor.get_shape()), DTYPES[dtype], file, opened))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: expected this file, which the index names, got none") from None
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged, cut short, or no file of safetensors: {error!r}") from error
    out: dict[str, _FileTensor] = {}
    for tensor in found:
        if (name := rename(tensor.name)) in out:
            both = f"'{tensor.name}' and '{out[name].name}'"
            raise ValueError(f"{both} are both '{name}' in the model: expected one name for each")
        out |= {} if name is None else {name: tensor}
    return out


def _list_files(path: Path) -> list[Path]:
    if path.is_dir():  # as transformers: an index beside the one file belongs to an earlier save
        path = path / SINGLE if (path / SINGLE).is_file() or not (path / INDEX).is_file() else path / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file of safetensors, an index, or a directory with '{SINGLE}' or an index")
    if path.suffix != ".json":
        return [path]
    try:
        names = dict.fromkeys(json.loads(read_regular(path).decode())["weight_map"].values())
        if wrong := [name for name in names if not is_plain_name(name)]:
            raise ValueError(f"expected files beside it, got {reprlib.repr(wrong[0])}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the index is damaged: {type(error).__name__}: {error}") from error
    return [path.with_name(name) for name in names]


def _check_tensors(
    stored: Mapping[str, _FileTensor], path: str, spec: PartitionSpec, leaves: Mapping[str, TensorLeaf], *, cast: bool
) -> None:
    for key, leaf in leaves.items():
        for i, names in enumerate(leaf.names):
            where, found = f"parameter '{names[0]}' of unit '{key}'", [stored[name] for name in names if name in stored]
            if not found:
                raise ValueError(
                    f"{where} is not in {path}: expected {list(leaf.shapes[i])} {leaf.dtype}, got {len(stored)} tensors "
                    f"such as {sorted(stored)[:3]}; rename= maps their names"
                )
            tensor, *others = found
            if others:
                both = f"'{tensor.name}' and '{others[0].name}'"
                raise ValueError(f"{where}: expected one of its names, got {both}; leave one out, by a rename= that gives None")
            is_castable = tensor.shape == leaf.shapes[i] and tensor.dtype.is_floating_point and leaf.dtype.is_floating_point
            if not (cast and is_castable):
                leaf.check_stored(i, tensor, spec, f"{tensor.file}{'; cast=True converts it' if is_castable else ''}")
    for name in stored:
        if name not in spec.by_name and name not in spec.ignored:
            raise ValueError(
                f"tensor '{name}' of {stored[name].file} is no parameter of the spec: expected names such as "
                f"{list(spec.by_name)[:3]}; rename= maps names, and gives None for tensors to pass over, such as buffers"
            )


# --- optimizer_state_dict: the state by parameter names, as torch.optim has it, and back ---

StateDict: TypeAlias = dict[str, Any]
"""``{"state": {parameter: {name: tensor}}, "param_groups": [{"params": [parameter, ...], **options}]}``."""
COUNTED = {"momentum_buffer", "step"}
"""The state of SGD with dampening in `optim.from_torch`. torch has no step count, and no momentum before the first step."""


def optimizer_state_dict(
    state: Mapping[str, Mapping[str, Tensor]],
    spec: PartitionSpec,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    options: ParamOptions | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    timeout: float = TIMEOUT,
    **defaults: Any,
) -> StateDict:
    """Return the state_dict that torch's optimizer of the unsharded model would have, by parameter names, in full tensors.

    ``set_optimizer_state_dict`` of torch.distributed.checkpoint.state_dict gives it to torch's optimizer. Inverse of
    `from_optimizer_state_dict`.

    Args:
        state: A state of `optim.from_torch`. The result has the parameters of its units.
        spec: The bound spec of the state, all ranks of whose mesh call this.
        optimizer_class: The torch optimizer that `optim.from_torch` was given.
        options: The options that it was given, for ``param_groups``, with ``lr`` as it is now. No group is without parameters.
        rank0_only: Whether only the mesh's first rank gets the full tensors, and the others ``{}``, as in `unshard`.
        offload_to_cpu: Whether the tensors are on the host.
        timeout: The seconds that ranks wait for a lost rank.
        defaults: The options of all parameters, as `optim.from_torch` was given them.

    Raises:
        ValueError: On every rank and naming the unit, for a state of another spec or one that differs between ranks.
        TypeError: For a state that is not elementwise, as those of Adafactor, Muon and `quantized_state`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(8, 1, bias=False))
        >>> state = {"": {"momentum_buffer": torch.ones(8)}}
        >>> fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)["state"]
        {'weight': {'momentum_buffer': tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])}}
    """
    spec = bind_spec(spec)
    ranks = Ranks(spec, "checkpoint.optimizer_state_dict", timeout, rank0_only=bool(rank0_only))
    groups, group_of_param = group_by_options(spec, options)

    def describe() -> tuple[list[StateDict], dict[Part, str]]:
        _, texts = summarize(_describe(state, spec), spec, ranks.size)
        if optimizer_class in ELEMENTWISE_CLASSES:  # others have the state that initial= of from_torch gave
            known = {*from_torch(optimizer_class, **defaults).init({"": torch.zeros(1)})[""]}
            for key, name in ((key, name) for key, own in state.items() for name in sorted(own.keys() - known)):
                raise ValueError(
                    f"unit '{key}' has the state '{name}', and {optimizer_class.__name__} with these options has "
                    f"{sorted(known)}: expected the class and options that optim.from_torch was given"
                )
        given = [{"params": [torch.empty(0)], **group} for group in groups]
        return optimizer_class(given, **defaults).state_dict()["param_groups"], texts

    param_groups, _ = ranks.decide(describe, compare_texts, "checkpoint.optimizer_state_dict")
    units = [unit for unit in spec if unit.key in state]
    out: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for unit in units:
            slots = dict(state[unit.key])
            if {*slots} == COUNTED and not slots.pop("step"):
                continue  # never stepped
            for slot, tensor in slots.items():
                if tensor.dim():
                    full = gather_stored({unit.key: tensor}, spec, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
                else:
                    full = {p.name: (tensor.cpu() if offload_to_cpu else tensor).clone() for p in unit.params}
                for name, value in full.items():
                    out.setdefault(name, {})[slot] = value
    if rank0_only and ranks.rank:
        return {}
    for i, group in enumerate(param_groups):
        group["params"] = [p.name for unit in units for p in unit.params if group_of_param[p.name] == i]
    return {"state": out, "param_groups": [group for group in param_groups if group["params"]]}


def from_optimizer_state_dict(
    found: Mapping[str, Any], spec: PartitionSpec, init_state: Mapping[str, Mapping[str, Tensor]], *, timeout: float = TIMEOUT
) -> State:
    """Return the state of `optim.from_torch` for a state_dict of a torch optimizer. Inverse of `optimizer_state_dict`.

    Args:
        found: The state_dict with full tensors by parameter name, which all ranks have, as ``get_optimizer_state_dict`` of
            torch.distributed.checkpoint gives it. Any name of a parameter is found, also with the prefixes of wrappers. A
            parameter of ``param_groups`` without a state gets the initial one. The options in ``param_groups`` are not read.
        spec: The bound spec of the result, all ranks of whose mesh call this.
        init_state: The result of ``init(params)``, which the result has the structure, shapes and dtypes of.
        timeout: The seconds that ranks wait for a lost rank.

    Raises:
        ValueError: On every rank and naming the parameter, for one that is missing, unknown or given twice, for a state of
            another name, shape or dtype, and for a number, such as the step, that differs between parameters of a unit.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(8, 1, bias=False))
        >>> state = {"": {"momentum_buffer": torch.ones(8)}}
        >>> found = fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> fs.checkpoint.from_optimizer_state_dict(found, spec, state)
        {'': {'momentum_buffer': tensor([1., 1., 1., 1., 1., 1., 1., 1.])}}
    """
    spec = bind_spec(spec)
    ranks = Ranks(spec, "checkpoint.from_optimizer_state_dict", timeout)

    def read() -> State:
        tree = _describe(init_state, spec)
        states = _states_by_name(found, spec, init_state)
        with torch.no_grad():
            values = [_read_leaf(leaf, x, states, spec) for leaf, x in zip(tree.leaves, tree.values, strict=True)]
        return rebuild(init_state, iter(values))

    return ranks.run(read, "checkpoint.from_optimizer_state_dict")


def _states_by_name(
    found: Mapping[str, Any], spec: PartitionSpec, init_state: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Mapping[str, Any]]:
    """Return the states by the parameters' own names, checked to be what the initial state has."""

    def own_name(key: Any) -> str:
        if not isinstance(key, str):
            raise ValueError(
                f"expected the state by parameters' names, got the key {key!r}; "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it"
            )
        name = key if key in spec.by_name else clean_name(key)
        if name not in spec.by_name:
            raise ValueError(f"parameter '{key}' is not in the spec: expected names such as {list(spec.by_name)[:3]}")
        return spec.by_name[name][1].name

    units = {param.name: key for key in init_state for param in spec.by_key[key].params}
    known = {own_name(key) for group in found.get("param_groups", ()) for key in group["params"]}
    states: dict[str, Mapping[str, Any]] = {}
    for key, slots in found["state"].items():
        if (name := own_name(key)) in states:
            raise ValueError(f"parameter '{name}' has two states, one of them as '{key}': expected one")
        states[name] = {slot: value for slot, value in slots.items() if value is not None}  # SGD before the first step
    if missing := units.keys() - known - states.keys():
        name = min(missing)
        raise ValueError(
            f"parameter '{name}' of unit '{units[name]}' has no state and is in no group: expected it in the state_dict"
        )
    for name, slots in states.items():
        if slots and name not in units:
            raise ValueError(f"parameter '{name}' has a state, expected one of those of init_state: {sorted(units)[:3]}")
        wanted = {*init_state[units[name]]} if slots else {*slots}
        if wanted == COUNTED:
            states[name] = slots = {**slots, "step": 1}
        if {*slots} != wanted:
            raise ValueError(
                f"parameter '{name}': expected a state of {sorted(wanted)}, got {sorted(slots)}; is it another optimizer's?"
            )
    return {name: slots for name, slots in states.items() if slots}


def _read_leaf(leaf: Any, initial: Tensor, states: Mapping[str, Mapping[str, Any]], spec: PartitionSpec) -> Tensor:
    """Return this rank's slice of full tensors, or a number, with the initial values of parameters that have none."""
    memory = copy_like(initial)
    if not initial.dim():
        memory = memory.repeat(len(leaf.names))
    values: dict[str, Tensor] = {}
    for i, (own, *_) in enumerate(leaf.names):
        name, _, slot = own.rpartition(".")
        if name in states:
            value = states[name][slot]
            values[own] = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=initial.dtype)
            leaf.check_stored(i, values[own], spec, "the state_dict")
    leaf.fill(memory, lambda names, box: values[names[0]][box.slices] if names[0] in values else None)
    return memory if initial.dim() else leaf.to_state(memory, spec)


def _describe(state: Mapping[str, Mapping[str, Tensor]], spec: PartitionSpec) -> Description:
    """Return the description of an elementwise state, by unit key. Raises TypeError or ValueError for any other."""
    tables = (state, *state.values()) if isinstance(state, Mapping) else (state,)  # pyright: ignore[reportUnnecessaryIsInstance]
    if got := [type(table).__name__ for table in tables if not isinstance(table, Mapping)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"expected the elementwise state of from_torch by unit key, got {got[0]}; it is the last entry of the state of "
            "optim.chain, and the inner one of optimizers that are made of others. That of matrices, as of Adafactor and Muon, "
            "has no such form: checkpoint.save keeps it for any units and ranks"
        )
    refuse_encoded(state)
    if others := [key for key in state if key not in spec.by_key]:
        raise ValueError(f"unit '{others[0]}' is not in the spec: expected some of {[*spec.by_key][:8]}")
    return Description(state, spec, units={()})
