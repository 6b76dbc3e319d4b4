"""The leaves of a state: slices and numbers of units, tensors, matrices with an owner, and plain values."""

from __future__ import annotations

import math
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._core.layout import rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import LocalDims, Unit, global_shape, join_shape
from .._slices.pieces import Piece, slice_pieces
from .._spec.local import piece_offsets
from .._wire.flow import store_slice
from .._wire.host import is_host_resident, place_slice
from ._files import CheckpointError

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

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))


def range_to_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes that elements ``begin`` to ``end`` of a tensor in row-major order consist of, in this order.

    There are at most ``2 * len(shape) - 1``. A tensor without elements or dimensions is one box.

    >>> [tuple(box) for box in range_to_boxes([3, 4], 2, 12)]
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    inner = tuple(shape[1:])
    if not math.prod(shape):
        return [Box((0,) * len(shape), tuple(shape))]
    if begin == end:
        return []
    if len(shape) < 2:
        return [Box((begin,), (end - begin,)) if shape else Box((), ())]
    row = math.prod(inner)
    first, last = -(-begin // row), end // row  # the complete rows

    def boxes_in_row(i: int, low: int, high: int) -> list[Box]:
        return [Box((i, *box.offsets), (1, *box.sizes)) for box in range_to_boxes(inner, low - i * row, high - i * row)]

    if first > last:  # within one row
        return boxes_in_row(last, begin, end)
    complete = [Box((first, *(0 for _ in inner)), (last - first, *inner))] if first < last else []
    return boxes_in_row(first - 1, begin, first * row) + complete + boxes_in_row(last, last * row, end)


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

    total = elements = 0
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


class TensorRange(NamedTuple):
    """A range of a stored tensor, or of a box in it, in its memory order, with this rank's memory for it."""

    names: tuple[str, ...]
    """The name under which the tensor is stored, and its other names."""
    shape: tuple[int, ...]
    data: Tensor
    order: tuple[int, ...]
    """The tensor's dimensions from the outermost in memory to the innermost."""
    begin: int = 0
    holder: int = 0
    """The number of this rank among the ranks that hold the range."""
    holders: int = 1
    axes: tuple[str, ...] | None = None
    """The mesh axes along which these ranks are; None for all axes, and for one holder."""
    box: Box | None = None
    """The box whose elements ``begin`` counts: a rank's piece of a parameter over local axes. None for the whole tensor."""

    @property
    def end(self) -> int:
        """The end of the range."""
        return self.begin + len(self.data)

    def iter_boxes(self, begin: int, end: int) -> Iterator[tuple[Box, Tensor]]:
        """Yield elements ``begin`` to ``end`` as boxes of the tensor, with views of the memory for them."""
        start, sizes = self.box or Box((0,) * len(self.shape), self.shape)
        back = [self.order.index(d) for d in range(len(self.order))]
        at = begin - self.begin
        for box in range_to_boxes([sizes[d] for d in self.order], begin, end):
            view = self.data[at : at + box.numel].view(box.sizes).permute(back)
            offsets = tuple(first + box.offsets[d] for first, d in zip(start, back, strict=True))
            yield Box(offsets, tuple(box.sizes[d] for d in back)), view
            at += box.numel


# --- The leaves ---

MAX_DIMS = 64
"""The most dimensions of a tensor in a file: torch's kernels take no more."""
Names = tuple[tuple[str, ...], ...]
"""For each tensor or value that is stored of a leaf its names: for a unit's, the parameters' own names first."""


@dataclass(frozen=True)
class ValueLeaf:
    """A plain value, in a unit's state one for each parameter."""

    names: Names
    is_per_rank: bool
    data: dict[str, Any]
    """The leaf as JSON: ``{"value": value}`` or, each rank's own, ``{"values": [value of this rank, or of each]}``."""


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor outside of units: equal on all ranks or, stored with the ranks as first dimension, each rank's own."""

    names: Names
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_accelerated: bool
    """Whether the tensor is on the mesh's device instead of the host."""
    is_per_rank: bool = False

    def stored_shapes(self, spec: PartitionSpec, ranks: int) -> list[tuple[int, ...]]:
        """Return the shape of the stored tensor for each of ``names``."""
        return [(ranks, *self.shape) if self.is_per_rank else self.shape]

    def allocate(self, spec: PartitionSpec) -> Tensor:
        """Return memory to read into."""
        try:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        except RuntimeError as error:
            text = f"tensor '{self.names[0][0]}': expected to have memory for {[*self.shape]} {self.dtype}"
            raise CheckpointError(text) from error

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        """Yield the ranges of stored tensors that this rank has in the tensor of the state, or in memory to read into."""
        (shape,) = self.stored_shapes(spec, ranks)
        whole = TensorRange(self.names[0], shape, _flatten_tensor(tensor), tuple(range(len(shape))))
        if not self.is_per_rank:
            yield whole._replace(holder=rank, holders=ranks)
        elif len(whole.data) or rank == 0:
            yield whole._replace(begin=rank * math.prod(self.shape))

    def to_state(self, memory: Tensor, spec: PartitionSpec) -> Tensor:
        """Return as a state has it what was read into memory."""
        device = spec.bound_mesh.device
        return memory.to(device) if self.is_accelerated and device else memory


@dataclass(frozen=True)
class ScalarLeaf(TensorLeaf):
    """A number of a unit, such as an optimizer's step count: stored with each of the unit's parameters."""

    key: str = ""
    """The unit's."""

    def stored_shapes(self, spec: PartitionSpec, ranks: int) -> list[tuple[int, ...]]:
        return [()] * len(self.names)

    def allocate(self, spec: PartitionSpec) -> Tensor:
        return torch.empty(len(self.names), dtype=self.dtype, device="cpu")

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        numbers = tensor.detach().reshape(-1).expand(len(self.names))
        for i, names in enumerate(self.names):
            yield TensorRange(names, (), numbers[i : i + 1], (), holder=rank, holders=ranks)

    def to_state(self, memory: Tensor, spec: PartitionSpec) -> Tensor:
        raw = memory.view(-1, 1).view(torch.uint8)  # as bits: equal NaNs count as the same
        if not bool((raw == raw[:1]).all()):
            raise ValueError(
                f"unit '{self.key}': expected one '{self.names[0][0]}' for all of its parameters, got "
                f"{memory.unique().tolist()[:4]}; choose units whose parameters have taken as many steps"
            )
        return super().to_state(memory[0].clone(), spec)


@dataclass(frozen=True)
class OwnedLeaf(TensorLeaf):
    """The tensor of a matrix's owner, or an owner's part of a stack; on other ranks it has shape [0, *shape]."""

    is_here: bool = True
    stack: LocalDims = ()
    """The axes along which owners have a part each, and the dimension that each splits."""

    def stored_shapes(self, spec: PartitionSpec, ranks: int) -> list[tuple[int, ...]]:
        return [join_shape(self.shape, self.stack, dict(spec.bound_mesh.sizes))]

    def allocate(self, spec: PartitionSpec) -> Tensor:
        return torch.empty(self.shape if self.is_here else (0, *self.shape), dtype=self.dtype, device="cpu")

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        if self.is_here:
            (shape,) = self.stored_shapes(spec, ranks)
            offsets = piece_offsets(self.shape, self.stack, dict(spec.bound_mesh.sizes), _own_coords(spec))
            box = Box(offsets, self.shape)
            yield TensorRange(self.names[0], shape, _flatten_tensor(tensor), tuple(range(len(shape))), box=box)


@dataclass(frozen=True)
class SliceLeaf:
    """A rank's slice of a unit: a range of each of its parameters."""

    names: Names
    dtype: torch.dtype
    unit: Unit
    subset: tuple[Param, ...] | None = None
    """The parameters that the leaf has elements of, or None for all of the unit's."""
    is_compact: bool = False
    """Whether the leaf has only the elements of ``subset``, without those between them and without padding."""
    is_encoded: bool = False
    """Whether the state has the slice in the unit's codec; a file has it decoded."""
    block: int = 1
    """The number of the unit's elements that each of the leaf's stands for, such as those of a scale."""

    def numel(self, spec: PartitionSpec) -> int:
        """Return the number of its elements on this rank."""
        if self.is_compact:
            return sum(p.high - p.low for p in self._pieces(spec))
        return spec.shard_numel(self.unit) // self.block

    def stored_shapes(self, spec: PartitionSpec, ranks: int) -> list[tuple[int, ...]]:
        """Return the shape of the stored tensor for each of ``names``: the whole parameter's, or [blocks]."""
        return [self._stored_shape(piece.param, dict(spec.bound_mesh.sizes)) for piece in self._pieces(spec)]

    def _stored_shape(self, param: Param, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return global_shape(param, sizes) if self.block == 1 else (-(-param.numel // self.block),)

    def _pieces(self, spec: PartitionSpec) -> Iterator[Piece]:
        for param, low, high, begin in slice_pieces(self.unit, spec, rank_coords(spec.bound_mesh, None)):
            if self.subset is None or param in self.subset:
                yield Piece(param, low // self.block, -(-high // self.block), begin // self.block)

    def allocate(self, spec: PartitionSpec) -> Tensor:
        """Return memory to read into, padding zeroed, on the mesh's device or on the host if it goes through the host."""
        device = None if self.is_encoded or is_host_resident(self.unit) else spec.bound_mesh.device
        memory = torch.empty(self.numel(spec), dtype=self.dtype, device=device or "cpu")
        end = 0
        for low, high in [] if self.is_compact else [*((p.low, p.high) for p in self._pieces(spec)), (len(memory), 0)]:
            memory[end:low].view(torch.uint8).zero_()  # as bytes: torch does not fill float4
            end = max(end, high)
        return memory

    def ranges(self, tensor: Tensor, spec: PartitionSpec, rank: int, ranks: int) -> Iterator[TensorRange]:
        """Yield the ranges of the parameters that lie in the slice."""
        mesh, sizes = spec.bound_mesh, dict(spec.bound_mesh.sizes)
        replicated = tuple(name for name in mesh.names if name not in self.unit.distinct_axes)
        holder, holders = rank_along(replicated, mesh, rank_coords(mesh, None))
        flat = tensor.detach().resolve_conj().resolve_neg()
        for piece, names in zip(self._pieces(spec), self.names, strict=True):
            data, param = flat if self.is_compact else flat[piece.low : piece.high], piece.param
            order = tuple(param.order) if self.block == 1 else (0,)
            whole = TensorRange(names, self._stored_shape(param, sizes), data, order, piece.begin)
            if len(data):
                box = Box(piece_offsets(param.shape, param.local, sizes, _own_coords(spec)), param.shape)
                box = box if self.block == 1 else None
                yield whole._replace(holder=holder, holders=holders, axes=replicated, box=box)
            elif not param.numel:
                yield whole._replace(begin=0, holder=rank, holders=ranks)

    def to_state(self, memory: Tensor, spec: PartitionSpec) -> Tensor:
        """Return the slice as a state has it: encoded, and on the device or host where it is kept."""
        return (store_slice if self.is_encoded else place_slice)(memory, self.unit, spec.bound_mesh)


StoredLeaf = TensorLeaf | SliceLeaf
"""A leaf whose tensors are in the files."""
Leaf = StoredLeaf | ValueLeaf


def _own_coords(spec: PartitionSpec) -> dict[str, int]:
    return dict(zip(spec.bound_mesh.names, rank_coords(spec.bound_mesh, None), strict=True))


def _flatten_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in one dimension, detached and without lazy conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(key: str) -> str:
    """Return a key of a state_dict without the prefixes of FSDP1, checkpoint_wrapper, torch.compile and DDP."""
    for prefix in WRAPPERS:
        key = key.replace(prefix, "")
    return re.sub(r"(^|\.)module\.", r"\1", key, count=1)


def check_storable(value: Any, what: str) -> None:
    """Check that files can hold a value. Raises TypeError or ValueError, beginning with ``what``, otherwise."""
    is_plain = isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter)
    if not is_plain or value.layout != torch.strided or value.is_quantized:
        got = f" {value.dtype} {value.layout}" if isinstance(value, Tensor) else ""
        raise TypeError(f"{what}: expected a plain, dense tensor, got {type(value).__name__}{got}")
    if value.dim() > MAX_DIMS:
        raise ValueError(f"{what}: expected at most {MAX_DIMS} dimensions, got {value.dim()}")
    if value.is_meta:
        raise ValueError(f"{what}: expected a tensor with values, got one on the meta device")
