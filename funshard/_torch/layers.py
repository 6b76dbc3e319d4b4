"""What of layers torch.nn has no public name for: classes, and how they are initialised."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]

__all__ = ["BatchNorm", "NormWithStatistics", "find_reset"]

BatchNorm = _BatchNorm
"""Every BatchNorm of torch. Pinned, as `NormWithStatistics`, by ``test_layers_with_statistics``."""

NormWithStatistics = _NormBase
"""Every layer of torch that keeps running statistics."""


def find_reset(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's own initialisation method, or None. Pinned by ``test_layers_that_reset_themselves``."""
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset) and isinstance(module, nn.MultiheadAttention | nn.Transformer):
        reset = module._reset_parameters
    return reset if callable(reset) else None
