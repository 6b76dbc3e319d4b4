"""Training parity: torch's own claims for FSDP (test_fully_shard_training, test_fsdp_core), on real ranks.

Every run is held, at every step, against a plain copy whose gradients are averaged by hand: losses, gradients and
parameters, with other data on each rank, in double precision at torch's own tolerance for it (1e-7).
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from depth import at_most, depth, each
from parity import (
    MAIN_WAYS,
    WAYS,
    average_gradients,
    check_parity,
    next_token,
    numbers,
    same,
    sharded_call,
    squared,
    tokens,
)
from peer_models import MLP, Block, Chunked, Net, Transformer, chain
from ranks import real_ranks
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import funshard as fs
from funshard import P

STRATEGIES = {"FULL_SHARD": P("shard"), "SHARD_GRAD_OP": P("shard", reshard=False), "NO_SHARD": P()}


def double_linear(shapes: list[tuple[int, int]]) -> nn.Module:
    return nn.Sequential(nn.Linear(*shapes[0]), nn.ReLU(), nn.Linear(*shapes[1])).double()


SHAPES = [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)], [(1, 1), (1, 1)]]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@real_ranks(4)
def test_train_parity_single_group_shard_dim0(rank: int, shapes: list[tuple[int, int]]) -> None:
    """Shapes that four ranks do not divide, down to ranks that own nothing but padding."""
    model = double_linear(shapes)
    batch = lambda rank, step: numbers(rank, step, shapes[0][0])  # noqa: E731
    check_parity(rank, model, fs.policies.whole()(model), batch, steps=depth(3, 10))


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_train_parity_multi_group(rank: int, strategy: str, way: str) -> None:
    """A transformer with one unit for each block, by every way to differentiate."""
    model = Transformer()
    check_parity(
        rank,
        model,
        fs.by_type(Block, p=STRATEGIES[strategy])(model),
        tokens,
        next_token,
        way=way,
        steps=depth(3, 10) if way == "fs" else 3,
    )


PEERS = [("FSDP2", "FULL_SHARD"), ("FSDP2", "HYBRID_SHARD"), ("DDP", "SHARD_GRAD_OP"), ("DDP", "NO_SHARD")]


@at_most(2)
@pytest.mark.parametrize(("peer", "strategy"), PEERS)
@real_ranks(4)
def test_fsdp_cpu_training(rank: int, strategy: str, peer: str) -> None:
    """Steps of Adam next to torch's own DDP and FSDP2 on the same ranks: losses and the trained parameters."""
    model = Transformer(depth(2, 3))
    spec = fs.by_type(Block, p=STRATEGIES.get(strategy, P("shard")))(model)
    if strategy == "HYBRID_SHARD":
        spec = spec.on(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    spec = spec.bound
    other = copy.deepcopy(model)
    if peer == "FSDP2":
        for layer in other.layers:
            fully_shard(layer)
        fully_shard(other)
    else:
        other = DistributedDataParallel(other)
    params = fs.shard(model, spec)
    ours = torch.optim.Adam(params.values(), lr=1e-2)
    theirs = torch.optim.Adam(other.parameters(), lr=1e-2)
    for step in range(depth(2, 10)):
        ids = tokens(rank, step)
        theirs.zero_grad()
        expected = next_token(other, ids)
        expected.backward()
        theirs.step()
        grads, value = fs.grad_and_value(lambda p: next_token(sharded_call(model, p, spec), ids))(params)
        for key, shard in params.items():
            shard.grad = grads[key]
        ours.step()
        assert_close(value, expected.detach())
    state = {k.removeprefix("module."): p.detach() for k, p in other.named_parameters()}
    same(fs.gather_full(params, spec), {k: getattr(p, "full_tensor", lambda p=p: p)() for k, p in state.items()}, peer)


@real_ranks(2)
def test_nested_wrapped_model(rank: int) -> None:
    """Every layer a unit, containers as units, a replicated unit around sharded ones: SGD with momentum."""
    for model, policy in [
        (chain(), fs.policies.always()),
        (nn.Sequential(MLP(5), nn.Sequential(MLP(5), MLP(5))), fs.by_type(MLP, nn.Sequential)),
        (Net(), fs.policies.override(fs.policies.always(), fs.by_path({"blocks.1": P()}))),
    ]:
        options = {"optimizer": torch.optim.SGD, "momentum": 0.9}
        trained = check_parity(rank, model, policy(model), steps=depth(3, 4), **options)
        assert not any(torch.equal(p, trained[name]) for name, p in model.named_parameters())


@real_ranks(2)
def test_to_float64_after_init(rank: int) -> None:
    """Shards cast after sharding compute in the new dtype, whatever the module's own parameters are."""
    model = Net().float()
    spec = fs.by_type(MLP)(model).bound
    reference, x = copy.deepcopy(model).double(), numbers(rank, 0)
    params = {key: shard.double() for key, shard in fs.shard(model, spec).items()}
    grads, value = fs.grad_and_value(lambda p: squared(sharded_call(model, p, spec), x))(params)
    expected = squared(reference, x)
    expected.backward()
    assert value.dtype == torch.float64
    assert_close(value, expected.detach())
    full = fs.gather_full(grads, spec)
    assert {g.dtype for g in full.values()} == {torch.float64}
    same(full, average_gradients(reference), "gradient")


@real_ranks(2)
def test_non_root_forward_backward(rank: int) -> None:
    """Steps through the whole model in turn with steps through a part of it, entered by another method than forward."""
    model = Net()
    loss = lambda call, x: squared(lambda x: call(x, method="features" if x[0, 0] > 0 else None), x)  # noqa: E731
    batch = lambda rank, step: numbers(rank, step).abs() * (-1) ** step  # noqa: E731  the same branch on all ranks
    check_parity(rank, model, fs.by_type(MLP)(model), batch, loss)


@real_ranks(2)
def test_non_root_forward_backward_of_a_submodule(rank: int) -> None:
    """The shard of a unit serves the submodule called by itself."""
    model, x = Net(), numbers(rank, 0)
    spec, part = fs.by_type(MLP)(model).bound, fs.policies.whole()(model.blocks[1]).bound
    params = fs.shard(model, spec)
    loss = lambda p: squared(sharded_call(model.blocks[1], {"": p["blocks.1"]}, part), x)  # noqa: E731
    grads, value = fs.grad_and_value(loss)(params)
    expected = squared(model.blocks[1], x)
    expected.backward()
    assert_close(value, expected.detach())
    same(fs.gather_full(grads, spec), average_gradients(model), "gradient")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = MLP(5), nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(2 * torch.sigmoid(self.outer(x))))


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_multi_forward_module(rank: int, strategy: str, way: str) -> None:
    """A unit that runs twice in a forward, with others in between, has the sum of both gradients."""
    for policy in (fs.by_type(MLP, p=STRATEGIES[strategy]), fs.policies.always(STRATEGIES[strategy])):
        check_parity(rank, Twice(), policy(Twice()), way=way)


@at_most(1)
@each
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", ["fs", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_train_parity_with_activation_checkpointing(rank: int, strategy: str, way: str, tied: bool) -> None:
    """torch.utils.checkpoint around the call recomputes it, gathers included, to the same gradients."""
    model = Transformer(tied=tied)

    def loss(call, ids: Tensor) -> Tensor:
        run = lambda ids: torch.utils.checkpoint.checkpoint(call, ids, use_reentrant=False)  # noqa: E731
        return next_token(run, ids)

    check_parity(rank, model, fs.by_type(Block, p=STRATEGIES[strategy])(model), tokens, loss, way=way, steps=3)


@each
@pytest.mark.parametrize("way", MAIN_WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@real_ranks(2)
def test_partial_group_forward_then_standalone(rank: int, strategy: str, way: str) -> None:
    """A unit of which one part runs in the trunk and another is then called for each chunk of a chunked loss."""

    def loss(call, ids: Tensor) -> Tensor:
        chunks = call(ids, method="trunk").chunk(3, 1)
        return sum((call(chunk, method="project") ** 2).mean() for chunk in chunks)

    check_parity(rank, Chunked(1), fs.by_type(Block, p=STRATEGIES[strategy])(Chunked(1)), tokens, loss, way=way)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(MLP(5), nn.Sequential(MLP(5), nn.Tanh()))
        self.policy, self.value = nn.Linear(5, 3).double(), nn.Linear(5, 1).double()

    def forward(self, x: Tensor, head: str = "policy") -> Tensor:
        return getattr(self, head)(self.trunk(x))


@at_most(1)
@pytest.mark.parametrize("way", MAIN_WAYS)
@real_ranks(2)
def test_double_partial_forward_then_backward(rank: int, way: str) -> None:
    """Several forwards, then one backward (DPO), nested units and an unused head."""

    def loss(call, x: Tensor) -> Tensor:
        chosen, rejected = call(x), call(-x)
        again = torch.utils.checkpoint.checkpoint(call, x + 1, use_reentrant=False) if way == "backward" else call(x + 1)
        return nn.functional.softplus(rejected - chosen + again).mean()

    model = TwoHeads()
    trained = check_parity(rank, model, fs.by_type(MLP, nn.Sequential, nn.Linear)(model), loss=loss, way=way)
    assert torch.equal(trained["value.weight"], model.value.weight)  # unused: gradient zeros, and no step


class Raising(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if x.shape[0] == 3:
            raise KeyError("halfway")
        return self.head(self.blocks[1](x))


@at_most(1)
@pytest.mark.parametrize("way", MAIN_WAYS)
@real_ranks(2)
def test_reset_iter_state_after_exception(rank: int, way: str) -> None:
    """Nothing to reset: a step after one that raised halfway is right."""
    model = Raising()
    spec = fs.by_type(MLP)(model).bound
    for _ in range(2):
        with pytest.raises(KeyError, match="halfway"):
            WAYS[way](lambda p: squared(sharded_call(model, p, spec), numbers(rank, 0)[:3]))(fs.shard(model, spec))
        check_parity(rank, model, spec, way=way, steps=2)


@real_ranks(2)
def test_unshard_async(rank: int) -> None:
    """All units are gathered while a collective of the caller's own is under way: the gradients of the scheduled call."""
    model = chain()
    spec = fs.policies.always()(model).bound
    params, x = fs.shard(model, spec), numbers(rank, 0)
    mine = torch.full((3,), float(rank))
    work = dist.all_reduce(mine, async_op=True)
    full = fs.unshard(params, spec)
    grads = fs.reduce_grads(fs.grad(lambda p: squared(sharded_call(model, p, spec), x))(full), spec)
    assert work is not None
    work.wait()
    assert mine.tolist() == [1.0] * 3
    same(grads, fs.grad(lambda p: squared(sharded_call(model, p, spec), x))(params), "gradient")


@real_ranks(2)
def test_fsdp_multiple_wrapping(rank: int) -> None:
    """A model that was sharded is sharded again by another policy as if it had not been, and trains."""
    model = chain()
    inner, outer = fs.policies.always()(model), fs.policies.whole()(model)
    once = fs.shard(model, outer)
    again = fs.shard(fs.unshard(fs.shard(model, inner), inner), outer)
    assert all(torch.equal(again[key], once[key]) for key in once)
    check_parity(rank, model, outer)
