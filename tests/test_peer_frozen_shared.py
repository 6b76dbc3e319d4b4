"""Frozen, shared, ignored and uneven parameters in training: torch's own claims for FSDP, on real ranks."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from collective_log import Collectives
from parity import WAYS, average_gradients, check_parity, next_token, numbers, same, sharded_call, squared, tokens
from peer_models import MLP, Block, Net, Transformer, chain
from ranks import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard.policies import Policy

STRATEGIES = {"reshard": P("shard"), "keep": P("shard", reshard=False), "replicate": P()}


def bitfit(rank: int, strategy: str, way: str) -> None:
    model = Transformer(2)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    trained = check_parity(rank, model, fs.by_type(Block, p=STRATEGIES[strategy])(model), tokens, next_token, way=way)
    for name, p in model.named_parameters():
        assert torch.equal(trained[name], p) is not p.requires_grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_train_mixed_requires_grad_per_group(gloo2: Pool, strategy: str, way: str) -> None:
    """BitFit: every unit is part frozen, part trained; only the biases move."""
    gloo2.run(bitfit, strategy, way)


def interleaved(rank: int, unfreeze: bool) -> None:
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
        same(grads, fs.shard(mean, spec, rank=rank), f"gradient at step {step}")
        params = {k: p - 0.1 * grads[k] if k in grads else p for k, p in params.items()}
        trained = {k: params[k] for k in trained}
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= 0.1 * mean[name] if p.requires_grad else 0
        same(params, fs.shard({n: p.detach() for n, p in reference.named_parameters()}, spec, rank=rank), f"step {step}")


@pytest.mark.parametrize("unfreeze", [False, True])
def test_train_mixed_requires_grad_across_groups(gloo2: Pool, unfreeze: bool) -> None:
    """Frozen and trained units in turn, an evaluation in the middle, all unfrozen from then on or not."""
    gloo2.run(interleaved, unfreeze)


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


def reused(rank: int, strategy: str, way: str) -> None:
    check_parity(rank, Reused(), fs.by_type(MLP, p=STRATEGIES[strategy])(Reused()), way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_multi_forward_mixed_requires_grad(gloo2: Pool, strategy: str, way: str) -> None:
    """The same layers with and without no_grad, some frozen, activations added to in place."""
    gloo2.run(reused, strategy, way)


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


def freezing(rank: int, quiet: bool, nested: bool, how: str) -> None:
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
        same(grads, fs.shard(average_gradients(reference), spec, rank=rank), "gradient")
        assert all("head" in key for key in grads)
        trained = fs.gather_full({k: p - grads[k] if k in grads else p for k, p in params.items()}, spec)
    for name, p in model.named_parameters():
        assert torch.equal(trained[name], p) is name.startswith("trunk")


@pytest.mark.parametrize("how", ["requires_grad", "partition"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_freezing_weights(gloo2: Pool, quiet: bool, nested: bool, how: str) -> None:
    """A frozen trunk, by requires_grad or by not differentiating it, in units of its own or in one, quiet or not."""
    gloo2.run(freezing, quiet, nested, how)


def frozen_equals_not_frozen(rank: int) -> None:
    weights = chain(4).state_dict()

    def step(freeze: bool) -> tuple[fs.Params, list[str]]:
        model = chain(4)
        model.load_state_dict(weights)
        model[1:3].requires_grad_(not freeze)
        spec = fs.by_type(MLP)(model).bound
        trained, frozen = fs.partition(fs.shard(model, spec), spec)
        with Collectives() as sent:
            grads = fs.grad(lambda p: squared(sharded_call(model, fs.combine(p, frozen), spec), numbers(rank, 0)))(trained)
        return grads, [s.op for s in sent.all]

    (frozen, sent), (full, _) = step(True), step(False)
    assert set(frozen) == {"0", "3"}
    same(frozen, full, "gradient")
    assert sent == ["all_gather"] * 4 + ["reduce_scatter"] + ["all_gather"] * 3 + ["reduce_scatter"]


def test_backward_reshard_hooks_and_parity_with_non_frozen_fsdp(gloo2: Pool) -> None:
    """Frozen units are gathered once in backward, never reduced, and the others' gradients are as without freezing."""
    gloo2.run(frozen_equals_not_frozen)


def tied(rank: int, strategy: str, way: str) -> None:
    model = Transformer(2, tied=True)
    check_parity(rank, model, fs.by_type(Block, p=STRATEGIES[strategy])(model), tokens, next_token, way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_train_parity_with_shared_params(gloo2: Pool, strategy: str, way: str) -> None:
    """An embedding tied to the head: one tensor, the sum of both gradients."""
    gloo2.run(tied, strategy, way)


def tied_uneven(rank: int) -> None:
    vocabulary = 4 * dist.get_world_size() + 1
    model = Transformer(1, vocabulary, width=7, heads=1, tied=True)
    spec = fs.always()(model).bound
    assert any(spec.padded_numel(unit) > unit.numel for unit in spec)
    batch = lambda rank, step: tokens(rank, step, vocabulary)  # noqa: E731
    trained = check_parity(rank, model, spec, batch, next_token, steps=10, optimizer=torch.optim.AdamW, weight_decay=0)
    changed = (trained["tokens.weight"] != model.tokens.weight).all(1)
    assert changed.all()


def test_train_shared_params_uneven_shard(gloo4: Pool) -> None:
    """A tied vocabulary of 4 ranks * 4 + 1 rows: every row has moved after ten steps, in the padded last shard as well."""
    gloo4.run(tied_uneven)


class TiedUnits(nn.Module):
    """Two would-be units whose weights are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = MLP(5), MLP(5)
        self.b.in_proj.weight = self.a.in_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sigmoid(self.a(x)))


def tied_units(rank: int, strategy: str, way: str) -> None:
    spec = fs.by_type(MLP, p=STRATEGIES[strategy])(TiedUnits())
    assert spec.by_name["b.in_proj.weight"] == spec.by_name["a.in_proj.weight"]
    assert spec.by_name["b.in_proj.weight"][0].path == ""
    check_parity(rank, TiedUnits(), spec, way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shared_params_separate_fsdp_groups(gloo2: Pool, strategy: str, way: str) -> None:
    """Weights tied across units, an error in the peer, belong to the unit above both and train as one."""
    gloo2.run(tied_units, strategy, way)


@pytest.mark.parametrize("policy", [fs.always(), fs.by_size(1), fs.ignoring(fs.whole(), modules=["0.in_proj"])])
def test_layer_by_layer_shard_no_false_positive(policy: Policy) -> None:
    """Nothing holds a model that was dropped, so ids come again; they are not mistaken for shared modules."""
    ids = set()
    gc.disable()
    try:
        for _ in range(12):
            model = chain(2)
            spec = policy(model).bound
            fs.grad(lambda p: squared(sharded_call(model, p, spec), numbers(0, 0)))(fs.shard(model, spec))
            assert all(param.aliases == () for unit in spec for param in unit.params)
            ids.add(id(model[0].in_proj.weight))
            dropped = weakref.ref(model)
            del model
            assert dropped() is None
    finally:
        gc.enable()
    assert len(ids) < 12


def ignored(rank: int, way: str, given: bool) -> None:
    model = Net()
    spec = fs.ignoring(fs.by_type(MLP), modules=["blocks.1"], params=["head.bias"])(model).bound
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
    same({k: g for k, g in grads.items() if k in spec.ignored}, local, "a rank's own gradient")


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_ignored_modules_and_mixture_of_experts(gloo2: Pool, way: str, given: bool) -> None:
    """What is ignored is not sharded and never reduced: a rank's own expert, from the model or from params by name."""
    gloo2.run(ignored, way, given)


def ignored_differently(rank: int) -> None:
    model = Net()
    spec = fs.ignoring(fs.by_type(MLP), modules=[f"blocks.{rank}"])(model)
    with pytest.raises(ValueError, match=r"the ranks of .* have different models.*'blocks\.[01]'"):
        fs.shard(model, spec)


def test_diff_ignored_modules_across_ranks(gloo2: Pool) -> None:
    """Ranks that ignore different modules would wait for each other: an error on every rank, naming the unit."""
    gloo2.run(ignored_differently)


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


def mixed_strategies(rank: int) -> None:
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


def test_ddp_a_fsdp_b_ddp_c(gloo2: Pool) -> None:
    """A sharded subtree in a replicated model, with a replicated part inside it: as DDP of the whole."""
    gloo2.run(mixed_strategies)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleList([nn.Linear(5, 5).double() for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(2.0).double())

    def forward(self, batch: tuple[int, Tensor]) -> Tensor:
        which, x = batch
        return self.scale * self.pair[which](x)


def other_branches(rank: int, strategy: str, way: str) -> None:
    model = Branches()
    batch = lambda rank, step: ((rank + step) % 2, numbers(rank, step))  # noqa: E731
    check_parity(rank, model, fs.whole(STRATEGIES[strategy])(model), batch, way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unused_param_has_grad(gloo2: Pool, strategy: str, way: str) -> None:
    """Ranks that take different branches of one unit: no one waits, unused parameters count with zeros; 0-dim ones too."""
    gloo2.run(other_branches, strategy, way)


def not_contiguous(rank: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).double().to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(4, 2).double().t())
    batch = lambda rank, step: numbers(rank, step, 27).unflatten(1, (3, 3, 3))  # noqa: E731
    trained = check_parity(rank, model, fs.always()(model), batch)
    assert {k: p.stride() for k, p in trained.items()} == {k: p.stride() for k, p in model.named_parameters()}


def test_noncontiguous_parameter(gloo2: Pool) -> None:
    """Parameters of another memory format, an error in the peer, train and keep their strides."""
    gloo2.run(not_contiguous)
