"""Plain autograd on two real ranks: two losses, in-place changes and autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import refused
from parity import average_gradients, leaves_of, numbers
from ranks import real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Middle(nn.Module):
    """Two units around an activation, and a parameter of the root."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 2, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(2, dtype=dtype))

    def forward(self, x: Tensor, clobber: bool = False) -> Tensor:
        h = torch.tanh(self.a(x))
        out = self.b(h) * self.scale
        if clobber:
            h.mul_(2)
        return out


def squared(out: Tensor) -> Tensor:
    return (out.abs() ** 2).mean()


def setting(model: nn.Module, p: fs.P | None = None) -> tuple[fs.PartitionSpec, fs.Params]:
    spec = fs.policies.always(p or fs.P("shard"))(model).bound
    return spec, leaves_of(fs.shard(model, spec))


def mean(call: Any, x: Tensor, model: nn.Module, spec: fs.PartitionSpec, loss: Any = squared) -> fs.Params:
    """This rank's shards of the mean over ranks of plain gradients."""
    plain = copy.deepcopy(model)
    loss(call(plain, x)).backward()
    return fs.shard(average_gradients(plain), spec)


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@real_ranks(2)
def test_two_losses_and_a_changed_activation(rank: int) -> None:
    """Two losses of one forward, one backward each: their gradients add up, and each alone is right. An activation that is
    changed before is an error as in plain autograd, whose own check the saved-tensor hooks switch off."""
    model, x = Middle(), numbers(rank, 0, 3)
    spec, params = setting(model)
    out = fs.functional_call(model, params, x, spec=spec)
    other = lambda out: out.exp().sum()  # noqa: E731
    each = [mean(plainly, x, model, spec, loss) for loss in (squared, other)]
    alone = torch.autograd.grad(other(out), list(params.values()), retain_graph=True)
    assert_close(dict(zip(params, alone, strict=True)), each[1], **CLOSE)
    squared(out).backward(retain_graph=True)
    other(out).backward()
    assert_close({k: p.grad for k, p in params.items()}, {k: each[0][k] + each[1][k] for k in params}, **CLOSE)
    refused(RuntimeError, "modified by an inplace operation", lambda: squared(model(x, True)).backward())
    loss = squared(fs.functional_call(model, params, (x, True), spec=spec))
    refused(RuntimeError, r"tensor of shape \[4, 5\] .* was modified in place", lambda: loss.backward())


@real_ranks(2)
def test_shard_changed_before_backward(rank: int) -> None:
    """An optimizer step between forward and backward: an error that names the unit, or the weights that forward used."""
    model, x = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))), numbers(rank, 0, 3)
    for changed in ("0", "1", "2"):
        spec, params = setting(model)
        loss = squared(fs.functional_call(model, params, x, spec=spec))
        with torch.no_grad():
            params[changed].add_(1)
        if changed == "1":  # backward does not read the weight of the first layer, and has kept that of the last
            words = r"shard of unit '1' was modified in place.*expected version \d+, got"
            refused(RuntimeError, words, lambda: loss.backward())
        else:
            loss.backward()
            assert_close({k: p.grad for k, p in params.items()}, mean(plainly, x, model, spec), **CLOSE)


@pytest.mark.parametrize("p", [fs.P("shard"), fs.P("shard", reshard=False)], ids=str)
@real_ranks(2)
def test_autocast(rank: int, p: fs.P) -> None:
    """Under autocast to bfloat16: the outputs bit by bit, and the mean of the gradients, of plain autocast."""
    model, x = Middle(torch.float32), numbers(rank, 0, 3).float()
    spec, params = setting(model, p)

    def cast(call: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    out, want = cast(lambda x: fs.functional_call(model, params, x, spec=spec), x), cast(model, x)
    assert out.dtype == want.dtype
    assert torch.equal(out, want)
    squared(out).backward()
    for k, g in mean(cast, x, model, spec).items():
        assert params[k].grad.dtype == torch.float32
        assert_close(params[k].grad, g)
