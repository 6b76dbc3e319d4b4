"""Updates on a device of shards that live on the host: copies of neighbouring units overlap each unit's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ... import _torch
from .._checks import StateMapping

__all__ = ["TensorsByName", "copy_like", "is_on_device", "stream_update"]

TensorsByName = dict[str, Tensor]
StepFn = Callable[[Mapping[str, Tensor], StateMapping, Mapping[str, Tensor]], tuple[TensorsByName, dict[str, TensorsByName]]]
"""``step(grads, state, params)``, which writes into its arguments."""


def is_on_device(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device


def copy_like(template: Tensor, values: Tensor) -> Tensor:
    """Return a copy of the values where ``template`` lives, in pinned memory if that is pinned."""
    return torch.empty_like(template, dtype=values.dtype, pin_memory=_torch.is_pinned(template)).copy_(values)


class _PendingCopies:
    """Copies of tensors to a device, or back."""

    def __init__(self, tensors: TensorsByName, targets: TensorsByName) -> None:
        self.tensors, self.targets = tensors, targets
        self._copies = [_torch.AsyncCopy(tensor, targets[name]) for name, tensor in tensors.items()]

    def wait(self) -> TensorsByName:
        """Make the current stream wait for the copies, and return their targets."""
        for copy in self._copies:
            copy.wait()
        return self.targets


def stream_update(
    step: StepFn,
    given: tuple[Mapping[str, Tensor], StateMapping, Mapping[str, Tensor]],
    keys: Sequence[str],
    device: torch.device,
    *,
    donate: bool,
    keep: frozenset[str],
) -> tuple[TensorsByName, dict[str, TensorsByName]]:
    """Run ``step`` on the device, unit by unit; results live where the given tensors do.

    Args:
        step: Updates one unit in place.
        given: ``(grads, state, params)`` by unit key.
        keys: The units to update, in order.
        device: Where ``step`` runs.
        donate: Write the results into the given memory instead of new memory.
        keep: Names of the state that is not copied.

    Returns:
        ``(new params, new state)`` of these units.
    """
    grads, state, params = given
    new_params: TensorsByName = {}
    new_state: dict[str, TensorsByName] = {}

    def start_copy(key: str) -> _PendingCopies:
        values = {"": params[key], **{f".{name}": x for name, x in state[key].items() if name not in keep}, "grad": grads[key]}
        values = {name: x.detach() for name, x in values.items()}
        return _PendingCopies(values, {name: _torch.allocate_like(x, device) for name, x in values.items()})

    arriving = start_copy(keys[0]) if keys else None
    leaving: _PendingCopies | None = None
    for key, after in zip(keys, [*keys[1:], None][: len(keys)], strict=True):
        assert arriving is not None
        on_device = arriving.wait()
        arriving = None if after is None else start_copy(after)
        kept = {name: x if donate else x.clone() for name, x in state[key].items() if name in keep}
        moved = {name.removeprefix("."): x for name, x in on_device.items() if name.startswith(".")}
        stepped, states = step({key: on_device.pop("grad")}, {key: {**moved, **kept}}, {key: on_device[""]})
        if leaving is not None:
            leaving.wait()
        results = {"": stepped[key], **{f".{name}": x for name, x in states[key].items() if name not in keep}}
        targets = {name: params[key].detach() if not name else state[key][name[1:]] for name in results}
        if not donate:
            targets = {name: _torch.allocate_like(x, x.device, beside=device) for name, x in targets.items()}
        leaving = _PendingCopies(results, targets)
        new_params[key] = params[key] if donate else targets[""]
        new_state[key] = {name: targets.get(f".{name}", states[key][name]) for name in state[key]}
    if leaving is not None:
        leaving.wait()
        _torch.synchronize_copies(device)
    return new_params, new_state
