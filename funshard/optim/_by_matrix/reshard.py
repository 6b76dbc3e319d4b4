"""reshard: the state of an optimizer of matrices for other units, another mesh and other owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._core.division import Reduction
from ..._core.layout import Params
from ..._core.unit import Unit, whole_shape
from ..._spec.unit_state import UnitState
from ..._wire.host import place_slice
from ..._wire.whole import flatten_whole, gather_whole, scatter_whole, unflatten_whole
from ...collectives._functions import broadcast, gather_slices, scatter
from .._matrices.matrices import Matrices
from .._option_numbers import find_option_numbers
from .step import MatrixState

__all__ = ["reshard"]

SUM = Reduction("sum")
ParamSlots = dict[str, Params]
"""By slot, then by parameter: whole tensors, or numbers."""
_GatheredState = tuple[MatrixState, ParamSlots, ParamSlots, set[str]]
"""A unit's state; its matrices' and its fallback's elementwise state, whole; and which fallback slots are numbers."""


def reshard(state: Mapping[str, MatrixState], old: Matrices, new: Matrices) -> dict[str, MatrixState]:
    """Return the state of the same optimizer for another policy, another mesh of the same ranks, or other owners.

    The counterpart of `funshard.reshard` for the state. A rank holds the whole elementwise states of the old units that a new
    one is made of, and one tensor of matrices' owners at a time. For another number of processes save it and load it there
    (`funshard.checkpoint`).

    Args:
        state: The state by unit key of ``old.spec``.
        old: The matrices that the state was made with.
        new: The same matrices in another spec, or with other owners.

    Returns:
        The state by unit key of ``new.spec``.

    Raises:
        ValueError: Only one of both has a matrix, a unit is missing, a new unit is made of old ones that have taken different
            numbers of steps, or nothing says whether a vector is a slice.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> old, new = (fs.optim.matrices(policy(model)) for policy in (fs.policies.whole(), fs.by_type(torch.nn.Linear)))
        >>> init, update = fs.optim.muon(old)
        >>> state = init(fs.shard(model, old.spec))
        >>> sorted(fs.optim.reshard(state, old, new))
        ['0', '1']
    """
    for known in (old, new):
        if not isinstance(known, Matrices):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"reshard: expected matrices(spec), of which the optimizer was made, got {known!r}")
    for name in old.by_name.keys() ^ new.by_name.keys():
        where = "the old" if name in old.by_name else "the new"
        raise ValueError(f"matrix '{name}' is in {where} spec's only: expected the same matrices of one model")
    needed = {unit.key: dict.fromkeys(old.spec.by_name[p.name][0].key for p in unit.params) for unit in new.spec}
    new_units = [unit for unit in new.spec if any(key in state for key in needed[unit.key])]
    last = {key: unit.key for unit in new_units for key in needed[unit.key]}
    of_fallback = {key: unit.fallback[key] for key, unit in state.items() if key in unit.fallback}
    numbers = find_option_numbers(of_fallback, of_fallback, old.spec, ("fallback",))
    whole: dict[str, _GatheredState] = {}
    out: dict[str, MatrixState] = {}
    for unit in new_units:
        for key in needed[unit.key]:
            if key not in state:
                raise ValueError(f"unit '{key}' is missing: expected all that the new spec's unit '{unit.key}' is made of")
            if key not in whole:
                whole[key] = _gather_state(state[key], old.spec.by_key[key], old, numbers)
        out[unit.key] = _build_state(unit, {key: whole[key] for key in needed[unit.key]}, old, new)
        for key in needed[unit.key]:
            if last[key] == unit.key:
                del whole[key]
    return out


def _gather_state(state: MatrixState, unit: Unit, old: Matrices, known: frozenset[int]) -> _GatheredState:
    """Return a unit's state whole; ``known`` are the ids of the fallback's vectors that are numbers."""
    names = {*old._names_in(unit.key)}
    slices = {slot: _keep_names(_gather_params(piece, unit, old), names) for slot, piece in state.slices.items()}
    fallback: ParamSlots = {}
    parts: ParamSlots = {}
    numbers: set[str] = set()
    for entry, values in state.fallback.items():
        for slot, value in values.items():
            if not value.dim() or id(value) in known:
                of = [entry] if entry != unit.key else [param.name for param in unit.params]
                fallback.setdefault(slot, {}).update(dict.fromkeys(of, _common_number(value, f"'{slot}' of '{entry}'")))
                numbers.add(slot)
            elif entry == unit.key:
                fallback[slot] = _gather_params(value, unit, old)
            else:
                parts.setdefault(slot, {})[entry] = value
    for slot, of_param in parts.items():
        zeros = next(iter(of_param.values())).new_zeros(old.spec.shard_numel(unit))
        joined = old._slice_layout(unit.key).join(of_param, zeros)
        fallback.setdefault(slot, {}).update(_keep_names(_gather_params(joined, unit, old), {*of_param}))
    return state, slices, fallback, numbers


def _gather_params(piece: Tensor, unit: Unit, old: Matrices) -> Params:
    """Gather a unit's whole parameters, by name; their gradients are summed over ranks."""
    mesh = old.spec.bound_mesh
    tensors = unflatten_whole(gather_whole(piece, unit, mesh, SUM, as_stored=True), unit, mesh)
    return {param.name: x for param, x in zip(unit.params, tensors, strict=True)}


def _keep_names(tensors: Params, names: set[str]) -> Params:
    return {name: x for name, x in tensors.items() if name in names}


def _common_number(numbers: Tensor, what: str) -> Tensor:
    if numbers.dim() and bool((numbers != numbers[0]).any()):
        raise ValueError(f"reshard: {what}: expected one number for all parameters of a unit, got {numbers.tolist()}")
    return numbers if not numbers.dim() else numbers[0]


def _build_state(unit: Unit, olds: Mapping[str, _GatheredState], old: Matrices, new: Matrices) -> MatrixState:
    names = new._names_in(unit.key)
    states = {name: olds[old.spec.by_name[name][0].key] for name in (param.name for param in unit.params)}
    steps = torch.stack([state.step for state, *_ in olds.values()])
    slots = dict.fromkeys(slot for name in names for slot in states[name][1])
    slices = {slot: _slice_unit({name: states[name][1][slot][name] for name in names}, unit, new) for slot in slots}
    owned = {
        name: {slot: _move_to_owner(x, name, old, new) for slot, x in states[name][0].owned[name].items()} for name in names
    }
    fallback: dict[str, Any] = {}
    others = [param for param in unit.params if param.name not in names]
    numbers = {slot for *_, some in olds.values() for slot in some}
    for slot in dict.fromkeys(slot for param in others for slot in states[param.name][2]):
        found = {p.name: states[p.name][2][slot][p.name] for p in others if p.name in states[p.name][2].get(slot, {})}
        if not names:
            stacked = torch.stack([*found.values()]) if slot in numbers else None
            one = _slice_unit(found, unit, new) if stacked is None else _common_number(stacked, f"'{slot}' of '{unit.key}'")
            fallback.setdefault(unit.key, {})[slot] = one
            continue
        piece = None if slot in numbers else _slice_unit(found, unit, new)
        for name, x in found.items():
            part = x if piece is None else new._slice_layout(unit.key).select(piece, name)
            fallback.setdefault(name, {})[slot] = part.clone()  # a number of its own: what is donated is written
    if any(isinstance(values, UnitState) for state, *_ in olds.values() for values in state.fallback.values()):
        fallback = {name: UnitState(values, numbers.intersection(values)) for name, values in fallback.items()}
    return MatrixState(_common_number(steps, f"the step of '{unit.key}'"), slices, owned, fallback)


def _slice_unit(whole: Params, unit: Unit, new: Matrices) -> Tensor:
    """Return this rank's slice, with zeros for other parameters."""
    like, mesh = next(iter(whole.values())), new.spec.bound_mesh
    full = {p.name: whole.get(p.name, like.new_zeros(whole_shape(p, dict(mesh.sizes)))) for p in unit.params}
    return place_slice(scatter_whole(flatten_whole(full, unit, new.spec), unit, mesh), unit, mesh)


def _move_to_owner(x: Tensor, name: str, old: Matrices, new: Matrices) -> Tensor:
    """Broadcast an owner's tensor, with parts of a stack joined; return it on the new owner, and an empty one elsewhere."""
    mesh = old.spec.bound_mesh
    full = x if old._is_owner(name) else x.new_zeros(x.shape[1:])
    full = full if mesh.device is None else full.to(mesh.device)
    for (_, axis), src in zip(mesh.axes, old.owner(name), strict=True):
        if src is not None:
            full = broadcast(full, axis, src=src)
    for axis, dim in reversed(old.by_name[name].stack):
        full = gather_slices(full.movedim(dim, 0).contiguous(), mesh[axis], reduce="sum").movedim(0, dim)
    for axis, dim in new.by_name[name].stack:
        full = scatter(full.movedim(dim, 0).contiguous(), new.spec.bound_mesh[axis]).movedim(0, dim)
    return full.to(x.device).contiguous() if new._is_owner(name) else x.new_empty((0, *full.shape))
