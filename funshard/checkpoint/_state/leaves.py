"""What a state is made of: slices and scalars of units, tensors that all ranks have alike or each its own, plain values."""

from __future__ import annotations

import base64
import contextlib
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._spec.spec import PartitionSpec
from ..._spec.tree import Param
from ..._spec.unit import Unit
from ..._units.flow import encode_at_rest
from ..._units.host import place_slice
from ..._units.layout import Piece, rank_coords, slice_index, slice_pieces
from .._errors import DamagedError

__all__ = [
    "DEEPEST",
    "Leaf",
    "Owned",
    "Part",
    "Scalar",
    "Slice",
    "Value",
    "Whole",
    "all_alike",
    "check_holds",
    "from_json",
    "is_plain",
    "names_of",
    "to_json",
]

DEEPEST = 100
"""Containers in each other that a state may have: `load` makes them by recursion."""


class Part(NamedTuple):
    """A range of a stored tensor, in its memory order, with this rank's memory for it."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The tensor's dimensions from the outermost in memory to the innermost."""
    begin: int
    data: Tensor
    """1-D."""
    holder: int
    """Which of those that hold this range the rank is."""
    holders: int


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a unit: a range of each of its parameters. ``dtype`` is that of the stored tensors."""

    unit: Unit
    names: tuple[tuple[str, ...], ...]
    """For each of the unit's parameters the names under which it is stored, the first one its own."""
    dtype: torch.dtype
    encoded: bool = False
    """Whether it is at rest in the unit's codec once it is read."""
    of: tuple[Param, ...] | None = None
    """Of which of the unit's parameters it holds something, if not of all."""
    alone: bool = False
    """Whether it is only what lies in the slice of the one parameter ``of``."""

    @property
    def params(self) -> tuple[Param, ...]:
        """Those whose ranges are stored, as many as ``names``."""
        return self.unit.params if self.of is None else self.of

    def length(self, spec: PartitionSpec) -> int:
        """Its elements on this rank."""
        return sum(p.high - p.low for p in self._pieces(spec)) if self.alone else spec.shard_numel(self.unit)

    def memory(self, spec: PartitionSpec) -> Tensor:
        """A slice to read into, with its padding, on the device where it rests, or on its way there."""
        device = None if self.encoded or "params" in self.unit.p.offloads else spec.bound_mesh.device
        memory = torch.empty(self.length(spec), dtype=self.dtype, device=device or "cpu")
        if self.alone:
            return memory
        end = 0
        for low, high in [*((piece.low, piece.high) for piece in self._pieces(spec)), (len(memory), 0)]:
            memory[end:low].view(torch.uint8).zero_()  # padding; as bytes, since torch fills no float4
            end = max(end, high)
        return memory

    def _pieces(self, spec: PartitionSpec) -> Iterator[Piece]:
        every = slice_pieces(self.unit, spec, rank_coords(spec.bound_mesh, None))
        return (piece for piece in every if self.of is None or piece.param in self.of)

    def index(self, spec: PartitionSpec) -> int:
        """Which slice of the unit this rank has."""
        return slice_index(self.unit, spec.bound_mesh, rank_coords(spec.bound_mesh, None))

    def closed(self, tensor: Tensor, spec: PartitionSpec) -> Tensor:
        """What was read, as it is in a state."""
        return place_slice(encode_at_rest(tensor, self.unit) if self.encoded else tensor, self.unit, spec.bound_mesh)

    def parts(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[Part]:
        """The ranges of its parameters that lie in the slice."""
        mesh = spec.bound_mesh
        at = rank_coords(mesh, None)
        others = [(i, axis.size) for i, (name, axis) in enumerate(mesh.axes) if name not in self.unit.p.axes]
        holder, holders, whole = 0, 1, tensor.detach().resolve_conj().resolve_neg()
        for i, size in others:
            holder, holders = holder * size + at[i], holders * size
        for piece, (name, *aliases) in zip(self._pieces(spec), self.names, strict=True):
            data = whole if self.alone else whole[piece.low : piece.high]
            shape, order = piece.param.shape, tuple(piece.param.order)
            if len(data):
                yield Part(name, tuple(aliases), shape, order, piece.begin, data, holder, holders)
            elif not piece.param.numel:
                yield Part(name, tuple(aliases), shape, order, 0, data, rank, ranks)


@dataclass(frozen=True)
class Scalar:
    """A number that a unit has, such as an optimizer's count of steps: stored with each of its parameters."""

    unit: Unit
    names: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    accelerated: bool
    """Whether it is on the mesh's device, and not on the host."""

    def parts(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[Part]:
        """The number, once for each parameter. ValueError for several that are not alike."""
        if tensor.dim() and not all_alike(tensor):
            raise ValueError(
                f"unit '{self.unit.key}': expected one '{self.names[0][0]}' for all of its parameters, got {tensor.tolist()}; "
                "choose units whose parameters have the same options"
            )
        for name, *aliases in self.names:
            yield Part(name, tuple(aliases), (), (), 0, tensor.detach().reshape(-1)[:1], rank, ranks)


@dataclass(frozen=True)
class Whole:
    """A tensor that all ranks have alike, or, if it is ``own``, each another one: then ranks are its first dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    accelerated: bool
    own: bool = False
    averaged: bool = False
    """Whether other ranks than those that saved it take the mean of theirs."""

    def parts(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[Part]:
        """All of it, or this rank's row."""
        data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if not self.own:
            yield Part(self.name, (), self.shape, tuple(range(len(self.shape))), 0, data, rank, ranks)
        elif len(data) or rank == 0:
            shape = (ranks, *self.shape)
            yield Part(self.name, (), shape, tuple(range(len(shape))), rank * math.prod(self.shape), data, 0, 1)


@dataclass(frozen=True)
class Value:
    """What is no tensor; if it is ``own``, another one on each rank; if it is in a unit's state, one for each parameter."""

    name: str
    value: Any = None
    own: bool = False
    names: tuple[tuple[str, ...], ...] = ()
    """In a unit's state as of `Scalar`."""


@dataclass(frozen=True)
class Owned:
    """A tensor that one rank has, which owns the matrix that it belongs to; elsewhere it is empty, [0, *shape]."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    accelerated: bool
    here: bool
    """Whether this rank has it."""

    def memory(self) -> Tensor:
        """To read into."""
        return torch.empty(self.shape if self.here else (0, *self.shape), dtype=self.dtype, device="cpu")

    def parts(self, tensor: Tensor) -> Iterator[Part]:
        """All of it, on its owner."""
        if self.here:
            data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            yield Part(self.names[0], self.names[1:], self.shape, tuple(range(len(self.shape))), 0, data, 0, 1)


Leaf = Slice | Scalar | Whole | Owned | Value


def names_of(leaf: Leaf) -> list[str]:
    """All names under which it is stored."""
    if isinstance(leaf, Whole | Value):
        return [leaf.name]
    return [*leaf.names] if isinstance(leaf, Owned) else [name for names in leaf.names for name in names]


def check_holds(tensor: object, what: str) -> None:
    """TypeError or ValueError, saying what it is, for no tensor, and for one that files cannot hold."""
    if (
        not isinstance(tensor, Tensor)
        or type(tensor) not in (Tensor, nn.Parameter)
        or tensor.layout != torch.strided
        or tensor.is_quantized
    ):
        got = f"{type(tensor).__name__} {tensor.dtype} {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{what}: expected a plain, dense tensor, got {got}")
    if tensor.is_meta:
        raise ValueError(f"{what}: expected a tensor with values, got one on the meta device")


def all_alike(numbers: Tensor) -> bool:
    """Whether all elements of a vector have the same bits, NaN too."""
    raw = numbers.contiguous().view(-1, 1).view(torch.uint8)
    return bool((raw == raw[:1]).all())


PLAIN = (bool, int, float, str, type(None))


def is_plain(value: object) -> bool:
    """Whether `to_json` takes it."""
    return type(value) in PLAIN or isinstance(value, bytes | torch.dtype)


def to_json(value: object, name: str) -> Any:
    """A plain value for a JSON file. TypeError, with its name in the state, for anything else."""
    if isinstance(value, PLAIN) and type(value) in PLAIN:
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(
        f"state '{name}': expected a tensor, a number, a string, bytes, None or a container of such, got "
        f"{type(value).__module__}.{type(value).__qualname__}; no pickle is written: save what it is made of, by its "
        "state_dict(), list(...), dict(...), .item() or torch.from_numpy(...)"
    )


def from_json(value: Any) -> Any:
    """Return the plain value of a JSON file. Inverse of `to_json`. Raises DamagedError for anything that it does not write."""
    if type(value) in PLAIN:
        return value
    if type(value) is dict and len(value) == 1:
        ((kind, text),) = value.items()
        if kind == "bytes" and type(text) is str:
            with contextlib.suppress(ValueError):
                return base64.b64decode(text, validate=True)
        if kind == "dtype" and type(text) is str and isinstance(found := getattr(torch, text, None), torch.dtype):
            return found
    raise DamagedError(f"expected a number, a string, null, bytes or a dtype of this torch, got {reprlib.repr(value)}")
