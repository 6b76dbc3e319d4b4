"""Convert an optimizer's state to torch.optim's state_dict by parameter names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._core.checks import bind_spec
from .._core.spec import PartitionSpec
from .._sharding.full import gather_stored
from ..optim._checks import ParamOptions, State, copy_like, group_by_options, refuse_encoded
from ._leaves import clean_name
from ._ranks import TIMEOUT, Ranks
from ._save import Part, compare_texts, summarize
from ._tree import Description, rebuild

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
        rank0_only: Whether only the mesh's first rank gets the full tensors, and the others ``{}``, as in `unshard`.
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
    ranks = Ranks(spec, "checkpoint.optimizer_state_dict", timeout, rank0_only=bool(rank0_only))
    groups, group_of_param = group_by_options(spec, options)

    def describe() -> tuple[list[StateDict], dict[Part, str]]:
        _, texts = summarize(_describe(state, spec), spec, ranks.size)
        given = [{"params": [torch.empty(0)], **group} for group in groups]
        return optimizer_class(given, **defaults).state_dict()["param_groups"], texts

    param_groups, _ = ranks.decide(describe, compare_texts, "checkpoint.optimizer_state_dict")
    units = [unit for unit in spec if unit.key in state]
    out: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for unit in units:
            slots = dict(state[unit.key])
            if {*slots} == COUNTED and not slots.pop("step"):
                continue  # never stepped
            for slot, tensor in slots.items():
                if tensor.dim():
                    full = gather_stored({unit.key: tensor}, spec, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
                else:
                    full = {p.name: (tensor.cpu() if offload_to_cpu else tensor).clone() for p in unit.params}
                for name, value in full.items():
                    out.setdefault(name, {})[slot] = value
    if rank0_only and ranks.rank:
        return {}
    for i, group in enumerate(param_groups):
        group["params"] = [p.name for unit in units for p in unit.params if group_of_param[p.name] == i]
    return {"state": out, "param_groups": [group for group in param_groups if group["params"]]}


def from_optimizer_state_dict(
    found: Mapping[str, Any], spec: PartitionSpec, init_state: Mapping[str, Mapping[str, Tensor]], *, timeout: float = TIMEOUT
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
    ranks = Ranks(spec, "checkpoint.from_optimizer_state_dict", timeout)

    def read() -> State:
        tree = _describe(init_state, spec)
        states = _states_by_name(found, spec, init_state)
        with torch.no_grad():
            values = [_read_leaf(leaf, x, states, spec) for leaf, x in zip(tree.leaves, tree.values, strict=True)]
        return rebuild(init_state, iter(values))

    return ranks.run(read, "checkpoint.from_optimizer_state_dict")


def _states_by_name(
    found: Mapping[str, Any], spec: PartitionSpec, init_state: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Mapping[str, Any]]:
    """Return the states by the parameters' own names, checked to be what the initial state has."""

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

    units = {param.name: key for key in init_state for param in spec.by_key[key].params}
    known = {own_name(key) for group in found.get("param_groups", ()) for key in group["params"]}
    states: dict[str, Mapping[str, Any]] = {}
    for key, slots in found["state"].items():
        if (name := own_name(key)) in states:
            raise ValueError(f"parameter '{name}' has two states, one of them as '{key}': expected one")
        states[name] = {slot: value for slot, value in slots.items() if value is not None}  # SGD before the first step
    if missing := units.keys() - known - states.keys():
        name = min(missing)
        raise ValueError(
            f"parameter '{name}' of unit '{units[name]}' has no state and is in no group: expected it in the state_dict"
        )
    for name, slots in states.items():
        if slots and name not in units:
            raise ValueError(f"parameter '{name}' has a state, expected one of those of init_state: {sorted(units)[:3]}")
        wanted = {*init_state[units[name]]} if slots else {*slots}
        if wanted == COUNTED:
            states[name] = slots = {**slots, "step": 1}
        if {*slots} != wanted:
            raise ValueError(
                f"parameter '{name}': expected a state of {sorted(wanted)}, got {sorted(slots)}; is it another optimizer's?"
            )
    return {name: slots for name, slots in states.items() if slots}


def _read_leaf(leaf: Any, initial: Tensor, states: Mapping[str, Mapping[str, Any]], spec: PartitionSpec) -> Tensor:
    """Return this rank's slice of full tensors, or a number, with the initial values of parameters that have none."""
    memory = copy_like(initial)
    if not initial.dim():
        memory = memory.repeat(len(leaf.names))
    values: dict[str, Tensor] = {}
    for i, (own, *_) in enumerate(leaf.names):
        name, _, slot = own.rpartition(".")
        if name in states:
            value = states[name][slot]
            values[own] = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=initial.dtype)
            leaf.check_stored(i, values[own], spec, "the state_dict")
    leaf.fill(memory, lambda names, box: values[names[0]][box.slices] if names[0] in values else None)
    return memory if initial.dim() else leaf.to_state(memory, spec)


def _describe(state: Mapping[str, Mapping[str, Tensor]], spec: PartitionSpec) -> Description:
    """Return the description of an elementwise state, by unit key. Raises TypeError or ValueError for any other."""
    tables = (state, *state.values()) if isinstance(state, Mapping) else (state,)  # pyright: ignore[reportUnnecessaryIsInstance]
    if got := [type(table).__name__ for table in tables if not isinstance(table, Mapping)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"expected the elementwise state of from_torch by unit key, got {got[0]}; it is the last entry of the state of "
            "optim.chain, and the inner one of optimizers that are made of others. That of matrices, as of Adafactor and Muon, "
            "has no such form: checkpoint.save keeps it for any units and ranks"
        )
    refuse_encoded(state)
    if others := [key for key in state if key not in spec.by_key]:
        raise ValueError(f"unit '{others[0]}' is not in the spec: expected some of {[*spec.by_key][:8]}")
    return Description(state, spec, units={()})
