"""The state of an optimizer by matrix as JSON: an entry for each parameter, whatever units and owners there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..._spec.local import whole_shape
from ..._spec.spec import PartitionSpec
from ..._spec.tree import Param
from ...optim import Matrices, matrices
from ...optim._matrices.selection import Matrix
from .containers import file_entries
from .leaves import OwnedLeaf
from .plain_values import plain_from_json
from .tree import ContainerNode, Node, StatePath, make_dict_node, make_matrix_state_node

__all__ = ["FALLBACK", "MATRIX", "matrix_state_from_json", "matrix_state_to_json", "saved_matrices"]

MATRIX = "matrix"
"""The entry of a matrix: ``[step, slices, owned]``."""
FALLBACK = "rest"
"""The entry of another parameter: ``[step, the state of the fallback optimizer]``."""


def matrix_state_to_json(node: ContainerNode, param: Param, to_json: Callable[[Node], Any]) -> Any:
    """Return the JSON data of one parameter in a unit's `MatrixState`."""
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
        stacked = whole_shape(matrix.param, sizes)[:-2]
        return all(tuple(child["owned"][0][: len(stacked)]) == stacked for _, child in entries)

    sizes = dict(spec.bound_mesh.sizes)
    known = matrices(spec, select=lambda name, param: MATRIX in saved.get(name, {}))
    if all(has_parts(matrix) for matrix in known.chosen if matrix.stack):
        return known
    return matrices(spec, select=lambda name, param: name in known.by_name, gather_stacks=True)


def matrix_state_from_json(
    saved: Mapping[str, Any], path: StatePath, known: Matrices, from_json: Callable[[Any, StatePath], Node]
) -> ContainerNode:
    """Return the node of a unit's `MatrixState`. Inverse of `matrix_state_to_json` for all parameters of the unit.

    Args:
        saved: The JSON data by the names of the unit's parameters.
        path: The path of the unit's state.
        known: The matrices of all units, with their owners.
        from_json: The function that makes a node of JSON data at a path.

    Raises:
        ValueError: Naming them, for two parameters of the unit that have different kinds of state.
    """
    params = {param.name: param for param in path.unit.params}
    chosen = tuple(param for name, param in params.items() if MATRIX in saved[name])
    others = tuple(param for name, param in params.items() if FALLBACK in saved[name])
    (step, *_), *_ = (content for one in saved.values() for content in one.values())
    slices: dict[str, Node] = {}
    if chosen:
        data = path.common_value({p.name: saved[p.name][MATRIX][1] for p in chosen})
        found = from_json(data, path._replace(subset=chosen).child("slices"))
        assert isinstance(found, ContainerNode)
        slices = dict(zip(found.entries, found.children, strict=True))
    owned = {p.name: _owned_from_json(saved[p.name][MATRIX][2], p, path, known) for p in chosen}
    fallback: dict[str, Node] = {}
    if chosen:
        for param in others:
            of_param = path._replace(subset=(param,), is_compact=True)
            fallback[param.name] = from_json(saved[param.name][FALLBACK][1], of_param.child(FALLBACK))
    else:
        data = path.common_value({p.name: saved[p.name][FALLBACK][1] for p in others})
        fallback[path.unit.key] = from_json(data, path.child(FALLBACK))
    return make_matrix_state_node(from_json(step, path.child("step")), slices, owned, fallback)


def _owned_from_json(data: Any, param: Param, path: StatePath, known: Matrices) -> ContainerNode:
    """Return the node of a matrix's owned state from the description in a file."""
    leaves: dict[str, Node] = {}
    sizes, stack = dict(known.spec.bound_mesh.sizes), known.by_name[param.name].stack
    for slot, child in file_entries(data) or ():
        (*shape,), dtype, is_accelerated = child["owned"]
        (names,) = path._replace(subset=(param,)).child("owned", slot).names
        for axis, dim in stack:
            shape[dim] //= sizes[axis]
        is_here = known._is_owner(param.name)
        leaves[slot] = OwnedLeaf(names, tuple(shape), plain_from_json(dtype), is_accelerated, is_here, stack)
    return make_dict_node(leaves)
