"""Models with peft's adapters are sharded as they are: the base is frozen, and adapters have the plain model's gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from depth import at_most
from ranks import real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
BATCHES = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def adapted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, **KINDS[kind])
    return peft.get_peft_model(base, config).double()


def expected(kind: str) -> dict[str, Tensor]:
    """The gradients that peft's own model has of both batches."""
    model = adapted(kind)
    model(BATCHES.flatten(0, 1)).pow(2).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@at_most(2)
@pytest.mark.parametrize(("kind", "every"), [("lora", True), ("lora", False), ("rslora", True), ("dora", False)])
@real_ranks(2)
def test_gradients_of_adapters_are_the_plain_ones(rank: int, kind: str, every: bool) -> None:
    """Each Linear a unit, or each layer with its adapters."""
    model = adapted(kind)
    spec = fs.by_type(*((nn.Linear,) if every else (peft.tuners.lora.Linear,)))(model).bound

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, (BATCHES[rank],), spec=spec).pow(2).mean()

    if every:  # adapters are units of their own, and the others frozen
        trained, frozen = fs.partition(fs.shard(model, spec), spec)
        assert frozen
        got = fs.unshard(fs.grad(lambda p: loss(p | frozen))(trained), spec)
    else:
        got = fs.unshard(fs.grad(loss)(fs.shard(model, spec)), spec)
    wanted = expected(kind)
    assert all("lora_" in name for name in wanted)
    for name, grad in wanted.items():
        assert grad.abs().max() > 0
        assert_close(got[name], grad, rtol=1e-9, atol=1e-12)
