"""The pairs of functions that compose: gradient transformations, and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ... import _torch
from ..._core.layout import Params
from .._checks import refuse_pickle, same_pair

__all__ = ["AnyOptimizer", "ComposedOptimizer", "GradientTransformation", "InitFn", "check_optimizer", "check_state", "is_pair"]
__all__ += ["read_count", "read_flag"]


def read_flag(flag: Tensor) -> bool | None:
    """Return a flag's value, True for a fake tensor (`plan`); None while a compiler records, or if simulated ranks differ."""
    if _torch.is_in_graph() or _torch.is_tracing():
        return None
    values = _torch.unwrap(flag)
    if _torch.is_fake(values):
        return True
    found = set[bool](values.reshape(-1).tolist())
    return found.pop() if len(found) == 1 else None


def read_count(count: Tensor, who: str, *, planned: int = 0) -> int:
    """Return a count of steps, ``planned`` for a fake tensor; raise ValueError if it is recorded or simulated ranks differ."""
    values = _torch.unwrap(count).reshape(-1)
    if _torch.is_tracing():
        raise ValueError(
            f"{who}: the count of steps in its state has no value where operators are recorded: record the gradients, and run "
            "this update outside"
        )
    if _torch.is_fake(values):
        return planned
    numbers = set[int](values.tolist())
    if len(numbers) != 1:
        raise ValueError(f"{who}: expected a state with the same count of steps on all ranks, got {sorted(numbers)}")
    return numbers.pop()


class InitFn(Protocol):
    """``init(params) -> state``: the state before the first step."""

    def __call__(self, params: Any, /) -> Any:
        """Return the state, any pytree of tensors, for parameters by unit key."""
        ...


class TransformFn(Protocol):
    """``update(grads, state, params) -> (new grads, new state)``, a pure function."""

    def __call__(self, grads: Any, state: Any, params: Any, /) -> tuple[Mapping[str, Tensor], Any]:
        """Return gradients of the same keys, shapes and dtypes, and a state of the same structure."""
        ...


class UpdateFn(Protocol):
    """``update(grads, state, params, **rates) -> (new params, new state)``, a pure function."""

    def __call__(self, grads: Any, state: Any, params: Any, /, **rates: Any) -> tuple[Params, Any]:
        """Return the parameters and the state after a step; ``rates`` are such as ``lr=``, as far as the optimizer has them."""
        ...


class GradientTransformation(NamedTuple):
    """A pair of pure functions that changes gradients on their way to an optimizer, for `chain`.

    Any tuple of such functions is one. Optax's transformations have the same form; the last one of `chain` returns parameters,
    where Optax's returns updates to add.
    """

    init: InitFn
    """``init(params) -> state``."""
    update: TransformFn
    """``update(grads, state, params) -> (new grads, new state)``."""

    __reduce__ = refuse_pickle
    __copy__ = __deepcopy__ = same_pair


class ComposedOptimizer(NamedTuple):
    """An optimizer made of others: a pair of pure functions, as `from_torch` returns, whose state is a tuple."""

    init: InitFn
    """``init(params) -> state``."""
    update: UpdateFn
    """``update(grads, state, params, **rates) -> (new params, new state)``; the innermost optimizer gets ``rates``."""

    __reduce__ = refuse_pickle
    __copy__ = __deepcopy__ = same_pair


AnyOptimizer = tuple[Callable[[Any], Any], Callable[..., tuple[Mapping[str, Tensor], Any]]]
"""A pair of functions with the form of `ComposedOptimizer`, or of `GradientTransformation`: types cannot tell them apart."""


def is_pair(value: object) -> bool:
    """Return whether this is a tuple of two functions."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def check_optimizer(who: str, optimizer: object) -> None:
    """Raise TypeError for a gradient transformation, and for anything else than a pair of functions."""
    if isinstance(optimizer, GradientTransformation):
        raise TypeError(
            f"{who}: a gradient transformation returns gradients: expected an optimizer, whose update returns parameters; "
            "fs.optim.chain(transformation, optimizer) makes one"
        )
    if not is_pair(optimizer):
        raise TypeError(f"{who}: expected (init, update), such as fs.optim.from_torch(torch.optim.AdamW), got {optimizer!r}")


def check_state(who: str, state: object, kind: type[object]) -> None:
    """Raise TypeError unless this is a state of the optimizer that ``who`` makes: not that of the optimizer inside it."""
    if not isinstance(state, kind):
        got = type(state).__name__
        raise TypeError(f"{who}: state: expected {kind.__name__}, as init(params) or an update returns, got {got}")
