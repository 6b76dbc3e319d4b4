"""The update of an elementwise optimizer inside torch.compile: one function that AOTAutograd traces, and Dynamo does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ... import _torch
from ..._core.checks import check_mapping
from ..._spec.unit_state import replace_values
from .._checks import StateMapping, break_message, named_tensors
from .checks import ELEMENTWISE_CLASSES, refuse_derivatives
from .torch_optimizer import ElementwiseConfig, tensor_options

__all__ = ["NumbersAsTensors", "flatten_update", "reason_for_break", "run_in_graph"]


# --- A mode in which torch's optimizers compute with tensors instead of Python numbers, so that a graph can be made of a step
# ---
#
# By themselves they read a count from a tensor (``Tensor.item``), and give its functions to operators as numbers.


class NumbersAsTensors(TorchFunctionMode):
    """A mode in which ``item`` returns a 0-D tensor in float64, and operators take one instead of a Python number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item:
            return args[0].double()
        if func in _torch.PROFILER_OPS:  # the graph would have them
            return ()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x.dim() for x in tensors):
            args = tuple(map(_store_number, args))
            kwargs = {key: _store_number(x) for key, x in kwargs.items()}
        elif len(args) == 2 and len(tensors) == 2 and all(x.is_floating_point() for x in tensors):
            first, second = args  # a Python number takes the dtype of a tensor
            if second.dtype == torch.float64:
                return func(first, second.to(first.dtype), **kwargs)
            if first.dtype == torch.float64 and not func.__name__.endswith("_"):
                return func(first.to(second.dtype), second, **kwargs)
        function, name = _SCALED.get(func, (None, ""))
        if function is not None and isinstance(factor := kwargs.get(name), Tensor):
            wide = torch.promote_types(args[0].dtype, torch.float32)  # the kernels round once, at the end
            tensor, first, *others = (x.to(wide) for x in args)
            new = function(tensor, first * factor, *others)
            return args[0].copy_(new) if func.__name__.endswith("_") else new.to(args[0].dtype)
        return func(*args, **kwargs)


def _store_number(x: Any) -> Any:
    """Return a 0-D tensor in memory: inductor would compute an expression of it for each element again."""
    return x.as_strided((), ()) if isinstance(x, Tensor) and x.dim() == 0 else x


_SCALED: dict[Any, tuple[Callable[..., Tensor], str]] = {
    Tensor.add: (torch.add, "alpha"),
    Tensor.add_: (torch.add, "alpha"),
    Tensor.addcmul_: (torch.addcmul, "value"),
    Tensor.addcdiv_: (torch.addcdiv, "value"),
}
"""The operators by which torch's optimizers apply a factor, the functions without a factor, and its name."""


# --- The update in a graph ---

UpdateFn = Callable[..., tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]]
FlatUpdate = Callable[..., tuple[Tensor, ...]]

BRANCHING_CLASSES = (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop)
"""The classes that branch on values, but with ``capturable=True``, where they select with torch.where.

The others keep ``capturable=False``: there Adam would divide by the learning rate, and 0 / 0 is NaN.
"""


def _as_vector(x: Any) -> Any:
    """Return a 0-D tensor as a vector: with a 0-D number in float64 it would be computed in float64."""
    return x.unsqueeze(0) if isinstance(x, Tensor) and x.dim() == 0 else x


def reason_for_break(config: ElementwiseConfig) -> str:
    """Return why the update cannot be part of a graph, or "" if it can."""
    if config.differentiable:
        why = "differentiable=True records derivatives"
    elif config.cls not in ELEMENTWISE_CLASSES:
        why = "a class of your own may branch on values"
    elif any({**config.defaults, **group}.get("dampening") for group in config.groups):
        why = "SGD with dampening asks whether a step is the first one"
    elif any(
        isinstance(x, Tensor)
        for options in (config.defaults, *config.groups)
        for x in pytree.tree_leaves({name: value for name, value in options.items() if name != "lr"})
    ):
        why = "options, except lr, are tensors"
    elif isinstance(config.lr, Tensor) and any("lr" in group for group in config.groups):
        why = "lr is a tensor, and parameters have their own"
    else:
        return ""
    return break_message(config.cls.__name__, why)


def flatten_update(config: ElementwiseConfig, update: UpdateFn) -> FlatUpdate:
    """Return ``update`` as a function of flat tensors that Dynamo puts into its graph whole.

    Its arguments are the keys of the gradients, of the params, and of the state with its names; the learning rate or None; and
    the tensors: gradients, params, states. It returns params and states.
    """
    is_branching = config.cls in BRANCHING_CLASSES
    cls: Any = config.cls
    kernels: dict[str, Any] = {"foreach": False, "fused": False, "capturable": is_branching}
    options = {name: value for name, value in kernels.items() if name in cls([torch.empty(0)]).defaults}
    if isinstance(config.lr, Tensor):  # an input of the graph; torch compares this one with 0
        options["lr"] = 1.0
    recorded = config._replace(
        defaults={**config.defaults, **options},
        groups=[{name: value for name, value in group.items() if name not in kernels} for group in config.groups],
        donate=False,
        device=None,
        is_recorded=True,
    )

    def flat_update(
        grad_keys: tuple[str, ...],
        keys: tuple[str, ...],
        state_names: tuple[tuple[str, tuple[str, ...]], ...],
        lr: Any,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        given = iter(tensors)
        grads = {key: _as_vector(next(given)) for key in grad_keys}
        params = {key: _as_vector(next(given)) for key in keys}
        state = {
            key: {name: x if name in config.scalars else _as_vector(x) for name, x in zip(names, given, strict=False)}
            for key, names in state_names
        }
        named = [*named_tensors(grads, state, params), *tensor_options(recorded, lr)]
        refuse_derivatives((name, x) for name, x in named if isinstance(x, Tensor))  # pyright: ignore[reportUnnecessaryIsInstance]
        wide = state
        if is_branching:
            numbers = config.scalars
            wide = {k: {n: torch.as_tensor(x).double() if n in numbers else x for n, x in v.items()} for k, v in state.items()}
        with torch.no_grad(), _torch.set_in_graph(is_branching), NumbersAsTensors():
            new_params, new_state = update(recorded, grads, wide, params, lr=lr)
        new = [
            *(new_params[key] for key in keys),
            *(new_state[key][name].to(x.dtype) for key, values in state.items() for name, x in values.items()),
        ]
        return tuple(
            x.squeeze(0) if old.dim() == 0 and x.shape == (1,) else x for x, old in zip(new, tensors[len(grads) :], strict=True)
        )

    return _torch.allow_in_graph(flat_update)


@_torch.allow_in_graph
def _refuse_rate(lr: float) -> None:
    """Raise torch's error for a learning rate, which Dynamo would replace by its own."""
    raise ValueError(f"Invalid learning rate: {lr}")


def run_in_graph(
    config: ElementwiseConfig,
    flat_update: FlatUpdate,
    grads: Mapping[str, Tensor],
    state: StateMapping,
    params: Mapping[str, Tensor],
    lr: float | Tensor | None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the new params and state of the function of `flatten_update`; with ``config.donate``, in the given tensors."""
    check_mapping(params)
    check_mapping(grads, "grads")
    if lr is None and isinstance(config.lr, Tensor):
        lr = config.lr
    if isinstance(lr, float | int):
        if not lr >= 0.0:
            _refuse_rate(float(lr))
        lr = torch.ones((), dtype=torch.float64) * lr
    state_names = tuple((key, tuple(values)) for key, values in state.items())
    given = [*params.values(), *(x for values in state.values() for x in values.values())]
    new: Iterable[Tensor] = flat_update(tuple(grads), tuple(params), state_names, lr, *grads.values(), *given)
    if config.donate:
        new = [_torch.write_into(into, x) if into.shape == x.shape else x for into, x in zip(given, new, strict=True)]
    values = iter(new)
    new_params = {key: next(values) for key in params}
    return new_params, {key: replace_values(old, {name: next(values) for name in old}) for key, old in state.items()}
