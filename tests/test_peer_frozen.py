"""Frozen parameters in training: torch's own claims for FSDP, on real ranks."""

from __future__ import annotations

import copy

import collective_log
import pytest
import torch
from collective_log import gathers, scatters, world
from depth import at_most, each
from parity import MAIN_WAYS, average_gradients, check_parity, next_token, numbers, same, sharded_call, squared, tokens
from peer_models import MLP, Block, Transformer, chain, frozen
from ranks import Pool, real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P

STRATEGIES = {"reshard": P("shard"), "keep": P("shard", reshard=False), "replicate": P()}


@at_most(1)
@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_train_mixed_requires_grad_per_group(rank: int, strategy: str, way: str) -> None:
    """BitFit: every unit is part frozen, part trained; only the biases move."""
    model = Transformer(2)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    trained = check_parity(rank, model, fs.by_type(Block, p=STRATEGIES[strategy])(model), tokens, next_token, way=way)
    for name, p in model.named_parameters():
        assert torch.equal(trained[name], p) is not p.requires_grad


@at_most(1)
@pytest.mark.parametrize("unfreeze", [False, True])
@real_ranks(2)
def test_train_mixed_requires_grad_across_groups(rank: int, unfreeze: bool) -> None:
    """Frozen and trained units in turn, an evaluation in the middle, all unfrozen from then on or not."""
    model = chain(6)
    for block in model[::2]:
        block.requires_grad_(False)
    spec = fs.by_type(MLP)(model).bound
    reference = copy.deepcopy(model)
    params = fs.shard(model, spec)
    trained, frozen = fs.partition(params, spec)
    assert set(frozen) == {"0", "2", "4"}
    for step in range(6):
        if step == 2:
            with torch.no_grad():
                assert_close(sharded_call(model, params, spec)(numbers(rank, 99)), reference(numbers(rank, 99)))
        if step == 3 and unfreeze:
            trained, frozen = fs.partition(params, spec, lambda unit: True)
            reference.requires_grad_(True)
        x = numbers(rank, step)
        grads, value = fs.grad_and_value(lambda p: squared(sharded_call(model, fs.combine(p, frozen), spec), x))(trained)
        expected = squared(reference, x)
        reference.zero_grad()
        expected.backward()
        assert_close(value, expected.detach())
        mean = average_gradients(reference)
        of_all = fs.shard(mean, spec, rank=rank)
        same(grads, {k: of_all[k] for k in trained}, f"gradient at step {step}")
        params = {k: p - 0.1 * grads[k] if k in grads else p for k, p in params.items()}
        trained = {k: params[k] for k in trained}
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= 0.1 * mean[name] if p.requires_grad else 0
        same(params, fs.shard({n: p.detach() for n, p in reference.named_parameters()}, spec, rank=rank), f"step {step}")


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(5) for _ in range(3)])
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.run(x)
        out = self.run(x)
        out += target
        return self.run(out)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = torch.tanh(y)
        return x * 1


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_multi_forward_mixed_requires_grad(rank: int, strategy: str, way: str) -> None:
    """The same layers with and without no_grad, some frozen, activations added to in place."""
    check_parity(rank, Reused(), fs.by_type(MLP, p=STRATEGIES[strategy])(Reused()), way=way)


class FineTuned(nn.Module):
    """A trunk and a head; the trunk may run under no_grad."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet
        self.trunk, self.head = chain(), nn.Linear(5, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.quiet):
            x = self.trunk(x)
        return self.head(x)


@each
@pytest.mark.parametrize("how", ["requires_grad", "partition"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
@real_ranks(2)
def test_freezing_weights(rank: int, quiet: bool, nested: bool, how: str) -> None:
    """A frozen trunk, by requires_grad or by not differentiating it, in units of its own or in one, quiet or not."""
    model = FineTuned(quiet)
    if how == "requires_grad":
        model.trunk.requires_grad_(False)
    spec = (fs.by_type(MLP, nn.Linear) if nested else fs.by_path({"head": P("shard")}))(model).bound
    if how == "requires_grad":
        trained = check_parity(rank, model, spec)
    else:  # frozen by what is differentiated alone: the spec knows nothing of it
        params = fs.shard(model, spec)
        head, trunk = fs.partition(params, spec, lambda unit: unit.path.startswith("head"))
        reference = copy.deepcopy(model)
        x = numbers(rank, 0)
        grads, _ = fs.grad_and_value(lambda p: squared(sharded_call(model, fs.combine(p, trunk), spec), x))(head)
        squared(reference, x).backward()
        of_all = fs.shard(average_gradients(reference), spec, rank=rank)
        same(grads, {k: of_all[k] for k in of_all if k.startswith("head")}, "gradient")
        trained = fs.gather_full({k: p - grads[k] if k in grads else p for k, p in params.items()}, spec)
    for name, p in model.named_parameters():
        assert torch.equal(trained[name], p) is name.startswith("trunk")


def frozen_equals_not_frozen(rank: int) -> None:
    weights = chain(4).state_dict()

    def step(freeze: bool) -> fs.Params:
        model = chain(4)
        model.load_state_dict(weights)
        model[1:3].requires_grad_(not freeze)
        spec = fs.by_type(MLP)(model).bound
        trained, rest = fs.partition(fs.shard(model, spec), spec)
        return fs.grad(lambda p: squared(sharded_call(model, fs.combine(p, rest), spec), numbers(rank, 0)))(trained)

    some, every = step(True), step(False)
    same(some, {k: every[k] for k in ("0", "3")}, "gradient")


def test_backward_reshard_hooks_and_parity_with_non_frozen_fsdp(gloo2: Pool) -> None:
    """Frozen units are gathered once in backward, never reduced, and the others' gradients are as without freezing."""
    gloo2.run(frozen_equals_not_frozen)
    with world(8):
        model = frozen(chain(4), "1", "2")
        spec = fs.by_type(MLP)(model).bound
        sent = collective_log.step(model, spec)
        assert sent.forward == gathers(spec, "0", "1", "2", "3")
        assert sent.backward == [
            *gathers(spec, "2"),
            *scatters(spec, "3"),
            *gathers(spec, "1", "0"),
            *scatters(spec, "0"),
        ]
