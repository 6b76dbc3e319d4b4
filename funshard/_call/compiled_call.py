"""functional_call inside torch.compile: units are gathered as data flow, and the compiler decides what lives how long."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from .. import _torch
from .._core.checks import find_full_params
from .._core.flow import ReduceBy, Reduction
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._spec.options import RECOMPUTE_ALL, inner_calls, remat_of
from .._transforms._recompute.saved_results import is_collecting_regions, mark_region
from .._wire.flow import unshard_unit, weigh_grad
from .._wire.mixed_layout import cast_views
from .buffers import ReplacedBuffer, replace_buffers, warn_discarded
from .casting import cast_back, cast_params, has_casts, module_overrides, wrap_in_casts
from .module_state import calling_thread, find_modules, restore_modules
from .schedule import CallInputs

_Run = tuple[str, tuple[str, ...], int, int]
"""A module's path, names of its parameters, and the part of its unit's parameters that these are: begin and end."""


def run(
    model: nn.Module,
    inputs: CallInputs,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    buffers: dict[str, Tensor] | None,
    method: str | None,
) -> Any:
    """Run `functional_call` where torch.compile traces it.

    Dynamo takes about a millisecond for each call and each comprehension in here: plain loops over the modules, once.
    """
    spec = inputs.spec
    _check_casts_inside(spec)  # not on entering the context: Dynamo of torch 2.11 loses the error
    tensors = _gather_full_params(inputs)
    modules = find_modules(model, "", {})
    swaps: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
    for path, now in tensors.items():
        if path in modules:
            swaps.append((modules[path]._parameters, now))
    replaced = replace_buffers(modules, buffers or {}, spec)
    for module, attr, _, used, _, _ in replaced.values():
        swaps.append((module._buffers, {attr: used}))
    with (
        _torch.undo_module_writes(model) if _torch.is_in_dynamo() else restore_modules(modules, calling_thread()),
        _swap_tensors(swaps),
        _drop_new_entries(modules),
    ):
        overrides = module_overrides(modules, modules, spec, "", inputs.weight)
        for module, name, value in itertools.chain(overrides, _forward_overrides(modules, spec)):
            setattr(module, name, value)
        run = wrap_in_casts(getattr(model, method) if method else model, spec.by_path[""], "")
        out = _wrap_in_region(run, "", spec)(*args, **kwargs)
        after = {name: x.module._buffers[x.attr] for name, x in replaced.items()}
    _keep_buffers(replaced, after, buffers)
    return out


def _gather_full_params(inputs: CallInputs) -> dict[str, dict[str, Tensor]]:
    """Return the full parameters by the path of each module that has them, and their names there."""
    spec, params, check_order, by = inputs.spec, inputs.params, inputs.check_order, inputs.reduction.by
    over = inputs.reduction.over if inputs.reduction.over is None else tuple(inputs.reduction.over)
    runs = spec._compute_once(_find_runs)
    tensors: dict[str, dict[str, Tensor]] = {}
    for unit in spec:
        if (given := find_full_params(params, unit)) is not None:
            views = cast_params(given, unit)
        else:
            # for fs.compile, which gathers again in backward, and has ranks compare the order of its collectives
            with _torch.annotate_graph(
                funshard_unit=unit.key, funshard_reshard=bool(unit.p.reshard), funshard_check_order=check_order
            ):
                if spec._graph_key:
                    views = _gather_views(params[unit.key], spec._graph_key, unit.key, by, over)
                else:
                    views = _gather_unit_views(params[unit.key], spec, unit, inputs.reduction)
            if inputs.weight is not None:
                views = [weigh_grad(view, inputs.weight) for view in views]
        for path, attrs, begin, end in runs[unit.key]:  # a dict's update costs Dynamo less than a loop over parameters
            tensors.setdefault(path, {}).update(zip(attrs, views[begin:end], strict=True))
    for name in spec.ignored:
        if name in params:
            path, _, attr = name.rpartition(".")
            tensors.setdefault(path, {})[attr] = params[name]
    return tensors


def _find_runs(spec: PartitionSpec) -> dict[str, tuple[_Run, ...]]:
    """Return, for each unit, the runs of its parameters that belong to one module."""
    runs: dict[str, tuple[_Run, ...]] = {}
    for unit in spec:
        found: list[tuple[str, list[str], int]] = []
        for i, param in enumerate(unit.params):
            for name in param.names:
                path, _, attr = name.rpartition(".")
                if found and found[-1][0] == path and found[-1][2] + len(found[-1][1]) == i:
                    found[-1][1].append(attr)
                else:
                    found.append((path, [attr], i))
        runs[unit.key] = tuple((path, tuple(attrs), begin, begin + len(attrs)) for path, attrs, begin in found)
    return runs


def _gather_unit_views(shard: Tensor, spec: PartitionSpec, unit: Unit, reduction: Reduction) -> Sequence[Tensor]:
    return cast_views(unshard_unit(shard, unit, spec.bound_mesh, reduction), unit, shard.dtype)


@_torch.allow_in_graph
def _gather_views(shard: Tensor, graph_key: str, key: str, by: ReduceBy, over: tuple[str, ...] | None) -> tuple[Tensor, ...]:
    """Return the parameters of a unit as views of its gathered buffer, as one node for Dynamo."""
    spec: PartitionSpec = _torch.find_by_graph_key(graph_key)
    return tuple(_gather_unit_views(shard, spec, spec.by_key[key], Reduction.make(by, over)))


def _keep_buffers(
    replaced: Mapping[str, ReplacedBuffer], after: Mapping[str, Tensor | None], buffers: dict[str, Tensor] | None
) -> None:
    lost: list[str] = []
    for name, (_, _, before, used, is_given, moves) in replaced.items():
        now = after[name]
        if buffers is None or name not in buffers:
            if (moves and not is_given) or now is not used:
                lost.append(name)
        elif moves and now is used and used.dtype == before.dtype:
            write_buffer(before, used)
        elif now is not None and now is not before:
            buffers[name] = cast_back(now, before, used)
    if lost:
        warn_discarded(tuple(lost), 2)


@_torch.allow_in_graph
@has_side_effect
def write_buffer(given: Tensor, now: Tensor) -> None:
    """Write a buffer's new values into the given one, inside torch.compile, where torch.func refuses ``add_`` to it.

    Pinned by ``test_buffers_from_outside``.
    """
    _torch.overwrite(given, now)


@contextlib.contextmanager
def _swap_tensors(swaps: Sequence[tuple[dict[str, Any], dict[str, Tensor]]]) -> Generator[None]:
    """Set tensors in modules' own dicts, and restore them afterwards: torch's ``_reparametrize_module`` in fewer frames."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for own, now in swaps:
        before.append((own, own.copy()))
        own.update(now)
    try:
        yield
    finally:
        for own, values in reversed(before):
            own.clear()
            own.update(values)


@contextlib.contextmanager
def _drop_new_entries(modules: Mapping[str, nn.Module]) -> Generator[None]:
    dicts: list[dict[str, Any]] = []
    for module in modules.values():
        dicts.append(module._buffers)
        dicts.append(module._modules)
    names = list(map(tuple, dicts))
    try:
        yield
    finally:
        if list(map(len, dicts)) != list(map(len, names)):
            for own, before in zip(dicts, names, strict=True):
                for name in set(own).difference(before):
                    del own[name]


def _check_casts_inside(spec: PartitionSpec) -> None:
    """Raise NotImplementedError for a unit with casts inside the model, where this torch can trace none."""
    for path, p in () if _torch.FORWARD_CAN_BE_REPLACED else spec.by_path.items():
        if path and has_casts(p):
            raise NotImplementedError(
                f"unit '{path}' has a Precision: inside torch.compile, torch {torch.__version__} can cast around the whole "
                "model only: expected torch 2.13, or a Precision for whole(P(...)) and for no other unit"
            )


def _forward_overrides(modules: Mapping[str, nn.Module], spec: PartitionSpec) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield linear layers that keep symbolic sizes, and the regions of recomputed modules."""
    if not _torch.FORWARD_CAN_BE_REPLACED:
        return
    for module in modules.values() if _torch.has_symbolic_shapes() else ():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in module.__dict__:
            yield module, "forward", _torch.flat_linear(module)
    for path in inner_calls(spec) if is_collecting_regions() else ():
        if path:
            yield modules[path], "forward", _wrap_in_region(modules[path].forward, path, spec)


def _wrap_in_region(forward: Callable[..., Any], path: str, spec: PartitionSpec) -> Callable[..., Any]:
    """Return a module's forward, traced as a region where it is to be recomputed."""
    if path not in inner_calls(spec):
        return forward
    remat = remat_of(spec.by_path[path]) or RECOMPUTE_ALL

    @_torch.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mark_region(remat):
            return forward(*args, **kwargs)

    return run
