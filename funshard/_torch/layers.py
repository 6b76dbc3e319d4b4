"""Layers for which torch.nn has no public name: base classes of normalisation, and methods of initialisation."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]

__all__ = ["BatchNorm", "NormWithStatistics", "find_reset"]

BatchNorm = _BatchNorm
"""The base class of every BatchNorm of torch. Pinned, as `NormWithStatistics`, by ``test_layers_with_statistics``."""

NormWithStatistics = _NormBase
"""The base class of every layer of torch that keeps running statistics."""


def find_reset(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's own initialisation method, or None. Pinned by ``test_layers_that_reset_themselves``."""
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset) and isinstance(module, nn.MultiheadAttention | nn.Transformer):
        reset = module._reset_parameters
    return reset if callable(reset) else None
