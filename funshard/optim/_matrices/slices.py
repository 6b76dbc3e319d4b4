"""Where the parameters of a unit lie in this rank's slice.

The place depends on the rank. Simulated ranks have shapes alike, so that there a parameter's part is the whole slice, of which
only its own elements are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..._spec.spec import PartitionSpec
from ..._spec.unit import Unit
from ..._units.flow import scatter_unit
from ..._units.layout import rank_coords, slice_pieces
from .flat import concat_flat

__all__ = ["SliceLayout"]


class SliceLayout(NamedTuple):
    """The ranges of a unit's parameters in this rank's slice."""

    unit: Unit
    spec: PartitionSpec
    ranges: Mapping[str, tuple[int, int]] | None
    """``(begin, end)`` in the slice, by parameter name; None for simulated ranks."""

    @staticmethod
    def for_unit(unit: Unit, spec: PartitionSpec) -> SliceLayout:
        """Return the layout of a unit of a bound spec."""
        if spec.bound_mesh.is_simulated:
            return SliceLayout(unit, spec, None)
        at = rank_coords(spec.bound_mesh, None)
        return SliceLayout(unit, spec, {piece.param.name: (piece.low, piece.high) for piece in slice_pieces(unit, spec, at)})

    def select(self, piece: Tensor, name: str) -> Tensor:
        """Return a parameter's part of the slice: 1-D, a view."""
        if self.ranges is None:
            return piece
        low, high = self.ranges[name]
        return piece[low:high]

    def join(self, parts: Mapping[str, Tensor], others: Tensor) -> Tensor:
        """Return a slice of these parts, by parameter name, with all other elements from ``others``. Inverse of `select`."""
        if self.ranges is None:
            out = others
            for name, part in parts.items():
                out = torch.where(scatter_unit(self._mask_of(name, others.device), self.unit, self.spec.bound_mesh), part, out)
            return out
        tensors: list[Tensor] = []
        end = 0
        for name, (low, high) in self.ranges.items():
            if name in parts:  # an empty one as well: derivatives of what it was made of are sent back by all ranks or none
                tensors += [others[end:low], parts[name]]
                end = high
        return concat_flat([*tensors, others[end:]])

    def _mask_of(self, name: str, device: torch.device) -> Tensor:
        """Return the mask of a parameter's elements in the unit's buffer."""
        own: list[Tensor] = []
        for size, param in self.unit.parts:
            own.append(torch.full((size,), param is not None and param.name == name, device=device))
        padding = self.spec.padded_numel(self.unit) - self.unit.span
        return torch.cat([*own, torch.zeros(padding, dtype=torch.bool, device=device)])
