"""One torch optimizer for one step: the state of a vector, param groups, and the result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._spec.spec import PartitionSpec
from .checks import ELEMENTWISE_CLASSES, InitialState
from .derivatives import SharedOptions
from .options import OptionRanges, scale_lr

__all__ = [
    "ElementwiseConfig",
    "build_optimizer",
    "init_vector_state",
    "share_options",
    "state_to_step",
    "tensor_options",
    "write_state",
]

STATE_FROM_RATE: Mapping[type[torch.optim.Optimizer], str] = {torch.optim.ASGD: "eta", torch.optim.Rprop: "step_size"}
"""The state that torch creates in the first step, from the learning rate of that step."""


class ElementwiseConfig(NamedTuple):
    """The checked arguments of `from_torch`."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    initial: InitialState | None
    donate: bool
    device: torch.device | None
    groups: list[Mapping[str, Any]]
    ranges: Mapping[str, OptionRanges] | None
    names: list[frozenset[str]]
    """For each param group, the names in its state."""
    scalars: frozenset[str]
    """The names whose values are numbers."""
    lr: Any
    spec: PartitionSpec | None
    """The spec, by which derivatives know replicas and padding."""
    rank: int | None
    is_recorded: bool = False
    """Whether the update becomes part of a graph, where numbers are tensors without values."""

    @property
    def differentiable(self) -> bool:
        """Whether torch's kernels record derivatives."""
        return bool(self.defaults.get("differentiable"))


def init_vector_state(
    cls: type[torch.optim.Optimizer], piece: Tensor, options: Mapping[str, Any], initial: InitialState | None = None
) -> dict[str, Tensor]:
    """Return a vector's state before the first step: as torch's ``_init_group`` creates it, and SGD's momentum as zeros.

    ``initial`` creates it for a class that is not in ``ELEMENTWISE_CLASSES``.
    """
    if cls not in ELEMENTWISE_CLASSES and initial is not None:
        return dict(initial(piece))
    if cls is torch.optim.SGD:
        buffer = {"momentum_buffer": torch.zeros_like(piece)} if options.get("momentum") else {}
        # The first gradient is not dampened: count, to know which is the first.
        return buffer | ({"step": torch.zeros(())} if buffer and options.get("dampening") else {})
    piece.grad = piece.detach()  # any gradient will do
    optimizer = cls([piece], **options)
    start: Any = optimizer._init_group  # pyright: ignore[reportAttributeAccessIssue]
    start(optimizer.param_groups[0], *([] for _ in list(inspect.signature(start).parameters)[1:]))
    return dict(optimizer.state[piece])


def state_to_step(config: ElementwiseConfig, given: Mapping[str, Tensor], lr: Any) -> dict[str, Tensor]:
    """Return a vector's state for torch's step with ``lr``: {} if torch must create it, as SGD's before a dampened step."""
    if config.cls is torch.optim.SGD and "step" in given and bool(given["step"] == 0):
        return {}
    name = STATE_FROM_RATE.get(config.cls)
    if name is None or (_torch.is_eager() and bool(given["step"] != 0)):
        return dict(given)
    old = given[name]
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32) if name in config.scalars else old.dtype
    rate = torch.as_tensor(lr * (1 + 1j) if old.is_complex() else lr, dtype=dtype, device=old.device)
    return {**given, name: torch.where((given["step"] == 0).to(old.device), rate, old)}


def tensor_options(config: ElementwiseConfig, lr: float | Tensor | None) -> list[tuple[str, Tensor]]:
    """Return ``(name, value)`` of the options that are tensors."""
    options = [("lr", lr), *config.defaults.items(), *(option for group in config.groups for option in group.items())]
    return [(name, value) for name, value in options if isinstance(value, Tensor)]


def share_options(group: Mapping[str, Any], shared: SharedOptions, axes: tuple[str, ...]) -> dict[str, Any]:
    """Return one of torch's param groups, without parameters, for units that are split over these axes."""
    return {name: [] if name == "params" else shared.over_axes(option, axes) for name, option in group.items()}


def write_state(config: ElementwiseConfig, given: dict[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Write into ``given`` the state that torch replaced instead of updating."""
    for name, tensor in after.items():
        if name not in given:
            raise ValueError(f"from_torch: the first step made '{name}': expected initial= to give it, got {[*given]}")
        if tensor is not given[name]:
            given[name].copy_(tensor)
    if config.cls is torch.optim.SGD and "step" in given:
        given["step"].add_(1)


def build_optimizer(config: ElementwiseConfig, lr: float | Tensor | None) -> torch.optim.Optimizer:
    """Return torch's optimizer with its param groups, without parameters."""
    groups = [{"params": [torch.empty(0)], **group} for group in config.groups]
    # torch asks whether it is below 0, and nobody can tell
    batched = isinstance(lr, Tensor) and (config.is_recorded or _torch.is_wrapped(lr))
    optimizer = config.cls(groups, **(config.defaults if lr is None or batched else {**config.defaults, "lr": lr}))
    optimizer.state.clear()
    for group, own in zip(optimizer.param_groups, config.groups, strict=True):
        group["params"] = []
        if lr is not None and "lr" in own:
            group["lr"] = scale_lr(lr, own["lr"], config.lr, "from_torch: ")
        elif batched:
            group["lr"] = lr
    return optimizer
