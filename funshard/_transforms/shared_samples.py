"""Samples that ranks along local axes share, as in tensor parallel: one sample's gradient is of all of them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # as torch.func

from .. import _torch
from .._spec.division import Reduction, count_ranks
from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._units.flow import gather_unit, reduce_unit
from .._units.layout import Params, flatten_unit, unflatten_unit
from ..collectives._functions import all_reduce, broadcast, sum_over
from ..collectives._mesh import Mesh

__all__ = ["SharedSamples"]


class SharedSamples(NamedTuple):
    """The local axes of a model, along which all ranks have the same samples.

    A sample's gradient is that of the mean of its loss over these ranks: of a local unit the rank's own, divided by the sizes
    of the axes, and of any other unit the mean over them.
    """

    mesh: Mesh
    names: tuple[str, ...]
    """The axes of several ranks that a unit is local over."""

    @staticmethod
    def of_spec(spec: PartitionSpec) -> SharedSamples:
        """Return the local axes of a bound spec."""
        mesh, local = spec.bound_mesh, {axis for unit in spec for axis in unit.local_axes}
        return SharedSamples(mesh, tuple(name for name in mesh.names if name in local and mesh[name].size > 1))

    @property
    def copies(self) -> int:
        """The number of ranks that have the same samples."""
        return count_ranks(self.names, self.mesh)

    def check(self, batch: Any) -> Tensor | None:
        """Raise ValueError, on all ranks, if ranks along the axes have different samples.

        Returns:
            None; or, where no value can be read, the number 0, or NaN if they have, to add to the results.
        """
        if not self.names:
            return None
        differs = torch.zeros((), device=self.mesh.device)
        for x in pytree.tree_leaves(batch):
            for name in self.names:
                first = broadcast(x.detach(), self.mesh[name])
                equal = (first == x) | ((first != first) & (x != x))  # NaN too
                differs = differs + (~equal).any().to(differs)
        differs = sum_over(differs, self.mesh)
        if not _torch.is_eager():
            return torch.where(differs > 0, torch.nan, 0.0)
        if differs:
            raise ValueError(
                f"per_sample_grads: the model is local over {' and '.join(map(repr, self.names))}, and ranks along it have "
                "other samples: expected the same batch on all of them, as in tensor parallel; where each rank has its own, as "
                "with experts, its gradients have parts of the others' losses"
            )
        return None

    def enter(self, buffer: Tensor, unit: Unit) -> Tensor:
        """Return a unit's buffer, whose gradient is that of the mean over the ranks that share a sample."""
        return (
            gather_unit(buffer, _replicate_unit(unit), self.mesh, Reduction.make("mean", self.names)) if self.names else buffer
        )

    def reduce_grads(self, grads: Mapping[str, Tensor], units: Iterable[Unit], spec: PartitionSpec) -> Params:
        """Return gradients by parameter name, [samples, ...], that ranks have computed apart, as those of the mean."""
        if not self.names:
            return dict(grads)
        reduction = Reduction.make("mean", self.names)

        def reduce_sample(grads: Mapping[str, Tensor]) -> Params:
            out: Params = {}
            for unit in units:
                buffer = flatten_unit(grads, unit, spec.padded_numel(unit))
                views = unflatten_unit(reduce_unit(buffer, _replicate_unit(unit), self.mesh, reduction), unit)
                out |= zip((param.name for param in unit.params), views, strict=True)
            return out

        return torch.vmap(reduce_sample)(dict(grads))

    def sum_squares(self, squares: Mapping[str, Tensor], units: Iterable[Unit]) -> Tensor:
        """Return the squared norms over all units: those of local units are summed over the ranks that have other pieces."""
        of_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for unit in units:
            of_axes.setdefault(unit.local_axes, []).append(squares[unit.key])
        sums: list[Tensor] = []
        for axes, some in of_axes.items():
            total = torch.stack(some).sum(0)
            for name in axes:
                total = all_reduce(total, self.mesh[name], reduce="sum")
            sums.append(total)
        return torch.stack(sums).sum(0)


def _replicate_unit(unit: Unit) -> Unit:
    """Return the unit without a shard axis, so that each rank has its whole buffer."""
    return dataclasses.replace(unit, p=dataclasses.replace(unit.p, axis=None, reshard=True))
