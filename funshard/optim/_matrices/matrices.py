"""matrices: whole matrices of flat slices, each on one owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..._core.checks import bind_spec
from ..._core.layout import Params, rank_coords
from ..._core.spec import PartitionSpec
from ..._core.unit import Unit
from ..._slices.pieces import check_slice, param_ranges, scatter_values
from .._checks import check_tensors
from .exchange import MatrixBatch, concat_flat
from .owners import Matrix, Owner, Select, assign_owners, batch_matrices, format_owners, select_matrices


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
        """
        self._check_slices(tree)
        parts = {name: self._select(key, tree[key], name) for key in tree for name in self._names_in(key)}
        out: Params = {}
        for batch in self._batches_of(tree):
            out |= batch.collect(parts)()
        return {matrix.name: out[matrix.name] for matrix in self.chosen if matrix.name in out}

    def spread(self, whole: Mapping[str, Tensor]) -> Params:
        """Return the slices of whole matrices, on all replicas, with zeros for all other elements. Inverse of `collect`.

        Its transpose is `collect`.

        Args:
            whole: Every matrix of a unit, or none, in the shapes that `collect` returns.

        Returns:
            Slices by unit key.
        """
        for name in whole:
            if name not in self.by_name:
                raise ValueError(f"'{name}' is no matrix of these: expected some of {[*self.by_name][:8]}")
        keys = dict.fromkeys(self.by_name[name].unit.key for name in whole)
        for name in (name for key in keys for name in self._names_in(key)):
            shape = list(self.by_name[name].shape) if self._is_owner(name) else [0]
            got = list(whole[name].shape) if name in whole else "none"
            if got != shape:
                raise ValueError(
                    f"matrix '{name}': expected {shape}, as collect returns it, and all matrices of a unit, got {got}"
                )
        self._check_sent_together(whole)
        parts: Params = {}
        for batch in self._batches_of(keys):
            parts |= batch.spread(whole)()
        out: Params = {}
        for key in keys:
            own = {name: [parts[name]] for name in self._names_in(key)}
            numel = self.spec.shard_numel(self.spec.by_key[key])
            out[key] = self._join(key, own, next(iter(own.values()))[0].new_zeros(numel))
        return out

    def _names_in(self, key: str) -> tuple[str, ...]:
        return tuple(matrix.name for matrix in self._of_unit.get(key, ()))

    def _is_owner(self, name: str) -> bool:
        """Return whether this rank owns a matrix. Simulated ranks own all."""
        mesh = self.spec.bound_mesh
        return mesh.is_simulated or self.by_name[name].is_owned_by(rank_coords(mesh, None))

    def _select(self, key: str, piece: Tensor, name: str) -> Tensor:
        """Return a parameter's part of a slice, a view; on simulated ranks, whose shapes are alike, the whole slice."""
        if self.spec.bound_mesh.is_simulated:
            return piece
        return next(piece[low:high] for other, low, high in param_ranges(self.spec.by_key[key], self.spec) if other == name)

    def _join(self, key: str, parts: Mapping[str, Sequence[Tensor]], others: Tensor) -> Tensor:
        """Return a slice of parameters' parts, each in chunks, with other elements from ``others``. Inverse of `_select`."""
        unit = self.spec.by_key[key]
        if self.spec.bound_mesh.is_simulated:
            out = others
            for name, (part,) in parts.items():
                is_own = [param is not None and param.name == name for _, param in unit.parts]
                out = torch.where(scatter_values(is_own, False, unit, self.spec, others.device), part, out)
            return out
        tensors: list[Tensor] = []
        end = 0
        for name, low, high in param_ranges(unit, self.spec):
            if name in parts:  # an empty one as well: derivatives of what it was made of are sent back by all ranks or none
                tensors += [others[end:low], *parts[name]]
                end = high
        return concat_flat([*tensors, others[end:]])

    def _check_slices(self, tree: Mapping[str, Tensor]) -> None:
        """Raise ValueError or TypeError, naming the unit, unless these are slices of the spec that can be sent together."""
        check_tensors(tree, "params")
        for key, piece in tree.items():
            unit = self.spec.owner(key)
            if not isinstance(unit, Unit):
                raise ValueError(f"'{key}' is a parameter of the spec: expected units, such as {[*self.spec.by_key][:8]}")
            check_slice(piece, unit, self.spec, "update")
        self._check_sent_together({name: piece for key, piece in tree.items() for name in self._names_in(key)})

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
                largest = max(matrix.unit.numel for matrix in self.chosen)
                self._batches[some] = MatrixBatch.plan(chosen, self.spec, largest)
            if some:
                yield self._batches[some]


def matrices(spec: PartitionSpec, *, select: Select | None = None, gather_stacks: bool = False) -> Matrices:
    """Choose which parameters an optimizer updates as whole matrices, and which rank owns each, so that ranks share the work.

    Owners are ranks of the whole mesh: under HSDP each replica has its own matrices, and units that are not split send nothing.
    The costliest matrix goes first, to the rank with the least work. The result is the same on every rank, and prints as a
    table.

    Args:
        spec: A spec, bound to a mesh or to be bound to this process's.
        select: ``select(name, param)`` returns True, False, or the shape as a matrix, [n, m] or [batch, n, m], such as
            ``(len, -1)`` for a convolution. By default trained parameters with two dimensions. `hidden` leaves out embeddings
            and heads.
        gather_stacks: Send a stack [batch, n, m] that is local along its batch, such as experts, whole to one owner. By default
            each rank along that axis owns its part, and no matrix crosses the axis. Other local parameters are sent whole.

    Returns:
        The matrices and their owners.

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
    found = select_matrices(spec, select, gather_stacks=gather_stacks)
    batches = batch_matrices(found, spec)
    names = tuple(tuple(found[i].name for i in group) for group in batches)
    return Matrices(spec, tuple(assign_owners(found, batches, spec)), names)
