"""Some matrices that are sent together: to their owners and back, at once or while something else is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._spec.host import used_on
from ..._spec.spec import PartitionSpec
from ..._units.flow import reduce_along
from ..._units.layout import Params, from_memory_order, rank_coords, to_memory_order
from ...collectives._functions import gather_slices, vary
from ...collectives._mesh import Simulated
from .exchange import Way, back, started, there, travelled
from .flat import Share, parts_of
from .owners import Matrix, shares

__all__ = ["Group"]


class Group(NamedTuple):
    """Matrices of one dtype whose units are split alike, on a mesh."""

    chosen: tuple[Matrix, ...]
    spec: PartitionSpec
    there: Way | None
    """To the owners; None for simulated ranks."""
    back: Way | None
    returns: tuple[Way, ...] = ()
    """The same in shares of every matrix, one after the other, where it is too much at once."""

    @staticmethod
    def of(some: Sequence[Matrix], spec: PartitionSpec, most: int) -> Group:
        """What this rank has to do for them, with at most so many elements on their way back to it at once."""
        if spec.bound_mesh.is_simulated:
            return Group(tuple(some), spec, None, None)
        at, number = rank_coords(spec.bound_mesh, None), shares(some, spec, most)
        returns = tuple(back(some, spec, at, (share, number)) for share in range(number)) if number > 1 else ()
        return Group(tuple(some), spec, there(some, spec, at), back(some, spec, at), returns)

    @property
    def wanted(self) -> set[str]:
        """The names of those of which this rank's part is sent to the owner, or is the owner's; on other replicas it is not."""
        if self.there is None:
            return {matrix.name for matrix in self.chosen}
        return {self.chosen[i].name for i in self.there.hops[0].order}

    @property
    def owned(self) -> list[Matrix]:
        """Those that are whole on this rank; all of them on simulated ones."""
        return [m for m, n in zip(self.chosen, self.there.end, strict=True) if n] if self.there else [*self.chosen]

    def collect(self, parts: Mapping[str, Tensor]) -> Params:
        """From what this rank's slices have of them (`Cut.part`) to whole ones, empty where it is not the owner."""
        if self.there is None or self.back is None:
            return {matrix.name: self._gathered(parts[matrix.name], matrix) for matrix in self.chosen}
        return self._whole(travelled(self._to_use(parts), self.there, self.back))

    def spread(self, whole: Mapping[str, Tensor]) -> Params:
        """The inverse, on all replicas."""
        if self.there is None or self.back is None:
            return {matrix.name: self._scattered(whole[matrix.name], matrix) for matrix in self.chosen}
        return self._parts(travelled(self._flat(whole), self.back, self.there))

    def collecting(self, parts: Mapping[str, Tensor]) -> Callable[[], Params]:
        """`collect`, begun where nothing follows it (`_torch.is_eager`), to be called for its result."""
        if self.there is None or not _runs_ahead(parts):
            whole = self.collect(parts)
            return lambda: whole
        under_way = started(self._to_use(parts), self.there)
        return lambda: self._whole(under_way())

    def shares(self, whole: Sequence[Mapping[str, Tensor]]) -> int:
        """In how many goes `spreading` brings them back."""
        return len(self.returns) if self.returns and all(map(_runs_ahead, whole)) else 1

    def spreading(self, whole: Mapping[str, Tensor], share: Share) -> Callable[[], Params]:
        """`spread` of a share of every part, begun likewise, to be called for its result."""
        if self.back is None or not _runs_ahead(whole):
            parts = self.spread(whole)
            return lambda: parts
        way, flat = self.back, self._flat(whole)
        if share != (0, 1):
            way, flat = self.returns[share[0]], parts_of(flat, way.hops[0].sizes, share)
        under_way = started(flat, way)
        return lambda: self._parts(under_way())

    def of_owner(self, matrix: Matrix, new: Tensor, old: Tensor) -> Tensor:
        """What the owner of a matrix has made anew; the old where a simulated rank is not the owner."""
        return new if self.there else torch.where(self._is_owner(matrix, new.device), new, old)

    def alike(self, given: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """What makes a result of an owner, and what stands for it elsewhere, tracked and batched if any of the ``given`` is.

        Ranks would otherwise send other sizes under vmap, or some of them nothing in backward. It adds a sum of no elements.
        """
        if self.there is None or not given or (_torch.is_eager() and not _torch.any_tracked(given)):
            return lambda x: x
        zeros = [x.reshape(-1)[:0].sum().abs().float().to(given[0].device) for x in given]
        return lambda x: x + torch.stack(zeros).sum().to(x.dtype)

    def _to_use(self, parts: Mapping[str, Tensor]) -> list[Tensor]:
        device = used_on(self.chosen[0].unit, self.spec.bound_mesh)
        tensors = [parts[matrix.name] for matrix in self.chosen]
        return tensors if device is None else [x.to(device, non_blocking=True) for x in tensors]

    def _whole(self, flat: Sequence[Tensor]) -> Params:
        return {m.name: _seen(x, m) if len(x) else x for m, x in zip(self.chosen, flat, strict=True)}

    def _flat(self, whole: Mapping[str, Tensor]) -> list[Tensor]:
        tensors = ((whole[matrix.name], matrix) for matrix in self.chosen)
        return [_laid(x, matrix) if x.numel() else x.reshape(-1) for x, matrix in tensors]

    def _parts(self, flat: Sequence[Tensor]) -> Params:
        return {matrix.name: x for matrix, x in zip(self.chosen, flat, strict=True)}

    def _gathered(self, piece: Tensor, matrix: Matrix) -> Tensor:
        mesh, axes = self.spec.bound_mesh, matrix.unit.p.axes
        for name in mesh.names:
            if name not in axes:
                piece = vary(piece, mesh[name], reduce="sum")
        for name in reversed(axes):
            piece = gather_slices(piece, mesh[name], reduce="sum")
        whole = _seen(piece[matrix.begin : matrix.begin + matrix.param.numel], matrix)
        return torch.where(self._is_owner(matrix, piece.device), whole, 0)

    def _scattered(self, whole: Tensor, matrix: Matrix) -> Tensor:
        mesh, axes = self.spec.bound_mesh, matrix.unit.p.axes
        flat = _laid(torch.where(self._is_owner(matrix, whole.device), whole, 0), matrix)
        rest = self.spec.padded_numel(matrix.unit) - matrix.begin - len(flat)
        buffer = torch.cat([flat.new_zeros(matrix.begin), flat, flat.new_zeros(rest)])
        split, others = [mesh[name] for name in axes], [mesh[name] for name in mesh.names if name not in axes]
        return reduce_along(buffer, split, others, "sum")

    def _is_owner(self, matrix: Matrix, device: torch.device) -> Tensor:
        here = torch.ones((), dtype=torch.bool, device=device)
        for (_, axis), at in zip(self.spec.bound_mesh.axes, matrix.owner, strict=True):
            here = here & (axis.rank == at if isinstance(axis, Simulated) else torch.tensor(axis.rank == at, device=device))
        return here


def _runs_ahead(tensors: Mapping[str, Tensor]) -> bool:
    """Whether nobody differentiates, batches or records what is sent, so that it can be under way."""
    return _torch.is_eager() and not _torch.any_tracked(tensors.values())


def _seen(flat: Tensor, matrix: Matrix) -> Tensor:
    """A matrix from its elements in memory order."""
    return from_memory_order(flat, matrix.param) if matrix.param.permuted else flat.view(matrix.shape)


def _laid(whole: Tensor, matrix: Matrix) -> Tensor:
    """The inverse."""
    return to_memory_order(whole, matrix.param).reshape(-1)
