"""An update on a device of what rests on the host: unit by unit, the next one coming and the last one leaving meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ... import _torch

__all__ = ["is_there", "like", "streamed"]

Values = dict[str, Tensor]
States = Mapping[str, Mapping[str, Tensor]]
Step = Callable[[Mapping[str, Tensor], States, Mapping[str, Tensor]], tuple[Values, dict[str, Values]]]
"""``step(grads, state, params)``, which writes into what it is given."""


def is_there(tensor: Tensor, device: torch.device) -> bool:
    """Whether nothing is to be copied."""
    return tensor.device == device


def like(resting: Tensor, values: Tensor) -> Tensor:
    """A copy of the values where something rests, in pinned memory if that is."""
    return torch.empty_like(resting, dtype=values.dtype, pin_memory=_torch.is_pinned(resting)).copy_(values)


class _Moving:
    """Tensors on their way to a device, or back to where they are to rest."""

    def __init__(self, tensors: Values, targets: Values) -> None:
        self.tensors, self.targets = tensors, targets
        self._copies = [_torch.AsyncCopy(tensor, targets[name]) for name, tensor in tensors.items()]

    def wait(self) -> Values:
        """The tensors that were copied to, for what the device is told from here on."""
        for copy in self._copies:
            copy.wait()
        return self.targets


def streamed(
    step: Step,
    given: tuple[Mapping[str, Tensor], States, Mapping[str, Tensor]],
    keys: Sequence[str],
    device: torch.device,
    *,
    donate: bool,
    stay: frozenset[str],
) -> tuple[Values, dict[str, Values]]:
    """``step(*given)`` of the units of these keys, on the device; the results rest where what was given does.

    In new memory, or with ``donate`` in that of what was given. State whose name is among ``stay`` is not copied.
    """
    grads, state, params = given
    new_params: Values = {}
    new_state: dict[str, Values] = {}

    def coming(key: str) -> _Moving:
        values = {"": params[key], **{f".{name}": x for name, x in state[key].items() if name not in stay}, "grad": grads[key]}
        values = {name: x.detach() for name, x in values.items()}
        return _Moving(values, {name: _torch.allocate_like(x, device) for name, x in values.items()})

    ahead = coming(keys[0]) if keys else None
    leaving: _Moving | None = None
    for key, after in zip(keys, [*keys[1:], None], strict=True):
        assert ahead is not None
        there = ahead.wait()
        ahead = None if after is None else coming(after)
        kept = {name: x if donate else x.clone() for name, x in state[key].items() if name in stay}
        moved = {name.removeprefix("."): x for name, x in there.items() if name.startswith(".")}
        stepped, states = step({key: there.pop("grad")}, {key: {**moved, **kept}}, {key: there[""]})
        if leaving is not None:
            leaving.wait()
        results = {"": stepped[key], **{f".{name}": x for name, x in states[key].items() if name not in stay}}
        rests = {name: params[key].detach() if not name else state[key][name[1:]] for name in results}
        if not donate:
            rests = {name: _torch.allocate_like(x, x.device, beside=device) for name, x in rests.items()}
        leaving = _Moving(results, rests)
        new_params[key] = params[key] if donate else rests[""]
        new_state[key] = {name: rests.get(f".{name}", states[key][name]) for name in state[key]}
    if leaving is not None:
        leaving.wait()
        _torch.synchronize_copies(device)
    return new_params, new_state
