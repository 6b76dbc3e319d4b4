"""examples/mini.py is the package in small, without importing it: equal training, every transform, buffers that are freed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from depth import depth, mark_seldom
from ranks import launch, real_ranks
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

import funshard as fs

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))
import mini  # noqa: E402

Tree = dict[str, Tensor]
STEPS, BATCH, SEQ = depth(3, 20), 2, 8


def full_params(model: nn.Module) -> Tree:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("ranks", mark_seldom([1, 2], 2))
def test_script_learns(ranks: int) -> None:
    """A line every ten steps, with a loss that falls from about log(256)."""
    losses = [float(x) for x in re.findall(r"^step +\d+  loss ([\d.]+)$", launch(ranks, EXAMPLES / "mini.py"), re.MULTILINE)]
    assert len(losses) == 11
    assert 5.3 < losses[0] < 6.3
    assert losses[-1] < losses[0] - 2.5


def test_it_is_plain_torch() -> None:
    """Short, and without an import of the package."""
    text = (EXAMPLES / "mini.py").read_text()
    assert "import funshard" not in text
    assert len(text.splitlines()) <= 250


# --- training equals the package's ---
def gpt() -> nn.Module:
    """The example's model in float64, the same on every rank."""
    torch.manual_seed(0)
    return mini.GPT(layers=2, dim=12, heads=2, seq=SEQ).double()


def cross_entropy(call: Callable[[Tree, Tensor], Tensor]) -> Callable[[Tree, Tensor, Tensor], Tensor]:
    """The loss of a model that is called so."""
    return lambda slices, x, y: F.cross_entropy(call(slices, x).flatten(0, 1), y.flatten())


@real_ranks(2)
def test_training_equals_the_package(rank: int) -> None:
    """The same units; losses, gradients and parameters of each step of AdamW."""
    model = gpt()
    spec, fs_spec = mini.by_type(model, nn.TransformerEncoderLayer), fs.by_type(nn.TransformerEncoderLayer)(model)
    assert {unit: {*shapes} for unit, shapes in spec.items()} == {u.key: {p.name for p in u.params} for u in fs_spec}
    slices, params = mini.shard(full_params(model), spec), fs.shard(model, fs_spec)
    moments = {unit: (torch.zeros_like(x), torch.zeros_like(x)) for unit, x in slices.items()}
    init, update = fs.optim.from_torch(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
    state = init(params)
    model.to("meta")  # no parameter of the model's own is read
    loss = cross_entropy(lambda slices, x: mini.functional_call(model, slices, (x,), spec))
    fs_loss = cross_entropy(lambda params, x: fs.functional_call(model, params, (x,), spec=fs_spec))
    torch.manual_seed(1 + rank)
    for step, tokens in enumerate(torch.randint(256, (STEPS, BATCH, SEQ + 1)), start=1):
        grads, value = mini.grad_and_value(loss)(slices, tokens[:, :-1], tokens[:, 1:])
        fs_grads, fs_value = fs.grad_and_value(fs_loss)(params, tokens[:, :-1], tokens[:, 1:])
        slices, moments = mini.adamw(grads, moments, slices, step)
        params, state = update(fs_grads, state, params)
        for tree, fs_tree in ((grads, fs_grads), (slices, params)):
            torch.testing.assert_close(mini.unshard(tree, spec), fs.unshard(fs_tree, fs_spec), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(value, fs_value, rtol=1e-12, atol=1e-12)


# --- the gather under torch.func: every order, every transform ---
def mlp() -> nn.Module:
    """A model that has derivatives of every order, with padding in each unit."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def dot(a: Tree, b: Tree) -> Tensor:
    return torch.stack([(a[key] * b[key]).sum() for key in a]).sum()


def hvp(f: Callable[..., Tensor], t: Tree, v: Tree, x: Tensor) -> Tree:
    return grad(lambda t: dot(grad(f)(t, x), v))(t)


DERIVATIVES: dict[str, Callable[[Callable[..., Tensor], Tree, Tree, Tensor], Tree]] = {
    "grad": lambda f, t, v, x: grad(f)(t, x),
    "vjp": lambda f, t, v, x: vjp(lambda t: f(t, x), t)[1](torch.tensor(2.0).double())[0],
    "grad of grad": hvp,
    "jvp of grad": lambda f, t, v, x: jvp(lambda t: grad(f)(t, x), (t,), (v,))[1],
    "gradient penalty": lambda f, t, v, x: grad(lambda t: f(t, x) + dot(g := grad(f)(t, x), g))(t),
    "third order": lambda f, t, v, x: grad(lambda t: dot(hvp(f, t, v, x), v))(t),
    "vmap over samples": lambda f, t, v, x: vmap(grad(f), (None, 0))(t, x),
    "vmap over models": lambda f, t, v, x: vmap(grad(f), (0, None))({k: torch.stack([t[k], v[k]], 0) for k in t}, x),
    "vmap of hvp": lambda f, t, v, x: vmap(lambda x: hvp(f, t, v, x))(x),
}


@real_ranks(2)
def test_derivatives_are_those_of_the_mean_loss(rank: int) -> None:
    """The law of gradients: derive(loss)(shard(t)) == shard(derive(mean of losses)(t)), of every order, batched and not."""
    model = mlp()
    spec, t = mini.by_type(model, nn.Linear), full_params(model)
    v = {name: torch.randn_like(x) for name, x in t.items()}
    xs = torch.randn(4, 2, 3).double()  # samples of 2 ranks, the same numbers on both

    def mean_loss(t: Tree, xs: Tensor) -> Tensor:
        return torch.func.functional_call(model, t, (xs,)).square().mean()

    def loss(slices: Tree, x: Tensor) -> Tensor:
        return mini.functional_call(model, slices, (x,), spec, reshard=False).square().mean()

    for name, derive in DERIVATIVES.items():
        found = derive(loss, mini.shard(t, spec), mini.shard(v, spec), xs[:, rank])
        want = derive(mean_loss, t, v, xs)
        vmapped = name.startswith("vmap")
        sharded = vmap(lambda t: mini.shard(t, spec))(want) if vmapped else mini.shard(want, spec)
        torch.testing.assert_close(found, sharded, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


# --- a unit's life ---
