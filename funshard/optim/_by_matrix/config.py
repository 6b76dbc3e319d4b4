"""The configuration of an optimizer of matrices: its checked arguments, before any parameter is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..._units.layout import Params
from .._elementwise.derivatives import SharedOptions
from .._elementwise.options import scale_lr
from .._matrices.matrices import Matrices
from .rule import MatrixOptions, MatrixRule

__all__ = ["Fallback", "MatrixConfig", "OwnedShapes"]

Fallback = tuple[
    Callable[[Mapping[str, Tensor]], Mapping[str, Any]], Callable[..., tuple[Mapping[str, Tensor], Mapping[str, Any]]]
]
"""``(init, update)`` of parameters that are not matrices, such as `from_torch` returns. Its state has its params' keys."""


OwnedShapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""By matrix, the shapes of the state that its owner holds."""


class MatrixConfig(NamedTuple):
    """The arguments of an optimizer of matrices."""

    rule: MatrixRule
    matrices: Matrices
    options: Mapping[str, MatrixOptions]
    fallback: Fallback
    is_default_fallback: bool
    """Whether ``fallback`` is the default one, which has the matrices' learning rate."""
    donate: bool
    lr: float | None
    owned: OwnedShapes
    """By matrix, the shapes of its owner's state."""

    def __repr__(self) -> str:
        return f"<{len(self.options)} matrices>"

    def options_with_lr(self, lr: float | Tensor | None) -> Mapping[str, MatrixOptions]:
        """Return the options of a step with its own ``lr``; parameters keep their ratio to the default."""
        if lr is None:
            return self.options

        def rate(own: Any) -> Any:
            return lr if self.lr is None or own == self.lr else scale_lr(lr, own, self.lr)

        return {name: {**options, "lr": rate(options.get("lr"))} for name, options in self.options.items()}

    def shared_options(self, options: Mapping[str, MatrixOptions]) -> Mapping[str, MatrixOptions]:
        """Return the options for derivatives on slices, or on owners, each of which is one rank of the whole mesh."""
        shared, spec = SharedOptions(self.matrices.spec), self.matrices.spec
        every = spec.bound_mesh.names
        axes = {m.name: every if self.rule.has_owner_options else m.unit.distinct_axes for m in self.matrices.chosen}
        return {name: shared.for_matrix(own, axes[name]) for name, own in options.items()}

    def fallback_tensors(self, tree: Mapping[str, Tensor]) -> Params:
        """Return the tensors of ``fallback``: shards of units without matrices by key, other parts of shards by name."""
        out: Params = {}
        for key, tensor in tree.items():
            matrices_of_it = {*self.matrices._names_in(key)}
            if not matrices_of_it:
                out[key] = tensor
                continue
            layout = self.matrices._slice_layout(key)
            others = [param.name for param in layout.unit.params if param.name not in matrices_of_it]
            out |= {name: layout.select(tensor, name) for name in others}
        return out
