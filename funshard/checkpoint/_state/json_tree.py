"""The tree of a state in a file, as JSON, and what it says for another spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..._spec.spec import PartitionSpec
from ..._spec.tree import Param
from .containers import contained, maker, to_file
from .leaves import Owned, Scalar, Slice, Value, Whole, from_json, to_json
from .matrix_state import MATRIX, REST, owners, read_of_matrices, written_of_matrices
from .tree import Branch, Node, Place, Units

__all__ = ["check_ranks", "part_of", "plain_values", "read_tree", "written_tree"]


def written_tree(node: Node, spec: PartitionSpec, owns: Mapping[str, list[Any]]) -> Any:
    """The tree as JSON; ``owns`` are the values of all ranks where each has its own, by name."""
    if isinstance(node, Branch):
        children = [written_tree(child, spec, owns) for child in node.children]
        return to_file(node.kind, node.of, node.entries, children)
    if isinstance(node, Units):
        params = [
            [[*param.names], str(param.dtype).removeprefix("torch."), _of_param(child, param, spec, owns)]
            for key, child in node.children.items()
            if key in spec.by_key
            for param in spec.by_key[key].params
        ]
        rest = [
            [to_json(key, node.prefix), written_tree(c, spec, owns)]
            for key, c in node.children.items()
            if key not in spec.by_key
        ]
        return {"units": {"whole": node.whole, "params": params, "rest": rest, "kind": node.kind, "of": node.of}}
    match node:
        case Value(name, own=True):
            return {"values": [to_json(value, name) for value in owns[name]]}
        case Value(name, value):
            return {"value": to_json(value, name)}
        case Slice():
            return {"slice": to_json(node.dtype, "")}
        case Scalar():
            return {"scalar": [to_json(node.dtype, ""), node.accelerated]}
        case Owned():
            return {"owned": [[*node.shape], to_json(node.dtype, ""), node.accelerated]}
        case Whole():
            return {"tensor": [[*node.shape], to_json(node.dtype, ""), node.accelerated, node.own, node.averaged]}


def _of_param(node: Node, param: Param, spec: PartitionSpec, owns: Mapping[str, list[Any]]) -> Any:
    """What a unit's state has for one of its parameters."""

    def written(node: Node) -> Any:
        return written_tree(node, spec, owns)

    if isinstance(node, Branch) and node.kind == "MatrixState":
        return written_of_matrices(node, param, written)
    return written(node)


def read_tree(data: Any, spec: PartitionSpec, rank: int, ranks: int, path: tuple[str, ...] = ()) -> Node:
    """The tree that was written, for the units of this spec. Inverse of `written_tree`.

    Raises ValueError, naming the parameter, for one that only one of both has, that has another dtype, or whose state is
    of another kind than that of the others in its unit; and for what was each rank's own on another number of ranks.
    """
    (kind, content), *_ = data.items()
    name = ".".join(path)

    if kind == "other":
        raise ValueError(f"state '{name}': a container of the caller's own: expected like=, a state of the same structure")
    if (inside := contained(data)) is not None:
        return _branch(data, [(entry, read_tree(child, spec, rank, ranks, (*path, str(entry)))) for entry, child in inside])
    if kind == "units":
        children: dict[str, Node] = _read_units(content, spec, path)
        rest = [(from_json(key), child) for key, child in content["rest"]]
        children |= {key: read_tree(child, spec, rank, ranks, (*path, str(key))) for key, child in rest}
        return Units(name, children, content["whole"], content.get("kind", "dict"), content.get("of"))
    if kind == "values":
        check_ranks(name, len(content), ranks)
        return Value(name, from_json(content[rank]), own=True)
    if kind == "value":
        return Value(name, from_json(content))
    shape, dtype, accelerated, own, averaged = content
    return Whole(name, tuple(shape), from_json(dtype), accelerated, own, averaged)


def check_ranks(name: str, saved: int, ranks: int) -> None:
    """ValueError unless what is each rank's own was saved by as many ranks."""
    if saved != ranks:
        raise ValueError(
            f"state '{name}' is each rank's own, saved by {saved} ranks: expected as many, got {ranks}; leave it out, by only= "
            "or like="
        )


def _read_units(content: Any, spec: PartitionSpec, path: tuple[str, ...]) -> dict[str, Node]:
    saved = {name: (names[0], dtype, slot) for names, dtype, slot in content["params"] for name in names}
    every = {names[0] for names, _, _ in content["params"]}
    names = {*every}
    where = f"state '{'.'.join(path)}'" if path else "the state"
    entries = {p.name: next((saved[n] for n in p.names if n in saved), None) for unit in spec for p in unit.params}
    known = owners({name: entry[2] for name, entry in entries.items() if entry}, spec)
    out: dict[str, Node] = {}
    for unit in spec:
        found = [(p, entries[p.name]) for p in unit.params]
        there = [(p, entry) for p, entry in found if entry is not None]
        if len(there) < len(found) and (there or content["whole"]):
            missing = next(p.name for p, entry in found if entry is None)
            raise ValueError(
                f"parameter '{missing}' of unit '{unit.key}' is not in {where} of the checkpoint, which has {len(every)} "
                f"parameters such as {sorted(every)[:3]}: expected the model that was saved"
            )
        if not there:
            continue
        for param, (name, dtype, _) in there:
            names.discard(name)
            if dtype != str(param.dtype).removeprefix("torch."):
                raise ValueError(
                    f"parameter '{param.name}': expected {dtype}, as the checkpoint has it, got {param.dtype} in the spec; "
                    "build the model in that dtype"
                )
        slots = {param.name: slot for param, (_, _, slot) in there}
        place = Place(unit, path)
        if all({MATRIX, REST} & {*slot} for slot in slots.values()):
            out[unit.key] = read_of_matrices(slots, place, known, _read_slot)
        else:
            out[unit.key] = _read_slot(place.alike(slots), place)
    if names:
        raise ValueError(
            f"parameter '{min(names)}' is in {where} of the checkpoint and not in the spec: expected the model that was saved"
        )
    return out


def _read_slot(data: Any, place: Place) -> Node:
    (kind, content), *_ = data.items()
    unit, names = place.unit, place.names
    if kind == "slice":
        encoded = unit.at_rest is not None and not place.slot
        return Slice(unit, names, from_json(content), encoded, place.of, place.alone)
    if kind == "scalar":
        return Scalar(unit, names, from_json(content[0]), content[1])
    if kind == "value":
        return Value(names[0][0], from_json(content), names=names)
    if kind == "other":
        raise ValueError(f"unit '{unit.key}' of state '{'.'.join(place.path)}': expected like=, a state of the same structure")
    inside = contained(data) or ()
    return _branch(data, [(entry, _read_slot(child, place.at(str(entry)))) for entry, child in inside])


def _branch(data: Any, pairs: Sequence[tuple[Any, Node]]) -> Branch:
    """A container of a file, from its entries and children."""
    kind, of, entries = next(iter(data)), data.get("of"), tuple(entry for entry, _ in pairs)
    return Branch(kind, of, entries, tuple(child for _, child in pairs), maker(kind, of, entries))


def part_of(data: Any, only: str) -> Any:
    """The part of a written tree at a path. ValueError, naming what there is, where there is none."""
    rest, path = only, ""
    while rest:
        names = {str(entry): child for entry, child in contained(data) or ()}
        found = [name for name in names if rest == name or rest.startswith(f"{name}.")]
        if not found:
            raise ValueError(
                f"only={only!r}: expected the path of a part of the state, got none at '{path}' but {[*names][:8]}"
                + ("; it is sharded there, and its units come together" if "units" in data else "")
            )
        name = max(found, key=len)
        data, rest, path = names[name], rest[len(name) + 1 :], f"{path}.{name}".lstrip(".")
    return data


def plain_values(data: Any, rank: int, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The plain values of a written tree, by name; of what is each rank's own this rank's, if it was saved."""
    (kind, content), *_ = data.items()
    if kind == "value":
        yield ".".join(path), from_json(content)
    elif kind == "values" and rank < len(content):
        yield ".".join(path), from_json(content[rank])
    elif (inside := contained(data)) is not None:
        for entry, child in inside:
            yield from plain_values(child, rank, (*path, str(entry)))
    elif kind == "units":
        for names, _, slot in content["params"]:
            for one in names:
                yield from plain_values(slot, rank, (*path, one))
        for entry, child in content["rest"]:
            yield from plain_values(child, rank, (*path, str(from_json(entry))))
