"""matrices: whole matrices of what is sharded flat, each on one owner, and the way there and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..._spec.spec import PartitionSpec, bound
from ..._units.layout import Params, rank_coords
from .batch import Group
from .owners import Cost, Matrix, Select, assigned, chosen, groups, largest, table
from .slices import Cut

__all__ = ["Matrices", "matrices"]


@dataclass(frozen=True)
class Matrices:
    """The matrices of a spec's parameters and their owners, on a mesh. `matrices` makes it; it prints as a table."""

    spec: PartitionSpec
    """Bound to its mesh."""
    chosen: tuple[Matrix, ...]
    groups: tuple[tuple[str, ...], ...] = field(repr=False)
    """Names of those that are sent together."""
    by_name: Mapping[str, Matrix] = field(init=False, compare=False, repr=False)
    """The matrices by their parameters' names."""
    _of_unit: Mapping[str, list[Matrix]] = field(init=False, compare=False, repr=False)
    _cuts: dict[str, Cut] = field(default_factory=dict, init=False, compare=False, repr=False)
    _made: dict[tuple[str, ...], Group] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        of_unit: dict[str, list[Matrix]] = {}
        for matrix in self.chosen:
            of_unit.setdefault(matrix.unit.key, []).append(matrix)
        object.__setattr__(self, "by_name", {matrix.name: matrix for matrix in self.chosen})
        object.__setattr__(self, "_of_unit", of_unit)

    def __str__(self) -> str:
        return table(self.chosen, self.spec)

    def owner(self, name: str) -> tuple[int, ...]:
        """The coordinates on the mesh of the rank that owns a matrix. KeyError for what is none."""
        return self.by_name[name].owner

    def collect(self, tree: Mapping[str, Tensor]) -> Params:
        """Each matrix of the units in ``tree`` whole on its owner, by parameter name. Inverse of `spread`.

        ``tree`` has this rank's slices by unit key, of whatever dtype: parameters, gradients, momentum. The matrices have
        their shapes ([n, m], or [batch, n, m]); where this rank is not the owner there is an empty tensor, on simulated ranks
        zeros. One all-to-all for each group of neighbouring matrices and axis of their slices. What all replicas have
        alike counts once: so it is linear, its transpose is `spread`, and it may be differentiated and vmapped.

        Raises ValueError, naming it, for a unit whose slice is not of the spec, or of another dtype than what it is sent with.
        """
        parts = {name: part for key in tree for name, part in self._parts(tree, key).items()}
        self.check_alike(parts)
        out: Params = {}
        for group in self.groups_of(tree):
            out |= group.collect(parts)
        return {matrix.name: out[matrix.name] for matrix in self.chosen if matrix.name in out}

    def spread(self, whole: Mapping[str, Tensor]) -> Params:
        """The slices of matrices that are on their owners, by unit key, with zeros for what is none. Inverse of `collect`.

        On all replicas. ``whole`` are those of all matrices of a unit, or none: what `collect` gives, or was made of it in
        the same shapes. Its transpose is `collect`. Raises ValueError, naming it, for one that is missing, of another shape,
        or of another dtype than what it is sent with.
        """
        keys = dict.fromkeys(self.by_name[name].unit.key for name in whole if name in self.by_name)
        self._check(whole, keys)
        self.check_alike(whole)
        parts: Params = {}
        for group in self.groups_of(keys):
            parts |= group.spread(whole)
        out: Params = {}
        for key in keys:
            unit = self.spec.by_key[key]
            names = self.names(key)
            zeros = parts[names[0]].new_zeros(self.spec.shard_numel(unit))
            out[key] = self.cut(key).joined({name: parts[name] for name in names}, zeros)
        return out

    def names(self, key: str) -> tuple[str, ...]:
        """Of the matrices of a unit."""
        return tuple(matrix.name for matrix in self._of_unit.get(key, ()))

    def cut(self, key: str) -> Cut:
        """Where the parameters of a unit lie in this rank's slice."""
        if key not in self._cuts:
            self._cuts[key] = Cut.of(self.spec.by_key[key], self.spec)
        return self._cuts[key]

    def is_here(self, name: str) -> bool:
        """Whether this rank owns a matrix; simulated ones are all there."""
        mesh = self.spec.bound_mesh
        return mesh.is_simulated or self.by_name[name].owner == rank_coords(mesh, None)

    def _parts(self, tree: Mapping[str, Tensor], key: str) -> Params:
        if key not in self.spec.by_key:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {list(self.spec.by_key)[:8]}")
        unit = self.spec.by_key[key]
        if tuple(tree[key].shape) != (self.spec.shard_numel(unit),):
            raise ValueError(
                f"unit '{key}': expected a slice of {self.spec.shard_numel(unit)} elements, got shape {list(tree[key].shape)}; "
                "is it of another spec or another mesh?"
            )
        return {name: self.cut(key).part(tree[key], name) for name in self.names(key)}

    def _check(self, whole: Mapping[str, Tensor], keys: Mapping[str, None]) -> None:
        for name in whole:
            if name not in self.by_name:
                raise ValueError(f"'{name}' is no matrix of these: expected some of {[*self.by_name][:8]}")
        for matrix in (matrix for key in keys for matrix in self._of_unit[key]):
            if matrix.name not in whole:
                raise ValueError(f"matrix '{matrix.name}' is missing: expected all of unit '{matrix.unit.key}'")
            shape, owned = tuple(whole[matrix.name].shape), self.is_here(matrix.name)
            if shape != matrix.shape if owned else whole[matrix.name].numel():
                expected = list(matrix.shape) if owned else "an empty tensor, as another rank is its owner"
                raise ValueError(f"matrix '{matrix.name}': expected {expected}, got {list(shape)}")

    def check_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """ValueError, naming it, for a matrix whose tensor is not of the dtype and device of those that it is sent with."""
        for names in self.groups:
            some = [name for name in names if name in tensors]
            for name in some[1:]:
                first, x = tensors[some[0]], tensors[name]
                if (x.dtype, x.device) != (first.dtype, first.device):
                    raise ValueError(
                        f"matrix '{name}' is sent together with '{some[0]}': expected {first.dtype} on {first.device}, "
                        f"got {x.dtype} on {x.device}"
                    )

    def groups_of(self, keys: Mapping[str, object]) -> Iterator[Group]:
        """Those of some units, or what is there of them."""
        for names in self.groups:
            if some := tuple(name for name in names if self.by_name[name].unit.key in keys):
                yield self.group(some)

    def group(self, names: tuple[str, ...]) -> Group:
        """Matrices of one group, which are sent together."""
        if names not in self._made:
            self._made[names] = Group.of([self.by_name[name] for name in names], self.spec, largest(self.chosen))
        return self._made[names]


def matrices(spec: PartitionSpec, *, select: Select | None = None, cost: Cost | None = None) -> Matrices:
    """Which parameters an optimizer works on as whole matrices, and which rank owns each, so that ranks share the work.

    By default those that are trained and have two dimensions; ``select(name, param)`` says otherwise: False, True, or the
    shape [n, m] or [batch, n, m] in which it is seen, such as ``(len, -1)`` of a convolution. For optimizers of hidden
    layers leave embeddings and heads out: ``select=optim.hidden(model)``.

    Owners are ranks of the whole mesh: under HSDP each replica has its own matrices, and where a unit is not split nothing
    is collected. The dearest goes first to the rank that has least to do; ``cost(shape)`` is what one costs, by default for
    moving its elements and for n^2 m multiplications. It is the same on every rank, and prints as a table.

    >>> import torch, funshard as fs
    >>> spec = fs.policies.whole()(torch.nn.Linear(2, 3)).on({"shard": 1})
    >>> print(fs.optim.matrices(spec))
      owner  matrices  numel  of the mean cost  which
    -------------------------------------------------
    shard=0         1      6              1.00  weight
    no matrices: 1 parameters, 3 elements: bias

    Raises ValueError, naming the parameter, for a shape that does not fit it.
    """
    spec = bound(spec)
    found = chosen(spec, select, cost)
    together = groups(found, spec)
    names = tuple(tuple(found[i].name for i in group) for group in together)
    return Matrices(spec, tuple(assigned(found, together, spec)), names)
