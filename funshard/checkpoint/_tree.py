"""The tree of a state: JSON for its structure and plain values, leaves for its tensors, and the way back for any spec."""

from __future__ import annotations

import base64
import contextlib
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor

from .. import _torch
from .._core.layout import rank_along, rank_coords
from .._core.spec import PartitionSpec
from .._core.tree import NAMESPACE, Param
from .._core.unit import Unit, global_shape, join_shape
from .._spec.local import stack_dims
from .._spec.unit_state import UnitState
from ..averaging import Averaging
from ..compress._compressors import PowerSGD
from ..loss_scale import LossScale
from ..optim._by_matrix import MatrixState
from ..optim._checks import QuantizedSlice, is_slice
from ..optim._compose import AccumulationState, EmaState, FiniteState, ScheduleState
from ._directory import DamagedError, dtype_name, find_dtype
from ._leaves import COMMON, NUMBER, OWNED, PER_RANK, Box, Leaf, Names, ValueLeaf, piece_box, slice_leaf, whole_leaf

# --- Plain values (numbers, strings, bytes, dtypes, None) as JSON ---

PLAIN = (bool, int, float, str, type(None))


def plain_to_json(value: object, name: str, *, is_key: bool = False) -> Any:
    """Return a plain value, or a key of a dict, as JSON data. Raises TypeError, with its name in the state, for any other."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if is_key:
        got = f"{value!r} ({type(value).__name__})"
        raise TypeError(f"state '{name}': expected keys that are strings, numbers, bytes or None, got {got}")
    raise TypeError(
        f"state '{name}': expected a tensor, a number, a string, bytes, None or a container of such, got "
        f"{type(value).__module__}.{type(value).__qualname__}; a checkpoint holds no pickles: save the parts of the object, by "
        "its state_dict(), list(...), dict(...), .item() or torch.from_numpy(...)"
    )


def plain_from_json(data: Any) -> Any:
    """Return the plain value of JSON data. Inverse of `plain_to_json`. Raises DamagedError for any other data."""
    if type(data) in PLAIN:
        return data
    if type(data) is dict and len(data) == 1:
        ((kind, text),) = data.items()
        if kind == "bytes" and type(text) is str:
            with contextlib.suppress(ValueError):
                return base64.b64decode(text, validate=True)
        if kind == "dtype":
            return find_dtype(text)
    raise DamagedError(f"expected a number, a string, null, bytes or a dtype of this torch, got {reprlib.repr(data)}")


# --- Containers: a file names the classes below, and calls any other one "other" ---

TUPLES = (Averaging, LossScale, MatrixState, PowerSGD, QuantizedSlice, AccumulationState, EmaState, FiniteState, ScheduleState)
CLASSES: dict[str, Any] = {cls.__name__: cls for cls in (dict, OrderedDict, UnitState, list, tuple, *TUPLES)}
"""The classes that a file can name: exactly these, not their subclasses."""
READ_CLASSES = CLASSES | {"deque": list, "defaultdict": dict, "Counter": dict}
"""The classes of containers that are read: version 0.2 named some more."""
SEQUENCES = ("list", "tuple", "deque")
MAX_DEPTH = 100
"""The most containers inside each other that a state may have, since `load` builds them by recursion."""
Children = list[tuple[Any, Any]]
"""The children of a container by entry."""


def open_container(value: Any) -> tuple[str, Children, Callable[[list[Any]], Any]] | None:
    """Return a container's class as files name it, or "", its children, and how to build it of others; None for a leaf."""
    cls: Any = type(value)
    kind = cls.__name__ if CLASSES.get(cls.__name__) is cls else ""
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return kind, [*zip(cls._fields, value, strict=True)], lambda xs: cls(*xs)
    if kind:
        children = [*(value.items() if isinstance(value, dict) else enumerate(value))]
        numbers = value.numbers if isinstance(value, UnitState) else None
        return kind, children, lambda xs: build_container(kind, numbers, [*zip(dict(children), xs, strict=True)])
    other: Any = value
    if value is None or optree.tree_is_leaf(other, namespace=NAMESPACE):
        return None
    found, metadata, entries, unflatten = optree.tree_flatten_one_level(other, namespace=NAMESPACE)
    return "", [*zip(entries, found, strict=True)], lambda xs: unflatten(metadata, xs)


def build_container(kind: str, numbers: Any, children: Children) -> Any:
    """Return a container of a class that a file names; ``numbers`` are those of a `UnitState`."""
    cls = READ_CLASSES[kind]
    if cls in TUPLES:
        return cls(*(child for _, child in children))
    if kind in SEQUENCES:
        return cls(child for _, child in children)
    return UnitState(children, numbers) if cls is UnitState else cls(children)


def rebuild(like: Any, values: Iterator[Any]) -> Any:
    """Return a state like this one that has these values as leaves, in the order of `Description.leaves`."""
    if isinstance(like, PerRank):
        return rebuild(like.tree, values)
    if (container := open_container(like)) is None:
        return next(values)
    _, children, build = container
    return build([rebuild(child, values) for _, child in children])


def file_entries(data: Any) -> Children:
    """Return the children of a container in JSON data, of sharded ones by each name of a parameter; none of a leaf."""
    (kind, content), *_ = data.items()
    if kind == "units":
        return [(name, slot) for names, _, slot in content["params"] for name in names] + file_entries(
            {"other": content["rest"]}
        )
    if kind in SEQUENCES:
        return list(enumerate(content))
    if kind in READ_CLASSES or kind == "other":
        return [(plain_from_json(entry), child) for entry, child in content]
    return []


@dataclass(frozen=True)
class PerRank:
    """The mark that `per_rank` puts around a part of a state."""

    tree: Any


def per_rank(tree: Any) -> PerRank:
    """Mark a part of a state for `save` as each rank's own, so that it is stored for every rank.

    `load` returns the part of this rank, without the mark, on as many ranks as saved it.

    Args:
        tree: The part, such as the state of random numbers. All ranks give the same structure and shapes; a part whose
            structure differs can be given as a string, ``json.dumps(...)``.

    Returns:
        The marked part, for a state that `save` is given.

    Example:
        >>> import torch, funshard as fs
        >>> state = {"step": 3, "random": fs.checkpoint.per_rank(torch.get_rng_state())}
    """
    return PerRank(tree)


# --- Describe a state ---

NEEDS_LIKE: dict[str, Any] = {"other": []}
"""What a file has instead of a state whose structure, owners or blocks it does not know: `load` needs ``like=``."""


class Place(NamedTuple):
    """The place of a part of a state: its path outside of units, and within a unit's state the unit and the path in it."""

    path: tuple[str, ...]
    unit: Unit | None = None
    slot: tuple[str, ...] = ()
    params: tuple[Param, ...] | None = None
    """The parameters that the part belongs to, or None for all of the unit's."""
    layout: str = ""
    """One of "per rank", "compact" (of the elements of ``params`` alone), "owned" (of a matrix), "blocks" (of a codec)."""

    @property
    def where(self) -> str:
        """The path for an error: of the unit's key, not of its parameters."""
        return ".".join((*self.path, *((self.unit.key,) if self.unit else ()), *self.slot))

    @property
    def names(self) -> Names:
        """The names under which the part is stored: for each of the parameters, or one."""
        if self.unit is None:
            return ((".".join(self.path),),)
        params = self.unit.params if self.params is None else self.params
        return tuple(tuple(".".join((*self.path, name, *self.slot)) for name in param.names) for param in params)

    def child(self, *entries: Any) -> Place:
        """Return the place of an entry in this part."""
        more = tuple(map(str, entries))
        return self._replace(slot=self.slot + more) if self.unit else self._replace(path=self.path + more)


def common_value(found: Mapping[str, Any], where: str) -> Any:
    """Return the value that all parameters of a unit have, by name. Raises ValueError where they differ."""
    (first, value), *others = found.items()
    for name, other in others:
        if repr(other) != repr(value):  # by repr, NaN equals NaN
            raise ValueError(
                f"state '{where}': expected the same for '{first}' and '{name}', which are in one unit, got "
                f"{reprlib.repr(value)} and {reprlib.repr(other)}; choose units that do not mix them, as those that were "
                "saved; what fs.optim.decode_state returns of state in a codec loads with any units"
            )
    return value


class Description:
    """The description of a state, or of the part of one at ``path``: its JSON, and its leaves with their values.

    ``units`` are the paths of the mappings in a template that are sharded, which are otherwise found by their values. Raises
    ValueError, naming the unit, for a slice of another length than the spec's, and TypeError for a value that cannot be saved.
    """

    def __init__(self, state: Any, spec: PartitionSpec, path: tuple[str, ...] = (), units: Any = None) -> None:
        self._spec, self._units = spec, units
        self.leaves: list[Leaf] = []
        self.values: list[Any] = []
        self.containers: dict[str, str] = {}
        """The class of each container, by path."""
        self.json = self._add(state, Place(path))

    @property
    def per_rank_values(self) -> list[ValueLeaf]:
        """The plain values that are each rank's own."""
        return [leaf for leaf in self.leaves if isinstance(leaf, ValueLeaf) and leaf.is_per_rank]

    def _add(self, value: Any, at: Place) -> Any:
        """Add the leaves of a part, and return its JSON."""
        if isinstance(value, PerRank) and at.unit is None:
            return self._add(value.tree, at._replace(layout="per rank"))
        if (container := open_container(value)) is None:
            self.values.append(value)
            data, leaf = self._describe_leaf(value, at)
            self.leaves.append(leaf)
            return data
        kind, children, _ = container
        if len(at.path) + len(at.slot) >= MAX_DEPTH:
            raise ValueError(f"state '{at.where[:40]}...': expected at most {MAX_DEPTH} containers in each other, got more")
        of = {"of": sorted(value.numbers)} if isinstance(value, UnitState) else {}
        self.containers[at.where] = f"a container, {kind or 'of a class of its own'}" + (f" of {of['of']}" if of else "")
        if isinstance(value, Mapping) and at == Place(at.path) and (keys := self._unit_keys(value, at.path)):
            return {"units": self._add_units(children, keys, at) | {"kind": kind or "dict", "of": of.get("of")}}
        if isinstance(value, QuantizedSlice) and at.unit:
            at = at._replace(layout="blocks")
        data: list[Any] = []
        for entry, child in children:
            is_per_rank = isinstance(value, PowerSGD) and entry == "error"
            found = self._add(child, at.child(entry)._replace(layout="per rank" if is_per_rank else at.layout))
            key = entry if kind in SEQUENCES else plain_to_json(entry, at.where, is_key=True) if kind else str(entry)
            data.append(found if kind in SEQUENCES else [key, found])
        return {kind or "other": data, **of}

    def _describe_leaf(self, value: Any, at: Place) -> tuple[Any, Leaf]:
        unit, names, is_per_rank = at.unit, at.names, at.layout == "per rank"
        if not isinstance(value, Tensor):
            data = plain_to_json(value, at.where)
            node = {"values": [data]} if is_per_rank else {"value": data}
            return node, ValueLeaf(names, is_per_rank, node)
        mesh, shape, dtype = self._spec.bound_mesh, tuple(value.shape), value.dtype
        described, is_accelerated = plain_to_json(dtype, ""), _torch.is_accelerator(value.device)
        if unit is None:
            kind, stored, box = COMMON, shape, None
            if is_per_rank:
                rank, ranks = rank_along(mesh.names, mesh, rank_coords(mesh, None))
                kind, stored, box = PER_RANK, (ranks, *shape), Box((rank, *(0 for _ in shape)), (1, *shape))
            leaf = whole_leaf(kind, names, value, self._spec, stored, box)
            # the last entry is for readers of version 0.2
            return {"tensor": [[*shape], described, is_accelerated, is_per_rank, False]}, leaf
        if at.layout == "owned" and at.params:
            shape = shape[1:] if shape and not len(value) else shape  # [0, *shape] on ranks that are not the owner
            stack = stack_dims(at.params[0], shape, dict(mesh.sizes))
            stored = join_shape(shape, stack, dict(mesh.sizes))
            return NEEDS_LIKE, whole_leaf(OWNED, names, value, self._spec, stored, piece_box(shape, stack, self._spec))
        if at.layout == "blocks":
            return NEEDS_LIKE, self._describe_blocks(value, names, unit, at.where)
        if not shape:
            return {"scalar": [described, is_accelerated]}, whole_leaf(NUMBER, names, value, self._spec, (), None, unit)
        is_encoded, is_compact = unit.is_encoded and dtype == torch.uint8, at.layout == "compact"
        dtype = unit.dtype if is_encoded else dtype
        leaf = slice_leaf(names, dtype, unit, self._spec, params=at.params, is_compact=is_compact, is_encoded=is_encoded)
        if shape != leaf.shape if is_compact else not is_slice(value, unit, self._spec):
            length, dtype = (*leaf.shape, dtype) if is_compact else self._spec.stored(unit)
            _raise_other_slice(unit.key, at.where, f"this rank's slice, [{length}] {dtype}, or a number", value)
        return {"slice": plain_to_json(leaf.dtype, "")}, leaf

    def _describe_blocks(self, value: Tensor, names: Names, unit: Unit, where: str) -> Leaf:
        """Return the leaf of codes or scales, each of which stands for as many elements of the unit's slice in memory order."""
        numel, sizes = self._spec.shard_numel(unit), dict(self._spec.bound_mesh.sizes)
        block = numel // len(value) if value.dim() == 1 and len(value) and not numel % len(value) else 0
        if not block or unit.align % block:
            expected = f"a part of this rank's slice, of {numel} elements and in blocks that start at multiples of {unit.align}"
            _raise_other_slice(unit.key, where, expected, value)
        if any(global_shape(param, sizes) != param.shape for param in unit.params):
            raise ValueError(
                f"unit '{unit.key}' of state '{where}' is in a codec, whose blocks follow each rank's piece over local axes: "
                "expected what fs.optim.decode_state returns; fs.optim.encode_state encodes what load returns"
            )
        orders = (".order" + "".join(map(str, p.order)) if p.permuted and block > 1 else "" for p in unit.params)
        names = tuple(tuple(name + order for name in some) for some, order in zip(names, orders, strict=True))
        return slice_leaf(names, value.dtype, unit, self._spec, block=block)

    def _add_units(self, children: Children, keys: frozenset[str], at: Place) -> dict[str, Any]:
        params: list[Any] = []
        rest: list[Any] = []
        for key, child in children:
            if key not in keys:
                rest.append([plain_to_json(key, at.where, is_key=True), self._add(child, at.child(key))])
                continue
            unit = self._spec.by_key[key]
            place = at._replace(unit=unit)
            slots = self._add_matrices(child, unit, place) if isinstance(child, MatrixState) else self._add(child, place)
            params += [[[*param.names], dtype_name(param.dtype), slots] for param in unit.params]
        return {"whole": len(keys) == len(self._spec), "params": params, "rest": rest}

    def _add_matrices(self, state: MatrixState, unit: Unit, at: Place) -> Any:
        params = {param.name: param for param in unit.params}
        self._add(state.step, at.child("step"))
        self._add(state.slices, at._replace(params=tuple(params[name] for name in state.owned)).child("slices"))
        for name, slots in state.owned.items():
            self._add(slots, at._replace(params=(params[name],), layout="owned").child("owned"))
        for entry, child in state.fallback.items():
            of_entry = at._replace(params=(params[entry],), layout="compact") if entry in params else at
            self._add(child, of_entry.child("rest"))
        return NEEDS_LIKE

    def _unit_keys(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> frozenset[str]:
        """Return the keys of units in a mapping that is sharded like them, or none.

        A `UnitState` or a `MatrixState` declares it. Otherwise a slice tells; a mapping whose units all have an empty dict, as
        the state of SGD without momentum, counts as sharded.
        """
        keys = [key for key in value if isinstance(key, str) and key in self._spec.by_key]
        if self._units is not None:
            return frozenset(keys if path in self._units else ())
        is_whole = len(keys) == len(value) > 0
        found = [(key, tensor) for key in keys for tensor in optree.tree_leaves(value[key], namespace=NAMESPACE)]
        vectors = [(key, tensor) for key, tensor in found if isinstance(tensor, Tensor) and tensor.dim() == 1]
        if (
            any(isinstance(value[key], UnitState | MatrixState) for key in keys)
            or (is_whole and all(type(value[key]) is dict and not value[key] for key in keys))
            or any(is_slice(tensor, self._spec.by_key[key], self._spec) for key, tensor in vectors)
        ):
            return frozenset(keys)
        if vectors and is_whole and all(isinstance(value[key], Tensor) for key in keys):
            key, tensor = vectors[0]
            length, _ = self._spec.stored(self._spec.by_key[key])
            _raise_other_slice(key, ".".join((*path, key)), f"this rank's slice, [{length}]", tensor)
        return frozenset()


def _raise_other_slice(key: str, where: str, expected: str, found: Tensor) -> NoReturn:
    raise ValueError(
        f"unit '{key}' of state '{where}': expected {expected}, got {list(found.shape)} {found.dtype}; is it of another spec?"
    )


# --- The template of a state that a file has: a state for another spec, whose tensors have no memory ---


class Template:
    """The state, or the part of it at ``path``, that JSON data describes, for the units of this spec.

    Raises ValueError, naming the parameter, for one that only the file or the spec has, that has another dtype, or whose
    state is of another kind than that of the others in its unit; and for a per-rank value of another number of ranks.
    """

    def __init__(self, data: Any, spec: PartitionSpec, rank: int, ranks: int, path: tuple[str, ...]) -> None:
        self._spec, self._rank, self._ranks = spec, rank, ranks
        self.units: set[tuple[str, ...]] = set()
        """The paths of the mappings that are sharded."""
        self.state = self._build(data, Place(path))

    def _build(self, data: Any, at: Place) -> Any:
        (kind, content), *_ = data.items()
        if kind in ("other", "blocks"):  # the latter in older files
            raise ValueError(
                f"state '{at.where}': a container of the caller's own, or of an optimizer of matrices, or in a codec: expected "
                "like=, a state of its structure, as init(params) is"
            )
        if kind in READ_CLASSES:
            children = [(entry, self._build(child, at.child(entry))) for entry, child in file_entries(data)]
            return build_container(kind, data.get("of"), children)
        if kind == "value":
            return plain_from_json(content)
        unit = at.unit
        if kind == "units" and unit is None:
            return self._build_units(content, at)
        if kind == "values" and unit is None:
            check_rank_count(at.where, len(content), self._ranks)
            return PerRank(plain_from_json(content[self._rank]))
        if kind == "slice" and unit:
            own = self._spec.stored(unit) if unit.is_encoded and not at.slot else None
            return without_memory(*(own or (self._spec.shard_numel(unit), plain_from_json(content))))
        shape, dtype, is_accelerated, is_per_rank = ((), *content, False) if kind == "scalar" else content[:4]
        tensor = without_memory(shape, plain_from_json(dtype), self._spec.bound_mesh.device if is_accelerated else None)
        return PerRank(tensor) if is_per_rank else tensor

    def _build_units(self, content: Any, at: Place) -> Any:
        self.units.add(at.path)
        saved = {name: (names[0], dtype, slot) for names, dtype, slot in content["params"] for name in names}
        unread = every = {names[0] for names, _, _ in content["params"]}
        where = f"state '{at.where}'" if at.path else "the state"
        out: Children = []
        for unit in self._spec:
            entries = {p.name: next((saved[n] for n in p.names if n in saved), None) for p in unit.params}
            found = [(p, entry) for p in unit.params if (entry := entries[p.name]) is not None]
            if len(found) < len(unit.params) and (found or content["whole"]):
                missing = next(name for name, entry in entries.items() if entry is None)
                raise ValueError(
                    f"parameter '{missing}' of unit '{unit.key}' is not in {where} of the checkpoint, which has {len(every)} "
                    f"parameters such as {sorted(every)[:3]}: expected the model that was saved"
                )
            for param, (name, dtype, _) in found:
                unread = unread - {name}
                if dtype != dtype_name(param.dtype):
                    raise ValueError(
                        f"parameter '{param.name}': expected {dtype}, as the checkpoint has it, got {param.dtype} in the spec; "
                        "build the model in that dtype"
                    )
            slots = {param.name: NEEDS_LIKE if {"matrix", "rest"} & {*slot} else slot for param, (_, _, slot) in found}
            place = at._replace(unit=unit)
            if found:
                out.append((unit.key, self._build(common_value(slots, place.where), place)))
        if unread:
            raise ValueError(
                f"parameter '{min(unread)}' is in {where} of the checkpoint and not in the spec: expected the model of the save"
            )
        out += [(key, self._build(child, at.child(key))) for key, child in file_entries({"other": content["rest"]})]
        return build_container(content.get("kind", "dict"), content.get("of"), out)


def without_memory(shape: Any, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a tensor of a shape, or of so many elements, that has memory for one."""
    return torch.empty((), dtype=dtype, device=device or "cpu").expand(shape)


def check_rank_count(name: str, saved: int, ranks: int) -> None:
    """Check that a per-rank part was saved by this number of ranks. Raises ValueError otherwise."""
    if saved != ranks:
        raise ValueError(
            f"state '{name}' is each rank's own, saved by {saved} ranks: expected as many, got {ranks}; only= leaves it out"
        )


def select_part(data: Any, only: str) -> Any:
    """Return the part of a JSON tree at a path. Raises ValueError, with the names that exist, if there is none."""
    remaining, path = only, ""
    while remaining:
        names = {} if "units" in data else {str(entry): child for entry, child in file_entries(data)}
        found = [name for name in names if remaining == name or remaining.startswith(f"{name}.")]
        if not found:
            raise ValueError(
                f"only={only!r}: expected the path of a part of the state, got none at '{path}' but {[*names][:8]}"
                + ("; it is sharded there, and its units come together" if "units" in data else "")
            )
        name = max(found, key=len)
        data, remaining, path = names[name], remaining[len(name) + 1 :], f"{path}.{name}".lstrip(".")
    return data


def iter_plain_values(data: Any, rank: int, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, value)`` for the plain values of a JSON tree; of per-rank values this rank's, if it was saved."""
    (kind, content), *_ = data.items()
    if kind == "value":
        yield ".".join(path), plain_from_json(content)
    elif kind == "values" and rank < len(content):
        yield ".".join(path), plain_from_json(content[rank])
    for entry, child in file_entries(data):
        yield from iter_plain_values(child, rank, (*path, str(entry)))


def find_value(leaf: ValueLeaf, saved: Mapping[str, Any]) -> Any:
    """Return the plain value of a leaf, of those in a file by name: one for all parameters of a unit."""
    values: dict[str, Any] = {}
    for own, *aliases in leaf.names:
        found = [saved[name] for name in (own, *aliases) if name in saved]
        if not found:
            raise ValueError(f"state '{own}' is no plain value in the checkpoint: expected like= without it")
        values[own] = found[0]
    return common_value(values, leaf.names[0][0])
