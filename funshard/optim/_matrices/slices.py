"""A unit's slice as what lies in it of each parameter, and put together again; also where all ranks are simulated at once.

Where in a slice a parameter lies depends on the rank. Simulated ranks have shapes alike, so there a parameter's part is the
whole slice, of which only its own elements are looked at.
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
from .flat import joined

__all__ = ["Cut"]


class Cut(NamedTuple):
    """Where the parameters of a unit lie in this rank's slice."""

    unit: Unit
    spec: PartitionSpec
    ranges: Mapping[str, tuple[int, int]] | None
    """By parameter name from where to where; None for simulated ranks."""

    @staticmethod
    def of(unit: Unit, spec: PartitionSpec) -> Cut:
        """On the mesh of a bound spec."""
        if spec.bound_mesh.is_simulated:
            return Cut(unit, spec, None)
        at = rank_coords(spec.bound_mesh, None)
        return Cut(unit, spec, {piece.param.name: (piece.low, piece.high) for piece in slice_pieces(unit, spec, at)})

    def part(self, piece: Tensor, name: str) -> Tensor:
        """What of the slice is of a parameter, 1-D, as a view."""
        if self.ranges is None:
            return piece
        low, high = self.ranges[name]
        return piece[low:high]

    def joined(self, parts: Mapping[str, Tensor], others: Tensor) -> Tensor:
        """The slice of these parts, whose other elements are those of ``others``, a slice. Inverse of `part`."""
        if self.ranges is None:
            out = others
            for name, part in parts.items():
                out = torch.where(scatter_unit(self._own(name, others.device), self.unit, self.spec.bound_mesh), part, out)
            return out
        tensors: list[Tensor] = []
        end = 0
        for name, (low, high) in self.ranges.items():
            if name in parts:  # an empty one as well: derivatives of what it was made of are sent back by all ranks or none
                tensors += [others[end:low], parts[name]]
                end = high
        return joined([*tensors, others[end:]])

    def _own(self, name: str, device: torch.device) -> Tensor:
        """Which elements of the unit's buffer are the parameter's."""
        own: list[Tensor] = []
        for size, param in self.unit.parts:
            own.append(torch.full((size,), param is not None and param.name == name, device=device))
        rest = self.spec.padded_numel(self.unit) - self.unit.span
        return torch.cat([*own, torch.zeros(rest, dtype=torch.bool, device=device)])
