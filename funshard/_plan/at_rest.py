"""What a rank holds between steps: the bytes of parameters as they are stored and of the optimizer's state; its slices."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch
from .._core.checks import bind_spec, check_buffers
from .._core.spec import PartitionSpec
from .._core.unit import P, Unit
from .._wire.host import is_host_resident
from ..optim import from_torch

Init = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]
"""The function of an optimizer that returns its state before the first step."""

MOST_RANKS = 8
"""The ranks whose slices are drawn."""

StateBytes = dict[str, dict[str, int]]
"""By unit key, then by kind and dtype of state such as "exp_avg float32", bytes."""


class UnitBytes(NamedTuple):
    """One unit at rest on one rank."""

    slices: int
    numel: int  # of its parameters, on all ranks together
    padding: int  # elements of its buffer that are no parameter's
    parameters: int  # bytes of this rank's slice as it is stored
    optimizer: int  # bytes of its optimizer state
    on_host: bool


def is_on_host(unit: Unit, spec: PartitionSpec) -> bool:
    """Return whether a unit lives in host memory and is used elsewhere: on any mesh but one of the CPU."""
    return is_host_resident(unit) and spec.bound_mesh.device_type != "cpu"


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of torch.optim of a name such as "adamw"; raise ValueError if there is none."""
    base = torch.optim.Optimizer
    classes = {key.lower(): cls for key, cls in vars(torch.optim).items() if inspect.isclass(cls) and issubclass(cls, base)}
    if (cls := classes.get(name.lower(), base)) is base:
        raise ValueError(f"optimizer: expected the name of a class of torch.optim such as 'adamw', got {name!r}")
    return cls


def optimizer_init(optimizer: object) -> Init | None:
    """Return the ``init`` of an optimizer that is given by name, by class, or as a pair of functions; None for None."""
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        optimizer = find_optimizer(optimizer)
    if inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer):
        defaults: dict[str, Any] = {"lr": 1e-3} if "lr" in inspect.signature(optimizer).parameters else {}
        return from_torch(optimizer, **defaults).init
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and callable(optimizer[0]):  # pyright: ignore[reportUnknownArgumentType]
        return cast("Init", optimizer[0])
    raise TypeError(
        f"optimizer: expected a name such as 'adamw', a class of torch.optim, (init, update) as fs.optim makes them, or None, "
        f"got {optimizer!r}"
    )


def map_p(spec: PartitionSpec, change: Callable[[P], P]) -> PartitionSpec:
    """Return a spec with another `P` for each of its units."""
    units = tuple(dataclasses.replace(unit, p=change(unit.p)) for unit in spec.units)
    selected = tuple((path, change(p)) for path, p in spec.selected)
    return dataclasses.replace(spec, selected=selected, root=change(spec.root), units=units)


def make_shard(spec: PartitionSpec, unit: Unit, device: torch.device | None = None) -> Tensor:
    """Return an empty shard of a unit."""
    length, dtype = spec.stored(unit)
    return torch.empty(length, dtype=dtype, device=device)


def state_bytes(spec: PartitionSpec, init: Init | None) -> StateBytes:
    """Return the bytes of each unit's optimizer state, from shapes alone: ``init`` runs on fake tensors."""
    if init is None:
        return {}
    with _torch.fake_mode():
        shards = {unit.key: make_shard(spec, unit) for unit in spec if not unit.at_rest}
        states = init({key: shard.requires_grad_(spec.by_key[key].requires_grad) for key, shard in shards.items()})
    found: dict[str, Counter[str]] = {}
    for path, x in pytree.tree_flatten_with_path(states)[0]:
        keys: list[Any] = [part.key if isinstance(part, pytree.MappingKey) else None for part in path]
        at = next((i for i, key in enumerate(keys) if key in spec.by_key), None)
        if at is not None and isinstance(x, Tensor) and x.dim():
            # Of a composed optimizer's state the fields' names, such as "average", but for those that lead to another state.
            fields = [part.name for part in path[:at] if isinstance(part, pytree.GetAttrKey) and part.name != "inner"]
            slots = [*fields, *(str(getattr(part, "key", getattr(part, "name", part))) for part in path[at + 1 :])]
            name = f"{'.'.join(slots)} {str(x.dtype).removeprefix('torch.')}"
            found.setdefault(keys[at], Counter())[name] += x.nbytes
    return {key: dict(kinds) for key, kinds in found.items()}


def unit_bytes(spec: PartitionSpec, state: StateBytes) -> dict[str, UnitBytes]:
    """Return what one rank holds of each unit between steps."""
    found: dict[str, UnitBytes] = {}
    for unit in spec:
        length, dtype = spec.stored(unit)
        padding, optimizer = spec.padded_numel(unit) - unit.numel, sum(state.get(unit.key, {}).values())
        sizes = padding, length * dtype.itemsize, optimizer if unit.requires_grad else 0
        found[unit.key] = UnitBytes(spec.size(unit), unit.numel, *sizes, is_on_host(unit, spec))
    return found


def device_bytes(units: Mapping[str, UnitBytes]) -> tuple[int, int]:
    """Return the bytes of parameters and of optimizer state on the device."""
    there = [unit for unit in units.values() if not unit.on_host]
    return sum(unit.parameters for unit in there), sum(unit.optimizer for unit in there)


def count_per_slice(unit: Unit, spec: PartitionSpec) -> Tensor:
    """Return the number of elements of parameters in each slice of a unit."""
    bounds, start = torch.arange(spec.size(unit) + 1) * spec.shard_numel(unit), 0
    below = torch.zeros_like(bounds)  # elements of parameters before each bound
    for size, param in unit.parts:
        if param is not None:
            below += (bounds - start).clamp(0, size)
        start += size
    return below.diff()


# --- A sharding drawn in a terminal ---


def visualize(params: Mapping[str, Tensor], spec: PartitionSpec, *, width: int = 72) -> str:
    """Return a drawing of sharded parameters: a row for each unit, with the slice of every rank that splits it.

    After ``jax.debug.visualize_array_sharding``. A box is a slice, and says which rank has it; the dots at its end are
    its share of padding.

    Args:
        params: The shards, as `shard` gives them.
        spec: Their spec.
        width: The characters of a row.

    Raises:
        ValueError: Naming the unit, for shards that are not those of the spec.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        >>> spec = fs.by_type(torch.nn.Linear)(model).on({"shard": 2})
        >>> print(fs.visualize(fs.shard(model, spec, rank=0), spec, width=30))
        0  shard=2  72
        +-------------+-------------+
        |      0      |      1   ...|
        +-------------+-------------+
        1  shard=2  27
        +-------------+-------------+
        |      0  ....|      1      |
        +-------------+-------------+
    """
    spec = bind_spec(spec)
    check_buffers(params, spec, {unit.key: spec.stored(unit)[0] for unit in spec})
    sizes, lines = dict(spec.bound_mesh.sizes), list[str]()
    for unit in spec:
        slices, length = spec.size(unit), spec.shard_numel(unit)
        shown = min(slices, MOST_RANKS)
        cell = max((width - 1) // (shown + (slices > shown)) - 1, 6)
        boxes: list[str] = []
        for rank, numel in enumerate(count_per_slice(unit, spec).tolist()[:shown]):
            padding = round(cell * (length - numel) / length) if length else 0
            boxes.append(("all" if slices == 1 else str(rank)).center(cell)[: cell - padding] + "." * padding)
        boxes += [f"... {slices - 1}".center(cell)] if slices > shown else []
        edge = "+" + "+".join("-" * cell for _ in boxes) + "+"
        axes = " x ".join(f"{axis}={sizes[axis]}" for axis in unit.p.axes) or "replicated"
        lines += [f"{unit.key or repr('')}  {axes}  {unit.numel:,}", edge, "|" + "|".join(boxes) + "|", edge]
    return "\n".join(lines)
