"""Shared, ignored, uneven and unused parameters in training: torch's own claims for FSDP, on real ranks."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from depth import depth, each
from parity import MAIN_WAYS, WAYS, average_gradients, check_parity, next_token, numbers, same, sharded_call, squared, tokens
from peer_models import MLP, Block, Net, Transformer, chain
from ranks import real_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard.policies import Policy

STRATEGIES = {"reshard": P("shard"), "keep": P("shard", reshard=False), "replicate": P()}


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_train_parity_with_shared_params(rank: int, strategy: str, way: str) -> None:
    """An embedding tied to the head: one tensor, the sum of both gradients."""
    model = Transformer(2, tied=True)
    check_parity(rank, model, fs.by_type(Block, p=STRATEGIES[strategy])(model), tokens, next_token, way=way)


@real_ranks(4)
def test_train_shared_params_uneven_shard(rank: int) -> None:
    """A tied vocabulary of 4 ranks * 4 + 1 rows: every row has moved after some steps, in the padded last shard as well."""
    vocabulary = 4 * dist.get_world_size() + 1
    model = Transformer(1, vocabulary, width=7, heads=1, tied=True)
    spec = fs.policies.always()(model).bound
    assert any(spec.padded_numel(unit) > unit.numel for unit in spec)
    batch = lambda rank, step: tokens(rank, step, vocabulary)  # noqa: E731
    options = {"optimizer": torch.optim.AdamW, "weight_decay": 0}
    trained = check_parity(rank, model, spec, batch, next_token, steps=depth(3, 10), **options)
    changed = (trained["tokens.weight"] != model.tokens.weight).all(1)
    assert changed.all()


class TiedUnits(nn.Module):
    """Two would-be units whose weights are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = MLP(5), MLP(5)
        self.b.in_proj.weight = self.a.in_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sigmoid(self.a(x)))


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_shared_params_separate_fsdp_groups(rank: int, strategy: str, way: str) -> None:
    """Weights tied across units, an error in the peer, belong to the unit above both and train as one."""
    spec = fs.by_type(MLP, p=STRATEGIES[strategy])(TiedUnits())
    assert spec.by_name["b.in_proj.weight"] == spec.by_name["a.in_proj.weight"]
    assert spec.by_name["b.in_proj.weight"][0].path == ""
    check_parity(rank, TiedUnits(), spec, way=way)


@pytest.mark.parametrize(
    "policy", [fs.policies.always(), fs.by_size(1), fs.policies.ignoring(fs.policies.whole(), modules=["0.in_proj"])]
)
def test_layer_by_layer_shard_no_false_positive(policy: Policy) -> None:
    """Nothing holds a model that was dropped, so ids come again; they are not mistaken for shared modules."""

    def use(model: nn.Module) -> tuple[weakref.ref[nn.Module], int]:
        spec = policy(model).bound
        fs.grad(lambda p: squared(sharded_call(model, p, spec), numbers(0, 0)))(fs.shard(model, spec))
        assert all(param.aliases == () for unit in spec for param in unit.params)
        return weakref.ref(model), id(model[0].in_proj.weight)

    gc.disable()
    try:
        ids: list[int] = []
        while len(set(ids)) == len(ids) < 2000:
            dropped, id_ = use(chain(2))
            assert dropped() is None
            ids.append(id_)
    finally:
        gc.enable()
    assert len(set(ids)) < len(ids)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("way", MAIN_WAYS)
@real_ranks(2)
def test_ignored_modules_and_mixture_of_experts(rank: int, way: str, given: bool) -> None:
    """What is ignored is not sharded and never reduced: a rank's own expert, from the model or from params by name."""
    model = Net()
    spec = fs.policies.ignoring(fs.by_type(MLP), modules=["blocks.1"], params=["head.bias"])(model).bound
    total = sum(p.numel() for p in model.parameters())
    left = sum(p.numel() for p in model.blocks[1].parameters()) + model.head.bias.numel()
    assert sum(unit.numel for unit in spec) == total - left
    x, reference = numbers(rank, 0), copy.deepcopy(model)
    params = fs.shard(model, spec)
    if given:
        params |= {name: p.detach() for name, p in model.named_parameters() if name in spec.ignored}
    grads, value = WAYS[way](lambda p: squared(sharded_call(model, p, spec), x))(params)
    expected = squared(reference, x)
    expected.backward()
    local = {name: p.grad.clone() for name, p in reference.named_parameters()}
    assert_close(value, expected.detach())
    same({k: g for k, g in grads.items() if k in spec.by_key}, fs.shard(average_gradients(reference), spec), "gradient")
    assert set(grads) - set(spec.by_key) == (set(spec.ignored) if given else set())
    own = {name: g for name, g in local.items() if given and name in spec.ignored}
    same({k: g for k, g in grads.items() if k in spec.ignored}, own, "a rank's own gradient")


@real_ranks(2)
def test_diff_ignored_modules_across_ranks(rank: int) -> None:
    """Ranks that ignore different modules would wait for each other: an error on every rank, naming the unit."""
    model = Net()
    spec = fs.policies.ignoring(fs.by_type(MLP), modules=[f"blocks.{rank}"])(model)
    with pytest.raises(ValueError, match=r"the ranks of .* have different models.*'blocks\.[01]'"):
        fs.shard(model, spec)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5).double()
        self.b = nn.Module()
        self.b.lin_a, self.b.lin_b, self.b.c = (nn.Linear(5, 5).double() for _ in range(3))
        self.c = nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b.lin_a, self.b.lin_b, self.b.c, self.c):
            x = torch.tanh(layer(x))
        return x


@real_ranks(2)
def test_ddp_a_fsdp_b_ddp_c(rank: int) -> None:
    """A sharded subtree in a replicated model, with a replicated part inside it: as DDP of the whole."""
    model = Middle()
    spec = fs.by_path({"b": P("shard"), "b.lin_b": P("shard"), "b.c": P()}, p=P())(model).bound
    assert {unit.key: unit.p.axis for unit in spec} == {"": None, "b": "shard", "b.lin_b": "shard", "b.c": None}
    trained = check_parity(rank, model, spec, steps=3)
    other = DistributedDataParallel(copy.deepcopy(model))
    adam = torch.optim.Adam(other.parameters(), lr=1e-2)
    for step in range(3):
        adam.zero_grad()
        squared(other, numbers(rank, step)).backward()
        adam.step()
    same(trained, {k.removeprefix("module."): p.detach() for k, p in other.named_parameters()}, "trained by DDP")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleList([nn.Linear(5, 5).double() for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(2.0).double())

    def forward(self, batch: tuple[int, Tensor]) -> Tensor:
        which, x = batch
        return self.scale * self.pair[which](x)


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_unused_param_has_grad(rank: int, strategy: str, way: str) -> None:
    """Ranks that take different branches of one unit: no one waits, unused parameters count with zeros; 0-dim ones too."""
    model = Branches()
    batch = lambda rank, step: ((rank + step) % 2, numbers(rank, step))  # noqa: E731
    check_parity(rank, model, fs.policies.whole(STRATEGIES[strategy])(model), batch, way=way)


class EveryBranch(Branches):
    """Runs the other one as well, and counts it with zero."""

    def forward(self, batch: tuple[int, Tensor]) -> Tensor:
        which, x = batch
        y = [module(x) for module in self.pair]
        return self.scale * (y[which] + 0 * y[1 - which].sum())


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_ranks_that_use_other_units(rank: int, strategy: str, way: str) -> None:
    """As the guide says: all run each unit, and what a rank does not use is in its loss with zero."""
    model = EveryBranch()
    batch = lambda rank, step: ((rank + step) % 2, numbers(rank, step))  # noqa: E731
    check_parity(rank, model, fs.policies.always(STRATEGIES[strategy])(model), batch, way=way)


@real_ranks(2)
def test_noncontiguous_parameter(rank: int) -> None:
    """Parameters of another memory format, an error in the peer, train and keep their strides."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).double().to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(4, 2).double().t())
    batch = lambda rank, step: numbers(rank, step, 27).unflatten(1, (3, 3, 3))  # noqa: E731
    trained = check_parity(rank, model, fs.policies.always()(model), batch)
    assert {k: p.stride() for k, p in trained.items()} == {k: p.stride() for k, p in model.named_parameters()}
