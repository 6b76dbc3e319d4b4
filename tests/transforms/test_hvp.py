"""fs.hvp both ways: reverse over reverse is exact on shards, and taken where torch has no forward-mode rule."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from depth import at_most, each, every, pairs, some
from fuzz_modules import PIECES
from models import autograd_function, module_class, refused
from parity import leaves_of, shards_of, squares, strategies
from ranks import real_ranks
from torch import Tensor, nn
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import funshard as fs
from funshard import P
from funshard._transforms.error_hints import add_hints, find_hint, is_forward_rule_missing
from funshard._transforms.products import ggnvp

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
Block = module_class(
    "Block", lambda cube: {"linear": nn.Linear(4, 4), "cube": cube}, lambda self, x: x + self.cube(torch.tanh(self.linear(x)))
)
Cube = autograd_function(lambda x: x**3, lambda grad, x: grad * 3 * x**2)
"""Differentiable in reverse at every order, without a forward-mode rule."""


def network(cube: Callable[[Tensor], Tensor] = Cube.apply) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), Block(cube), Block(cube), nn.Linear(4, 2)).double()


MODEL, PLAIN = network(), network(lambda x: x**3)
FULL = {name: p.detach() for name, p in MODEL.named_parameters()}
V = {name: p.cos() for name, p in FULL.items()}
X = torch.randn(4, 5, 3, dtype=torch.float64)


def reference(params: fs.Params) -> Tensor:
    """The mean loss of all ranks, by torch alone; and a penalty on all of the parameters."""
    out = torch.func.functional_call(PLAIN, params, (X.flatten(0, 1),))
    return out.square().mean() + sum((p**4).sum() for p in params.values())


HV = jvp(grad(reference), (FULL,), (V,))[1]
HIGHER = grad(lambda p: squares(jvp(grad(reference), (p,), (V,))[1]))(FULL)
POLICIES = {name: fs.by_type(Block, p=p) for name, p in strategies("shard", "keep", "remat").items()}
POLICIES |= {"always": fs.policies.always(), "replicated": fs.policies.always(P())}
POLICIES["sent"] = fs.policies.always(P("shard", precision=fs.Precision(codec=fs.Codec(lambda x: (x / 2, x / 2), torch.add))))
PRODUCTS: dict[str, tuple[Callable[..., fs.Params], fs.Params]] = {
    "as there are rules": (fs.hvp, HV),
    "reverse": (lambda f, p, v: fs.hvp(f, p, v, forward=False), HV),
    "its gradient": (lambda f, p, v: fs.grad(lambda p: squares(fs.hvp(f, p, v)))(p), HIGHER),
}
"""H v in both ways that there are, and the gradient of its squares; with what they are."""
THIRD = {
    "fs.hvp": lambda f, p, v: fs.hvp(f, p, v, forward=True),
    "jvp of hvp": lambda f, p, v: jvp(lambda p: fs.hvp(f, p, v, forward=True), (p,), (v,))[1],
    "grad of jvp of jvp": lambda f, p, v: grad(lambda p: jvp(lambda p: jvp(f, (p,), (v,))[1], (p,), (v,))[1])(p),
}
MSE = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def product(name: str, spec: fs.PartitionSpec, x: Tensor) -> fs.Params:
    def loss(params: fs.Params) -> Tensor:
        penalty = sum((p**4).sum() for p in params.values())  # of shards: it counts with its sum
        return fs.functional_call(MODEL, params, x, spec=spec).square().mean() + penalty

    return PRODUCTS[name][0](loss, fs.shard(FULL, spec), fs.shard(V, spec))


@real_ranks(2)
def test_reverse_over_reverse_on_real_ranks(rank: int) -> None:
    """With units freed and gathered again, beside the plain model's; where torch has no forward-mode rule, and asked for."""
    for policy, name in some(itertools.product(POLICIES, PRODUCTS), 1):
        spec = POLICIES[policy](MODEL).bound
        x = X.unflatten(0, (2, -1))[rank].flatten(0, 1)
        want = fs.shard(PRODUCTS[name][1], spec)
        assert_close(product(name, spec, x), want, **CLOSE, msg=lambda m, what=(policy, name): f"{what}: {m}")


@at_most(1)
@each(remat=[False, True], axis=["shard", "replicate", ("shard", "replicate"), None], transform=THIRD)
def test_codecs_on_simulated_meshes(transform: str, axis: Any, remat: bool) -> None:
    """Tangents of what was sent, also where all ranks of an axis have the same shards."""
    policy = fs.by_type(nn.Linear, p=P(axis, precision=POLICIES["sent"](PLAIN).by_path["0"].precision, remat=remat))

    def rank(mesh: Any, x: Tensor) -> fs.Params:
        spec = policy(PLAIN).on(mesh)
        f = lambda p: fs.functional_call(PLAIN, p, x, spec=spec).square().mean() + sum((q**4).sum() for q in p.values())  # noqa: E731
        return THIRD[transform](f, fs.shard(FULL, spec), fs.shard(V, spec))

    sizes = {"replicate": 2, "shard": 2}
    got, want = fs.testing.spmd(rank, sizes)(X), THIRD[transform](reference, FULL, V)
    for r in range(4):
        assert_close({key: h[r] for key, h in got.items()}, fs.shard(want, policy(PLAIN).on(sizes), rank=r), **CLOSE)


def test_complex_parameters_and_several_dtypes() -> None:
    params = {"z": torch.randn(3, dtype=torch.complex128), "x": torch.randn(3, dtype=torch.float64), "h": torch.randn(3)}
    v = {k: torch.randn_like(p) for k, p in params.items()}

    def f(p: fs.Params) -> Tensor:
        return ((p["z"] ** 2 * p["x"]).real + p["z"].abs() ** 4 + p["h"] ** 3).sum()

    assert_close(fs.hvp(f, params, v, forward=False), fs.hvp(f, params, v, forward=True), rtol=1e-5, atol=1e-5)


def test_forward_is_as_it_is_asked_for() -> None:
    """True never runs f again, False never in forward mode, and other errors are nobody's to try again."""
    x, runs = {"x": torch.tensor([1.0, 2.0])}, []

    def f(p: fs.Params) -> Tensor:
        runs.append(torch.autograd.forward_ad._current_level)
        return Cube.apply(p["x"]).sum()

    assert_close(fs.hvp(f, x, x, forward=False), {"x": torch.tensor([6.0, 24.0])})
    assert runs == [-1]
    assert_close(fs.hvp(f, x, x), {"x": torch.tensor([6.0, 24.0])})
    assert runs == [-1, 0, -1]
    refused(NotImplementedError, "jvp function for custom", lambda: fs.hvp(f, x, x, forward=True))
    assert runs == [-1, 0, -1, 0]

    def unfinished(p: fs.Params) -> Tensor:
        runs.append(9)
        raise NotImplementedError("of the user's own")

    with pytest.raises(NotImplementedError, match="of the user's own") as error:
        fs.hvp(unfinished, x, x)
    assert runs[4:] == [9]
    assert find_hint(error.value) == ""


def attend(self: Any, x: Tensor) -> Tensor:
    q = self.linear(x)[None, None]
    return F.scaled_dot_product_attention(q, q, q)[0, 0]


Attention = module_class("Attention", lambda: {"linear": nn.Linear(4, 4)}, attend)


def text(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_fused_attention_says_what_to_do() -> None:
    """torch's errors, with the module where it is known; in the context that it names all of it is there."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"self": Attention()})["self"]), torch.randn(3, 4)
    spec, shards = shards_of(fs.by_type(Attention), model)

    def loss(params: fs.Params) -> Tensor:
        return fs.functional_call(model, params, x, spec=spec).sin().sum()

    named = r"funshard: module '1': torch's fused attention .* call it under funshard\.transforms_attention\(\), .*MATH\)"
    unnamed = named.replace("module '1': ", "")
    ways: list[tuple[Callable[[], Any], str]] = [
        (lambda: fs.hvp(loss, shards, shards), unnamed),
        (lambda: fs.hvp(loss, shards, shards, forward=True), named),
        (lambda: jvp(loss, (shards,), (shards,)), named),
        (lambda: ggnvp(lambda p: fs.functional_call(model, p, x, spec=spec), lambda y: y.sin().sum(), shards, shards), unnamed),
        (lambda: fs.grad(lambda p: sum((g**2).sum() for g in fs.grad(loss)(p).values()))(shards), unnamed),
    ]
    for way, wanted in ways:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match=r"_flash_attention") as error:
            way()
        assert len(re.findall(wanted, text(error.value))) == 1, text(error.value)
        with fs.transforms_attention():
            way()


def test_what_has_no_forward_mode_rule() -> None:
    """What torch says of an operator and of a Function, which the note and the second way of hvp go by."""
    with pytest.raises(NotImplementedError) as function:
        jvp(Cube.apply, (X,), (X,))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(NotImplementedError) as operator:
        jvp(lambda q: F.scaled_dot_product_attention(q, q, q), (X[None],), (X[None],))
    assert is_forward_rule_missing(function.value)
    assert is_forward_rule_missing(operator.value)
    assert "no forward-mode rule for autograd.Function: a gradient of a gradient" in text(add_hints(function.value))
    for other in (NotImplementedError("not yet"), RuntimeError("forward AD with x that"), ValueError("no")):
        assert not is_forward_rule_missing(other)
        assert text(add_hints(other)) in ("not yet", text(other))


def test_mse_loss() -> None:
    """torch's own jvp of grad fails there, with these words; None takes the other form, and True says which."""
    x, full = torch.randn(5, 4).double(), {name: tensor.detach() for name, tensor in MSE.named_parameters()}
    v = {name: tensor.cos() for name, tensor in full.items()}

    def loss(params: fs.Params) -> Tensor:
        return F.mse_loss(torch.func.functional_call(MSE, params, (x,)), torch.zeros(5, 2).double())

    with pytest.raises(RuntimeError, match=r"^ZeroTensors are immutable") as error:
        jvp(torch.func.grad(loss), (full,), (v,))
    assert is_forward_rule_missing(error.value)
    want = jvp(torch.func.grad(lambda q: torch.func.functional_call(MSE, q, (x,)).square().mean()), (full,), (v,))[1]
    spec, shards = shards_of(fs.by_type(nn.Linear, p=P("shard", remat=True)), MSE)
    direction = fs.shard(v, spec)

    def sharded(params: fs.Params) -> Tensor:
        return F.mse_loss(fs.functional_call(MSE, params, (x,), spec=spec), torch.zeros(5, 2).double())

    assert_close(fs.unshard(fs.hvp(sharded, shards, direction), spec), want)
    with pytest.raises(RuntimeError, match=r"^ZeroTensors") as error:
        fs.hvp(sharded, shards, direction, forward=True)
    assert "no forward-mode rule for an operator, such as F.mse_loss: a gradient of a gradient may do" in text(error.value)


class Constants(nn.Module):
    """What it computes without gradients divides what it gives."""

    def __init__(self, constant: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.constant = nn.Linear(4, 4), nn.Linear(4, 4), constant
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(x)))
        with torch.no_grad():
            n = self.constant(self, h)
        return (h.sin() / (n + 3)).sum()


CONSTANTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "view": lambda m, h: h[0],
    "view of a weight": lambda m, h: m.a.weight.t()[0],
    "in place": lambda m, h: torch.ones(4).double().mul_(h.mean(0)),
    "in place of what is differentiated": lambda m, h: h.mul_(2).detach().mean() * 0,
    "buffer": lambda m, h: m.mean.copy_(h.mean(0)),
}


@at_most(11)
@pairs
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@every(p=[P("shard"), P("shard", reshard=False), P("shard", remat=True)], what=CONSTANTS)
def test_no_grad_in_forward(what: str, p: P, remat: bool) -> None:
    """As for a gradient of a gradient, also where the caller wants none himself; torch's own jvp differentiates it."""
    torch.manual_seed(0)
    model = Constants(CONSTANTS[what]).double()
    (spec, params), x = shards_of(fs.policies.always(p), model), torch.randn(3, 4).double()
    v = {key: torch.linspace(-1, 1, shard.numel()).double() for key, shard in params.items()}

    def loss(params: fs.Params) -> Tensor:
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return fs.functional_call(model, params, (x,), spec=spec, buffers=buffers)

    f = fs.remat(loss) if remat else loss
    expected = fs.hvp(loss, params, v, forward=False)
    torch.testing.assert_close(fs.hvp(f, params, v), expected)
    with torch.no_grad():
        got = fs.hvp(f, {key: shard.clone().requires_grad_() for key, shard in params.items()}, v)
    torch.testing.assert_close(got, expected)
    assert not any(x.requires_grad for x in got.values())


def test_a_function_that_torch_func_does_not_take_is_named() -> None:
    """And the way out works: double backward in plain autograd."""
    model, x = nn.Sequential(PIECES["CustomOld"]()).double(), torch.randn(4, 4).double()
    spec, params = shards_of(fs.by_type(nn.Linear), model)
    loss = lambda p, x: fs.functional_call(model, p, (x,), spec=spec).pow(4).sum()  # noqa: E731
    by_sample = functools.partial(fs.per_sample_grads, loss, params, (x,), spec=spec)
    for call in (lambda: fs.hvp(lambda p: loss(p, x), params, params), by_sample):
        with pytest.raises(RuntimeError, match="setup_context") as error:
            call()
        assert re.search(r"module '0': '\w*OldProduct' is an autograd.Function without .*create_graph=True", text(error.value))
    leaf = leaves_of(params)
    grads = torch.autograd.grad(loss(leaf, x), [*leaf.values()], create_graph=True)
    got = torch.autograd.grad(grads, [*leaf.values()], [*params.values()])
    full = {name: t.detach() for name, t in model.named_parameters()}
    expected = fs.hvp(lambda p: F.linear(x, p["0.l.weight"], p["0.l.bias"]).pow(4).sum(), full, full)
    assert_close(dict(zip(leaf, got, strict=True)), dict(fs.shard(expected, spec)))
