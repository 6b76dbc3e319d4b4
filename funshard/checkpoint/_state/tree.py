"""The tree of a state: what is sharded like the spec's units, the names under which it is stored, and the way back."""

from __future__ import annotations

import base64
import contextlib
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from torch import Tensor

from ... import _torch
from ..._core.spec import PartitionSpec
from ..._core.tree import NAMESPACE, Param
from ..._core.unit import Unit
from ..._spec.local import stack_dims
from ..._spec.unit_state import UnitState
from ...averaging import Averaging
from ...compress._powersgd import PowerSGD
from ...loss_scale import LossScale
from ...optim import MatrixState, QuantizedSlice
from ...optim._checks import is_slice
from ...optim._compose import AccumulationState, EmaState, FiniteState, ScheduleState
from .._errors import DamagedError
from .leaves import Leaf, OwnedLeaf, ScalarLeaf, SliceLeaf, TensorLeaf, ValueLeaf

# --- Plain values (numbers, strings, bytes, dtypes, None) as JSON ---

PLAIN = (bool, int, float, str, type(None))


def _is_plain_value(value: object) -> bool:
    return type(value) in PLAIN or isinstance(value, bytes | torch.dtype)


def plain_to_json(value: object, name: str) -> Any:
    """Return a plain value as JSON data. Raises TypeError, with its name in the state, for any other value."""
    if isinstance(value, PLAIN) and type(value) in PLAIN:
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
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
        if kind == "dtype" and type(text) is str and isinstance(found := getattr(torch, text, None), torch.dtype):
            return found
    raise DamagedError(f"expected a number, a string, null, bytes or a dtype of this torch, got {reprlib.repr(data)}")


# --- The containers of a state: their children, how to build them, and their names in a file ---

Builder = Callable[[list[Any]], Any]
SEQUENCES = {"list": list, "tuple": tuple, "deque": list}
MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "UnitState": UnitState, "defaultdict": dict, "Counter": dict}
COMPOSED = (AccumulationState, EmaState, FiniteState, ScheduleState)
TUPLES = {cls.__name__: cls for cls in (Averaging, LossScale, MatrixState, PowerSGD, QuantizedSlice, *COMPOSED)}
STORED_FIELDS = {MatrixState: ("step", "slices", "owned", "rest")}
"""The names of fields in files, for classes whose attributes were renamed since version 0.1."""
NAMED: dict[str, Any] = SEQUENCES | MAPPINGS | TUPLES
"""The classes that a file can name: exactly these, not their subclasses. Version 0.2 named more, which come as dict or list."""


def _is_container(value: Any) -> bool:
    return not (value is None or optree.tree_is_leaf(value, namespace=NAMESPACE))


def _describe_container(value: Any, describe_child: Callable[[Any, Any], Node]) -> ContainerNode:
    """Return the node of a container, whose children ``describe_child(entry, child)`` describes."""
    kind, argument = _get_kind(value)
    if kind in MAPPINGS or kind in SEQUENCES:
        pairs = value.items() if kind in MAPPINGS else enumerate(value)
        return make_container_node({entry: describe_child(entry, child) for entry, child in pairs}, kind, argument)
    build: Builder
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        cls: Any = type(value)
        entries, children, build = get_fields(cls), value, lambda xs: cls(*xs)
    else:
        unknown: Any = value
        children, metadata, entries, unflatten = optree.tree_flatten_one_level(unknown, namespace=NAMESPACE)
        build = partial(unflatten, metadata)
    return ContainerNode(kind, argument, tuple(entries), tuple(map(describe_child, entries, children)), build)


def _get_kind(value: Any) -> tuple[str, Any]:
    cls = type(value)
    if NAMED.get(cls.__name__) is not cls:
        return "", None
    return cls.__name__, sorted(value.numbers) if isinstance(value, UnitState) else None


def get_fields(cls: Any) -> tuple[str, ...]:
    """Return the names that the fields of a named tuple have in files."""
    fields: tuple[str, ...] = cls._fields
    return STORED_FIELDS.get(cls, fields)


def _get_builder(kind: str, argument: Any, entries: Sequence[Any]) -> Builder:
    cls = NAMED[kind]
    if kind in SEQUENCES:
        return cls
    if kind in TUPLES:
        return lambda xs: cls(*xs)
    more = (argument,) if kind == "UnitState" else ()
    return lambda xs: cls(zip(entries, xs, strict=True), *more)


def container_to_json(kind: str, argument: Any, entries: Iterable[Any], children: list[Any]) -> dict[str, Any]:
    """Return the JSON data of a container from that of its children. Raises TypeError for a key that is no plain value."""
    more = {} if argument is None else {"of": argument}
    if kind in SEQUENCES:
        return {kind: children} | more
    keys = [plain_to_json(entry, "a key of a dict") if kind else str(entry) for entry in entries]
    return {kind or "other": [list(pair) for pair in zip(keys, children, strict=True)]} | more


def file_entries(data: Any) -> list[tuple[Any, Any]] | None:
    """Return ``(entry, child)`` for the children of a container in JSON data, or None if the data is a leaf."""
    (kind, content), *_ = data.items()
    if kind in SEQUENCES:
        return list(enumerate(content))
    if kind in NAMED or kind == "other":
        return [(plain_from_json(entry), child) for entry, child in content]
    return None


# --- Nodes and paths ---

FALLBACK = "rest"
"""The entry in files of a parameter that is no matrix: ``[step, the state of the fallback optimizer]``."""
MAX_DEPTH = 100
"""The most containers inside each other that a state may have, since `load` builds them by recursion."""


@dataclass(frozen=True)
class ContainerNode:
    """A container: its children, and how it is built of them."""

    kind: str
    argument: Any
    entries: tuple[Any, ...]
    children: tuple[Node, ...]
    build: Builder
    is_complete: bool | None = None
    """For a mapping by the keys of units, and perhaps other keys: whether it has all of the spec."""


Node = ContainerNode | Leaf


class StatePath(NamedTuple):
    """The path of a part of a unit's state."""

    unit: Unit
    path: tuple[str, ...]
    slot: tuple[str, ...] = ()
    subset: tuple[Param, ...] | None = None
    is_compact: bool = False

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters that the part belongs to."""
        return self.unit.params if self.subset is None else self.subset

    @property
    def error_path(self) -> tuple[str, ...]:
        """The path for an error: of the unit's key, not of its parameters."""
        return (*self.path, self.unit.key, *self.slot)

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """For each of the parameters, the names under which the part is stored."""
        return stored_names(self.params, self.path, self.slot)

    @property
    def block_names(self) -> tuple[tuple[str, ...], ...]:
        """The names of what has an element for each block of the parameters' elements in memory order, which they tell."""
        orders = [".order" + "".join(map(str, p.order)) if p.permuted else "" for p in self.params]
        return tuple(tuple(name + order for name in names) for names, order in zip(self.names, orders, strict=True))

    def child(self, *entries: str) -> StatePath:
        """Return the path of an entry in this part."""
        return self._replace(slot=(*self.slot, *entries))

    def common_value(self, found: Mapping[str, Any]) -> Any:
        """Return the JSON data that all of the unit's parameters have. Raises ValueError where they differ."""
        (first, value), *others = found.items()
        where = f"state '{'.'.join(self.path)}'" if self.path else "the state"
        for name, other in others:
            if repr(other) != repr(value):  # by repr, NaN equals NaN
                is_mixed = len({"QuantizedSlice" in repr(x) for x in (other, value)}) == 2
                hint = ", as those that were saved, and save what fs.optim.decode_state returns: it loads with any units"
                raise ValueError(
                    f"unit '{self.unit.key}' of {where}: expected one kind of state for all of its parameters, got others for "
                    f"'{name}' than for '{first}'; choose units that do not mix them{hint if is_mixed else ''}"
                )
        return value


def make_container_node(
    children: Mapping[Any, Node], kind: str = "dict", argument: Any = None, is_complete: bool | None = None
) -> ContainerNode:
    """Return the node of a container that a file can name, of its children by entry."""
    entries, build = tuple(children), _get_builder(kind, argument, tuple(children))
    return ContainerNode(kind, argument, entries, tuple(children.values()), build, is_complete)


def make_matrix_state_node(
    step: Node, slices: Mapping[str, Node], owned: Mapping[str, Node], fallback: Mapping[str, Node]
) -> ContainerNode:
    """Return the node of a unit's `MatrixState`."""
    children = (step, *map(make_container_node, (slices, owned, fallback)))
    return make_container_node(dict(zip(get_fields(MatrixState), children, strict=True)), MatrixState.__name__)


def stored_names(params: Iterable[Param], path: Sequence[str], slot: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return, for each parameter, the names under which a part of its state is stored."""
    return tuple(tuple(".".join((*path, name, *slot)) for name in param.names) for param in params)


def parameter_slice(unit: Unit, path: Sequence[str] = ()) -> SliceLeaf:
    """Return the leaf of the unit's parameters, as the part of a state at this path."""
    return SliceLeaf(unit, stored_names(unit.params, path, ()), unit.dtype, unit.is_encoded)


def walk(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Node]]:
    """Yield ``(path, node)`` of a node and of all nodes below it, depth first."""
    yield ".".join(path), node
    if isinstance(node, ContainerNode):
        for entry, child in zip(node.entries, node.children, strict=True):
            yield from walk(child, (*path, str(entry)))


def iter_leaves(node: Node) -> Iterator[Leaf]:
    """Yield the leaves in the order of the values that `describe` returns."""
    return (found for _, found in walk(node) if not isinstance(found, ContainerNode))


def build_state(node: Node, values: Iterator[Any]) -> Any:
    """Return the state that has these values as leaves. Inverse of `describe`, without `per_rank`."""
    if isinstance(node, ContainerNode):
        return node.build([build_state(child, values) for child in node.children])
    return next(values)


# --- Describe a state ---


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


def describe(
    state: Any, spec: PartitionSpec, path: tuple[str, ...] = (), *, is_template: bool = False
) -> tuple[Node, list[Any]]:
    """Return the tree of a state, or of the part of one at ``path``, and the values of its leaves, as `iter_leaves` has them.

    A template, `load`'s ``like``, may have containers that no file can name. Raises ValueError, naming the unit, for a slice
    of another length than the spec's, and TypeError for a value that cannot be saved.
    """
    values: list[Any] = []
    return _Describer(spec, values, is_template=is_template).describe(state, path, is_per_rank=False), values


class _Describer:
    """A description of a state in the making: it describes the parts, and collects the values of their leaves."""

    def __init__(self, spec: PartitionSpec, values: list[Any], *, is_template: bool) -> None:
        self._spec, self._values, self._is_template = spec, values, is_template

    def describe(self, value: Any, path: tuple[str, ...], *, is_per_rank: bool) -> Node:
        if isinstance(value, PerRank):
            return self.describe(value.tree, path, is_per_rank=True)
        if isinstance(value, Mapping) and not is_per_rank and (units := self._unit_keys(value, path)):
            children = {
                key: self._describe_unit(child, StatePath(self._spec.by_key[key], path))
                if key in units
                else self.describe(child, (*path, str(key)), is_per_rank=is_per_rank)
                for key, child in value.items()
            }
            kind, argument = self._check_container(value, path)
            return make_container_node(children, kind or "dict", argument, len(units) == len(self._spec))
        if _is_container(value):

            def describe_child(entry: Any, child: Any) -> Node:
                is_own = is_per_rank or (isinstance(value, PowerSGD) and entry == "error")
                return self.describe(child, (*path, str(entry)), is_per_rank=is_own)

            return self._describe_container(value, path, describe_child)
        self._values.append(value)
        name = ".".join(path)
        if isinstance(value, Tensor):
            return TensorLeaf(name, tuple(value.shape), value.dtype, _torch.is_accelerator(value.device), is_per_rank)
        plain_to_json(value, name)
        return ValueLeaf(name, value, is_per_rank)

    def _describe_container(
        self, value: Any, path: tuple[str, ...], describe_child: Callable[[Any, Any], Node]
    ) -> ContainerNode:
        self._check_container(value, path)
        return _describe_container(value, describe_child)

    def _describe_unit(self, value: Any, path: StatePath) -> Node:
        if isinstance(value, MatrixState):
            return self._describe_matrix_state(value, path)
        if _is_container(value):
            describe_child = self._describe_blocks if isinstance(value, QuantizedSlice) else self._describe_unit
            return self._describe_container(
                value, path.error_path, lambda entry, child: describe_child(child, path.child(str(entry)))
            )
        self._values.append(value)
        unit, names = path.unit, path.names
        if not isinstance(value, Tensor):
            plain_to_json(value, ".".join(path.error_path))
            return ValueLeaf(names[0][0], value, names=names)
        if value.dim() == 0:
            return ScalarLeaf(unit, names, value.dtype, _torch.is_accelerator(value.device))
        leaf = SliceLeaf(unit, names, value.dtype, subset=path.subset, is_compact=path.is_compact)
        if value.shape != (leaf.numel(self._spec),) if leaf.is_compact else not is_slice(value, unit, self._spec):
            length, dtype = (leaf.numel(self._spec), value.dtype) if leaf.is_compact else self._spec.stored(unit)
            _raise_other_slice(unit.key, path.error_path, f"this rank's slice, [{length}] {dtype}, or a number", value)
        is_encoded = unit.is_encoded and value.dtype == torch.uint8
        return replace(leaf, dtype=unit.dtype, is_encoded=True) if is_encoded else leaf

    def _describe_blocks(self, value: Tensor, path: StatePath) -> SliceLeaf:
        """Return the leaf of codes or scales, each of which stands for as many elements of the unit's slice."""
        self._values.append(value)
        unit, numel = path.unit, self._spec.shard_numel(path.unit)
        block = numel // len(value) if value.dim() == 1 and len(value) and not numel % len(value) else 0
        if not block or unit.align % block:
            expected = f"a part of this rank's slice, of {numel} elements and in blocks that start at multiples of {unit.align}"
            _raise_other_slice(unit.key, path.error_path, expected, value)
        return SliceLeaf(unit, path.names if block == 1 else path.block_names, value.dtype, block=block)

    def _describe_matrix_state(self, state: MatrixState, path: StatePath) -> ContainerNode:
        params = {param.name: param for param in path.unit.params}
        matrices = tuple(params[name] for name in state.owned)
        step = self._describe_unit(state.step, path.child("step"))
        of_matrices = path._replace(subset=matrices)
        slices = {slot: self._describe_unit(x, of_matrices.child("slices", slot)) for slot, x in state.slices.items()}
        owned = {
            name: make_container_node(
                {slot: self._describe_owned(x, params[name], path.child("owned", slot)) for slot, x in values.items()}
            )
            for name, values in state.owned.items()
        }
        fallback: dict[str, Node] = {}
        for entry, child in state.fallback.items():
            of_entry = path._replace(subset=(params[entry],), is_compact=True) if entry in params else path
            fallback[entry] = self._describe_unit(child, of_entry.child(FALLBACK))
        return make_matrix_state_node(step, slices, owned, fallback)

    def _describe_owned(self, value: Tensor, param: Param, path: StatePath) -> OwnedLeaf:
        self._values.append(value)
        (names,) = stored_names([param], path.path, path.slot)
        is_here = value.dim() == 0 or len(value) > 0
        shape = tuple(value.shape if is_here else value.shape[1:])
        stack = stack_dims(param, shape, dict(self._spec.bound_mesh.sizes))
        return OwnedLeaf(names, shape, value.dtype, _torch.is_accelerator(value.device), is_here, stack)

    def _unit_keys(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> frozenset[str]:
        """Return the keys of units in a mapping that is sharded like them, or none.

        A `UnitState` or a `MatrixState` declares it. Otherwise a slice tells; a mapping whose units all have an empty dict, as
        the state of SGD without momentum, counts as sharded.
        """
        keys = [key for key in value if isinstance(key, str) and key in self._spec.by_key]
        if any(isinstance(value[key], UnitState | MatrixState) for key in keys):
            return frozenset(keys)
        if keys and len(keys) == len(value) and all(type(value[key]) is dict and not value[key] for key in keys):
            return frozenset(keys)
        found = [(key, tensor) for key in keys for tensor in optree.tree_leaves(value[key], namespace=NAMESPACE)]
        vectors = [(key, tensor) for key, tensor in found if isinstance(tensor, Tensor) and tensor.dim() == 1]
        if any(is_slice(tensor, self._spec.by_key[key], self._spec) for key, tensor in vectors):
            return frozenset(keys)
        if vectors and len(keys) == len(value) and all(isinstance(value[key], Tensor) for key in keys):
            key, tensor = vectors[0]
            length, _ = self._spec.stored(self._spec.by_key[key])
            _raise_other_slice(key, (*path, key), f"this rank's slice, [{length}]", tensor)
        return frozenset()

    def _check_container(self, value: Any, path: tuple[str, ...]) -> tuple[str, Any]:
        """Return `_get_kind` of a container. Raises TypeError if no file can hold it, ValueError if it is nested too deep."""
        if len(path) >= MAX_DEPTH and not self._is_template:
            raise ValueError(
                f"state '{'.'.join(path[:8])}...': expected at most {MAX_DEPTH} containers in each other, got more"
            )
        if isinstance(value, Mapping) and not self._is_template:
            for key in value:
                if not _is_plain_value(key):
                    raise TypeError(
                        f"state '{'.'.join(path)}': expected keys that are strings, numbers, bytes or None, got {key!r} "
                        f"({type(key).__name__})"
                    )
        return _get_kind(value)


def _raise_other_slice(key: str, path: tuple[str, ...], expected: str, found: Tensor) -> NoReturn:
    raise ValueError(
        f"unit '{key}' of state '{'.'.join(path)}': expected {expected}, got {list(found.shape)} {found.dtype}; was it made "
        "with another spec or mesh?"
    )
