"""ZeRO-1 by composition: parameters replicated, optimizer state for slices, the two specs joined by reshard."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_log import Collectives, Sent, gather, reduce, world
from depth import at_most
from ranks import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import funshard as fs

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))


def specs(module: nn.Module) -> tuple[fs.PartitionSpec, fs.PartitionSpec]:
    """Replicated for the gradients, split for the state."""
    return fs.policies.always(fs.P())(module), fs.policies.always(fs.P("shard", align=1))(module)


def batches(ranks: int) -> Tensor:
    return torch.randn(STEPS, ranks, 4, 5, generator=torch.Generator().manual_seed(1))


def train(module: nn.Module, xs: Tensor) -> tuple[fs.Params, dict[str, Any]]:
    """Full parameters after a step on each of this rank's batches, and this rank's optimizer state."""
    replicated, split = specs(module)
    params = fs.shard(module, replicated)
    init, update = fs.optim.from_torch(torch.optim.AdamW, donate=True, **OPTIONS)
    state = init(fs.reshard(params, replicated, split))
    for x in xs:
        grads = fs.grad(lambda p, x=x: fs.functional_call(module, p, (x,), spec=replicated).pow(2).mean())(params)
        own, own_grads = (fs.reshard(tree, replicated, split) for tree in (params, grads))
        own, state = update(own_grads, state, own)
        params = fs.reshard(own, split, replicated)
    return fs.unshard(params, replicated), state


def joined(ranks: int) -> fs.Params:
    """Plain AdamW on the batches of all ranks together."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    for x in batches(ranks):
        optimizer.zero_grad()
        module(x.flatten(0, 1)).pow(2).mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def nbytes(states: Any) -> int:
    return sum(t.nbytes for values in states for name, t in values.items() if name != "step")


def by_torch(x: Tensor) -> tuple[fs.Params, int]:
    """ZeroRedundancyOptimizer under DDP: the parameters, and the bytes of this rank's state."""
    ddp = DistributedDataParallel(model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **OPTIONS)
        for batch in x:
            optimizer.zero_grad()
            ddp(batch).pow(2).mean().backward()
            optimizer.step()
    return {n: p.detach() for n, p in ddp.module.named_parameters()}, nbytes(optimizer.optim.state.values())


def on_real_ranks(rank: int, ranks: int) -> tuple[int, int]:
    xs = batches(ranks)[:, rank]
    got, state = train(model(), xs)
    peer, of_peer = by_torch(xs)
    assert_close(got, peer, rtol=1e-6, atol=1e-6)
    assert_close(got, joined(ranks), rtol=1e-6, atol=1e-6)
    return nbytes(state.values()), of_peer


@at_most(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_redundancy_optimizer(ranks: int, gloo2: Pool, gloo4: Pool) -> None:
    """Its parameters to 1e-6, those of the joined batch as well; the state is one part in N on every rank, but for padding."""
    sizes = (gloo2 if ranks == 2 else gloo4).run(on_real_ranks, ranks)
    whole = 2 * sum(p.nbytes for p in model().parameters())
    padding = 2 * 4 * len(specs(model())[1])  # less than an element of each moment of each unit
    for ours, _ in sizes:
        assert whole / ranks <= ours < whole / ranks + padding
    assert max(ours for ours, _ in sizes) <= max(theirs for _, theirs in sizes)  # which cannot split a tensor
    assert sum(theirs for _, theirs in sizes) == whole


def saved(rank: int, path: str) -> None:
    module = model()
    replicated, split = specs(module)
    params, state = train(module, batches(2)[:, rank])
    params = fs.shard(params, replicated)
    fs.checkpoint.save(path, {"params": fs.reshard(params, replicated, split), "opt": state}, split)
    assert_close(fs.checkpoint.load(path, replicated, only="params"), params, rtol=0, atol=0)
    assert_close(fs.checkpoint.load(path, split, only="opt"), state, rtol=0, atol=0)


def test_one_checkpoint_has_both(gloo2: Pool, tmp_path: Path) -> None:
    """As the page on checkpoints says."""
    gloo2.run(saved, str(tmp_path / "1"))


def test_simulated_ranks() -> None:
    """The same on three ranks in one process, without a collective to or from a slice but the gather."""
    module = model()
    xs = batches(3).transpose(0, 1)

    def rank(mesh: Any, x: Tensor) -> fs.Params:
        replicated, split = (spec.on(mesh) for spec in specs(module))
        params = fs.shard({n: p.detach() for n, p in module.named_parameters()}, replicated)
        init, update = fs.optim.from_torch(torch.optim.SGD, lr=0.05, momentum=0.9)
        state = init(fs.reshard(params, replicated, split))
        for batch in x:
            grads = fs.grad(lambda p, b=batch: fs.functional_call(module, p, (b,), spec=replicated).pow(2).mean())(params)
            own, state = update(fs.reshard(grads, replicated, split), state, fs.reshard(params, replicated, split))
            params = fs.reshard(own, split, replicated)
        return fs.unshard(params, replicated)

    got = fs.testing.spmd(rank, 3)(xs)
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for x in batches(3):
        optimizer.zero_grad()
        plain(x.flatten(0, 1)).pow(2).mean().backward()
        optimizer.step()
    for name, p in plain.named_parameters():
        assert_close(got[name], p.detach().expand(3, *p.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_what_is_sent(size: int) -> None:
    """A reduction of each unit's gradient and a gather of each unit; slices are taken without a word."""
    with world(size):
        module = model()
        replicated, split = specs(module)
        params = fs.shard(module, replicated)
        init, update = fs.optim.from_torch(torch.optim.AdamW, **OPTIONS)
        x = torch.ones(4, 5)
        grads = fs.grad(lambda p: fs.functional_call(module, p, (x,), spec=replicated).sum())(params)
        with Collectives() as slicing:
            own, own_grads = (fs.reshard(tree, replicated, split) for tree in (params, grads))
            state = init(own)
        with Collectives() as updating:
            own, state = update(own_grads, state, own)
        with Collectives() as gathering:
            new = fs.reshard(own, split, replicated)
        with Collectives() as reducing:
            fs.grad(lambda p: fs.functional_call(module, p, (x,), spec=replicated).sum())(params)
        assert {key: p.shape for key, p in new.items()} == {key: p.shape for key, p in params.items()}
        assert (slicing.all, updating.all) == ([], [])
        assert gathering.all == ([gather(split.bound, key) for key in split.by_key] if size > 1 else [])
        # Gradients of replicated units may travel together.
        assert {sent.op for sent in reducing.all} == ({"all_reduce"} if size > 1 else set())
        wanted: list[Sent] = [reduce(replicated.bound, key, size) for key in replicated.by_key]
        assert sum(s.numel for s in reducing.all) == (sum(s.numel for s in wanted) if size > 1 else 0)
        assert len(reducing.all) <= len(wanted)
