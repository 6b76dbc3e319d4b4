"""Checks that both kinds of optimizers share: learning rates, and memory that an update writes."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn, TypeVar

from torch import Tensor

from .. import _torch
from .._core.checks import check_mapping

__all__ = ["StateMapping", "Tensors", "break_message", "check_rate", "check_tensors", "named_tensors", "refuse_pickle"]
__all__ += ["refuse_shared_memory", "same_pair"]

Pair = TypeVar("Pair")
Tensors = Mapping[str, Tensor]
"""A tree that is only read: by unit key or parameter name."""
StateMapping = Mapping[str, Tensors]
"""An elementwise state that is only read: by unit key and name."""


def check_rate(lr: object, what: str, *, optional: bool = True) -> None:
    if not isinstance(lr, numbers.Real | Tensor) and not (optional and lr is None):
        raise TypeError(
            f"{what}: expected a number or a tensor of one, got {type(lr).__name__}; a schedule is a function of the step: "
            "give update(..., lr=schedule(step)). torch's schedulers write into a torch optimizer, and here is none"
        )


def refuse_pickle(self: object) -> NoReturn:
    """Raise TypeError: the ``__reduce__`` of a pair of functions. A copy of a pair is the pair."""
    raise TypeError(
        f"{type(self).__name__}: a pair of functions of this process does not pickle: make it in the function that "
        "mp.spawn runs; its state, the parameters and the spec do pickle"
    )


def same_pair(optimizer: Pair, memo: object = None, /) -> Pair:
    return optimizer


def break_message(name: str, why: str) -> str:
    return f"{name}'s update cannot be part of a graph: {why}. Compile the gradients, and call update outside"


def named_tensors(grads: Tensors, state: StateMapping, params: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"params['{key}']", tensor) for key, tensor in params.items())
    yield from ((f"grads['{key}']", tensor) for key, tensor in grads.items())
    yield from ((f"state['{key}']['{name}']", t) for key, values in state.items() for name, t in values.items())


def refuse_shared_memory(tensors: Iterable[tuple[str, Tensor]], by: str = "donate=True") -> None:
    bases = ((what, _torch.unwrap(tensor)) for what, tensor in tensors)
    ranges = sorted((*_torch.memory_range(base), what) for what, base in bases if base.numel())
    for (storage, _, end, what), (other, begin, _, second) in itertools.pairwise(ranges):
        if storage == other and begin < end:
            raise ValueError(f"{what} and {second} share memory, which {by} writes: expected tensors of their own")


def check_tensors(tree: Tensors, what: str) -> None:
    check_mapping(tree, what)
    for key, x in tree.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = "; an unused parameter has gradient zeros" if x is None else ""
            raise TypeError(f"{what}: '{key}': expected a tensor, got {type(x).__name__}{hint}")
