"""Classes of layers that torch.nn has no public name for."""

from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]

__all__ = ["BatchNorm", "Normalized"]

BatchNorm = _BatchNorm
"""Every BatchNorm of torch. Pinned, as `Normalized`, by ``test_layers_with_statistics``."""

Normalized = _NormBase
"""Every layer of torch that keeps running statistics."""
