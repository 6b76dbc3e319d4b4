"""functional_call inside torch.compile: units are gathered as data flow, and the compiler decides what lives how long."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch
from .._spec.checks import find_full_params
from .._spec.remat import ALL, Remat
from .._spec.spec import PartitionSpec
from .._spec.tree import join_path
from .._transforms._recompute.regions import is_collecting_regions, mark_region
from .._units.flow import gather_unit
from .._units.layout import unflatten_unit
from .buffers import running_statistics, warn_discarded_in_graph, write_back
from .casting import buffer_dtypes, cast_back, cast_floats, cast_params, has_casts, module_overrides, wrap_in_casts
from .entry import CallInputs

__all__ = ["run"]


def run(model: nn.Module, inputs: CallInputs, buffers: dict[str, Tensor] | None, method: str | None) -> Any:
    """Run `functional_call` where torch.compile traces it."""
    spec, params, reduction, check_order = inputs.spec, inputs.params, inputs.reduction, inputs.options.check_order
    _check_casts_inside(spec)  # not on entering the context: Dynamo of torch 2.11 loses the error
    full: dict[str, Tensor] = {}
    for unit in spec:
        if (given := find_full_params(params, unit)) is not None:
            views = cast_params(given, unit)
        else:
            # for fs.compile, which gathers again in backward, and has ranks compare the order of its collectives
            with _torch.annotate_graph(funshard_reshard=unit.p.reshard, funshard_unit=unit.key if check_order else None):
                views = unflatten_unit(gather_unit(params[unit.key], unit, spec.bound_mesh, reduction, unit.p.precision), unit)
        full |= {name: view for param, view in zip(unit.params, views, strict=True) for name in param.names}
    full |= {name: params[name] for name in spec.ignored if name in params}
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():  # each once: two names of one attribute would not be put back right
        tensors |= {name: full[name] for name in (join_path(path, attr) for attr in module._parameters) if name in full}
    before = dict(model.named_buffers()) if buffers is None else buffers
    dtypes = buffer_dtypes(spec)
    moving = tuple(running_statistics(model))
    copies = {x: x.clone() for name, x in before.items() if buffers is None or name in moving}
    now: dict[str, Tensor] = {}
    for name, x in before.items():
        cast = cast_floats(x, dtypes(name.rpartition(".")[0]))
        now[name] = copies[x] if cast is x and x in copies else cast
    tensors |= now
    with _torch.reparametrize(model, tensors), _override_modules(model, spec):
        run = wrap_in_casts(getattr(model, method) if method else model, spec.by_path[""].precision)
        out = _wrap_in_region(run, "", spec)(*inputs.args, **inputs.kwargs)
    if buffers is None:
        warn_discarded_in_graph(tuple(name for name, x in now.items() if name in moving or tensors[name] is not x))
        return out
    for name, x in before.items():
        after = tensors[name]
        if x in copies and after is copies[x]:
            write_back(x, after)
        elif after is not x:
            buffers[name] = cast_back(after, x, now[name])
    return out


def _check_casts_inside(spec: PartitionSpec) -> None:
    for path, p in spec.by_path.items():
        if path and p.precision and has_casts(p.precision) and not _torch.FORWARD_CAN_BE_REPLACED:
            raise NotImplementedError(
                f"unit '{path}' has a Precision: inside torch.compile, torch {torch.__version__} can cast around the whole "
                "model only: expected torch 2.13, or a Precision for whole(P(...)) and for no other unit"
            )


def _recompute_overrides(modules: Mapping[str, nn.Module], spec: PartitionSpec) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the forwards to set in recomputed modules, which make a region of each: module, attribute, value."""
    for path in spec.recomputed if _torch.FORWARD_CAN_BE_REPLACED and is_collecting_regions() else ():
        if path:
            yield modules[path], "forward", _wrap_in_region(modules[path].forward, path, spec)


def _wrap_in_region(forward: Callable[..., Any], path: str, spec: PartitionSpec) -> Callable[..., Any]:
    """Return a module's forward, traced as a region where it is to be recomputed."""
    if path not in spec.recomputed:
        return forward
    remat = spec.by_path[path].remat
    name = f"module '{path}' with P(remat=True)"

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mark_region(remat if isinstance(remat, Remat) else ALL, name):
            return forward(*args, **kwargs)

    return run


@contextlib.contextmanager
def _override_modules(model: nn.Module, spec: PartitionSpec) -> Generator[None]:
    """Set the modules' `module_overrides`, and make regions of recomputed modules; restore all of them afterwards."""
    before: list[tuple[nn.Module, str, Any]] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    for module, name, value in itertools.chain(module_overrides(modules, spec, ""), _recompute_overrides(modules, spec)):
        before.append((module, name, module.__dict__.get(name)))
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in reversed(before):
            if name == "forward":  # delattr would not find it, for Dynamo, as the class has one, too
                module.__dict__.pop(name)
            else:  # before torch 2.13 Dynamo does not know that pop
                delattr(module, name)
            if value is not None:
                setattr(module, name, value)
