"""Torch's optimizers that work element by element, as a pair of pure functions over dicts of shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ... import _torch
from ..._spec.fits import check_mapping
from ..._spec.spec import PartitionSpec
from ..._units.layout import Params
from .._checks import (
    ELEMENTWISE,
    Initial,
    check_arguments,
    check_fits,
    check_options,
    check_rate,
    layout_of,
    moves,
    named,
    refuse_derivatives,
    refuse_lost_rates,
    refuse_shared_memory,
    refuse_whole,
)
from .derivatives import SharedOptions, padding_masks, refuse_without_spec, split_axes, without_zeros
from .eps_root import adam_with_eps_root, warn_of_zeros
from .options import Layout, Options, for_groups, join, kept_ratio, laid_out, part, pieces, put
from .streaming import is_there, like, streamed

__all__ = ["Optimizer", "State", "begin", "elementwise"]

Tree = TypeVar("Tree")

State = dict[str, dict[str, Tensor]]
"""By unit key, then by torch's name: vectors like the shard, and scalars. The structure never changes."""


class Update(Protocol):
    """``update(grads, state, params, lr=None) -> (new params, new state)``."""

    def __call__(
        self,
        grads: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Tensor]],
        params: Mapping[str, Tensor],
        *,
        lr: float | Tensor | None = None,
    ) -> tuple[Params, State]:
        """One step, with ``lr`` in the place of the one that `from_torch` was given."""
        ...


class Optimizer(NamedTuple):
    """An optimizer that keeps nothing itself."""

    init: Callable[[Mapping[str, Tensor]], State]
    """The state before the first step, sharded like the params."""
    update: Update


class _Plan(NamedTuple):
    """What follows from the arguments of `from_torch` alone."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    initial: Initial | None
    donate: bool
    device: torch.device | None
    groups: list[Mapping[str, Any]]
    layouts: Mapping[str, Layout] | None
    names: list[frozenset[str]]
    """What the state of each group holds."""
    scalars: frozenset[str]
    """What of it are scalars."""
    lr: Any
    spec: PartitionSpec | None
    """By which derivatives know slices from replicas, and padding from elements."""
    rank: int | None

    @property
    def differentiable(self) -> bool:
        return bool(self.defaults.get("differentiable"))


def elementwise(
    optimizer_class: type[torch.optim.Optimizer],
    *,
    spec: PartitionSpec | None = None,
    options: Options | None = None,
    rank: int | None = None,
    initial: Initial | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
    derived_by: PartitionSpec | None = None,
    **defaults: Any,
) -> Optimizer:
    """`from_torch` for optimizers that work element by element; ValueError for one that is not known to.

    ``derived_by`` is the spec of derivatives where there is no ``spec``.
    """
    refuse_whole(optimizer_class, initial)
    optimizer_class = adam_with_eps_root(optimizer_class, defaults)
    check_options(defaults, donate=donate, device=device)
    lr = optimizer_class([torch.empty(0)], **defaults).defaults.get("lr")

    def check(name: str, own: Mapping[str, Any]) -> None:
        try:
            check_rate(own.get("lr"), "lr")
            optimizer_class([torch.empty(0)], **{**defaults, **own})
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"options of parameter '{name}', {dict(own)}: {error}") from error

    if spec is None and options is not None:
        raise ValueError("from_torch: options are those of a spec's parameters: expected spec=, got none")
    no_options: list[Mapping[str, Any]] = [{}]
    groups, layouts = (no_options, None) if spec is None else laid_out(spec, options, rank, check)
    starts = [begin(optimizer_class, torch.empty(0), {**defaults, **group}, initial) for group in groups]
    scalars = frozenset(name for start in starts for name, t in start.items() if t.dim() == 0)
    names = [frozenset(start) for start in starts]
    at = None if device is None else torch.empty(0, device=device).device
    plan = _Plan(optimizer_class, defaults, initial, donate, at, groups, layouts, names, scalars, lr, spec or derived_by, rank)
    return Optimizer(partial(_init, plan), partial(_update, plan))


def begin(
    cls: type[torch.optim.Optimizer], piece: Tensor, options: Mapping[str, Any], initial: Initial | None = None
) -> dict[str, Tensor]:
    """The state that torch makes in the first step; for momentum the zeros that it stands for."""
    if cls not in ELEMENTWISE and initial is not None:
        return dict(initial(piece))
    if cls is torch.optim.SGD:
        buffer = {"momentum_buffer": torch.zeros_like(piece)} if options.get("momentum") else {}
        # The first gradient is not dampened: count, to know which is the first.
        return buffer | ({"step": torch.zeros(())} if buffer and options.get("dampening") else {})
    piece.grad = piece.detach()  # any gradient will do
    optimizer = cls([piece], **options)
    start: Any = optimizer._init_group  # pyright: ignore[reportAttributeAccessIssue]
    start(optimizer.param_groups[0], *([] for _ in list(inspect.signature(start).parameters)[1:]))
    return dict(optimizer.state[piece])


def _init(plan: _Plan, params: Mapping[str, Tensor]) -> State:
    check_mapping(params)
    state: State = {}
    for key, tensor in params.items():
        layout = layout_of(plan.layouts, key, tensor)
        parts = [
            begin(plan.cls, piece, {**plan.defaults, **plan.groups[group]}, plan.initial)
            for group, piece in pieces(tensor.detach(), layout)
            if moves(tensor)
        ]
        state[key] = join(tensor, layout, parts, plan.scalars) if parts else {}
        if _torch.is_pinned(tensor):  # as what it is kept beside
            state[key] = {name: value if name in plan.scalars else like(tensor, value) for name, value in state[key].items()}
    return state


def _update(
    plan: _Plan,
    grads: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
    *,
    lr: float | Tensor | None = None,
) -> tuple[Params, State]:
    check_arguments(grads, params, lr)
    layouts = {key: layout_of(plan.layouts, key, tensor) for key, tensor in params.items()}
    layouts = {key: layout for key, layout in layouts.items() if moves(params[key])}
    check_fits(grads, state, params, layouts, plan.names, plan.scalars)
    state = {key: {name: for_groups(t, layouts.get(key)) for name, t in values.items()} for key, values in state.items()}
    refuse_lost_rates(plan.cls, _rates(plan, lr), differentiable=plan.differentiable)
    if not plan.differentiable:
        refuse_derivatives(named(grads, state, params))
    elif plan.spec is None:
        refuse_without_spec(_rates(plan, lr), params)
    if plan.donate:
        refuse_shared_memory(named(grads, state, params))
        if any(map(_torch.is_pinned, params.values())):
            _torch.synchronize_copies()  # what a gather may still read
    if plan.device is not None and _torch.is_eager():
        away = [key for key in layouts if not is_there(params[key], plan.device)]
        stay = frozenset[str]() if plan.defaults.get("fused") or plan.defaults.get("capturable") else plan.scalars
        step = partial(_update, plan._replace(device=None, donate=True), lr=lr)
        new = streamed(step, (grads, state, params), away, plan.device, donate=plan.donate, stay=stay)
        others = partial(_without, frozenset(away))
        more = _update(plan._replace(device=None), others(grads), others(state), others(params), lr=lr)
        return {key: {**new[0], **more[0]}[key] for key in params}, {key: {**new[1], **more[1]}[key] for key in state}

    shared_by = plan.spec if plan.differentiable else None  # torch's groups are not cut for what nobody differentiates
    shared = SharedOptions(shared_by)

    def own(tensor: Tensor, key: str) -> Tensor:
        if plan.donate:
            return tensor
        tensor = tensor if plan.differentiable else tensor.detach()
        if key in layouts and tensor.shape == grads[key].shape:  # vmap writes into what has its dimensions
            entered = shared.along(lr, split_axes(shared_by, key))
            written = [x for x in (grads[key], entered) if isinstance(x, Tensor) and _torch.is_wrapped(x)]
            if written:
                return sum((torch.zeros_like(x, dtype=tensor.dtype) for x in written), tensor)
        return like(tensor, tensor) if _torch.is_pinned(tensor) else tensor.clone()

    masks = padding_masks(shared_by, params, plan.rank)
    new_params = {key: own(tensor, key) if key in layouts else tensor for key, tensor in params.items()}
    new_state = {key: {name: own(tensor, key) for name, tensor in values.items()} for key, values in state.items()}
    optimizer = _made(plan, lr)
    param_groups: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
    stepped: list[tuple[str, int, Tensor, dict[str, Tensor]]] = []
    for key, layout in layouts.items():
        whole = new_params[key] if plan.differentiable else new_params[key].detach()
        cut = zip(pieces(whole, layout), pieces(without_zeros(own(grads[key], key), masks.get(key)), layout), strict=True)
        for at, ((group, piece), (_, grad)) in enumerate(cut):
            given = part(new_state[key], layout, at, plan.scalars)
            if plan.differentiable:  # in place on views autograd refuses under torch.func
                piece, given = piece.clone(), {name: tensor.clone() for name, tensor in given.items()}
                if issubclass(
                    plan.cls, torch.optim.Adam
                ):  # torch refuses a count that is tracked, as all results of a remat are
                    given["step"] = given["step"].detach()
            piece.grad = grad
            axes = split_axes(shared_by, key)
            if (group, axes) not in param_groups:
                param_groups[group, axes] = _entered(optimizer.param_groups[group], shared, axes)
            param_groups[group, axes]["params"].append(piece)
            first = plan.cls is torch.optim.SGD and "step" in given and bool(given["step"] == 0)
            optimizer.state[piece] = {} if first else dict(given)
            stepped.append((key, at, piece, given))
    optimizer.param_groups = list(param_groups.values())
    if stepped:
        optimizer.step()
    for key, at, piece, given in stepped:
        _settle(plan, given, optimizer.state[piece])
        if plan.differentiable:
            new_params[key] = put(new_params[key], piece, layouts[key], at)
            for name, tensor in given.items():
                new_state[key][name] = put(new_state[key][name], tensor, layouts[key], at, scalar=name in plan.scalars)
    if shared_by is not None:
        warn_of_zeros(plan.cls, grads, new_state, masks)
    for key, mask in masks.items():
        new_params[key] = torch.where(mask, params[key], new_params[key])
        new_state[key] = {n: torch.where(mask, state[key][n], t) if t.dim() else t for n, t in new_state[key].items()}
    if plan.donate:  # torch 2.13: fused kernels do not count, and autograd would take stale values for fresh ones
        torch.autograd.graph.increment_version([new_params[key] for key in layouts])
        if _torch.is_eager():
            new_params |= {key: _torch.take_storage(new_params[key]) for key in layouts}
            new_state = {key: {n: _torch.take_storage(t) for n, t in values.items()} for key, values in new_state.items()}
    return new_params, new_state


def _rates(plan: _Plan, lr: float | Tensor | None) -> list[tuple[str, Tensor]]:
    """The options that are tensors."""
    options = [("lr", lr), *plan.defaults.items(), *(option for group in plan.groups for option in group.items())]
    return [(name, value) for name, value in options if isinstance(value, Tensor)]


def _entered(group: Mapping[str, Any], shared: SharedOptions, axes: tuple[str, ...]) -> dict[str, Any]:
    """One of torch's groups for units that are split over these axes, without parameters."""
    return {name: [] if name == "params" else shared.along(option, axes) for name, option in group.items()}


def _without(keys: frozenset[str], tree: Mapping[str, Tree]) -> dict[str, Tree]:
    return {key: value for key, value in tree.items() if key not in keys}


def _settle(plan: _Plan, given: dict[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Write into the state what torch did not."""
    for name, tensor in after.items():
        if name not in given:
            raise ValueError(f"from_torch: the first step made '{name}': expected initial= to give it, got {[*given]}")
        if tensor is not given[name]:
            given[name].copy_(tensor)
    if plan.cls is torch.optim.SGD and "step" in given:
        given["step"].add_(1)


def _made(plan: _Plan, lr: float | Tensor | None) -> torch.optim.Optimizer:
    """Torch's optimizer with its groups, without parameters."""
    groups = [{"params": [torch.empty(0)], **group} for group in plan.groups]
    batched = isinstance(lr, Tensor) and _torch.is_wrapped(lr)  # torch asks whether it is below 0, and nobody can tell
    optimizer = plan.cls(groups, **(plan.defaults if lr is None or batched else {**plan.defaults, "lr": lr}))
    optimizer.state.clear()
    for group, own in zip(optimizer.param_groups, plan.groups, strict=True):
        group["params"] = []
        if lr is not None and "lr" in own:
            group["lr"] = kept_ratio(lr, own["lr"], plan.lr, "from_torch: ")
        elif batched:
            group["lr"] = lr
    return optimizer
