"""The leaves of a state: slices and numbers of units, tensors, matrices with an owner, and plain values."""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._core.layout import rank_along, rank_coords
from ..._core.spec import PartitionSpec
from ..._core.tree import Param
from ..._core.unit import LocalDims, Unit, global_shape, join_shape
from ..._slices.pieces import Piece, slice_pieces
from ..._spec.local import piece_offsets
from ..._wire.flow import store_slice
from ..._wire.host import is_host_resident, place_slice

# --- Divide flat ranges of tensors into N-d boxes, and among the ranks that hold them ---

MAX_BOX_BYTES = 16 << 20
"""The most bytes of a box, which is read and checked at once: a reader of a part of a box reads all of it."""
MIN_SHARED_BYTES = 1 << 20
"""A range is divided among its holders into parts of at least so many bytes: a box has about 1,500 bytes of overhead."""
PRIME = (1 << 61) - 1


class Box(NamedTuple):
    """A rectangular part of a tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)


def range_to_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes that elements ``begin`` to ``end`` of a tensor in row-major order consist of, in this order.

    There are at most ``2 * len(shape) - 1``. A tensor without elements or dimensions is one box.

    >>> [tuple(box) for box in range_to_boxes([3, 4], 2, 12)]
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if not math.prod(shape):
        return [Box((0,) * len(shape), tuple(shape))]
    return list(_iter_boxes(tuple(shape), begin, end))


def _iter_boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    if begin == end:
        return
    if len(shape) < 2:
        yield Box((begin,), (end - begin,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the complete rows
    if first > last:  # within one row
        yield from _boxes_in_row(shape, last, begin, end)
        return
    yield from _boxes_in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _boxes_in_row(shape, last, last * row, end)


def _boxes_in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    start = row * math.prod(shape[1:])
    for box in _iter_boxes(shape[1:], begin - start, end - start):
        yield Box((row, *box.offsets), (1, *box.sizes))


def check_tiles(shape: Sequence[int], pieces: Iterable[Box]) -> None:
    """Check that boxes tile a tensor: every element is in exactly one of them. Raises ValueError otherwise.

    It takes linear time, by the Schwartz-Zippel lemma: each coordinate of each dimension gets a random number mod a prime, and
    a box the product over dimensions of (number of its begin - number of its end). Boxes that tile the tensor add up to the
    tensor's own product; others do so for one draw in 2 ** 55.
    """
    numbers = [defaultdict[int, int](lambda: secrets.randbelow(PRIME)) for _ in shape]

    def product(box: Box) -> int:
        out = 1
        for known, begin, size in zip(numbers, box.offsets, box.sizes, strict=True):
            out = out * (known[begin] - known[begin + size]) % PRIME
        return out

    total = 0
    elements = 0
    for box in pieces:
        if any(
            begin < 0 or size < 0 or begin + size > end for begin, size, end in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            raise ValueError(f"the piece of {list(box.sizes)} at {list(box.offsets)} is not inside of {list(shape)}")
        total += product(box)
        elements += box.numel
    if elements != (numel := math.prod(shape)):
        raise ValueError(f"expected {numel} elements in its pieces, got {elements}")
    if (total - product(Box((0,) * len(shape), tuple(shape)))) % PRIME:
        raise ValueError("its pieces overlap")


def split_range(begin: int, end: int, itemsize: int) -> list[tuple[int, int]]:
    """Return a range of elements as ranges of at most `MAX_BOX_BYTES` bytes."""
    step = max(MAX_BOX_BYTES // itemsize, 1)
    return [(at, min(at + step, end)) for at in range(begin, end, step)] or [(begin, end)]


def share_range(written: list[int], begin: int, end: int, itemsize: int, rank: int) -> list[tuple[int, int]]:
    """Return what ``rank`` writes of a range that several ranks hold: those that have written the fewest bytes come first.

    ``written`` has the bytes of each rank. The function adds those of this range, in the same way on each of these ranks.
    """
    length, ranks = end - begin, range(len(written))
    parts = max(1, min(len(ranks), length * itemsize // MIN_SHARED_BYTES))
    own: list[tuple[int, int]] = []
    for i, holder in enumerate(reversed(sorted(ranks, key=written.__getitem__)[:parts])):  # later parts are longer
        low, high = begin + length * i // parts, begin + length * (i + 1) // parts
        written[holder] += (high - low) * itemsize
        if holder == rank:
            own.append((low, high))
    return own


# --- The leaves ---

MAX_DIMS = 64
"""The most dimensions of a tensor in a file: torch's kernels take no more."""


class TensorRange(NamedTuple):
    """A range of a stored tensor, or of a box in it, in its memory order, with this rank's memory for it."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The tensor's dimensions from the outermost in memory to the innermost."""
    begin: int
    data: Tensor
    holder: int
    """The number of this rank among the ranks that hold the range."""
    holders: int
    axes: tuple[str, ...] | None = None
    """The mesh axes along which these ranks are; None for all axes, and for one holder."""
    box: Box | None = None
    """The box whose elements ``begin`` counts: a rank's piece of a parameter over local axes. None for the whole tensor."""


@dataclass(frozen=True)
class SliceLeaf:
    """A rank's slice of a unit: a range of each of its parameters."""

    unit: Unit
    names: tuple[tuple[str, ...], ...]
    """For each of ``params``, the names under which it is stored, its own name first."""
    dtype: torch.dtype
    is_encoded: bool = False
    """Whether the state has the slice in the unit's codec; a file has it decoded."""
    subset: tuple[Param, ...] | None = None
    """The parameters that the leaf has elements of, or None for all of the unit's."""
    is_compact: bool = False
    """Whether the leaf has only the elements of ``subset``, without those between them and without padding."""
    block: int = 1
    """The number of the unit's elements that each of the leaf's stands for, such as those of a scale."""

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters whose ranges are stored, as many as ``names``."""
        return self.unit.params if self.subset is None else self.subset

    def numel(self, spec: PartitionSpec) -> int:
        """Return the number of its elements on this rank."""
        if self.is_compact:
            return sum(p.high - p.low for p in self._pieces(spec))
        return spec.shard_numel(self.unit) // self.block

    def stored_shape(self, param: Param, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a parameter's stored tensor: the whole parameter's or [*pieces, blocks].

        Blocks are those of the elements in memory order, of each piece over local axes, if there are several.
        """
        whole = global_shape(param, sizes)
        if self.block == 1:
            return whole
        pieces = () if whole == param.shape else (n // max(size, 1) for n, size in zip(whole, param.shape, strict=True))
        return (*pieces, -(-param.numel // self.block))

    def allocate(self, spec: PartitionSpec) -> Tensor:
        """Return memory to read into, padding zeroed, on the mesh's device or on the host if it goes through the host."""
        device = None if self.is_encoded or is_host_resident(self.unit) else spec.bound_mesh.device
        memory = torch.empty(self.numel(spec), dtype=self.dtype, device=device or "cpu")
        if self.is_compact:
            return memory
        end = 0
        for low, high in [*((piece.low, piece.high) for piece in self._pieces(spec)), (len(memory), 0)]:
            memory[end:low].view(torch.uint8).zero_()  # as bytes: torch does not fill float4
            end = max(end, high)
        return memory

    def _pieces(self, spec: PartitionSpec) -> Iterator[Piece]:
        block = self.block
        for param, low, high, begin in slice_pieces(self.unit, spec, rank_coords(spec.bound_mesh, None)):
            if self.subset is None or param in self.subset:
                yield Piece(param, low // block, -(-high // block), begin // block)

    def to_state(self, tensor: Tensor, spec: PartitionSpec) -> Tensor:
        """Return a slice that was read as a state has it: encoded, and on the device or host where it is kept."""
        return (store_slice if self.is_encoded else place_slice)(tensor, self.unit, spec.bound_mesh)

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        """Yield the ranges of the parameters that lie in the slice."""
        mesh = spec.bound_mesh
        sizes, coords = dict(mesh.sizes), rank_coords(mesh, None)
        at = dict(zip(mesh.names, coords, strict=True))
        replicated = tuple(name for name in mesh.names if name not in self.unit.distinct_axes)
        holder, holders = rank_along(replicated, mesh, coords)
        flat = tensor.detach().resolve_conj().resolve_neg()
        for piece, (name, *aliases) in zip(self._pieces(spec), self.names, strict=True):
            data, param = flat if self.is_compact else flat[piece.low : piece.high], piece.param
            shape = self.stored_shape(param, sizes)
            order = tuple(param.order) if self.block == 1 else tuple(range(len(shape)))
            part = TensorRange(name, tuple(aliases), shape, order, 0, data, rank, ranks)
            if len(data):
                offsets = piece_offsets(param.shape, param.local, sizes, at)
                box = Box(offsets, param.shape)
                if self.block > 1:
                    index = [offset // size for offset, size in zip(offsets, param.shape, strict=True)][: len(shape) - 1]
                    box = Box((*index, 0), (*(1 for _ in index), shape[-1]))
                yield part._replace(begin=piece.begin, holder=holder, holders=holders, axes=replicated, box=box)
            elif not param.numel:
                yield part


@dataclass(frozen=True)
class ScalarLeaf:
    """A number of a unit, such as an optimizer's step count: stored with each of the unit's parameters."""

    unit: Unit
    names: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    is_accelerated: bool
    """Whether the number is on the mesh's device instead of the host."""

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        """Yield the number for each parameter, or as many numbers."""
        numbers = tensor.detach().reshape(-1).expand(len(self.names))
        for i, (name, *aliases) in enumerate(self.names):
            yield TensorRange(name, tuple(aliases), (), (), 0, numbers[i : i + 1], rank, ranks)


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor outside of units: equal on all ranks or, stored with the ranks as first dimension, each rank's own."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_accelerated: bool
    is_per_rank: bool = False

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        """Yield the whole tensor, or this rank's row."""
        data = _flatten_tensor(tensor)
        if not self.is_per_rank:
            yield TensorRange(self.name, (), self.shape, tuple(range(len(self.shape))), 0, data, rank, ranks)
        elif len(data) or rank == 0:
            shape = (ranks, *self.shape)
            yield TensorRange(self.name, (), shape, tuple(range(len(shape))), rank * math.prod(self.shape), data, 0, 1)


@dataclass(frozen=True)
class OwnedLeaf:
    """The tensor of a matrix's owner, or an owner's part of a stack; on other ranks it has shape [0, *shape]."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_accelerated: bool
    is_here: bool
    stack: LocalDims = ()
    """The axes along which owners have a part each, and the dimension that each splits."""

    def allocate(self) -> Tensor:
        """Return memory to read into, on the host."""
        return torch.empty(self.shape if self.is_here else (0, *self.shape), dtype=self.dtype, device="cpu")

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        """Yield the whole tensor on its owner, or an owner's part."""
        if not self.is_here:
            return
        sizes = dict(spec.bound_mesh.sizes)
        at = dict(zip(spec.bound_mesh.names, rank_coords(spec.bound_mesh, None), strict=True))
        box = Box(piece_offsets(self.shape, self.stack, sizes, at), self.shape)
        shape, order = self.global_shape(spec), tuple(range(len(self.shape)))
        yield TensorRange(self.names[0], self.names[1:], shape, order, 0, _flatten_tensor(tensor), 0, 1, box=box)

    def global_shape(self, spec: PartitionSpec) -> tuple[int, ...]:
        """Return the shape of the stored tensor, which has the parts of all owners."""
        return join_shape(self.shape, self.stack, dict(spec.bound_mesh.sizes))


@dataclass(frozen=True)
class ValueLeaf:
    """A plain value."""

    name: str
    value: Any = None
    is_per_rank: bool = False
    names: tuple[tuple[str, ...], ...] = ()
    """For a value in a unit's state, the names as in `ScalarLeaf`."""


StoredLeaf = SliceLeaf | ScalarLeaf | TensorLeaf | OwnedLeaf
"""A leaf whose tensor is in the files."""
Leaf = StoredLeaf | ValueLeaf


def leaf_names(leaf: Leaf) -> list[str]:
    """Return all names under which a leaf is stored."""
    if isinstance(leaf, TensorLeaf | ValueLeaf):
        return [leaf.name]
    return [*leaf.names] if isinstance(leaf, OwnedLeaf) else [name for names in leaf.names for name in names]


def check_storable(value: object, what: str) -> None:
    """Check that files can hold a value. Raises TypeError or ValueError, beginning with ``what``, otherwise."""
    if (
        not isinstance(value, Tensor)
        or type(value) not in (Tensor, nn.Parameter)
        or value.layout != torch.strided
        or value.is_quantized
    ):
        got = f"{type(value).__name__} {value.dtype} {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{what}: expected a plain, dense tensor, got {got}")
    if value.dim() > MAX_DIMS:
        raise ValueError(f"{what}: expected at most {MAX_DIMS} dimensions, got {value.dim()}")
    if value.is_meta:
        raise ValueError(f"{what}: expected a tensor with values, got one on the meta device")


def is_uniform(numbers: Tensor) -> bool:
    """Return whether all elements of a vector have the same bits; equal NaNs count as the same."""
    raw = numbers.contiguous().view(-1, 1).view(torch.uint8)
    return bool((raw == raw[:1]).all())


def _flatten_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in one dimension, detached and without lazy conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
