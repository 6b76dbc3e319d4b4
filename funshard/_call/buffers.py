"""What becomes of a model's buffers in a functional_call: what is thrown away is said, what is given is written back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from weakref import WeakSet

from torch import Tensor, nn
from torch.fx.node import has_side_effect

from .. import _torch
from .._spec.tree import join
from .._torch.layers import Normalized

__all__ = ["BufferWarning", "put_back", "running_statistics", "warn_of_lost", "warn_of_lost_while_tracing"]


class BufferWarning(UserWarning):
    """Forward changed buffers, such as BatchNorm's running statistics, and the call threw the changes away."""


_TOLD: WeakSet[nn.Module] = WeakSet()
"""The models whose users have been told: once for each, whatever the filters of warnings."""


def warn_of_lost(model: nn.Module, names: Sequence[str], stacklevel: int) -> None:
    """Warn, once for a model, that these of its buffers were changed in vain."""
    if names and model not in _TOLD:
        _TOLD.add(model)
        _warn(names, stacklevel + 1)


@_torch.assumed_constant
def warn_of_lost_while_tracing(names: tuple[str, ...]) -> None:
    """The same inside torch.compile, which comes here when it traces, so once for each graph."""
    if names:
        _warn(names, 2)


def _warn(names: Sequence[str], stacklevel: int) -> None:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warnings.warn(
        f"functional_call: forward changed the buffers {shown}{more} in copies that are thrown away now: expected them in "
        "buffers=; give it dict(model.named_buffers()) and keep what is in there afterwards (with grad: return it, by "
        "has_aux=True), call model.eval() if nothing is to change, or filter funshard.BufferWarning",
        BufferWarning,
        stacklevel=stacklevel + 1,
    )


def running_statistics(model: nn.Module) -> Iterator[str]:
    """The names of the buffers that the model's normalisation layers change when they run in training mode."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Normalized) and module.training and module.track_running_stats:
            yield from (join(path, name) for name in module._buffers)


@_torch.in_graph
@has_side_effect
def put_back(given: Tensor, now: Tensor) -> None:
    """Write a buffer's new values into the given one, inside torch.compile.

    There a gradient is torch.func's, which refuses ``add_`` to a tensor from outside, such as BatchNorm's count of batches.
    As plain autograd does outside, so the caller's buffers are updated. Pinned by ``test_buffers_from_outside``.
    """
    _torch.overwrite(given, now)
