"""functional_call on two real ranks, where buffers are really freed and gathered again: values, gradients, the module."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from depth import at_most, every, pairs
from models import EXACT, Architecture, assert_mean_gradients, module_class, unchanged, with_forward
from parity import GRADIENTS, shards_of, squared_loss, strategies
from ranks import real_ranks
from torch import Tensor, nn

import funshard as fs


def linear(n_in: int = 3, n_out: int = 3) -> nn.Linear:
    return nn.Linear(n_in, n_out).double()


Pair = module_class(
    "Pair",
    lambda: {"a": linear(), "b": linear(), "scale": nn.Parameter(torch.randn(3).double())},
    lambda self, x: self.b(torch.tanh(self.a(x))) * self.scale,
)
"""Two linear units and a parameter of its own."""


def xs() -> Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(5)).double()


def squared(out: Tensor) -> Tensor:
    return (out**2).mean()


def setting(rank: int, model: nn.Module | None = None) -> tuple[nn.Module, fs.PartitionSpec, dict[str, Tensor], Tensor]:
    model = model or Pair()
    spec = fs.policies.always()(model).bound
    return model, spec, fs.shard(model, spec), xs()[rank]


@real_ranks(2)
def test_copies_of_modules_made_in_forward(rank: int) -> None:
    """They would hold the call's own parameters and forward: an error; a copy of the values is right."""

    def forward(self: Any, x: Tensor) -> Tensor:
        copy.deepcopy(nn.GELU())
        copy.deepcopy({k: v.detach() for k, v in self.a.state_dict().items()} if of_values else self.a)
        return Pair.forward(self, x)

    of_values = False
    model, spec, params, x = setting(rank, with_forward(Pair, forward)())
    with unchanged(model), pytest.raises(RuntimeError, match="module 'a' is copied or pickled in forward"):
        fs.functional_call(model, params, x, spec=spec)
    of_values = True
    assert torch.equal(fs.functional_call(model, params, x, spec=spec), model(x))


@real_ranks(2)
def test_generators(rank: int) -> None:
    """One that the model consumes itself is right, though it runs after its unit was left; a result is not (test_freed.py)."""

    def steps(self: Any, x: Tensor) -> Iterator[Tensor]:
        yield self.a(x)
        yield self.b(x) * self.scale

    parts = {"steps": with_forward(Pair, steps)(), "last": linear()}
    model = module_class("Model", lambda: parts, lambda self, x: self.last(sum(self.steps(x))))()
    made = Architecture(model, {"x": xs()}, lambda call, batch: squared(call(batch["x"])), ())
    kept = fs.policies.always(fs.P("shard", reshard=False))
    assert_mean_gradients(made, rank, {"always": fs.policies.always(), "whole": fs.policies.whole(), "kept": kept})


def force(self: Any, x: Tensor) -> Tensor:
    """A vmap over a submodule and a gradient by the input (a score, a force) inside forward."""
    each = torch.vmap(self.a)(x)
    return self.b(each) + torch.func.grad(lambda x: torch.tanh(self.b(self.a(x))).sum())(x) * self.scale


@real_ranks(2)
def test_transforms_inside_forward(rank: int) -> None:
    """Right where no buffer is freed for backward; else the clear error that says so (torch: no saved-tensor hooks)."""
    made = Architecture(with_forward(Pair, force)(), {"x": xs()}, lambda call, batch: squared(call(batch["x"])), ())
    assert_mean_gradients(made, rank, {"kept": fs.policies.always(fs.P("shard", reshard=False))})
    model, spec, params, x = setting(rank, made.model)
    for by in (fs.grad, torch.func.grad):
        with unchanged(model), pytest.raises(RuntimeError, match=r"torch\.func transform.*expected P\(reshard=False\)"):
            by(lambda p: squared(fs.functional_call(model, p, x, spec=spec)))(params)


@real_ranks(2)
def test_full_parameters_in_the_place_of_shards(rank: int) -> None:
    """What `unshard` gives, of some units or of all: the gradient of this rank's loss for them, the mean for the others."""
    model, spec, params, x = setting(rank)
    local = torch.func.grad(lambda p: squared(torch.func.functional_call(model, p, (x,))))(fs.unshard(params, spec))
    expected = fs.grad(lambda p: squared(fs.functional_call(model, p, x, spec=spec)))(params)
    for remat in (False, True):
        again = fs.by_type(nn.Linear, p=fs.P("shard", remat=remat))(model).bound
        for units in (["a"], ["", "b"], ["", "a", "b"]):
            full = fs.unshard(params, spec, units=units)
            mixed = {**full, **{key: shard for key, shard in params.items() if key not in units}}
            want = {key: local[key] if key in full else expected[key] for key in mixed}
            for by in (fs.grad, torch.func.grad):
                got = by(lambda p, again=again: squared(fs.functional_call(model, p, x, spec=again)))(mixed)
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class MuteError(RuntimeError):
    """An error without a message, since its class raises."""

    def __str__(self) -> str:
        raise KeyError("no message")


@real_ranks(2)
def test_an_error_of_forward_whose_message_cannot_be_read(rank: int) -> None:
    """It comes out as it is: where errors are looked through for torch's words, and told to the other ranks."""
    failing = [0, 1]

    def forward(self: Any, x: Tensor) -> Tensor:
        y = Pair.forward(self, x)
        if rank in failing:
            raise MuteError
        return y

    model, spec, params, x = setting(rank, with_forward(Pair, forward)())

    loss = squared_loss(model, spec, x)
    for call in (loss, fs.grad(loss), fs.grad(fs.remat(loss)), lambda params: fs.hvp(loss, params, params)):
        with pytest.raises(MuteError):
            call(params)
    failing.remove(0)
    with pytest.raises(MuteError if rank else RuntimeError) as raised, fs.check(20):
        fs.grad(loss)(params)
    if not rank:
        assert "rank 1 raised MuteError: no message: __str__ of MuteError raises" in str(raised.value)


# --- modules that a custom autograd.Function runs in its backward ---
POLICIES = {name: fs.by_type(nn.Linear, p=p) for name, p in strategies("shard", "remat", "keep", "replicated").items()}
POLICIES |= {"whole": fs.policies.whole(), "remat_whole": fs.policies.whole(fs.P("shard", remat=True))}


class Implicit(torch.autograd.Function):
    """As implicit layers have it: only backward runs the module."""

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


def run_in_backward(self: Any, x: Tensor) -> Any:
    h = self.inp(x)
    if self.kind == "implicit":
        return {"out": Implicit.apply(h, self.f)}
    params = dict(self.f.named_parameters())
    return {"out": Arguments.apply(h, self.f, [*params], *params.values())}


Net = module_class(
    "Net", lambda kind: {"kind": kind, "inp": nn.Linear(3, 3), "f": nn.Sequential(nn.Linear(3, 3), nn.Tanh())}, run_in_backward
)


def build(kind: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return Net(kind).double(), torch.randn(2, 3, dtype=torch.float64)


def refused(policy: str, way: str, *, skeleton: bool = False) -> None:
    model, x = build("implicit")
    spec, params = shards_of(POLICIES[policy], model)
    called = fs.skeleton(model) if skeleton else model
    words = r"'f\.0' runs in backward, after its functional_call, and would read"
    with unchanged(model), pytest.raises(RuntimeError, match=words):
        GRADIENTS[way](lambda p: fs.functional_call(called, p, x, spec=spec)["out"].square().mean())(params)
    gc.collect()
    assert not nn.modules.module._global_forward_pre_hooks
    called.f(x) if not skeleton else None


@at_most(1)
@pairs
@pytest.mark.parametrize("skeleton", [False, True], ids=["model", "skeleton"])
@every(policy=POLICIES, way=GRADIENTS)
def test_modules_that_run_in_backward_are_refused(policy: str, way: str, skeleton: bool) -> None:
    """By name, whoever runs backward; nothing is left in the model, nor in torch's hooks for all modules."""
    refused(policy, way, skeleton=skeleton)


@real_ranks(2)
def test_on_two_ranks_they_are_refused_or_arguments(rank: int) -> None:
    """Refused on every rank, which may go on; as arguments right."""
    refused("shard", "fs")
    test_parameters_as_arguments_are_right("shard")


@pytest.mark.parametrize("policy", [name for name in POLICIES if "remat" not in name])
def test_parameters_as_arguments_are_right(policy: str) -> None:
    """What the error says to write: the Function takes the parameters, and its backward torch.func.functional_call."""
    model, x = build("arguments")
    model(x)["out"].square().mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    spec, params = shards_of(POLICIES[policy], model)
    for way in ("fs", "backward"):
        grads = GRADIENTS[way](lambda p: fs.functional_call(model, p, x, spec=spec)["out"].square().mean())(params)
        torch.testing.assert_close(fs.unshard(grads, spec), want, **EXACT)


def test_modules_that_may_run_in_backward() -> None:
    """Those of a call with the model's own parameters read what was given; another model, and this one around the backward."""
    model, x = build("implicit")
    model(x)["out"].square().mean().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    out = fs.functional_call(model, dict(model.named_parameters()), x, spec=fs.by_type(nn.Linear)(model))["out"]
    out.square().mean().backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(got, want, **EXACT)
    model, x = build("arguments")
    teacher = nn.Linear(3, 3).double()
    spec = POLICIES["shard"](model)
    leaves = {key: p.requires_grad_() for key, p in fs.shard(model, spec).items()}
    out = fs.functional_call(model, leaves, x, spec=spec)["out"]
    out.register_hook(lambda g: g + teacher(x).detach())
    model(x)
    out.sum().backward()
    model(x)
