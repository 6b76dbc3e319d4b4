"""load: read a checkpoint as a state of any spec; each rank reads what its slices overlap with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._core.checks import bind_spec
from .._core.spec import PartitionSpec
from .._spec.local import describe_pieces
from .._torch.phases import LOGGER, phase
from ._errors import CheckpointError
from ._files.manifest import METADATA, read_manifest, read_metadata
from ._files.reader import StoredTensors
from ._files.untrusted import checksum, read_regular
from ._ranks import TIMEOUT, Ranks, connect_ranks
from ._state.json_tree import check_rank_count, iter_plain_values, select_part, tree_from_json
from ._state.leaves import (
    OwnedLeaf,
    ScalarLeaf,
    SliceLeaf,
    StoredLeaf,
    TensorLeaf,
    TensorRange,
    ValueLeaf,
    is_uniform,
    leaf_names,
)
from ._state.tree import Node, build_state, describe, iter_leaves, make_units_node, parameter_slice

__all__ = ["load"]

OTHER_BLOCKS = (
    "blocks of a codec follow the memory order of each piece over local axes: was it saved with others? Load it as it was "
    "saved, and save what fs.optim.decode_state returns, which loads with any"
)


def load(
    path: str | os.PathLike[str],
    spec: PartitionSpec,
    *,
    only: str | None = None,
    like: Any = None,
    check: bool = True,
    timeout: float = TIMEOUT,
) -> Any:
    """Return the state that `save` wrote to a directory, sharded by this spec.

    The policy, the mesh, `P` and the number of ranks may differ from those of the save. Each rank reads what overlaps with its
    slices, in boxes of at most 16 MiB, into the result's own memory. Pickles in the files are read as data: nothing in them is
    imported or called.

    The checkpoints of FSDP1, FSDP2 and DDP by torch.distributed.checkpoint are read by the names of their parameters, without
    the prefixes of wrappers. ``only="model"`` returns the shards of what was saved as ``{"model": state_dict}``, and
    ``like={"model": params, "optim": {"state": opt_state}}`` the optimizer's state too.

    Args:
        path: The directory of the checkpoint, the same one on all ranks: a copy for each machine is, another save is an error.
        spec: A bound spec, all ranks of whose mesh call this.
        only: The path of a part of the state to read, such as ``"params"`` or ``"opt.ema"``.
        like: A state with the structure, shapes and dtypes of the result; tensors may be on the meta device. It is needed for
            containers of the caller's own classes and for optimizer states that other programs wrote.
        check: Whether to compare the checksums of the records that are read.
        timeout: The seconds that ranks wait for a lost rank.

    Returns:
        The state, or the part of it. Tensors are on the mesh's device if they were on an accelerator, else on the host. What
        was marked by `per_rank` comes back without the mark.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: Naming the parameter, for one that only the checkpoint or the spec has, or of another shape or dtype.
        CheckpointError: Naming tensor and file, for damage. Every rank raises the errors of all.

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
    path = os.fsdecode(path)
    ranks = connect_ranks(spec, "checkpoint.load", timeout, only=only)
    loader, found = ranks.run_and_exchange(
        lambda: _Loader(Path(path), spec, ranks, only, like), "checkpoint.load", lambda loader: (loader.identity, path)
    )
    if other := next((rank for rank, (identity, _) in enumerate(found) if identity != found[0][0]), 0):
        raise ValueError(
            f"checkpoint.load: expected one checkpoint and names of one like= on all ranks, got on rank 0 {found[0][1]!r}, on "
            f"rank {other} {found[other][1]!r}, with other contents or names; latest(directory, spec) gives all ranks one path"
        )
    state = ranks.run(lambda: loader.read(check=check), "checkpoint.load")
    LOGGER.info("checkpoint.load: %s is read", path)
    return state


class _Loader:
    """A load: it finds the tree to read in a checkpoint, checks that the files have its leaves, and reads them."""

    def __init__(self, directory: Path, spec: PartitionSpec, ranks: Ranks, only: str | None, like: Any) -> None:
        self._spec, self._ranks = spec, ranks
        manifest = read_manifest(directory)  # also checks the metadata's checksum
        self._stored = StoredTensors(directory, read_metadata(directory), manifest.checksums if manifest else {})
        path = tuple(only.split(".")) if only else ()
        saved = dict(iter_plain_values(manifest.state, ranks.rank)) if manifest else {}
        if like is not None:
            self._node, _ = describe(like, spec, path, is_template=True)
        elif manifest:
            self._node = tree_from_json(select_part(manifest.state, only or ""), spec, ranks.rank, ranks.size, path)
        else:
            children: dict[str, Node] = {unit.key: parameter_slice(unit, path) for unit in spec}  # another program's state_dict
            self._node = make_units_node(only or "", children, is_complete=True)
        leaves = list(iter_leaves(self._node))
        self._leaves = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, ValueLeaf)}
        self._values = [_find_value(leaf, saved) if isinstance(leaf, ValueLeaf) else None for leaf in leaves]
        for leaf in self._leaves.values():
            self._check(leaf)
        names = json.dumps([name for leaf in leaves for name in leaf_names(leaf)])
        contents = manifest.metadata if manifest else (str(directory), checksum(read_regular(directory / METADATA)))
        self.identity = contents, checksum(names.encode())
        """What is equal on all ranks: the checkpoint, by the unique number that is in its metadata, and the leaves to read."""

    def _check(self, leaf: StoredLeaf) -> None:
        match leaf:
            case TensorLeaf():
                shape = self._stored.check_leaf(leaf)
                if leaf.is_per_rank and not leaf.is_averaged:
                    check_rank_count(leaf.name, shape[0], self._ranks.size)
            case OwnedLeaf():
                self._stored.check_tensor(leaf.names, leaf.whole_shape(self._spec), leaf.dtype)
            case SliceLeaf():
                sizes = dict(self._spec.bound_mesh.sizes)
                why = OTHER_BLOCKS if leaf.block > 1 else ""
                for param, names in zip(leaf.params, leaf.names, strict=True):
                    shape, hint = leaf.stored_shape(param, sizes), describe_pieces(param, sizes)
                    self._stored.check_tensor(names, shape, leaf.dtype, hint, why)
            case ScalarLeaf():
                for names in leaf.names:
                    self._stored.check_tensor(names, (), leaf.dtype)

    def read(self, *, check: bool) -> Any:
        with torch.no_grad(), phase("checkpoint read"):
            for numbers in self._iter_rounds():
                memory = {i: self._allocate(self._leaves[i]) for i in numbers}
                parts = [part for i in numbers for part in self._iter_ranges(self._leaves[i], memory[i])]
                self._stored.read(parts, check=check)
                for i in numbers:
                    self._values[i] = self._to_state(self._leaves[i], memory.pop(i))
        return build_state(self._node, iter(self._values))

    def _iter_rounds(self) -> Iterator[list[int]]:
        """Yield the numbers of leaves to read together: all but encoded slices, and each of these alone to save memory."""
        is_encoded = {i: isinstance(leaf, SliceLeaf) and leaf.is_encoded for i, leaf in self._leaves.items()}
        yield [i for i in self._leaves if not is_encoded[i]]
        yield from ([i] for i in self._leaves if is_encoded[i])

    def _allocate(self, leaf: StoredLeaf) -> Tensor:
        match leaf:
            case SliceLeaf():
                return leaf.allocate(self._spec)
            case OwnedLeaf():
                return leaf.allocate()
            case ScalarLeaf():
                return torch.empty(len(leaf.names), dtype=leaf.dtype, device="cpu")
            case TensorLeaf():
                shape = self._stored.check_leaf(leaf)
                has_own_row = leaf.is_per_rank and shape[0] == self._ranks.size
                try:
                    return torch.empty(shape[1:] if has_own_row else shape, dtype=leaf.dtype, device="cpu")
                except RuntimeError as error:
                    raise CheckpointError(
                        f"tensor '{leaf.name}': expected to have memory for {[*shape]} {leaf.dtype}"
                    ) from error

    def _iter_ranges(self, leaf: StoredLeaf, memory: Tensor) -> Iterator[TensorRange]:
        """Yield the ranges of stored tensors that a leaf's memory is read from, by their keys."""
        match leaf:
            case SliceLeaf() | OwnedLeaf():
                parts = leaf.ranges(memory, self._spec, self._ranks.rank, self._ranks.size)
            case ScalarLeaf():
                pairs = enumerate(leaf.names)
                parts = (TensorRange(names[0], names[1:], (), (), 0, memory[i : i + 1], 0, 1) for i, names in pairs)
            case TensorLeaf():
                is_row = memory.dim() == len(leaf.shape)  # else the rows of another number of ranks
                stored = leaf if is_row else replace(leaf, shape=tuple(memory.shape), is_per_rank=False)
                parts = stored.ranges(memory, self._spec, self._ranks.rank, self._ranks.size)
        for part in parts:
            key = self._stored.find_key([part.name, *part.aliases])
            assert key is not None
            yield part._replace(name=key)

    def _to_state(self, leaf: StoredLeaf, memory: Tensor) -> Tensor:
        if isinstance(leaf, SliceLeaf):
            return leaf.to_state(memory, self._spec)
        if isinstance(leaf, ScalarLeaf):
            if not is_uniform(memory):
                raise ValueError(
                    f"unit '{leaf.unit.key}': expected one '{leaf.names[0][0]}' for all of its parameters, got "
                    f"{memory.unique().tolist()[:4]}; choose units whose parameters have taken as many steps"
                )
            memory = memory[0].clone()
        elif isinstance(leaf, TensorLeaf) and memory.dim() > len(leaf.shape):  # saved by another number of ranks
            memory = memory.mean(0)
        device = self._spec.bound_mesh.device
        return memory.to(device) if leaf.is_accelerated and device else memory


def _find_value(leaf: ValueLeaf, saved: Mapping[str, Any]) -> Any:
    """Return the saved plain value of a leaf, which all parameters of its unit have."""
    values: dict[str, Any] = {}
    for own, *aliases in leaf.names or ((leaf.name,),):
        found = [saved[name] for name in (own, *aliases) if name in saved]
        if not found:
            raise ValueError(f"state '{own}' is no plain value in the checkpoint: expected like= without it")
        values[own] = found[0]
    (first, value), *others = values.items()
    for own, other in others:
        if repr(other) != repr(value):
            raise ValueError(
                f"state '{own}': expected the same as '{first}', which is in one unit with it, {value!r}, got {other!r}; "
                "choose units whose parameters have the same"
            )
    return value
