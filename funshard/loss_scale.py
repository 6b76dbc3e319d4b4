"""Dynamic loss scaling as a state that is passed along: for gradients that float16 would flush to zero."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from . import _torch
from ._core.checks import bind_spec, check_spec
from ._core.layout import Params
from ._core.spec import PartitionSpec
from ._gone import raise_gone
from ._slices.values import agree_finite, find_nonfinite, select_if_finite
from ._torch.tracing import LOGGER

__all__ = ["dynamic", "select"]

__getattr__ = raise_gone(__name__)

Tree = TypeVar("Tree")


class LossScale(NamedTuple):
    """The state of dynamic loss scaling: a pytree of scalars, the same on every rank."""

    scale: Tensor  # the factor of losses, float32
    good_steps: Tensor  # the number of steps with finite gradients since the scale last changed, int32
    # Whether all gradients of the last step were finite, on every rank: a state of 0.2 has none.
    finite: Tensor = True  # pyright: ignore[reportAssignmentType]


def dynamic(
    spec: PartitionSpec,
    *,
    scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> tuple[Callable[..., LossScale], Callable[..., tuple[Params, LossScale]]]:
    """Return the pair ``(init, update)`` of dynamic loss scaling, as torch.amp.GradScaler: also a link of `optim.chain`.

    Multiply the loss by ``state.scale``. ``grads, state = update(grads, state)`` divides the gradients by it, which keep their
    dtypes, and takes one all-reduce for each axis of the mesh: ``state.finite`` says whether they are finite on every rank.
    Where they are not, skip the step by `select`, or by `optim.apply_if_finite` after it in a chain. The scale grows after good
    steps in a row, unless it would overflow, and falls after a bad one. The host waits for nothing, unless the logger
    "funshard" is enabled for INFO and logs skipped steps.

    Args:
        spec: The spec of the gradients.
        scale: The first scale, above 0.
        growth_factor: The scale's factor after ``growth_interval`` good steps, above 1.
        backoff_factor: Its factor after a bad step, between 0 and 1.
        growth_interval: A number of steps, at least 1.

    Example:
        >>> import torch, funshard as fs
        >>> init, update = fs.loss_scale.dynamic(fs.policies.whole()(torch.nn.Linear(2, 1, bias=False)), scale=4.0)
        >>> grads, state = update({"": torch.tensor([8.0, torch.inf])}, init())
        >>> grads, state.scale, state.finite
        ({'': tensor([2., inf])}, tensor(2.), tensor(False))
    """
    check_spec(spec)
    is_interval = growth_interval >= 1 and not growth_interval % 1
    if not (0 < scale <= torch.finfo(torch.float32).max and growth_factor > 1 and 0 < backoff_factor < 1 and is_interval):
        raise ValueError(
            "loss_scale.dynamic: expected scale > 0 in float32, growth_factor > 1, 0 < backoff_factor < 1 and a whole "
            f"growth_interval >= 1, got {scale}, {growth_factor}, {backoff_factor} and {growth_interval}"
        )

    def init(params: Mapping[str, Tensor] | None = None) -> LossScale:
        device = next((x.device for x in (params or {}).values()), None)
        first = torch.full((), scale, dtype=torch.float32, device=device)  # a copy from the host would wait for the device
        return LossScale(first, torch.zeros_like(first, dtype=torch.int32), torch.ones_like(first, dtype=torch.bool))

    def update(grads: Mapping[str, Tensor], state: LossScale, params: object = None) -> tuple[Params, LossScale]:
        bound = bind_spec(spec)
        inverse = state.scale.double().reciprocal().float()
        out = {key: (g * inverse.to(g.device)).to(g.dtype) for key, g in grads.items()}
        finite = agree_finite(find_nonfinite(grads, bound), bound)
        now, good = state.scale.to(finite.device), state.good_steps.to(finite.device) + 1
        grows = good >= growth_interval
        grown = now * growth_factor
        kept = torch.where(grows & torch.isfinite(grown), grown, now)
        if not _torch.is_in_graph() and LOGGER.isEnabledFor(logging.INFO) and _torch.is_eager() and not finite:
            LOGGER.info("loss_scale: a step is skipped; its gradients were not finite at a scale of %g", state.scale)
        new = torch.where(finite, kept, now * backoff_factor)
        return out, LossScale(new, torch.where(finite & ~grows, good, 0), finite)

    return init, update


def select(finite: Tensor, new: Tree, old: Tree) -> Tree:
    """Return ``new`` if ``finite``, else ``old``: parameters and optimizer state from before a bad step.

    Args:
        finite: A bool scalar, as in the state of `dynamic`.
        new: A pytree of tensors.
        old: A pytree of the same structure (otherwise ValueError).

    Example:
        >>> import torch, funshard as fs
        >>> fs.loss_scale.select(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    return select_if_finite(finite, new, old)
