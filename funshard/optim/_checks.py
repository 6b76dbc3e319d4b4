"""What optimizers of all kinds share: checks of learning rates and of memory that an update writes, and numbers in states."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import _torch
from .._core.checks import check_mapping
from .._core.layout import Params
from .._core.spec import PartitionSpec
from .._core.unit import Unit

Tensors = Mapping[str, Tensor]
"""A tree that is only read: by unit key or parameter name."""
StateMapping = Mapping[str, Tensors]
"""An elementwise state that is only read: by unit key and name."""


def check_rate(lr: object, what: str, *, optional: bool = True) -> None:
    """Raise TypeError, with ``what`` as its subject, unless ``lr`` is a number, a tensor or, if ``optional``, None."""
    if not isinstance(lr, numbers.Real | Tensor) and not (optional and lr is None):
        raise TypeError(
            f"{what}: expected a number or a tensor of one, got {type(lr).__name__}; a schedule is a function of the step: "
            "give update(..., lr=schedule(step)). torch's schedulers write into a torch optimizer, and here is none"
        )


State = dict[str, dict[str, Any]]
"""By unit key, then by torch's name: slices like the shard, and numbers. The structure never changes."""


class Optimizer(NamedTuple):
    """A pair of pure functions, which holds no state itself: an optimizer, or a link of `chain`. Any such tuple is one."""

    init: Callable[[Any], Any]
    """``init(params) -> state``."""
    update: Callable[..., tuple[Params, Any]]
    """``update(grads, state, params, **rates) -> (new params, new state)``; a link returns new gradients."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Optimizer: a pair of functions of this process does not pickle: make it in the function that mp.spawn runs; its "
            "state, the parameters and the spec do pickle"
        )

    def __copy__(self) -> Optimizer:
        return self

    def __deepcopy__(self, memo: object) -> Optimizer:
        return self


def is_pair(value: object) -> bool:
    """Return whether a value is ``(init, update)``, two functions."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def break_message(name: str, why: str) -> str:
    """Return the reason that torch.compile gives where an update breaks its graph."""
    return f"{name}'s update cannot be part of a graph: {why}. Compile the gradients, and call update outside"


def named_tensors(grads: Tensors, state: StateMapping, params: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name for an error, tensor)`` for every tensor of the trees."""
    yield from ((f"params['{key}']", tensor) for key, tensor in params.items())
    yield from ((f"grads['{key}']", tensor) for key, tensor in grads.items())
    yield from ((f"state['{key}']['{name}']", t) for key, values in state.items() for name, t in values.items())


def refuse_shared_memory(tensors: Iterable[tuple[str, Tensor]], by: str = "donate=True") -> None:
    """Raise ValueError if two of the tensors overlap in memory that will be written."""
    bases = ((what, _torch.unwrap(tensor)) for what, tensor in tensors)
    ranges = sorted((*_torch.memory_range(base), what) for what, base in bases if base.numel())
    for (storage, _, end, what), (other, begin, _, second) in itertools.pairwise(ranges):
        if storage == other and begin < end:
            raise ValueError(f"{what} and {second} share memory, which {by} writes: expected tensors of their own")


def check_tensors(tree: Tensors, what: str) -> None:
    """Raise TypeError, naming the key, unless this is a mapping of tensors."""
    check_mapping(tree, what)
    for key, x in tree.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = "; an unused parameter has gradient zeros" if x is None else ""
            raise TypeError(f"{what}: '{key}': expected a tensor, got {type(x).__name__}{hint}")


def check_nonnegative(who: str, **values: Any) -> None:
    """Raise ValueError, naming it, for an option below 0, and TypeError for a learning rate that is not a number."""
    for name, value in values.items():
        if name == "lr":
            check_rate(value, f"{who}: lr", optional=False)
        if not value >= 0:
            raise ValueError(f"{who}: {name}: expected at least 0, got {value}")


def is_updated(tensor: Tensor) -> bool:
    """Return whether an optimizer changes the tensor: integers stay as they are."""
    return tensor.is_floating_point() or tensor.is_complex()


def copy_like(template: Tensor, values: Tensor) -> Tensor:
    """Return a copy of the values where ``template`` lives, in pinned memory if that is pinned."""
    return torch.empty_like(template, dtype=values.dtype, pin_memory=_torch.is_pinned(template)).copy_(values)


class QuantizedSlice(NamedTuple):
    """A rank's slice of a unit's state, in the codec of `quantized_state`.

    No block straddles two parameters or two ranks, so a checkpoint has each parameter's bytes, for any mesh and policy.
    """

    codes: Tensor
    """1-D, as long as the slice or, where a code stands for several elements, that much shorter."""
    scales: Tensor
    """One for each block, in the dtype that the slice has when it is decoded."""


torch.serialization.add_safe_globals([QuantizedSlice])


def refuse_encoded(state: Mapping[str, object]) -> None:
    """Raise TypeError, naming the unit, for a slice in a codec where a state in its own dtypes is expected."""
    for key, values in state.items():
        for name, x in values.items() if isinstance(values, Mapping) else ():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(x, QuantizedSlice):
                raise TypeError(
                    f"'{name}' of unit '{key}' is in a codec: expected a state in the optimizer's own dtypes, as "
                    "optim.decode_state(state, codec, spec=spec) returns it; optim.encode_state is its inverse"
                )


def check_trees(params: Tensors, grads: Tensors, state: Mapping[str, object], updated: Iterable[str]) -> None:
    """Raise ValueError or TypeError, naming the unit, unless units have a state and the updated ones gradients like them."""
    check_mapping(params)
    check_mapping(grads, "grads")
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"state: expected a dict by unit key, as init(params) or an update returns, got {type(state).__name__}; that of an "
            "optimizer made of others has this one's inside"
        )
    refuse_encoded(state)
    for what, tree in (("gradient", grads), ("state", state)):
        for key in tree:
            if key not in params:
                raise ValueError(f"unit '{key}' has a {what} and is not in params: expected some of {[*params][:8]}")
    for key in grads:
        if params[key].dtype == torch.uint8:
            raise TypeError(
                f"unit '{key}' is torch.uint8, as is what is frozen and at rest in a codec: expected no gradient of it; set it "
                "apart with fs.partition(params, spec)"
            )
    for key in params:
        if key not in state:
            raise ValueError(f"unit '{key}' has no state: expected that of init(params) or of an update, got {[*state][:8]}")
    for key in updated:
        if key not in grads:
            raise ValueError(f"unit '{key}' has no gradient: expected one for each of the params, got {[*grads][:8]}")
        _check_like(f"the gradient of unit '{key}'", grads[key], params[key])


def check_slots(params: Tensors, state: StateMapping, names: Mapping[str, frozenset[str]], numbers: frozenset[str]) -> None:
    """Raise ValueError or TypeError, naming the unit, unless units have an elementwise state of these names."""
    for key, expected in names.items():
        if frozenset(state[key]) != expected:
            raise ValueError(f"the state of unit '{key}': expected {sorted(expected)}, got {sorted(state[key])}")
        for name, tensor in state[key].items():
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"'{name}' of unit '{key}': expected a tensor, got {type(tensor).__name__}")
            shape = () if name in numbers else params[key].shape
            if tensor.shape != shape:
                raise ValueError(f"'{name}' of unit '{key}': expected shape {list(shape)}, got {list(tensor.shape)}")


def _check_like(what: str, grad: object, param: Tensor) -> None:
    if not isinstance(grad, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(grad).__name__}; an unused parameter has gradient zeros")
    if grad.layout != torch.strided:
        raise ValueError(f"{what}: expected a dense tensor, got {grad.layout}; use grad.to_dense()")
    if (grad.shape, grad.dtype, grad.device) != (param.shape, param.dtype, param.device):
        expected, got = (f"{list(t.shape)} {t.dtype} on {t.device}" for t in (param, grad))
        raise ValueError(f"{what}: expected {expected}, got {got}")


def is_slice(tensor: Tensor, unit: Unit, spec: PartitionSpec) -> bool:
    """Return whether the tensor is as long as this rank's slice of the unit."""
    length, dtype = spec.stored(unit)
    if unit.is_encoded and tensor.dtype == dtype:
        return tensor.shape == (length,)
    return tensor.shape == (spec.shard_numel(unit),)
