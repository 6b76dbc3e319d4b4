"""Checks of elementwise optimizers: they name the unit, and run before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from ..._core.checks import check_mapping
from ..._spec.precision import check_trainable
from .._checks import StateMapping, check_rate
from .._quantized.slices import refuse_encoded
from .options import OptionRanges

__all__ = ["ELEMENTWISE_CLASSES", "InitialState", "check_arguments", "check_class", "check_fits", "check_options"]
__all__ += ["find_ranges", "is_updated", "refuse_derivatives", "refuse_lost_rates"]


InitialState = Callable[[Tensor], Mapping[str, Tensor]]
"""A function from a vector to its state before the first step."""

ELEMENTWISE_CLASSES: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""The elementwise optimizers of torch.optim. Pinned by ``test_every_optimizer_is_right_or_refused``."""

LR_DIFFERENTIABLE_CLASSES = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""The classes that can differentiate their learning rate as any tensor. Pinned by ``test_derivatives_of_rates``."""


def check_class(cls: object, initial: InitialState | None) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"from_torch: expected a class of optimizers such as torch.optim.AdamW, got {cls!r}")
    of_torch = cls.__module__.startswith("torch.optim")
    if cls not in ELEMENTWISE_CLASSES and (of_torch or initial is None):
        vouch = "" if of_torch else ", or initial= for a class of your own that works element by element"
        raise ValueError(
            f"from_torch: {cls.__name__} is not known to work element by element, and on slices it would be another "
            f"optimizer: expected one of {[c.__name__ for c in ELEMENTWISE_CLASSES]}{vouch}; one that needs whole tensors can "
            "step those of fs.unshard or fs.gather_full"
        )


def is_updated(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def find_ranges(ranges: Mapping[str, OptionRanges] | None, key: str, tensor: object) -> OptionRanges:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"unit '{key}': expected a tensor, got {type(tensor).__name__}")
    if ranges is None:
        return OptionRanges()
    if key not in ranges:
        raise ValueError(f"unit '{key}' is not in the spec: expected some of {[*ranges][:8]}")
    if frozen := ranges[key].frozen_unit:
        check_trainable([frozen], "update")
    if tuple(tensor.shape) != (ranges[key].numel,):
        raise ValueError(
            f"unit '{key}': expected a shard of {ranges[key].numel} elements, got shape {list(tensor.shape)}; "
            "are these params of another spec or another mesh?"
        )
    return ranges[key]


def check_arguments(grads: object, params: object, lr: object) -> None:
    check_mapping(params)
    check_mapping(grads, "grads")
    check_rate(lr, "lr")


def check_options(defaults: Mapping[str, Any], *, donate: bool, device: object) -> None:
    check_rate(defaults.get("lr"), "from_torch: lr")
    if not defaults.get("differentiable"):
        return
    if donate:
        raise ValueError("from_torch: donated memory is written over: expected donate=False with differentiable=True")
    if device is not None:
        raise ValueError(
            "from_torch: copies to a device and back are not recorded: expected device=None with differentiable=True"
        )
    if defaults.get("dampening"):
        raise ValueError("from_torch: with dampening torch cuts the first momentum off: expected differentiable=False")


def check_fits(
    grads: Mapping[str, Tensor],
    state: StateMapping,
    params: Mapping[str, Tensor],
    ranges: Mapping[str, OptionRanges],
    names: Iterable[frozenset[str]],
    scalars: frozenset[str],
) -> None:
    of_group = [*names]
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
        for key in tree if what == "gradient" else ():
            if params[key].dtype == torch.uint8:
                raise TypeError(
                    f"unit '{key}' is torch.uint8, as is what is frozen and at rest in a codec: expected no gradient of it; "
                    "set it apart with fs.partition(params, spec)"
                )
    for key in params:
        if key not in state:
            raise ValueError(f"unit '{key}' has no state: expected that of init(params) or of an update, got {[*state][:8]}")
    for key, unit_ranges in ranges.items():
        param = params[key]
        if key not in grads:
            raise ValueError(f"unit '{key}' has no gradient: expected one for each of the params, got {[*grads][:8]}")
        _check_like(f"the gradient of unit '{key}'", grads[key], param)
        expected = {name for group in unit_ranges.groups for name in of_group[group]}
        if set(state[key]) != expected:
            raise ValueError(f"the state of unit '{key}': expected {sorted(expected)}, got {sorted(state[key])}")
        for name, tensor in state[key].items():
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"'{name}' of unit '{key}': expected a tensor, got {type(tensor).__name__}")
            shape = param.shape if name not in scalars else () if len(unit_ranges.groups) == 1 else (len(unit_ranges.groups),)
            if tensor.shape not in (shape, *([()] if name in scalars else [])):
                raise ValueError(f"'{name}' of unit '{key}': expected shape {list(shape)}, got {list(tensor.shape)}")


def _check_like(what: str, grad: object, param: Tensor) -> None:
    if not isinstance(grad, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(grad).__name__}; an unused parameter has gradient zeros")
    if grad.layout != torch.strided:
        raise ValueError(f"{what}: expected a dense tensor, got {grad.layout}; use grad.to_dense()")
    expected, got = (f"{list(t.shape)} {t.dtype} on {t.device}" for t in (param, grad))
    if expected != got:
        raise ValueError(f"{what}: expected {expected}, got {got}")


def refuse_derivatives(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise RuntimeError if a tensor is tracked: torch's kernels would lose its derivatives silently."""
    for what, tensor in tensors:
        if _torch.is_tracked(tensor):
            raise RuntimeError(
                f"from_torch: {what} takes part in a derivative, which torch's kernels would lose: expected "
                "differentiable=True, or an update under torch.no_grad() or outside of the transform"
            )


def refuse_lost_rates(cls: type[torch.optim.Optimizer], rates: Iterable[tuple[str, Tensor]], *, differentiable: bool) -> None:
    for what, rate in rates:
        if not (_torch.is_wrapped(rate) or _torch.is_tracked(rate)):
            continue
        if not (differentiable and (cls in LR_DIFFERENTIABLE_CLASSES or cls not in ELEMENTWISE_CLASSES)):
            raise RuntimeError(
                f"from_torch: {what} is differentiated or batched, and torch's {cls.__name__} makes a number of it: expected "
                f"differentiable=True and one of {[c.__name__ for c in LR_DIFFERENTIABLE_CLASSES]}"
            )
