"""The facts of a planned step that all its calls share."""

from __future__ import annotations

from collections.abc import Mapping

from .._spec.spec import PartitionSpec
from .._spec.unit import Unit
from .._units.route import Route
from .events import EventList
from .module_runs import ModuleRun

__all__ = ["StepFacts"]


class StepFacts:
    """The facts of a step that all its calls share."""

    def __init__(
        self, spec: PartitionSpec, routes: Mapping[str, Route], tokens: int, bucket_bytes: int, prefetch: int = 1
    ) -> None:
        self.spec, self.routes, self.tokens, self.bucket_bytes = spec, routes, tokens, bucket_bytes
        self.sizes = dict(spec.bound_mesh.sizes)
        self.prefetch = prefetch
        self.events = EventList()

    def flops(self, run: ModuleRun, *, backward: bool = False) -> int:
        """Return the FLOPs of a module's own matrices: two for each element and token, for each product that runs."""
        matrices = [(unit, sum(x.numel for x in run.params_of(unit) if len(x.shape) > 1)) for unit in run.units]
        return sum(2 * numel * self.tokens * ((2 if unit.requires_grad else 1) if backward else 1) for unit, numel in matrices)

    def grad_bytes(self, unit: Unit, run: ModuleRun | None = None) -> int:
        """Return the bytes of the gradients of a unit's parameters, or of those that a run has, before they are reduced."""
        params = unit.params if run is None else run.params_of(unit)
        return self.routes[unit.key].param_bytes(unit, params) if unit.requires_grad else 0
