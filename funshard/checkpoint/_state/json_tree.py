"""The tree of a state as JSON, and the tree that it describes for another spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ..._core.spec import PartitionSpec
from ..._core.tree import Param
from ..._core.unit import global_shape
from ...optim import Matrices, MatrixState, matrices
from ...optim._matrices.owners import Matrix
from .leaves import OwnedLeaf, ScalarLeaf, SliceLeaf, TensorLeaf, ValueLeaf
from .tree import (
    FALLBACK,
    ContainerNode,
    Node,
    StatePath,
    container_to_json,
    file_entries,
    make_container_node,
    make_matrix_state_node,
    plain_from_json,
    plain_to_json,
)

# --- The state of an optimizer by matrix as JSON: an entry for each parameter, whatever units and owners there are ---

MATRIX = "matrix"
"""The entry of a matrix: ``[step, slices, owned]``."""


def param_to_json(node: Node, param: Param, to_json: Callable[[Node], Any]) -> Any:
    """Return the JSON data of one parameter in the node of its unit's state, such as a `MatrixState`."""
    if not isinstance(node, ContainerNode) or node.kind != MatrixState.__name__:
        return to_json(node)
    step, *others = node.children
    slices, owned, fallback = (x for x in others if isinstance(x, ContainerNode))
    if param.name in owned.entries:
        own = owned.children[owned.entries.index(param.name)]
        return {MATRIX: [to_json(step), to_json(slices), to_json(own)]}
    i = fallback.entries.index(param.name) if param.name in fallback.entries else 0  # the entry of the whole unit
    return {FALLBACK: [to_json(step), to_json(fallback.children[i])]}


def saved_matrices(saved: Mapping[str, Any], spec: PartitionSpec) -> Matrices:
    """Return the matrices in JSON data by parameter name, with the owners that `matrices` chooses on the spec's mesh.

    A stack stays in parts if all of its state has the dimensions of its batch first.
    """

    def has_parts(matrix: Matrix) -> bool:
        entries = file_entries(saved[matrix.name][MATRIX][2]) or ()
        stacked = global_shape(matrix.param, sizes)[:-2]
        return all(tuple(child["owned"][0][: len(stacked)]) == stacked for _, child in entries)

    sizes = dict(spec.bound_mesh.sizes)
    known = matrices(spec, select=lambda name, param: MATRIX in saved.get(name, {}))
    if all(has_parts(matrix) for matrix in known.chosen if matrix.stack):
        return known
    return matrices(spec, select=lambda name, param: name in known.by_name, gather_stacks=True)


def matrix_state_from_json(saved: Mapping[str, Any], path: StatePath, known: Matrices) -> ContainerNode:
    """Return the node of a unit's `MatrixState`, of JSON data by parameter name. Inverse of `param_to_json`.

    Raises ValueError, naming them, for two parameters of the unit that have different kinds of state.
    """
    params = {param.name: param for param in path.unit.params}
    chosen = tuple(param for name, param in params.items() if MATRIX in saved[name])
    others = tuple(param for name, param in params.items() if FALLBACK in saved[name])
    (step, *_), *_ = (content for one in saved.values() for content in one.values())
    slices: dict[str, Node] = {}
    if chosen:
        data = path.common_value({p.name: saved[p.name][MATRIX][1] for p in chosen})
        found = _slot_from_json(data, path._replace(subset=chosen).child("slices"))
        assert isinstance(found, ContainerNode)
        slices = dict(zip(found.entries, found.children, strict=True))
    owned = {p.name: _owned_from_json(saved[p.name][MATRIX][2], p, path, known) for p in chosen}
    fallback: dict[str, Node] = {}
    if chosen:
        for param in others:
            of_param = path._replace(subset=(param,), is_compact=True)
            fallback[param.name] = _slot_from_json(saved[param.name][FALLBACK][1], of_param.child(FALLBACK))
    else:
        data = path.common_value({p.name: saved[p.name][FALLBACK][1] for p in others})
        fallback[path.unit.key] = _slot_from_json(data, path.child(FALLBACK))
    return make_matrix_state_node(_slot_from_json(step, path.child("step")), slices, owned, fallback)


def _owned_from_json(data: Any, param: Param, path: StatePath, known: Matrices) -> ContainerNode:
    leaves: dict[str, Node] = {}
    sizes, stack = dict(known.spec.bound_mesh.sizes), known.by_name[param.name].stack
    for slot, child in file_entries(data) or ():
        (*shape,), dtype, is_accelerated = child["owned"]
        (names,) = path._replace(subset=(param,)).child("owned", slot).names
        for axis, dim in stack:
            shape[dim] //= sizes[axis]
        is_here = known._is_owner(param.name)
        leaves[slot] = OwnedLeaf(names, tuple(shape), plain_from_json(dtype), is_accelerated, is_here, stack)
    return make_container_node(leaves)


# --- The tree of a state as JSON, and back ---


def tree_to_json(node: Node, spec: PartitionSpec, per_rank: Mapping[str, list[Any]]) -> Any:
    """Return the tree as JSON data. ``per_rank`` has, by name, the values of all ranks where each has its own."""
    if isinstance(node, ContainerNode) and node.is_complete is not None:
        children = dict(zip(node.entries, node.children, strict=True))
        to_json = partial(tree_to_json, spec=spec, per_rank=per_rank)
        params = [
            [[*param.names], _dtype_name(param), param_to_json(child, param, to_json)]
            for key, child in children.items()
            if key in spec.by_key
            for param in spec.by_key[key].params
        ]
        rest = [
            [plain_to_json(key, "a key of a dict"), to_json(child)] for key, child in children.items() if key not in spec.by_key
        ]
        return {"units": {"whole": node.is_complete, "params": params, "rest": rest, "kind": node.kind, "of": node.argument}}
    match node:
        case ContainerNode():
            children = [tree_to_json(child, spec, per_rank) for child in node.children]
            return container_to_json(node.kind, node.argument, node.entries, children)
        case ValueLeaf(name, is_per_rank=True):
            return {"values": [plain_to_json(value, name) for value in per_rank[name]]}
        case ValueLeaf(name, value):
            return {"value": plain_to_json(value, name)}
        case SliceLeaf(dtype=dtype, block=block):
            data = plain_to_json(dtype, "")
            return {"slice": data} if block == 1 else {"blocks": [data, block]}
        case ScalarLeaf():
            return {"scalar": [plain_to_json(node.dtype, ""), node.is_accelerated]}
        case OwnedLeaf():
            return {"owned": [[*node.global_shape(spec)], plain_to_json(node.dtype, ""), node.is_accelerated]}
        case TensorLeaf():
            dtype = plain_to_json(node.dtype, "")
            last = False  # version 0.2 reads it
            return {"tensor": [[*node.shape], dtype, node.is_accelerated, node.is_per_rank, last]}


def _dtype_name(param: Param) -> str:
    return str(param.dtype).removeprefix("torch.")


def tree_from_json(data: Any, spec: PartitionSpec, rank: int, ranks: int, path: tuple[str, ...] = ()) -> Node:
    """Return the tree that was saved, for the units of this spec. Inverse of `tree_to_json`.

    Raises ValueError, naming the parameter, for one that only the file or the spec has, that has another dtype, or whose
    state is of another kind than that of the others in its unit; and for a per-rank value of another number of ranks.
    """
    (kind, content), *_ = data.items()
    name = ".".join(path)

    def child_from_json(entry: Any, child: Any) -> Node:
        return tree_from_json(child, spec, rank, ranks, (*path, str(entry)))

    if kind == "other":
        raise ValueError(f"state '{name}': a container of the caller's own: expected like=, a state of the same structure")
    if (inside := file_entries(data)) is not None:
        children = {entry: child_from_json(entry, child) for entry, child in inside}
        return make_container_node(children, kind, data.get("of"))
    if kind == "units":
        children = _units_from_json(content, spec, path)
        rest = [(plain_from_json(key), child) for key, child in content["rest"]]
        children |= {key: child_from_json(key, child) for key, child in rest}
        return make_container_node(children, content.get("kind", "dict"), content.get("of"), content["whole"])
    if kind == "values":
        check_rank_count(name, len(content), ranks)
        return ValueLeaf(name, plain_from_json(content[rank]), is_per_rank=True)
    if kind == "value":
        return ValueLeaf(name, plain_from_json(content))
    shape, dtype, is_accelerated, is_per_rank, _ = content
    return TensorLeaf(name, tuple(shape), plain_from_json(dtype), is_accelerated, is_per_rank)


def check_rank_count(name: str, saved: int, ranks: int) -> None:
    """Check that a per-rank part was saved by this number of ranks. Raises ValueError otherwise."""
    if saved != ranks:
        raise ValueError(
            f"state '{name}' is each rank's own, saved by {saved} ranks: expected as many, got {ranks}; leave it out, by only= "
            "or like="
        )


def _units_from_json(content: Any, spec: PartitionSpec, path: tuple[str, ...]) -> dict[str, Node]:
    saved = {name: (names[0], dtype, slot) for names, dtype, slot in content["params"] for name in names}
    every = {names[0] for names, _, _ in content["params"]}
    unread = {*every}
    where = f"state '{'.'.join(path)}'" if path else "the state"
    entries = {p.name: next((saved[n] for n in p.names if n in saved), None) for unit in spec for p in unit.params}
    known = saved_matrices({name: entry[2] for name, entry in entries.items() if entry}, spec)
    out: dict[str, Node] = {}
    for unit in spec:
        found = [(p, entry) for p in unit.params if (entry := entries[p.name]) is not None]
        if len(found) < len(unit.params) and (found or content["whole"]):
            missing = next(p.name for p in unit.params if entries[p.name] is None)
            raise ValueError(
                f"parameter '{missing}' of unit '{unit.key}' is not in {where} of the checkpoint, which has {len(every)} "
                f"parameters such as {sorted(every)[:3]}: expected the model that was saved"
            )
        if not found:
            continue
        for param, (name, dtype, _) in found:
            unread.discard(name)
            if dtype != _dtype_name(param):
                raise ValueError(
                    f"parameter '{param.name}': expected {dtype}, as the checkpoint has it, got {param.dtype} in the spec; "
                    "build the model in that dtype"
                )
        slots = {param.name: slot for param, (_, _, slot) in found}
        unit_path = StatePath(unit, path)
        if all({MATRIX, FALLBACK} & {*slot} for slot in slots.values()):
            out[unit.key] = matrix_state_from_json(slots, unit_path, known)
        else:
            out[unit.key] = _slot_from_json(unit_path.common_value(slots), unit_path)
    if unread:
        raise ValueError(
            f"parameter '{min(unread)}' is in {where} of the checkpoint and not in the spec: expected the model that was saved"
        )
    return out


def _slot_from_json(data: Any, path: StatePath) -> Node:
    (kind, content), *_ = data.items()
    unit, names = path.unit, path.names
    if kind == "slice":
        is_encoded = unit.is_encoded and not path.slot
        return SliceLeaf(unit, names, plain_from_json(content), is_encoded, path.subset, path.is_compact)
    if kind == "blocks":
        dtype, block = content
        if unit.align % block:
            raise ValueError(
                f"unit '{unit.key}' of state '{'.'.join(path.path)}': the checkpoint has it in blocks of {block} elements, "
                f"which start at multiples of that: expected a policy with P(align={block}), or a multiple of it, got "
                f"{unit.align}"
            )
        return SliceLeaf(unit, path.block_names, plain_from_json(dtype), block=block)
    if kind == "scalar":
        return ScalarLeaf(unit, names, plain_from_json(content[0]), content[1])
    if kind == "value":
        return ValueLeaf(names[0][0], plain_from_json(content), names=names)
    if kind == "other":
        raise ValueError(f"unit '{unit.key}' of state '{'.'.join(path.path)}': expected like=, a state of the same structure")
    inside = file_entries(data) or ()
    children = {entry: _slot_from_json(child, path.child(str(entry))) for entry, child in inside}
    return make_container_node(children, kind, data.get("of"))


def select_part(data: Any, only: str) -> Any:
    """Return the part of a JSON tree at a path. Raises ValueError, with the names that exist, if there is none."""
    remaining, path = only, ""
    while remaining:
        names = {str(entry): child for entry, child in file_entries(data) or ()}
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
    elif (inside := file_entries(data)) is not None:
        for entry, child in inside:
            yield from iter_plain_values(child, rank, (*path, str(entry)))
    elif kind == "units":
        for names, _, slot in content["params"]:
            for name in names:
                yield from iter_plain_values(slot, rank, (*path, name))
        for entry, child in content["rest"]:
            yield from iter_plain_values(child, rank, (*path, str(plain_from_json(entry))))
