"""load: a checkpoint as the state of another world size, mesh and policy; each rank reads what it needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from .._spec.spec import PartitionSpec, bind_spec
from ._errors import CheckpointError
from ._files.manifest import read_manifest
from ._files.metadata import read_metadata
from ._files.planners import Reads
from ._files.reader import Reader
from ._ranks.ranks import TIMEOUT, Ranks, ranks_of
from ._rekey import clean_name
from ._state.boxes import Box, check_tiles
from ._state.describe import described
from ._state.json_tree import check_ranks, part_of, plain_values, read_tree
from ._state.leaves import Leaf, Owned, Part, Scalar, Slice, Value, Whole, all_alike
from ._state.tree import Node, Units, build, leaves, parameters

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    spec: PartitionSpec,
    *,
    only: str | None = None,
    like: Any = None,
    check: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """The state that `save` wrote to the directory ``path``, sharded by this spec: other policy, mesh, `P` and world size.

    Each rank reads what overlaps with its slices, in boxes of at most 16 MiB, into the result's own memory. Tensors are on
    the mesh's device if they were on the accelerator, or else on the host. What was `per_rank` comes back without it.

    ``only`` is the path of a part of the state, such as ``"params"`` or ``"opt.ema"``: that part is what comes back, and the
    rest is not read. ``like`` is a state of the structure that is wanted, of which only shapes, dtypes and keys are looked at
    (tensors may be on the meta device): it is needed for containers of the caller's own classes, and for checkpoints that
    others wrote. Those of FSDP1, FSDP2 and DDP by torch.distributed.checkpoint are read by their parameters' names:
    ``load(path, spec, only="model")`` gives the shards of what was saved as ``{"model": state_dict}``, and
    ``like={"model": params, "optim": {"state": opt_state}}`` its optimizer's state too. The prefixes of wrappers are left out.

    No pickle is run: torch's description of the files is read by the names of its data classes alone, tensors with
    ``weights_only``. With ``check`` the checksum of each record that is read is compared.

    Raises, on every rank, FileNotFoundError where there is no checkpoint; ValueError, naming the parameter, for one that is
    only in the checkpoint or the spec, and for another shape or dtype; CheckpointError, naming tensor and file, for what is
    damaged.

    Example:
        >>> import tempfile, torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        >>> one, two = fs.policies.whole()(model), fs.by_path({"1": fs.P("shard")})(model)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = fs.checkpoint.save(f"{directory}/step3", fs.shard(model, one), one).wait()
        ...     print(sorted(fs.checkpoint.load(path, two)))
        ['', '1']
    """
    spec = bind_spec(spec)
    if only is not None and not isinstance(only, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"checkpoint.load: only: expected the path of a part of the state, as 'params', got {only!r}")
    ranks = ranks_of(spec, "checkpoint.load", timeout)
    directory = Path(path)
    node, found, stored = ranks.together(lambda: _wanted(directory, spec, only, like, ranks), "checkpoint.load")
    return ranks.together(lambda: _loaded(directory, node, found, stored, spec, ranks, check=check), "checkpoint.load")


def _loaded(
    directory: Path, node: Node, found: Mapping[str, Any], stored: _Stored, spec: PartitionSpec, ranks: Ranks, *, check: bool
) -> Any:
    kept = list(leaves(node))
    values: list[Any] = [None] * len(kept)
    with torch.no_grad():
        for some in _rounds(kept):
            memory = {i: _memory(kept[i], spec, stored, ranks) for i in some}
            parts = [part for i in some for part in _parts(kept[i], memory[i], spec, stored, ranks)]
            _read(directory, parts, stored, check=check)
            for i in some:
                values[i] = _settled(kept[i], memory.pop(i), spec, found)
    return build(node, iter(values))


def _rounds(kept: Sequence[Leaf]) -> Iterator[list[int]]:
    """What is read together: what is encoded afterwards a unit at a time, all else at once."""
    yield [i for i, leaf in enumerate(kept) if not (isinstance(leaf, Slice) and leaf.encoded)]
    yield from ([i] for i, leaf in enumerate(kept) if isinstance(leaf, Slice) and leaf.encoded)


def _read(directory: Path, parts: Sequence[Part], stored: _Stored, *, check: bool) -> None:
    """Read, as torch.distributed.checkpoint.load does."""
    reads, reader = Reads(parts), Reader(directory, check=check)
    reads.set_up_planner({}, stored.metadata)
    reader.set_up_storage_reader(stored.metadata, is_coordinator=True)
    reader.read_data(reads.create_local_plan(), reads).wait()


# --- What is wanted, and whether it is there. ---


@dataclasses.dataclass(frozen=True)
class _Stored:
    """The tensors of a checkpoint: the keys that they have there, which are their names with the prefixes of wrappers."""

    metadata: Metadata
    _checked: set[str] = dataclasses.field(default_factory=set)

    def key(self, names: Sequence[str]) -> str | None:
        """The key of the first of these names that is there."""
        every = self.metadata.state_dict_metadata
        return next((key for name in names for key in (name, self._clean.get(name)) if key is not None and key in every), None)

    @functools.cached_property
    def _clean(self) -> dict[str, str]:
        """Keys by their clean names, where these are no others' names."""
        out: dict[str, str] = {}
        for key in self.metadata.state_dict_metadata:
            out[clean_name(key)] = "" if clean_name(key) in out else key
        return {name: key for name, key in out.items() if key}

    def shape(self, names: Sequence[str], shape: Sequence[int] | None, dtype: torch.dtype) -> tuple[int, ...]:
        """Of a stored tensor; ValueError unless it is there, of this shape, dtype and whole."""
        key = self.key(names)
        tensor = None if key is None else self.metadata.state_dict_metadata[key]
        if key is None or not isinstance(tensor, TensorStorageMetadata):
            raise ValueError(f"tensor '{names[0]}' is not in the checkpoint: expected {list(shape or ())} {dtype}, got none")
        if (shape is not None and tuple(tensor.size) != tuple(shape)) or tensor.properties.dtype != dtype:
            raise ValueError(
                f"tensor '{names[0]}': expected {list(shape or ())} {dtype}, got {list(tensor.size)} {tensor.properties.dtype} "
                "in the checkpoint: was another model saved?"
            )
        self._check_chunks(key, tensor)
        return tuple(tensor.size)

    def _check_chunks(self, key: str, tensor: TensorStorageMetadata) -> None:
        """Check, once, that a tensor's chunks tile it and that each is in a file; CheckpointError otherwise."""
        if key in self._checked:
            return
        try:
            check_tiles(tensor.size, (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks))
        except ValueError as error:
            raise CheckpointError(f"tensor '{key}' of the checkpoint is damaged: {error}") from error
        storage: Any = self.metadata.storage_data
        for chunk in tensor.chunks:
            if MetadataIndex(key, chunk.offsets) not in storage:
                raise CheckpointError(
                    f"tensor '{key}' of the checkpoint is damaged: its piece at {[*chunk.offsets]} is in none of the files"
                )
        self._checked.add(key)

    def shape_of(self, leaf: Whole) -> tuple[int, ...]:
        """The same of one that all ranks have alike, or, with a row for each that saved it, each its own."""
        shape = self.shape([leaf.name], None if leaf.own else leaf.shape, leaf.dtype)
        if leaf.own and (not shape or shape[1:] != leaf.shape):
            raise ValueError(
                f"tensor '{leaf.name}' is each rank's own: expected [ranks, {str([*leaf.shape])[1:]} in the checkpoint, got "
                f"{[*shape]}: was another state saved?"
            )
        return shape


def _wanted(
    directory: Path, spec: PartitionSpec, only: str | None, like: Any, ranks: Ranks
) -> tuple[Node, dict[str, Any], _Stored]:
    """``(the tree that is to be read, the plain values, the tensors)``."""
    manifest = read_manifest(directory)  # with a checksum of the other
    stored = _Stored(read_metadata(directory))
    path = tuple(only.split(".")) if only else ()
    found = dict(plain_values(manifest.state, ranks.rank)) if manifest else {}
    if like is not None:
        node, _ = described(like, spec, path, wanted=True)
    elif manifest:
        node = read_tree(part_of(manifest.state, only or ""), spec, ranks.rank, ranks.size, path)
    else:
        node = Units(only or "", {unit.key: parameters(unit, path) for unit in spec}, whole=True)  # a state_dict of others
    for leaf in leaves(node):
        if isinstance(leaf, Value):
            found[leaf.name] = _plain(leaf, found)
        else:
            _check(leaf, stored, ranks)
    return node, found, stored


def _plain(leaf: Value, found: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for own, *aliases in leaf.names or ((leaf.name,),):
        there = [found[name] for name in (own, *aliases) if name in found]
        if not there:
            raise ValueError(f"state '{own}' is no plain value in the checkpoint: expected like= without it")
        values[own] = there[0]
    (first, value), *others = values.items()
    for own, other in others:
        if repr(other) != repr(value):
            raise ValueError(
                f"state '{own}': expected the same as '{first}', which is in one unit with it, {value!r}, got {other!r}; "
                "choose units whose parameters have the same"
            )
    return value


def _check(leaf: Slice | Scalar | Whole | Owned, stored: _Stored, ranks: Ranks) -> None:
    if isinstance(leaf, Whole):
        shape = stored.shape_of(leaf)
        if leaf.own and not leaf.averaged:
            check_ranks(leaf.name, shape[0], ranks.size)
        return
    if isinstance(leaf, Owned):
        stored.shape(leaf.names, leaf.shape, leaf.dtype)
        return
    shapes = (p.shape for p in leaf.params) if isinstance(leaf, Slice) else itertools.repeat(())
    for shape, names in zip(shapes, leaf.names, strict=False):
        stored.shape(names, shape, leaf.dtype)


# --- Memory for it. ---


def _memory(leaf: Leaf, spec: PartitionSpec, stored: _Stored, ranks: Ranks) -> Any:
    match leaf:
        case Value():
            return None
        case Slice():
            return leaf.memory(spec)
        case Owned():
            return leaf.memory()
        case Scalar():
            return torch.empty(len(leaf.names), dtype=leaf.dtype, device="cpu")
        case Whole():
            shape = stored.shape_of(leaf)
            own = leaf.own and shape[0] == ranks.size
            try:
                return torch.empty(shape[1:] if own else shape, dtype=leaf.dtype, device="cpu")
            except RuntimeError as error:
                raise CheckpointError(f"tensor '{leaf.name}': expected to have memory for {[*shape]} {leaf.dtype}") from error


def _parts(leaf: Leaf, memory: Any, spec: PartitionSpec, stored: _Stored, ranks: Ranks) -> Iterator[Part]:
    match leaf:
        case Value():
            return
        case Slice():
            parts = leaf.parts(memory, spec, ranks.rank, ranks.size)
        case Owned():
            parts = leaf.parts(memory)
        case Scalar():
            named = enumerate(leaf.names)
            parts = (Part(names[0], names[1:], (), (), 0, memory[i : i + 1], 0, 1) for i, names in named)
        case Whole():
            row = leaf.own and memory.dim() == len(leaf.shape)
            shape, begin = (*((ranks.size,) if row else ()), *memory.shape), ranks.rank * memory.numel() * row
            parts = [Part(leaf.name, (), shape, tuple(range(len(shape))), begin, memory.view(-1), 0, 1)]
    for part in parts:
        key = stored.key([part.name, *part.aliases])
        assert key is not None
        yield part._replace(name=key)


def _settled(leaf: Leaf, memory: Any, spec: PartitionSpec, found: Mapping[str, Any]) -> Any:
    """What was read, as it is in the state."""
    device = spec.bound_mesh.device
    match leaf:
        case Value():
            return found[leaf.name]
        case Slice():
            return leaf.closed(memory, spec)
        case Scalar():
            if not all_alike(memory):
                raise ValueError(
                    f"unit '{leaf.unit.key}': expected one '{leaf.names[0][0]}' for all of its parameters, got "
                    f"{memory.unique().tolist()[:4]}; choose units whose parameters have taken as many steps"
                )
            one = memory[0].clone()
            return one.to(device) if leaf.accelerated and device else one
        case Owned():
            return memory.to(device) if leaf.accelerated and device else memory
        case Whole():
            if memory.dim() > len(leaf.shape):  # of other ranks
                memory = memory.mean(0)
            return memory.to(device) if leaf.accelerated and device else memory
