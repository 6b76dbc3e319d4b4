"""The reductions that an accumulation over micro-batches (_steps) chooses for the functional_calls in its loss."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from .. import _torch
from .._core.flow import ReduceBy, Reduction
from .._core.spec import PartitionSpec

_ACTIVE_ACCUMULATIONS: list[Accumulation] = []
"""The accumulations whose loss or backward runs, of all threads.

The shards of `accumulate` find theirs by identity. What a loss computes from them (``{k: 2 * p}``, a step inside, a recomputed
function) has no link to them that also holds under torch.func and Dynamo, but must be reduced as `accumulate` says. It is
no context variable: Dynamo reads none, and autograd's own threads have none.
"""


class GradReceiver:
    """A receiver of reduced gradients while backward runs, instead of at its end."""

    def expect(self, key: str) -> None:
        """Note that a gradient of this unit will be reduced in this backward."""

    def receive(self, key: str, grad: Tensor) -> None:
        """Take that gradient."""


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A context in which this thread's functional_calls use accumulate's tensors and reductions for the loss's shards."""

    spec: PartitionSpec
    shards: Mapping[str, Tensor]
    """The shards, as the loss gets them."""
    replacements: Mapping[str, Tensor]
    """The tensors that a functional_call uses instead of these shards, if it takes all of them, with their gradients."""
    partial_reduction: Reduction
    """The reduction of the replacements' gradients in backward. accumulate does the rest at its end."""
    reduction: Reduction
    """The reduction of the gradients of all that the loss computes from its shards."""
    thread: int
    receiver: GradReceiver | None = None
    """The receiver of the replacements' gradients."""
    weight: Tensor | None = None
    """The weight of the loss if it may be 0, as `drop_unweighted` takes it."""
    is_weighted: bool = False
    """Whether the losses of several ranks have weights."""

    def __enter__(self) -> None:
        _ACTIVE_ACCUMULATIONS.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del _ACTIVE_ACCUMULATIONS[next(i for i, active in enumerate(_ACTIVE_ACCUMULATIONS) if active is self)]

    def replace(self, params: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Reduction, GradReceiver | None]:
        """Return what a functional_call with these parameters uses instead, how it reduces, and where gradients go."""
        if any(params.get(key) is not shard for key, shard in self.shards.items()):
            self.check_unweighted(params, "functional_call takes tensors computed from its shards, or is in fs.remat")
            return params, self.reduction, None
        others = {key: x for key, x in params.items() if key not in self.shards}
        return {**others, **self.replacements}, self.partial_reduction, self.receiver

    def check_unweighted(self, params: Mapping[str, Tensor], what: str) -> None:
        """Raise ValueError if weights would reach these tensors' gradients on one rank only: replicas would differ."""
        if self.is_weighted and (tracked := [key for key, x in params.items() if _torch.has_derivative(x)]):
            raise ValueError(
                f"unit '{tracked[0]}': accumulate(weights=): {what}, where each rank would weigh the gradients of all by its "
                "own weights: expected functional_call of the shards themselves, or the loss times its weight and no weights="
            )


def find_accumulation(
    params: Mapping[str, Tensor], spec: PartitionSpec, reduce: ReduceBy, reduce_axes: object
) -> Accumulation | None:
    """Return the innermost accumulation that decides how a functional_call reduces gradients.

    A call that says it itself, on other tensors than the shards of an accumulation, is in none: a teacher, for example.

    Raises:
        ValueError: If a call on these shards says itself how to reduce, or has another spec.
    """
    if not _ACTIVE_ACCUMULATIONS:
        return None
    says, active = reduce != "mean" or reduce_axes is not None, _active_in_this_thread()
    for one in reversed(active):
        shared = next((key for key, shard in one.shards.items() if params.get(key) is shard), None)
        is_same = one.spec is spec or (one.spec.units == spec.units and one.spec.sizes == spec.sizes)
        if shared is not None and not is_same:
            raise ValueError(
                f"unit '{shared}': functional_call takes the shards of accumulate with another spec than accumulate was given: "
                "expected the same one"
            )
        if shared is not None and says:
            raise ValueError(
                f"unit '{shared}': functional_call of accumulate's shards: expected no reduce= and no reduce_axes=, got "
                f"{reduce!r} and {reduce_axes!r}; give them to accumulate, which decides how gradients are reduced"
            )
        if is_same and not says:
            return one
    return None


def drop_unweighted(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return a loss or gradient; with zeros for its values that are not finite where the weight is 0. None: it is not 0.

    A finite value times a weight of 0 is 0 already, and has a derivative with respect to the weight.
    """
    return x if weight is None else torch.where((weight == 0) & ~x.isfinite(), 0, x)


def _active_in_this_thread() -> list[Accumulation]:
    """Return this thread's accumulations; in a thread of autograd, which runs a checkpoint again, those of all."""
    if _torch.is_in_graph():
        return _ACTIVE_ACCUMULATIONS
    own = [active for active in _ACTIVE_ACCUMULATIONS if active.thread == threading.get_ident()]
    return _ACTIVE_ACCUMULATIONS if not own and isinstance(threading.current_thread(), threading._DummyThread) else own
