"""Dynamic loss scaling as a state that is passed along: for gradients that float16 would flush to zero."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree of what models return

from . import _torch
from ._core.checks import bind_spec
from ._core.layout import Params
from ._core.spec import PartitionSpec
from ._slices.finite import agree_finite, find_nonfinite, select_if_finite
from ._torch.phases import LOGGER

__all__ = ["LossScale", "init", "scale", "select", "unscale", "update"]

Tree = TypeVar("Tree")


class LossScale(NamedTuple):
    """The state of dynamic loss scaling: a pytree of two scalars, the same on every rank."""

    scale: Tensor
    """The factor of losses, float32."""
    good_steps: Tensor
    """The number of steps with finite gradients since the scale last changed, int32."""


def init(scale: float = 2.0**16, *, device: torch.device | str | None = None) -> LossScale:
    """Return the state before the first step, as torch.amp.GradScaler's.

    Args:
        scale: The first scale, above 0 (otherwise ValueError).
        device: Where the state is from the first step on; by default `update` takes it to the gradients.

    Example:
        >>> import torch, funshard as fs
        >>> state = fs.loss_scale.init(4.0)
        >>> spec = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False))
        >>> grads, finite = fs.loss_scale.unscale(state, {"": torch.tensor([8.0, torch.inf])}, spec)
        >>> fs.loss_scale.update(state, finite).scale
        tensor(2.)
    """
    if not scale > 0:
        raise ValueError(f"loss_scale.init: expected a positive scale, got {scale}")
    return LossScale(torch.tensor(scale, dtype=torch.float32, device=device), torch.tensor(0, dtype=torch.int32, device=device))


def scale(state: LossScale, outputs: Tree) -> Tree:
    """Return the loss, or every tensor of a pytree of them, times the scale.

    Args:
        state: The state.
        outputs: Tensors that keep their dtype and device.

    Example:
        >>> import torch, funshard as fs
        >>> fs.loss_scale.scale(fs.loss_scale.init(8.0), torch.tensor(0.5))
        tensor(4.)
    """
    return pytree.tree_map_only(Tensor, lambda x: x * state.scale.to(x.device, x.dtype), outputs)


def unscale(state: LossScale, grads: Mapping[str, Tensor], spec: PartitionSpec) -> tuple[Params, Tensor]:
    """Return ``(grads over the scale, whether all of them are finite on every rank)``.

    One all-reduce for each axis of the mesh.

    Args:
        state: The state.
        grads: Gradients by unit key, which keep their dtypes.
        spec: Their spec.

    Returns:
        The gradients, and a bool scalar that is the same on all ranks. Where it is False skip the update (`select`).

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole()(torch.nn.Linear(4, 2, bias=False))
        >>> fs.loss_scale.unscale(fs.loss_scale.init(8.0), {"": torch.ones(8)}, spec)
        ({'': tensor([0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250])}, tensor(True))
    """
    spec = bind_spec(spec)
    inverse = state.scale.double().reciprocal().float()
    out = {key: (g * inverse.to(g.device)).to(g.dtype) for key, g in grads.items()}
    return out, agree_finite(find_nonfinite(grads, spec), spec)


def update(
    state: LossScale, finite: Tensor, *, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000
) -> LossScale:
    """Return the state for the next step: the scale grows after good steps in a row, and falls after a bad one.

    As torch.amp.GradScaler's ``update``, without a synchronisation, on the device of ``finite``. A scale that would overflow
    does not grow. Where the logger "funshard" is enabled for INFO, a skipped step is logged, and the host waits for ``finite``.

    Args:
        state: The state.
        finite: The bool scalar of `unscale`.
        growth_factor: The scale's factor after ``growth_interval`` good steps, above 1.
        backoff_factor: Its factor after a bad step, between 0 and 1.
        growth_interval: A number of steps, at least 1.

    Raises:
        ValueError: For factors or an interval out of these ranges.

    Example:
        >>> import torch, funshard as fs
        >>> fs.loss_scale.update(fs.loss_scale.init(8.0), torch.tensor(False)).scale
        tensor(4.)
    """
    if not (growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
        raise ValueError(
            "loss_scale.update: expected growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= 1, got "
            f"{growth_factor}, {backoff_factor} and {growth_interval}"
        )
    scale, good = state.scale.to(finite.device), state.good_steps.to(finite.device) + 1
    grows = good >= growth_interval
    grown = scale * growth_factor
    kept = torch.where(grows & torch.isfinite(grown), grown, scale)
    zero = torch.zeros_like(good)
    if not _torch.is_in_graph() and LOGGER.isEnabledFor(logging.INFO) and _torch.is_eager() and not finite:
        LOGGER.info("loss_scale.update: a step is skipped; its gradients were not finite at a scale of %g", state.scale)
    return LossScale(torch.where(finite, kept, scale * backoff_factor), torch.where(finite & ~grows, good, zero))


def select(finite: Tensor, new: Tree, old: Tree) -> Tree:
    """Return ``new`` if ``finite``, else ``old``: parameters and optimizer state from before a bad step.

    Args:
        finite: The bool scalar of `unscale`.
        new: A pytree of tensors.
        old: A pytree of the same structure (otherwise ValueError).

    Example:
        >>> import torch, funshard as fs
        >>> fs.loss_scale.select(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    return select_if_finite(finite, new, old)
