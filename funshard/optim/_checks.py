"""What `optim.from_torch` refuses, by name and before anything is changed."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._spec.fits import check_mapping, check_trained
from ._elementwise.options import Layout

__all__ = [
    "ELEMENTWISE",
    "Initial",
    "check_arguments",
    "check_fits",
    "check_options",
    "check_rate",
    "layout_of",
    "moves",
    "named",
    "refuse_derivatives",
    "refuse_lost_rates",
    "refuse_shared_memory",
    "refuse_whole",
]

State = Mapping[str, Mapping[str, Tensor]]

Initial = Callable[[Tensor], Mapping[str, Tensor]]
"""The state that an optimizer begins a vector with."""

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
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
"""Those of torch.optim that work element by element. Pinned by ``test_every_optimizer_is_right_or_refused``."""


RATES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
"""If differentiable, they compute with a learning rate as with any tensor. Pinned by ``test_derivatives_of_rates``."""


def refuse_whole(cls: object, initial: Initial | None) -> None:
    """ValueError, naming it, for an optimizer that is not known to work element by element, TypeError for what is none."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"from_torch: expected a class of optimizers such as torch.optim.AdamW, got {cls!r}")
    of_torch = cls.__module__.startswith("torch.optim")
    if cls not in ELEMENTWISE and (of_torch or initial is None):
        vouch = "" if of_torch else ", or initial= for a class of your own that works element by element"
        raise ValueError(
            f"from_torch: {cls.__name__} is not known to work element by element, and on slices it would be another "
            f"optimizer: expected one of {[c.__name__ for c in ELEMENTWISE]}{vouch}; one that needs whole tensors can step "
            "those of fs.unshard or fs.gather_full"
        )


def moves(tensor: Tensor) -> bool:
    """Whether an optimizer moves it: integers stay as they are."""
    return tensor.is_floating_point() or tensor.is_complex()


def layout_of(layouts: Mapping[str, Layout] | None, key: str, tensor: object) -> Layout:
    """The layout of one unit; ValueError or TypeError, naming it, unless the tensor is a shard of it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"unit '{key}': expected a tensor, got {type(tensor).__name__}")
    if layouts is None:
        return Layout()
    if key not in layouts:
        raise ValueError(f"unit '{key}' is not in the spec: expected some of {[*layouts][:8]}")
    if frozen := layouts[key].at_rest:
        check_trained([frozen], "update")
    if tuple(tensor.shape) != (layouts[key].numel,):
        raise ValueError(
            f"unit '{key}': expected a shard of {layouts[key].numel} elements, got shape {list(tensor.shape)}; "
            "are these params of another spec or another mesh?"
        )
    return layouts[key]


def check_arguments(grads: object, params: object, lr: object) -> None:
    """TypeError unless these are dicts of tensors, and a learning rate or None."""
    check_mapping(params)
    check_mapping(grads, "grads")
    check_rate(lr, "lr")


def check_rate(lr: object, what: str, *, optional: bool = True) -> None:
    """Raise TypeError, which begins with ``what``, unless this is a number, a tensor or, if ``optional``, None."""
    if not isinstance(lr, numbers.Real | Tensor) and not (optional and lr is None):
        raise TypeError(
            f"{what}: expected a number or a tensor of one, got {type(lr).__name__}; a schedule is a function of the step: "
            "give update(..., lr=schedule(step)). torch's schedulers write into a torch optimizer, and here is none"
        )


def check_options(defaults: Mapping[str, Any], *, donate: bool, device: object) -> None:
    """Raise ValueError or TypeError for options of an elementwise optimizer that do not go together, or a bad ``lr``."""
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
    state: State,
    params: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    names: Iterable[frozenset[str]],
    scalars: frozenset[str],
) -> None:
    """ValueError or TypeError, naming the unit, unless there is a gradient and a state for each of the params' units."""
    of_group = [*names]
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
    for key, layout in layouts.items():
        param = params[key]
        if key not in grads:
            raise ValueError(f"unit '{key}' has no gradient: expected one for each of the params, got {[*grads][:8]}")
        _alike(f"the gradient of unit '{key}'", grads[key], param)
        expected = {name for group in layout.groups for name in of_group[group]}
        if set(state[key]) != expected:
            raise ValueError(f"the state of unit '{key}': expected {sorted(expected)}, got {sorted(state[key])}")
        for name, tensor in state[key].items():
            if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"'{name}' of unit '{key}': expected a tensor, got {type(tensor).__name__}")
            shape = param.shape if name not in scalars else () if len(layout.groups) == 1 else (len(layout.groups),)
            if tensor.shape not in (shape, *([()] if name in scalars else [])):
                raise ValueError(f"'{name}' of unit '{key}': expected shape {list(shape)}, got {list(tensor.shape)}")


def _alike(what: str, grad: object, param: Tensor) -> None:
    if not isinstance(grad, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(grad).__name__}; an unused parameter has gradient zeros")
    if grad.layout != torch.strided:
        raise ValueError(f"{what}: expected a dense tensor, got {grad.layout}; use grad.to_dense()")
    expected, got = (f"{list(t.shape)} {t.dtype} on {t.device}" for t in (param, grad))
    if expected != got:
        raise ValueError(f"{what}: expected {expected}, got {got}")


def named(grads: Mapping[str, Tensor], state: State, params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with what to call it in an error."""
    yield from ((f"params['{key}']", tensor) for key, tensor in params.items())
    yield from ((f"grads['{key}']", tensor) for key, tensor in grads.items())
    yield from ((f"state['{key}']['{name}']", t) for key, values in state.items() for name, t in values.items())


def refuse_derivatives(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """RuntimeError where something would be differentiated through the update: torch's kernels lose that silently."""
    for what, tensor in tensors:
        if _torch.is_tracked(tensor):
            raise RuntimeError(
                f"from_torch: {what} takes part in a derivative, which torch's kernels would lose: expected "
                "differentiable=True, or an update under torch.no_grad() or outside of the transform"
            )


def refuse_lost_rates(cls: type[torch.optim.Optimizer], rates: Iterable[tuple[str, Tensor]], *, differentiable: bool) -> None:
    """RuntimeError for a learning rate that is differentiated or batched where torch makes a number of it, without a word."""
    for what, rate in rates:
        if not (_torch.is_wrapped(rate) or _torch.is_tracked(rate)):
            continue
        kept = cls in RATES or cls not in ELEMENTWISE or (cls is torch.optim.SGD and rate.requires_grad)
        if not (differentiable and kept):
            raise RuntimeError(
                f"from_torch: {what} is differentiated or batched, and torch's {cls.__name__} makes a number of it: expected "
                f"differentiable=True and one of {[c.__name__ for c in RATES]} (of torch.optim.SGD for reverse mode alone)"
            )


def refuse_shared_memory(tensors: Iterable[tuple[str, Tensor]], by: str = "donate=True") -> None:
    """ValueError where two of the tensors overlap in memory that is to be written."""
    spans = sorted(
        (_torch.storage_id(base), base.storage_offset() * base.itemsize, _span(base) * base.itemsize, what)
        for what, base in ((what, _torch.unwrap(tensor)) for what, tensor in tensors)
        if base.numel()
    )
    for (storage, start, length, what), (other, begin, _, second) in itertools.pairwise(spans):
        if storage == other and begin < start + length:
            raise ValueError(f"{what} and {second} share memory, which {by} writes: expected tensors of their own")


def _span(tensor: Tensor) -> int:
    """The number of elements from its first one in memory to its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
