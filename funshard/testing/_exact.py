"""assert_exact: a model on shards against plain autograd of the same model, on these ranks or on simulated ones."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _torch
from .._batchnorm import MESH, SyncBatchNorm
from .._call.call import functional_call
from .._call.modes import compare_values
from .._call.module_state import calling_thread, own_tensors, restore_modules
from .._core.checks import bind_spec
from .._core.flow import REDUCE_MEAN, count_ranks
from .._core.layout import Params, rank_along, rank_coords
from .._core.mesh import Axis, Mesh, ProcessAxis, has_peers
from .._core.spec import PartitionSpec
from .._core.tree import join_path
from .._sharding.sharding import collect_full_params, combine, hash_params, partition, shard
from .._slices.pieces import param_views
from .._transforms.error_hints import find_running_module
from .._transforms.products import grad_and_value, hvp
from .._wire.route import Route
from ..collectives._agree import check_ranks_agree, find_host_groups, gather_from_ranks, report_to_ranks
from ..collectives._functions import all_reduce
from ._simulated import spmd

# --- Helpers for trees of tensors: find, clone, select and compare, and fix the seed ---


@contextlib.contextmanager
def fixed_seed(seed: int, devices: Iterable[torch.device]) -> Generator[None]:
    """Seed the generators of the CPU and the devices, and restore them afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device's
        for device in devices:
            stack.enter_context(torch.random.fork_rng(devices=[device.index], device_type=device.type))
            module = torch.get_device_module(device.type)
            with module.device(device):
                module.manual_seed(seed)
        yield


def find_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def clone_tensors(tree: Any) -> Any:
    """Return the tree with copies of its tensors, one of each: forward may write to them."""
    copies: dict[int, Tensor] = {}
    return pytree.tree_map_only(Tensor, lambda x: copies.setdefault(id(x), x.clone()), tree)


def select_rank(tree: Any, rank: int) -> Any:
    """Return the tree of one of the ranks that are stacked in dimension 0."""
    return pytree.tree_map_only(Tensor, lambda x: x[rank], tree)


def max_magnitude(x: Tensor) -> float:
    """Return the largest magnitude of finite elements, 0 if there is none."""
    return float(x.detach().abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0


# --- What assert_exact gives the whole model for a plain run, and restores after it: buffers, attributes and parameters ---


def install_buffers(model: nn.Module, buffers: Params, mesh: Mesh) -> None:
    """Give the model these buffers and this mesh, as a call does; use it within `preserve_model`."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SyncBatchNorm):
            vars(module)[MESH] = mesh
        if own := own_tensors(module, "_buffers"):
            vars(module)["_buffers"] = {attr: buffers.get(join_path(path, attr)) for attr in own}


@contextlib.contextmanager
def preserve_model(model: nn.Module, seed: int, devices: Iterable[torch.device]) -> Generator[None]:
    """Seed the generators; after the ``with`` block restore them and the model's attributes and parameters."""
    values = clone_tensors({name: p.detach() for name, p in model.named_parameters()})
    try:
        modules = dict(model.named_modules(remove_duplicate=False))
        with restore_modules(modules, calling_thread()), fixed_seed(seed, devices), torch.enable_grad():
            yield
    finally:
        for name, own in model.named_parameters():
            if not torch.equal(own, values[name]):  # forward wrote to it
                own.data.copy_(values[name])


# --- The model as a function, as assert_exact hands it to a loss ---


@dataclass(frozen=True)
class ModelCall:
    """A model that is called, whole or on shards."""

    run: Callable[..., Any]
    spec: PartitionSpec | None = None
    """The spec of the shards, bound to the rank's mesh; None for the whole model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.run(*args, **kwargs)

    def axis(self, name: str) -> Axis | None:
        """Return an axis of the mesh for the collectives of a local module; None for the whole model.

        Args:
            name: The axis's name.
        """
        return None if self.spec is None else self.spec.axis(name)


Loss = Callable[[ModelCall, Any], Tensor]
"""A function from the model as a function, and a rank's batch, to the rank's loss."""
Order = Literal[1, 2]
"""Which derivatives are compared."""


# --- Forwards that simulated ranks cannot run ---

_BY_VMAP = re.compile(r"vmap|[Bb]atching (?:rule|operators)|functorch|torch\.func\b")
"""torch's words where a function cannot run under its transforms. Pinned by ``test_simulated_ranks_refuse_in_our_words``."""


@contextlib.contextmanager
def explain_vmap(model: nn.Module) -> Generator[None]:
    """Add the module and a remedy to errors of torch.vmap and torch.func raised inside."""
    try:
        yield
    except RuntimeError as error:
        path = find_running_module(error.__traceback__, model)
        where = f"module '{path}'" if path is not None else "the loss"
        # transformers' checkpointing also makes the embedding's output a leaf, which fails before any block runs
        checkpoints = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
        frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
        if checkpoints or "torch.utils.checkpoint" in frames:
            raise RuntimeError(
                f"assert_exact: {where} uses torch.utils.checkpoint, as the gradient checkpointing of transformers does: "
                "expected none inside functional_call, where it would recompute with the module's own parameters; give its "
                "blocks P(remat=True), and switch it off (of transformers: model.gradient_checkpointing_disable())"
            ) from error
        if _BY_VMAP.search(_torch.error_text(error)):
            raise RuntimeError(
                f"assert_exact: simulated ranks run together under torch.vmap, and {where} does what vmap cannot: "
                f"{str(error).strip().splitlines()[0]}; expected a forward without branches on values and without writes "
                "into tensors that the ranks share; compare on real ranks, with an unbound spec (under torchrun, or in one "
                "process), or by model.eval() if only training does it"
            ) from error
        raise


# --- The derivatives of the plain model that assert_exact compares with: by plain autograd, which records what it records ---


def differentiate(value: Tensor, trained: Mapping[str, Tensor], *, create_graph: bool = False) -> Params:
    """Return the gradient of a scalar by name: zeros without a derivative, dense where torch's is sparse."""
    if value.dim():
        raise ValueError(f"assert_exact: expected the loss to be a scalar, got shape {list(value.shape)}; reduce it")
    if not value.requires_grad or not trained:
        return {name: torch.zeros_like(p) for name, p in trained.items()}
    leaves = list(trained.values())
    grads = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True, materialize_grads=True)
    return {name: g.to_dense() if g.is_sparse else g for name, g in zip(trained, grads, strict=True)}


def _inner_product(grads: Params, vector: Params) -> Tensor:
    return torch.stack([(g * vector[name].conj()).real.sum() for name, g in grads.items()] or [torch.zeros(())]).sum()


# --- Both sides of a comparison ---

Key = tuple[str, str]
"""The kind of a tensor, and the name of its parameter or buffer."""

LOSS, GRADIENT, PRODUCT, BUFFER = "loss", "gradient", "Hessian-vector product", "buffer"


class Outcome(NamedTuple):
    """The results of a run: the tensors of each of the case's ranks, and the largest element of each key."""

    ranks: list[dict[Key, Tensor]]
    largest: dict[Key, float]


@dataclass(frozen=True)
class Case:
    """A model, its spec, the batch of this rank, or of all ``simulated`` ranks, and the module of a rank's ``local`` pieces."""

    loss: Loss
    model: nn.Module
    spec: PartitionSpec
    batch: Any
    method: str | None
    simulated: bool
    local: nn.Module | None = None

    @functools.cached_property
    def ranks(self) -> range:
        """The ranks of the mesh, counted row by row, that run in this process."""
        mesh = self.spec.bound_mesh
        if self.simulated:
            return range(count_ranks(mesh.names, mesh))
        here, _ = rank_along(mesh.names, mesh, rank_coords(mesh, None))
        return range(here, here + 1)

    @functools.cached_property
    def full(self) -> dict[str, nn.Parameter]:
        """The model's own parameters that the spec knows, each once."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return {p.name: named[p.name] for unit in self.spec for p in unit.params}

    @functools.cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that have a gradient, in the model's order."""
        names = [name for name, _ in self.model.named_parameters() if name in self.full]
        return {name: self.full[name] for name in names if self.full[name].requires_grad}

    @functools.cached_property
    def buffers(self) -> Params:
        """The model's own buffers, by all of their names."""
        return dict(self.model.named_buffers(remove_duplicate=False))

    @functools.cached_property
    def devices(self) -> set[torch.device]:
        """The devices besides the CPU on which random numbers may be drawn."""
        tensors = [*self.model.parameters(), *self.buffers.values(), *find_tensors(self.batch)]
        return {x.device for x in tensors if x.device.type not in ("cpu", "meta")}

    def make_vector(self, seed: int) -> Params:
        """Return a direction for the Hessian, the same on every rank."""
        draw = torch.Generator().manual_seed(seed)
        shapes = ((name, p, torch.cfloat if p.is_complex() else torch.float) for name, p in self.trained.items())
        return {name: torch.randn(p.shape, generator=draw, dtype=dtype).to(p) for name, p, dtype in shapes}

    def run_plain(self, seed: int, order: Order = 1, *, by_vmap: bool = False) -> Outcome:
        """Run the model itself with plain autograd; derivatives are means over ranks.

        Simulated ranks run one after the other, or together: ``by_vmap``, to draw the numbers that they draw on shards, and
        where the model joins their batches.
        """
        vector = self.make_vector(seed) if order == 2 else None
        runs: list[dict[Key, Tensor]] = []  # the loss and buffers of each rank
        mean: dict[Key, Tensor] = {}
        error: Exception | None = None
        try:
            joins_batches = any(isinstance(module, SyncBatchNorm) and module.training for module in self.model.modules())
            if self.simulated and (by_vmap or joins_batches):
                runs, mean = self._run_stacked(seed, vector)
            else:
                runs, mean = self._run_in_turn(seed, vector)
        except Exception as raised:  # the other ranks hear of it before they wait for this one's gradients
            error = raised
        texts = self.gather_text("" if error is None else f"{type(error).__name__}: {_torch.error_text(error)}")
        if error is not None:
            raise error
        if raised := next(((rank, text) for rank, text in enumerate(texts) if text), None):
            raise AssertionError(f"assert_exact: the plain model raised on rank {raised[0]}: {raised[1]}")
        for _, axis in () if self.simulated else self.spec.bound_mesh.axes:
            mean = {key: all_reduce(x, axis) for key, x in mean.items()}
        largest = {key: max(max_magnitude(own[key]) for own in runs) for key in runs[0]}
        largest |= {key: max_magnitude(x) for key, x in mean.items()}
        return Outcome([self._pieces(mean, rank) | own for rank, own in zip(self.ranks, runs, strict=True)], largest)

    def _pieces(self, full: Mapping[Key, Tensor], rank: int) -> dict[Key, Tensor]:
        out: dict[Key, Tensor] = {}
        for kind in dict.fromkeys(kind for kind, _ in full):
            values = {name: full[kind, name] if name in self.trained else p.detach() for name, p in self.full.items()}
            out |= self._pieces_by_name(kind, shard(values, self.spec, rank=rank), rank)
        return out

    def _pieces_by_name(self, kind: str, shards: Params, rank: int) -> dict[Key, Tensor]:
        """Return the pieces of trained parameters in a rank's shards; frozen units may be missing."""
        others = partition(shard(self.model, self.spec, rank=rank), self.spec)[1]
        pieces = param_views(others | shards, self.spec, rank=rank)
        return {(kind, name): pieces[name] for name in self.trained}

    def _run_in_turn(self, seed: int, vector: Params | None) -> tuple[list[dict[Key, Tensor]], dict[Key, Tensor]]:
        """Run the plain model on each rank, and return the loss and buffers of each, and the mean of their derivatives."""
        runs, derivatives = list[dict[Key, Tensor]](), list[dict[Key, Tensor]]()
        for rank in self.ranks:
            with preserve_model(self.model, seed + rank, self.devices):
                install_buffers(self.model, clone_tensors(self.buffers), self.spec.bound_mesh)
                batch = clone_tensors(select_rank(self.batch, rank) if self.simulated else self.batch)
                value = self.loss(self._call, batch)
                derivatives.append(self._derivatives(value, vector))
                runs.append({key: x.detach() for key, x in self._own_results(value).items()})
        return runs, {key: torch.stack([found[key] for found in derivatives]).mean(0) for key in derivatives[0]}

    def _run_stacked(self, seed: int, vector: Params | None) -> tuple[list[dict[Key, Tensor]], dict[Key, Tensor]]:
        """Do as `_run_in_turn`, with all ranks at once, under vmap."""

        def rank(mesh: Mesh, batch: Any, buffers: Params) -> dict[Key, Tensor]:
            install_buffers(self.model, buffers, mesh)
            return self._own_results(self.loss(self._call, clone_tensors(batch)))

        with preserve_model(self.model, seed, self.devices):
            with explain_vmap(self.model):
                found = spmd(rank, self._sizes)(self.batch, self._stack_buffers(self.buffers))
            derivatives = self._derivatives(found[LOSS, ""].mean(), vector)
        return [{key: x[r].detach() for key, x in found.items()} for r in self.ranks], derivatives

    def _own_results(self, value: Tensor) -> dict[Key, Tensor]:
        now = dict(self.model.named_buffers(remove_duplicate=False))
        return {(LOSS, ""): value} | {(BUFFER, name): now[name] for name in self.buffers if name in now}

    @property
    def _call(self) -> ModelCall:
        return ModelCall(getattr(self.model, self.method or "__call__"))

    def _derivatives(self, value: Tensor, vector: Params | None) -> dict[Key, Tensor]:
        grads = differentiate(value, self.trained, create_graph=vector is not None)
        out = {(GRADIENT, name): g.detach() for name, g in grads.items()}
        if vector is not None:
            product = differentiate(_inner_product(grads, vector), self.trained)
            out |= {(PRODUCT, name): g for name, g in product.items()}
        return out

    def run_sharded(self, seed: int, order: Order, plain: Outcome) -> Outcome:
        """Run `functional_call` on shards. Simulated ranks get their own copies of buffers that the plain run changed."""
        varying = {n: b for n, b in self.buffers.items() if not all(torch.equal(own[BUFFER, n], b) for own in plain.ranks)}
        direction = {name: p.detach() for name, p in self.full.items()} | (self.make_vector(seed) if order == 2 else {})

        def run(fn: Callable[..., Any]) -> list[Any]:
            """Return ``fn(results, trained, spec)`` of each rank, where ``results`` is a function of trained shards."""

            def on_rank(spec: PartitionSpec, batch: Any, own: Params) -> Any:
                trained, frozen = partition(shard(self.model, spec), spec)
                return fn(self._results_on(spec, frozen, batch, own), trained, spec)

            with fixed_seed(seed + (0 if self.simulated else self.ranks[0]), self.devices):
                if not self.simulated:
                    return [on_rank(self.spec, self.batch, varying)]
                simulated = spmd(lambda mesh, *args: on_rank(self.spec.on(mesh), *args), self._sizes)
                with explain_vmap(self.model):
                    out = simulated(self.batch, self._stack_buffers(varying))
                return [select_rank(out, rank) for rank in self.ranks]

        def product(results: Callable[..., Any], trained: Params, spec: PartitionSpec) -> Params:
            return hvp(results, trained, partition(shard(direction, spec), spec)[0], has_aux=True)[0]

        out: list[dict[Key, Tensor]] = []
        gradients = run(lambda results, trained, _: grad_and_value(results, has_aux=True)(trained))
        for rank, (grads, (value, buffers)) in zip(self.ranks, gradients, strict=True):
            own = {(LOSS, ""): value} | {(BUFFER, name): b for name, b in buffers.items()}
            out.append(own | self._pieces_by_name(GRADIENT, grads, rank))
        for rank, found, products in zip(self.ranks, out, run(product), strict=True) if order == 2 else ():
            found |= self._pieces_by_name(PRODUCT, products, rank)
        return Outcome(out, plain.largest)

    def _results_on(
        self, spec: PartitionSpec, frozen: Params, batch: Any, own: Params
    ) -> Callable[[Params], tuple[Tensor, Params]]:
        """Return a function from trained shards to the loss and the buffers after it."""

        def results(trained: Params) -> tuple[Tensor, Params]:
            params, buffers = combine(trained, frozen), clone_tensors(self.buffers | own)
            options: dict[str, Any] = {"spec": spec, "buffers": buffers, "method": self.method}
            run = lambda *args, **kwargs: functional_call(self.local or self.model, params, args, kwargs, **options)  # noqa: E731
            return self.loss(ModelCall(run, spec), clone_tensors(batch)), buffers

        return results

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks of the mesh; simulated ranks share one."""
        groups = [] if self.simulated else find_host_groups(self.spec.bound_mesh)
        return [found for _, found in gather_from_ranks(text, groups)]

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(self.spec.bound_mesh.sizes)

    def _stack_buffers(self, buffers: Params) -> Params:
        copies: dict[int, Tensor] = {}
        return {name: copies.setdefault(id(b), torch.stack([b] * len(self.ranks))) for name, b in buffers.items()}


# --- assert_exact ---

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
