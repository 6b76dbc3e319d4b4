"""The leaves of a state, whose tensors have ranges of stored ones, and the boxes that files have of these."""

from __future__ import annotations

import math
import os
import pickle
import re
import reprlib
import secrets
import types
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as of_torch

from .. import _torch
from .._core.layout import rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._core.tree import Param
from .._core.unit import LocalDims, Unit, global_shape
from .._slices.pieces import slice_pieces
from .._spec.local import describe_pieces, piece_offsets
from .._wire.flow import store_slice
from .._wire.host import is_host_resident, place_slice
from . import _directory
from ._directory import MANIFEST, AnyPath, CheckpointError, DamagedError, Manifest

# --- Divide flat ranges of tensors into N-d boxes ---

MAX_BOX_BYTES = 16 << 20
"""The most bytes of a box, which is read and checked at once: a reader of a part of a box reads all of it."""
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


class TensorRange(NamedTuple):
    """A range of a stored tensor, or of a box in it, in its memory order, and the place of its elements in a rank's tensor."""

    names: tuple[str, ...]
    """The name under which the tensor is stored, and its other names."""
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """The tensor's dimensions from the outermost in memory to the innermost."""
    numel: int
    begin: int = 0
    low: int = 0
    """The place of the first element in the rank's tensor."""
    holder: int = 0
    """The number of this rank among the ranks that hold the range."""
    holders: int = 1
    axes: tuple[str, ...] | None = None
    """The mesh axes along which these ranks are; None for all axes, and for one holder."""
    box: Box | None = None
    """The box whose elements ``begin`` counts: a rank's piece of a parameter over local axes. None for the whole tensor."""

    def split(self, data: Tensor) -> Iterator[tuple[TensorRange, Tensor]]:
        """Yield the range, whose elements ``data`` has, as ranges of at most `MAX_BOX_BYTES` bytes with theirs."""
        step = max(MAX_BOX_BYTES // data.itemsize, 1)
        for at in range(0, self.numel, step) or (0,):
            elements = data[at : min(at + step, self.numel)]
            yield self._replace(begin=self.begin + at, numel=len(elements)), elements

    def iter_boxes(self, data: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the range as boxes of the tensor, with views of ``data``, which has its elements."""
        start, sizes = self.box or Box((0,) * len(self.shape), self.shape)
        back = [self.order.index(d) for d in range(len(self.order))]
        at = 0
        for box in range_to_boxes([sizes[d] for d in self.order], self.begin, self.begin + self.numel):
            view = data[at : at + box.numel].view(box.sizes).permute(back)
            offsets = tuple(first + box.offsets[d] for first, d in zip(start, back, strict=True))
            yield Box(offsets, tuple(box.sizes[d] for d in back)), view
            at += box.numel


# --- The leaves ---

MAX_DIMS = 64
"""The most dimensions of a tensor in a file: torch's kernels take no more."""
Names = tuple[tuple[str, ...], ...]
"""For each tensor or value that is stored of a leaf its names: for a unit's, the parameters' own names first."""

SLICE, NUMBER, OWNED, PER_RANK, COMMON = "slice", "number", "owned", "each rank's own", "common"
"""The kinds of tensors: a unit's slices and numbers, those of a matrix's owner, of each rank, and equal on all ranks."""


@dataclass(frozen=True)
class ValueLeaf:
    """A plain value, in a unit's state one for each parameter."""

    names: Names
    is_per_rank: bool
    data: dict[str, Any]
    """The leaf as JSON: ``{"value": value}`` or, each rank's own, ``{"values": [value of this rank, or of each]}``."""


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor of the state on this rank, and the stored tensors that it has elements of."""

    names: Names
    shapes: tuple[tuple[int, ...], ...]
    """The shape of the stored tensor for each of ``names``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of this rank's tensor."""
    ranges: tuple[TensorRange, ...]
    """What this rank has of the stored tensors, in the order of its elements."""
    device: torch.device | None
    """Where the tensor is read to; None for the host."""
    kind: str
    """`SLICE`, `NUMBER`, `OWNED`, `PER_RANK` or `COMMON`."""
    unit: Unit | None = None
    """The unit of a slice or number."""
    params: tuple[Param, ...] = ()
    """The parameters of a slice, one for each of ``names``."""
    is_encoded: bool = False
    """Whether the state has the slice in the unit's codec; a file has it decoded."""

    def allocate(self) -> Tensor:
        """Return memory to read into, in one dimension for a slice and for a unit's numbers; padding is zero."""
        shape = (len(self.names),) if self.kind == NUMBER else self.shape
        try:
            memory = torch.empty(shape, dtype=self.dtype, device=self.device or "cpu")
        except RuntimeError as error:
            text = f"tensor '{self.names[0][0]}': expected to have memory for {[*self.shape]} {self.dtype}"
            raise CheckpointError(text) from error
        end = 0
        for low, numel in [*((part.low, part.numel) for part in self.ranges), (len(memory), 0)] if self.params else []:
            memory[end:low].view(torch.uint8).zero_()  # as bytes: torch does not fill float4
            end = max(end, low + numel)
        return memory

    def divide(self, tensor: Tensor) -> Iterator[tuple[TensorRange, Tensor]]:
        """Yield the ranges with their elements of the tensor of the state, or of the memory to read into."""
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        flat = flat.expand(len(self.names)) if self.kind == NUMBER else flat
        for part in self.ranges:
            yield part, flat[part.low : part.low + part.numel]

    def fill(self, memory: Tensor, read: Callable[[tuple[str, ...], Box], Tensor | None]) -> None:
        """Fill memory with what ``read`` returns for the names of a stored tensor and a box of it; None leaves it as it is."""
        for part, data in self.divide(memory):
            for box, view in part.iter_boxes(data) if part.numel else ():
                if (values := read(part.names, box)) is not None:
                    view.copy_(values)

    def check_stored(self, i: int, stored: Any, spec: PartitionSpec, where: str) -> None:
        """Raise ValueError, naming the tensor, unless what is stored of ``names[i]`` has its shape and dtype."""
        if (tuple(stored.shape), stored.dtype) != (self.shapes[i], self.dtype):
            is_local = self.params and tuple(stored.shape) != self.shapes[i]
            hint = describe_pieces(self.params[i], dict(spec.bound_mesh.sizes)) if is_local else ""
            raise ValueError(
                f"tensor '{self.names[i][0]}': expected {list(self.shapes[i])} {self.dtype}, got {list(stored.shape)} "
                f"{stored.dtype} in {where}{hint}"
            )

    def to_state(self, memory: Tensor, spec: PartitionSpec) -> Tensor:
        """Return as a state has it what was read into memory: a slice encoded, and on the device or host where it is kept."""
        if self.kind == SLICE and self.unit:
            return (store_slice if self.is_encoded else place_slice)(memory, self.unit, spec.bound_mesh)
        if self.kind != NUMBER:
            return memory
        raw = memory.view(-1, 1).view(torch.uint8)  # as bits: equal NaNs count as the same
        if not bool((raw == raw[:1]).all()):
            raise ValueError(
                f"unit '{self.unit and self.unit.key}': expected one '{self.names[0][0]}' for all of its parameters, got "
                f"{memory.unique().tolist()[:4]}; choose units whose parameters have taken as many steps"
            )
        return memory[0].clone()


Leaf = TensorLeaf | ValueLeaf


def whole_leaf(
    kind: str, names: Names, value: Tensor, spec: PartitionSpec, shape: Sequence[int], box: Box | None, unit: Unit | None = None
) -> TensorLeaf:
    """Return the leaf of a tensor that is a box of a stored one or, without a box, equal on all ranks."""
    mesh = spec.bound_mesh
    rank, ranks = rank_along(mesh.names, mesh, rank_coords(mesh, None)) if box is None else (0, 1)
    stored, order, is_here = tuple(shape), tuple(range(len(shape))), box is None or box.numel == value.numel()
    whole = TensorRange((), stored, order, value.numel(), holder=rank, holders=ranks, box=box)
    ranges = tuple(whole._replace(names=name, low=i) for i, name in enumerate(names) if is_here)
    device = mesh.device if _torch.is_accelerator(value.device) else None
    return TensorLeaf(names, (stored,) * len(names), value.dtype, tuple(value.shape), ranges, device, kind, unit)


def slice_leaf(
    names: Names,
    dtype: torch.dtype,
    unit: Unit,
    spec: PartitionSpec,
    *,
    params: Sequence[Param] | None = None,
    is_compact: bool = False,
    is_encoded: bool = False,
    block: int = 1,
) -> TensorLeaf:
    """Return the leaf of this rank's slice of a unit: a range of each of its parameters, or of ``params`` alone.

    A compact leaf has only the elements of these. Each element of a leaf of blocks stands for so many of the unit's.
    """
    mesh, sizes, at = spec.bound_mesh, dict(spec.bound_mesh.sizes), rank_coords(spec.bound_mesh, None)
    rank, ranks = rank_along(mesh.names, mesh, at)
    replicated = tuple(name for name in mesh.names if name not in unit.distinct_axes)
    holder, holders = rank_along(replicated, mesh, at)
    pieces = [piece for piece in slice_pieces(unit, spec, at) if params is None or piece.param in params]
    shapes = [global_shape(p, sizes) if block == 1 else (-(-p.numel // block),) for p, *_ in pieces]
    ranges: list[TensorRange] = []
    end = 0
    for name, shape, (param, low, high, begin) in zip(names, shapes, pieces, strict=True):
        low, numel = low // block, -(-high // block) - low // block
        part = TensorRange(name, shape, tuple(param.order) if block == 1 else (0,), numel, low=end if is_compact else low)
        if numel:
            box = piece_box(param.shape, param.local, spec) if block == 1 else None
            ranges.append(part._replace(begin=begin // block, holder=holder, holders=holders, axes=replicated, box=box))
        elif not param.numel:
            ranges.append(part._replace(holder=rank, holders=ranks))
        end += numel
    length = end if is_compact else spec.shard_numel(unit) // block
    device, found = None if is_encoded or is_host_resident(unit) else mesh.device, tuple(piece.param for piece in pieces)
    return TensorLeaf(names, tuple(shapes), dtype, (length,), tuple(ranges), device, SLICE, unit, found, is_encoded)


def piece_box(shape: tuple[int, ...], local: LocalDims, spec: PartitionSpec) -> Box:
    """Return the box of this rank's piece of a tensor that is split over local axes into pieces of this shape."""
    mesh = spec.bound_mesh
    at = dict(zip(mesh.names, rank_coords(mesh, None), strict=True))
    return Box(piece_offsets(shape, local, dict(mesh.sizes), at), shape)


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(key: str) -> str:
    """Return a key of a state_dict without the prefixes of FSDP1, checkpoint_wrapper, torch.compile and DDP."""
    for prefix in WRAPPERS:
        key = key.replace(prefix, "")
    return re.sub(r"(^|\.)module\.", r"\1", key, count=1)


def check_storable(value: Any, what: str) -> None:
    """Check that files can hold a value. Raises TypeError or ValueError, beginning with ``what``, otherwise."""
    is_plain = isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter)
    is_packed = is_plain and re.fullmatch(r"torch\.(q.*|u?int[1-7])", str(value.dtype))  # which torch.save refuses, or is to
    if not is_plain or value.layout != torch.strided or is_packed:
        got = f" {value.dtype} {value.layout}" if isinstance(value, Tensor) else ""
        raise TypeError(f"{what}: expected a plain, dense tensor, got {type(value).__name__}{got}")
    if value.dim() > MAX_DIMS:
        raise ValueError(f"{what}: expected at most {MAX_DIMS} dimensions, got {value.dim()}")
    if value.is_meta:
        raise ValueError(f"{what}: expected a tensor with values, got one on the meta device")


# --- Tensors in files: the boxes of each, in a record as torch.save writes it, and the indices of these ---


class RecordPlace(NamedTuple):
    """The place of a box: a file of the directory, the offset of its elements there, and their checksum."""

    file: str
    offset: int
    checksum: int
    record: tuple[int, int] = (0, 0)
    """The offset and the bytes of the record around the elements: in torch's metadata, and not in the manifest."""


class StoredTensor(NamedTuple):
    """A tensor in the files: its names, and the boxes of it that they have, each in row-major order."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Mapping[Box, RecordPlace]


def write_record(file: BinaryIO, tensor: Tensor) -> tuple[int, int, int]:
    """Write a tensor as torch.save does one of the host. Return the bytes, and the offset and checksum of its elements.

    torch.save writes a whole storage, at once: so it is given one that has the elements alone, in the memory where they are.
    """
    dense = tensor.contiguous().cpu()
    elements = _torch.host_bytes(dense)
    nbytes = offset = crc32 = 0
    errors: list[BaseException] = []

    def write(raw: memoryview) -> int:
        nonlocal nbytes, offset, crc32
        is_found = len(raw) == len(elements) and (len(raw) > 4096 or raw == elements)  # all else that it writes is short
        offset = nbytes if is_found else offset
        try:
            for begin in range(0, len(raw), _directory.PIECE_BYTES):
                piece = raw[begin : begin + _directory.PIECE_BYTES]
                crc32 = _directory.checksum(piece, crc32 if begin else 0) if is_found else crc32
                file.write(piece)
        except BaseException as error:  # torch's writer ends the process if this raises, as on a full disk
            errors.append(error)
        nbytes += len(raw)
        return len(raw)

    flat = torch.frombuffer(elements, dtype=torch.uint8) if elements else torch.empty(0, dtype=torch.uint8)
    alone = flat.view(dense.dtype).view(dense.shape) if elements else torch.empty(dense.shape, dtype=dense.dtype)
    _torch.save_unchecked(alone, types.SimpleNamespace(write=write))
    if errors:
        raise errors[0]
    return nbytes, offset, crc32


def write_boxes(path: AnyPath, boxes: Iterable[tuple[TensorRange, Box, Tensor]]) -> list[StoredTensor]:
    """Write boxes of ranges to a file, flush it, and return where each is."""
    out: list[StoredTensor] = []
    at = 0
    with path.open("wb", buffering=1 << 17) as file:
        for part, box, tensor in boxes:
            nbytes, begin, crc32 = write_record(file, tensor)
            place = RecordPlace(path.name, at + begin, crc32, (at, nbytes))
            out.append(StoredTensor(part.names, tensor.dtype, part.shape, {box: place}))
            at += nbytes
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
    return out


def pack_index(written: Iterable[StoredTensor]) -> tuple[bytes, dict[str, int], list[Any]]:
    """Return the content of torch's metadata file, the sizes of the data files, and the manifest's index of tensors.

    Raises ValueError if a tensor's boxes do not tile it.
    """
    metadata = of_torch.Metadata({}, planner_data={}, storage_data={})
    metadata.storage_meta = of_torch.StorageMeta(save_id=str(uuid.uuid4()))  # no path, whose class not every Python has
    sizes: dict[str, int] = {}
    index: list[Any] = []
    by_name: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in written:
        by_name[tensor.names[0]].append(tensor)
    for name, parts in by_name.items():
        names, dtype, shape, _ = parts[0]
        boxes = [pair for part in parts for pair in part.boxes.items()]
        try:
            check_tiles(shape, [box for box, _ in boxes])
        except ValueError as error:
            raise ValueError(f"'{name}', of all ranks: {error}") from error
        index.append([names, _directory.dtype_name(dtype), shape, [[*box, *place[:3]] for box, place in boxes]])
        chunks = [of_torch.ChunkStorageMetadata(*map(torch.Size, box)) for box, _ in boxes]
        described = of_torch.TensorStorageMetadata(of_torch.TensorProperties(dtype), torch.Size(shape), chunks)
        metadata.state_dict_metadata |= dict.fromkeys(names, described)
        metadata.planner_data |= {alias: (alias,) for alias in names}
        for (_, place), chunk in zip(boxes, chunks, strict=True):
            sizes[place.file] = max(sizes.get(place.file, 0), sum(place.record))
            stored = _torch.make_storage_info(place.file, *place.record)
            metadata.storage_data |= {of_torch.MetadataIndex(alias, chunk.offsets): stored for alias in names}
    return pickle.dumps(metadata), sizes, index


def parse_tensors(path: AnyPath, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name. Raises CheckpointError for an index that `save` does not write."""
    if manifest.tensors is None:
        raise CheckpointError(
            f"{path}: expected an index of tensors in '{MANIFEST}', which version 0.2 did not write: "
            "fs.checkpoint.from_dcp(path, new_path) writes such a checkpoint anew"
        )
    out: dict[str, StoredTensor] = {}
    try:
        for names, kind, shape, boxes in manifest.tensors:
            if not all(isinstance(name, str) for name in names):
                raise DamagedError(f"a tensor: expected names, got {reprlib.repr(names)}")
            places: dict[Box, RecordPlace] = {}
            for offsets, sizes, file, offset, crc32 in boxes:
                if not _directory.is_plain_name(file):
                    raise DamagedError(f"a box: expected a file of the checkpoint's directory, got {reprlib.repr(file)}")
                box = Box(_parse_numbers(offsets, len(shape)), _parse_numbers(sizes, len(shape)))
                offset, crc32 = _parse_numbers([offset, crc32], 2)
                places[box] = RecordPlace(file, offset, crc32)
            found = StoredTensor(tuple(names), _directory.find_dtype(kind), _parse_numbers(shape, len(shape)), places)
            out |= dict.fromkeys(names, found)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the index of tensors in its file '{MANIFEST}' is damaged: {error}") from error
    return out


def _parse_numbers(found: Any, length: int) -> tuple[int, ...]:
    if type(found) is not list or len(found) != length or length > MAX_DIMS:
        raise DamagedError(f"a tensor: expected {min(length, MAX_DIMS)} sizes or places, got {reprlib.repr(found)}")
    if wrong := [x for x in found if type(x) is not int or not 0 <= x < _directory.SIZE_LIMIT]:
        raise DamagedError(f"a size or place: expected a number that is no less than 0, got {reprlib.repr(wrong[0])}")
    return tuple(found)


def plan_reads(part: TensorRange, data: Tensor, stored: Iterable[Box]) -> Iterator[tuple[Box, tuple[slice, ...], Tensor]]:
    """Yield the stored boxes that overlap with a range, the place of the overlap in each, and the memory for it."""
    for box, view in part.iter_boxes(data):
        for other in stored:
            begins = [*map(max, box.offsets, other.offsets)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                at, here = (
                    tuple(slice(i - k, j - k) for i, j, k in zip(begins, ends, start, strict=True))
                    for start in (other.offsets, box.offsets)
                )
                yield other, at, view[here]
