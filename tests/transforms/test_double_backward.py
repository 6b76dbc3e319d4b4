"""Plain autograd on two real ranks: double backward, two losses, in-place changes and autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from models import refused
from ranks import real_ranks
from torch import Tensor, nn
from torch.testing import assert_close

import funshard as fs

SIZE = 2
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


def xs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SIZE, 4, 3, generator=torch.Generator().manual_seed(5), dtype=dtype)


def squared(out: Tensor) -> Tensor:
    return (out.abs() ** 2).mean()


def setting(model: nn.Module, policy: fs.Policy | None = None) -> tuple[fs.PartitionSpec, fs.Params]:
    spec = (policy or fs.policies.always())(model).bound
    return spec, {k: p.requires_grad_() for k, p in fs.shard(model, spec).items()}


def mean(gradients: Callable[[Tensor], list[Tensor]], model: nn.Module, spec: fs.PartitionSpec) -> fs.Params:
    """This rank's shards of the mean over ranks of plain gradients, from a function of one rank's batch."""
    each = [gradients(x) for x in xs(next(model.parameters()).dtype)]
    names = [name for name, _ in model.named_parameters()]
    return fs.shard({n: torch.stack(g).mean(0) for n, *g in zip(names, *each, strict=True)}, spec)


def plain(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: list(torch.autograd.grad(loss(model(x)), list(model.parameters())))


def grads_of(params: fs.Params) -> fs.Params:
    return {k: p.grad for k, p in params.items()}


@real_ranks(2)
def test_create_graph(rank: int) -> None:
    """backward twice through: the gradient of (grad . v) is the shard of the mean Hessian-vector product."""
    model = Middle()
    spec, params = setting(model)
    full_v = {n: p.detach().cos() for n, p in model.named_parameters()}
    v = fs.shard(full_v, spec)

    def plain_hvp(x: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(squared(model(x)), list(model.parameters()), create_graph=True)
        inner = sum((g * v).sum() for g, v in zip(first, full_v.values(), strict=True))
        return list(torch.autograd.grad(inner, list(model.parameters())))

    loss = squared(fs.functional_call(model, params, xs()[rank], spec=spec))
    with warnings.catch_warnings():  # of the cycle that is cut below
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
        loss.backward(create_graph=True)
    first = grads_of(params)
    assert_close({k: g.detach() for k, g in first.items()}, mean(plain(model, squared), model, spec), **CLOSE)
    second = torch.autograd.grad(sum((g * v[k]).sum() for k, g in first.items()), list(params.values()))
    for p in params.values():
        p.grad = None  # a leaf and the graph of its gradient hold each other
    assert_close(dict(zip(params, second, strict=True)), mean(plain_hvp, model, spec), **CLOSE)


@real_ranks(2)
def test_two_losses_and_a_changed_activation(rank: int) -> None:
    """Two losses of one forward, one backward each: their gradients add up, and each alone is right. An activation that is
    changed before is an error as in plain autograd, whose own check the saved-tensor hooks switch off."""
    model = Middle()
    spec, params = setting(model)
    out = fs.functional_call(model, params, xs()[rank], spec=spec)
    other = lambda out: out.exp().sum()  # noqa: E731
    each = [mean(plain(model, loss), model, spec) for loss in (squared, other)]
    alone = torch.autograd.grad(other(out), list(params.values()), retain_graph=True)
    assert_close(dict(zip(params, alone, strict=True)), each[1], **CLOSE)
    squared(out).backward(retain_graph=True)
    other(out).backward()
    assert_close(grads_of(params), {k: each[0][k] + each[1][k] for k in params}, **CLOSE)
    refused(RuntimeError, "modified by an inplace operation", lambda: squared(model(xs()[rank], True)).backward())
    loss = squared(fs.functional_call(model, params, (xs()[rank], True), spec=spec))
    refused(RuntimeError, r"tensor of shape \[4, 5\] .* was modified in place", lambda: loss.backward())


@real_ranks(2)
def test_shard_changed_before_backward(rank: int) -> None:
    """An optimizer step between forward and backward: an error that names the unit, or the weights that forward used."""
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)))
    expected = mean(plain(model, squared), model, fs.policies.always()(model).bound)
    for changed in ("0", "1", "2"):
        spec = fs.policies.always()(model).bound
        params = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
        loss = squared(fs.functional_call(model, params, xs()[rank], spec=spec))
        with torch.no_grad():
            params[changed].add_(1)
        if changed != "1":  # backward does not read the weight of the first layer, and has kept that of the last
            loss.backward()
            assert_close(grads_of(params), expected, **CLOSE)
            continue
        with pytest.raises(RuntimeError, match=rf"shard of unit '{changed}' was modified in place.*expected version \d+, got"):
            loss.backward()


@real_ranks(2)
def test_autocast(rank: int) -> None:
    """Under autocast to bfloat16: the outputs bit by bit, and the mean of the gradients, of plain autocast."""
    model = Middle(torch.float32)
    x = xs(torch.float32)

    def cast(x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    for p in (fs.P("shard"), fs.P("shard", reshard=False)):
        spec, params = setting(model, fs.policies.always(p))
        out = cast(x[rank], lambda x, s=spec, p=params: fs.functional_call(model, p, x, spec=s))
        want = cast(x[rank], model)
        assert out.dtype == want.dtype
        assert torch.equal(out, want)
        squared(out).backward()
        parameters = list(model.parameters())
        expected = mean(lambda x: list(torch.autograd.grad(squared(cast(x, model)), parameters)), model, spec)
        for k, g in expected.items():
            assert params[k].grad.dtype == torch.float32
            assert_close(params[k].grad, g)
