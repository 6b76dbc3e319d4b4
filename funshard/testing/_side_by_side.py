"""The two runs that assert_exact compares: a model as it is, and on shards, with the results of each rank."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _torch
from .._batchnorm import SyncBatchNorm
from .._call.call import functional_call
from .._sharding.agree import gather_texts
from .._sharding.sharding import combine, partition, shard
from .._spec.spec import PartitionSpec
from .._transforms.grad import grad_and_value
from .._transforms.products import ggnvp, hvp
from .._units.layout import Params, param_views, rank_coords
from ..collectives._functions import all_reduce
from ..collectives._mesh import Mesh
from ._derivatives import differentiate, multiply_ggn, multiply_hessian, multiply_loss_hessian
from ._model_call import Convex, Loss, ModelCall, Order
from ._model_state import find_buffers, find_modules_by_path, install_buffers, preserve_model
from ._refusals import check_same_units, explain_vmap, record_units
from ._simulated import spmd
from ._values import clone_tensors, find_tensors, fixed_seed, is_equal, max_magnitude, select_rank

__all__ = ["BUFFER", "GRADIENT", "LOSS", "PRODUCTS", "Case", "Key", "Outcome"]

Key = tuple[str, str]
"""The kind of a tensor, and the name of its parameter or buffer."""

LOSS, GRADIENT, BUFFER = "loss", "gradient", "buffer"
PRODUCTS: dict[Order, str] = {2: "Hessian-vector product", "ggn": "Gauss-Newton product"}
"""The kind of product that an order compares."""


class Outcome(NamedTuple):
    """The results of a run: the tensors of each of the case's ranks, and the largest element of each key."""

    ranks: list[dict[Key, Tensor]]
    largest: dict[Key, float]


class _PlainRun(NamedTuple):
    """One rank's loss and buffers, and its derivatives by whole parameters."""

    own: dict[Key, Tensor]
    derivatives: dict[Key, Tensor]


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
    convex: Convex | None = None

    @functools.cached_property
    def ranks(self) -> range:
        """The ranks of the mesh, counted row by row, that run in this process."""
        sizes = [size for _, size in self.spec.bound_mesh.sizes]
        if self.simulated:
            return range(torch.Size(sizes).numel())
        here = 0
        for size, at in zip(sizes, rank_coords(self.spec.bound_mesh, None), strict=True):
            here = here * size + at
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

    @functools.cached_property
    def joins_batches(self) -> bool:
        """Whether the model computes with the batches of all ranks, as `SyncBatchNorm` does in training."""
        return any(isinstance(module, SyncBatchNorm) and module.training for module in self.model.modules())

    def run_plain(self, seed: int, order: Order = 1, *, by_vmap: bool = False) -> Outcome:
        """Run the model itself with plain autograd; derivatives are means over ranks.

        Simulated ranks run one after the other, or together: ``by_vmap``, to draw the numbers that they draw on shards, and
        where the model joins their batches.
        """
        vector = self.make_vector(seed) if order in PRODUCTS else None
        runs: list[_PlainRun] = []
        visited: list[str] = []
        error: Exception | None = None
        try:
            if self.simulated and (by_vmap or self.joins_batches):
                runs = self._run_stacked(seed, order, vector)
            else:
                runs = self._run_in_turn(seed, order, vector, visited)
        except Exception as raised:  # the other ranks hear of it before they wait for this one's gradients
            error = raised
        texts = self.gather_text("" if error is None else f"{type(error).__name__}: {_torch.error_text(error)}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise AssertionError(f"assert_exact: the plain model raised on rank {rank}: {text}")
        if not self.simulated:
            check_same_units([json.loads(text) for text in self.gather_text(json.dumps(visited))])
        mean = {key: torch.stack([run.derivatives[key] for run in runs]).mean(0) for key in runs[0].derivatives}
        for _, axis in () if self.simulated else self.spec.bound_mesh.axes:
            mean = {key: all_reduce(x, axis) for key, x in mean.items()}
        largest = {key: max(max_magnitude(run.own[key]) for run in runs) for key in runs[0].own}
        return Outcome(
            [self._pieces(mean, rank) | run.own for rank, run in zip(self.ranks, runs, strict=True)],
            largest | {key: max_magnitude(x) for key, x in mean.items()},
        )

    def _pieces(self, full: Mapping[Key, Tensor], rank: int) -> dict[Key, Tensor]:
        """Return the pieces that a rank has of whole parameters' derivatives."""
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

    def _run_in_turn(self, seed: int, order: Order, vector: Params | None, visited: list[str]) -> list[_PlainRun]:
        """Run the ranks of this process; ``visited`` receives the keys of the units whose modules run, in their order."""
        out: list[_PlainRun] = []
        for rank in self.ranks:
            with preserve_model(self.model, seed + rank, self.devices):
                install_buffers(self.model, clone_tensors(self.buffers), self.spec.bound_mesh)
                record_units(self.spec, find_modules_by_path(self.model), visited)
                batch = clone_tensors(select_rank(self.batch, rank) if self.simulated else self.batch)
                outputs, value = self._evaluate(self._call, batch)
                curvature = lambda z, u, batch=batch: multiply_loss_hessian(self._convex_loss(batch), z, u)  # noqa: E731
                derivatives = self._derivatives(order, outputs, value, curvature, vector)
                own = {(LOSS, ""): value} | {(BUFFER, name): b for name, b in find_buffers(self.model, self.buffers).items()}
                out.append(_PlainRun({key: x.detach() for key, x in own.items()}, derivatives))
        return out

    def _run_stacked(self, seed: int, order: Order, vector: Params | None) -> list[_PlainRun]:
        """Run the plain model on all ranks at once, under vmap, and return each one's results."""

        def rank(mesh: Mesh, batch: Any, buffers: Params) -> tuple[Tensor, dict[Key, Tensor]]:
            install_buffers(self.model, buffers, mesh)
            outputs, value = self._evaluate(self._call, clone_tensors(batch))
            return outputs, {(LOSS, ""): value} | {
                (BUFFER, name): b for name, b in find_buffers(self.model, self.buffers).items()
            }

        def curvature(z: Tensor, u: Tensor) -> Tensor:
            on_a_rank = lambda mesh, batch, z, u: multiply_loss_hessian(self._convex_loss(batch), z, u)  # noqa: E731
            return spmd(on_a_rank, self._sizes)(self.batch, z, u) / len(self.ranks)

        with preserve_model(self.model, seed, self.devices):
            with explain_vmap(self.model):
                outputs, found = spmd(rank, self._sizes)(self.batch, self._stack_buffers(self.buffers))
            derivatives = self._derivatives(order, outputs, found[LOSS, ""].mean(), curvature, vector)
        return [_PlainRun({key: x[r].detach() for key, x in found.items()}, derivatives) for r in self.ranks]

    @property
    def _call(self) -> ModelCall:
        return ModelCall(getattr(self.model, self.method or "__call__"))

    def _convex_loss(self, batch: Any) -> Callable[[Tensor], Tensor]:
        """Return the loss of a rank's outputs."""
        assert self.convex is not None
        return self.convex(batch)

    def _evaluate(self, call: ModelCall, batch: Any) -> tuple[Tensor, Tensor]:
        """Return a rank's outputs and their loss, which are the same without a convex loss."""
        outputs = self.loss(call, batch)
        return outputs, outputs if self.convex is None else self._convex_loss(batch)(outputs)

    def _derivatives(
        self, order: Order, outputs: Tensor, value: Tensor, curvature: Callable[..., Tensor], vector: Params | None
    ) -> dict[Key, Tensor]:
        """Compute the gradient, and with a vector the product of this order."""
        grads = differentiate(value, self.trained, create_graph=vector is not None)
        out = {(GRADIENT, name): g.detach() for name, g in grads.items()}
        if vector is not None:
            hessian = order == 2
            product = (
                multiply_hessian(grads, vector, self.trained)
                if hessian
                else multiply_ggn(outputs, curvature, vector, self.trained)
            )
            out |= {(PRODUCTS[order], name): g for name, g in product.items()}
        return out

    def run_sharded(self, seed: int, order: Order, plain: Outcome) -> Outcome:
        """Run `functional_call` on shards. Simulated ranks get their own copies of buffers that the plain run changed."""
        changed = {n for n, b in self.buffers.items() if not all(is_equal(own[BUFFER, n], b) for own in plain.ranks)}
        varying = {name: b for name, b in self.buffers.items() if name in changed}
        direction = {name: p.detach() for name, p in self.full.items()} | (self.make_vector(seed) if order in PRODUCTS else {})

        def run(fn: Callable[[PartitionSpec, Any, Params], Any]) -> list[Any]:
            """Return ``fn(spec, batch, buffers)`` of each rank."""
            with fixed_seed(seed + (0 if self.simulated else self.ranks[0]), self.devices):
                if not self.simulated:
                    return [fn(self.spec, self.batch, varying)]
                on_a_rank = lambda mesh, batch, own: fn(self.spec.on(mesh), batch, own)  # noqa: E731
                with explain_vmap(self.model):
                    out = spmd(on_a_rank, self._sizes)(self.batch, self._stack_buffers(varying))
                return [select_rank(out, rank) for rank in self.ranks]

        def gradient(spec: PartitionSpec, batch: Any, own: Params) -> Any:
            trained, frozen = partition(shard(self.model, spec), spec)
            results = self._results_on(spec, frozen, batch, own)
            return grad_and_value(lambda p: results(p)[1:], has_aux=True)(trained)

        def product(spec: PartitionSpec, batch: Any, own: Params) -> Params:
            trained, frozen = partition(shard(self.model, spec), spec)
            along, _ = partition(shard(direction, spec), spec)
            results = self._results_on(spec, frozen, batch, own)
            if order == 2:
                return hvp(lambda p: results(p)[1:], trained, along, has_aux=True)[0]
            return ggnvp(lambda p: results(p)[0], self._convex_loss(batch), trained, along)

        out: list[dict[Key, Tensor]] = []
        for rank, (grads, (value, buffers)) in zip(self.ranks, run(gradient), strict=True):
            own = {(LOSS, ""): value} | {(BUFFER, name): b for name, b in buffers.items()}
            out.append(own | self._pieces_by_name(GRADIENT, grads, rank))
        if order in PRODUCTS:
            for rank, found, products in zip(self.ranks, out, run(product), strict=True):
                found |= self._pieces_by_name(PRODUCTS[order], products, rank)
        return Outcome(out, plain.largest)

    def _results_on(
        self, spec: PartitionSpec, frozen: Params, batch: Any, own: Params
    ) -> Callable[[Params], tuple[Tensor, Tensor, Params]]:
        """Return a function from trained shards to the outputs, the loss, and the buffers after it."""

        def results(trained: Params) -> tuple[Tensor, Tensor, Params]:
            params, buffers = combine(trained, frozen), clone_tensors(self.buffers | own)
            options: dict[str, Any] = {"spec": spec, "buffers": buffers, "method": self.method}
            run = lambda *args, **kwargs: functional_call(self.local or self.model, params, args, kwargs, **options)  # noqa: E731
            return *self._evaluate(ModelCall(run, spec), clone_tensors(batch)), buffers

        return results

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks of the mesh; simulated ranks share one."""
        mesh = self.spec.bound_mesh
        if self.simulated:
            return [text]
        return [row[1:] for row in gather_texts(f".{text}", mesh, mesh.device or torch.device("cpu"))]  # never an empty one

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(self.spec.bound_mesh.sizes)

    def _stack_buffers(self, buffers: Params) -> Params:
        """Stack a copy of each tensor for each rank."""
        copies: dict[int, Tensor] = {}
        return {name: copies.setdefault(id(b), torch.stack([b] * len(self.ranks))) for name, b in buffers.items()}
