"""One torch optimizer for one step: the state of a vector, param groups, and the result."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..._core.spec import PartitionSpec
from .checks import ELEMENTWISE_CLASSES, InitialState
from .options import OptionRanges, SharedOptions, scale_lr

__all__ = ["ElementwiseConfig", "add_eps_root", "build_optimizer", "init_vector_state", "share_options", "state_to_step"]
__all__ += ["tensor_options", "warn_zero_gradients", "write_state"]


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


# --- Adam and AdamW with an epsilon under the root, so that derivatives exist where all gradients were zero ---

ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def add_eps_root(cls: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the class itself, or a subclass with ``eps_root``, which is checked and removed from the defaults."""
    if "eps_root" not in defaults:
        return cls
    eps_root = defaults.pop("eps_root")
    if cls not in ADAMS or not defaults.get("differentiable") or defaults.get("amsgrad"):
        raise ValueError(
            f"from_torch: eps_root is for differentiable Adam and AdamW, without amsgrad: expected one of these with "
            f"differentiable=True, got {cls.__name__}"
        )
    if not eps_root >= 0:
        raise ValueError(f"from_torch: eps_root: expected at least 0, got {eps_root}")

    class WithEpsRoot(cls):  # pyright: ignore[reportGeneralTypeIssues]
        """An optimizer that divides by ``sqrt(v / (1 - b2^t) + eps_root) + eps``, as optax.adam does."""

        has_derivative_at_zero = eps_root > 0

        def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for group in self.param_groups:
                for param in group["params"]:
                    _step(param, self.state[param], group, eps_root)

    WithEpsRoot.__name__ = WithEpsRoot.__qualname__ = cls.__name__
    return WithEpsRoot


def _step(param: Tensor, state: dict[str, Tensor], group: dict[str, Any], eps_root: float) -> None:
    """Run one step in place, as torch's own does, in operations that autograd records."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    assert param.grad is not None
    before = param.clone()  # saved for derivatives by tensor options, and not written to
    if param.is_complex():
        raise TypeError("from_torch: eps_root is for real parameters, got complex ones")
    grad = -param.grad if group["maximize"] else param.grad
    decoupled = group.get("decoupled_weight_decay", False)
    if decay and not decoupled:
        grad = grad + decay * before
    state["step"] += 1
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    steps = state["step"].to(param.dtype)
    average = state["exp_avg"] / (1 - beta1**steps)
    square = state["exp_avg_sq"] / (1 - beta2**steps)
    shrunk = before * (1 - lr * decay) if decay and decoupled else before
    param.copy_(shrunk - lr * average / ((square + eps_root).sqrt() + group["eps"]))


def warn_zero_gradients(
    cls: type[torch.optim.Optimizer],
    grads: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Tensor]],
    masks: Mapping[str, Tensor],
) -> None:
    """Warn, naming the unit, about elements whose gradients were all zero and are differentiated through a root."""
    if not issubclass(cls, ADAMS) or getattr(cls, "has_derivative_at_zero", False) or _torch.is_in_graph():
        return
    for key, grad in grads.items():
        if key not in state or "exp_avg_sq" not in state[key] or not _torch.is_tracked(grad) or _torch.is_batched(grad):
            continue
        zeros = _torch.unwrap(state[key]["exp_avg_sq"].detach()) == 0
        if key in masks:
            zeros = zeros & ~masks[key]
        if bool(zeros.any()):
            warnings.warn(
                f"from_torch: unit '{key}' has elements whose gradients were all 0, as of a feature that is always 0: "
                f"{cls.__name__} takes the root of their mean square, which has no derivative there, and derivatives that "
                "depend on them are NaN; give eps_root=1e-8, say, which is added under the root",
                stacklevel=3,
            )
            return
