"""A batch of matrices that are sent together, synchronously or asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._spec.host import compute_device
from ..._spec.local import join_shape
from ..._spec.spec import PartitionSpec
from ..._units.flow import reduce_along
from ..._units.layout import Params, from_memory_order, rank_coords, to_memory_order
from ..._units.whole import join_pieces, split_pieces
from ...collectives._functions import gather_slices, vary
from ...collectives._mesh import Simulated
from .exchange import ExchangePlan, exchange_matrices, plan_from_owners, plan_to_owners, start_plan
from .flat import Chunk, chunk_pieces
from .owners import count_chunks
from .selection import Matrix

__all__ = ["MatrixBatch"]


class MatrixBatch(NamedTuple):
    """Matrices of one dtype whose units are split alike on the mesh."""

    matrices: tuple[Matrix, ...]
    spec: PartitionSpec
    to_owners: ExchangePlan | None
    """None for simulated ranks."""
    from_owners: ExchangePlan | None
    """None for simulated ranks."""
    from_owners_in_chunks: tuple[ExchangePlan, ...] = ()
    """``from_owners`` chunk by chunk, where all of it is too much at once."""

    @staticmethod
    def plan(some: Sequence[Matrix], spec: PartitionSpec, max_numel: int) -> MatrixBatch:
        """Plan this rank's exchange, with at most ``max_numel`` elements on their way back at once."""
        if spec.bound_mesh.is_simulated:
            return MatrixBatch(tuple(some), spec, None, None)
        at, count = rank_coords(spec.bound_mesh, None), count_chunks(some, spec, max_numel)
        from_owners_in_chunks = (
            tuple(plan_from_owners(some, spec, at, (chunk, count)) for chunk in range(count)) if count > 1 else ()
        )
        return MatrixBatch(
            tuple(some), spec, plan_to_owners(some, spec, at), plan_from_owners(some, spec, at), from_owners_in_chunks
        )

    @property
    def sent_names(self) -> set[str]:
        """Names of the matrices whose part on this rank reaches the owner. Other replicas send none."""
        if self.to_owners is None:
            return {matrix.name for matrix in self.matrices}
        return {self.matrices[i].name for i in self.to_owners.steps[0].order}

    @property
    def owned_matrices(self) -> list[Matrix]:
        """The matrices that this rank owns; all of them on simulated ranks."""
        return [m for m, n in zip(self.matrices, self.to_owners.end, strict=True) if n] if self.to_owners else [*self.matrices]

    def collect(self, parts: Mapping[str, Tensor]) -> Params:
        """Return whole matrices from this rank's parts (`SliceLayout.select`), empty if another rank is the owner."""
        if self.to_owners is None or self.from_owners is None:
            return {matrix.name: self._gather_simulated(parts[matrix.name], matrix) for matrix in self.matrices}
        return self._as_matrices(exchange_matrices(self._move_to_device(parts), self.to_owners, self.from_owners))

    def spread(self, whole: Mapping[str, Tensor]) -> Params:
        """Return the parts of whole matrices on all replicas. Inverse of `collect`."""
        if self.to_owners is None or self.from_owners is None:
            return {matrix.name: self._scatter_simulated(whole[matrix.name], matrix) for matrix in self.matrices}
        return self._name_parts(exchange_matrices(self._flatten_matrices(whole), self.from_owners, self.to_owners))

    def start_collect(self, parts: Mapping[str, Tensor]) -> Callable[[], Params]:
        """Start `collect`, asynchronously if nothing tracks the tensors; call the result to wait."""
        if self.to_owners is None or not _can_overlap(parts):
            whole = self.collect(parts)
            return lambda: whole
        pending = start_plan(self._move_to_device(parts), self.to_owners)
        return lambda: self._as_matrices(pending())

    def chunk_count(self, whole: Sequence[Mapping[str, Tensor]]) -> int:
        """Return the number of chunks in which `start_spread` returns the matrices."""
        return len(self.from_owners_in_chunks) if self.from_owners_in_chunks and all(map(_can_overlap, whole)) else 1

    def start_spread(self, whole: Mapping[str, Tensor], chunk: Chunk) -> Callable[[], Params]:
        """Start `spread` for one chunk of every part; call the result to wait."""
        if self.from_owners is None or not _can_overlap(whole):
            parts = self.spread(whole)
            return lambda: parts
        way, flat = self.from_owners, self._flatten_matrices(whole)
        if chunk != (0, 1):
            way, flat = self.from_owners_in_chunks[chunk[0]], chunk_pieces(flat, way.steps[0].sizes, chunk)
        pending = start_plan(flat, way)
        return lambda: self._name_parts(pending())

    def select_owner_result(self, matrix: Matrix, new: Tensor, old: Tensor) -> Tensor:
        """Return ``new`` on the owner. A simulated rank that is not the owner keeps ``old``."""
        return new if self.to_owners else torch.where(self._is_owner(matrix, new.device), new, old)

    def tie_to_inputs(self, given: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function that makes a result depend on the ``given`` tensors if any of these is tracked or batched.

        It adds the sum of no elements. Without it, ranks that are not the owner would send other sizes under vmap, or nothing
        in backward.
        """
        if self.to_owners is None or not given or (_torch.is_eager() and not _torch.any_tracked(given)):
            return lambda x: x
        zeros = [x.reshape(-1)[:0].sum().abs().float().to(given[0].device) for x in given]
        return lambda x: x + torch.stack(zeros).sum().to(x.dtype)

    def _move_to_device(self, parts: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the parts of all matrices, on the device that computes."""
        device = compute_device(self.matrices[0].unit, self.spec.bound_mesh)
        tensors = [parts[matrix.name] for matrix in self.matrices]
        return tensors if device is None else [x.to(device, non_blocking=True) for x in tensors]

    def _as_matrices(self, flat: Sequence[Tensor]) -> Params:
        """Return flat tensors as matrices, by name; empty ones as they are."""
        return {m.name: self._view_matrix(x, m) if len(x) else x for m, x in zip(self.matrices, flat, strict=True)}

    def _flatten_matrices(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the matrices as flat tensors, in order; empty ones stay empty."""
        tensors = ((whole[matrix.name], matrix) for matrix in self.matrices)
        return [self._flatten_matrix(x, matrix) if x.numel() else x.reshape(-1) for x, matrix in tensors]

    def _name_parts(self, flat: Sequence[Tensor]) -> Params:
        """Return the tensors of all matrices by name."""
        return {matrix.name: x for matrix, x in zip(self.matrices, flat, strict=True)}

    def _gather_simulated(self, piece: Tensor, matrix: Matrix) -> Tensor:
        """Return the whole matrix at its owner, zeros on the other simulated ranks."""
        mesh = self.spec.bound_mesh
        for name in mesh.names:
            if name not in matrix.unit.distinct_axes:
                piece = vary(piece, mesh[name], reduce="sum")
        for name in reversed(matrix.split_axes):
            piece = gather_slices(piece, mesh[name], reduce="sum")
        buffers = piece.view(-1, self.spec.padded_numel(matrix.unit))
        whole = self._view_matrix(buffers[:, matrix.begin : matrix.begin + matrix.param.numel].reshape(-1), matrix)
        return torch.where(self._is_owner(matrix, piece.device), whole, 0)

    def _scatter_simulated(self, whole: Tensor, matrix: Matrix) -> Tensor:
        """Return this simulated rank's slice of the buffer with the owner's matrix."""
        mesh = self.spec.bound_mesh
        flat = self._flatten_matrix(torch.where(self._is_owner(matrix, whole.device), whole, 0), matrix)
        rest = self.spec.padded_numel(matrix.unit) - matrix.begin - matrix.param.numel
        buffers = torch.nn.functional.pad(flat.view(-1, matrix.param.numel), (matrix.begin, rest))
        split = [mesh[name] for name in matrix.split_axes]
        others = [mesh[name] for name in mesh.names if name not in matrix.unit.distinct_axes]
        return reduce_along(buffers.flatten(), split, others, "sum")

    def _is_owner(self, matrix: Matrix, device: torch.device) -> Tensor:
        """Return whether this rank owns the matrix, as a tensor."""
        here = torch.ones((), dtype=torch.bool, device=device)
        for (_, axis), at in zip(self.spec.bound_mesh.axes, matrix.owner, strict=True):
            if at is None:
                continue
            here = here & (axis.rank == at if isinstance(axis, Simulated) else torch.tensor(axis.rank == at, device=device))
        return here

    def _view_matrix(self, flat: Tensor, matrix: Matrix) -> Tensor:
        """Return a matrix from its elements, piece by piece and each in memory order: a view if it is of one piece."""
        pieces = [from_memory_order(x, matrix.param) for x in flat.view(-1, matrix.param.numel).unbind()]
        return join_pieces(pieces, matrix.gathered, dict(self.spec.bound_mesh.sizes)).reshape(matrix.shape)

    def _flatten_matrix(self, whole: Tensor, matrix: Matrix) -> Tensor:
        """Return a matrix's elements, piece by piece and each in memory order. Inverse of `_view_matrix`."""
        sizes = dict(self.spec.bound_mesh.sizes)
        as_param = whole.reshape(join_shape(matrix.param.shape, matrix.gathered, sizes))
        pieces = split_pieces(as_param, matrix.gathered, sizes)
        flat = [to_memory_order(x, matrix.param).reshape(-1) for x in pieces]
        return flat[0] if len(flat) == 1 else torch.cat(flat)


def _can_overlap(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether nothing differentiates, batches or records the tensors, so that they can be sent asynchronously."""
    return _torch.is_eager() and not _torch.any_tracked(tensors.values())
