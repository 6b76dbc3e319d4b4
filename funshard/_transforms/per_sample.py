"""per_sample_grads: each sample's own gradient, and the clipped and noisy mean of them that is private (DP-SGD)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for as_call_arguments

from .. import _torch
from .._spec.division import Divide, Reduction
from .._spec.fits import check_buffers, check_trained
from .._spec.spec import PartitionSpec, bound
from .._spec.unit import Unit
from .._units.flow import gather_unit, scatter_unit
from .._units.host import start_copy_to_host
from .._units.layout import Params, concat_padded, unflatten_unit
from ..collectives._functions import broadcast, sum_over
from ..collectives._mesh import Simulated
from ._recompute.ambient import AmbientState
from ._recompute.autograd_queries import REGISTER_HOOK, RefusedFunctions
from .error_hints import as_call_arguments
from .grad import grad

__all__ = ["per_sample_grads"]


def per_sample_grads(
    f: Callable[..., Tensor],
    params: Mapping[str, Tensor],
    batch: object,
    *,
    spec: PartitionSpec,
    clip: float | None = None,
    noise: float | None = None,
    generator: torch.Generator | None = None,
    reduce: Divide = "mean",
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Params:
    """The gradient of ``f(params, *sample)`` for each sample of this rank's batch; or their private mean.

    ``f`` is the loss of one sample, with `functional_call` on its first argument. ``batch`` is a tuple of its other
    arguments, or the only one, each tensor with one more dimension, the first. Parameters are gathered outside of vmap,
    so that no sample meets another rank's (``vmap(grad(f))`` on shards is the mean over ranks of their i-th samples'
    gradients).

    Without ``clip``: ``vmap(grad(f), (None, 0))(unshard(params, spec), batch)``, by parameter name, of shape [samples,
    *parameter's]; as much memory as that is.

    With ``clip``: shards, by unit key, of the sum over all samples of all ranks of their gradients, each scaled down to a
    2-norm over all of ``params`` of at most ``clip``; plus, with ``noise``, normal numbers of standard deviation ``noise *
    clip``, the same ones at any number of ranks. ``reduce`` is what all of it is divided by: "mean" for the number of
    samples, "sum" for nothing, or a number. In two passes: one for the norms, which holds the samples' gradients of one
    unit at a time, and one plain gradient of the weighted losses, which is reduced once. Without a graph. Abadi et al.,
    Deep Learning with Differential Privacy, 2016; two passes as in Lee and Kifer, Scaling up Differentially Private Deep
    Learning with Fast Per-Example Gradient Clipping, 2021.

    ``params`` may hold some of the units (`partition`); ``f`` closes over the rest. The noise comes from a seed that rank
    0 draws from ``generator``, or from torch's own, and sends. ``randomness`` and ``chunk_size`` are torch.vmap's: what
    dropout in ``f`` does ("same" or "different" for each sample), and how many samples at once.

    Inside torch.compile, ``noise`` is drawn between two graphs.

    Raises ValueError, before any communication, for params that are no shards of the spec's units, a batch that is empty
    or whose tensors differ in their first dimension, a ``clip`` that is not positive, ``noise`` that is negative or not
    finite or without a finite ``clip``, ``reduce`` without ``clip``, and inside torch.compile for ``clip`` with
    ``randomness``: a graph draws other numbers in the second pass.

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
    spec = bound(spec)
    mesh = spec.bound_mesh
    units = [unit for unit in spec if unit.key in params]
    check_trained(units, "gradient")
    check_buffers(params, spec, {unit.key: spec.shard_numel(unit) for unit in units})
    args, _ = as_call_arguments(batch, None)
    samples = _check_batch(args)
    _check_privacy(clip, noise, reduce, randomness)

    def of_samples(fn: Callable[..., Any], full: Mapping[str, Tensor]) -> Any:
        dims = (None, *(0 for _ in args))
        return torch.vmap(fn, dims, randomness=randomness, chunk_size=chunk_size)(full, *args)

    if clip is None:
        buffers = {unit.key: gather_unit(params[unit.key], unit, mesh) for unit in units}
        return of_samples(torch.func.grad(f), _full(buffers, units))

    params = {unit.key: params[unit.key].detach() for unit in units}
    compiled = torch.compiler.is_compiling()  # where both passes are in one graph, and nothing is drawn
    # drawn and sent before all else, so that the host need not wait for the gradients to know it
    seed = _seed(generator, spec, next(iter(params.values())).device) if noise and params and not compiled else None
    as_before = contextlib.nullcontext() if compiled else AmbientState(pytree.tree_leaves(args)).restored()

    def probed(probes: Mapping[str, Tensor], *sample: Any) -> Tensor:
        return f(_full({key: _probed(buffers[key], probe) for key, probe in probes.items()}, units), *sample)

    buffers = {unit.key: gather_unit(params[unit.key], unit, mesh) for unit in units}
    probes = {unit.key: _zero(params[unit.key]) for unit in units}
    with contextlib.nullcontext() if compiled else RefusedFunctions({REGISTER_HOOK: _HOOK}):
        squares: Mapping[str, Tensor] = of_samples(torch.func.grad(probed), probes)
    buffers.clear()
    norms = torch.stack(list(squares.values())).sum(0).sqrt()
    weights = (clip / (norms + 1e-6)).clamp(max=1)

    def weighted(params: Mapping[str, Tensor]) -> Tensor:
        buffers = {unit.key: gather_unit(params[unit.key], unit, mesh, Reduction("sum")) for unit in units}
        return (of_samples(f, _full(buffers, units)) * weights).sum()

    with as_before:  # dropout as in the first pass
        grads: Params = grad(weighted)(params)
    if noise:
        grads = _noisy(grads, noise * clip, units, spec, generator, seed)
    if reduce == "sum":
        return grads
    total = sum_over(torch.full((), float(samples), device=mesh.device), mesh) if reduce == "mean" else reduce
    return {key: (g / total).to(g.dtype) for key, g in grads.items()}


_HOOK = (
    "per_sample_grads(clip=): a module's forward calls tensor.register_hook, which one of the two passes does not know: "
    "expected an autograd.Function that changes the gradient, or no clip"
)


@_torch.allow_in_graph
def _probed(buffer: Tensor, probe: Tensor) -> Tensor:
    # One node for Dynamo, which would lose the backward, and with it the clipping. As collectives._primitive.
    return _Probe.apply(buffer, probe)


class _Probe(_torch.Function):
    """A unit's buffer; the "gradient" of the probe is the squared norm of the buffer's, which goes no further."""

    @staticmethod
    def forward(buffer: Tensor, probe: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return buffer.view_as(buffer)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtype = inputs[1].dtype  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():  # torch.func would keep every gradient for a second derivative
            return None, torch.linalg.vector_norm(grad, dtype=_wide(grad.dtype)).to(ctx.dtype) ** 2

    @staticmethod
    def vmap(info: Any, in_dims: Any, buffer: Tensor, probe: Tensor) -> tuple[Tensor, int | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return buffer.view_as(buffer), in_dims[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zero(like: Tensor) -> Tensor:
    real = torch.view_as_real(like) if like.is_complex() else like  # Dynamo does not know dtype.to_real
    return real.new_zeros((), dtype=_wide(real.dtype))


def _full(buffers: Mapping[str, Tensor], units: Iterable[Unit]) -> Params:
    """The full parameters by name, as views of these buffers, whose gradients are used up as soon as they are complete."""
    full: Params = {}
    for unit in units:
        views = unflatten_unit(buffers[unit.key], unit)
        if not torch.compiler.is_compiling():  # the compiler decides the order
            _torch.prioritize_backward(views)
        full |= zip((param.name for param in unit.params), views, strict=True)
    return full


@_torch.disable_in_graph("noise is drawn by a generator, which no graph can seed")
def _noisy(
    grads: Mapping[str, Tensor],
    scale: float,
    units: Iterable[Unit],
    spec: PartitionSpec,
    generator: torch.Generator | None,
    seed: Callable[[], Tensor] | None,
) -> Params:
    """The gradients with normal numbers of this standard deviation, the same ones at any number of ranks."""
    mesh = spec.bound_mesh
    device = next(iter(grads.values())).device
    source = torch.Generator(device).manual_seed(int((seed or _seed(generator, spec, device))()))
    out: Params = {}
    for unit in units:
        with _torch.below_transforms():
            drawn = torch.empty(unit.numel, dtype=grads[unit.key].dtype, device=device)
            (torch.view_as_real(drawn) if drawn.is_complex() else drawn).normal_(generator=source)
            whole = concat_padded(drawn.split([param.numel for param in unit.params]), unit, spec.padded_numel(unit))
        out[unit.key] = grads[unit.key] + scale * scatter_unit(whole, unit, mesh)
    return out


def _seed(generator: torch.Generator | None, spec: PartitionSpec, device: torch.device) -> Callable[[], Tensor]:
    """The seed that rank 0 draws and sends."""
    mesh = spec.bound_mesh
    with _torch.below_transforms():
        seed = torch.randint(2**62, (), generator=generator, device=generator.device if generator else None)
        axes = [mesh[name] for name in mesh.names if not isinstance(mesh[name], Simulated)]  # whose ranks are one process
        for axis in axes:
            seed = broadcast(seed.to(device, non_blocking=True), axis)
        return start_copy_to_host(seed)


def _check_batch(args: tuple[object, ...]) -> int:
    """The number of samples."""
    sizes = {
        pytree.keystr(path): len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else None
        for path, leaf in pytree.tree_flatten_with_path(args)[0]
    }
    first = next(iter(sizes.items()), ("", None))
    for path, size in sizes.items():
        if size is None:
            raise ValueError(f"per_sample_grads: batch{path}: expected a tensor with the samples in its first dimension")
        if size != first[1]:
            raise ValueError(f"per_sample_grads: batch{path}: expected {first[1]} samples as in batch{first[0]}, got {size}")
    if not first[1]:
        raise ValueError("per_sample_grads: expected a batch of at least one sample, got none")
    return first[1]


def _check_privacy(clip: float | None, noise: float | None, reduce: Divide, randomness: str) -> None:
    Reduction.of(reduce)
    if clip is None and reduce != "mean":
        raise ValueError(f"per_sample_grads: expected clip with reduce={reduce!r}: without it nothing is reduced")
    if clip is not None and not clip > 0:
        raise ValueError(f"per_sample_grads: expected a positive clip, got {clip}")
    if noise is not None and (clip is None or not 0 <= noise < math.inf):
        raise ValueError(f"per_sample_grads: expected a noise of at least 0, in units of clip, got {noise} with clip={clip}")
    if noise and clip == math.inf:
        raise ValueError(f"per_sample_grads: expected a finite clip, of which noise={noise} is a multiple, got clip={clip}")
    if clip is not None and randomness != "error" and torch.compiler.is_compiling():
        raise ValueError(
            f"per_sample_grads: clip with randomness='{randomness}' inside torch.compile: expected 'error', because a graph "
            "draws other numbers in the second pass; call it outside of the compiled function, or have f draw none"
        )
