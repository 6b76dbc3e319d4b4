"""Stages (_wire/stages.py): a new one is right in every mode as it is, and each has its transpose and its constants."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collective_log import world
from depth import at_most, seldom
from models import EXACT
from parity import loss_of, mean_square, strategies
from ranks import real_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.fx import GraphModule

import funshard as fs
from funshard import P
from funshard._wire.route import Route
from funshard._wire.stages import Stage, Transit

FACTOR = 3.0
LOOSE = {"rtol": 1e-5, "atol": 1e-6}
STRATEGIES = strategies(
    *("shard", "keep", "replicated", "remat"),
    host=P("shard", offload="params"),
    cast=P("shard", precision=fs.Precision(reduce=torch.float32)),
)


@dataclass(frozen=True)
class Scale(Stage):
    """The buffer times a number: what a new option would be."""

    is_option = True
    factor: float

    def apply(self, x: Tensor, transit: Transit) -> Tensor:
        return x * self.factor

    def transpose(self, grad: Tensor, transit: Transit) -> Tensor:
        return grad * self.factor

    def transpose_(self, grad: Tensor) -> Tensor:
        return grad.mul_(self.factor)


@contextlib.contextmanager
def scaled() -> Iterator[None]:
    """Within this the buffer of every unit is scaled."""
    plain = Route.for_unit.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def for_unit(cls: type[Route], unit: fs.Unit, *args: Any, **kwargs: Any) -> Route:
        route = plain(cls, unit, *args, **kwargs)
        return dataclasses.replace(
            route, stages=(*route.stages, Scale(FACTOR)), has_own_buffer=True, reshard_after_forward=bool(unit.p.reshard)
        )

    with mock.patch.object(Route, "for_unit", classmethod(for_unit)):
        yield


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def plain_loss(model: nn.Module, full: fs.Params, x: Tensor) -> Tensor:
    """That of the model on scaled parameters."""
    return mean_square(torch.func.functional_call(model, {name: FACTOR * q for name, q in full.items()}, (x,)))


@at_most(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_a_new_stage_is_right_in_every_mode(rank: int, strategy: str, tmp_path: Path) -> None:
    """On two ranks, by both folds, beside the model on scaled parameters: the scheduled mode, autograd, a stack of transforms,
    data flow, full parameters, compressed gradients. Optimizer state and resharded parameters are what was sharded."""
    model, x = Residual().double(), torch.randn(2, 4, 3, dtype=torch.float64)
    spec = fs.by_type(nn.Linear, p=STRATEGIES[strategy])(model).bound
    params = fs.shard(model, spec)
    full = {name: q.detach() for name, q in model.named_parameters()}
    v = {name: q.sin() for name, q in full.items()}
    direction = fs.shard(v, spec)

    def plain(full: fs.Params) -> Tensor:
        return plain_loss(model, full, x.flatten(0, 1))

    def loss(params: fs.Params, x: Tensor = x[rank]) -> Tensor:
        return loss_of(model, spec, x, of=mean_square)(params)

    close = LOOSE if strategy == "cast" else EXACT
    each = torch.vmap(torch.func.grad(lambda *args: plain_loss(model, *args)), (None, 0))(full, x.flatten(0, 1))
    scales = (0.01 / torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)).clamp(max=1)
    per_sample = fs.shard({name: torch.einsum("n,n...->...", scales, g) / len(scales) for name, g in each.items()}, spec)
    expected = fs.shard(fs.grad(plain)(full), spec)
    second = fs.shard(torch.func.jvp(torch.func.grad(plain), (full,), (v,))[1], spec)
    with scaled():
        for q in params.values():
            q.requires_grad_()
        loss(params).backward()
        torch.testing.assert_close({key: q.grad for key, q in params.items()}, expected, **close)
        params = {key: q.detach() for key, q in params.items()}
        for grad in (fs.grad, torch.func.grad):
            torch.testing.assert_close(grad(loss)(params), expected, **close)
        torch.testing.assert_close(fs.hvp(loss, params, direction), second, **close)
        times = {name: FACTOR * q for name, q in full.items()}
        for given in (fs.unshard(params, spec), fs.unshard(params, spec), dict(fs.stream_full(params, spec))):
            torch.testing.assert_close(given, times, **close)
        for given in (fs.unshard(params, spec, rank0_only=True), dict(fs.stream_full(params, spec, rank0_only=True))):
            torch.testing.assert_close(given, times if rank == 0 else {}, **close)
        fs.checkpoint.export(tmp_path / "export", params, spec)
        torch.testing.assert_close(load_file(tmp_path / "export" / "model.safetensors"), times, **close)
        torch.testing.assert_close(fs.reshard(params, spec, spec), params)  # stored values, and so is optimizer state
        init, update = fs.optim.from_torch(torch.optim.Adam, lr=0.1)
        stepped = update(expected, init(params), params)[1]
        state = fs.checkpoint.optimizer_state_dict(stepped, spec, torch.optim.Adam, lr=0.1)["state"]
        for name, slots in state.items():
            torch.testing.assert_close(slots["exp_avg"], 0.1 * fs.grad(plain)(full)[name], **close)
        for keep in ("shards", "full"):
            summed, _ = fs.accumulate(loss, params, [x[rank][:2], x[rank][2:]], spec=spec, keep=keep)
            torch.testing.assert_close(summed, expected, **close)
        clipped = fs.per_sample_grads(loss, params, (x[rank],), spec=spec, clip=0.01)
        torch.testing.assert_close(clipped, per_sample, rtol=1e-4, atol=1e-6)
        compressor = fs.compress.exact()
        grads = torch.func.grad(lambda q: torch.func.functional_call(model, q, (x[rank],)).square().mean())(times)
        compressed, _ = compressor.reduce(grads, compressor.init(spec), spec)
        torch.testing.assert_close(compressed, expected, **close)


@pytest.mark.parametrize("strategy", ["shard", "replicated", "cast"])
def test_a_new_stage_on_simulated_ranks(strategy: str) -> None:
    model, x = Residual().double(), torch.randn(3, 4, 3, dtype=torch.float64)
    spec = fs.by_type(nn.Linear, p=STRATEGIES[strategy])(model)
    full = {name: q.detach() for name, q in model.named_parameters()}

    def on_rank(mesh: fs.collectives.Mesh, x: Tensor) -> fs.Params:
        on = spec.on(mesh)
        return fs.reduce_grads({}, on) | torch.func.grad(loss_of(model, on, x, of=mean_square))(fs.shard(full, on))

    want = fs.grad(lambda full: plain_loss(model, full, x.flatten(0, 1)))(full)
    expected = fs.testing.spmd(lambda mesh, _: fs.shard(want, spec.on(mesh)), 3)(x)
    with scaled():
        got = fs.testing.spmd(on_rank, 3)(x)
        gathered = fs.testing.spmd(lambda mesh, _: fs.unshard(fs.shard(full, spec.on(mesh)), spec.on(mesh)), 3)(x)
    torch.testing.assert_close(got, expected, **(LOOSE if strategy == "cast" else EXACT))
    torch.testing.assert_close(gathered, {name: FACTOR * q.expand(3, *q.shape) for name, q in full.items()})


@seldom
@pytest.mark.parametrize("strategy", ["shard", "cast", "codec"])
def test_a_new_stage_in_a_graph(strategy: str) -> None:
    """What the stages of a unit's way compute is freed with its buffer, and backward's gather computes it again."""
    gathers: list[int] = []

    def count(graph: GraphModule, inputs: object) -> GraphModule:
        gathers.append(sum("all_gather" in str(node.target) for node in graph.graph.nodes))
        return graph

    with world(4):
        model, x = nn.Sequential(Residual(), Residual()).double(), torch.randn(4, 3, dtype=torch.float64)
        codec = P("shard", precision=fs.Precision(codec=fs.codecs.int8()))
        spec = fs.by_type(nn.Linear, p=STRATEGIES.get(strategy, codec))(model).bound
        params = fs.shard(model, spec)
        step = fs.grad(lambda params, x: fs.functional_call(model, params, (x,), spec=spec).square().mean())
        for context in (contextlib.nullcontext(), scaled()):
            torch._dynamo.reset()
            with context:
                fs.compile(step, backend=count)(params, x)
    assert gathers == [6 + 3, 6 + 3]
