"""torch's elementwise optimizers as pure functions over dicts of shards, also of shards that live on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import _torch
from ..._core.checks import check_mapping
from ..._core.layout import Params
from ..._core.spec import PartitionSpec
from ..._spec.unit_state import UnitState, replace_values
from ..._torch.phases import phase
from .._checks import StateMapping, Tensors, check_rate, named_tensors, refuse_pickle, refuse_shared_memory, same_pair
from .options import (
    ParamOptions,
    SharedOptions,
    expand_numbers,
    fill_padding,
    join_ranges,
    option_ranges,
    padding_masks,
    refuse_without_spec,
    scatter_range,
    split_axes,
    split_by_options,
    state_of_range,
)
from .torch_optimizer import (
    ElementwiseConfig,
    InitialState,
    NumbersAsTensors,
    add_eps_root,
    build_optimizer,
    check_class,
    check_fits,
    check_options,
    find_ranges,
    flatten_update,
    init_vector_state,
    is_updated,
    reason_for_break,
    refuse_derivatives,
    refuse_lost_rates,
    run_in_graph,
    state_to_step,
    tensor_options,
    warn_zero_gradients,
    write_state,
)

__all__ = ["Optimizer", "State", "copy_like", "elementwise"]


State = dict[str, dict[str, Tensor]]
"""By unit key, then by torch's name: slices like the shard, and numbers. The structure never changes."""


class Update(Protocol):
    """``update(grads, state, params, lr=None) -> (new params, new state)``."""

    def __call__(
        self, grads: Tensors, state: StateMapping, params: Tensors, *, lr: float | Tensor | None = None
    ) -> tuple[Params, State]:
        """Run one step, with ``lr`` instead of the learning rate that `from_torch` was given."""
        ...


class Optimizer(NamedTuple):
    """A pair of pure functions; it holds no state itself."""

    init: Callable[[Mapping[str, Tensor]], State]
    """Returns the state before the first step, sharded like the params."""
    update: Update

    __reduce__ = refuse_pickle
    __copy__ = __deepcopy__ = same_pair


def elementwise(
    optimizer_class: type[torch.optim.Optimizer],
    *,
    spec: PartitionSpec | None = None,
    options: ParamOptions | None = None,
    rank: int | None = None,
    initial: InitialState | None = None,
    donate: bool = False,
    device: torch.device | str | None = None,
    derived_by: PartitionSpec | None = None,
    **defaults: Any,
) -> Optimizer:
    """Return `from_torch` for an elementwise class; ``derived_by`` is the spec for derivatives where there is no ``spec``."""
    check_class(optimizer_class, initial)
    optimizer_class = add_eps_root(optimizer_class, defaults)
    check_options(defaults, donate=donate, device=device)
    lr = optimizer_class([torch.empty(0)], **defaults).defaults.get("lr")

    def check(name: str, overrides: Mapping[str, Any]) -> None:
        try:
            check_rate(overrides.get("lr"), "lr")
            optimizer_class([torch.empty(0)], **{**defaults, **overrides})
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"options of parameter '{name}', {dict(overrides)}: {error}") from error

    if spec is None and options is not None:
        raise ValueError("from_torch: options are those of a spec's parameters: expected spec=, got none")
    no_options: list[Mapping[str, Any]] = [{}]
    groups, ranges = (no_options, None) if spec is None else option_ranges(spec, options, rank, check)
    starts = [init_vector_state(optimizer_class, torch.empty(0), {**defaults, **group}, initial) for group in groups]
    scalars = frozenset(name for start in starts for name, t in start.items() if t.dim() == 0)
    names = [frozenset(start) for start in starts]
    at = None if device is None else torch.empty(0, device=device).device
    config = ElementwiseConfig(
        optimizer_class, defaults, initial, donate, at, groups, ranges, names, scalars, lr, spec or derived_by, rank
    )
    return Optimizer(partial(_init_state, config), _traceable_update(config))


def _traceable_update(config: ElementwiseConfig) -> Update:
    update = partial(_update_in_range, config)
    if reason := reason_for_break(config):
        return _torch.disable_in_graph(reason)(update)
    flat_update = flatten_update(config, _update)

    def update_or_record(
        grads: Tensors, state: StateMapping, params: Tensors, *, lr: float | Tensor | None = None
    ) -> tuple[Params, State]:
        if _torch.is_in_dynamo():
            return run_in_graph(config, flat_update, grads, state, params, lr)
        return update(grads, state, params, lr=lr)

    return update_or_record


def _init_state(config: ElementwiseConfig, params: Tensors) -> State:
    check_mapping(params)
    state: State = {}
    for key, tensor in params.items():
        unit_ranges = find_ranges(config.ranges, key, tensor)
        parts = [
            init_vector_state(config.cls, piece, {**config.defaults, **config.groups[group]}, config.initial)
            for group, piece in split_by_options(tensor.detach(), unit_ranges)
            if is_updated(tensor)
        ]
        values = join_ranges(tensor, unit_ranges, parts, config.scalars) if parts else {}
        if _torch.is_pinned(tensor):  # as what it is kept beside
            values = {name: x if name in config.scalars else copy_like(tensor, x) for name, x in values.items()}
        state[key] = UnitState(values, config.scalars.intersection(values))
    return state


def _update_in_range(config: ElementwiseConfig, *args: Any, **kwargs: Any) -> tuple[Params, State]:
    with phase("update", config.cls.__name__):
        return _update(config, *args, **kwargs)


def _update(
    config: ElementwiseConfig, grads: Tensors, state: StateMapping, params: Tensors, *, lr: float | Tensor | None = None
) -> tuple[Params, State]:
    check_mapping(params)
    check_mapping(grads, "grads")
    check_rate(lr, "lr")
    ranges = {key: find_ranges(config.ranges, key, tensor) for key, tensor in params.items()}
    ranges = {key: unit_ranges for key, unit_ranges in ranges.items() if is_updated(params[key])}
    check_fits(grads, state, params, ranges, config.names, config.scalars)
    is_batched = any(_torch.is_batched(x) for _, x in (*named_tensors(grads, state, params), *tensor_options(config, lr)))
    if is_batched:  # memory that is not batched cannot take results that are
        config = config._replace(donate=False)
    before = state
    state = {key: {name: expand_numbers(t, ranges.get(key)) for name, t in values.items()} for key, values in state.items()}
    refuse_lost_rates(config.cls, tensor_options(config, lr), differentiable=config.differentiable)
    if not config.differentiable:
        refuse_derivatives(named_tensors(grads, state, params))
    elif config.spec is None:
        refuse_without_spec(tensor_options(config, lr), params)
    if config.donate:
        refuse_shared_memory(named_tensors(grads, state, params))
        if any(map(_torch.is_pinned, params.values())):
            _torch.synchronize_copies()  # what a gather may still read
    if config.device is not None and _torch.is_eager():
        streamed_keys = [key for key in ranges if not is_on_device(params[key], config.device)]
        keep = frozenset[str]() if config.defaults.get("fused") or config.defaults.get("capturable") else config.scalars
        step = partial(_update, config._replace(device=None, donate=True), lr=lr)
        new = stream_update(step, (grads, state, params), streamed_keys, config.device, donate=config.donate, keep=keep)
        trees: tuple[Any, ...] = (grads, state, params)
        streamed = {*streamed_keys}
        others = [{key: value for key, value in tree.items() if key not in streamed} for tree in trees]
        more = _update(config._replace(device=None), *others, lr=lr)
        new_state = {**new[1], **more[1]}
        return {key: {**new[0], **more[0]}[key] for key in params}, {
            key: replace_values(values, new_state[key]) for key, values in before.items()
        }

    shared_by = config.spec if config.differentiable else None  # torch's groups are not cut for what nobody differentiates
    shared = SharedOptions(shared_by)

    def make_writable(tensor: Tensor, key: str) -> Tensor:
        if config.donate:
            return tensor
        tensor = tensor if config.differentiable else tensor.detach()
        if key in ranges and tensor.shape == grads[key].shape:  # vmap writes into what has its dimensions
            entered = shared.over_axes(lr, split_axes(shared_by, key))
            written = [x for x in (grads[key], params[key], entered) if isinstance(x, Tensor) and _torch.is_wrapped(x)]
            if written:
                return math.prod((torch.ones_like(x, dtype=tensor.dtype) for x in written), start=tensor)  # and tangents
        return copy_like(tensor, tensor) if _torch.is_pinned(tensor) else tensor.clone()

    masks = padding_masks(shared_by, params, config.rank)
    new_params = {key: make_writable(tensor, key) if key in ranges else tensor for key, tensor in params.items()}
    new_state = {key: {name: make_writable(tensor, key) for name, tensor in values.items()} for key, values in state.items()}
    optimizer = build_optimizer(config, lr)
    for options in optimizer.param_groups if is_batched else ():  # the fused and foreach kernels have no batching rule
        options.update({name: False for name in ("foreach", "fused") if name in options})
    param_groups: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
    stepped: list[tuple[str, int, Tensor, dict[str, Tensor]]] = []
    for key, unit_ranges in ranges.items():
        whole = new_params[key] if config.differentiable else new_params[key].detach()
        cut = zip(
            split_by_options(whole, unit_ranges),
            split_by_options(fill_padding(make_writable(grads[key], key), masks.get(key)), unit_ranges),
            strict=True,
        )
        for at, ((group, piece), (_, grad)) in enumerate(cut):
            given = state_of_range(new_state[key], unit_ranges, at, config.scalars)
            if config.differentiable:  # in place on views autograd refuses under torch.func
                piece, given = piece.clone(), {name: tensor.clone() for name, tensor in given.items()}
                if issubclass(config.cls, torch.optim.Adam):  # torch refuses a tracked count, as all results of a remat are
                    given["step"] = given["step"].detach()
            piece.grad = grad
            axes = split_axes(shared_by, key)
            if (group, axes) not in param_groups:
                options = optimizer.param_groups[group]
                param_groups[group, axes] = {name: shared.over_axes(x, axes) for name, x in options.items()} | {"params": []}
            param_groups[group, axes]["params"].append(piece)
            optimizer.state[piece] = state_to_step(config, given, param_groups[group, axes]["lr"])
            stepped.append((key, at, piece, given))
    optimizer.param_groups = list(param_groups.values())
    if stepped:
        rates = tensor_options(config, lr) if config.cls is torch.optim.SGD else ()  # of which torch would make numbers
        with NumbersAsTensors() if any(_torch.is_wrapped(x) or _torch.has_derivative(x) for _, x in rates) else nullcontext():
            optimizer.step()
    for key, at, piece, given in stepped:
        write_state(config, given, optimizer.state[piece])
        if config.differentiable:
            new_params[key] = scatter_range(new_params[key], piece, ranges[key], at)
            for name, tensor in given.items():
                is_number = name in config.scalars
                new_state[key][name] = scatter_range(new_state[key][name], tensor, ranges[key], at, scalar=is_number)
    if shared_by is not None:
        warn_zero_gradients(config.cls, grads, new_state, masks)
    for key, mask in masks.items():
        new_params[key] = torch.where(mask, params[key], new_params[key])
        kept = {n: torch.where(mask, state[key][n], t) for n, t in new_state[key].items() if n not in config.scalars}
        new_state[key] = {**new_state[key], **kept}
    if config.donate:  # torch 2.13: fused kernels do not count, and autograd would take stale values for fresh ones
        torch.autograd.graph.increment_version([new_params[key] for key in ranges])
        if _torch.is_eager():
            new_params |= {key: _torch.take_storage(new_params[key]) for key in ranges}
            new_state = {key: {n: _torch.take_storage(t) for n, t in values.items()} for key, values in new_state.items()}
    return new_params, {key: replace_values(values, new_state[key]) for key, values in before.items()}


# --- Updates on a device of shards that live on the host: copies of neighbouring units overlap each unit's update ---


StepFn = Callable[[Tensors, StateMapping, Tensors], tuple[Params, dict[str, Params]]]
"""``step(grads, state, params)``, which writes into its arguments."""


def is_on_device(tensor: Tensor, device: torch.device) -> bool:  # tests replace it
    """Return whether the tensor needs no copy."""
    return tensor.device == device


def copy_like(template: Tensor, values: Tensor) -> Tensor:
    """Return a copy of the values where ``template`` lives, in pinned memory if that is pinned."""
    return torch.empty_like(template, dtype=values.dtype, pin_memory=_torch.is_pinned(template)).copy_(values)


class _PendingCopies:
    """Copies of tensors to a device, or back."""

    def __init__(self, tensors: Params, targets: Params) -> None:
        self.tensors, self.targets = tensors, targets
        self._copies = [_torch.AsyncCopy(tensor, targets[name]) for name, tensor in tensors.items()]

    def wait(self) -> Params:
        """Make the current stream wait for the copies, and return their targets."""
        for copy in self._copies:
            copy.wait()
        return self.targets


def stream_update(
    step: StepFn,
    given: tuple[Tensors, StateMapping, Tensors],
    keys: Sequence[str],
    device: torch.device,
    *,
    donate: bool,
    keep: frozenset[str],
) -> tuple[Params, dict[str, Params]]:
    """Run ``step`` on ``(grads, state, params)`` on the device, unit by unit; return the new params and state of these units.

    Results live where the given tensors do, with ``donate`` in their memory. State with names in ``keep`` is not copied.
    """
    grads, state, params = given
    new_params: Params = {}
    new_state: dict[str, Params] = {}

    def start_copy(key: str) -> _PendingCopies:
        values = {"": params[key], **{f".{name}": x for name, x in state[key].items() if name not in keep}, "grad": grads[key]}
        values = {name: x.detach() for name, x in values.items()}
        return _PendingCopies(values, {name: _torch.allocate_like(x, device) for name, x in values.items()})

    arriving = start_copy(keys[0]) if keys else None
    leaving: _PendingCopies | None = None
    for key, after in zip(keys, [*keys[1:], None][: len(keys)], strict=True):
        assert arriving is not None
        on_device = arriving.wait()
        arriving = None if after is None else start_copy(after)
        kept = {name: x if donate else x.clone() for name, x in state[key].items() if name in keep}
        moved = {name.removeprefix("."): x for name, x in on_device.items() if name.startswith(".")}
        stepped, states = step({key: on_device.pop("grad")}, {key: {**moved, **kept}}, {key: on_device[""]})
        if leaving is not None:
            leaving.wait()
        results = {"": stepped[key], **{f".{name}": x for name, x in states[key].items() if name not in keep}}
        targets = {name: params[key].detach() if not name else state[key][name[1:]] for name in results}
        if not donate:
            targets = {name: _torch.allocate_like(x, x.device, beside=device) for name, x in targets.items()}
        leaving = _PendingCopies(results, targets)
        new_params[key] = params[key] if donate else targets[""]
        new_state[key] = {name: targets.get(f".{name}", states[key][name]) for name in state[key]}
    if leaving is not None:
        leaving.wait()
        _torch.synchronize_copies(device)
    return new_params, new_state
