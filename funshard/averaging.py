"""Model averaging: means of parameters over ranks, every few steps, and moving averages over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._core.checks import bind_spec
from ._core.layout import Params
from ._core.mesh import Axes, Mesh
from ._core.spec import PartitionSpec
from ._slices.moving_average import is_averaged, update_average
from ._spec.local import check_axes_are_given, distinct_axes
from ._units.accumulation import drop_unweighted
from ._units.buckets import BUCKET_BYTES, Bucket, OpenBuckets
from .collectives._functions import Reduce, all_reduce

__all__ = ["Averaging", "average", "average_buffers", "choose_reduce_axes", "ema", "hierarchical", "init", "periodic"]


class Averaging(NamedTuple):
    """The state of an averaging schedule: a pytree of one scalar, the same on every rank."""

    step: Tensor
    """The number of steps taken: int64, on the CPU, so that no rank waits for a device to read it."""


def init(step: int = 0) -> Averaging:
    """Return the state after some steps.

    Args:
        step: The number of steps, 0 or more (otherwise ValueError).

    Example:
        >>> import torch, funshard as fs
        >>> fs.averaging.init().step
        tensor(0)
    """
    if step < 0:
        raise ValueError(f"averaging.init: expected a step of 0 or more, got {step}")
    return Averaging(torch.tensor(step, dtype=torch.int64))


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
        weight: This rank's number of samples, on all ranks or none. If it is 0 on all of them, they weigh the same.

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
    over = {name: names for name, buffer in buffers.items() if names and is_averaged(buffer)}
    if weight is None:
        return _average_buckets(buffers, over, mesh)
    own = total = torch.as_tensor(weight, dtype=torch.float32, device=mesh.device)
    for name in names:
        total = all_reduce(total, mesh[name], reduce="sum")
    share = torch.where(total > 0, own / total, 1 / math.prod(mesh[name].size for name in names))
    shares = {name: (buffers[name], share.to(buffers[name].device)) for name in over}
    parts = {name: (drop_unweighted(x, s) * s).to(x.dtype) for name, (x, s) in shares.items()}
    return _average_buckets({**buffers, **parts}, over, mesh, reduce="sum")


def periodic(
    params: Mapping[str, Tensor],
    state: Averaging,
    spec: PartitionSpec,
    *,
    period: int,
    warmup_steps: int = 0,
    axes: Axes = None,
) -> tuple[Params, Averaging]:
    """Return ``(the params, averaged if it is time, the state of the next step)``; call it after every update.

    Averages at step ``warmup_steps`` and every ``period``-th one after it, as torch's ``PeriodicModelAverager``. Compiled, it
    is one graph for the steps that average and another for the rest.

    Args:
        params: Shards by unit key, or full tensors by name.
        state: The state.
        spec: The spec of ``params``.
        period: A number of steps, at least 1 (otherwise ValueError).
        warmup_steps: The first step that averages.
        axes: The mesh axes, as for `average`, whose errors it raises at every step.

    Example:
        >>> import torch, funshard as fs
        >>> spec, params = fs.policies.whole()(torch.nn.Linear(2, 1, bias=False)), {"": torch.ones(2)}
        >>> params, state = fs.averaging.periodic(params, fs.averaging.init(), spec, period=4)
        >>> state.step
        tensor(1)
    """
    if period < 1 or warmup_steps < 0:
        raise ValueError(
            f"periodic: expected a period of 1 or more and warmup_steps of 0 or more, got {period} and {warmup_steps}"
        )
    spec = bind_spec(spec)
    over = _averaging_axes(params, spec, axes)
    after = int(state.step) - warmup_steps
    due = after >= 0 and after % period == 0
    return _average_buckets(params, over if due else {}, spec.bound_mesh), Averaging(state.step + 1)


def hierarchical(
    params: Mapping[str, Tensor],
    state: Averaging,
    spec: PartitionSpec,
    *,
    levels: Sequence[tuple[int, Axes]],
    warmup_steps: int = 0,
) -> tuple[Params, Averaging]:
    """Return ``(the params, averaged over more axes less often, the state of the next step)``.

    Call it after every update. As torch's ``HierarchicalModelAverager``: from ``warmup_steps`` on, the last level whose period
    divides the step averages, and no other one. The steps of the warm-up count.

    Args:
        params: Shards by unit key, or full tensors by name.
        state: The state.
        spec: The spec of ``params``.
        levels: Pairs of a period and mesh axes, such as ``[(2, "pair"), (8, ("quad", "pair"))]``: periods grow, and each level
            has all axes of the one before (otherwise ValueError).
        warmup_steps: The first step that may average.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P())(torch.nn.Linear(4, 2)).on({"node": 1, "gpu": 1})
        >>> state, params = fs.averaging.init(3), fs.shard(torch.nn.Linear(4, 2), spec)
        >>> params, state = fs.averaging.hierarchical(params, state, spec, levels=[(2, "gpu"), (8, None)])
        >>> state.step
        tensor(4)
    """
    if not levels or warmup_steps < 0:
        raise ValueError(
            f"hierarchical: expected a level or more and warmup_steps of 0 or more, got {len(levels)} and {warmup_steps}"
        )
    spec = bind_spec(spec)
    last, inner = 0, frozenset[str]()
    for i, (period, axes) in enumerate(levels):
        if period <= last:
            raise ValueError(
                f"hierarchical: level {i}: expected a period above {last}, got {period}; put the shorter ones first"
            )
        names = spec.bound_mesh.select(axes)
        if missing := inner.difference(names):
            raise ValueError(
                f"hierarchical: level {i}: expected axes with all of {sorted(inner)}, got {axes!r}; add {sorted(missing)}"
            )
        last, inner = period, inner.union(names)
    over = [_averaging_axes(params, spec, axes) for _, axes in levels]
    step = int(state.step)
    due = [tensors for (period, _), tensors in zip(levels, over, strict=True) if step >= warmup_steps and step % period == 0]
    return _average_buckets(params, due[-1] if due else {}, spec.bound_mesh), Averaging(state.step + 1)


def choose_reduce_axes(state: Averaging, spec: PartitionSpec, *, start: int, reduce_axes: Axes) -> tuple[str, ...]:
    """Return the mesh axes to reduce this step's gradients over, outermost first.

    With `periodic` from ``warmup_steps=start`` on: post-local SGD (arXiv 1808.07217), torch's ``PostLocalSGDOptimizer``.

    Args:
        state: The state.
        spec: The spec of the gradients.
        start: The number of steps with all axes.
        reduce_axes: The mesh axes after that; ``()`` reduces nothing. A unit split or local over another is a ValueError.

    Example:
        >>> import torch, funshard as fs
        >>> spec = fs.policies.whole(fs.P())(torch.nn.Linear(4, 2)).on({"node": 1, "gpu": 1})
        >>> [fs.averaging.choose_reduce_axes(fs.averaging.init(step), spec, start=10, reduce_axes="gpu") for step in (9, 10)]
        [('node', 'gpu'), ('gpu',)]
    """
    if start < 0:
        raise ValueError(f"choose_reduce_axes: expected a start of 0 or more, got {start}")
    spec = bind_spec(spec)
    chosen = spec.bound_mesh.select(reduce_axes)
    for unit in spec:
        for name in (name for name in unit.distinct_axes if name not in chosen):
            expected = f"expected reduce_axes= with it, got {reduce_axes!r}"
            raise ValueError(f"unit '{unit.key}': ranks over '{name}' have other elements: {expected}")
    step = int(state.step)
    return spec.bound_mesh.names if step < start else chosen


def ema(average: Mapping[str, Tensor], params: Mapping[str, Tensor], *, decay: float | Tensor) -> Params:
    """Return ``decay * average + (1 - decay) * params``, in float32 or the wider dtypes of ``average``, and on its devices.

    Elementwise, without communication, the same bits as ``torch.optim.swa_utils.get_ema_multi_avg_fn``. Tensors that are not
    floating point are those of ``params``. Differentiable: detach parameters that require gradients.

    Args:
        average: Shards by any spec, or full tensors. Start with a copy of the parameters. bfloat16 would round steps away.
        params: The same keys and shapes (otherwise ValueError).
        decay: In 0..1 (otherwise ValueError): a number or a scalar tensor, such as a function of your count of steps.

    Example:
        >>> import torch, funshard as fs
        >>> fs.averaging.ema({"": torch.tensor([0.0, 8.0])}, {"": torch.tensor([4.0, 4.0])}, decay=0.75)
        {'': tensor([1., 7.])}
    """
    wide = {key: x.to(torch.promote_types(x.dtype, torch.float32)) if is_averaged(x) else x for key, x in average.items()}
    return update_average(wide, params, decay)


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
        if is_averaged(tensor):
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
    small: OpenBuckets[tuple[tuple[str, ...], torch.dtype, torch.device]] = OpenBuckets()
    for key in sorted(over):  # in whatever order a rank has them
        x, names = params[key], over[key]
        most = BUCKET_BYTES / x.itemsize
        if x.numel() >= most:
            yield names, Bucket([(key, x)])
        elif full := small.add((names, x.dtype, x.device), key, [x.reshape(-1)], x.numel(), most):
            yield names, full
    for (names, *_), bucket in small.unfilled():
        yield names, bucket
