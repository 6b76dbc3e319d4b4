"""Plan.compare: choices beside each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funshard as fs

P = fs.P


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def plan_of(mesh: dict[str, int], **options: Any) -> fs._plan.plan.Plan:
    model = nn.Sequential(*(Block() for _ in range(2)))
    optimizer = fs.optim.from_torch(torch.optim.AdamW, lr=1e-3, donate=True)

    def step(params: Any, state: Any, batch: torch.Tensor, *, spec: fs.PartitionSpec, microbatches: int = 1) -> Any:
        def loss(params: fs.Params, x: torch.Tensor) -> torch.Tensor:
            return fs.functional_call(model, params, (x,), spec=spec).square().mean()

        grads, value = fs.accumulate(loss, params, list(batch.chunk(microbatches)), spec=spec)
        return *optimizer.update(grads, state, params), value

    return fs.plan(fs.by_type(Block)(model).on(mesh), step=step, batch=torch.ones(64, 32), optimizer=optimizer, **options)


def test_compare() -> None:
    """Each choice is the plan that fs.plan gives for it, and the fastest is first."""
    plan = plan_of({"shard": 4})
    found = plan.compare({"keep": P("shard", reshard=False), "all": P(), "remat": P("shard", remat=True), "same": plan.spec})
    assert set(found) == {"keep", "all", "remat", "same"}
    assert found["same"].peak == plan.peak
    assert found["remat"].peak < plan.peak < found["all"].peak
    assert {one.op for one in found["all"].traffic} == {"all_reduce"}
    times = [one.seconds for one in found.values()]
    assert times == sorted(times)
    assert all(name in str(found) for name in found)


def test_main_p_alone_changes() -> None:
    """Units with another P than the main one keep it."""
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 2))
    policy = fs.policies.override(fs.by_type(Block), fs.by_path({"2": P()}))
    plan = fs.plan(policy(model).on({"shard": 4}))
    changed = plan.compare({"keep": P("shard", reshard=False)})["keep"].spec
    assert changed.by_key["2"].p == P()
    assert changed.by_key["0"].p == P("shard", reshard=False)


def test_refusals() -> None:
    model = nn.Linear(4, 4)
    unbound = fs.policies.whole()(model)

    def step(params: Any, state: Any, batch: Any) -> Any:
        return fs.grad(lambda p: fs.functional_call(model, p, (batch,), spec=unbound).sum())(params)

    plan = fs.plan(unbound.on({"shard": 2}), step=step, batch=torch.ones(2, 4))
    with pytest.raises(ValueError, match="would run with the same spec"):
        plan.compare({"keep": P("shard", reshard=False)})
    with pytest.raises(TypeError, match="expected a PartitionSpec"):
        plan.compare({"3": 3})  # pyright: ignore[reportArgumentType]
