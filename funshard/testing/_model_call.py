"""The model as a function, as assert_exact hands it to a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .._spec.spec import PartitionSpec
from ..collectives._mesh import Axis

__all__ = ["Convex", "Loss", "ModelCall", "Order"]


@dataclass(frozen=True)
class ModelCall:
    """A model that is called, whole or on shards."""

    run: Callable[..., Any]
    spec: PartitionSpec | None = None
    """The spec of the shards, bound to the rank's mesh; None for the whole model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.run(*args, **kwargs)

    def axis(self, name: str) -> Axis | None:
        """Return an axis of the mesh for the collectives of a local module; None for the whole model.

        Args:
            name: The axis's name.
        """
        return None if self.spec is None else self.spec.axis(name)


Loss = Callable[[ModelCall, Any], Tensor]
"""A function from the model as a function, and a rank's batch, to the rank's loss."""
Convex = Callable[[Any], Callable[[Tensor], Tensor]]
"""A function from a rank's batch to the convex loss of the rank's outputs."""
Order = Literal[1, 2, "ggn"]
"""Which derivatives are compared."""
