"""PartitionSpec: frozen data that says which parameters live together and how they are split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from .. import _torch
from .mesh import Axis, Mesh, ProcessAxis
from .tree import Param, is_within
from .unit import P, Unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def abridge(paths: Collection[object], most: int = 8) -> str:
    """Format the first few paths for an error message."""
    names = [repr(path) for path in paths]
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def format_sizes(sizes: Iterable[tuple[str, int]]) -> str:
    """Format a mesh's axes with their sizes."""
    return " x ".join(f"{name}={size}" for name, size in sizes)


FORMATS: dict[str, Callable[[PartitionSpec], str]] = {}
"""How a spec is printed: a "table", once its file is imported."""

Cached = TypeVar("Cached")


@dataclass(frozen=True)
class PartitionSpec:
    """An immutable map from module path to `P`, and the units that it makes of one model.

    ``selected`` are the paths that a policy chose, ``root`` is the `P` of what no chosen path owns. Iterating gives
    the units, the same on every rank and in every registration order; ``str(spec)`` is a table of them. Made by a
    policy, bound to a mesh by `on`. Equal by value, hashable, picklable (what a pickle keeps of the mesh are the axis
    names and sizes: bind it anew where it is loaded).
    """

    selected: tuple[tuple[str, P], ...]
    root: P
    units: tuple[Unit, ...]
    ignored: tuple[str, ...] = ()
    run_order: tuple[str, ...] | None = None
    """The keys of the units in the order in which forward uses them, where `ordered` gave one."""
    sizes: tuple[tuple[str, int], ...] | None = None
    mesh: Mesh | None = field(default=None, compare=False, repr=False)
    names: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The parameters' names in the model's own order, which layouts do not depend on."""
    by_key: Mapping[str, Unit] = field(init=False, compare=False, repr=False)
    """The units by their keys."""
    by_name: Mapping[str, tuple[Unit, Param]] = field(init=False, compare=False, repr=False)
    """The owner of every parameter, under each of its names."""
    by_path: Mapping[str, P] = field(init=False, compare=False, repr=False)
    """The `P` of every module path that is a unit, the root's ``""`` among them."""
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    _graph_key: ClassVar[str] = ""
    """The graph key of a spec on process groups that was made outside of torch.compile."""

    def __post_init__(self) -> None:
        names = {name: (unit, param) for unit in self.units for param in unit.params for name in param.names}
        object.__setattr__(self, "by_key", {unit.key: unit for unit in self.units})
        object.__setattr__(self, "by_name", names)
        object.__setattr__(self, "by_path", {"": self.root, **dict(self.selected)})
        if len(self.by_key) < len(self.units):
            keys = [unit.key for unit in self.units]
            raise ValueError(f"two units have the key '{max(keys, key=keys.count)}': expected no ':' in module names")
        for key in self.by_key:
            if key in names or key in self.ignored:
                raise ValueError(
                    f"parameter '{key}' has the name of a unit, and params may hold either: expected a parameter of another "
                    "name, without ':'; rename it in the model"
                )
        if self.mesh and all(isinstance(axis, ProcessAxis) for _, axis in self.mesh.axes) and not _torch.is_in_graph():
            fields = [getattr(self, f.name) for f in dataclasses.fields(self) if f.compare]
            _torch.set_graph_key(self, (*fields, self.mesh, self.names))

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def paths(self) -> tuple[str, ...]:
        """The module paths that are units, the root's ``""`` among them."""
        return tuple(self.by_path)

    @property
    def by_run(self) -> Mapping[str, P]:
        """The `P` of each module path that runs as a unit: "" only where nothing else is selected, as by ``whole(P(...))``."""
        return dict(self.selected) or {"": self.root}

    def _compute_once(self, make: Callable[..., Cached], *args: Hashable) -> Cached:
        """Return ``make(self, *args)``, computed once for this object and kept while it lives; it must not hold the spec."""
        if _torch.is_in_graph():  # which has no use for it, and would guard it
            return self._compute_constant(make) if self._graph_key and not args else make(self, *args)
        if (cached := self._cache.get((make, args))) is None:
            cached = self._cache[make, args] = make(self, *args)
        return cached

    @_torch.assume_constant
    def _compute_constant(self, make: Callable[..., Cached]) -> Cached:
        """Return ``make(self)``, which Dynamo computes as it traces. The graph key must be guarded."""
        return make(self)

    def owner(self, key: str) -> Unit | Param:
        """Return the unit with this key, or else the parameter with this name.

        Args:
            key: A unit's key, or a parameter's name in the model.

        Raises:
            ValueError: If there is neither.
        """
        if key in self.by_key:
            return self.by_key[key]
        if key in self.by_name:
            return self.by_name[key][1]
        raise ValueError(f"'{key}' is no unit and no parameter of the spec: expected some of {list(self.by_key)[:8]}")

    def _to_model_order(self, full: Mapping[str, Cached]) -> dict[str, Cached]:
        """Return what there is by parameter name in the order of ``named_parameters``; other names come last."""
        return {name: full[name] for name in dict.fromkeys((*self.names, *full)) if name in full}

    def _restrict_to_units(self, path: str, keys: Iterable[str]) -> PartitionSpec:
        """Return the part of this spec for the submodule at ``path``, which uses the units of these keys."""
        return self._compute_once(_restrict_to_units, path, frozenset(keys))

    def on(
        self,
        mesh: DeviceMesh | Mesh | Mapping[str, int | Axis],
        *,
        reductions: DeviceMesh | Mesh | None = None,
        submesh: bool = False,
    ) -> PartitionSpec:
        """Return this spec on a mesh.

        Args:
            mesh: A `DeviceMesh`, or axis names with their sizes if no rank communicates with another one.
            reductions: A second mesh over the same ranks, whose process groups functional_call reduces gradients over. On NCCL,
                backward's gathers then overlap with reductions. Each group's kernels wait on the device for other ranks. They
                can deadlock if ranks start them in different orders, or if both do not fit on the device at once
                (``CUDA_DEVICE_MAX_CONNECTIONS=1``, too few free multiprocessors): see NCCL on concurrent communicators.
            submesh: Whether the mesh has only some ranks of the process group on purpose, such as one axis of a larger mesh.
                Without it, `checkpoint` and the norms of `optim` refuse such a mesh: other ranks may hold other parts of the
                model, which a norm or checkpoint over this mesh does not have.

        Raises:
            ValueError: For an axis of a unit that the mesh does not have, and for a second mesh that does not fit.
            TypeError: For an object that is not a mesh.
        """
        axes = Mesh.of(mesh) if reductions is None else Mesh.of(mesh).with_reductions_over(Mesh.of(reductions))
        if submesh:
            axes = dataclasses.replace(axes, submesh=True)
        names = axes.names
        for unit in self.units:
            for axis in unit.distinct_axes:
                if axis not in names:
                    raise ValueError(f"unit '{unit.key}': unknown mesh axis '{axis}' in {unit.p}; expected one of {names}")
        return dataclasses.replace(self, mesh=axes, sizes=axes.sizes)

    def ordered(self, names: Iterable[str]) -> PartitionSpec:
        """Return this spec with the order in which forward uses its units, which prefetches follow; `trace_order` finds it.

        Args:
            names: Keys of units, once for each time that the unit is gathered. Other units are gathered when they are used. A
                wrong order costs time, never correctness. Without an order, prefetches follow the units' names.

        Raises:
            ValueError: For a name that is not a unit.
        """
        run_order = tuple(names)
        for name in run_order:
            if name not in self.by_key:
                raise ValueError(f"ordered: '{name}' is not a unit: expected some of {abridge(self.by_key)}")
        return dataclasses.replace(self, run_order=run_order)

    @property
    def order(self) -> tuple[str, ...]:
        """The keys of the units in the order in which they are gathered ahead: `ordered`'s, or that of their names."""
        return tuple(self.by_key) if self.run_order is None else self.run_order

    @property
    def bound(self) -> PartitionSpec:
        """The spec on its mesh; an unbound one on the world as one axis "shard" (one rank without a process group)."""
        if self.mesh is not None or self.sizes is not None:
            return self
        return self._compute_once(PartitionSpec.on, Mesh.world())

    @property
    def bound_mesh(self) -> Mesh:
        """The mesh of the bound spec: only sizes where it came out of a pickle."""
        spec = self.bound
        return spec.mesh or Mesh.of(dict(spec.sizes or ()))

    def axis(self, name: str) -> Axis:
        """Return an axis of the bound mesh, for collectives of the model's own.

        Args:
            name: The axis's name. ValueError if the mesh has no such axis.
        """
        return self.bound_mesh[self.bound_mesh.select(name)[0]]

    def size(self, unit: Unit) -> int:
        """Return the number of slices that a unit's buffer is split into.

        Args:
            unit: A unit of this spec.
        """
        return self.bound._compute_once(_count_slices, unit.p)

    def shard_numel(self, unit: Unit) -> int:
        """Return the number of elements of one rank's slice of a unit, padding included: the same on every rank.

        Args:
            unit: A unit of this spec.
        """
        return unit.padded_numel(size := self.size(unit)) // size

    def stored(self, unit: Unit) -> tuple[int, torch.dtype]:
        """Return the length and dtype of the slice that `shard` returns for a unit.

        Args:
            unit: A unit of this spec. The length is `shard_numel`, or the number of bytes if the unit has a codec ``at_rest``.
        """
        return self._all_stored()[unit.key] if self.by_key.get(unit.key) is unit else _stored_of(unit, self.bound)

    def _all_stored(self) -> dict[str, tuple[int, torch.dtype]]:
        return self.bound._compute_once(_stored_by_key)

    def padded_numel(self, unit: Unit) -> int:
        """Return the number of elements of a unit's whole buffer, padding included.

        Args:
            unit: A unit of this spec.
        """
        return unit.padded_numel(self.size(unit))

    def __copy__(self) -> PartitionSpec:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> PartitionSpec:
        return self

    def __getstate__(self) -> dict[str, object]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "mesh": None, "_cache": {}}

    def __str__(self) -> str:
        return FORMATS.get("table", PartitionSpec.__repr__)(self)

    def __repr__(self) -> str:
        units, where = len(self.units), "unbound" if self.sizes is None else format_sizes(self.sizes)
        params, numel = sum(len(unit.params) for unit in self.units), sum(unit.numel for unit in self.units)
        return f"<PartitionSpec: {units} unit{'s' * (units != 1)}, {params:,} parameters, {numel:,} elements, {where}>"


def _count_slices(spec: PartitionSpec, p: P) -> int:
    sizes = dict(spec.sizes or ())
    return torch.Size(sizes[axis] for axis in p.axes).numel()


def _stored_by_key(spec: PartitionSpec) -> dict[str, tuple[int, torch.dtype]]:
    return {unit.key: _stored_of(unit, spec) for unit in spec}


def _stored_of(unit: Unit, spec: PartitionSpec) -> tuple[int, torch.dtype]:
    numel = spec.shard_numel(unit)
    return unit.at_rest._count_stored(numel, unit.dtype) if unit.at_rest else (numel, unit.dtype)


def _restrict_to_units(spec: PartitionSpec, path: str, keys: frozenset[str]) -> PartitionSpec:
    """Return the spec of these units inside the module at ``path``, which nothing surrounds any more."""
    return dataclasses.replace(
        spec,
        selected=tuple((inner, p) for inner, p in spec.selected if inner != path and is_within(inner, path)),
        root=spec.root._without_wrappers(),
        units=tuple(unit for unit in spec.units if unit.key in keys),
        ignored=tuple(name for name in spec.ignored if is_within(name, path)),
        run_order=None if spec.run_order is None else tuple(key for key in spec.run_order if key in keys),
    )
