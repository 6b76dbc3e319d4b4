"""P, Unit, PartitionSpec: frozen data that says which parameters live together and how they are split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..collectives._mesh import Axis, Mesh
from .precision import Precision
from .table import short, table
from .tree import ModuleTree, Param, is_within, natural_key

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["P", "PartitionSpec", "Unit", "bound", "build", "checked"]

Made = TypeVar("Made")

ALIGN_BYTES = 16
"""What vectorized kernels, tensor cores and NCCL want of the start of a tensor; FSDP1 aligns to as many (use_orig_params)."""


@dataclass(frozen=True)
class P:
    """How one unit's flat buffer lies on the mesh, with JAX's meaning: split over ``axis``, replicated over the rest.

    ``P("shard")`` is FSDP on a mesh ("shard",) and HSDP on ("replicate", "shard"); ``P()`` is DDP; a tuple of names
    splits over several axes, the first one outermost. ``reshard`` frees the gathered buffer between forward and
    backward (ZeRO-3) or keeps it (ZeRO-2). Every parameter, and every rank's slice, starts at a multiple of ``align``
    elements: by default 16 bytes in each dtype that the unit is kept, gathered and reduced in, for which kernels are made;
    with 1 parameters lie end to end.

    ``precision`` says in which dtypes its values travel. ``remat`` runs its module again for every derivative.

    Raises TypeError for an axis that is no name and a field of another type, ValueError for an axis that is named twice
    and for ``align < 1``.
    """

    axis: str | tuple[str, ...] | None = None
    reshard: bool = field(default=True, kw_only=True)
    precision: Precision | None = field(default=None, kw_only=True)
    remat: bool = field(default=False, kw_only=True)
    offload: str | None = field(default=None, kw_only=True)
    align: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in self.axes if isinstance(self.axis, tuple) else () if self.axis is None else (self.axis,):
            if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"P: expected an axis name, a tuple of names or None, got {self.axis!r}")
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"P: axis named twice in {self.axis!r}: expected different mesh axes")
        if not isinstance(self.precision, Precision | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: precision: expected a Precision or None, got {self.precision!r}")
        for name in ("reshard", "remat"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"P: {name}: expected True or False, got {value!r}")
        if not isinstance(self.offload, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: offload: expected the name of a device or None, got {self.offload!r}")
        if not isinstance(self.align, int | None) or isinstance(self.align, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"P: align: expected a whole number of elements, got {self.align!r}")
        if self.align is not None and self.align < 1:
            raise ValueError(f"P: expected align >= 1, got {self.align}")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis names as a tuple, outermost first."""
        return () if self.axis is None else (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)

    def __str__(self) -> str:
        axis = "" if self.axis is None else repr(self.axis)
        changed = [
            f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default
        ]
        return f"P({', '.join(filter(None, [axis, *changed]))})"

    __repr__ = __str__


@dataclass(frozen=True)
class Unit:
    """One flat buffer: parameters of one dtype and one ``requires_grad`` that are gathered, used and freed together.

    ``key`` is the unit's key in a dict of shards: its module path, plus a suffix where that module's parameters mix
    dtypes or ``requires_grad`` and become several units (``blocks.0:bfloat16``, ``blocks.0:frozen``).
    """

    key: str
    path: str
    p: P
    params: tuple[Param, ...]
    numel: int = field(init=False, compare=False, repr=False)
    """Elements of the parameters, without padding."""
    align: int = field(init=False, compare=False, repr=False)
    """Of how many elements the start of every parameter and of every slice is a multiple."""
    parts: tuple[tuple[int, Param | None], ...] = field(init=False, compare=False, repr=False)
    """What lies in the buffer, one after the other, and how many elements each is: parameters, and padding (None)."""
    span: int = field(init=False, compare=False, repr=False)
    """Elements up to the end of the last parameter, with the padding before it."""

    def __post_init__(self) -> None:
        align = self.p.align
        if align is None:
            dtypes = (self.dtype, *(self.p.precision or Precision()).resolve(self.dtype))
            align = max(ALIGN_BYTES // dtype.itemsize for dtype in dtypes)
        parts: list[tuple[int, Param | None]] = []
        span = 0
        for param in self.params:
            if gap := -span % align:
                parts.append((gap, None))
            parts.append((param.numel, param))
            span += gap + param.numel
        object.__setattr__(self, "numel", sum(p.numel for p in self.params))
        object.__setattr__(self, "align", align)
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "span", span)

    def padded_numel(self, slices: int) -> int:
        """Elements of the buffer where it is split into so many slices, padding included."""
        return -(-self.span // (slices * self.align)) * self.align * slices

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every parameter."""
        return self.params[0].dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the parameters are trained."""
        return self.params[0].requires_grad


@dataclass(frozen=True)
class PartitionSpec:
    """An immutable map from module path to `P`, and what it makes of one model: its units.

    ``selected`` are the paths that a policy chose, ``root`` is the `P` of what no chosen path owns. Iterating gives
    the units, the same on every rank and in every registration order; ``str(spec)`` is a table of them. Made by a
    policy, bound to a mesh by `on`. Equal by value, hashable, picklable (what a pickle keeps of the mesh are the axis
    names and sizes: bind it anew where it is loaded).
    """

    selected: tuple[tuple[str, P], ...]
    root: P
    units: tuple[Unit, ...]
    ignored: tuple[str, ...] = ()
    runs: tuple[str, ...] | None = None
    """The keys of the units in the order in which forward uses them, where `ordered` gave one."""
    sizes: tuple[tuple[str, int], ...] | None = None
    mesh: Mesh | None = field(default=None, compare=False, repr=False)
    by_key: Mapping[str, Unit] = field(init=False, compare=False, repr=False)
    """The units by their keys."""
    by_name: Mapping[str, tuple[Unit, Param]] = field(init=False, compare=False, repr=False)
    """The owner of every parameter, under each of its names."""
    places: Mapping[str, P] = field(init=False, compare=False, repr=False)
    """The `P` of every module path that is a unit, the root's ``""`` among them."""
    _made: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = {name: (unit, param) for unit in self.units for param in unit.params for name in param.names}
        object.__setattr__(self, "by_key", {unit.key: unit for unit in self.units})
        object.__setattr__(self, "by_name", names)
        object.__setattr__(self, "places", {"": self.root, **dict(self.selected)})
        if len(self.by_key) < len(self.units):
            keys = [unit.key for unit in self.units]
            raise ValueError(f"two units have the key '{max(keys, key=keys.count)}': expected no ':' in module names")
        for key in self.by_key:
            if key in names or key in self.ignored:
                raise ValueError(
                    f"parameter '{key}' has the name of a unit, and params may hold either: expected a parameter of another "
                    "name, without ':'; rename it in the model"
                )

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def paths(self) -> tuple[str, ...]:
        """The module paths that are units, the root's ``""`` among them."""
        return tuple(self.places)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The paths of the modules with ``P(remat=True)``, which run again for their derivatives: "" for the model.

        What no selected path owns is recomputed only where nothing is selected, as by ``whole(P(remat=True))``.
        """
        chosen = self.selected or (("", self.root),)
        return tuple(path for path, p in chosen if p.remat)

    def once(self, make: Callable[..., Made], *args: Hashable) -> Made:
        """``make(self, *args)``, made once for this very spec and kept for as long as it lives. It must not hold the spec."""
        if torch.compiler.is_compiling():  # which has no use for it, and would guard it
            return make(self, *args)
        if (made := self._made.get((make, args))) is None:
            made = self._made[make, args] = make(self, *args)
        return made

    def owner(self, key: str) -> Unit | Param:
        """The unit of this key, or else the parameter of this name. Raises ValueError where there is neither."""
        if key in self.by_key:
            return self.by_key[key]
        if key in self.by_name:
            return self.by_name[key][1]
        raise ValueError(f"'{key}' is no unit and no parameter of the spec: expected some of {list(self.by_key)[:8]}")

    def within(self, path: str, keys: Iterable[str]) -> PartitionSpec:
        """The part of this spec for the insides of one of its modules, which uses the units of these keys."""
        return self.once(_within, path, frozenset(keys))

    def on(
        self, mesh: DeviceMesh | Mesh | Mapping[str, int | Axis], *, reductions: DeviceMesh | Mesh | None = None
    ) -> PartitionSpec:
        """This spec on a mesh: a `DeviceMesh`, or axis names with their sizes where no rank is to talk to another.

        ``reductions`` is a second mesh over the same ranks whose process groups functional_call reduces gradients over:
        on NCCL, backward's gathers then overlap with them. Two groups' kernels wait for each other's ranks on the device: they
        can deadlock where ranks start them in different orders (programs that differ) or where both do not fit on it at once
        (``CUDA_DEVICE_MAX_CONNECTIONS=1``, too few free multiprocessors), as NCCL says of concurrent communicators.

        Raises ValueError, naming the unit, for an axis that the mesh does not have, and for another second mesh; and what
        makes no mesh is a ValueError or TypeError that says so.
        """
        axes = Mesh.of(mesh) if reductions is None else Mesh.of(mesh).reducing_over(Mesh.of(reductions))
        names = axes.names
        for unit in self.units:
            for axis in unit.p.axes:
                if axis not in names:
                    raise ValueError(f"unit '{unit.key}': unknown mesh axis '{axis}' in {unit.p}; expected one of {names}")
        return dataclasses.replace(self, mesh=axes, sizes=axes.sizes)

    def ordered(self, names: Iterable[str]) -> PartitionSpec:
        """This spec with the order in which forward uses its units: gathers run ahead by it, and not by the units' names.

        ``names`` are unit keys, a key once for each time that the unit is gathered; units that are not named are
        gathered when they are used. A wrong order costs time, never correctness. `trace_order` finds it.

        Raises ValueError for a name that is not a unit.
        """
        runs = tuple(names)
        for name in runs:
            if name not in self.by_key:
                raise ValueError(f"ordered: '{name}' is not a unit: expected some of {_sample(self.by_key)}")
        return dataclasses.replace(self, runs=runs)

    @property
    def order(self) -> tuple[str, ...]:
        """The keys of the units in the order in which they are gathered ahead: `ordered`'s, or that of their names."""
        return tuple(self.by_key) if self.runs is None else self.runs

    @property
    def bound(self) -> PartitionSpec:
        """This spec on its mesh; an unbound one on the world as one axis "shard" (one rank without a process group)."""
        if self.mesh is not None or self.sizes is not None:
            return self
        return self.once(PartitionSpec.on, Mesh.world())

    @property
    def bound_mesh(self) -> Mesh:
        """The mesh of the bound spec: only sizes where it came out of a pickle."""
        spec = self.bound
        return spec.mesh or Mesh.of(dict(spec.sizes or ()))

    def size(self, unit: Unit) -> int:
        """In how many slices the unit's buffer is split."""
        return self.bound.once(_size, unit.p)

    def shard_numel(self, unit: Unit) -> int:
        """Elements of one rank's slice of the unit, padding included: the same on every rank."""
        return unit.padded_numel(size := self.size(unit)) // size

    def padded_numel(self, unit: Unit) -> int:
        """Elements of the whole padded buffer of the unit."""
        return unit.padded_numel(self.size(unit))

    def __copy__(self) -> PartitionSpec:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> PartitionSpec:
        return self

    def __getstate__(self) -> dict[str, object]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "mesh": None, "_made": {}}

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        return short(self)


def _size(spec: PartitionSpec, p: P) -> int:
    sizes = dict(spec.sizes or ())
    return torch.Size(sizes[axis] for axis in p.axes).numel()


def _within(spec: PartitionSpec, path: str, keys: frozenset[str]) -> PartitionSpec:
    return dataclasses.replace(
        spec,
        selected=tuple((inner, p) for inner, p in spec.selected if inner != path and is_within(inner, path)),
        root=dataclasses.replace(spec.root, remat=False),
        units=tuple(unit for unit in spec.units if unit.key in keys),
        ignored=tuple(name for name in spec.ignored if is_within(name, path)),
        runs=None if spec.runs is None else tuple(key for key in spec.runs if key in keys),
    )


def bound(spec: object) -> PartitionSpec:
    """``spec.bound``: what every function that takes a spec begins with. TypeError for anything else."""
    return checked(spec).bound


def checked(spec: object) -> PartitionSpec:
    """A spec as it is. TypeError for a policy, and anything else."""
    if isinstance(spec, PartitionSpec):
        return spec
    if callable(spec) and not isinstance(spec, torch.nn.Module | type):
        raise TypeError(f"spec: expected a PartitionSpec, got the policy {spec!r}; call it on the model: policy(model)")
    raise TypeError(f"spec: expected a PartitionSpec such as fs.whole()(model), got {type(spec).__name__}")


def build(tree: ModuleTree, selected: Mapping[str, P], root: P | None) -> PartitionSpec:
    """The spec in which each parameter belongs to the longest selected path above all its uses.

    ``root`` is the `P` of the leftovers; with None nothing may be left. Raises ValueError, naming the path, for a path
    that matches no module, a module selected under two paths with different `P`, and an uncovered parameter.
    """
    chosen: dict[str, P] = {}
    for path, p in selected.items():
        if path not in tree.canonical:
            raise ValueError(f"path '{path}' matches no module: expected one of {_sample(tree.canonical)}")
        if chosen.setdefault(tree.canonical[path], p) != p:
            first = tree.canonical[path]
            raise ValueError(f"module '{path}' is also '{first}' and is selected twice: as {chosen[first]} and as {p}")
    owned: dict[str, list[Param]] = {}
    for param in tree.all_params:
        owners = [path for path in tree.dominators(param) if path in chosen]
        if not owners and root is None:
            raise ValueError(
                f"parameter '{param.name}' is in no unit: expected a selected path above all its uses, "
                f"got {_sample(chosen)}; select '' for the leftovers"
            )
        owned.setdefault(owners[-1] if owners else "", []).append(param)
    every = {"": root or P(), **chosen}
    units = [unit for path, params in owned.items() for unit in _units(path, every[path], params)]
    first = {node.path: min(map(natural_key, node.names)) for node in tree.nodes()}
    units.sort(key=lambda unit: (unit.path != "", first[unit.path]))  # parents first, in natural order
    entries = tuple(sorted(chosen.items(), key=lambda item: natural_key(item[0])))
    return PartitionSpec(entries, root or P(), tuple(units), tree.ignored)


def _units(path: str, p: P, params: list[Param]) -> Iterator[Unit]:
    """The params of one path as units of one dtype and one requires_grad, with a suffix where there are several."""
    groups: dict[tuple[str, bool], list[Param]] = {}
    for param in sorted(params, key=lambda param: param.sort_key):
        groups.setdefault((str(param.dtype).removeprefix("torch."), param.requires_grad), []).append(param)
    dtypes, kinds = {d for d, _ in groups}, {k for _, k in groups}
    for (dtype, trained), group in sorted(groups.items()):
        parts = ([dtype] if len(dtypes) > 1 else []) + (["frozen"] if len(kinds) > 1 and not trained else [])
        yield Unit(":".join([path, *parts]), path, p, tuple(group))


def _sample(paths: Mapping[str, object], most: int = 8) -> str:
    names = [repr(path) for path in paths]
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
