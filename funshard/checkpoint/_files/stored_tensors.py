"""The tensors in the files of a checkpoint: find them by name, check them, and read ranges of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from .._errors import CheckpointError
from .._rekey import clean_name
from .._state.leaves import TensorLeaf, TensorRange
from .planners import RangeLoadPlanner, check_chunks
from .reader import CheckpointReader

__all__ = ["StoredTensors"]


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint, by their keys: their names, perhaps with the prefixes of wrappers."""

    directory: Path
    metadata: Metadata
    checksums: Mapping[str, Mapping[str, int]]
    """Those of the manifest, as in `Manifest`."""
    _checked: set[str] = field(default_factory=set)

    def find_key(self, names: Sequence[str]) -> str | None:
        """Return the key of the first of these names that the checkpoint has, or None."""
        every = self.metadata.state_dict_metadata
        return next((key for name in names for key in (name, self._keys.get(name)) if key is not None and key in every), None)

    @cached_property
    def _keys(self) -> dict[str, str]:
        """The keys by their clean names, if only one key has that name."""
        out: dict[str, str] = {}
        for key in self.metadata.state_dict_metadata:
            out[clean_name(key)] = "" if clean_name(key) in out else key
        return {name: key for name, key in out.items() if key}

    def check_tensor(
        self, names: Sequence[str], shape: Sequence[int] | None, dtype: torch.dtype, hint: str = "", why: str = ""
    ) -> tuple[int, ...]:
        """Return the shape of a stored tensor. Raises ValueError, with ``why`` and a hint, if it is missing or does not fit."""
        key = self.find_key(names)
        tensor = None if key is None else self.metadata.state_dict_metadata[key]
        if key is None or not isinstance(tensor, TensorStorageMetadata):
            others = sorted(self.metadata.state_dict_metadata)[:3]
            self._check_form(names[0])
            raise ValueError(
                f"tensor '{names[0]}' is not in the checkpoint: expected {list(shape or ())} {dtype}, got none; the checkpoint "
                f"has {others} and so on: "
                + (why or "was another model saved, or has a checkpoint of funshard lost its funshard.json?")
            )
        if (shape is not None and tuple(tensor.size) != tuple(shape)) or tensor.properties.dtype != dtype:
            raise ValueError(
                f"tensor '{names[0]}': expected {list(shape or ())} {dtype}, got {list(tensor.size)} {tensor.properties.dtype} "
                f"in the checkpoint: {why or 'was another model saved?'}{hint}"
            )
        self._check_chunks(key, tensor)
        return tuple(tensor.size)

    def _check_form(self, name: str) -> None:
        """Raise ValueError if the checkpoint has a missing tensor in another form: in a codec, or in its own dtype."""
        slot, _, part = name.rpartition(".")
        if self.find_key([f"{name}.codes"]) is not None:
            raise ValueError(
                f"tensor '{name}' is in a codec in the checkpoint: expected a like= whose state is encoded for the same "
                "parameters (at_least= of quantized_state), or no like=; fs.optim.decode_state converts the state"
            )
        if part in ("codes", "scales") and self.find_key([slot]) is not None:
            raise ValueError(
                f"tensor '{slot}' is in no codec in the checkpoint: expected a like= whose state is not encoded for the same "
                "parameters (at_least= of quantized_state), or no like=; fs.optim.encode_state converts the state"
            )

    def _check_chunks(self, key: str, tensor: TensorStorageMetadata) -> None:
        """Check, once, that a tensor's chunks tile it and that each is in a file. Raises CheckpointError otherwise."""
        if key in self._checked:
            return
        try:
            check_chunks(tensor)
        except ValueError as error:
            raise CheckpointError(f"tensor '{key}' of the checkpoint is damaged: {error}") from error
        storage: Any = self.metadata.storage_data
        for chunk in tensor.chunks:
            if MetadataIndex(key, chunk.offsets) not in storage:
                raise CheckpointError(
                    f"tensor '{key}' of the checkpoint is damaged: its piece at {[*chunk.offsets]} is in none of the files"
                )
        self._checked.add(key)

    def check_leaf(self, leaf: TensorLeaf) -> tuple[int, ...]:
        """Return the stored shape of a leaf, which has a row for each rank that saved it if it is each rank's own."""
        shape = self.check_tensor([leaf.name], None if leaf.is_per_rank else leaf.shape, leaf.dtype)
        if leaf.is_per_rank and (not shape or shape[1:] != leaf.shape):
            raise ValueError(
                f"tensor '{leaf.name}' is each rank's own: expected [ranks, {str([*leaf.shape])[1:]} in the checkpoint, got "
                f"{[*shape]}: was another state saved?"
            )
        return shape

    def read(self, parts: Sequence[TensorRange], *, check: bool) -> None:
        """Read ranges of these tensors into their memory, as torch.distributed.checkpoint.load does."""
        planner, reader = RangeLoadPlanner(parts), CheckpointReader(self.directory, check=check, checksums=self.checksums)
        planner.set_up_planner({}, self.metadata)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
