"""TorchOpt's functional optimizers work unchanged on dicts of shards, also under differentiation."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from depth import at_most, every
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchopt = pytest.importorskip("torchopt")

RANKS = 3
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: torchopt.sgd(0.1, momentum=0.9),
    "adam": lambda: torchopt.adam(0.05, eps_root=1e-6),  # a root that has derivatives at zero
    "rmsprop": lambda: torchopt.rmsprop(0.05, eps=1e-3),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def start(module: nn.Module) -> fs.Params:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def after_steps(name: str, grad: Any, params: fs.Params, batches: Tensor) -> fs.Params:
    """TorchOpt's own loop; nothing in it knows of shards."""
    optimizer = OPTIMIZERS[name]()
    state = optimizer.init(params)
    for x in batches:
        updates, state = optimizer.update(grad(params, x), state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return params


def batches() -> Tensor:
    """By rank and step; the last is for validation."""
    return torch.randn(RANKS, 3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@at_most(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of in-place kernels under vmap
@every(name=OPTIMIZERS, policy=[fs.policies.always(), fs.by_path({"0": fs.P("shard"), "2": fs.P()})])
def test_steps_and_the_gradient_through_them(name: str, policy: fs.Policy) -> None:
    """Two steps on shards, and the gradient of a validation loss through them (MAML), are those of the joined batch."""
    module, xs = model(), batches()

    def rank(mesh: Any, x: Tensor) -> tuple[fs.Params, fs.Params]:
        spec = policy(module).on(mesh)

        def loss(params: fs.Params, x: Tensor) -> Tensor:
            return fs.functional_call(module, params, (x,), spec=spec).pow(2).mean()

        def adapted(params: fs.Params) -> fs.Params:
            return after_steps(name, torch.func.grad(loss), params, x[:2])

        # With the rank's dimension on replicated ones too: TorchOpt writes into moments made like them.
        params = {key: p + 0 * x.sum() for key, p in fs.shard(start(module), spec).items()}
        through = torch.func.grad(lambda p: loss(adapted(p), x[2]))(params)
        return fs.unshard(adapted(params), spec), fs.unshard(through, spec)

    def plain_loss(params: fs.Params, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, params, (x,)).pow(2).mean()

    together = xs.transpose(0, 1).flatten(1, 2)

    def plain_adapted(params: fs.Params) -> fs.Params:
        return after_steps(name, torch.func.grad(plain_loss), params, together[:2])

    moved = plain_adapted(start(module))
    through = torch.func.grad(lambda p: plain_loss(plain_adapted(p), together[2]))(start(module))
    got_moved, got_through = fs.testing.spmd(rank, RANKS)(xs)
    for got, wanted in ((got_moved, moved), (got_through, through)):
        for key, tensor in wanted.items():
            assert tensor.abs().max() > 0
            assert_close(got[key], tensor.expand(RANKS, *tensor.shape), rtol=1e-8, atol=1e-10)
