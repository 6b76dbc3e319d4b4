"""TorchOpt's functional optimizers work unchanged on dicts of shards, also under differentiation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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
}
Loss = Callable[[fs.Params, Tensor], Tensor]


def moved(name: str, loss: Loss, params: fs.Params, batches: Tensor) -> tuple[fs.Params, fs.Params]:
    """What TorchOpt's own loop makes of them, and the gradient of the last batch's loss through it; it knows of no shards."""

    def trained(params: fs.Params) -> fs.Params:
        optimizer = OPTIMIZERS[name]()
        state = optimizer.init(params)
        for x in batches[:-1]:
            updates, state = optimizer.update(torch.func.grad(loss)(params, x), state, params=params, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
        return params

    return trained(params), torch.func.grad(lambda p: loss(trained(p), batches[-1]))(params)


@at_most(1)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of in-place kernels under vmap
@every(name=OPTIMIZERS, policy=[fs.policies.always(), fs.by_path({"0": fs.P("shard"), "2": fs.P()})])
def test_steps_and_the_gradient_through_them(name: str, policy: fs.Policy) -> None:
    """Two steps on shards, and the gradient of a validation loss through them (MAML), are those of the joined batch."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    xs = torch.randn(RANKS, 3, 4, 3, dtype=torch.float64)
    full = {name: p.detach() for name, p in module.named_parameters()}

    def rank(mesh: Any, x: Tensor) -> tuple[fs.Params, ...]:
        spec = policy(module).on(mesh)
        # With the rank's dimension on replicated ones too: TorchOpt writes into moments made like them.
        params = {key: p + 0 * x.sum() for key, p in fs.shard(full, spec).items()}
        loss = lambda p, x: fs.functional_call(module, p, (x,), spec=spec).pow(2).mean()  # noqa: E731
        return tuple(fs.unshard(one, spec) for one in moved(name, loss, params, x))

    plain = lambda p, x: torch.func.functional_call(module, p, (x,)).pow(2).mean()  # noqa: E731
    wanted = moved(name, plain, full, xs.transpose(0, 1).flatten(1, 2))
    for got, want in zip(fs.testing.spmd(rank, RANKS)(xs), wanted, strict=True):
        assert all(tensor.any() for tensor in want.values())
        assert_close(got, {key: t.expand(RANKS, *t.shape) for key, t in want.items()}, rtol=1e-8, atol=1e-10)
