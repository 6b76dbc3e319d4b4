"""matrices: whole matrices of flat slices, each on one owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..._core.checks import bind_spec
from ..._core.flow import scatter_unit
from ..._core.layout import Params, rank_coords
from ..._core.spec import PartitionSpec
from ..._core.unit import Unit
from ..._slices.pieces import slice_pieces
from .exchange import MatrixBatch, concat_flat
from .owners import (
    Cost,
    Matrix,
    Owner,
    Select,
    assign_owners,
    batch_matrices,
    format_owners,
    largest_unit_numel,
    select_matrices,
)

# --- Where the parameters of a unit lie in this rank's slice ---
#
# The place depends on the rank. Simulated ranks have shapes alike, so that there a parameter's part is the whole slice, of
# which only its own elements are read.


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
        parts = ((size, param is not None and param.name == name) for size, param in self.unit.parts)
        own = [torch.full((size,), is_own, device=device) for size, is_own in parts]
        padding = self.spec.padded_numel(self.unit) - self.unit.span
        return torch.cat([*own, torch.zeros(padding, dtype=torch.bool, device=device)])


@dataclass(frozen=True)
class Matrices:
    """The matrices of a spec's parameters and their owners on a mesh, as `matrices` returns them. Prints as a table."""

    spec: PartitionSpec
    """Bound to its mesh."""
    chosen: tuple[Matrix, ...]
    groups: tuple[tuple[str, ...], ...] = field(repr=False)
    """Names of the matrices that are sent together."""
    by_name: Mapping[str, Matrix] = field(init=False, compare=False, repr=False)
    """The matrices by parameter name."""
    _of_unit: Mapping[str, list[Matrix]] = field(init=False, compare=False, repr=False)
    _layouts: dict[str, SliceLayout] = field(default_factory=dict, init=False, compare=False, repr=False)
    _batches: dict[tuple[str, ...], MatrixBatch] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        of_unit: dict[str, list[Matrix]] = {}
        for matrix in self.chosen:
            of_unit.setdefault(matrix.unit.key, []).append(matrix)
        object.__setattr__(self, "by_name", {matrix.name: matrix for matrix in self.chosen})
        object.__setattr__(self, "_of_unit", of_unit)

    def __str__(self) -> str:
        return format_owners(self.chosen, self.spec)

    def owner(self, name: str) -> Owner:
        """Return the mesh coordinates of the rank that owns a matrix; None on an axis whose ranks own a part of a stack each.

        Args:
            name: The parameter's name. KeyError if it is not a matrix.
        """
        return self.by_name[name].owner

    def collect(self, tree: Mapping[str, Tensor]) -> Params:
        """Return the matrices of the units in ``tree``, each whole on its owner. Inverse of `spread`.

        One all-to-all for each batch of neighbouring matrices and axis of their slices. Values that all replicas have alike
        count once. So it is linear with `spread` as its transpose, and it may be differentiated and vmapped.

        Args:
            tree: This rank's slices by unit key, of any dtype: parameters, gradients, momentum.

        Returns:
            By parameter name [n, m] or [batch, n, m] on the owner, an empty tensor elsewhere; on simulated ranks zeros.

        Raises:
            ValueError: A slice is not one of the spec's, or a unit's dtype differs from that of the units it is sent with.
        """
        parts = {name: part for key in tree for name, part in self._select_parts(tree, key).items()}
        self._check_sent_together(parts)
        out: Params = {}
        for group in self._batches_of(tree):
            out |= group.collect(parts)()
        return {matrix.name: out[matrix.name] for matrix in self.chosen if matrix.name in out}

    def spread(self, whole: Mapping[str, Tensor]) -> Params:
        """Return the slices of whole matrices, on all replicas, with zeros for all other elements. Inverse of `collect`.

        Its transpose is `collect`.

        Args:
            whole: Every matrix of a unit, or none, in the shapes that `collect` returns.

        Returns:
            Slices by unit key.

        Raises:
            ValueError: A matrix is missing, has another shape, or another dtype than the matrices it is sent with.
        """
        keys = dict.fromkeys(self.by_name[name].unit.key for name in whole if name in self.by_name)
        self._check_global(whole, keys)
        self._check_sent_together(whole)
        parts: Params = {}
        for group in self._batches_of(keys):
            parts |= group.spread(whole)()
        out: Params = {}
        for key in keys:
            unit = self.spec.by_key[key]
            names = self._names_in(key)
            zeros = parts[names[0]].new_zeros(self.spec.shard_numel(unit))
            out[key] = self._slice_layout(key).join({name: parts[name] for name in names}, zeros)
        return out

    def _names_in(self, key: str) -> tuple[str, ...]:
        return tuple(matrix.name for matrix in self._of_unit.get(key, ()))

    def _slice_layout(self, key: str) -> SliceLayout:
        if key not in self._layouts:
            self._layouts[key] = SliceLayout.for_unit(self.spec.by_key[key], self.spec)
        return self._layouts[key]

    def _is_owner(self, name: str) -> bool:
        """Return whether this rank owns a matrix. Simulated ranks own all."""
        mesh = self.spec.bound_mesh
        return mesh.is_simulated or self.by_name[name].is_owned_by(rank_coords(mesh, None))

    def _select_parts(self, tree: Mapping[str, Tensor], key: str) -> Params:
        if key not in self.spec.by_key:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {list(self.spec.by_key)[:8]}")
        unit = self.spec.by_key[key]
        if tuple(tree[key].shape) != (self.spec.shard_numel(unit),):
            raise ValueError(
                f"unit '{key}': expected a slice of {self.spec.shard_numel(unit)} elements, got shape {list(tree[key].shape)}; "
                "is it of another spec or another mesh?"
            )
        return {name: self._slice_layout(key).select(tree[key], name) for name in self._names_in(key)}

    def _check_global(self, whole: Mapping[str, Tensor], keys: Mapping[str, None]) -> None:
        for name in whole:
            if name not in self.by_name:
                raise ValueError(f"'{name}' is no matrix of these: expected some of {[*self.by_name][:8]}")
        for matrix in (matrix for key in keys for matrix in self._of_unit[key]):
            if matrix.name not in whole:
                raise ValueError(f"matrix '{matrix.name}' is missing: expected all of unit '{matrix.unit.key}'")
            shape, owned = tuple(whole[matrix.name].shape), self._is_owner(matrix.name)
            if shape != matrix.shape if owned else whole[matrix.name].numel():
                expected = list(matrix.shape) if owned else "an empty tensor, as another rank is its owner"
                raise ValueError(f"matrix '{matrix.name}': expected {expected}, got {list(shape)}")

    def _check_sent_together(self, tensors: Mapping[str, Tensor]) -> None:
        for names in self.groups:
            some = [name for name in names if name in tensors]
            for name in some[1:]:
                first, x = tensors[some[0]], tensors[name]
                if (x.dtype, x.device) != (first.dtype, first.device):
                    raise ValueError(
                        f"matrix '{name}' is sent together with '{some[0]}': expected {first.dtype} on {first.device}, "
                        f"got {x.dtype} on {x.device}"
                    )

    def _batches_of(self, keys: Mapping[str, object]) -> Iterator[MatrixBatch]:
        for names in self.groups:
            some = tuple(name for name in names if self.by_name[name].unit.key in keys)
            if some and some not in self._batches:
                chosen = [self.by_name[name] for name in some]
                self._batches[some] = MatrixBatch.plan(chosen, self.spec, largest_unit_numel(self.chosen))
            if some:
                yield self._batches[some]


def matrices(
    spec: PartitionSpec, *, select: Select | None = None, cost: Cost | None = None, gather_stacks: bool = False
) -> Matrices:
    """Choose which parameters an optimizer updates as whole matrices, and which rank owns each, so that ranks share the work.

    Owners are ranks of the whole mesh: under HSDP each replica has its own matrices, and units that are not split send nothing.
    The costliest matrix goes first, to the rank with the least work. The result is the same on every rank, and prints as a
    table.

    Args:
        spec: A spec, bound to a mesh or to be bound to this process's.
        select: ``select(name, param)`` returns True, False, or the shape as a matrix, [n, m] or [batch, n, m], such as
            ``(len, -1)`` for a convolution. By default trained parameters with two dimensions. `hidden` leaves out embeddings
            and heads.
        cost: ``cost(shape)`` of one matrix, by default for sending its elements and for n^2 m multiplications.
        gather_stacks: Send a stack [batch, n, m] that is local along its batch, such as experts, whole to one owner. By default
            each rank along that axis owns its part, and no matrix crosses the axis. Other local parameters are sent whole.

    Returns:
        The matrices and their owners.

    Raises:
        ValueError: A shape does not fit its parameter.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 3)).on({"shard": 1})
        >>> print(fs.optim.matrices(spec))
          owner  matrices  numel  of the mean cost  which
        -------------------------------------------------
        shard=0         1      6              1.00  weight
        no matrices: 1 parameters, 3 elements: bias
    """
    spec = bind_spec(spec)
    found = select_matrices(spec, select, cost, gather_stacks=gather_stacks)
    batches = batch_matrices(found, spec)
    names = tuple(tuple(found[i].name for i in group) for group in batches)
    return Matrices(spec, tuple(assign_owners(found, batches, spec)), names)
