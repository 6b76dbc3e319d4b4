"""per_sample_grads: each sample's own gradient, and the clipped and noisy mean of them that is private (DP-SGD)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._core.checks import bind_spec, check_buffers
from .._core.flow import REDUCE_MEAN, ReduceBy, Reduction, count_ranks
from .._core.layout import Params, unflatten_unit
from .._core.mesh import Mesh, Simulated
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._slices.random_slices import random_like
from .._spec.codec import check_trainable
from .._wire.flow import apply_options, unshard_unit, weigh_grad
from ..collectives._functions import broadcast, sum_over
from .ambient import REGISTER_HOOK, RUNNING, AmbientState, ForbiddenFunctions
from .products import find_length, grad


def per_sample_grads(
    f: Callable[..., Tensor],
    params: Mapping[str, Tensor],
    batch: object,
    *,
    spec: PartitionSpec,
    clip: float | None = None,
    noise: float | None = None,
    generator: torch.Generator | None = None,
    reduce: ReduceBy = "mean",
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Params:
    """Return the gradient of the loss of each sample; or with ``clip`` their private mean (DP-SGD).

    Abadi et al., Deep Learning with Differential Privacy, 2016, in two passes: one for the norms, which holds the gradients of
    one unit at a time, and a gradient of the weighted losses, which is reduced once (Lee and Kifer, Scaling up Differentially
    Private Deep Learning with Fast Per-Example Gradient Clipping, 2021).

    Args:
        f: The loss of one sample, ``f(params, *sample)``, with `functional_call` on its first argument. It exchanges nothing
            between ranks, whose samples it would mix.
        params: Shards by unit key, of all units or some (`partition`); ``f`` closes over the others.
        batch: The other arguments of ``f`` as a tuple, or the only one: tensors with the samples in their first dimension. A
            rank may have none.
        spec: The spec of the shards.
        clip: The largest 2-norm over all of ``params`` of a sample's gradient; larger ones are scaled down.
        noise: The standard deviation, in units of ``clip``, of normal numbers to add, the same ones at any number of ranks.
        generator: Where rank 0 draws the seed of the noise, which it sends; torch's own by default.
        reduce: "mean" divides the sum, with the noise, by the number of samples on all ranks (1 if there are none), "sum" by
            nothing, or a number, such as the expected number of samples.
        randomness: That of torch.vmap, for dropout in ``f``.
        chunk_size: That of torch.vmap: how many samples at once.

    Returns:
        Without ``clip``, by parameter name, gradients of shape [samples, *parameter's], which is as much memory. With
        ``clip``, shards by unit key, without a graph.

    Raises:
        ValueError: Before any communication, for params that are no shards of the spec's units, tensors that differ in their
            first dimension, options that do not fit together, local axes of several ranks, and a `SyncBatchNorm` over some.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> spec = fs.policies.whole()(model)
        >>> params = fs.shard({"weight": torch.zeros(1, 2)}, spec)
        >>> def loss(params, x):
        ...     return fs.functional_call(model, params, (x,), spec=spec).sum()
        >>> fs.per_sample_grads(loss, params, (torch.tensor([[1.0, 0.0], [0.0, 2.0]]),), spec=spec)["weight"].tolist()
        [[[1.0, 0.0]], [[0.0, 2.0]]]
    """
    spec = bind_spec(spec)
    mesh = spec.bound_mesh
    for unit in spec:
        if count_ranks(unit.local_axes, mesh) > 1:
            raise ValueError(
                f"per_sample_grads: unit '{unit.key}' is local over {unit.local_axes}, whose ranks compute a sample's gradient "
                "together: expected one rank along each of them, on which parameters are whole, as on a mesh of size 1 there"
            )
    units = [unit for unit in spec if unit.key in params]
    check_trainable(units, "gradient")
    check_buffers(params, spec, {unit.key: spec.shard_numel(unit) for unit in units})
    args = batch if isinstance(batch, tuple) else (batch,)
    samples = find_length("per_sample_grads: batch", args)
    _check_privacy(clip, noise, reduce, randomness)

    if not samples:  # one of zeros stands in, so that all ranks gather and reduce together; nothing of it is used
        args = pytree.tree_map(lambda x: x.new_zeros(1, *x.shape[1:]), args)

    def vmap_samples(fn: Callable[..., Any], full: Mapping[str, Tensor]) -> Any:
        dims = (None, *(0 for _ in args))
        with contextlib.nullcontext() if _torch.is_in_graph() else RUNNING.set(is_per_sample=True):
            return torch.vmap(fn, dims, randomness=randomness, chunk_size=chunk_size)(full, *args)

    if clip is None:
        buffers = _gather_buffers(params, units, mesh)
        each = vmap_samples(torch.func.grad(f), _unflatten_units(buffers, units))
        return each if samples else {name: grads[:0] for name, grads in each.items()}

    params = {unit.key: params[unit.key].detach() for unit in units}
    in_graph = _torch.is_in_graph()  # where both passes are in one graph, and nothing is drawn
    seed = _draw_seed(generator, mesh, next(iter(params.values())).device) if noise and params else 0
    same_random = contextlib.nullcontext() if in_graph else AmbientState(pytree.tree_leaves(args)).restored()

    def probed_loss(probes: Mapping[str, Tensor], *sample: Any) -> Tensor:
        probed = {key: _attach_probe(buffer, probes[key]) for key, buffer in buffers.items()}
        used = {unit.key: apply_options(probed[unit.key], unit, mesh) for unit in units}
        return f(_unflatten_units(used, units), *sample)

    buffers = _gather_buffers(params, units, mesh, as_stored=True)
    probes = {unit.key: _zero_probe(params[unit.key]) for unit in units}
    with contextlib.nullcontext() if in_graph else ForbiddenFunctions({REGISTER_HOOK: _HOOK_MESSAGE}):
        squares: Mapping[str, Tensor] = vmap_samples(torch.func.grad(probed_loss), probes)
    buffers.clear()
    norms = torch.stack([squares[unit.key] for unit in units]).sum(0).sqrt()
    weights = (clip / (norms + 1e-6)).clamp(max=1) if samples else torch.zeros_like(norms)

    def weighted_loss(params: Mapping[str, Tensor]) -> Tensor:
        buffers = _gather_buffers(params, units, mesh, Reduction("sum"))
        if not samples:
            buffers = {key: weigh_grad(buffer, weights.new_zeros(())) for key, buffer in buffers.items()}
        return (vmap_samples(f, _unflatten_units(buffers, units)) * weights).sum()

    with same_random:  # dropout as in the first pass
        grads: Params = grad(weighted_loss)(params)
    if noise:
        drawn = random_like(grads, spec, seed)
        grads = {key: g + noise * clip * drawn[key] for key, g in grads.items()}
    if reduce == "sum":
        return grads
    count = torch.full((), float(samples), device=mesh.device)
    total = sum_over(count, mesh).clamp(min=1) if reduce == "mean" else reduce
    return {key: (g / total).to(g.dtype) for key, g in grads.items()}


_HOOK_MESSAGE = (
    "per_sample_grads(clip=): a module's forward calls tensor.register_hook, which one of the two passes does not know: "
    "expected an autograd.Function that changes the gradient, or no clip"
)


@_torch.allow_in_graph
def _attach_probe(buffer: Tensor, probe: Tensor) -> Tensor:
    """Return the buffer; the probe's gradient is the squared norm of the buffer's gradient."""
    # One node for Dynamo, which would lose the backward, and with it the clipping. As _core.ops.
    return _Probe.apply(buffer, probe)


class _Probe(_torch.Function):
    """The identity of a unit's buffer; the "gradient" of the probe is the squared norm of the buffer's, which ends here."""

    @staticmethod
    def forward(buffer: Tensor, probe: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return buffer.view_as(buffer)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtype = inputs[1].dtype  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():  # torch.func would keep every gradient for a second derivative
            return None, torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)).to(ctx.dtype) ** 2

    @staticmethod
    def vmap(info: Any, in_dims: Any, buffer: Tensor, probe: Tensor) -> tuple[Tensor, int | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return buffer.view_as(buffer), in_dims[0]


def _zero_probe(like: Tensor) -> Tensor:
    real = torch.view_as_real(like) if like.is_complex() else like  # Dynamo does not know dtype.to_real
    return real.new_zeros((), dtype=torch.promote_types(real.dtype, torch.float32))


def _gather_buffers(
    params: Mapping[str, Tensor], units: list[Unit], mesh: Mesh, reduction: Reduction = REDUCE_MEAN, *, as_stored: bool = False
) -> Params:
    """Return the buffers of the units; fs.compile frees those with ``P(reshard=True)`` between forward and backward."""
    buffers: Params = {}
    for unit in units:
        with _torch.annotate_graph(funshard_unit=unit.key, funshard_reshard=bool(unit.p.reshard)):
            buffers[unit.key] = unshard_unit(params[unit.key], unit, mesh, reduction, casts=False, as_stored=as_stored)
    return buffers


def _unflatten_units(buffers: Mapping[str, Tensor], units: Iterable[Unit]) -> Params:
    """Return the full parameters by name, as views of buffers whose backward runs as soon as their gradient is complete."""
    full: Params = {}
    for unit in units:
        views = unflatten_unit(buffers[unit.key], unit)
        if not _torch.is_in_graph():  # the compiler decides the order
            _torch.prioritize_backward(views)
        full |= zip((param.name for param in unit.params), views, strict=True)
    return full


def _draw_seed(generator: torch.Generator | None, mesh: Mesh, device: torch.device) -> Tensor:
    """Return a seed that the first rank draws and sends."""
    with contextlib.nullcontext() if _torch.is_in_graph() else _torch.below_transforms():
        seed = torch.randint(2**62, (), generator=generator, device=generator.device if generator else None)
        seed = seed.to(device, non_blocking=True)
        for axis in (axis for _, axis in mesh.axes if not isinstance(axis, Simulated)):  # whose ranks are one process
            seed = broadcast(seed, axis)
        return seed


def _check_privacy(clip: float | None, noise: float | None, reduce: ReduceBy, randomness: str) -> None:
    Reduction.make(reduce)
    if clip is None and reduce != "mean":
        raise ValueError(f"per_sample_grads: expected clip with reduce={reduce!r}: without it nothing is reduced")
    if clip is not None and not clip > 0:
        raise ValueError(f"per_sample_grads: expected a positive clip, got {clip}")
    if noise is not None and (clip is None or not 0 <= noise < math.inf):
        raise ValueError(f"per_sample_grads: expected a noise of at least 0, in units of clip, got {noise} with clip={clip}")
    if noise and clip == math.inf:
        raise ValueError(f"per_sample_grads: expected a finite clip, of which noise={noise} is a multiple, got clip={clip}")
    if clip is not None and randomness != "error" and _torch.is_in_graph():
        raise ValueError(
            f"per_sample_grads: clip with randomness='{randomness}' inside torch.compile: expected 'error', because a graph "
            "draws other numbers in the second pass; call it outside of the compiled function, or have f draw none"
        )
