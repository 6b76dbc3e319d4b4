"""An optimizer's state by parameter names, as torch.optim's state_dict has it, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._sharding.full import gather_full
from .._spec.spec import PartitionSpec, bind_spec
from .._spec.unit import Unit
from .._units.layout import rank_coords, slice_pieces, to_memory_order
from ..optim._elementwise.optimizer import State
from ..optim._elementwise.options import ParamOptions, group_by_options
from ..optim._elementwise.streaming import copy_like
from ._ranks.ranks import TIMEOUT, ranks_of
from ._rekey import StateDict, clean_name

__all__ = ["from_optimizer_state_dict", "optimizer_state_dict"]

COUNTED = {"momentum_buffer", "step"}
"""What `optim.from_torch` keeps of SGD with dampening: torch has no count, but no momentum before the first step."""


def optimizer_state_dict(
    state: Mapping[str, Mapping[str, Tensor]],
    spec: PartitionSpec,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    options: ParamOptions | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    timeout: float = TIMEOUT,
    **defaults: Any,
) -> StateDict:
    """What ``optimizer_class(...).state_dict()`` of the unsharded model would be, with names of parameters for numbers.

    ``state`` is `optim.from_torch`'s; the class, ``options`` and ``defaults`` are those that it was made with, of which come
    the ``param_groups`` (``lr`` as it is now). Tensors are full, and made unit by unit; with ``rank0_only`` on the mesh's
    first rank alone, ``{}`` elsewhere (`gather_full`). The parameters are those of the units that ``state`` has. `rekey` gives
    them the numbers that ``load_state_dict`` takes. Inverse of `from_optimizer_state_dict`.

    Raises ValueError, on every rank and naming the unit, for a state that is not of this spec or that ranks have differently.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(8, 1, bias=False))
        >>> state = {"": {"momentum_buffer": torch.ones(8)}}
        >>> fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)["state"]
        {'weight': {'momentum_buffer': tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])}}
    """
    spec = bind_spec(spec)
    ranks = ranks_of(spec, "checkpoint.optimizer_state_dict", timeout)
    groups, group_of = group_by_options(spec, options)

    def described() -> tuple[list[StateDict], str]:
        given = [{"params": [torch.empty(0)], **group} for group in groups]
        param_groups = optimizer_class(given, **defaults).state_dict()["param_groups"]
        lines = [
            f"{name}: {_kind(slot)}" for key in state for name, slot in _slots(state[key], _unit(key, spec), spec, group_of)
        ]
        return param_groups, hashlib.sha256(json.dumps(lines).encode()).hexdigest()

    param_groups, digest = ranks.together(described, "checkpoint.optimizer_state_dict")
    if len({*ranks.gather(digest)}) > 1:
        raise ValueError("checkpoint.optimizer_state_dict: expected the same units, state and counts on all ranks, got others")
    out: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for unit in (unit for unit in spec if unit.key in state):
            out |= _of_unit(unit, state[unit.key], spec, group_of, rank0_only, offload_to_cpu)
    if rank0_only and ranks.rank:
        return {}
    for i, group in enumerate(param_groups):
        group["params"] = [p.name for unit in spec if unit.key in state for p in unit.params if group_of[p.name] == i]
    return {"state": out, "param_groups": [group for group in param_groups if group["params"]]}


def from_optimizer_state_dict(
    found: Mapping[str, Any],
    spec: PartitionSpec,
    init_state: Mapping[str, Mapping[str, Tensor]],
    *,
    options: ParamOptions | None = None,
    timeout: float = TIMEOUT,
) -> State:
    """The state of `optim.from_torch` from torch's of full tensors by parameter name, which all ranks hold.

    ``init_state`` is what ``init(params)`` gives, and ``options`` are those it was made with: they say what is wanted. What
    comes back is new tensors like those. Parameters are found under any of their names, also with the prefixes of wrappers;
    ``found`` of numbers is to be `rekey`-ed first. One that is in ``param_groups`` without a state was never stepped, and has
    the initial one. Options in ``param_groups`` are not looked at. Inverse of `optimizer_state_dict`.

    Raises ValueError, on every rank and naming the parameter, for one that is missing, unknown or there twice, for a state of
    another name, shape or dtype, and where parameters of one unit and options have a number, such as the step, that is not of
    the same value and dtype.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(8, 1, bias=False))
        >>> state = {"": {"momentum_buffer": torch.ones(8)}}
        >>> found = fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> fs.checkpoint.from_optimizer_state_dict(found, spec, state)
        {'': {'momentum_buffer': tensor([1., 1., 1., 1., 1., 1., 1., 1.])}}
    """
    spec = bind_spec(spec)
    ranks = ranks_of(spec, "checkpoint.from_optimizer_state_dict", timeout)

    def read() -> State:
        _, group_of = group_by_options(spec, options)
        states, known = _by_name(found, spec)
        wanted = {param.name for key in init_state for param in _unit(key, spec).params}
        if unknown := [name for name in states if name not in wanted]:
            raise ValueError(f"parameter '{unknown[0]}' has a state, expected one of those of init_state: {sorted(wanted)[:3]}")
        with torch.no_grad():
            return {
                key: _Read(_unit(key, spec), spec, states, known, group_of).slots(initial)
                for key, initial in init_state.items()
            }

    return ranks.together(read, "checkpoint.from_optimizer_state_dict")


# --- What of a unit's state is sharded, and what are numbers. ---


def _unit(key: str, spec: PartitionSpec) -> Unit:
    if key not in spec.by_key:
        raise ValueError(f"unit '{key}' is not in the spec: expected some of {list(spec.by_key)[:8]}; is the state another's?")
    return spec.by_key[key]


def _inside(unit: Unit, group_of: Mapping[str, int]) -> list[int]:
    """The groups of the unit's parameters, in the order in which its numbers are stacked."""
    return list(dict.fromkeys(group_of[param.name] for param in unit.params))


def _slots(
    slots: Mapping[str, Tensor], unit: Unit, spec: PartitionSpec, group_of: Mapping[str, int]
) -> Iterable[tuple[str, Tensor | list[Tensor]]]:
    """What the unit's state has, by name: its slice, or a number for each of its groups. ValueError for anything else."""
    inside = _inside(unit, group_of)
    for name, tensor in slots.items():
        stacked = len(inside) > 1 and tensor.shape == (len(inside),)
        sharded = tensor.shape == (spec.shard_numel(unit),)
        if stacked == sharded and tensor.dim():
            numbers = "a number" if len(inside) == 1 else f"a number for each of its {len(inside)} different options"
            raise ValueError(
                f"'{name}' of unit '{unit.key}': expected this rank's slice, [{spec.shard_numel(unit)}], or {numbers}, got "
                f"{list(tensor.shape)}; was it made with other options, or another spec or mesh?"
            )
        yield name, tensor if sharded and tensor.dim() else [*tensor] if stacked else [tensor] * len(inside)


def _kind(slot: Tensor | list[Tensor]) -> Any:
    if isinstance(slot, Tensor):
        return [[*slot.shape], str(slot.dtype)]
    return [(one.tolist(), str(one.dtype)) for one in slot]


# --- To names. ---


def _of_unit(
    unit: Unit,
    slots: Mapping[str, Tensor],
    spec: PartitionSpec,
    group_of: Mapping[str, int],
    rank0_only: bool,
    offload_to_cpu: bool,
) -> dict[str, dict[str, Tensor]]:
    """The state of each of its parameters; of none that was never stepped, as torch has it."""
    inside = _inside(unit, group_of)
    counted = {*slots} == COUNTED
    out: dict[str, dict[str, Tensor]] = {param.name: {} for param in unit.params}
    for slot, value in _slots(slots, unit, spec, group_of):
        if isinstance(value, Tensor):
            full = gather_full({unit.key: value}, spec, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
            for name, tensor in full.items():
                out[name][slot] = tensor
        else:
            for param in unit.params:
                number = value[inside.index(group_of[param.name])]
                out[param.name][slot] = (number.cpu() if offload_to_cpu else number).clone()
    if counted:
        out = {name: {s: t for s, t in own.items() if s != "step"} for name, own in out.items() if own["step"] > 0}
    return {name: own for name, own in out.items() if own}


# --- From names. ---


def _by_name(found: Mapping[str, Any], spec: PartitionSpec) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """``(states by the parameters' own names, the names that are in some group)``."""

    def own_name(key: Any) -> str:
        if not isinstance(key, str):
            raise ValueError(f"expected the state by parameters' names, got the key {key!r}; rekey(found, names) gives it")
        name = key if key in spec.by_name else clean_name(key)
        if name not in spec.by_name:
            raise ValueError(f"parameter '{key}' is not in the spec: expected names such as {list(spec.by_name)[:3]}")
        return spec.by_name[name][1].name

    states: dict[str, Mapping[str, Any]] = {}
    keys: dict[str, Any] = {}
    for key, slots in found["state"].items():
        name = own_name(key)
        if name in states:
            raise ValueError(f"parameter '{name}' has two states, '{keys[name]}' and '{key}': expected one")
        keys[name] = key
        given = {slot: value for slot, value in slots.items() if value is not None}
        if given:  # SGD's momentum of what was never stepped is None
            states[name] = given
    return states, {own_name(key) for group in found.get("param_groups", ()) for key in group["params"]} | {*states}


class _Read:
    """What a state by names has for one unit."""

    def __init__(
        self,
        unit: Unit,
        spec: PartitionSpec,
        states: Mapping[str, Mapping[str, Any]],
        known: set[str],
        group_of: Mapping[str, int],
    ) -> None:
        self._unit, self._spec, self._states, self._group_of = unit, spec, states, group_of
        for param in unit.params:
            if param.name not in known:
                raise ValueError(
                    f"parameter '{param.name}' of unit '{unit.key}' has no state and is in no group: expected it in the "
                    "state_dict of the optimizer"
                )

    def slots(self, initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The unit's state like its initial one."""
        counted = {*initial} == COUNTED
        for name in (param.name for param in self._unit.params if param.name in self._states):
            got = {*self._states[name]} | ({"step"} if counted else set())
            if got != {*initial}:
                raise ValueError(
                    f"parameter '{name}': expected a state of {sorted(initial)}, got {sorted(self._states[name])}; is it of "
                    "another optimizer, or of other options?"
                )
        out: dict[str, Tensor] = {}
        for slot, value in _slots(initial, self._unit, self._spec, self._group_of):
            if isinstance(value, Tensor):
                out[slot] = self._slice(slot, value)
                continue
            inside = _inside(self._unit, self._group_of)
            if initial[slot].dim():
                numbers = zip(inside, value, strict=True)
                out[slot] = torch.stack([self._number(slot, one, {group}, counted=counted) for group, one in numbers])
            else:
                out[slot] = self._number(slot, value[0], {*inside}, counted=counted)
        return out

    def _slice(self, slot: str, initial: Tensor) -> Tensor:
        out = copy_like(initial, initial) if _torch.is_pinned(initial) else initial.clone()
        for piece in slice_pieces(self._unit, self._spec, rank_coords(self._spec.bound_mesh, None)):
            param = piece.param
            if param.name not in self._states:
                continue
            full = self._states[param.name][slot]
            got = f"{list(full.shape)} {full.dtype}" if isinstance(full, Tensor) else type(full).__name__
            if got != (expected := f"{list(param.shape)} {initial.dtype}"):
                raise ValueError(f"'{slot}' of parameter '{param.name}': expected {expected}, got {got}")
            flat = to_memory_order(full, param).reshape(-1)
            out[piece.low : piece.high] = flat[piece.begin : piece.begin + piece.high - piece.low]
        return out

    def _number(self, slot: str, initial: Tensor, groups: set[int], *, counted: bool) -> Tensor:
        """What all parameters of some groups have."""
        found: dict[str, Tensor] = {}
        for name in (param.name for param in self._unit.params if self._group_of[param.name] in groups):
            value: Any = initial
            if name in self._states:
                value = 1 if counted else self._states[name][slot]
            found[name] = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else initial.dtype).cpu()
        (first, number), *_ = found.items()
        for name, other in found.items():
            if other.dtype != number.dtype or not torch.equal(other, number):
                raise ValueError(
                    f"unit '{self._unit.key}': expected '{slot}' of the same value and dtype for all of its parameters, got "
                    f"{number} for '{first}' and {other} for '{name}'; choose units whose parameters have taken as many steps"
                )
        if number.dtype != initial.dtype or number.dim():
            raise ValueError(
                f"'{slot}' of parameter '{first}': expected a number, {initial.dtype}, got {list(number.shape)} {number.dtype}"
            )
        return number.to(initial.device, copy=True)
