"""The state of an optimizer of matrices in a file: for each parameter what it has, whatever units and owners there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..._spec.spec import PartitionSpec
from ..._spec.tree import Param
from ...optim import Matrices, matrices
from .containers import contained
from .leaves import Owned, from_json
from .tree import Branch, Node, Place, dict_of, matrix_state

__all__ = ["MATRIX", "REST", "owners", "read_of_matrices", "written_of_matrices"]

MATRIX, REST = "matrix", "rest"
"""In files, what a parameter is: a matrix, with ``[step, slices, owned]``, or not, with ``[step, state of the fallback]``."""


def written_of_matrices(node: Branch, param: Param, written: Callable[[Node], Any]) -> Any:
    """What a unit's `MatrixState` has for one of its parameters, as JSON."""
    step, *others = node.children
    slices, owned, rest = (x for x in others if isinstance(x, Branch))
    if param.name in owned.entries:
        own = owned.children[owned.entries.index(param.name)]
        return {MATRIX: [written(step), written(slices), written(own)]}
    at = rest.entries.index(param.name) if param.name in rest.entries else 0  # that of the unit
    return {REST: [written(step), written(rest.children[at])]}


def owners(saved: Mapping[str, Any], spec: PartitionSpec) -> Matrices:
    """The matrices of a file, by the names of the spec's parameters, on the spec's mesh with owners as `matrices` chooses."""
    return matrices(spec, select=lambda name, param: MATRIX in saved.get(name, {}))


def read_of_matrices(saved: Mapping[str, Any], place: Place, known: Matrices, read: Callable[[Any, Place], Node]) -> Branch:
    """A unit's `MatrixState`, of what a file has for its parameters. Inverse of `written_of_matrices`.

    Raises ValueError, naming them, for two parameters of the unit that have different state.
    """
    params = {param.name: param for param in place.unit.params}
    chosen = tuple(param for name, param in params.items() if MATRIX in saved[name])
    rest = tuple(param for name, param in params.items() if REST in saved[name])
    (step, *_), *_ = (content for one in saved.values() for content in one.values())
    slices: dict[str, Node] = {}
    if chosen:
        of = place._replace(of=chosen)
        found = read(place.alike({p.name: saved[p.name][MATRIX][1] for p in chosen}), of.at("slices"))
        assert isinstance(found, Branch)
        slices = dict(zip(found.entries, found.children, strict=True))
    owned = {p.name: _owned(saved[p.name][MATRIX][2], p, place, known._is_owner(p.name)) for p in chosen}
    others: dict[str, Node] = {}
    if chosen:
        for param in rest:
            others[param.name] = read(saved[param.name][REST][1], place._replace(of=(param,), alone=True).at("rest"))
    else:
        others[place.unit.key] = read(place.alike({p.name: saved[p.name][REST][1] for p in rest}), place.at("rest"))
    return matrix_state(read(step, place.at("step")), slices, owned, others)


def _owned(data: Any, param: Param, place: Place, here: bool) -> Branch:
    leaves: dict[str, Node] = {}
    for slot, child in contained(data) or ():
        shape, dtype, accelerated = child["owned"]
        (names,) = place._replace(of=(param,)).at("owned", slot).names
        leaves[slot] = Owned(names, tuple(shape), from_json(dtype), accelerated, here)
    return dict_of(leaves)
