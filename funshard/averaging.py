"""Model averaging: means of parameters over ranks, at once or every few steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._core.checks import bind_spec
from ._core.layout import Params
from ._core.mesh import Axes, Mesh
from ._core.spec import PartitionSpec
from ._gone import raise_gone
from ._slices.values import is_inexact
from ._spec.local import check_axes_are_given, distinct_axes
from ._wire.accumulation import drop_unweighted
from ._wire.reductions import BUCKET_BYTES, Bucket
from .collectives._functions import Reduce, all_reduce

__all__ = ["average", "average_buffers", "periodic"]

__getattr__ = raise_gone(__name__)


class Averaging(NamedTuple):
    """The state of `periodic`: a pytree of one scalar, the same on every rank."""

    step: Tensor  # the number of steps taken: int64, on the CPU, so that no rank waits for a device to read it


def average(params: Mapping[str, Tensor], spec: PartitionSpec, *, axes: Axes = None) -> Params:
    """Return the mean of every tensor over ranks, in its own dtype. Differentiable at every order.

    One all-reduce for each axis of every tensor from 4 MiB on, without a copy, and of the smaller ones of a dtype together
    (``average_parameters`` of torch.distributed.algorithms.model_averaging copies all into one buffer). Tensors that are not
    floating point, and ignored parameters, stay.

    Args:
        params: Shards by unit key, or full tensors by parameter name; some or all, the same ones on every rank.
        spec: Their spec.
        axes: The mesh axes to average over. By default those over which ranks have the same elements: none with FSDP, whose
            slices cannot drift apart, the replicas' with HSDP, every one for a full tensor. Any other is a ValueError.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P())(torch.nn.Linear(4, 2, bias=False))
        >>> def averaged(mesh, w):
        ...     return fs.averaging.average({"": w}, spec.on(mesh))[""]
        >>> fs.testing.spmd(averaged, 2)(torch.tensor([[1.0] * 8, [3.0] * 8]))[0]
        tensor([2., 2., 2., 2., 2., 2., 2., 2.])
    """
    spec = bind_spec(spec)
    return _average_buckets(params, _averaging_axes(params, spec, axes), spec.bound_mesh)


def average_buffers(
    buffers: Mapping[str, Tensor], spec: PartitionSpec, *, axes: Axes = None, weight: float | Tensor | None = None
) -> Params:
    """Return the mean over ranks of every floating point buffer, and the others as they are.

    The mean of running variances leaves out the differences between ranks' means; `SyncBatchNorm` includes them.

    Args:
        buffers: The model's buffers by name, or some of them, the same ones on every rank.
        spec: The model's spec.
        axes: Mesh axes, all by default; in a model with local axes they must be given (otherwise ValueError).
        weight: This rank's number of samples, on all ranks or none. If it is 0 on all of them, they weigh the same; one that is
            negative or not finite makes the means of all NaN.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.BatchNorm1d(2)
        >>> list(fs.averaging.average_buffers(dict(model.named_buffers()), fs.policies.whole()(model)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    spec = bind_spec(spec)
    check_axes_are_given(axes, spec, "average_buffers")
    mesh = spec.bound_mesh
    chosen = mesh.select(axes)
    names = tuple(name for name, axis in mesh.axes if name in chosen and axis.size > 1)
    over = {name: names for name, buffer in buffers.items() if names and is_inexact(buffer)}
    if weight is None:
        return _average_buckets(buffers, over, mesh)
    own = torch.as_tensor(weight, dtype=torch.float32, device=mesh.device)
    own = total = torch.where((own >= 0) & own.isfinite(), own, torch.nan)
    for name in names:
        total = all_reduce(total, mesh[name], reduce="sum")
    share = torch.where(total == 0, 1 / math.prod(mesh[name].size for name in names), own / total)
    shares = {name: (buffers[name], share.to(buffers[name].device)) for name in over}
    parts = {name: (drop_unweighted(x, s) * s).to(x.dtype) for name, (x, s) in shares.items()}
    return _average_buckets({**buffers, **parts}, over, mesh, reduce="sum")


def periodic(
    spec: PartitionSpec, period: int | Sequence[tuple[int, Axes]], *, axes: Axes = None, warmup_steps: int = 0
) -> tuple[Callable[..., Averaging], Callable[..., tuple[Params, Averaging]]]:
    """Return the pair ``(init, update)`` that averages parameters every few steps, or over more axes less often.

    Call ``update(params, state)`` after every update of the parameters. A number averages at step ``warmup_steps`` and every
    ``period``-th one after it, as torch's ``PeriodicModelAverager``. Of several levels, the last one whose period divides the
    step averages, from ``warmup_steps`` on, as in ``HierarchicalModelAverager``. Compiled, it is one graph for the steps that
    average and another for the rest.

    Args:
        spec: The spec of the parameters, shards by unit key or full tensors by name.
        period: A number of steps, at least 1. Or levels, pairs of a period and mesh axes, such as
            ``[(2, "pair"), (8, ("quad", "pair"))]``: periods grow, and each level has all axes of the one before.
        axes: The mesh axes of a single period, as for `average`, whose errors every step raises.
        warmup_steps: The first step that may average.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P())(torch.nn.Linear(4, 2)).on({"node": 1, "gpu": 1})
        >>> init, update = fs.averaging.periodic(spec, [(2, "gpu"), (8, None)], warmup_steps=100)
        >>> params, state = fs.shard(torch.nn.Linear(4, 2), spec), init()
        >>> params, state = update(params, state)
        >>> state.step
        tensor(1)
    """
    levels = [(period, axes)] if isinstance(period, int) else list(period)
    offset = warmup_steps if isinstance(period, int) else 0
    if not levels or warmup_steps < 0:
        raise ValueError(
            f"periodic: expected a level or more and warmup_steps of 0 or more, got {len(levels)} and {warmup_steps}"
        )
    spec = bind_spec(spec)
    last, inner = 0, frozenset[str]()
    for i, (each, axes) in enumerate(levels):
        if each <= last:
            raise ValueError(f"periodic: level {i}: expected a period above {last}, got {each}; put the shorter ones first")
        names = spec.bound_mesh.select(axes)
        if missing := inner.difference(names):
            raise ValueError(
                f"periodic: level {i}: expected axes with all of {sorted(inner)}, got {axes!r}; add {sorted(missing)}"
            )
        last, inner = each, inner.union(names)

    def update(params: Mapping[str, Tensor], state: Averaging) -> tuple[Params, Averaging]:
        over = [_averaging_axes(params, spec, axes) for _, axes in levels]
        step = int(state.step)
        due = [over[i] for i, (each, _) in enumerate(levels) if step >= warmup_steps and (step - offset) % each == 0]
        return _average_buckets(params, due[-1] if due else {}, spec.bound_mesh), Averaging(state.step + 1)

    return lambda params=None: Averaging(torch.tensor(0, dtype=torch.int64)), update


def _averaging_axes(params: Mapping[str, Tensor], spec: PartitionSpec, axes: Axes) -> dict[str, tuple[str, ...]]:
    """Return the mesh axes to average over, by key, for tensors that are averaged."""
    mesh = spec.bound_mesh
    chosen, sizes = mesh.select(axes), dict(mesh.sizes)
    out: dict[str, tuple[str, ...]] = {}
    for key, tensor in params.items():
        if key in spec.ignored:
            continue
        split = distinct_axes(spec.owner(key), tensor, sizes)
        if axes is not None and (both := [name for name in chosen if name in split]):
            what = "unit" if key in spec.by_key else "parameter"
            why = f"{what} '{key}' is split over '{both[0]}', where each rank has other elements"
            raise ValueError(f"{why}: expected axes without it, got {axes!r}")
        if is_inexact(tensor):
            out[key] = tuple(name for name, axis in mesh.axes if name in chosen and name not in split and axis.size > 1)
    return {key: names for key, names in out.items() if names}


def _average_buckets(
    params: Mapping[str, Tensor], over: Mapping[str, tuple[str, ...]], mesh: Mesh, reduce: Reduce = "mean"
) -> Params:
    out = dict(params)
    for names, bucket in _to_buckets(params, over):
        first = bucket.concat()
        on_host = first.device.type == "cpu" and mesh.device_type not in (None, "cpu")  # as P(offload="params") has shards
        mean = first.to(mesh.device) if on_host else first
        for name in names:
            axis = mesh[name]
            if reduce == "mean" and mean.dtype == torch.float16:  # whose sum overflows where its mean does not
                mean = all_reduce(mean / axis.size, axis, reduce="sum")
            else:
                mean = all_reduce(mean, axis, reduce=reduce)
        mean = mean.to(first.device)
        for key, part in bucket.split(mean):
            out[key] = part.view(params[key].shape) if part is mean else part.view(params[key].shape).clone()
    return out


def _to_buckets(params: Mapping[str, Tensor], over: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], Bucket]]:
    """Yield the buckets to reduce and their axes: a large tensor alone, small ones by axes, dtype and device."""
    small: dict[tuple[tuple[str, ...], torch.dtype, torch.device], Bucket] = {}
    for key in sorted(over):  # in whatever order a rank has them
        x, names = params[key], over[key]
        kind, most = (names, x.dtype, x.device), BUCKET_BYTES / x.itemsize
        if x.numel() >= most:
            yield names, Bucket([(key, x)])
            continue
        small.setdefault(kind, Bucket()).add(key, [x.reshape(-1)], x.numel())
        if small[kind].numel >= most:
            yield names, small.pop(kind)
    for (names, *_), bucket in small.items():
        yield names, bucket
