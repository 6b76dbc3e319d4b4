"""What goes in and comes out of a sharded model: torch's own claims of test_fully_shard_autograd and test_fsdp_misc."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
from depth import at_most, each
from models import unchanged
from parity import MAIN_WAYS, WAYS, average_gradients, check_parity, numbers, plain_call, same, sharded_call, squared
from peer_models import MLP, Net
from ranks import real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard.collectives import Mesh

STRATEGIES = {"reshard": P("shard"), "keep": P("shard", reshard=False), "replicate": P()}


class DoubleLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

    def forward(self, x: Tensor, second: bool = True) -> tuple[Tensor, Tensor] | Tensor:
        out = torch.relu(self.lin1(x))
        return (out, torch.relu(self.lin2(x))) if second else out


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = DoubleLinear(), DoubleLinear()

    def forward(self, x: Tensor, second: bool = True) -> Any:
        return self.b(self.a(x)[0], second)


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_unused_forward_output(rank: int, strategy: str, way: str) -> None:
    """The second output is in the loss for three steps and then no more: gradients of its weights become zeros."""

    def loss(call, batch: tuple[Tensor, bool]) -> Tensor:
        x, both = batch
        first, second = call(x)
        return first.sum() + second.sum() if both else first.sum()

    def batch(rank: int, step: int) -> tuple[Tensor, bool]:
        return numbers(rank, step), step < 3

    for policy in (fs.by_type(DoubleLinear, p=STRATEGIES[strategy]), fs.policies.always(STRATEGIES[strategy])):
        check_parity(rank, TwoLayers(), policy(TwoLayers()), batch, loss, way=way)


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_unused_forward_module(rank: int, strategy: str, way: str) -> None:
    """A module that never runs, in a unit of its own or with others, stays what it is."""
    loss = lambda call, x: call(x, second=False).sum()  # noqa: E731
    for policy in (fs.by_type(DoubleLinear, p=STRATEGIES[strategy]), fs.policies.always(STRATEGIES[strategy])):
        model = TwoLayers()
        trained = check_parity(rank, model, policy(model), loss=loss, way=way)
        assert torch.equal(trained["b.lin2.weight"], model.b.lin2.weight)
        assert not torch.equal(trained["b.lin1.weight"], model.b.lin1.weight)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Structured(nn.Module):
    """Blocks that hand each other a container of the given kind, with something in it that is no tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Inner(kind) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mlp = kind, MLP(5)

    def forward(self, value: Any) -> Any:
        x, y = parts(value, self.kind)
        return pack(self.mlp(x) + y, torch.tanh(y), self.kind)


def pack(x: Tensor, y: Tensor, kind: str) -> Any:
    nested = {"x": x, "rest": [(y, None, "text"), 3]}
    return {"list": [x, y], "tuple": (x, y), "namedtuple": Pair(x, y), "dict": {"x": x, "y": y}, "nested": nested}[kind]


def parts(value: Any, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "nested":
        return value["x"], value["rest"][0][0]
    return (value["x"], value["y"]) if kind == "dict" else tuple(value)


@at_most(3)
@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("kind", ["list", "tuple", "namedtuple", "dict", "nested"])
@real_ranks(2)
def test_nontensor_activations(rank: int, kind: str, way: str) -> None:
    """Lists, tuples, named tuples and dicts between units, into the model and out of it."""
    model = Structured(kind)

    def loss(call, x: Tensor) -> Tensor:
        out = call(pack(x, 2 * x, kind))
        assert type(out) is type(pack(x, x, kind))
        return sum((t**2).sum() for t in parts(out, kind))

    check_parity(rank, model, fs.by_type(Inner)(model), loss=loss, way=way, steps=4)


@real_ranks(2)
def test_post_acc_grad_hook_runs(rank: int) -> None:
    """A hook on a shard fires exactly once in a backward pass, when all gradients of the call are there."""
    model, fired = Net(), []
    spec = fs.by_type(MLP)(model).bound
    leaves = {key: shard.requires_grad_() for key, shard in fs.shard(model, spec).items()}
    for key, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(lambda _, key=key: fired.append(key))
    squared(sharded_call(model, leaves, spec), numbers(rank, 0)).backward()
    assert sorted(fired) == sorted(spec.by_key)


class NoGradPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.constant, self.head = MLP(5), MLP(5), nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = self.constant(x)
        return self.head(self.trained(x) + noise + self.constant(x).detach())


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_fsdp_module_no_compute_grad(rank: int, strategy: str, way: str) -> None:
    """A unit that runs under no_grad, or is detached, gets zeros and disturbs nothing."""
    model = NoGradPart()
    trained = check_parity(rank, model, fs.by_type(MLP, p=STRATEGIES[strategy])(model), way=way)
    assert torch.equal(trained["constant.in_proj.weight"], model.constant.in_proj.weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_fsdp_zero2_eval_with_prefetch(rank: int, strategy: str) -> None:
    """Evaluation, training and evaluation in turn: no_grad gives what grad mode gives, and what the module itself gives."""
    model, x = nn.Sequential(MLP(5), nn.BatchNorm1d(5).double(), MLP(5)), numbers(rank, 0)
    model[1].running_mean.fill_(0.25)  # trained statistics: initial ones are warned of
    spec = fs.by_type(MLP, p=STRATEGIES[strategy])(model).bound
    params = fs.shard(model, spec)
    for mode in (False, True, False):
        model.train(mode)
        expected = model(x) if not mode else None
        with unchanged(model):
            with torch.no_grad(), pytest.warns(fs.BufferWarning) if mode else contextlib.nullcontext():  # statistics, in vain
                quiet = sharded_call(model, params, spec)(x)
            grads, value = fs.grad_and_value(lambda p: squared(sharded_call(model, p, spec), x))(params)
        assert_close(value, (quiet**2).mean())
        assert expected is None or torch.equal(quiet, expected)
        assert all(g.any() for g in grads.values())


@real_ranks(2)
def test_param_change_after_init(rank: int) -> None:
    """The call computes with the parameters it is given, also after they changed in place."""
    model, x = Net(), numbers(rank, 0)
    spec = fs.by_type(MLP)(model).bound
    params = fs.shard(model, spec)
    doubled = {key: 2 * shard for key, shard in params.items()}
    out = sharded_call(model, doubled, spec)(x)
    for shard in params.values():
        shard.mul_(2)
    assert torch.equal(sharded_call(model, params, spec)(x), out)
    for p in model.parameters():
        p.data.mul_(2)
    assert_close(out, model(x))


@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_param_registration_after_forward_and_backward(rank: int, strategy: str, way: str) -> None:
    """Whatever stays gathered, after a step the module has its own parameters and the shards their own values."""
    model, x = Net(), numbers(rank, 0)
    spec = fs.by_type(MLP, p=STRATEGIES[strategy])(model).bound
    params = fs.shard(model, spec)
    before = {key: shard.clone() for key, shard in params.items()}
    with unchanged(model):
        WAYS[way](lambda p: squared(sharded_call(model, p, spec), x))(params)
    assert all(torch.equal(shard, before[key]) for key, shard in params.items())
    assert not any(shard.requires_grad for shard in params.values())


@real_ranks(2)
def test_set_reduce_scatter_divide_factor(rank: int) -> None:
    """reduce="sum" leaves the division to the loss: gradients are the sum over ranks divided by any factor."""
    model, x = Net(), numbers(rank, 0)
    spec = fs.by_type(MLP)(model).bound
    loss = lambda p: fs.functional_call(model, p, x, spec=spec, reduce="sum").sum() / 5  # noqa: E731
    grads = fs.gather_full(fs.grad(loss)(fs.shard(model, spec)), spec)
    (model(x).sum() / 5).backward()
    same(grads, {name: 2 * g for name, g in average_gradients(model).items()}, "sum over two ranks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_collective_ops_over_128_ranks(dtype: torch.dtype) -> None:
    """Odd sizes over 128 ranks: the gather restores every tensor, and gradients of rank % 8 reduce to their mean."""
    sizes = [17, 1, 3, 64, 129, 5, 2, 31]
    model = nn.ParameterList([torch.arange(float(n)).to(dtype) for n in sizes])
    full = dict(model.named_parameters())

    def run(mesh: Mesh, rank: Tensor) -> tuple[fs.Params, fs.Params]:
        spec = fs.policies.whole()(model).on(mesh)
        shards = fs.shard({name: p.detach() for name, p in full.items()}, spec)
        grads = fs.grad(lambda p: sum((t * (rank % 8)).sum() for t in fs.unshard(p, spec).values()))(shards)
        return fs.unshard(shards, spec), fs.unshard(grads, spec)

    gathered, grads = fs.testing.spmd(run, 128)(torch.arange(128).to(dtype))
    for name, p in full.items():
        assert torch.equal(gathered[name], p.detach().expand(128, -1))
        assert torch.equal(grads[name], torch.full_like(p, 3.5).expand(128, -1))


class NoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7).double())

    def forward(self) -> Tensor:
        return self.weight.exp()


@real_ranks(2)
def test_root_no_forward_inputs(rank: int) -> None:
    """A module whose forward takes nothing trains."""
    check_parity(
        rank, NoInput(), fs.policies.whole()(NoInput()), lambda rank, step: rank + step, lambda call, x: (call() * x).sum()
    )


@real_ranks(4)
def test_shard_placement_fn_contiguous_params_grads(rank: int) -> None:
    """Gathered parameters, shards and gradients are contiguous."""
    model = Net()
    spec = fs.by_type(MLP)(model).bound
    params = fs.shard(model, spec)
    grads = fs.grad(lambda p: squared(sharded_call(model, p, spec), numbers(rank, 0)))(params)
    tensors = [*fs.unshard(params, spec).values(), *params.values(), *grads.values()]
    assert all(t.is_contiguous() for t in tensors)
    assert {k: g.shape for k, g in grads.items()} == {k: p.shape for k, p in params.items()}


@real_ranks(2)
def test_fsdp_same_model_across_ranks(rank: int) -> None:
    """Ranks that initialised differently all train rank 0's parameters after scatter_full."""
    torch.manual_seed(rank)
    model = nn.Sequential(MLP(5), nn.BatchNorm1d(5, track_running_stats=False).double())
    spec = fs.by_type(MLP)(model).bound
    params = fs.scatter_full(dict(model.named_parameters()) if rank == 0 else None, spec)
    torch.manual_seed(0)
    expected = nn.Sequential(MLP(5), nn.BatchNorm1d(5, track_running_stats=False).double())
    same(fs.gather_full(params, spec), dict(expected.named_parameters()), "rank 0's parameter")
    x = numbers(0, 0)
    assert_close(sharded_call(model.eval(), params, spec)(x), plain_call(expected.eval())(x))
