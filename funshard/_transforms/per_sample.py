"""per_sample_grads: each sample's own gradient, and the clipped and noisy mean of them that is private (DP-SGD)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # the tree that torch.func itself uses for arguments

from .. import _torch
from .._core.checks import bind_spec, check_buffers
from .._core.division import ReduceBy, Reduction, count_ranks
from .._core.flow import scatter_unit
from .._core.layout import Params, concat_padded, unflatten_unit
from .._core.mesh import Mesh
from .._core.spec import PartitionSpec
from .._core.unit import Unit
from .._spec.codec import check_trainable
from .._wire.flow import apply_unit_options, reduce_unit, unshard_unit
from .._wire.host import start_copy_to_host
from ..collectives._functions import broadcast, sum_over
from ..collectives._world import process_axes


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

    As Abadi et al., Deep Learning with Differential Privacy, 2016. Clipped gradients are added up, and reduced once.

    Args:
        f: The loss of one sample, ``f(params, *sample)``, with `functional_call` on its first argument.
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
        chunk_size: That of torch.vmap: how many samples at once, and with ``clip`` how many have a gradient at once.

    Returns:
        By parameter name, gradients of shape [samples, *parameter's]; with ``clip``, shards by unit key, without a graph.

    Raises:
        ValueError: Before any communication, for params or a batch that do not fit, and local axes of several ranks.

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
    samples = _check_batch(args)
    _check_privacy(clip, noise, reduce)
    if not samples:  # one of zeros stands in, so that all ranks gather and reduce together; nothing of it is used
        args = pytree.tree_map(lambda x: x.new_zeros(1, *x.shape[1:]), args)
    leaves, treedef = pytree.tree_flatten(args)

    def vmap_samples(fn: Callable[..., Any], given: Params, batch: tuple[Any, ...], chunk_size: int | None = None) -> Any:
        dims = (None, *(0 for _ in batch))
        return torch.vmap(fn, dims, randomness=randomness, chunk_size=chunk_size)(given, *batch)

    if clip is None:
        buffers = _gather_buffers(params, units, mesh)
        each = vmap_samples(torch.func.grad(f), _unflatten_units(buffers, units), args, chunk_size)
        return each if samples else {name: grads[:0] for name, grads in each.items()}

    params = {unit.key: params[unit.key].detach() for unit in units}
    # drawn and sent before all else, so that the host need not wait for the gradients to know it
    seed = _draw_seed(generator, spec, next(iter(params.values())).device) if noise and params else None
    buffers = _gather_buffers(params, units, mesh, as_stored=True)

    def loss(buffers: Params, *sample: Any) -> Tensor:
        used = {unit.key: apply_unit_options(buffers[unit.key], unit, mesh) for unit in units}
        return f(_unflatten_units(used, units), *sample)

    sums: Params = {}
    size = chunk_size or max(samples, 1)
    state = torch.get_rng_state() if size < samples and randomness == "same" else None
    for start in range(0, max(samples, 1), size):
        if state is not None:  # as in torch.vmap
            torch.set_rng_state(state)
        chunk = [x.narrow(0, start, min(size, len(x) - start)) for x in leaves]
        grads: Params = vmap_samples(torch.func.grad(loss), buffers, pytree.tree_unflatten(chunk, treedef))
        clipped = _sum_clipped(grads, clip) if samples else {key: torch.zeros_like(g[0]) for key, g in grads.items()}
        sums = {key: sums[key] + g for key, g in clipped.items()} if sums else clipped
        del grads, clipped
    del buffers
    out = {unit.key: _reduce_sum(sums.pop(unit.key), params[unit.key], unit, mesh) for unit in units}
    if seed is not None and noise:
        out = _add_noise(out, noise * clip, units, spec, seed)
    if reduce == "sum":
        return out
    count = torch.full((), float(samples), device=mesh.device)
    total = sum_over(count, mesh).clamp(min=1) if reduce == "mean" else reduce
    return {key: (g / total).to(g.dtype) for key, g in out.items()}


def _sum_clipped(grads: Params, clip: float) -> Params:
    """Return the sum of samples' gradients, [samples, elements] for each unit, scaled to a norm over all units <= ``clip``."""
    wide = {key: torch.promote_types(g.dtype, torch.float32) for key, g in grads.items()}
    norms = torch.stack([torch.linalg.vector_norm(g, dim=1, dtype=wide[key]) for key, g in grads.items()]).norm(dim=0)
    weights = (clip / (norms + 1e-6)).clamp(max=1)
    return {key: weights.to(g.dtype) @ g for key, g in grads.items()}


def _reduce_sum(buffer: Tensor, like: Tensor, unit: Unit, mesh: Mesh) -> Tensor:
    return reduce_unit(buffer, unit, mesh, Reduction("sum"), like.dtype, casts=False, as_stored=True)


def _gather_buffers(params: Mapping[str, Tensor], units: Sequence[Unit], mesh: Mesh, *, as_stored: bool = False) -> Params:
    """Return the buffers of the units; fs.compile frees those with ``P(reshard=True)`` between forward and backward."""
    buffers: Params = {}
    for unit in units:
        with _torch.annotate_graph(funshard_unit=unit.key, funshard_reshard=bool(unit.p.reshard)):
            buffers[unit.key] = unshard_unit(params[unit.key], unit, mesh, casts=False, as_stored=as_stored)
    return buffers


def _unflatten_units(buffers: Params, units: Sequence[Unit]) -> Params:
    """Return the full parameters by name, as views of buffers."""
    pairs = ((unit.params, unflatten_unit(buffers[unit.key], unit)) for unit in units)
    return {param.name: view for params, views in pairs for param, view in zip(params, views, strict=True)}


_IN_GRAPH = (
    "per_sample_grads: noise is drawn by a generator, which no graph can seed: expected fullgraph=False, or no compilation"
)


@_torch.disable_in_graph(_IN_GRAPH)
def _draw_seed(generator: torch.Generator | None, spec: PartitionSpec, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that gives the seed, which rank 0 draws and sends."""
    mesh = spec.bound_mesh
    with _torch.below_transforms():
        seed = torch.randint(2**62, (), generator=generator, device=generator.device if generator else None)
        for axis in process_axes(mesh).values():
            seed = broadcast(seed.to(device, non_blocking=True), axis)
        return start_copy_to_host(seed)


@_torch.disable_in_graph(_IN_GRAPH)
def _add_noise(grads: Params, scale: float, units: Sequence[Unit], spec: PartitionSpec, seed: Callable[[], Tensor]) -> Params:
    """Return gradients with normal numbers of this standard deviation, the same ones at any number of ranks."""
    source = torch.Generator(next(iter(grads.values())).device).manual_seed(int(seed()))
    out: Params = {}
    for unit in units:
        with _torch.below_transforms():
            sizes = [param.numel for param in unit.params]
            drawn = torch.empty(sum(sizes), dtype=grads[unit.key].dtype, device=source.device)
            (torch.view_as_real(drawn) if drawn.is_complex() else drawn).normal_(generator=source)
            buffer = concat_padded(drawn.split(sizes), unit, spec.padded_numel(unit))
        out[unit.key] = grads[unit.key] + scale * scatter_unit(buffer, unit, spec.bound_mesh)
    return out


def _check_batch(args: tuple[object, ...]) -> int:
    """Return the number of samples."""
    leaves = [(f"per_sample_grads: batch{pytree.keystr(path)}", leaf) for path, leaf in pytree.tree_flatten_with_path(args)[0]]
    if not leaves:
        raise ValueError("per_sample_grads: expected a batch of at least one tensor, got none")
    sizes: list[int] = []
    for where, leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise ValueError(f"{where}: expected a tensor with the samples in its first dimension")
        sizes.append(len(leaf))
        if sizes[-1] != sizes[0]:
            raise ValueError(f"{where}: expected {sizes[0]} samples as in the batch's first tensor, got {sizes[-1]}")
    return sizes[0]


def _check_privacy(clip: float | None, noise: float | None, reduce: ReduceBy) -> None:
    Reduction.make(reduce)
    if clip is None and reduce != "mean":
        raise ValueError(f"per_sample_grads: expected clip with reduce={reduce!r}: without it nothing is reduced")
    if clip is not None and not clip > 0:
        raise ValueError(f"per_sample_grads: expected a positive clip, got {clip}")
    if noise is not None and (clip is None or not 0 <= noise < math.inf or (noise and clip == math.inf)):
        raise ValueError(
            f"per_sample_grads: expected a noise of at least 0, in units of a finite clip, got {noise} with clip={clip}"
        )
