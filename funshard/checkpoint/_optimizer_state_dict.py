"""Convert an optimizer's state to torch.optim's state_dict by parameter names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import bind_spec
from .._core.layout import rank_coords, to_memory_order
from .._core.spec import PartitionSpec
from .._core.unit import Unit, global_shape
from .._sharding.full import gather_stored
from .._slices.pieces import slice_pieces
from .._spec.local import describe_pieces, piece_offsets
from .._spec.unit_state import replace_values
from ..optim._checks import State, copy_like, refuse_encoded
from ..optim._options import ParamOptions, group_by_options
from ._ranks import TIMEOUT, connect_ranks
from ._state.leaves import clean_name

StateDict: TypeAlias = dict[str, Any]
"""``{"state": {parameter: {name: tensor}}, "param_groups": [{"params": [parameter, ...], **options}]}``."""
COUNTED = {"momentum_buffer", "step"}
"""The state of SGD with dampening in `optim.from_torch`. torch has no step count, and no momentum before the first step."""


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
    """Return the state_dict that torch's optimizer of the unsharded model would have, by parameter names, in full tensors.

    ``set_optimizer_state_dict`` of torch.distributed.checkpoint.state_dict gives it to torch's optimizer. Inverse of
    `from_optimizer_state_dict`.

    Args:
        state: A state of `optim.from_torch`. The result has the parameters of its units.
        spec: The bound spec of the state, all ranks of whose mesh call this.
        optimizer_class: The torch optimizer that `optim.from_torch` was given.
        options: The options that it was given, for ``param_groups``, with ``lr`` as it is now. No group is without parameters.
        rank0_only: Whether only the mesh's first rank gets the full tensors, and the others ``{}``, as in `gather_full`.
        offload_to_cpu: Whether the tensors are on the host.
        timeout: The seconds that ranks wait for a lost rank.
        defaults: The options of all parameters, as `optim.from_torch` was given them.

    Raises:
        ValueError: On every rank and naming the unit, for a state of another spec or one that differs between ranks.
        TypeError: For a state that is not elementwise, as those of Adafactor, Muon and `quantized_state`.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(8, 1, bias=False))
        >>> state = {"": {"momentum_buffer": torch.ones(8)}}
        >>> fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)["state"]
        {'weight': {'momentum_buffer': tensor([[1., 1., 1., 1., 1., 1., 1., 1.]])}}
    """
    spec = bind_spec(spec)
    ranks = connect_ranks(spec, "checkpoint.optimizer_state_dict", timeout, rank0_only=bool(rank0_only))
    groups, group_of_param = group_by_options(spec, options)

    def describe() -> list[StateDict]:
        _check_elementwise(state, spec)
        given = [{"params": [torch.empty(0)], **group} for group in groups]
        return optimizer_class(given, **defaults).state_dict()["param_groups"]

    def summarize(_: object) -> list[str]:
        slots = [(key, slot, x) for key, values in state.items() for slot, x in values.items()]
        return [f"{key} {slot}: {x.dtype} {list(x.shape) if x.dim() else x.tolist()}" for key, slot, x in slots]

    param_groups, summaries = ranks.run_and_exchange(describe, "checkpoint.optimizer_state_dict", summarize)
    if any(summary != summaries[0] for summary in summaries):
        raise ValueError("checkpoint.optimizer_state_dict: expected the same units, state and counts on all ranks, got others")
    out: dict[str, dict[str, Tensor]] = {}
    units = [unit for unit in spec if unit.key in state]
    with torch.no_grad():
        for unit in units:
            out |= _gather_slots(state[unit.key], unit, spec, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
    if rank0_only and ranks.rank:
        return {}
    for i, group in enumerate(param_groups):
        group["params"] = [p.name for unit in units for p in unit.params if group_of_param[p.name] == i]
    return {"state": out, "param_groups": [group for group in param_groups if group["params"]]}


def from_optimizer_state_dict(
    found: Mapping[str, Any],
    spec: PartitionSpec,
    init_state: Mapping[str, Mapping[str, Tensor]],
    *,
    timeout: float = TIMEOUT,
) -> State:
    """Return the state of `optim.from_torch` for a state_dict of a torch optimizer. Inverse of `optimizer_state_dict`.

    Args:
        found: The state_dict with full tensors by parameter name, which all ranks have, as ``get_optimizer_state_dict`` of
            torch.distributed.checkpoint gives it. Any name of a parameter is found, also with the prefixes of wrappers. A
            parameter of ``param_groups`` without a state gets the initial one. The options in ``param_groups`` are not read.
        spec: The bound spec of the result, all ranks of whose mesh call this.
        init_state: The result of ``init(params)``, which the result has the structure, shapes and dtypes of.
        timeout: The seconds that ranks wait for a lost rank.

    Raises:
        ValueError: On every rank and naming the parameter, for one that is missing, unknown or given twice, for a state of
            another name, shape or dtype, and for a number, such as the step, that differs between parameters of a unit.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(8, 1, bias=False))
        >>> state = {"": {"momentum_buffer": torch.ones(8)}}
        >>> found = fs.checkpoint.optimizer_state_dict(state, spec, torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> fs.checkpoint.from_optimizer_state_dict(found, spec, state)
        {'': {'momentum_buffer': tensor([1., 1., 1., 1., 1., 1., 1., 1.])}}
    """
    spec = bind_spec(spec)
    ranks = connect_ranks(spec, "checkpoint.from_optimizer_state_dict", timeout)

    def read() -> State:
        _check_elementwise(init_state, spec)
        states, known = _states_by_name(found, spec)
        wanted = {param.name for key in init_state for param in spec.by_key[key].params}
        if unknown := [name for name in states if name not in wanted]:
            raise ValueError(f"parameter '{unknown[0]}' has a state, expected one of those of init_state: {sorted(wanted)[:3]}")
        with torch.no_grad():
            return {key: _read_slots(slots, spec.by_key[key], spec, states, known) for key, slots in init_state.items()}

    return ranks.run(read, "checkpoint.from_optimizer_state_dict")


def _states_by_name(found: Mapping[str, Any], spec: PartitionSpec) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """Return the states by the parameters' own names, and the names of all parameters in groups."""

    def own_name(key: Any) -> str:
        if not isinstance(key, str):
            raise ValueError(
                f"expected the state by parameters' names, got the key {key!r}; "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it"
            )
        name = key if key in spec.by_name else clean_name(key)
        if name not in spec.by_name:
            raise ValueError(f"parameter '{key}' is not in the spec: expected names such as {list(spec.by_name)[:3]}")
        return spec.by_name[name][1].name

    states: dict[str, Mapping[str, Any]] = {}
    for key, slots in found["state"].items():
        if (name := own_name(key)) in states:
            raise ValueError(f"parameter '{name}' has two states, one of them as '{key}': expected one")
        states[name] = {slot: value for slot, value in slots.items() if value is not None}  # SGD before the first step
    known = {own_name(key) for group in found.get("param_groups", ()) for key in group["params"]} | {*states}
    return {name: slots for name, slots in states.items() if slots}, known


def _check_elementwise(state: Mapping[str, Mapping[str, Tensor]], spec: PartitionSpec) -> None:
    tables = (state, *state.values()) if isinstance(state, Mapping) else (state,)  # pyright: ignore[reportUnnecessaryIsInstance]
    if got := [type(table).__name__ for table in tables if not isinstance(table, Mapping)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"expected the elementwise state of from_torch by unit key, got {got[0]}; it is the last entry of the state of "
            "optim.chain, and the inner one of optimizers that are made of others. That of matrices, as of Adafactor and Muon, "
            "has no such form: checkpoint.save keeps it for any units and ranks"
        )
    refuse_encoded(state)
    for key, slots in state.items():
        if key not in spec.by_key:
            raise ValueError(f"unit '{key}' is not in the spec: expected some of {[*spec.by_key][:8]}; is the state another's?")
        length = spec.shard_numel(spec.by_key[key])
        for slot, tensor in slots.items():
            if tensor.dim() and tensor.shape != (length,):
                raise ValueError(
                    f"'{slot}' of unit '{key}': expected this rank's slice, [{length}], or a number, got "
                    f"{list(tensor.shape)}; was it made with other options, or another spec or mesh?"
                )


def _gather_slots(
    slots: Mapping[str, Tensor], unit: Unit, spec: PartitionSpec, *, rank0_only: bool, offload_to_cpu: bool
) -> dict[str, dict[str, Tensor]]:
    """Return the state of each of the unit's parameters as torch has it: none of one that was never stepped."""
    if {*slots} == COUNTED:
        slots = {name: tensor for name, tensor in slots.items() if name != "step" and slots["step"] > 0}
    out: dict[str, dict[str, Tensor]] = {param.name: {} for param in unit.params} if slots else {}
    for slot, tensor in slots.items():
        if tensor.dim():
            full = gather_stored({unit.key: tensor}, spec, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
        else:
            full = {name: (tensor.cpu() if offload_to_cpu else tensor).clone() for name in out}
        for name, value in full.items():
            out[name][slot] = value
    return out


def _read_slots(
    initial: Mapping[str, Tensor], unit: Unit, spec: PartitionSpec, states: Mapping[str, Mapping[str, Any]], known: set[str]
) -> dict[str, Tensor]:
    added = {"step": 1} if {*initial} == COUNTED else {}
    found: dict[str, Mapping[str, Any]] = {}
    for name in (param.name for param in unit.params):
        if name not in known:
            raise ValueError(
                f"parameter '{name}' of unit '{unit.key}' has no state and is in no group: expected it in the state_dict of "
                "the optimizer"
            )
        if name in states:
            found[name] = {**states[name], **added}
            if {*found[name]} != {*initial}:
                raise ValueError(
                    f"parameter '{name}': expected a state of {sorted(initial)}, got {sorted(states[name])}; is it of "
                    "another optimizer, or of other options?"
                )
    out: dict[str, Tensor] = {}
    for slot, tensor in initial.items():
        values = {name: slots[slot] for name, slots in found.items()}
        out[slot] = (_read_slice if tensor.dim() else _read_number)(slot, tensor, unit, spec, values)
    return replace_values(initial, out)


def _read_slice(slot: str, initial: Tensor, unit: Unit, spec: PartitionSpec, values: Mapping[str, Any]) -> Tensor:
    """Return this rank's slice of the full tensors, with the initial values of parameters that have none."""
    out = copy_like(initial, initial) if _torch.is_pinned(initial) else initial.clone()
    mesh = spec.bound_mesh
    coords, sizes = rank_coords(mesh, None), dict(mesh.sizes)
    at = dict(zip(mesh.names, coords, strict=True))
    for param, low, high, begin in slice_pieces(unit, spec, coords):
        if param.name not in values:
            continue
        full = values[param.name]
        got = f"{list(full.shape)} {full.dtype}" if isinstance(full, Tensor) else type(full).__name__
        if got != (expected := f"{list(global_shape(param, sizes))} {initial.dtype}"):
            hint = describe_pieces(param, sizes)
            raise ValueError(f"'{slot}' of parameter '{param.name}': expected {expected}, got {got}{hint}")
        offsets = piece_offsets(param.shape, param.local, sizes, at)
        local = full[tuple(slice(start, start + size) for start, size in zip(offsets, param.shape, strict=True))]
        out[low:high] = to_memory_order(local, param).reshape(-1)[begin : begin + high - low]
    return out


def _read_number(slot: str, initial: Tensor, unit: Unit, spec: PartitionSpec, values: Mapping[str, Any]) -> Tensor:
    found: dict[str, Tensor] = {}
    for name in (param.name for param in unit.params):
        value = values.get(name, initial)
        found[name] = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else initial.dtype).cpu()
    (first, number), *_ = found.items()
    for name, other in found.items():
        if other.dtype != number.dtype or not torch.equal(other, number):
            raise ValueError(
                f"unit '{unit.key}': expected '{slot}' of the same value and dtype for all of its parameters, got "
                f"{number} for '{first}' and {other} for '{name}'; choose units whose parameters have taken as many steps"
            )
    if number.dtype != initial.dtype or number.dim():
        raise ValueError(
            f"'{slot}' of parameter '{first}': expected a number, {initial.dtype}, got {list(number.shape)} {number.dtype}"
        )
    return number.to(initial.device, copy=True)
