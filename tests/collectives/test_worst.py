"""Everything on a process group that is the worst case of NCCL's streams (worst.py): the routes that gloo does not take.

``pytest --worst`` runs the other tests of real ranks on it as well: compressors, averages, optimizers, compiled steps and full
parameters. A few are about gloo's own routes and then fail.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import test_matrix
import torch
import torch.distributed as dist
from depth import at_most, depth, each
from models import module_class
from parity import WAYS, loss_of, mean_square
from ranks import Pool, real_ranks
from test_matrix import STRATEGIES, TRANSFORMS, without_ticks
from torch import Tensor, nn
from torch.testing import assert_close
from worst import Misuse, watched

import funshard as fs
from funshard import _torch
from funshard._call.schedule import GatheredUnit
from funshard._core import ops as ops
from funshard._wire.chain import BufferPool, CollectiveChain

OPS = torch.ops._c10d_functional


# --- mutants of funshard, each with an error that gloo would hide ---
Layer = module_class("Layer", lambda: {"linear": nn.Linear(4, 4)}, lambda self, x: x + torch.tanh(self.linear(x)))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), *(Layer() for _ in range(5)), nn.Linear(4, 2)).double()


def batch(rank: int) -> Tensor:
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def plain(model: nn.Module, ranks: int) -> fs.Params:
    """The gradient of the mean loss of all ranks."""
    model = copy.deepcopy(model)
    torch.stack([(model(batch(rank)) ** 2).mean() for rank in range(ranks)]).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(rank: int, spec: fs.PartitionSpec, model: nn.Module, way: str = "backward", **options: Any) -> None:
    """Asserts that a step's gradients are those of the plain model."""
    loss = loss_of(model, spec, batch(rank), of=mean_square, **options)
    got, _ = WAYS[way](loss)(fs.shard(model, spec))
    assert_close(got, fs.shard(plain(model, dist.get_world_size()), spec), rtol=1e-9, atol=1e-9)


def too_early(x: Tensor) -> Tensor:
    y = x.clone()
    OPS.wait_tensor(x)
    return y


@contextlib.contextmanager
def gathered_buffers_are_used_again_too_early() -> Iterator[None]:
    take = BufferPool.take

    def mutant(self: BufferPool, *args: Any) -> Tensor:
        buffer = take(self, *args)
        self.give(buffer)
        return buffer

    with mock.patch.object(BufferPool, "take", mutant), mock.patch.object(_torch, "is_sole_holder", return_value=True):
        yield


@contextlib.contextmanager
def shards_change_under_way() -> Iterator[None]:
    gather = GatheredUnit.unshard

    def mutant(self: GatheredUnit) -> None:
        gather(self)
        with _torch.below_transforms():
            self.shard.mul_(2).div_(4)

    with mock.patch.object(GatheredUnit, "unshard", mutant):
        yield


NOBODY = "unit '.': all_gather .*nobody has waited for it"
MUTANTS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], str]] = {
    "nobody waits": (lambda: mock.patch.object(ops, "_wait", lambda x: x), "unit '1': all_gather .*nobody has waited for it"),
    "read too early": (lambda: mock.patch.object(ops, "_wait", too_early), "nan"),
    "dropped chains are forgotten": (lambda: mock.patch.object(CollectiveChain, "__del__", return_value=None), NOBODY),
    "gathered buffers": (gathered_buffers_are_used_again_too_early, "unit '.': all_gather .*an output was written"),
    "shards": (shards_change_under_way, "unit '.?': all_gather .*an input was written"),
}


@at_most(2)
@pytest.mark.parametrize("mutant", MUTANTS)
@real_ranks(2, "worst")
def test_mutants_are_killed(rank: int, mutant: str) -> None:
    model = network()
    spec = fs.by_type(Layer)(model).bound
    twice = spec.ordered([*spec.order, *spec.order])  # more is gathered ahead than is used
    mutated, message = MUTANTS[mutant]
    with watched():
        step(rank, twice, model, prefetch=2, in_flight=2)
    # Numbers are wrong as well, but only what is read too early is found by that alone.
    unheard = contextlib.nullcontext() if mutant == "read too early" else contextlib.suppress(AssertionError)
    with pytest.raises((Misuse, AssertionError), match=message), watched(), mutated(), unheard:
        step(rank, twice, model, prefetch=2, in_flight=2)


# --- and funshard itself ---
@at_most(1)
@each
@pytest.mark.parametrize("strategy", STRATEGIES, ids=without_ticks)
@pytest.mark.parametrize("transform", depth(test_matrix.NOT_BY_DYNAMO, [*TRANSFORMS]), ids=without_ticks)
def test_the_matrix(worst2: Pool, worst4: Pool, transform: str, strategy: str) -> None:
    """Every transform with every strategy is plain autograd of the whole model; by default Dynamo runs for the tasks below."""
    pool = {2: worst2, 4: worst4}[STRATEGIES[strategy].real]
    results = pool.run(test_matrix.on_real_ranks, strategy, (transform,))
    test_matrix.check_real(strategy, results, transform)
