"""assert_exact: a model on shards against plain autograd of the same model, on these ranks or on simulated ones."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _torch
from .._call.write_watch import compare_values
from .._core.checks import bind_spec
from .._core.flow import REDUCE_MEAN
from .._core.mesh import ProcessAxis
from .._core.spec import PartitionSpec
from .._sharding.sharding import collect_full_params, hash_params
from .._wire.route import Route
from ..collectives._agree import check_ranks_agree, report_to_ranks
from ..collectives._world import has_peers
from ._side_by_side import BUFFER, GRADIENT, LOSS, PRODUCT, Case, Loss, Order, Outcome

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def assert_exact(
    loss: Loss,
    model: nn.Module,
    spec: PartitionSpec,
    batch: Any,
    *,
    local: nn.Module | None = None,
    order: Order = 1,
    method: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
) -> None:
    """Check that the loss and its derivatives on shards equal those of plain autograd on the whole model.

    Compares each rank's loss, its buffers after forward, and the gradients with the plain ones' mean over ranks. The whole
    model must fit on the device of the batch. Model, buffers and random state are the same afterwards.

    Args:
        loss: ``loss(call, batch)``, a rank's scalar loss; ``call(*args, **kwargs)`` is the model, whole or on shards, and
            ``call.axis(name)`` an axis of the mesh on shards, None for the whole model.
        model: The whole model, with the values to compare at.
        spec: Unbound, or bound to process groups: runs on these ranks. Bound to sizes, ``spec.on({"shard": 4})``: runs on
            simulated ranks (`spmd`).
        batch: Each rank's own; for simulated ranks, tensors have the ranks in dimension 0.
        local: The module of a rank's pieces, where the spec has parameters that are local over axes.
        order: 1; 2 to compare also a Hessian-vector product.
        method: The model's method that ``call`` runs, instead of the model itself.
        seed: For dropout, the same on both sides, and for the vector.
        tolerance: Relative to the largest element of each tensor. By default 1e-9 in float64 (``model.double()`` shows most),
            1e-4 in float32, and more where a `Precision` computes in less; a lossy codec needs one.

    Raises:
        AssertionError: On every rank; it names the first parameter that differs, and by how much. It says if the plain model
            differs from itself when it runs again (an impure forward) or with another seed (a random one), and if the
            rounding of a dtype may explain all.
        ValueError: For another ``order``, a batch that does not fit the simulated mesh, and real ranks that differ.
        RuntimeError: For a forward that simulated ranks (torch.vmap) cannot run, which names the module; for real ranks that
            run different units.

    Example:
        >>> import torch, funshard as fs
        >>> model = torch.nn.Linear(3, 2)
        >>> spec = fs.policies.whole()(model).on({"shard": 4})
        >>> fs.testing.assert_exact(lambda call, x: call(x).pow(2).mean(), model, spec, torch.randn(4, 5, 3), order=2)
    """
    if order not in (1, 2):
        raise ValueError(f"assert_exact: order: expected 1 or 2, got {order!r}")
    case = Case(loss, model, bind_spec(spec), batch, method, _is_bound_to_sizes(spec), local)
    if not case.simulated and has_peers(case.spec.bound_mesh):  # before anything that ranks with other models would wait in
        with report_to_ranks(case.spec, together=True):
            values = hash_params(collect_full_params(model, case.spec), case.spec)
        check_ranks_agree(case.spec, values, hint="call torch.manual_seed with one seed on all ranks before the model is built")
    _check_batch_is_stacked(case)
    tolerance = _choose_tolerance(case.spec) if tolerance is None else tolerance
    once = case.run_plain(seed)
    if difference := _describe_difference(case, case.run_plain(seed), once, tolerance):
        raise AssertionError(
            f"assert_exact: run again with the same seed, the plain model gives another {difference}. Its forward is impure "
            "(it keeps something from call to call, or draws numbers of its own): nothing can be compared with it"
        )
    random = bool(_describe_difference(case, case.run_plain(seed + 1), once, tolerance))
    expected = case.run_plain(seed, order, by_vmap=random) if random or order != 1 else once
    with compare_values():
        got = case.run_sharded(seed, order, once)
    if difference := _describe_difference(case, got, expected, tolerance):
        with _DtypeRecorder() as computed:
            case.run_plain(seed)
        coarse = max(computed.seen, key=_dtype_tolerance, default=torch.float64)
        if _dtype_tolerance(coarse) > tolerance and not _describe_difference(case, got, expected, _dtype_tolerance(coarse)):
            why = (
                f"The plain model computes in {coarse} in part, as losses and norms of transformers do, and no more than its "
                f"rounding need this be: give tolerance={_dtype_tolerance(coarse):.0e}, or a loss without it to see more"
            )
        elif random:
            why = (
                "With another seed the plain model gives other numbers as well: its forward is random, and may have drawn "
                "others on shards; run it without (model.eval(), dropout 0) to see whether anything else is wrong"
            )
        else:
            why = (
                "The plain model gives the same again, and with another seed: its forward is neither impure nor random, and "
                "the sharded run is wrong"
            )
        raise AssertionError(f"assert_exact: on shards, another {difference}. {why}")


def _is_bound_to_sizes(spec: PartitionSpec) -> bool:
    """Return whether the spec is bound to sizes alone; raise ValueError if only some axes have process groups."""
    axes = spec.bound_mesh.axes
    if spec.bound_mesh.is_simulated:
        raise ValueError("assert_exact: expected a spec on sizes, got one on the mesh of spmd; call it outside of spmd")
    grouped = [name for name, axis in axes if isinstance(axis, ProcessAxis) and axis.name]
    alone = [name for name, axis in axes if isinstance(axis, ProcessAxis) and axis.size > 1 and not axis.name]
    if grouped and alone:
        raise ValueError(f"assert_exact: axis '{alone[0]}' has no process group, but '{grouped[0]}' has one; give all or none")
    return bool(alone) or (spec.mesh is not None and not grouped)


def _check_batch_is_stacked(case: Case) -> None:
    if not case.simulated:
        return
    for path, leaf in pytree.tree_flatten_with_path(case.batch)[0]:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != len(case.ranks)):
            sizes = dict(case.spec.bound_mesh.sizes)
            raise ValueError(
                f"assert_exact: batch{pytree.keystr(path)}: expected the {len(case.ranks)} ranks of {sizes} in dimension 0, "
                f"got shape {list(leaf.shape)}; stack the ranks' batches"
            )


def _choose_tolerance(spec: PartitionSpec) -> float:
    routes = [Route.for_unit(unit, spec.bound_mesh, REDUCE_MEAN, unit.dtype) for unit in spec]
    dtypes = {dtype for route in routes for dtype in (route.shard_dtype, *route.dtypes)}
    return max(map(_dtype_tolerance, dtypes), default=0.0)


def _dtype_tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype.to_real(), 0.0) if dtype.is_floating_point or dtype.is_complex else 0.0


class _DtypeRecorder(_torch.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {x.dtype for x in pytree.tree_leaves(out) if isinstance(x, Tensor)}
        return out


def _describe_difference(case: Case, got: Outcome, expected: Outcome, tolerance: float) -> str:
    """Describe the first difference and the largest of any rank; empty without one. The same text on all ranks."""
    floor = max((x for (kind, _), x in expected.largest.items() if kind == GRADIENT), default=0.0) / 100
    apart: list[tuple[float, int, str, str]] = []
    for rank, ours, theirs in zip(case.ranks, got.ranks, expected.ranks, strict=True):
        for key, tensor in theirs.items():
            by = _max_difference(ours[key], tensor)
            if not by <= tolerance * max(expected.largest[key], floor):  # nor for NaN
                apart.append((by, rank, *key))
    every = [found for text in case.gather_text(json.dumps(apart)) for found in json.loads(text)]
    most = {(kind, name): (by, rank) for by, rank, kind, name in sorted(every)}
    if not most:
        return ""
    of_a_kind = {kind: [key for key in expected.largest if key[0] == kind] for kind in (GRADIENT, PRODUCT, LOSS, BUFFER)}
    kind, name = first = next(key for keys in of_a_kind.values() for key in keys if key in most)
    where = f" of '{name}'" if name else ""
    if kind in (GRADIENT, PRODUCT):
        unit = case.spec.by_name[name][0]
        where += f" (unit '{unit.key}', {unit.p})"
    by, rank = most[first]
    count = f"; {sum(key in most for key in of_a_kind[kind])} of {len(of_a_kind[kind])} differ" if name else ""
    return f"{kind}{where}: by {by:.3g} on rank {rank}, where its largest element is {expected.largest[first]:.3g}{count}"


def _max_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two elements: infinite for other shapes, NaN if only one is NaN."""
    if a.shape != b.shape:
        return float("inf")
    a, b = (x.detach().cpu().to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(apart.max()) if apart.numel() else 0.0
