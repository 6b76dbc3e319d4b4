"""What an accumulation over micro-batches (_steps) decides for the functional_calls inside of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from .division import Divide, Reduction
from .spec import PartitionSpec

__all__ = ["Accumulation", "Arrivals", "accumulation_of"]

_RUNNING: list[Accumulation] = []
"""Those that run, in all threads: not a context variable, for Dynamo reads none and autograd's own threads have none."""


class Arrivals(Protocol):
    """What takes reduced gradients while backward runs, in the place of its end."""

    def started(self, key: str) -> None:
        """A gradient of this unit is on its way."""
        ...

    def arrived(self, key: str, grad: Tensor) -> None:
        """It is there."""
        ...


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A context, within which functional_calls with this spec reduce gradients as accumulate says."""

    spec: PartitionSpec
    given: Mapping[str, Tensor]
    """The shards, as the loss is given them."""
    entered: Mapping[str, Tensor]
    """What stands in the place of all of them in a functional_call that takes them as they are: gradients go there."""
    partial: Reduction
    """How gradients of those are reduced. The rest is reduced at the end."""
    reduction: Reduction
    """How all other gradients are: those of what the loss has computed from its shards."""
    thread: int
    arrivals: Arrivals | None = None
    """What takes the gradients of what entered, as they are reduced."""

    def __enter__(self) -> None:
        _RUNNING.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del _RUNNING[next(i for i, one in enumerate(_RUNNING) if one is self)]

    def entering(self, params: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Reduction, Arrivals | None]:
        """What a functional_call with these parameters is to take in their place, how it reduces, and where gradients go."""
        if any(params.get(key) is not shard for key, shard in self.given.items()):
            return params, self.reduction, None
        others = {key: x for key, x in params.items() if key not in self.given}
        return {**others, **self.entered}, self.partial, self.arrivals


def accumulation_of(
    params: Mapping[str, Tensor], spec: PartitionSpec, reduce: Divide, reduce_over: object
) -> Accumulation | None:
    """The one that a functional_call with these arguments is in, the innermost.

    Raises ValueError where it says itself how to reduce, or takes the accumulation's shards with another spec.
    """
    if not _RUNNING:
        return None
    running = _of_this_thread()
    for one in reversed(running):
        if one.spec is spec or (one.spec.units == spec.units and one.spec.sizes == spec.sizes):
            if reduce != "mean" or reduce_over is not None:
                raise ValueError(
                    f"functional_call inside of accumulate: expected no reduce= and no reduce_over=, got {reduce!r} and "
                    f"{reduce_over!r}; give them to accumulate, which decides how gradients are reduced"
                )
            return one
    for one in running:
        if taken := [key for key, shard in one.given.items() if params.get(key) is shard]:
            raise ValueError(
                f"unit '{taken[0]}': functional_call takes the shards of accumulate with another spec than accumulate was "
                "given: expected the same one"
            )
    return None


def _of_this_thread() -> list[Accumulation]:
    """Those that this thread runs; one of autograd's own, which runs a checkpoint again, has those of all."""
    if torch.compiler.is_compiling():
        return _RUNNING
    own = [one for one in _RUNNING if one.thread == threading.get_ident()]
    return _RUNNING if not own and isinstance(threading.current_thread(), threading._DummyThread) else own
