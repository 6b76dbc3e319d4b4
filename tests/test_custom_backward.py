"""Modules that a custom autograd.Function runs in its backward, after their call: an error by name, or right as arguments."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from depth import at_most, pairs
from models import EXACT, unchanged
from parity import GRADIENTS
from ranks import real_ranks
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import funshard as fs
from funshard import P

POLICIES = {
    "layers": fs.by_type(nn.Linear),
    "remat": fs.by_type(nn.Linear, p=P("shard", remat=True)),
    "whole": fs.policies.whole(),
    "remat_whole": fs.policies.whole(P("shard", remat=True)),
    "kept": fs.by_type(nn.Linear, p=P("shard", reshard=False)),
    "replicated": fs.by_type(nn.Linear, p=P()),
}


class Reversible(torch.autograd.Function):
    """As Reformer and RevNet have it: backward fills the ``.grad`` of the modules' own parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: list[nn.Module]) -> Tensor:
        ctx.blocks, ctx.x = blocks, x
        with torch.no_grad():
            return x + blocks[0](x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            (x + ctx.blocks[0](x)).backward(dy)
        return x.grad, None


class Implicit(torch.autograd.Function):
    """As implicit layers have it: only backward runs the module. torch.func takes it as well."""

    @staticmethod
    def forward(x: Tensor, func: nn.Module) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.func = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.func(ctx.saved_tensors[0]), None


class Arguments(torch.autograd.Function):
    """What the error tells to write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, func: nn.Module, names: list[str], *params: Tensor) -> Tensor:
        ctx.func, ctx.names = func, names
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return func(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        with torch.enable_grad():
            x, *params = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            out = torch.func.functional_call(ctx.func, dict(zip(ctx.names, params, strict=True)), (x,))
            dx, *dparams = torch.autograd.grad(out, (x, *params), dy)
        return dx, None, None, *dparams


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inp, self.f = kind, nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        h = self.inp(x)
        if self.kind == "reversible":
            h = Reversible.apply(h, [self.f])
        elif self.kind == "implicit":
            h = Implicit.apply(h, self.f)
        else:
            params = dict(self.f.named_parameters())
            h = Arguments.apply(h, self.f, [*params], *params.values())
        return {"out": h}


def build(kind: str) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(kind).double(), torch.randn(2, 3, dtype=torch.float64)


def refused(kind: str, policy: str, way: str, *, skeleton: bool = False) -> None:
    model, x = build(kind)
    spec = POLICIES[policy](model)
    params = fs.shard(model, spec)
    called = fs.skeleton(model) if skeleton else model
    with (
        unchanged(model),
        pytest.raises(RuntimeError, match=r"'f\.0' runs in backward, after its functional_call, and would read"),
    ):
        GRADIENTS[way](lambda p: fs.functional_call(called, p, x, spec=spec)["out"].square().mean())(params)
    assert all(p.grad is None for p in model.parameters())
    gc.collect()
    assert not torch_module._global_forward_pre_hooks
    called.f(x) if not skeleton else None


KINDS = [*(("reversible", way) for way in ("fs", "backward")), *(("implicit", way) for way in GRADIENTS)]
"""The old style is not for torch.func."""


@at_most(1)
@pairs
@pytest.mark.parametrize("skeleton", [False, True], ids=["model", "skeleton"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_modules_that_run_in_backward_are_refused(kind: str, policy: str, way: str, skeleton: bool) -> None:
    """By name, whoever runs backward; nothing is left in the model, nor in torch's hooks for all modules."""
    refused(kind, policy, way, skeleton=skeleton)


@real_ranks(2)
def test_on_two_ranks(rank: int) -> None:
    """Refused on every rank, which may go on; as arguments right."""
    refused("reversible", "layers", "fs")
    parameters_as_arguments("layers")


def parameters_as_arguments(policy: str) -> None:
    model, x = build("arguments")
    model(x)["out"].square().mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    spec = POLICIES[policy](model)
    params = fs.shard(model, spec)
    for way in ("fs", "backward"):
        grads = GRADIENTS[way](lambda p: fs.functional_call(model, p, x, spec=spec)["out"].square().mean())(params)
        torch.testing.assert_close(fs.unshard(grads, spec), want, **EXACT)


@pytest.mark.parametrize("policy", [name for name in POLICIES if "remat" not in name])
def test_parameters_as_arguments_are_right(policy: str) -> None:
    """What the error says to write: the Function takes the parameters, and its backward torch.func.functional_call."""
    parameters_as_arguments(policy)


def test_the_models_own_parameters_may_be_given() -> None:
    """Then a module that runs in backward reads what was given."""
    model, x = build("reversible")
    model(x)["out"].square().mean().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    fs.functional_call(model, dict(model.named_parameters()), x, spec=fs.by_type(nn.Linear)(model))[
        "out"
    ].square().mean().backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, want, **EXACT)


def test_other_modules_may_run_in_backward() -> None:
    """Another model, and this one before backward and after it."""
    model, x = build("arguments")
    teacher = nn.Linear(3, 3).double()
    spec = POLICIES["layers"](model)
    leaves = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
    out = fs.functional_call(model, leaves, x, spec=spec)["out"]
    out.register_hook(lambda g: g + teacher(x).detach())
    model(x)
    out.sum().backward()
    model(x)
